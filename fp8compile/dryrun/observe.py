"""Runs the graphs of a training step eagerly, and compares what its matmuls make with an earlier run.

`fp8compile.compare` runs one step several times. The first run, in high precision, keeps the result of every
forward matmul. Later runs are compared with it value by value, while they run. What is kept of a comparison
are four sums for each tensor (`sums`), on the device.

In an FP8 run, each FP8 matmul is also compared with the product of the tensors that were cast for it, in
float32. That is the matmul's *own* error: what it inherits from the layers before it is in both products.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .. import compat
from ..ir import ops
from ..ir.matmul import Product
from ..ir.metadata import OPERAND, PRODUCT, RESULT
from ..ir.schemas import ScaledProduct, copies_of
from ..runtime.inner import Inner
from ..runtime.interpreter import Boxed, Eager, boxed
from ..runtime.probe import CASTS, CHUNK

PRODUCTS = (ops.scaled_mm, ops.block_mm)
SAMPLE = 1 << 16

Key = tuple[str, str, int, int]  # of a result in a run: layer, gemm, which one of the graph, which call


def sums(reference: Tensor, test: Tensor) -> Tensor:
    """float64 `[4]` on the device: |reference|^2, |test - reference|^2, reference . test, |test|^2."""
    a, b = reference.detach().reshape(-1), test.detach().reshape(-1)  # of any shapes of one size
    total = torch.zeros(4, dtype=torch.float64, device=a.device)
    for start in range(0, a.numel(), CHUNK):
        x, y = (part[start : start + CHUNK].to(torch.float64) for part in (a, b))
        total += torch.stack([x.dot(x), (y - x).square().sum(), x.dot(y), y.dot(y)])
    return total


class Likeness(NamedTuple):
    """How much a tensor is like its reference. `sqnr`: 10 log10(|reference|^2 / |error|^2) in dB, infinite
    for equal tensors, -infinite for a reference of zeros. `cosine` of the angle between them, `norm`: |test|
    / |reference|. All are NaN where an element is not finite; cosine and norm also where a tensor is zero."""

    sqnr: float
    cosine: float
    norm: float

    @classmethod
    def of(cls, total: Tensor | Sequence[float]) -> Likeness:
        """From `sums`. Reads the device."""
        signal, error, dot, power = (float(x) for x in total)
        if not all(map(math.isfinite, (signal, error, dot, power))):
            return cls(math.nan, math.nan, math.nan)
        if error == 0:
            sqnr = math.inf
        else:
            sqnr = 10 * math.log10(signal / error) if signal > 0 else -math.inf
        if not signal or not power:
            return cls(sqnr, math.nan, math.nan)
        return cls(sqnr, dot / math.sqrt(signal) / math.sqrt(power), math.sqrt(power / signal))


def dithered(x: Tensor, generator: torch.Generator) -> Tensor:
    """x rounded to bf16 after a triangular dither of -1 to 1 unit in the last place, in the dtype of x.

    Two bf16 kernels that sum in different orders return two values whose rounding errors are independent:
    each has the variance ulp^2 / 12, their difference ulp^2 / 6. The difference of x and a dithered x has
    ulp^2 / 4, whether or not x is a bf16 value already (that is what the triangle is for: Lipshitz,
    Wannamaker and Vanderkooy, "Quantization and Dither", J. Audio Eng. Soc. 40(5), 1992). So this noise is
    1.8 dB more than that of two such kernels. Zeros, infinities and NaN stay.
    """
    exact = x.to(torch.float32)
    ulp = 2.0**-7 * torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=2.0**-126))))
    one, two = (torch.rand(x.shape, device=x.device, generator=generator) for _ in range(2))
    noisy = torch.where(exact.isfinite() & (exact != 0), exact + (one - two) * ulp, exact)
    return noisy.to(torch.bfloat16).to(x.dtype)


def peak_of(x: Tensor) -> Tensor:
    """`[1]` float32: the largest magnitude of x over the median of those that are not 0; 0 for a tensor of
    zeros. The median is that of a sample of SAMPLE elements at least, if there are as many."""
    flat = x.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLE)].abs().to(torch.float32)
    middle = torch.where(sample > 0, sample, float("nan")).nanmedian()
    return (flat.abs().amax().to(torch.float32) / middle).nan_to_num(0.0, 0.0).reshape(1)


@dataclass(eq=False)
class Watched:
    """What was seen in one run. `results` are sums of the results by parameter or layer, `own` those of FP8
    matmuls by (the same, gemm), `peaks` those of `peak_of` by (the same, role). `kept`: the results
    themselves, in a reference run."""

    reference: Mapping[Key, Tensor] | None = None
    noise: bool = False
    kept: dict[Key, Tensor] = field(default_factory=dict)
    results: dict[str, Tensor] = field(default_factory=dict)
    own: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    peaks: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    gemms: set[tuple[str, str]] = field(default_factory=set)  # FP8 matmuls of the run, by (name, gemm)
    calls: Counter[tuple] = field(default_factory=Counter)
    sources: dict[int, tuple[Tensor, Tensor, bool]] = field(default_factory=dict)  # by address of an FP8 copy
    generators: dict[torch.device, torch.Generator] = field(default_factory=dict)

    def generator(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(0)  # not the user's random numbers
        return self.generators[device]

    def result(self, what: Product, name: str, value: Tensor) -> Tensor:
        """Note the result of a matmul; what the run goes on with."""
        if what.fp8:
            self.gemms.add((name, what.gemm))
        if self.noise:
            value = dithered(value, self.generator(value.device))
        # rows of experts may be in another order: a router chose another expert
        if what.gemm != "fprop" or what.groups:
            return value
        place = (what.fqn, what.gemm, what.nth)
        key = (*place, self.calls[place])
        self.calls[place] += 1
        if self.reference is None:
            self.kept[key] = value.detach()
        elif key in self.reference and self.reference[key].numel() == value.numel():
            _add(self.results, name, sums(self.reference[key], value))
        return value

    def cast(self, node: Node, name: str | None, args: Sequence[Any], result: Any) -> None:
        """Remember of which tensor an FP8 copy is."""
        role = node.meta[OPERAND].role
        if name is not None and role != "gradient" and (name, role) not in self.peaks and args[0].numel():
            self.peaks[name, role] = peak_of(args[0])
        for made in copies_of(node.target, args):
            if made.rows is None:  # else its rows are in another order
                copy = made.of(result)  # kept, so that its address stays its own
                self.sources[copy.data_ptr()] = (copy, made.source.detach(), made.transposed)

    def product(self, what: Product, name: str, args: Sequence[Any], result: Tensor) -> None:
        """Compare an FP8 product with that of its uncast operands, where that is finite (else inherited)."""
        x = ScaledProduct(*args)
        operands = self._sources((x.a, x.b))
        if operands is None:
            return
        exact = operands[0].to(torch.float32) @ operands[1].to(torch.float32).t()
        made = result.to(torch.float32) - (0 if x.bias is None else x.bias.to(torch.float32))
        finite = exact.isfinite()
        pair = [torch.where(finite, product, 0.0) for product in (exact, made)]
        _add(self.own, (name, what.gemm), sums(*pair))

    def _sources(self, copies: Sequence[Tensor]) -> list[Tensor] | None:
        """The operands of an FP8 product before the cast, `[m, k]` and `[n, k]`; None if they are unknown."""
        operands = []
        for copy in copies:
            known = self.sources.get(copy.data_ptr())
            if known is None:
                return None
            source = known[1].t() if known[2] else known[1]
            missing = copy.shape[1] - source.shape[1]  # a transposed copy is padded
            operands.append(torch.nn.functional.pad(source, (0, missing)) if missing else source)
        return operands


def _add(table: dict[Any, Tensor], key: Any, value: Tensor) -> None:
    table[key] = table[key] + value if key in table else value


@dataclass(eq=False)
class Tap:
    """Where the graphs of a session put what they see. `names`: of parameters, by identity."""

    names: dict[int, str] = field(default_factory=dict)
    watched: Watched | None = None

    def inner(self) -> Inner:
        """Runs graphs on our operators' reference implementations, which compute as compiled code does."""

        def compile(gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Boxed:
            return boxed(Observing(gm, self))

        return Inner(compile, eager=lambda gm: Observing(gm, self))


class Observing(Eager):
    """An interpreter that shows casts and matmuls to the tap."""

    def __init__(self, gm: GraphModule, tap: Tap):
        super().__init__(gm)
        self.tap = tap
        placeholders = gm.graph.find_nodes(op="placeholder")
        indices = [(compat.dynamo.input_index(node), at) for at, node in enumerate(placeholders)]
        self.positions = [(i, at) for i, at in indices if i is not None]
        self.given: dict[int, str] = {}

    def boxed_run(self, args_list: list[Any]) -> Any:
        names = self.tap.names
        self.given = {i: names[id(args_list[at])] for i, at in self.positions if id(args_list[at]) in names}
        return super().boxed_run(args_list)

    def run_node(self, n: Node) -> Any:
        result, watched = super().run_node(n), self.tap.watched
        if watched is None:
            return result
        if n.target in CASTS:
            name = self.given.get(n.meta[OPERAND].input)
            watched.cast(n, name, self.fetch_args_kwargs_from_env(n)[0], result)
        if (what := n.meta.get(PRODUCT)) is not None and n.target in PRODUCTS:
            args = self.fetch_args_kwargs_from_env(n)[0]
            watched.product(what, self._name(what), args, result)
        if (what := n.meta.get(RESULT)) is not None:
            result = watched.result(what, self._name(what), result)
        return result

    def _name(self, what: Product) -> str:
        """One graph may serve several layers: then the weight that it was called with has the name."""
        found = self.given.get(what.input) if what.input is not None else None
        return found or what.parameter or what.fqn
