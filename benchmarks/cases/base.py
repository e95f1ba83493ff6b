"""The parts of a case: a name, variants, and the training step that is measured.

Case      "llama-8b-layers" with its variants (seq, ckpt, accum, ...) and its goal
Point     one training step to measure: a model, its batch, the number of tokens
Task      a point on a device: parameters, optimizer, batches
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile.optim import AdamW

from ..models import materialise

Batch = tuple[Tensor, ...]
BATCHES = 4  # different ones that a point takes in turn


@dataclass(frozen=True)
class Point:
    """One training step to measure. `build` makes the model on the current device; `batches` never ends."""

    build: Callable[[], nn.Module]
    batches: Callable[[str, torch.dtype], Iterator[Batch]]
    tokens: int  # of one forward
    dtype: torch.dtype = torch.bfloat16  # of the weights; float32 means bf16 autocast over float32 weights
    accumulate: int = 1  # forwards and backwards per step
    compile: str = "whole"  # or "block": each region is compiled separately
    optimizer: bool = True
    own_init: bool = False  # the model draws its own weights
    schedule: Callable[[int, int], float] | None = None  # step, steps in all (0: not known) -> learning rate
    validate: Callable[[nn.Module, str], float] | None = None  # loss on held-out data
    clip: float | None = None
    lr: float = 1e-4
    note: str = ""

    @property
    def autocast(self) -> bool:
        return self.dtype == torch.float32


@dataclass(frozen=True)
class Static:
    """How a point is estimated without a GPU. `point(n)` is the same point with n layers.

    `extrapolate`: the model has parts outside of its layers (embedding, head), so it is compiled with one and
    with two layers and extrapolated linearly to `layers`. Otherwise it is compiled with `layers` layers.
    """

    point: Callable[[int], Point]  # layers -> Point
    layers: int
    extrapolate: bool


@dataclass(frozen=True)
class Case:
    """A case. `point(size, variant)` and `static(variant)` take the full variant: checked values, and
    defaults for the others."""

    name: str
    title: str
    variants: Mapping[str, int | str]  # allowed keys with their defaults
    point: Callable[[str, Mapping[str, Any]], Point]
    static: Callable[[Mapping[str, Any]], Static | None]  # None: nothing to estimate
    # over compiled bf16, on one H200
    goal: Callable[[Mapping[str, Any]], float | None] = lambda variant: None
    continues: bool = False  # training goes on from round to round

    def variant(self, given: Mapping[str, str]) -> dict[str, Any]:
        """`given` with defaults; ValueError for an unknown key or a value of the wrong type."""
        made: dict[str, Any] = dict(self.variants)
        for key, value in given.items():
            if key not in made:
                raise ValueError(f"case {self.name} has no variant {key!r} (it has: {', '.join(made)})")
            if isinstance(made[key], int):
                if not value.isdecimal():
                    raise ValueError(f"{self.name}:{key}={value} is not a whole number")
                made[key] = int(value)
            elif value not in CHOICES[key]:
                raise ValueError(f"{self.name}:{key}={value}: one of {', '.join(CHOICES[key])}")
            else:
                made[key] = value
        return made


CHOICES = {
    "compile": ("whole", "block"),
    "weights": ("bf16", "fp32"),
    "experts": ("qwen3", "deepseek", "mixtral"),
    "text": ("bytes", "tokens"),
}


def parse_case(text: str, cases: Mapping[str, Case]) -> tuple[Case, dict[str, Any], str]:
    """ "name:key=value,..." to the case, its full variant, and a canonical name that shows the values that
    differ from the defaults."""
    name, _, rest = text.partition(":")
    if name not in cases:
        raise ValueError(f"no case {name!r} (there are: {', '.join(cases)})")
    given = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{text!r}: a variant is written key=value, not {part!r}")
        given[key.strip()] = value.strip()
    case = cases[name]
    variant = case.variant(given)
    shown = ",".join(f"{key}={value}" for key, value in variant.items() if value != case.variants[key])
    return case, variant, f"{name}:{shown}" if shown else name


def normal(shape: tuple[int, ...], seed: int, device: str, dtype: torch.dtype) -> Tensor:
    """A tensor of normal numbers. On the device "meta" it has no values, for estimates."""
    if device == "meta":
        return torch.empty(shape, device=device, dtype=dtype)
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device, dtype=dtype)


def noise(shape: tuple[int, ...], seed: int = 0, target: Callable[[Tensor], Tensor] | None = None):
    """Batches for a Point: `BATCHES` normal tensors in turn, on the device before timing starts; with
    `target`, (x, target(x)).

    x requires grad, as the output of an embedding would, so that the first block does the same work as the
    others.
    """

    def batches(device: str, dtype: torch.dtype) -> Iterator[Batch]:
        made = [normal(shape, seed + i, device, dtype) for i in range(BATCHES)]
        targets: list[Batch] = [() if target is None else (target(x),) for x in made]
        while True:
            for x, rest in zip(made, targets, strict=True):
                yield (x.detach().requires_grad_(), *rest)

    return batches


def tokens(batch: int, length: int, vocabulary: int):
    """Batches of (tokens, next tokens), both [batch, length] int64, uniformly random."""

    def batches(device: str, dtype: torch.dtype) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(0)
        made = torch.randint(vocabulary, (BATCHES, batch, length + 1), generator=generator).to(device)
        pairs = [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in made]
        while True:
            yield from pairs

    return batches


def weights(variant: Mapping[str, Any]) -> torch.dtype:
    return torch.float32 if variant.get("weights") == "fp32" else torch.bfloat16


def stack_static(point: Callable[[int], Point], layers: int) -> Static:
    """A stack of equal blocks: an estimate of two of them is enough."""
    note = f"2 of {layers} layers"
    return Static(lambda count: replace(point(count), note=note), 2, extrapolate=False)


class Task:
    """A point on a device: model, optimizer and batches."""

    def __init__(self, point: Point, device: str):
        self.point, self.device = point, device
        if point.own_init:
            torch.manual_seed(0)
            self.model = point.build().to(device=device, dtype=point.dtype)
        else:
            self.model = materialise(point.build, device, point.dtype)
        self.batches = point.batches(device, torch.bfloat16)
        self.optimizer: torch.optim.Optimizer | None = None

    def start(self, packed: bool = False) -> None:
        """Make the optimizer, torch's fused AdamW, or (`packed`) ours. Call it after the arm, which may
        replace modules."""
        if self.point.optimizer:
            how: dict[str, Any] = {"lr": self.point.lr, "betas": (0.9, 0.95)}
            parameters = self.model.parameters()
            if packed:
                self.optimizer = AdamW(parameters, fp8_weights=True, **how)
            else:
                self.optimizer = torch.optim.AdamW(parameters, fused=True, **how)
