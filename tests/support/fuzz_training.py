"""Random small models, trained by random protocols in FP8 and eagerly. FP8 is exact on their numbers, so all
results are equal.

    python -m tests.support.fuzz_training 500 [first seed]

So a wrong operand, layout, scale or slot, and a gradient that is lost or counted twice, shows in the first
step. Rounding never shows. Graphs are interpreted.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.ir import ops
from tests.support import hooks
from tests.support.fuzz_models import Model
from tests.support.fuzz_protocols import PROTOCOLS, Results, Side
from tests.support.harness import assert_floor, histories, sqnr

FLOOR_DB = 80.0
RECIPES = ("delayed", "delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
COMPILED = ("whole", "whole", "whole", "in place", "blocks", "function")


@dataclass
class Case:
    """All random choices of a seed, made before anything runs. Both sides begin with the same model."""

    seed: int
    rng: random.Random
    recipe: str
    how: str
    options: dict[str, Any]
    dynamic: bool | None
    dtype: torch.dtype
    autocast: bool
    model: nn.Module
    shapes: list[tuple[int, ...]]
    protocols: list[str]

    @classmethod
    def of(cls, seed: int) -> Case:
        rng = random.Random(seed)
        recipe, how = rng.choice(RECIPES), rng.choice(COMPILED)
        protocols = rng.choices(list(PROTOCOLS), k=rng.choice((2, 3, 3, 4)))
        options: dict[str, Any] = {}
        if recipe == "delayed" and ("rescale" in protocols or rng.random() < 0.3):
            options = {"amax_history_len": 2}
        elif recipe in ("tensorwise", "rowwise") and rng.random() < 0.5:
            options = {"power_of_2_scale": True}
        choices: dict[str, tuple] = {"recast_weights": (True,), "fp8_format": ("e4m3",)}
        choices |= {"use_fast_accum": ((True,) * 3,), "merge_matmuls": (True,), "cache_weights": (True,)}
        for name, values in choices.items():
            always_e4m3 = recipe in ("rowwise", "blockwise", "mxfp8") and name == "fp8_format"
            if rng.random() < 0.15 and not always_e4m3:
                options[name] = rng.choice(values)
        dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
        autocast = dtype == torch.float32 and rng.random() < 0.2
        model = Model(rng).to(dtype)
        # torch refuses a protocol with one of these, with any backend
        kept = {block.checkpoint for block in model.blocks}
        if "reentrant" in kept:
            protocols = ["plain" if name == "no input gradient" else name for name in protocols]
        rank = rng.choice((2, 2, 3, 4))
        shapes = [_shape(rng, rank, model.width)]
        for _ in range(3):
            shapes.append(_shape(rng, rank, model.width) if rng.random() < 0.3 else shapes[-1])
        dynamic = rng.choice((None, None, None, True))
        return cls(seed, rng, recipe, how, options, dynamic, dtype, autocast, model, shapes, protocols)

    def __str__(self) -> str:
        blocks = []
        for block in self.model.blocks:
            layers = [
                f"{x.weight.stored} {x.spelled}{' +b' if x.bias is not None else ''}"
                for x in getattr(block, "each", ())
            ]
            flags = ("+x" * block.residual + " " + block.checkpoint).strip()
            blocks.append(f"{block.kind}({', '.join(layers)}) {flags}".strip())
        flags = [name for name in ("breaks", "two", "tied") if getattr(self.model, name)]
        dtype = "autocast" if self.autocast else str(self.dtype).removeprefix("torch.")
        return (
            f"seed {self.seed}: {self.recipe} {self.options} {self.how} {dtype} dynamic={self.dynamic} "
            f"{self.shapes} {flags}\n  blocks: {'; '.join(blocks)}\n  protocols: {', '.join(self.protocols)}"
        )


def _shape(rng: random.Random, rank: int, width: int) -> tuple[int, ...]:
    if rank == 2:
        return rng.choice((1, 2, 16, 33, 48, 70)), width
    if rank == 3:
        return rng.choice((1, 2, 3)), rng.choice((1, 7, 16)), width
    return 2, rng.choice((1, 3)), rng.choice((5, 8)), width


def check(case: Case, seen: Counter) -> None:
    """AssertionError if the two sides differ."""
    hooks.forget_trainings()
    sides = [Side(case, copy.deepcopy(case.model), fp8) for fp8 in (False, True)]
    with hooks.calls() as calls:
        for i, name in enumerate(case.protocols):
            results = []
            for side in sides:
                side.rng, side.shape = random.Random(f"{case.seed} {i}"), case.shapes[i]
                side.model.zero_grad()
                results.append(side.train(PROTOCOLS[name]))
            compare(*results, f"step {i}, {name}")
            if case.recipe == "delayed":
                moved_once(sides[1], f"step {i}, {name}")
            seen[name] += 1
    seen["models"] += 1
    seen["models in FP8"] += any(r.decision == "fp8" for r in fp8compile.report(sides[1].model).matmuls)
    seen["gemms in FP8"] += calls[ops.scaled_mm] + calls[ops.block_mm]


def compare(expected: Results, got: Results, where: str) -> None:
    # AOTAutograd's zeros
    got = {name: tensor for name, tensor in got.items() if name in expected or tensor.any()}
    assert expected.keys() == got.keys(), f"{where}: {sorted(expected.keys() ^ got.keys())} on one side only"
    names = [name for name, tensor in expected.items() if not _cancels(name, tensor, got[name])]
    ratios = {name: sqnr(expected[name], got[name]) for name in names}
    assert_floor(ratios, FLOOR_DB, where)


def _cancels(name: str, expected: Tensor, got: Tensor) -> bool:
    """Gradients of factors are sums of thousands of terms, which may be zero except for their last bits."""
    return name.endswith("scale") and torch.allclose(got.double(), expected.double(), rtol=0, atol=2e-6)


def moved_once(side: Side, where: str) -> None:
    """Histories move once for all training forwards that wait together, and once for their backwards."""
    for gradient, calls in ((False, side.forwards), (True, side.backwards)):
        found = {
            key: history
            for key, (history, _) in histories(side.model).items()
            if (key[1] == "gradient") == gradient
        }
        # a gradient may be all zeros
        moves = {key: sum(amax > 0 for amax in history) for key, history in found.items()}
        most = min([calls, *map(len, found.values())])
        wrong = max(moves.values(), default=most) != most
        assert not (side.even and wrong), f"{where}: in {calls} calls, moved: {moves}"


def wrong(case: Case, seen: Counter) -> str:
    """The case and its error, or "". Code that Dynamo has compiled for an equal model is used again."""
    try:
        check(case, seen)
    except Exception as error:
        return f"{case}\n  {type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def fuzzing() -> Iterator[None]:
    """The settings of torch that random models need; graphs are interpreted."""
    settings = {
        "recompile_limit": 64,
        "fail_on_recompile_limit_hit": True,
        "specialize_float": True,
        "suppress_errors": False,
    }
    # torch 2.11 drops the placeholder of a size that an autograd.Function reads, and every backend fails
    settings["automatic_dynamic_shapes"] = torch.__version__ >= "2.12"
    config = torch._dynamo.config.patch(**settings)
    donated = torch._functorch.config.patch(donated_buffer=True)
    with config, donated, hooks.interpreted(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run(count: int, first: int = 0) -> tuple[Counter, list[str]]:
    """Runs `count` seeds from `first` on. Returns counts, and the failures."""
    seen, failed = Counter[str](), list[str]()
    with fuzzing():
        for seed in range(first, first + count):
            torch._dynamo.reset()
            if error := wrong(Case.of(seed), seen):
                failed.append(error)
                print(error, flush=True)
    return seen, failed


if __name__ == "__main__":
    logging.getLogger("fp8compile").setLevel(logging.ERROR)
    start = time.perf_counter()
    found, errors = run(*map(int, sys.argv[1:] or ["500"]))
    print(", ".join(f"{name} {number}" for name, number in found.items() if number))
    print(f"{len(errors)} cases fail; {time.perf_counter() - start:.0f} s")
