"""What is trained and compiled for the golden files: a chosen list. `KINDS` makes their sections."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.devices.gpu import Gpu
from fp8compile.dryrun.fake_gpu import Step
from tests.distributed.ranks import Gated, Net, OnRanks, Way
from tests.equivalence.cases import Case
from tests.equivalence.features import FEATURES, MODELS, Feature
from tests.equivalence.golden import text
from tests.equivalence.golden.text import Made
from tests.equivalence.protocols import Run
from tests.equivalence.trainings import trainings
from tests.support import hooks
from tests.support.gpu_steps import compile_mlp
from tests.support.harness import ALL_FP8, CHUNKED, HEAD_OFF
from tests.support.models import ResidualMlp, make
from tests.support.processes import on_ranks

BF16 = torch.bfloat16
LR = 2.0**-7  # a step rounds once, with and without fused multiply-add


def bell(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Multiples of an eighth, nearly normal. (How torch.randn approximates logarithms depends on the CPU.)"""
    drawn = torch.randint(-8, 9, (4, *shape), generator=torch.Generator().manual_seed(seed))
    return (drawn.sum(0) / 8 * scale).to(dtype)


class Golden(Run):
    """A training with numbers and weights of ours."""

    noise = staticmethod(bell)

    def start(self) -> None:
        for i, (name, p) in enumerate(self.model.named_parameters()):
            # not where a training is resumed
            if self.batches == 0 and (p.dim() > 1 or name.endswith("bias")):
                scale = 2.0 ** -round(math.log2(p.shape[-1]) / 2) * (1 + i / 16)  # no two have the same amax
                p.data = bell(*p.shape, seed=7000 + i, scale=scale, dtype=p.dtype)
        super().start()


class GoldenOnRanks(Golden, OnRanks):
    """The same on this rank."""


class Head(ResidualMlp):
    """A residual MLP, an output head and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(128, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(
            self.head(super().forward(x)).float().flatten(0, 1), x.flatten(0, 1).argmax(-1)
        )


SETTINGS = {
    "margin": (0, 1, 2), "amax_history_len": 3, "amax_compute_algo": "most_recent", "fp8_format": "e4m3",
    "interval": 2, "on_overflow": "saturate", "override_linear_precision": (False, False, True),
    "current_scaling": (True, False, False),
}  # fmt: skip
RULES = [
    {"module": "*gate", "recipe": "blockwise"},
    {"module": "*down", "recipe": "tensorwise"},
    {"module": "*", "fp8": "on"},
]
PHASES = {"policy": {**ALL_FP8, "schedule": {"warmup_steps": 2, "cooldown_at": 4}}}
OWN = (
    Feature("autocast", called=lambda model, call: torch.autocast("cpu", BF16)(call)),
    Feature("phases", PHASES, around=hooks.phases_afresh),
    Feature("chunked head", {**CHUNKED, "policy": HEAD_OFF}),
    Feature("settings", SETTINGS),
    Feature("rules", {"policy": {"rules": RULES}}),
)
KNOWN = {feature.name: feature for feature in (*FEATURES, *OWN)}


def training(model: str, recipe: str, protocols: str = "steps", *features: str) -> Case:
    return Case(tuple(KNOWN[name] for name in features), model, recipe, tuple(protocols.split(", ")))


TRAININGS = {
    "delayed": training(
        "mlp", "delayed", "steps, evaluation between, a bad batch, an overflow, resumed, dry runs"
    ),
    "tensorwise": training("blocks", "tensorwise", "accumulation, loaded weights"),
    "rowwise": training("gated", "rowwise", "steps, a bad batch"),
    "rowwise_with_gw_hp": training("mlp", "rowwise_with_gw_hp"),
    "blockwise": training("gated", "blockwise"),
    "mxfp8": training("mlp", "mxfp8", "steps, evaluation between"),
    "settings": training("mlp", "delayed", "accumulation, an overflow", "settings"),
    "rules": training("gated", "delayed", "steps", "rules"),
    "a parameter with several uses": training("uses", "delayed", "two forwards"),
    "autocast": training("mlp", "delayed", "accumulation, two forwards", "autocast"),
    "autocast, blocks": training("blocks", "blockwise", "steps", "autocast", "compiled in blocks"),
    "autocast, gated": training("checkpointed", "tensorwise", "steps", "autocast", "merge_matmuls"),
    "experts": training("experts", "delayed", "steps, an overflow"),
    "experts, tensorwise": training("experts", "tensorwise"),
    "experts, rowwise": training("experts", "rowwise"),
    "experts, blockwise": training("experts", "blockwise"),
    "experts, mxfp8": training("experts", "mxfp8"),
    "merged": training("gated", "delayed", "steps, an overflow", "merge_matmuls"),
    "cached": training(
        "gated", "delayed", "accumulation, loaded weights, evaluation between", "cache_weights"
    ),
    "cached, one copy": training("mlp", "rowwise", "accumulation", "one copy of cached weights"),
    "cast again": training("mlp", "blockwise", "steps", "recast_weights"),
    "frozen": training("lora", "delayed", "accumulation", "frozen"),
    "frozen, blockwise": training("lora", "blockwise", "steps", "frozen"),
    "saved": training("gated", "tensorwise", "steps", "save"),
    "tiles of weights": training("mlp", "mxfp8", "steps", "weight_tiles"),
    "checkpointed": training("checkpointed", "delayed", "checkpoints and hooks"),
    "measured": training("mlp", "delayed", "measured"),
    "dynamic": training("mlp", "delayed", "other sizes", "dynamic"),
    "phases": training("mlp", "delayed", "an overflow", "phases"),
    "chunked head": training("head", "delayed", "steps", "chunked head"),
    "merged, cached, saved": training(
        "gated", "tensorwise", "accumulation", "merge_matmuls", "cache_weights", "save"
    ),
    "lowered": training("mlp", "delayed", "an overflow", "lowered"),
}
# the first graph of each
GRAPHS = ("delayed", "rowwise", "mxfp8", "experts", "merged", "cached", "frozen", "checkpointed")
STEPS: dict[str, Callable[[], Step]] = {
    "delayed": lambda: compile_mlp(64),
    "tensorwise": lambda: compile_mlp(64, recipe="tensorwise"),
    "rowwise": lambda: compile_mlp(64, recipe="rowwise"),
    "blockwise": lambda: compile_mlp(128, recipe="blockwise"),
    "mxfp8, B200": lambda: compile_mlp(128, recipe="mxfp8", gpu=Gpu("NVIDIA B200", 10, 0, 148, 180 << 30)),
    "autocast": lambda: compile_mlp(64, torch.float32),
}


RANKS: dict[str, tuple[Way, str]] = {  # on two processes: how they are parallel, and a protocol
    "fsdp": (Way(options={"recipe": "delayed"}), "fbs afbs jbs fbs"),
    "gathered": (Way(options={"recipe": "tensorwise"}, dtype=BF16, gather=True), "fbs fbs e l fbs"),
    "gathered, kept": (
        Way(options={"current_scaling": (False, True, False)}, gather=True, reshard=False),
        "afbs afbs fbs",
    ),
    "fsdp1": (Way("fsdp1", {"recipe": "blockwise"}), "fbs fbs"),
    "ddp": (Way("ddp", {"recipe": "delayed"}), "fbs afbs jbs fbs"),
    "ddp, reduced amaxes": (Way("ddp", {"reduce_amax": True}), "fbs fbsB fbs"),
    "sequence": (Way("sequence", {"reduce_amax": True}), "fbs jbs fbs"),
    "simple fsdp": (Way("simple fsdp", {"recipe": "tensorwise"}), "fbs fbs"),
}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, nothing is left of what ran before."""
    hooks.forget()
    with hooks.strictly(), hooks.saving_small_tensors(), mock.patch.dict(os.environ, FP8COMPILE_SKIP=""):
        yield
    hooks.forget()


def of_training(name: str) -> Made:
    case, models = TRAININGS[name], mock.patch.dict(MODELS, head=lambda: make(Head, BF16))
    # torch 2.11 decomposes silu_backward in another way
    spelled = mock.patch.object(F, "silu", lambda x: x * torch.sigmoid(x))
    with (
        alone(),
        models,
        spelled,
        hooks.interpreted(),
        hooks.widely(),
        hooks.joint_graphs(text.of_graph) as graphs,
    ):
        runs = trainings(case, case.features, Golden, LR)
        sections = {f"{name}: {protocol}": text.of_run(run) for protocol, run in runs.items()}
        sections[f"{name}: report"] = text.of_report(next(iter(runs.values())).model)
    return {"trainings": sections, "graphs": {name: graphs[0]} if name in GRAPHS else {}}


@alone()
def of_step(name: str) -> Made:
    return {"kernels": {name: text.of_step(STEPS[name]())}}


def _on_rank(rank: int, name: str) -> list[str]:
    way, protocol = RANKS[name]

    def build() -> nn.Module:
        net = Net()
        net.norm = net.out = nn.Identity()  # type: ignore[assignment]  # only what is compiled is computed in float64
        return Gated() if way.kind in ("sequence", "simple fsdp") else net

    with hooks.widely():
        run = GoldenOnRanks(build, lambda m: m, lambda m: m, way=way, lr=LR)(protocol)  # type: ignore[arg-type]
        return [*text.of_run(run), *text.of_report(run.model)]


def of_ranks(name: str) -> Made:
    found = on_ranks(2, _on_rank, name, limit=120)
    return {"ranks": {f"{name}: rank {rank}": lines for rank, lines in enumerate(found)}}


KINDS = {"trainings": (of_training, TRAININGS), "kernels": (of_step, STEPS), "ranks": (of_ranks, RANKS)}
