"""The launch that moves scaling state: `triton_move.fp8_move`, one program for each part of a page."""

from __future__ import annotations

import torch

from .state_page import Rows

BLOCK, NUMBERS = 64, 4096  # at most: slots at a time, and numbers of their histories
LONGEST = 4096  # the longest history that the kernel takes
WARPS = 4


def configuration(history: int) -> tuple[int, int]:
    """Slots at a time, numbers of a history (a power of two)."""
    columns = 1 << max(0, history - 2).bit_length()
    return max(1, min(BLOCK, NUMBERS // columns)), columns


def launch_move(page: torch.Tensor, scales: torch.Tensor, amaxes: torch.Tensor, parts: torch.Tensor) -> None:
    """Move pages in place, write their `scales`, and make `amaxes` unseen. `parts`: int32 [n, 2], the first
    row and the number of rows of each. Everything is contiguous."""
    from .triton_move import fp8_move

    history = Rows(page).length
    rows, columns = configuration(history)
    with torch.cuda.device_of(page):
        fp8_move[parts.shape[0],](
            page, scales, amaxes, parts, history, rows, columns, num_warps=WARPS, enable_fp_fusion=False
        )
