"""ATen's pointwise operators as Triton expressions: one table, checked against torch operator by operator.

A floating-point value is held as float32 whatever its dtype, and is rounded to its dtype where ATen rounds:
after each operator. So a fused chain gives the bytes that the operators give one by one, up to the last bit
of a transcendental function. Booleans are held as `int1`, integers as themselves.

In a form, `{0}`, `{1}`, .. are the operator's positional arguments: values or numbers. `abs`, `exp2` and the
like are Triton's. Divisions and reciprocals are its `/` (2 units in the last place), square roots and their
reciprocals are correctly rounded. An exponential is the hardware's power of two, so its relative error grows
with |x| as that of the product does, and a result below the normal numbers of float32 is 0 on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .. import compat
from ..devices.gpu import gpu_of
from ..ir import ops
from ..ir.fx_utils import CASTS, FLOATS, aten, is_tensor

TRITON_DTYPE = {
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.bool: "tl.int1",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.uint8: "tl.uint8",
    torch.int8: "tl.int8",
    torch.float8_e4m3fn: "tl.float8e4nv",
    torch.float8_e5m2: "tl.float8e5",
    torch.float8_e4m3fnuz: "tl.float8e4b8",
    torch.float8_e5m2fnuz: "tl.float8e5b16",
}

_EXP = "tl.exp2({0} * 1.4426950408889634)"  # two instructions; `tl.exp` takes five, for denormal results
_ERF_SMALL = (0.128379129, -0.376123557, 0.112804116, -0.0267177072, 0.00492478925, -0.00056601542)
_ERF_LARGE = (-0.00385447704, -1.61212287, -0.944228089, -0.127871992, 0.0213202889, -0.00165970404)


def _horner(coefficients: tuple[float, ...], x: str) -> str:
    """A polynomial as text, lowest power first. Kernels are not contracted: here it is asked for."""
    text = str(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        text = f"tl.fma({x}, {text}, {coefficient})"
    return text


# Statements before an expression: {name} is the name of the result. erf, off by at most 2 units in the last
# place of float32: for |x| < 1 as x + x P(x^2), else as 1 - 2^Q(|x|). P and Q are minimax polynomials of
# erf(x) / x - 1 and of log2(erfc(x)), the latter weighted by erfc (Lawson's iteration on 2,000 Chebyshev
# points). Both sides together cost 18 instructions; libdevice's erf, which chooses coefficients, 28.
PRELUDES: dict[Any, tuple[str, ...]] = {
    aten.erf.default: (
        "{name}_abs = tl.abs({0})",
        "{name}_2 = {0} * {0}",
        "{name}_small = tl.fma({0}, " + _horner(_ERF_SMALL, "{name}_2") + ", {0})",
        "{name}_large = 1 - tl.exp2(" + _horner(_ERF_LARGE, "{name}_abs") + ")",
    ),
}
_ERF = "tl.where({name}_abs < 1, {name}_small, tl.where({0} < 0, -{name}_large, {name}_large))"

# Functions of several operators (`composites`): statements, then the expression. Statements are named after
# an argument, so that functions of one argument share them. A GELU is x Phi(x); 1 - Phi(|x|) = 2^T(|x|), with
# T a polynomial like Q above, weighted by the 0.9th power. By tanh, Phi = 0.5 (1 + tanh u) is the sigmoid of
# 2 u. A SiLU is x sigmoid(x). Largest errors for |x| <= 12, and with the operators one by one:
#
#     in units of 2^-24        exact    one by one    by tanh    one by one    SiLU    one by one
#     the factor of x           1.8        1.8          2.3         1.7         2.4       2.0
#     the derivative            2.5        2.5          3.3         9.4        12.5      12.5
#     relative, the function, x in
#     -3 to -2                3.3e-06    1.5e-05      6.4e-07     1.2e-05    3.2e-07   2.6e-07
#     -4 to -3                3.7e-05    6.8e-04      8.4e-07     8.4e-04    3.4e-07   2.8e-07
#     -5 to -4                6.8e-03    5.3e-02      1.8e-06     3.0e-01    3.5e-07   3.1e-07
_TAIL = (
    *(-0.999999966, -1.15110648, -0.45919748, -0.0525313782, 0.00711929903, -0.000183793539),
    *(-0.000165080645, 3.45851003e-05, -2.40628975e-06),
)
_EXACT = (
    "{0}_abs = tl.abs({0})",
    "{0}_tail = tl.exp2(" + _horner(_TAIL, "{0}_abs") + ")",
    "{0}_phi = tl.where({0} < 0, {0}_tail, 1 - {0}_tail)",
)
_DENSITY = "tl.exp2(tl.fma({0} * {0}, -0.7213475204444817, -1.3257480647361593))"
_SLOPE = 2 * math.sqrt(2 / math.pi)  # of 2 u, at 0; 2 u = SLOPE (x + 0.044715 x^3)
_TANH = (
    "{0}_2 = {0} * {0}",
    f"{{0}}_by = {{0}} * tl.fma({{0}}_2, {-_SLOPE * 0.044715 / math.log(2)}, {-_SLOPE / math.log(2)})",
    "{0}_exp = tl.exp2({0}_by)",
    "{0}_sigmoid = libdevice.fast_dividef(1.0, {0}_exp + 1)",
    "{0}_gelu = {0} * {0}_sigmoid",
)
_SIGMOID = "libdevice.fast_dividef(1.0, tl.exp2({0} * -1.4426950408889634) + 1)"
_SILU = f"{{0}}_sigmoid = {_SIGMOID}"
_RISE = f"tl.fma({{0}}_2, {_SLOPE * 3 * 0.044715}, {_SLOPE})"
COMPOSITES: dict[Callable[..., Any], tuple[str, ...]] = {
    (lambda x: aten.gelu.default(x)): (*_EXACT, "{0} * {0}_phi"),
    (lambda x, dy: aten.gelu_backward.default(dy, x)): (
        *_EXACT,
        "{1} * tl.fma({0}, " + _DENSITY + ", {0}_phi)",
    ),
    (lambda x: aten.gelu.default(x, approximate="tanh")): (*_TANH, "{0}_gelu"),
    (lambda x, dy: aten.gelu_backward.default(dy, x, approximate="tanh")): (
        *_TANH,
        "{0}_rest = tl.where({0}_by < 64, {0}_exp * {0}_sigmoid, 1.0)",  # 1 - sigmoid
        "{1} * tl.fma({0}_gelu * {0}_rest, " + _RISE + ", {0}_sigmoid)",
    ),
    (lambda x: aten.silu.default(x)): (_SILU, "{0} * {0}_sigmoid"),
    (lambda x, dy: aten.silu_backward.default(dy, x)): (
        _SILU,
        "{1} * {0}_sigmoid * tl.fma({0}, 1 - {0}_sigmoid, 1.0)",
    ),
}
_MAXIMUM = "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})"  # NaN wins, from either side
_MINIMUM = "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})"

FORMS: dict[Any, str] = {
    aten.neg.default: "{0} * -1.0",  # not `-x`, which older versions of Triton compute as 0 - x
    aten.abs.default: "tl.abs({0})",
    aten.exp.default: _EXP,
    aten.exp2.default: "tl.exp2({0})",
    aten.log.default: "tl.log({0})",
    aten.log2.default: "tl.log2({0})",
    aten.sin.default: "tl.sin({0})",
    aten.cos.default: "tl.cos({0})",
    aten.erf.default: _ERF,
    aten.tanh.default: "libdevice.tanh({0})",  # as in Inductor's kernels
    aten.sigmoid.default: _SIGMOID,
    aten.sqrt.default: "tl.sqrt_rn({0})",
    aten.rsqrt.default: "tl.div_rn(1.0, tl.sqrt_rn({0}))",
    aten.reciprocal.default: "1.0 / {0}",
    aten.relu.default: "tl.where({0} <= 0, 0.0, {0})",
    aten.square.default: "{0} * {0}",
    aten.sign.default: "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
    aten.mul.Tensor: "{0} * {1}",
    aten.mul.Scalar: "{0} * {1}",
    aten.div.Tensor: "{0} / {1}",
    aten.div.Scalar: "{0} / {1}",
    aten.add.Tensor: "{0} + {1}",
    aten.add.Scalar: "{0} + {1}",
    aten.sub.Tensor: "{0} - {1}",
    aten.sub.Scalar: "{0} - {1}",
    aten.maximum.default: _MAXIMUM,
    aten.minimum.default: _MINIMUM,
    aten.clamp_min.default: _MAXIMUM,
    aten.clamp_max.default: _MINIMUM,
    aten.where.self: "tl.where({0}, {1}, {2})",
    aten.logical_not.default: "{0} == 0",
    aten.logical_and.default: "({0} != 0) & ({1} != 0)",
    aten.logical_or.default: "({0} != 0) | ({1} != 0)",
    aten.bitwise_and.Tensor: "{0} & {1}",
    aten.bitwise_or.Tensor: "{0} | {1}",
    aten.isnan.default: "{0} != {0}",
    aten.isinf.default: 'tl.abs({0}) == float("inf")',
    **{
        getattr(getattr(aten, name), overload): f"{{0}} {sign} {{1}}"
        for name, sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items()
        for overload in ("Tensor", "Scalar")
    },
}
_HEAVY = ("exp", "exp2", "log", "log2", "sin", "cos", "erf", "tanh", "sigmoid")
HEAVY = tuple(getattr(aten, name).default for name in _HEAVY)  # many registers an element
POWERS = {
    0.5: "tl.sqrt_rn({0})",
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    -0.5: "tl.div_rn(1.0, tl.sqrt_rn({0}))",
    -1.0: "1.0 / {0}",
    -2.0: "1.0 / ({0} * {0})",
}
COPIES = (*CASTS, aten.clone.default, aten.alias.default, aten.detach.default)
CONSTANTS = {aten.full.default: 1, aten.scalar_tensor.default: 0}  # which argument is the number
INTEGER = (aten.where.self, aten.logical_not.default, aten.logical_and.default, aten.logical_or.default)


def supported(node: Node) -> bool:
    """True if this node can be written as a Triton expression, with its operator, arguments and dtypes."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dtype not in TRITON_DTYPE:
        return False
    target, arguments = node.target, [x for x in node.args if isinstance(x, Node)]
    if any(not is_tensor(x) for x in arguments):
        return False
    if target is ops.dequantize:
        return value.dtype in FLOATS
    dtypes = [x.meta["val"].dtype for x in arguments]
    if any(dtype not in TRITON_DTYPE for dtype in [value.dtype, *dtypes]):
        return False
    if any(dtype.itemsize == 1 and dtype.is_floating_point for dtype in [value.dtype, *dtypes]):
        return target in CASTS and value.dtype in FLOATS  # FP8 values that came from other ranks
    if target in CONSTANTS:
        return isinstance(node.args[CONSTANTS[target]], (int, float))
    if target in COPIES:
        return value.dtype in (*FLOATS, torch.bool) or dtypes == [value.dtype]
    if target is aten.pow.Tensor_Scalar:
        return float(node.args[1]) in POWERS and dtypes[0] in FLOATS  # type: ignore[arg-type]
    if target not in FORMS or any(not isinstance(x, (Node, int, float)) for x in node.args):
        return False
    alpha = node.kwargs.get("alpha", 1)
    if set(node.kwargs) - {"alpha"} or not isinstance(alpha, (int, float)):
        return False
    floats = set(dtypes) <= {*FLOATS, torch.bool} and not set(FLOATS).isdisjoint(dtypes)
    if target in (aten.bitwise_and.Tensor, aten.bitwise_or.Tensor):
        return all(dtype == torch.bool for dtype in dtypes)
    return floats or target in INTEGER and value.dtype in (torch.bool, *FLOATS)


def prelude(node: Node, operands: list[str], name: str) -> list[str]:
    """The statements before the expression of a node whose result is called `name`."""
    return [line.format(*operands, name=name) for line in PRELUDES.get(node.target, ())]


def expression(node: Node, operands: list[str], name: str = "v") -> str:
    """The Triton expression of a supported node: a value of the node's dtype, held as the module's docstring
    says. For a copy that changes nothing: the operand."""
    target, dtype = node.target, node.meta["val"].dtype
    if target is ops.dequantize:
        return rounded(f"({operands[0]}.to(tl.float32) * {operands[1]})", dtype)
    if target in CONSTANTS:
        return _rounded(node.args[CONSTANTS[target]], dtype)
    if target in COPIES:
        text = operands[0]
        source = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
        if dtype == torch.bool and source != torch.bool:
            return f"{text} != 0"
        if dtype in FLOATS and source not in FLOATS:
            text = f"{text}.to(tl.float32)"
        return rounded(text, dtype) if dtype in FLOATS and dtype != source else text
    if target is aten.pow.Tensor_Scalar:
        form = POWERS[float(node.args[1])]  # type: ignore[arg-type]
    else:
        form = FORMS[target]
    # a boolean in arithmetic is a number
    dtypes = [x.meta["val"].dtype if isinstance(x, Node) else None for x in node.args]
    if dtype in FLOATS and target is not aten.where.self:
        pairs = zip(operands, dtypes, strict=True)
        operands = [f"{x}.to(tl.float32)" if given == torch.bool else x for x, given in pairs]
    alpha = node.kwargs.get("alpha", 1)
    if alpha != 1:
        operands = [operands[0], f"({operands[1]} * {number_text(alpha)})"]
    text = form.format(*operands, name=name)
    return rounded(f"({text})", dtype) if dtype in (torch.bfloat16, torch.float16) else text


def rounded(text: str, dtype: torch.dtype) -> str:
    return text if dtype == torch.float32 else f"{text}.to({TRITON_DTYPE[dtype]}).to(tl.float32)"


def number_text(number: Any) -> str:
    """A Python number as a Triton literal."""
    if isinstance(number, float) and not math.isfinite(number):
        return f'float("{number}")'
    return repr(number)


def _rounded(number: Any, dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return str(bool(number))
    return number_text(torch.tensor(number, dtype=dtype).item())


def saturates(dtype: torch.dtype) -> bool:
    """True if casts to this FP8 format saturate and keep NaN. NVIDIA's do (PTX ISA, cvt.rn.satfinite)."""
    return torch.version.hip is None and dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


# PTX: four float32 become four FP8 numbers, each rounded once to nearest even, and saturated. (Two halves put
# together by `mov.b32`, by `prmt` or by `mad` are miscompiled, if they are equal.)
_CONVERT = (
    "{{ .reg .b16 l, h; .reg .b32 a, b; cvt.{0} l, $2, $1; cvt.{0} h, $4, $3; "
    "cvt.u32.u16 a, l; cvt.u32.u16 b, h; shl.b32 b, b, 16; or.b32 $0, a, b; }}"
)
_CONVERSIONS = {torch.float8_e4m3fn: "rn.satfinite.e4m3x2.f32", torch.float8_e5m2: "rn.satfinite.e5m2x2.f32"}
E4M3_BY_PTX = _CONVERT.format(_CONVERSIONS[torch.float8_e4m3fn])  # for kernels that are written by hand


def converted(value: str, dtype: torch.dtype, by_ptx: bool = False) -> str:
    """float32 to FP8 as text. `by_ptx`: where Triton's own is wrong (`compat.triton.converts_wrongly`)."""
    if not by_ptx or dtype not in _CONVERSIONS:
        return f"{value}.to({TRITON_DTYPE[dtype]})"
    code = _CONVERT.format(_CONVERSIONS[dtype])
    bits = f'tl.inline_asm_elementwise("{code}", "=r,f,f,f,f", [{value}], tl.uint8, True, 4)'
    return f"{bits}.to({TRITON_DTYPE[dtype]}, bitcast=True)"


# PTX: two bfloat16 become two float32.
_WIDEN = "{ .reg .b32 a, b; shl.b32 a, $2, 16; and.b32 b, $2, 0xffff0000; mov.b32 $0, a; mov.b32 $1, b; }"


def widened(value: str, by_ptx: bool = False) -> str:
    """A float as float32, as text. `by_ptx`: a bfloat16, where Triton would compute what depends on it twice
    (`compat.triton.widens_early`)."""
    if not by_ptx:
        return f"{value}.to(tl.float32)"
    return f'tl.inline_asm_elementwise("{_WIDEN}", "=f,=f,r", [{value}], tl.float32, True, 2)'


def widens_by_ptx(device: torch.device) -> bool:
    """True if kernels for this device may widen by PTX."""
    gpu = gpu_of(device)
    return gpu is not None and not gpu.gfx and compat.triton.widens_early()


def converts_by_ptx(device: torch.device) -> bool:
    """True if kernels for this device convert to FP8 by PTX."""
    gpu = gpu_of(device)
    return gpu is not None and not gpu.gfx and compat.triton.converts_wrongly(gpu.capability)
