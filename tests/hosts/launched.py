"""What the tests of hosts share: the variables that a launcher sets, and replicas to compare with."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8compile
from tests.support.harness import scaling_tensors
from tests.support.processes import on_ranks


def launched(rank: int) -> None:
    """Set what torchrun sets. The process group exists already."""
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": dist.get_world_size(),
        "LOCAL_WORLD_SIZE": dist.get_world_size(),
    }
    os.environ.update(
        {name: str(number) for name, number in names.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"
    )


def as_on_gpus() -> None:
    """Accelerate shards nothing between processes of a CPU: tell it that these are GPUs, each time that it
    looks."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    original = PartialState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    PartialState.__init__ = init


def on_two_ranks(folder: Path, work: Callable[[int, str], Any]) -> tuple[Path, list[Any]]:
    """`folder`, and what `work(rank, folder)` returns on two ranks. Hosts change their process for good."""
    return folder, on_ranks(2, work, str(folder), once=True)


Tensors = Mapping[str, Tensor]


def check_weights(found: Tensors, expected: Tensors, atol: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name], x, rtol=0.0, atol=atol, msg=lambda said, name=name: f"{name}: {said}"
        )


def check_gradients(found: Sequence[Tensors], expected: Sequence[Tensors], steps: int, count: int) -> None:
    """Of each step, `count` parameters, bitwise."""
    assert [len(got) for got in found] == [count] * steps
    for got, wanted in zip(found, expected, strict=True):
        check_weights(got, wanted)


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of a tensor, sharded or not."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By the name that the user gave to the parameter: that of the model without wrappers."""
    wrappers = ("_orig_mod.", "_checkpoint_wrapped_module.", "module.")
    found = {}
    for name, p in model.named_parameters():
        for wrapper in wrappers:
            name = name.replace(wrapper, "")
        found[name] = whole(p.grad)
    return found


def average(model: nn.Module) -> None:
    """The gradients of a replica, over the ranks: as FSDP2 adds them up."""
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def facts(model: nn.Module) -> dict[str, Any]:
    """`rows`: (module, gemm, decision) of every matmul in FP8 or not, sorted. `graphs`: the names of those
    with matmuls. `state`: the names of the scaling state. `outside`: the parameters of no graph."""
    report = fp8compile.report(model)
    return {
        "rows": sorted((m.fqn, m.gemm, m.decision) for m in report.matmuls),
        "graphs": [graph.name for graph in report.graphs if graph.matmuls],
        "state": sorted(scaling_tensors(model)),
        "outside": [record.parameter for record in report.outside],
    }
