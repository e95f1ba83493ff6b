"""Operands of FP8 matmuls, and descriptions of GPUs that differ in their FP8 matmuls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile.devices import catalog
from fp8compile.ir import ops

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
LINE, SQUARE, MX_BLOCK, MX_TILE = (1, 128), (128, 128), (1, 32), (32, 32)
H100, RTX4090, B200, RTX5090, MI300X = (
    catalog.find(key).gpu for key in ("h100", "rtx4090", "b200", "rtx5090", "mi300x")
)


def ends(sizes: Sequence[int]) -> Tensor:
    """The ends of groups of rows of these sizes, int32."""
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def operand(
    rows: int, k: int, block: Sequence[int], dtype: torch.dtype = E4M3, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """An FP8 copy [rows, K] and the inverses of its scales, which are powers of two."""
    generator = torch.Generator().manual_seed(seed)
    copy = (3 * torch.randn(rows, k, generator=generator)).to(dtype)
    shape = (1,) if tuple(block) == (0, 0) else (ops.blocks(rows, block[0]), ops.blocks(k, block[1]))
    return copy, 2.0 ** torch.randint(-6, 7, shape, generator=generator).to(F32)
