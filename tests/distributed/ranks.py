"""Trainings on several ranks, compared in pairs: how a model is parallel, and what a training shows."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import fp8compile
from fp8compile.distributed import compress_gradients, fp8_all_gather
from tests.equivalence.protocols import Run
from tests.support import hooks
from tests.support.harness import grads_of, scaling_tensors
from tests.support.models import Gated, ResidualMlp

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Net(nn.Module):
    """Two blocks, a norm and a projection."""

    def __init__(self, block: Callable[[], nn.Module] = ResidualMlp, width: int = 128) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


class Adapted(nn.Module):
    """An MLP of frozen linears with a residual, each with a trained update of this rank."""

    def __init__(self, rank: int = 8) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(*sizes, bias=False).requires_grad_(False) for sizes in ((128, 256), (256, 128))
        )
        self.a, self.b = nn.Linear(128, rank, bias=False), nn.Linear(rank, 256, bias=False)
        self.c, self.d = nn.Linear(256, rank, bias=False), nn.Linear(rank, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = (self.up(x) + self.b(self.a(x))).relu()
        return x + self.down(h) + self.d(self.c(h))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "adapted": lambda: Net(Adapted),
    "adapted over buckets": lambda: Net(lambda: Adapted(1024)),
    "mlps": Net,
    "gated": lambda: Net(Gated),
    "gated block": Gated,
    "square": lambda: Net(lambda: ResidualMlp(256, 256), 256),
    "wide": lambda: Net(lambda: ResidualMlp(256, 384), 256),
    "odd": lambda: Net(lambda: ResidualMlp(208, 336), 208),
    "over buckets": lambda: Net(lambda: ResidualMlp(256, 1024), 256),  # DDP's smallest bucket has 1 MiB
}
WIDTHS = {"square": 256, "wide": 256, "odd": 208, "over buckets": 256}


def build(model: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model]()


# -- how a model is parallel --


@dataclass(frozen=True)
class Way:
    """`kind`: "one" device; "replica", whose gradients are averaged; "ddp", "fsdp", "fsdp1", "tp", "fsdp x
    tp", "context" (each rank has a part of the tokens, and gradients are added up), "sequence" (tensor and
    sequence parallel) or "simple fsdp". `compiled`: the blocks "before" they are
    sharded, "after" it, or "wrapped"; the root "whole" or "around"; or "not". `mesh`: FSDP's; of two
    dimensions, it shards over the second one."""

    kind: str = "fsdp"
    options: dict[str, Any] = field(default_factory=dict)
    compiled: str = "before"
    mesh: tuple[int, ...] = ()
    reshard: bool | int | None = None
    checkpoint: str = ""  # "inside" of what is compiled; "outside"; or "around" what is sharded
    dtype: torch.dtype = torch.float32  # of the model, but for "fsdp", which gathers it
    gather: bool = False  # by fp8_all_gather
    compress: bool = False
    skip: str = ""  # passes
    dim: int = 0  # along which "simple fsdp" shards
    adam: dict[str, Any] | None = None
    same: bool = False  # batches on all ranks


class Gathered(nn.Module):
    """torchtitan's "simple FSDP": a parametrization that gathers a weight in the graph."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Any) -> Tensor:
        return (
            x.to(self.dtype).redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
        )


def tensor_parallel(block: nn.Module, mesh: Any, sequence: bool = False) -> None:
    """Column and row parallel MLPs. `sequence`: between them, activations are sharded by tokens."""
    if isinstance(block, Adapted):
        up, down = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
        parallelize_module(block, mesh, {"up": up, "down": down})
        return
    if not isinstance(block, Gated):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return
    plan: dict[str, Any] = {
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    if sequence:
        split = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        down = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        plan |= {"norm": SequenceParallel(), "mlp": split, "mlp.down": down}
    parallelize_module(block, mesh, plan)


def local(x: Any) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def sharded(model: Any, way: Way, mesh: Any) -> Callable[..., Tensor]:
    """What a trainer does to a model: checkpointing, compiling and sharding, in this order."""
    how: dict[str, Any] = {"backend": "fp8", "options": way.options}
    dp = None if mesh is None else mesh["dp"] if "tp" in mesh.mesh_dim_names else mesh
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shards: dict[str, Any] = {} if dp is None else {"mesh": dp}
    shards |= {} if way.dtype == torch.float32 else {"mp_policy": policy}
    for i, block in enumerate(model.blocks):
        if way.kind == "fsdp x tp":
            tensor_parallel(block, mesh["tp"])
        inner = block
        if way.checkpoint == "inside":
            block.mlp = checkpoint_wrapper(block.mlp)
        if way.checkpoint == "outside":
            block = model.blocks[i] = checkpoint_wrapper(block)
        if way.compiled == "before":
            inner.compile(fullgraph=way.checkpoint != "inside", **how)
        if way.kind == "fsdp1":
            block = model.blocks[i] = flat(block, way, dp)
        elif way.kind != "replica":
            fully_shard(block, reshard_after_forward=way.reshard, **shards)
        if way.checkpoint == "around":
            model.blocks[i] = checkpoint_wrapper(block)
        if way.compiled == "after":
            inner.compile(**how)
        if way.compiled == "wrapped":
            model.blocks[i] = torch.compile(block, **how)
    if way.kind == "fsdp1":
        model = flat(model, way, dp)
    elif way.kind != "replica":
        fully_shard(model, **shards)
    if way.gather:
        fp8_all_gather(model)
    if way.compiled == "whole":
        model.compile(**how)
    return torch.compile(model, **how) if way.compiled == "around" else model


def flat(module: nn.Module, way: Way, mesh: Any) -> nn.Module:
    """A module in FSDP1."""
    strategy = "HYBRID_SHARD" if mesh is not None and mesh.ndim == 2 else "FULL_SHARD"
    policy = MixedPrecision(param_dtype=way.dtype, reduce_dtype=torch.float32)
    return FullyShardedDataParallel(
        module,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy["SHARD_GRAD_OP" if way.reshard is False else strategy],
        device_mesh=mesh,
        mixed_precision=None if way.dtype == torch.float32 else policy,
        use_orig_params=True,
    )


def parallel(model: Any, way: Way) -> tuple[Callable[..., Tensor], int]:
    """What to call, and which batches this rank gets."""
    rank, ranks, how = dist.get_rank(), dist.get_world_size(), {"backend": "fp8", "options": way.options}
    if way.kind in ("fsdp", "fsdp1", "fsdp x tp", "replica"):
        names = ("dp", "tp") if way.kind == "fsdp x tp" else ("replicate", "shard")[-len(way.mesh) :]
        meshed = way.mesh and way.kind != "replica"
        mesh = init_device_mesh("cpu", way.mesh, mesh_dim_names=names) if meshed else None
        data = mesh.get_local_rank("dp") if way.kind == "fsdp x tp" else rank  # type: ignore[union-attr]
        call, root = sharded(model, way, mesh), model  # FSDP1 wraps it
    elif way.kind == "ddp":
        if way.compiled == "wrapped":
            sharded(model, replace(way, kind="replica"), None)
        root, data = DistributedDataParallel(model, bucket_cap_mb=1), rank
        call = torch.compile(root, **how) if way.compiled == "before" else root
    else:
        name, data = ("dp", rank) if way.kind == "simple fsdp" else ("tp", 0)
        mesh, root = init_device_mesh("cpu", (ranks,), mesh_dim_names=(name,)), model
        if way.kind == "simple fsdp":
            for module in list(model.modules()):
                for name, p in list(module.named_parameters(recurse=False)):
                    where = [Shard(way.dim if p.dim() > 1 else 0)]
                    module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, where)))
                    parametrize.register_parametrization(module, name, Gathered(way.dtype), unsafe=True)
        for block in model.blocks if isinstance(model, Net) else [model]:
            if way.kind in ("tp", "sequence"):
                tensor_parallel(block, mesh, way.kind == "sequence")
            if way.compiled != "not":
                block.compile(**how)
        call = model
        if way.kind == "context":
            model.attention.parallel = True
            call = lambda x: model(x.chunk(ranks, 1)[rank].contiguous())  # noqa: E731
        if way.kind == "sequence":
            call = lambda x: local(model(DTensor.from_local(x.chunk(ranks, 1)[rank], mesh, [Shard(1)])))  # noqa: E731
    if way.compress:
        compress_gradients(root)
    return call, 0 if way.same else data


# -- what is watched --


def all_gathers() -> contextlib.AbstractContextManager[list[int]]:
    """The bytes that this rank puts into each all-gather of FSDP2."""

    def sent(done: Any, self: Any, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> int:
        return input_tensor.nbytes

    return hooks.noting(DefaultAllGather, "__call__", sent)


def all_reduces() -> contextlib.AbstractContextManager[list[int]]:
    """The sizes of all-reduces."""
    return hooks.noting(dist, "all_reduce", lambda done, tensor, *_, **__: tensor.numel())


def gathered(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Parameter -> how FSDP2 gathers it, and why not in FP8."""
    return {record.parameter: (record.dtype, record.reason) for record in fp8compile.report(model).gathered}


PHASES = {"H": "bf16", "F": "fp8", "S": None}
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module.")
WRAPPERS += ("parametrizations.", ".original")


def averaged(gradient: Tensor, mesh: tuple[int, ...]) -> Tensor:
    """The mean over all ranks, added up as FSDP2 does: inside of a shard group, then over the groups."""
    every = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(every, gradient)
    if len(mesh) < 2:
        return torch.stack(every).sum(0) / len(every)
    return torch.stack(every).view(*mesh, *gradient.shape).sum(1).sum(0) / len(every)


@dataclass
class OnRanks(Run):
    """A training on this rank, by a protocol of tests/equivalence, and with these events:

    a   a forward and a backward whose gradients are not reduced yet
    w   weights are written to by hand, through `.data`
    B   a bad batch on the last rank alone; no gradient is used
    x   forwards that have no backward get none
    A   load_state_dict(assign=True)
    M   the tensors of shards are other ones, as after `Module.to`
    G   weights are written to by hand, and `fp8_all_gather` hears of it
    H F S   the phase is set: high precision, FP8, or that of the schedule
    """

    way: Way = field(default_factory=Way)
    width: int = 128
    data: int = 0
    # of each word of the protocol, what was sent and said
    words: list[dict[str, Any]] = field(default_factory=list)
    alive: int = 0  # bytes of FP8 weights that are kept for a backward
    held: int = 0  # bytes of weights of any dtype
    lr: float = 1e-2

    def start(self) -> None:
        self.call, self.data = parallel(self.model, self.way)
        if self.way.kind == "fsdp1":
            self.model = getattr(self.call, "_orig_mod", self.call)
        adam = self.way.adam
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        make = torch.optim.SGD if adam is None else torch.optim.AdamW
        self.steps = make(parameters, lr=self.lr, **(adam or {"foreach": False}))

    def keep(self, kind: str, tensors: dict[str, Any]) -> None:
        if self.way.kind == "fsdp1":  # parts of them, until all ranks put them together
            with FullyShardedDataParallel.summon_full_params(self.model, with_grads=kind == "gradient"):
                named = {
                    name: p.grad if kind == "gradient" else p for name, p in self.model.named_parameters()
                }
                if kind in ("gradient", "weight"):
                    tensors = {name: x.clone() for name, x in {**tensors, **named}.items()}
        super().keep(kind, {plain(name): whole(x) for name, x in tensors.items()})

    def events(self, protocol: str) -> None:
        own: dict[str, Callable[[], None]] = {
            "a": self.accumulate, "w": self.write, "B": self.bad_on_one, "x": self.open.clear,
            "A": self.assign, "M": self.move, "G": self.write_and_tell, "N": self.without_optimizer,
        }  # fmt: skip
        for word in protocol.split():
            self.alive = self.held = 0
            with all_gathers() as sent, all_reduces() as reduced:
                for event in word:
                    if event in PHASES:
                        fp8compile.set_precision(PHASES[event], self.model)  # type: ignore[arg-type]
                    elif event in own:
                        own[event]()
                    else:
                        super().events(event)
            word = {"sent": sum(sent), "reduced": len(reduced), "alive": self.alive, "held": self.held}
            self.words.append({**word, "said": gathered(self.model)})

    def without_optimizer(self) -> None:
        """No optimizer has the weights: none says when a step ends."""
        self.steps = None  # type: ignore[assignment]
        gc.collect()

    def batch(self, scale: float = 1.0) -> Tensor:
        self.batches += 1
        x = self.noise(*self.size, self.width, seed=10 * self.batches + self.data, scale=scale)
        return x.to(torch.float32 if self.way.kind.startswith("fsdp") else self.way.dtype).requires_grad_()

    def forward(self, scale: float = 1.0, call: Callable[..., Tensor] | None = None) -> None:
        kept: list[tuple[bool, torch.UntypedStorage]] = []

        def pack(x: Tensor) -> Tensor:
            if x.numel() >= 128 * 256:
                kept.append((x.dtype in FP8, x.untyped_storage()))
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            super().forward(scale, call)
        self.alive += sum({id(storage): storage.nbytes() for fp8, storage in kept if fp8}.values())
        self.held += sum({id(storage): storage.nbytes() for _, storage in kept}.values())

    def dy(self, y: Tensor) -> Tensor:
        """The same for a tensor that is whole and for its parts."""
        ranks, rank, parts = dist.get_world_size(), dist.get_rank(), self.way.kind in ("sequence", "context")
        shape = (y.shape[0], y.shape[1] * (ranks if parts else 1), y.shape[2])
        whole = self.noise(*shape, seed=1000 + self.batches, dtype=y.dtype)
        return whole.chunk(ranks, 1)[rank] if parts else whole

    def backward(self, which: int = 0) -> None:
        x, y = self.open.pop(which)
        y.backward(self.dy(y))
        for p in self.model.parameters() if self.way.kind == "replica" else ():
            p.grad = averaged(p.grad, self.way.mesh)  # type: ignore[arg-type]
        for leaf in (x, *self.model.parameters()) if self.way.kind == "context" else ():
            dist.all_reduce(leaf.grad)  # type: ignore[arg-type]
        self.keep("gradient", grads_of(self.model, [x]))

    def accumulate(self) -> None:
        fsdp, call = self.way.kind in ("fsdp", "fsdp x tp"), getattr(self.call, "_orig_mod", self.call)
        if fsdp:
            self.model.set_requires_gradient_sync(False)
        with call.no_sync() if hasattr(call, "no_sync") else contextlib.nullcontext():
            y = self.call(self.batch())
            y.backward(self.dy(y))
        if fsdp:
            self.model.set_requires_gradient_sync(True)

    def write(self) -> None:
        for p in self.model.parameters():
            p.data.mul_(1.5)

    def write_and_tell(self) -> None:
        self.write()
        if self.way.gather:
            fp8_all_gather(self.model)

    def assign(self) -> None:
        twice = {name: x.detach().clone() * 2 for name, x in self.model.state_dict().items()}
        self.model.load_state_dict(twice, assign=True)
        self.steps = torch.optim.SGD(self.model.parameters(), lr=1e-2, foreach=False)

    def move(self) -> None:
        for p in self.model.parameters():
            p._local_tensor = p._local_tensor.clone()
        for module in (self.model, *self.model.blocks):  # type: ignore[misc]
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.reset_sharded_param()

    def bad_on_one(self) -> None:
        x = self.batch()
        with torch.no_grad():
            x[0, 3, 5] = float("nan") if dist.get_rank() == dist.get_world_size() - 1 else 1.0
        self.call(x).sum().backward()
        self.zero()


def train(model: str, way: Way, protocol: str) -> OnRanks:
    torch._dynamo.reset()
    of, width = way.dtype if way.kind == "sequence" else torch.float32, WIDTHS.get(model, 128)
    with mock.patch.dict(os.environ, {"FP8COMPILE_SKIP": way.skip}):
        run = OnRanks(lambda: build(model).to(of), lambda m: m, lambda m: m, way=way, width=width)  # type: ignore[arg-type]
        run(protocol)
    return run


def facts(run: OnRanks, sent: list[tuple[torch.dtype, int]]) -> dict[str, Any]:
    """What a training leaves to look at."""
    compiled = isinstance(run.call, torch._dynamo.OptimizedModule)  # the model does not know of a wrapper
    report, saved = fp8compile.report(run.call if compiled else run.model), io.BytesIO()
    weights = run.model.state_dict()
    torch.save(weights, saved)
    return {
        "words": run.words,
        "text": str(report),
        "summary": report.summary(),
        "remarks": [graph["remarks"] for graph in report.to_dict()["graphs"]],
        "checkpoint": weights if run.way.kind in ("fsdp1", "replica") else {},
        "names": sorted({r.fqn for r in report.matmuls}),
        "saved": hashlib.sha256(saved.getvalue()).hexdigest(),
        "graphs": [graph.name for graph in report.graphs if graph.matmuls],
        "sizes": [r.m * r.n * r.k for r in sorted(report.matmuls, key=lambda r: (r.fqn, r.gemm))],
        "fp8": sorted({(plain(r.fqn), r.gemm) for r in report.matmuls if r.decision == "fp8"}),
        "outside": [(record.parameter, record.reason) for record in report.outside],
        "collectives": [
            (r.tensor, r.bytes, r.before, r.reason) for graph in report.graphs for r in graph.collectives
        ],
        "frozen": {x.parameter: x.reason for graph in report.graphs for x in graph.frozen},
        "wire": sent,
        "state": sorted(scaling_tensors(run.model)),
        "stats": fp8compile.stats(run.model).rows(),
    }


def plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
