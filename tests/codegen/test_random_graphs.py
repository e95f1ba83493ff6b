"""Random graphs, fused against unfused: generated kernels write the same bits as the operators one by one.

A case is a random program over a handful of tensors: pointwise chains, broadcasts, views, permutations, sums
over rows and columns, operators that kernels do not support, and FP8 casts and amaxes in the middle and at
the end. It runs once to make its inputs, and once to be traced; the graph runs eagerly, and with kernels in
Triton's interpreter.

All results are compared bit by bit (every NaN equals every NaN). The last bit of some operators is not
specified (an exponential, the larger of two zeros): both sides compute these as a kernel does, see `OPEN`.
Sums are of signs, which are exact in any order. (test_expressions.py and test_kernels.py compare these with
ATen's.) Kernels may touch only their own tensors (`support/interpreter.py`), and memory that is not written
shows.

Case n is the same in each run. `FUZZ_CASES=2000 make weekly` runs more of them. A case that fails is made
shorter before it is shown.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import re
from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from fp8compile import compat
from fp8compile.ir import ops
from fp8compile.passes.pipeline import run_post_grad
from tests.support.groups import trace
from tests.support.interpreter import Interpreted, kernels_on_cpu
from tests.support.kernel_checks import bits

aten = torch.ops.aten

CASES = int(os.environ.get("FUZZ_CASES", "400"))  # of `make weekly`
BLOCKS = ((16, 16, 1), (16, 32, 1), (32, 16, 1), (32, 32, 1), (64, 64, 1))
WIDE, STRIPS = (128, 128, 1), (128, 32, 1)  # tiles of cases whose scales are of 128 elements
PROGRAMS = 3  # most tiles a case: the interpreter's time depends on the number of programs
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0), (torch.float8_e4m3fn, 224.0))
NUMBERS = (0.5, -1.5, 2, 3.0, -1, 0.25, 0.0)
EXTREMES = (0.0, -0.0, 3e38, -7e4, 1e-40, float("inf"), -float("inf"), float("nan"))
UNARY: tuple[Any, ...] = (torch.neg, torch.abs, torch.relu, torch.square, torch.sign, torch.reciprocal)
UNARY += (torch.exp, torch.sigmoid, torch.clone)
UNARY += tuple(functools.partial(torch.pow, exponent=n) for n in (2, 1, -1))
BINARY = (torch.add, torch.mul, torch.sub, torch.div, torch.maximum, torch.minimum)
COMPARISONS = (torch.gt, torch.le, torch.eq, torch.ne, torch.ge, torch.lt)


# -- cases --


class Program:
    """Tensors that grow in number by instructions. The numbers of an instruction choose among existing
    tensors: all are valid. `given`: the inputs; without them they are made."""

    def __init__(self, split: tuple[int, ...], seed: int, side: int, given: tuple[Tensor, ...] = ()):
        b, t, h, d = split
        self.shapes = [(b * t, h * d), (b, t, h * d), (b, t, h, d), (b * t, h, d)]
        self.side = side  # of the blocks that share a scale
        self.seed, self.random, self.given = seed, random.Random(seed), given
        self.inputs: list[Tensor] = []
        self.pool: list[Tensor] = []  # floating-point tensors
        self.masks: list[Tensor] = []
        self.scales: list[Tensor] = []
        self.amaxes: list[Tensor] = []
        self.results: list[Tensor] = []

    # tensors

    def new(self, make: Callable[[torch.Generator, random.Random], Tensor]) -> Tensor:
        number = len(self.inputs)
        if self.given:
            self.inputs.append(self.given[number])
        else:
            seed = 1000 * self.seed + number
            self.inputs.append(make(torch.Generator().manual_seed(seed), random.Random(seed)))
        return self.inputs[-1]

    def input(self, shape: tuple[int, ...], dtype: torch.dtype, layout: int = 0, special: int = 0) -> Tensor:
        """A new input. Layouts: contiguous, dimensions permuted, and a slice of a larger tensor."""
        order = list(range(len(shape)))
        if layout % 4 == 1:
            order.reverse()
        elif layout % 4 == 2:
            order[:2] = order[:2][::-1]
        margin = 3 if layout % 4 == 3 and shape else 0
        base = [shape[d] for d in order]
        if margin:
            base[-1] += margin

        def make(generator: torch.Generator, draw: random.Random) -> Tensor:
            values = torch.randn(base, generator=generator) * (1.0, 1.0, 8.0, 1e-3)[special % 4]
            if special % 16 >= 12:
                for _ in range(2):
                    values.view(-1)[draw.randrange(values.numel())] = draw.choice(EXTREMES)
            values = values > 0 if dtype == torch.bool else values.to(dtype)
            values = values[..., 2:-1] if margin else values
            return values.permute([order.index(d) for d in range(len(order))])

        return self.new(make)

    def full(self, number: int) -> Tensor:
        """A floating-point tensor of the pool: half of the time the newest one, for deep graphs."""
        return self.pool[-1 - number // 2 % len(self.pool) * (number % 2)]

    def keep(self, x: Tensor) -> None:
        (self.masks if x.dtype == torch.bool else self.pool).append(x)

    def like(self, x: Tensor, number: int, kinds: list[Tensor]) -> Tensor | None:
        """A tensor of `kinds` that can be combined with x without making anything larger."""
        fitting = [y for y in kinds if y is not x and _broadcasts(y.shape, x.shape)]
        return fitting[-1 - number % len(fitting)] if fitting else None

    def vector(self, x: Tensor, a: int, b: int) -> Tensor:
        """A new input that is broadcast to x."""
        shapes = [(*x.shape[-1:],), (*x.shape[:-1], 1), (*x.shape[1:],), (1,), (1, *x.shape[1:])]
        shape = shapes[a % 5] if x.dim() else ()
        return self.input(shape, FLOATS[b % 3] if b % 4 else x.dtype, b // 4, a // 5)

    def mask_for(self, x: Tensor, number: int) -> Tensor:
        found = self.like(x, number, self.masks)
        return self.input(tuple(x.shape), torch.bool, number) if found is None else found

    @staticmethod
    def whole(x: Tensor, dims: list[int]) -> bool:
        """Whether a sum over `dims` sums the whole tensor, or sums nothing: then it is neither a row sum nor
        a column sum."""
        return not x.dim() or prod(x.shape[d] for d in dims) in (1, x.numel())

    # instructions

    def unary(self, a: int, b: int, c: int) -> None:
        function = UNARY[b % len(UNARY)]
        more = {"memory_format": torch.contiguous_format} if function is torch.clone and c % 2 else {}
        self.keep(function(self.full(a), **more))

    def number(self, a: int, b: int, c: int) -> None:
        self.keep(BINARY[b % 4](self.full(a), NUMBERS[c % len(NUMBERS)]))

    def binary(self, a: int, b: int, c: int) -> None:
        x, function = self.full(a), BINARY[b % len(BINARY)]
        y = self.like(x, c, self.pool)
        if y is None:
            y = self.vector(x, a // 2, c)
        more = {"alpha": (2, -1)[c % 2]} if function is torch.add and c % 7 == 6 else {}
        self.keep(function(*((x, y) if c % 2 else (y, x)), **more))

    def broadcast(self, a: int, b: int, c: int) -> None:
        x = self.full(a)
        y = self.vector(x, c, b // 8)
        if b % 3 == 0 and y.dim():
            y = y.expand(x.shape)
        self.keep(BINARY[b % len(BINARY)](x, y))

    def fresh(self, a: int, b: int, c: int) -> None:
        self.keep(self.input(self.shapes[a % 4], FLOATS[b % 3], b // 3, c))

    def gated(self, a: int, b: int, c: int) -> None:
        """x * sigmoid(y), with a new y."""
        x = self.full(a)
        self.keep(x * torch.sigmoid(self.input(tuple(x.shape), FLOATS[b % 3], b // 3, c)))

    def where(self, a: int, b: int, c: int) -> None:
        x = self.full(a)
        mask = self.mask_for(x, b)
        found = self.like(x, c, self.pool)
        y: Any = 0.0 if found is None else found
        self.keep(torch.where(mask, *((x, y) if c % 2 else (y, x))))

    def compare(self, a: int, b: int, c: int) -> None:
        x = self.full(a)
        y = self.like(x, c, self.pool) if c % 2 else None
        mask = COMPARISONS[b % 6](x, (0.0, 0.5, -1.5, 2)[c % 4] if y is None else y)
        self.keep(torch.logical_not(mask) if b % 8 == 7 else mask)

    def mask(self, a: int, b: int, c: int) -> None:
        """A mask in arithmetic, as in a dropout: x * mask * 2."""
        x = self.full(a)
        mask = self.mask_for(x, b)
        other = self.like(mask, c, self.masks)
        self.keep(x * (mask & other if other is not None and c % 3 == 0 else mask))

    def cast(self, a: int, b: int, c: int) -> None:
        self.keep(self.full(a).to(FLOATS[b % 3]))

    def reshape(self, a: int, b: int, c: int) -> None:
        x = self.full(a)
        shapes: list[tuple[int, ...]] = [*self.shapes, (self.shapes[1][0], -1), (-1, self.shapes[2][3])]
        if x.numel() != prod(self.shapes[0]):
            shapes = [(1, *x.shape), (x.numel(),)]
        self.keep(x.reshape(shapes[b % len(shapes)]))

    def permute(self, a: int, b: int, c: int) -> None:
        x = self.full(a)
        order = list(range(x.dim()))
        self.random.shuffle(order)
        if len(order) >= 2 and b % 2:
            order = [*order[1:], order[0]]
        self.keep(x.t() if len(order) == 2 and c % 3 == 0 else x.permute(order))

    def row_sum(self, a: int, b: int, c: int) -> None:
        x = self.full(a)
        dims = [-1, -2] if c % 4 == 3 and x.dim() > 2 else [-1]
        if self.whole(x, dims):
            return
        x = x.sign().float() if b % 2 or c % 5 == 4 else x.sign()
        self.keep((x.mean if b % 2 else x.sum)(dims, keepdim=b % 8 < 6))

    def norm(self, a: int, b: int, c: int) -> None:
        """The product of x, or of the difference of x from its mean, and of a mean. (Means are of signs.)"""
        x = self.full(a)
        if self.whole(x, [-1]):
            return
        x = x.float() if b % 2 else x
        if c % 2:
            x = x - x.sign().float().mean(-1, keepdim=True)
        factor = x.sign().float().mean(-1, keepdim=True)
        if c % 3 == 0:
            self.results.append(factor)
        self.pool.append(factor)
        self.keep((x * factor).bfloat16() if b % 3 == 0 else x * factor)

    def column_sum(self, a: int, b: int, c: int) -> None:
        x = self.full(a)
        dims = list(range(x.dim() - 1 if b % 2 else 1))
        if x.dim() < 2 or self.whole(x, dims):
            return
        total = x.sign().sum(dims, keepdim=c % 2 == 1)
        total = total.to(FLOATS[b % 3]) if c % 3 == 0 else total
        total = total.reshape(-1) if c % 4 == 3 else total
        self.results.append(total)
        if b % 4 == 0:
            self.keep(total)

    def opaque(self, a: int, b: int, c: int) -> None:
        """An operator that kernels do not support."""
        x = self.full(a)
        if not x.dim():
            return
        if b % 3 == 2:
            self.results.append(-x[: max(1, x.shape[0] // 2)])
        else:
            self.keep(x.cumsum(c % x.dim(), dtype=x.dtype) if b % 3 else x.flip(c % x.dim()))

    def matrix(self, a: int, b: int) -> Tensor:
        """A 2-D tensor to cast."""
        x = self.full(a)
        if x.dim() == 2 and b % 8:
            return x
        return x.reshape(prod(x.shape[: 1 if b % 3 == 1 else -1]) if x.dim() > 1 else 1, -1)

    def scale(self, number: int) -> Tensor:
        """A scale, [1] float32: a new input, an element of a new vector, or an existing scale."""
        if number % 3 == 0 and self.scales:
            return self.scales[-1 - number // 3 % len(self.scales)]
        if number % 3 == 1:
            vector = self.new(lambda *_: torch.tensor([1.0, 2.0**-3, 17.5, 1e-3, 300.0]))
            self.scales.append(vector.as_strided([1], [1], number // 3 % 5))
        else:
            self.scales.append(self.new(lambda *_: torch.tensor([(0.3, 1.0, 20.0, 1e30)[number // 3 % 4]])))
        return self.scales[-1]

    def quantize(self, a: int, b: int, c: int) -> None:
        self.results.append(ops.quantize(self.matrix(a, b // 2), self.scale(c), *FP8[c % 3], b % 2 == 1))

    def quantize_both(self, a: int, b: int, c: int) -> None:
        both = ops.quantize_both(self.matrix(a, b // 3), self.scale(c), *FP8[c % 3])
        self.results += [both[i] for i in ((0, 1), (0,), (1,))[b % 3]]

    def amax(self, a: int, b: int, c: int) -> None:
        self.amaxes.append(ops.amax(self.matrix(a, b)))
        if c % 2:
            self.results.append(self.amaxes[-1])

    def current(self, a: int, b: int, c: int) -> None:
        """Current scaling: the cast waits for the amax of its own tensor."""
        x, (dtype, largest) = self.matrix(a, b), FP8[c % 3]
        self.amaxes.append(ops.amax(x))
        scale = ops.current_scale(self.amaxes[-1], largest, c % 2)
        if c % 4 == 3:
            self.results.append(ops.inverse(scale))
        if c % 5 == 4:
            self.scales.append(scale)  # other tensors may use this scale, too
        if b % 2:
            self.results += ops.quantize_both(x, scale, dtype, largest)
        else:
            self.results.append(ops.quantize(x, scale, dtype, largest, c % 3 == 2))

    def blocks(self, a: int, b: int, c: int) -> None:
        """Casts with a scale a row or a block: different ones for each layout, except square blocks; one may
        be an input."""
        x, (dtype, largest) = self.matrix(a, b), FP8[c % 3]
        block = [[1, self.side], [1, 0], [self.side, self.side], [1, self.side]][b % 4]
        scales = []
        for transposed in (False, True):
            if transposed and block[0] == block[1]:
                scales.append(scales[0].permute(1, 0))
            elif c % 8 == 7 and transposed:
                shape = ops.amax_blocks(x, True, block).shape
                scales.append(self.new(lambda g, _, shape=shape: torch.rand(shape, generator=g) + 0.01))
            else:
                amax = ops.amax_blocks(x, transposed, block)
                scales.append(ops.current_scale(amax, largest, c % 2, block[1] > 0 or c % 5 == 0))
                if c % 4:
                    self.results.append(ops.inverse(scales[-1]))
        if c % 3 < 2:
            self.results += ops.quantize_both(x, scales[0], dtype, largest, scales[1], block)
        else:
            which = b // 4 % 2
            self.results.append(ops.quantize(x, scales[which], dtype, largest, bool(which), block))

    def back(self, a: int, b: int, c: int) -> None:
        """Stands for a matmul: FP8 in, high precision out; the graph continues after it."""
        casts = [x for x in self.results if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
        if casts:
            self.keep(casts[-1 - a % len(casts)].to(FLOATS[b % 3]))

    def result(self, a: int, b: int, c: int) -> None:
        self.results.append(self.full(a) if b % 4 or not self.masks else self.masks[c % len(self.masks)])

    def gather(self, a: int, b: int, c: int) -> None:
        if len(self.amaxes) > 1:
            self.results.append(ops.gather(self.amaxes[::-1] if b % 2 else self.amaxes[a % 2 :]))

    def finish(self, a: int, b: int, c: int) -> None:
        self.quantize(a, b, c)
        if self.amaxes:
            self.results.append(ops.gather(self.amaxes))


INSTRUCTIONS = 2 * ["unary", "binary", "number", "blocks", "norm", "column_sum", "result"]
INSTRUCTIONS += """quantize quantize_both current gated broadcast fresh where compare mask cast reshape
permute row_sum opaque amax back gather""".split()
MAKING = ["gated", "binary", "unary", "norm"]  # producers of casts with scales of blocks
PAIRS = [(a, b) for a in range(1, 41) for b in range(1, 41) if a * b <= 40]


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    last = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(a in (1, b) for a, b in last)


@dataclasses.dataclass(frozen=True)
class Case:
    rows: tuple[int, int]
    columns: tuple[int, int]
    dtype: int
    layout: int
    seed: int
    code: tuple[tuple[str, int, int, int], ...]  # instructions, each with three numbers
    last: tuple[int, ...]
    block: int

    @classmethod
    def of(cls, number: int, scaled: bool = False) -> Case:
        """The case with this number. `scaled`: casts with scales of blocks follow chains and norms, half in
        wide tiles."""
        draw = random.Random(2 * number + scaled)

        def numbers() -> tuple[int, int, int]:
            return draw.randrange(64), draw.randrange(64), draw.randrange(64)

        choices = [MAKING, MAKING, ["blocks"]] if scaled else [INSTRUCTIONS] * draw.randint(1, 8)
        code = tuple((draw.choice(names), *numbers()) for names in choices)
        block = draw.randint(0, 2 * len(BLOCKS) if scaled else len(BLOCKS))
        sides, kind = (draw.choice(PAIRS), draw.choice(PAIRS)), (draw.randrange(3), draw.randrange(16))
        return cls(*sides, *kind, draw.randrange(2**20), code, numbers(), block)

    @property
    def wide(self) -> bool:
        """Whether the blocks that share a scale are as large as in training; tiles and tensors are then
        larger, too."""
        return self.block >= len(BLOCKS)

    @property
    def blocks(self) -> tuple[int, int, int]:
        """The block sizes that were drawn, or the next ones with which few enough programs cover the
        tensors."""
        if self.wide:
            return WIDE
        sides = (self.rows[0] * self.rows[1], self.columns[0] * self.columns[1])
        for r, c, warps in BLOCKS[self.block :]:
            if max(-(-a // r) * -(-b // c) for a, b in (sides, sides[::-1])) <= PROGRAMS:
                return r, c, warps
        return BLOCKS[-1]

    def build(self) -> tuple[GraphModule, tuple[Tensor, ...]]:
        inputs = tuple(self.run().inputs)
        return trace(lambda *given: tuple(self.run(given).results), inputs), inputs

    def run(self, given: tuple[Tensor, ...] = ()) -> Program:
        stretch = 5 if self.wide else 1
        rows, columns = (self.rows[0], self.rows[1] * stretch), (self.columns[0], self.columns[1] * stretch)
        program = Program((*rows, *columns), self.seed, 128 if self.wide else 16, given)
        program.fresh(self.layout, self.dtype + 3 * (self.layout // 4), self.layout)
        for what, *numbers in self.code:
            getattr(program, what)(*numbers)
        program.finish(*self.last)
        return program


# -- running --


def _exp(x: Tensor) -> Tensor:
    """As in the table of expressions: a power of two."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.exp2((x * 1.4426950408889634).contiguous().numpy()))


OPEN: dict[Any, Callable] = {
    aten.exp.default: _exp,
    aten.sigmoid.default: lambda x: 1.0 / (1 + _exp(-x)),
    aten.add.Tensor: lambda x, y, alpha=1: x + alpha * y,
    aten.relu.default: lambda x: torch.where(x <= 0, 0.0, x),
    aten.maximum.default: lambda x, y: torch.where((x > y) | (x != x), x, y),
    aten.minimum.default: lambda x, y: torch.where((x < y) | (x != x), x, y),
}


GARBAGE = 0xFF  # in each byte of unwritten memory: NaN in every floating-point dtype


class Exact(Interpreter):
    """Runs a graph eagerly. Where ATen does not specify the last bit, computes as a kernel does."""

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        result = super().call_function(target, args, kwargs)
        if target in (aten.empty.memory_format, aten.empty_strided.default):
            result.untyped_storage().fill_(GARBAGE)
        if target not in OPEN:
            return result
        exact = OPEN[target](*(x.float() if isinstance(x, Tensor) else x for x in args), **kwargs)
        return torch.empty_like(result).copy_(exact)


def unequal(a: Tensor, b: Tensor) -> str:
    """The difference between two tensors, in words; "" if they have the same bits, except the bits of NaN."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    wrong = (bits(a) != bits(b)).nonzero()
    return f"{len(wrong)} of {a.numel()}, the first at {wrong[0].tolist()}" if len(wrong) else ""


def check(case: Case, seen: Counter) -> None:
    module, inputs = case.build()
    fused = compat.dynamo.copy_graph(module)
    before = [x.clone() for x in inputs]
    expected = Exact(module).run(*inputs)
    with kernels_on_cpu(**tiles(case)) as made:
        run_post_grad(fused.graph)
        got = Exact(fused).run(*inputs)
    count(made, seen)
    assert not any(map(unequal, before, inputs)), "a kernel writes into an input"
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        if difference := unequal(a, b):
            shown = "\n\n".join([str(module.graph), str(fused.graph), *(kernel.source for kernel in made)])
            raise AssertionError(
                f"output {i}, unfused and fused: {difference}\nblocks {case.blocks}\n{shown}"
            )


def tiles(case: Case) -> dict[str, Any]:
    """In half of the cases, sums over rows are in their own kernel for blocks of 16 rows, too."""
    if case.wide:
        return {"choose": lambda group: STRIPS if group.span else WIDE}
    return {"config": case.blocks, "MOST_ROWS": (8, 32)[case.seed % 2]}


FEATURES = {  # of a kernel: what its source has
    "row passes": "    block = pid\n",
    "column sums": "tl.store(sums",
    "amaxes": "tl.atomic_max(amax",
    "amaxes of columns": "tl.atomic_max(column_amax",
    "strips": "for strip in",
    **{f"{kind} outputs": f": {kind} " for kind in ("value", "row", "transposed", "blocks")},
}


def count(made: list[Interpreted], seen: Counter) -> None:
    seen["cases"] += 1
    seen["fused"] += bool(made)
    for kernel in made:
        seen["kernels"] += 1
        seen["several casts"] += len(re.findall(": (?:copy|transposed) float8", kernel.source)) > 1
        seen.update(name for name, text in FEATURES.items() if text in kernel.source)


def shortest(case: Case, error: Exception) -> str:
    """The shortest program that fails, by leaving out one instruction after the other, and its error."""
    for i in range(len(case.code)):
        other = dataclasses.replace(case, code=case.code[:i] + case.code[i + 1 :])
        try:
            check(other, Counter())
        except Exception as found:
            return shortest(other, found)
    return f"{case}\n{type(error).__name__}: {error}"


SLOW, WEEKLY = pytest.mark.slow, pytest.mark.weekly


@pytest.mark.parametrize(
    ("numbers", "scaled"),
    [
        (range(25), False),
        pytest.param(range(25, 100), False, marks=SLOW),
        pytest.param(range(20), True, marks=SLOW),
        pytest.param(range(100, CASES), False, marks=WEEKLY),
        pytest.param(range(20, CASES // 4), True, marks=WEEKLY),
    ],
    ids=str,
)
def test_fused_and_unfused_agree(numbers: range, scaled: bool) -> None:
    """The cases with these numbers, and the features of their kernels."""
    seen: Counter = Counter()
    for number in numbers:
        case = Case.of(number, scaled)
        try:
            check(case, seen)
        except Exception as error:
            raise AssertionError(shortest(case, error)) from error
    assert seen["fused"] > 0.9 * seen["cases"] and seen["several casts"] > 0.1 * seen["kernels"], seen
    plain = {"value outputs", "row outputs", "column sums", "amaxes"}
    of_blocks = {"amaxes of columns", "strips"}
    missing = FEATURES.keys() - (plain if scaled else of_blocks) - seen.keys()
    assert not missing, (missing, seen)
