"""What ATen, cuBLASLt and CUTLASS take: the rules for `_scaled_mm` and `_scaled_grouped_mm`, by GPU, torch
and CUDA.

The plan for a described GPU is executed on a CPU (`executed`), where any call would do. So each call is first
held against these rules, and `Refused` says which of them it breaks. `RULES` has the names.

Read in ScaledBlas.cpp, GroupedBlas.cpp, RowwiseScaledMM.cu, GroupMMCommon.cuh, ScaledGroupMM.cu and
GroupedMMUtils.h, in copies from before and after float32 came to the rowwise kernel (2.15), not release by
release; and in the issues that are named. What only cuBLASLt says (alignment and storage of scales) is from
its documentation, at second hand. ROCm's rules are those of the same files under USE_ROCM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Version = tuple[int, int]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E4M3_FNUZ, E5M2_FNUZ = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
E8M0 = torch.float8_e8m0fnu

RULES = {
    "gpu": "the GPU multiplies FP8: 8.9 and from 9.0 on; gfx942, gfx950, gfx120x",
    "sizes": "a [M, K] and b [K, N]",
    "k of 16": "K is a multiple of 16",
    "n of 16": "N is a multiple of 16",
    "encoding": "both operands are FP8, in the GPU's own encoding",
    "two e5m2": "NVIDIA multiplies no E5M2 by E5M2",
    "scaling": "both scales fit one kind of scaling: of tensors, rows, 128-blocks or 1 x 32 blocks",
    "out": "the result is contiguous, of the dtype that was asked for: bf16, fp16 or fp32",
    "bias size": "N neighbouring elements",
    "bias of fp32": "a float32 result has no bias",
    "bias dtype": "the bias has the dtype of the result",
    "layout": "a row by row and b column by column; B200 and Thor also take the other order",
    "leading": "rows and columns begin at multiples of 16 bytes, and do not overlap",
    "pointers": "operands and result begin at multiples of 16 bytes",
    "tensor scales": "the scale of a tensor begins at a multiple of 16 bytes (cuBLASLt of CUDA 13.0)",
    "rowwise gpu": "AMD scales rows from gfx94 on, not on gfx12",
    "rowwise out": "CUTLASS returns bf16 and fp16, from torch 2.15 on fp32; hipBLASLt bf16",
    "rowwise b": "with a scale a row, CUTLASS and hipBLASLt take b in E4M3 only",
    "rowwise scales": (
        "the scales of rows are neighbours in memory; for cuBLASLt they begin at a multiple of 16 bytes"
    ),
    "rowwise packed": "on 8.9, CUTLASS takes K for the distance of rows and of columns",
    "block gpu": "only Hopper scales 128-blocks, from CUDA 12.9 on",
    "block k": "128 x 128 scales are stored by fours along K (pytorch#166752: else silently wrong)",
    "block rows": "a column of 1 x 128 scales begins at a multiple of 16 bytes",
    "block scales": "the scales of blocks begin at a multiple of 16 bytes",
    "block accumulation": "no fast accumulation with 128-blocks",
    "mx gpu": "NVIDIA from Blackwell on (CUDA 12.8, GeForce 12.9); AMD's takes another layout of scales",
    "mx k": "K is a multiple of 32",
    "mx scales": "the scales of 1 x 32 blocks begin at a multiple of 16 bytes",
    "groups gpu": "NVIDIA's 9.x and 10.x, and AMD's",
    "groups sizes": "a [M, K] and b [E, K, N], or a [R, P] and b [P, C]; all but M are multiples of 16",
    "groups encoding": "both operands are E4M3",
    "groups layout": "a row by row and b column by column, each beginning at a multiple of 16 bytes",
    "groups ends": "one int32 a group, in one dimension; fewer than 1024 groups",
    "groups scales": "float32: [M] and [E, N], or [E * R] and [E * C], the last dimension contiguous",
    "groups out": "bf16, without bias",
    "groups align": "in P, each group but the last has a multiple of 16 columns",
    "groups order": "the ends rise, and none is beyond the operand",
}

GROUPS = 1024


class Refused(AssertionError):
    """A call that the GPU's libraries do not take, or compute wrongly. `broken`: names of rules."""

    def __init__(self, operator: str, library: Library, broken: Sequence[str], call: NamedTuple):
        self.broken = tuple(broken)
        told = "; ".join(f"{name}: {RULES[name]}" for name in broken)
        given = ", ".join(f"{key}={_told(value)}" for key, value in zip(call._fields, call, strict=True))
        super().__init__(
            f"{library.gpu.target}, torch {library.torch}, CUDA {library.cuda}: "
            f"{operator}({given}) breaks {told}"
        )


class Product(NamedTuple):
    """The arguments of `_scaled_mm`. `out`: where the result goes, if that exists before the call."""

    a: Tensor
    b: Tensor
    a_scale: Tensor
    b_scale: Tensor
    bias: Tensor | None = None
    out_dtype: torch.dtype | None = BF16
    fast_accum: bool = False
    out: Tensor | None = None


class Grouped(NamedTuple):
    """The arguments of `_scaled_grouped_mm`."""

    a: Tensor
    b: Tensor
    a_scale: Tensor
    b_scale: Tensor
    offs: Tensor
    bias: Tensor | None = None
    out_dtype: torch.dtype | None = BF16
    fast_accum: bool = False


class Library(NamedTuple):
    """What a process has: its GPU (a `Gpu`), the versions of torch and CUDA."""

    gpu: Any
    torch: Version
    cuda: Version

    def check(self, call: Product | Grouped) -> None:
        """Raises `Refused`."""
        one = isinstance(call, Product)
        broken = list(_product(self, call) if one else _grouped(self, call))  # type: ignore[arg-type]
        if broken:
            raise Refused("_scaled_mm" if one else "_scaled_grouped_mm", self, broken, call)

    @property
    def by_cutlass(self) -> bool:
        """Whether CUTLASS scales rows; else cuBLASLt, or AMD's."""
        return not self.gpu.gfx and (self.gpu.major != 9 or self.cuda < (12, 9))

    @property
    def encoding(self) -> tuple[torch.dtype, torch.dtype]:
        return (E4M3_FNUZ, E5M2_FNUZ) if self.gpu.gfx == "gfx942" else (E4M3, E5M2)


def scaling(call: Product) -> str | None:
    """The kind of scaling that ATen finds from shapes and strides: the first of those that fit."""
    a, b = call.a, call.b.t()
    a_kinds = _kinds(a, call.a_scale)
    b_kinds = _kinds(b, call.b_scale.t() if call.b_scale.dim() <= 2 else call.b_scale)
    pairs = (("tensor", "tensor"), ("row", "row"), ("square", "line"), ("line", "square"), ("line", "line"))
    for pair in pairs:
        if pair[0] in a_kinds and pair[1] in b_kinds:
            return pair[0] if pair[0] == pair[1] else "square"
    return "mx" if _is_mx(a, call.a_scale) and _is_mx(b, call.b_scale) else None


def _kinds(operand: Tensor, scale: Tensor) -> set[str]:
    """The kinds that the float32 scales of an operand [rows, K] may be."""
    if scale.dtype != FP32:
        return set()
    (rows, k), found = operand.shape, set()
    if scale.numel() == 1:
        found.add("tensor")
    if scale.dim() == 2:
        if scale.shape == (rows, 1) and scale.is_contiguous():
            found.add("row")
        if _lies(scale, (rows, _parts(k)), (1, rows)):
            found.add("line")
        if _lies(scale, (_parts(rows), _parts(k)), (_parts(k), 1)):
            found.add("square")
    return found


def _lies(scale: Tensor, shape: tuple[int, int], stride: tuple[int, int]) -> bool:
    """Has it this shape and these strides? The stride of a dimension of size 1 does not matter."""
    return scale.shape == shape and all(
        n <= 1 or s == t for n, s, t in zip(shape, scale.stride(), stride, strict=True)
    )


def _is_mx(operand: Tensor, scale: Tensor) -> bool:
    rows, k = operand.shape
    wanted = _parts(rows) * 128 * (-(-_parts(k, 32) // 4) * 4)
    return scale.dtype == E8M0 and scale.numel() == wanted and scale.is_contiguous()


def _parts(size: int, block: int = 128) -> int:
    return -(-size // block)


def _product(library: Library, call: Product) -> Iterator[str]:
    """The names of what a call of `_scaled_mm` breaks."""
    a, b, _, _, bias, out_dtype, fast_accum, out = call
    gpu, amd = library.gpu, bool(library.gpu.gfx)
    if not (
        gpu.gfx.startswith(("gfx942", "gfx950", "gfx120"))
        if amd
        else gpu.capability == (8, 9) or gpu.major >= 9
    ):
        yield "gpu"
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        yield "sizes"
        return
    (m, k), n = a.shape, b.shape[1]
    if k % 16:
        yield "k of 16"
    if n % 16:
        yield "n of 16"
    if a.dtype not in library.encoding or b.dtype not in library.encoding:
        yield "encoding"
    if not amd and a.dtype == b.dtype == E5M2:
        yield "two e5m2"
    wrong = out is not None and (out.dtype != out_dtype or not out.is_contiguous())
    if out_dtype not in (BF16, FP16, FP32) or wrong:
        yield "out"
    if bias is not None:
        if bias.numel() != n or not bias.is_contiguous():
            yield "bias size"
        if out_dtype == FP32:
            yield "bias of fp32"
        elif bias.dtype != out_dtype:
            yield "bias dtype"
    kind = scaling(call)
    if kind is None:
        yield "scaling"
    if 0 in (m, n, k):
        return
    either = amd or gpu.major in (10, 11)
    yield from _layout(a, b.t(), either and kind != "row" or amd)
    if any(x is not None and x.data_ptr() % 16 for x in (a, b, out)):
        yield "pointers"
    if kind == "tensor" and not amd and (call.a_scale.data_ptr() % 16 or call.b_scale.data_ptr() % 16):
        yield "tensor scales"
    if kind == "row":
        yield from _rows(library, call)
    elif kind in ("square", "line"):
        yield from _blocks(library, call, kind)
    elif kind == "mx":
        yield from _mx(library, call)


def _layout(a: Tensor, b: Tensor, either: bool) -> Iterator[str]:
    """a [M, K] and b [N, K]."""
    for operand in (a, b):
        rows, k = operand.shape
        if operand.stride(1) == 1:
            leading, least = operand.stride(0), k
        elif operand.stride(0) == 1 and either:
            leading, least = operand.stride(1), rows
        else:
            yield "layout"
            return
        if operand.shape[0 if operand.stride(1) == 1 else 1] > 1 and (leading < least or leading % 16):
            yield "leading"
            return


def _rows(library: Library, call: Product) -> Iterator[str]:
    a, b, a_scale, b_scale = call[:4]
    gpu, (m, k) = library.gpu, a.shape
    if gpu.gfx:
        if not gpu.gfx.startswith("gfx9"):
            yield "rowwise gpu"
        if call.out_dtype != BF16:
            yield "rowwise out"
    if library.by_cutlass:
        if call.out_dtype == FP32 and library.torch < (2, 15):
            yield "rowwise out"
        if a_scale.stride(0) != 1 or b_scale.stride(1) != 1:
            yield "rowwise scales"
        if gpu.capability == (8, 9) and (m > 1 and a.stride(0) != k or b.stride(1) != k):
            yield "rowwise packed"
    elif not gpu.gfx:
        if a_scale.data_ptr() % 16 or b_scale.data_ptr() % 16:
            yield "rowwise scales"
    if (library.by_cutlass or gpu.gfx) and b.dtype not in (E4M3, E4M3_FNUZ):
        yield "rowwise b"


def _blocks(library: Library, call: Product, kind: str) -> Iterator[str]:
    if library.gpu.gfx or library.gpu.major != 9 or library.cuda < (12, 9):
        yield "block gpu"
    if kind == "square" and call.a.shape[1] % 512:
        yield "block k"
    lines = ((call.a, call.a_scale), (call.b.t(), call.b_scale.t()))
    if any("line" in _kinds(x, scale) and x.shape[0] % 4 and x.shape[1] > 128 for x, scale in lines):
        yield "block rows"
    if call.a_scale.data_ptr() % 16 or call.b_scale.data_ptr() % 16:
        yield "block scales"
    if call.fast_accum:
        yield "block accumulation"


def _mx(library: Library, call: Product) -> Iterator[str]:
    gpu = library.gpu
    if gpu.gfx or gpu.major < 10 or library.cuda < ((12, 8) if gpu.major == 10 else (12, 9)):
        yield "mx gpu"
    if call.a.shape[1] % 32:
        yield "mx k"
    if call.a_scale.data_ptr() % 16 or call.b_scale.data_ptr() % 16:
        yield "mx scales"


def _grouped(library: Library, call: Grouped) -> Iterator[str]:
    """What a call of `_scaled_grouped_mm` breaks, by name. If b has two dimensions, groups are parts of P."""
    a, b, a_scale, b_scale, offs, bias, out_dtype, _ = call
    gpu, rows = library.gpu, b.dim() == 3
    if not (gpu.gfx.startswith(("gfx942", "gfx950", "gfx120")) if gpu.gfx else gpu.major in (9, 10)):
        yield "groups gpu"
    if (
        a.dim() != 2
        or b.dim() not in (2, 3)
        or a.shape[1] != b.shape[-2]
        or a.shape[1] % 16
        or b.shape[-1] % 16
    ):
        yield "groups sizes"
        return
    if a.dtype != library.encoding[0] or b.dtype != library.encoding[0]:
        yield "groups encoding"
    turned = b.transpose(-2, -1)
    for operand in (a, turned):
        leading = operand.stride(-2)
        if operand.stride(-1) != 1 or leading < operand.shape[-1] or leading % 16 or operand.data_ptr() % 16:
            yield "groups layout"
            break
    if (
        offs.dtype != torch.int32
        or offs.dim() != 1
        or offs.shape[0] >= GROUPS
        or rows
        and offs.shape[0] != b.shape[0]
    ):
        yield "groups ends"
        return
    count, (m, _) = offs.shape[0], a.shape
    shapes = ((m,), (count, b.shape[2])) if rows else ((count * m,), (count * b.shape[1],))
    given = zip((a_scale, b_scale), shapes, strict=True)
    if any(x.dtype != FP32 or x.shape != shape or x.stride(-1) != 1 for x, shape in given):
        yield "groups scales"
    if out_dtype not in (None, BF16) or bias is not None:
        yield "groups out"
    ends = [0, *offs.tolist()]
    sizes = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    if min(sizes, default=0) < 0 or ends[-1] > (m if rows else a.shape[1]):
        yield "groups order"
    if not rows and any(size % 16 for size in sizes[:-1]):
        yield "groups align"


def _told(value: object) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} at {value.data_ptr() % 16}"
