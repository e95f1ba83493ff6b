"""The parallel part of train_gpt.py: one training run on several processes, which torchrun starts.

    ddp    a replica of the model in each process; DDP averages the gradients
    fsdp   each process keeps a part of every parameter and gathers a block when it is needed (FSDP2)
    tp     each process computes a part of every linear of the blocks; embeddings, norms and head are whole

With ddp and fsdp, each process takes an equal part of every batch. So the processes together see the data of
one process, and the mean of their losses is the loss of one process. With tp, every process sees the whole
batch. Weights are drawn from the same seed everywhere. Nothing in this file knows of FP8.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

KINDS = ("ddp", "fsdp", "tp")
START = "torchrun --nproc-per-node 2 examples/train_gpt.py --parallel"


@dataclass(frozen=True)
class Processes:
    """The processes of a run; this one is number `rank` of `count`. `kind` is one of KINDS, or "" for a
    process of its own."""

    kind: str = ""
    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank == 0

    @property
    def note(self) -> str:
        return f", {self.kind} on {self.count} processes ({dist.get_backend()})" if self.kind else ""

    def distribute(self, model: nn.Module, device: str) -> tuple[nn.Module, list[nn.Module]]:
        """Make the model parallel, in place. Returns the module to call, and the modules to compile.

        FSDP2's hooks break a graph, so that each block is compiled on its own. The rest of the model then
        runs as it is.
        """
        if self.kind == "ddp":
            replica = nn.parallel.DistributedDataParallel(model)
            return replica, [replica]
        if self.kind == "fsdp":
            from torch.distributed.fsdp import fully_shard

            mesh = dist.device_mesh.init_device_mesh(device, (self.count,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return model, list(model.blocks)
        if self.kind == "tp":
            self._split_linears(model, device)
        return model, [model]

    def _split_linears(self, model: nn.Module, device: str) -> None:
        """Attention's heads and the MLP's hidden features are divided among the processes. The second linear
        of either adds the parts up by an all-reduce."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = dist.device_mesh.init_device_mesh(device, (self.count,))
        first, second = ColwiseParallel(), RowwiseParallel()
        plan = {"attn.qkv": first, "attn.proj": second, "mlp.up": first, "mlp.down": second}
        for block in model.blocks:
            with torch.no_grad():  # so that the rows of one process are q, k and v of the same heads
                for parameter in block.attn.qkv.parameters():
                    parameter.copy_(parameter.unflatten(0, (3, self.count, -1)).transpose(0, 1).flatten(0, 2))
            parallelize_module(block, mesh, plan)

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The state_dict of the model as one process would have it. A collective call."""
        state = {name: _whole(tensor) for name, tensor in model.state_dict().items()}
        if self.kind == "tp":
            for name, tensor in state.items():
                if ".qkv." in name:
                    state[name] = tensor.unflatten(0, (self.count, 3, -1)).transpose(0, 1).flatten(0, 2)
        return state

    def part(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The sequences of a batch that this process computes."""
        if self.kind not in ("ddp", "fsdp"):
            return batch
        inputs, targets = (tensor.chunk(self.count)[self.rank] for tensor in batch)
        return inputs, targets

    def mean(self, loss: Tensor) -> Tensor:
        """The mean of a loss over the processes; each has the same number of sequences."""
        if self.kind not in ("ddp", "fsdp"):
            return loss
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / self.count

    def clip_gradients(self, parameters: Iterable[Tensor], most: float) -> None:
        """`nn.utils.clip_grad_norm_`; with tp, over parameters that are split and parameters that are
        whole."""
        if self.kind != "tp":
            nn.utils.clip_grad_norm_(parameters, most)
            return
        groups = alike(parameters)
        norms = [
            _whole(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])) for group in groups
        ]
        norm = torch.stack(norms).norm()
        for group in groups:
            nn.utils.clip_grads_with_norm_(group, most, norm)

    def finish(self) -> None:
        """Wait for all processes. A process that ends at once after a collective can abort: gloo's thread may
        still hold the collective's tensor, and cannot free it when Python is gone."""
        if self.kind:
            dist.barrier()
            dist.destroy_process_group()


def alike(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """The parameters that are split, and the others: one operator cannot take both. No list is empty."""
    groups: dict[bool, list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(hasattr(parameter, "full_tensor"), []).append(parameter)
    return list(groups.values())


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def start(
    kind: str | None, *, heads: int, batch_size: int, device: str, error: Callable[[str], NoReturn]
) -> Processes:
    """Join the processes that torchrun started. Wrong use calls `error` with one line."""
    count, rank, local = (int(os.environ.get(name, 0)) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    if kind is None:
        if count > 1:
            error(
                f"torchrun started {count} processes: say how they share the work, "
                f"--parallel {'|'.join(KINDS)}"
            )
        return Processes()
    if count == 0:
        error(f"--parallel {kind} needs torchrun: {START} {kind}")
    if count == 1:
        error(
            f"--parallel {kind} on one process has nothing to share: "
            f"leave it out, or start more: {START} {kind}"
        )
    if kind == "tp" and heads % count:
        error(f"--parallel tp: {count} processes cannot divide {heads} heads equally")
    if kind != "tp" and batch_size % count:
        error(
            f"--parallel {kind}: {count} processes cannot divide a batch of {batch_size} equally; "
            "give another --batch-size"
        )
    if device == "cuda":
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", count)), torch.cuda.device_count()
        if here > gpus:
            error(f"--parallel {kind}: {here} processes on this machine, but torch sees {gpus} GPUs")
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return Processes(kind, rank, count)


def leave_it_to_the_first(status: int) -> None:
    """Before an error that all processes meet: the first returns and says it, the others wait and exit."""
    if int(os.environ.get("RANK", 0)) != 0:
        # torchrun ends all processes as soon as one has failed, which has to be the one that says why
        time.sleep(10)
        sys.exit(status)
