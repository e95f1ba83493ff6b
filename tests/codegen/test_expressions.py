"""The table of operators: each entry against torch, in its own generated kernel, run by Triton's interpreter.

A kernel computes one operator, returns the value and casts it to FP8. Its inputs are all pairs of special
numbers (zeros, denormals, ties, the largest, infinities, NaN) and ordinary ones, in each dtype. The value
must have torch's bits, except for functions that libraries approximate: `ULPS` lists the allowed differences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8compile.codegen.expressions import CONSTANTS, COPIES, FLOATS, FORMS, POWERS
from fp8compile.ir import ops
from tests.support.groups import DTYPES, Cast, fused, numbers, specials, trace

aten = torch.ops.aten
prims = torch.ops.prims

# allowed differences, in units in the last place of float32, where torch's CPU library and Triton's differ or
# round differently
ULPS: dict[Any, int] = {
    aten.exp.default: 2,
    aten.exp2.default: 2,
    aten.log.default: 2,
    aten.log2.default: 2,
    aten.sin.default: 2,
    aten.cos.default: 2,
    aten.erf.default: 4,
    aten.tanh.default: 4,
    aten.sigmoid.default: 4,
    aten.sqrt.default: 1,  # torch's sqrt is not correctly rounded; Triton's is
    0.5: 1,
}
# exponentials by a power of two: the product's relative error of 2^-24 becomes one of |x| 2^-24 in the result
GROWING = {aten.exp.default, aten.sigmoid.default}
# operators for which torch keeps the sign of a zero on a CPU, but does not specify it on a GPU
ANY_ZERO = {aten.relu.default}
UNARY = """neg abs exp exp2 log log2 sin cos erf tanh sigmoid sqrt rsqrt reciprocal relu square sign
logical_not isnan isinf"""
BINARY = ["maximum.default", "minimum.default", "logical_and.default", "logical_or.default"]
BINARY += [f"{name}.Tensor" for name in "mul div add sub eq ne lt le gt ge".split()]
SCALAR = [f"{name}.Scalar" for name in "mul div add sub eq ne lt le gt ge".split()]
SCALAR += ["clamp_min.default", "clamp_max.default"]
MASKS = ["bitwise_and.Tensor", "bitwise_or.Tensor", "logical_and.default", "logical_or.default"]
NUMBERS = (0.1, -3)  # a number that no dtype represents exactly, and an integer, as in graphs


@dataclass(frozen=True)
class Case:
    """One operator, `call`, on four matrices: two of floating point, one of booleans, one of integers."""

    name: str
    op: Any  # its key in the table
    call: Callable[..., Tensor]


def _op(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


def _cases() -> Iterator[Case]:
    for name in UNARY.split():
        yield Case(name, op := _op(f"{name}.default"), lambda x, y, mask, whole, op=op: op(x))
    for name in BINARY:
        yield Case(name, op := _op(name), lambda x, y, mask, whole, op=op: op(x, y))
    for name, number in itertools.product(SCALAR, NUMBERS):
        yield Case(f"{name} {number}", op := _op(name), lambda x, y, mask, whole, op=op, n=number: op(x, n))
    for op in map(_op, MASKS):
        yield Case(f"{op} of masks", op, lambda x, y, mask, whole, op=op: op(mask, op(y > 0, mask)))
    for op in (aten.add.Tensor, aten.sub.Tensor):
        yield Case(f"{op} alpha", op, lambda x, y, mask, whole, op=op: op(x, y, alpha=2))
    for n in POWERS:
        yield Case(f"pow {n}", n, lambda x, y, mask, whole, n=n: aten.pow.Tensor_Scalar(x, n))
    yield Case("where", aten.where.self, lambda x, y, mask, whole: aten.where.self(mask, x, y))
    opposite = aten.logical_not.default
    yield Case("not of a mask", opposite, lambda x, y, mask, whole: opposite(mask))
    yield Case("mul by a mask", aten.mul.Tensor, lambda x, y, mask, whole: aten.mul.Tensor(x, mask))
    convert, copy = prims.convert_element_type.default, aten._to_copy.default
    for dtype in [*FLOATS, torch.bool]:
        yield Case(f"convert to {dtype}", convert, lambda x, y, mask, whole, dtype=dtype: convert(x, dtype))
        yield Case(f"copy to {dtype}", copy, lambda x, y, mask, whole, dtype=dtype: copy(x, dtype=dtype))
    yield Case("convert a mask", convert, lambda x, y, mask, whole: convert(mask, x.dtype))
    yield Case("convert integers", convert, lambda x, y, mask, whole: convert(whole, x.dtype))
    for name in ("clone", "alias", "detach"):
        yield Case(name, op := _op(f"{name}.default"), lambda x, y, mask, whole, op=op: op(x))
    full, scalar = aten.full.default, aten.scalar_tensor.default
    for n in (0, 0.1, -2.5, math.inf, math.nan):

        def filled(x: Tensor, y: Tensor, mask: Tensor, whole: Tensor, n: float = n) -> Tensor:
            return aten.where.self(mask, x, full([1], n, dtype=x.dtype, device=x.device, pin_memory=False))

        def made_of_one(x: Tensor, y: Tensor, mask: Tensor, whole: Tensor, n: float = n) -> Tensor:
            return aten.where.self(mask, x, scalar(n, dtype=x.dtype, device=x.device))

        yield from (Case(f"full {n}", full, filled), Case(f"scalar_tensor {n}", scalar, made_of_one))


CASES = list(_cases())


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every pair of some numbers, a mask and integers."""
    some = torch.cat([torch.tensor(specials(dtype)).to(dtype), numbers((8,), dtype, "normal", seed=3)])
    x = some[:, None].expand(len(some), len(some)).contiguous()
    whole = (torch.arange(x.numel()) ** 3).reshape(x.shape) - 1000
    return x, x.t().contiguous(), whole % 3 == 0, whole


def ordered(x: Tensor) -> Tensor:
    """Maps float32 values to integers: adjacent values differ by 1, and both zeros are 0."""
    code = x.view({2: torch.int16, 4: torch.int32}[x.element_size()]).to(torch.int64)
    return torch.where(code < 0, -(1 << (8 * x.element_size() - 1)) - code, code)


def assert_equal(expected: Tensor, got: Tensor, ulps: int | Tensor, any_zero: bool, given: tuple) -> None:
    assert expected.dtype == got.dtype
    if not expected.dtype.is_floating_point:
        wrong = expected != got
    else:
        nan = expected.isnan()
        wrong = nan != got.isnan()
        wrong |= ((ordered(expected) - ordered(got)).abs() > ulps) & ~nan
        if not any_zero:
            wrong |= (expected.signbit() != got.signbit()) & ~nan
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        of = ", ".join(str(x[at].item()) for x in given)
        pytest.fail(f"{int(wrong.sum())} differ; of ({of}): {expected[at].item()} became {got[at].item()}")


@pytest.mark.cases(test=60, slow=30)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_operator(case: Case, dtype: str) -> None:
    given, scale = inputs(DTYPES[dtype]), torch.tensor([1.5])

    def graph(*args: Tensor) -> tuple:
        value = case.call(*args[:-1])
        number = value if value.dtype in FLOATS else prims.convert_element_type.default(value, torch.float32)
        return value, Cast().copy(number, args[-1]), ops.amax(number)

    made = fused(trace(graph, (*given, scale)))
    assert made.kinds == (("amax", "copy", "value"),)
    value, copy, amax = made.fused(*given, scale)
    allowed: int | Tensor = ULPS.get(case.op, 0)
    # the kernel computes half precision in float32 and rounds once, as torch on a GPU; a CPU may round a
    # number first, or twice
    wide = [x.to(torch.float32) if x.dtype in FLOATS else x for x in given]
    expected = case.call(*wide) if value.dtype in (given[0].dtype, torch.bool) else case.call(*given)
    expected, fits = expected.to(value.dtype), torch.tensor(True)
    if value.dtype in FLOATS and value.dtype != torch.float32:
        allowed = 1 if "alpha" in case.name else min(allowed, 1)
    elif case.op in GROWING:
        allowed = allowed + wide[0].abs().clamp(max=128).nan_to_num().to(torch.int64)
    if "alpha" in case.name:  # one fused operation or two: the results differ if alpha * y overflows
        fits = (wide[1] * 2).isfinite() | ~wide[1].isfinite()
    assert_equal(
        expected.masked_fill(~fits, 0), value.masked_fill(~fits, 0), allowed, case.op in ANY_ZERO, given
    )
    # the cast and the amax must be exactly those of the returned value
    number = value.to(torch.float32)
    assert_equal(ops.amax(number), amax, 0, False, (amax,))
    assert torch.equal(Cast().copy(number, scale).view(torch.uint8) & 127, copy.view(torch.uint8) & 127)


def test_every_entry_is_covered() -> None:
    table = {*FORMS, *POWERS, *COPIES, *CONSTANTS}
    covered = {case.op for case in CASES}
    assert not table - covered, f"no test for {sorted(map(str, table - covered))}"
    assert not covered - table, f"not in the table: {sorted(map(str, covered - table))}"


# -- functions of several operators --

# the largest errors of the table in `expressions`: of the factor of x and the derivative, in units of 2^-24;
# relative, of the function, from -4 to -2
ERRORS = {"gelu": (1.9, 2.6, 3.8e-5), "gelu by tanh": (2.4, 3.4, 9.2e-7), "silu": (2.4, 12.6, 3.5e-7)}


def _both(x: Tensor, dy: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """A function and its gradient."""
    if name == "silu":
        return aten.silu(x), aten.silu_backward(dy, x)
    approximate = "tanh" if name == "gelu by tanh" else "none"
    gradient = aten.gelu_backward(dy, x, approximate=approximate)
    return aten.gelu(x, approximate=approximate), gradient


def _fused_both(x: Tensor, dy: Tensor, name: str) -> tuple[Any, tuple[Tensor, Tensor]]:
    scale = torch.tensor([1.5])

    def graph(x: Tensor, dy: Tensor, scale: Tensor) -> tuple:
        y, dx = _both(x, dy, name)
        return y, dx, Cast().copy(y, scale), Cast().copy(dx, scale)

    made = fused(trace(graph, (x, dy, scale)), (64, 1024, 4))
    (source,) = made.sources
    assert not any(part in source for part in ("erf", "tanh", "div_rn", " / v"))
    assert source.count("exp2") == (2 if name == "gelu" else 1)
    return made, made.fused(x, dy, scale)[:2]


def _exact(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The factor of x, and the derivative."""
    if name == "silu":
        factor = torch.sigmoid(x)
        return factor, factor * (1 + x * torch.sigmoid(-x))
    if name == "gelu":
        factor = torch.special.erfc(-x / math.sqrt(2)) / 2
        return factor, factor + x * (-x * x / 2).exp() / math.sqrt(2 * math.pi)
    u, slope = x + 0.044715 * x**3, 2 * math.sqrt(2 / math.pi)
    factor, rest = torch.sigmoid(slope * u), torch.sigmoid(-slope * u)
    return factor, factor + x * factor * rest * slope * (1 + 3 * 0.044715 * x * x)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_functions(name: str) -> None:
    x = torch.linspace(-12, 12, 64 * 1024).reshape(64, 1024)
    _, (y, dx) = _fused_both(x, torch.ones_like(x), name)
    factor, derivative = _exact(x.double(), name)
    errors = ((y / x.double() - factor).abs(), (dx - derivative).abs())
    relative = (y / (x.double() * factor) - 1)[(x >= -4) & (x <= -2)].abs().max().item()
    of_factor, of_derivative = (error.max().item() * 2**24 for error in errors)
    for found, most in zip((of_factor, of_derivative, relative), ERRORS[name], strict=True):
        assert most / 2 < found <= most


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ERRORS)
def test_functions_of_special_numbers(name: str, dtype: str) -> None:
    """Infinities, NaN and numbers whose square is infinite give what torch's operators give, one by one."""
    x, dy, *_ = inputs(DTYPES[dtype])
    made, found = _fused_both(x, dy, name)
    info = torch.finfo(DTYPES[dtype])
    size, least = info.eps + 2.0**-20, info.smallest_normal * info.eps
    for expected, got, by in zip(made.oracle(x, dy, torch.tensor([1.5])), found, (x, dy), strict=False):
        assert got.dtype == x.dtype and torch.equal(expected.isnan(), got.isnan())
        finite = expected.isfinite()
        assert torch.equal(*(x.masked_fill(finite, 0).nan_to_num(0, 1, -1) for x in (expected, got)))
        apart = (expected.double() - got.double()).abs()
        allowed = size * expected.double().abs() + 2.0**-20 * by.double().abs() + least
        assert (apart <= allowed)[finite].all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_casts_of_a_constant(dtype: str) -> None:
    """The gradient of a sum, when its value is a constant."""
    scale = torch.tensor([1.5])

    def graph(scale: Tensor) -> tuple:
        ones = aten.full.default([20, 40], 1.25, dtype=DTYPES[dtype], device=scale.device, pin_memory=False)
        return *Cast().both(ones, scale), ops.amax(ones)

    made = fused(trace(graph, (scale,)))
    assert made.kinds == (("amax", "copy", "transposed"),)
    for expected, got in zip(made.oracle(scale), made.fused(scale), strict=True):
        assert torch.equal(expected.to(torch.float32), got.to(torch.float32))
