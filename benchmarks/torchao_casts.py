"""torchao's Triton kernels that cast to FP8 with one scale per tensor, as of torchao 0.18.

They are in torchao/prototype/float8nocompile. They read a contiguous matrix and write it row-major and
transposed row-major, as ours do. They fuse no producer (GELU, norm), so only plain casts are compared. They
round the product with the scale to bfloat16 before the cast. torchao's other Triton casts have scales for
rows, blocks or groups, and cannot be compared.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MODULE = "torchao.prototype.float8nocompile.kernels.fp8_dynamic_tensorwise"


@dataclass(frozen=True)
class Peer:
    what: str
    # the family's outputs; None for an output that torchao does not compute
    call: Callable[..., tuple[Tensor | None, ...]]


def missing() -> str | None:
    """Why torchao's kernels cannot be used, or None."""
    try:
        importlib.import_module(MODULE)
    except Exception as error:  # a torchao for another version of torch fails in many ways
        return f"not usable: {type(error).__name__}"
    return None


def weight(w: Tensor, scale: Tensor) -> tuple[Tensor | None, ...]:
    """Delayed scaling from torchao's parts: the current amax, and a cast with a given scale."""
    import triton

    module: Any = importlib.import_module(MODULE)
    rows, columns = w.shape
    dtype, float8 = module.FP8_DTYPE_MAP[w.dtype], torch.float8_e4m3fn
    amax = torch.zeros(1, dtype=torch.float32, device=w.device)
    module._amax_atomic[lambda meta: (triton.cdiv(w.numel(), meta["BLOCK_SIZE"]),)](
        w, amax, w.numel(), input_dtype=dtype, EPS=module.EPS
    )
    copy = torch.empty(rows, columns, dtype=float8, device=w.device)
    transposed = torch.empty(columns, rows, dtype=float8, device=w.device)
    largest = torch.finfo(float8).max

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(rows, meta["BLOCK_SIZE_ROWS"]), triton.cdiv(columns, meta["BLOCK_SIZE_COLS"])

    module._to_fp8_row_major_t_and_non_t[grid](
        *(w, copy, transposed, scale, w.numel(), -largest, largest, rows, columns),
        *(*w.stride(), *copy.stride(), *transposed.stride()),
        input_dtype=dtype,
        output_dtype=module.FP8_DTYPE_MAP[float8],
        EPS=module.EPS,
    )
    return copy, transposed, amax


def attention(x: Tensor, scale: Tensor) -> tuple[Tensor | None, ...]:
    return weight(x.transpose(1, 2).flatten(0, 1).flatten(1), scale)


def tensorwise(x: Tensor) -> tuple[Tensor | None, ...]:
    from torchao.float8.float8_training_tensor import LinearMMConfig

    module: Any = importlib.import_module(MODULE)
    copy, transposed = module.hp_to_fp8_row_major_t_and_non_t(x, torch.float8_e4m3fn, LinearMMConfig())
    return copy._data, transposed._data, None


_DELAYED = "_amax_atomic and _to_fp8_row_major_t_and_non_t"
CASTS = {
    "weight": Peer(_DELAYED, weight),
    "attention": Peer(_DELAYED, attention),
    "tensorwise": Peer("hp_to_fp8_row_major_t_and_non_t", tensorwise),
}
