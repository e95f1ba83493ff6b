"""Gradients as bytes: E4M3 in blocks of 128 elements, and the scale of a block after its bytes.

Two ways across a process group. Nothing is ever added in FP8: what a rank receives is added up in float32.

    reduce_scatter   quantize, all-to-all, add        FSDP2: each rank keeps the sum of its shard
    all_reduce       the same, then quantize, all-gather      DDP: each rank gets the same bits

A block is 132 bytes where bf16 has 256. Collectives move uint8: gloo, and NCCL before Hopper, refuse FP8.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ... import compat

BLOCK = 128
WIRE = BLOCK + 4  # bytes of a block: E4M3, and its scale in float32
FORMAT = torch.float8_e4m3fn
LARGEST, SMALLEST = torch.finfo(FORMAT).max, torch.finfo(torch.float32).tiny


def quantize(rows: Tensor) -> Tensor:
    """[..., 128] of any floating dtype -> uint8 [..., 132].

    The scale is amax / 448. A block with an infinity or NaN has the scale NaN, and arrives as NaN: whoever
    looks for infinite gradients (`clip_grad_norm_`, a `GradScaler`) has to see them."""
    values = rows.float()
    amax = values.abs().amax(-1, keepdim=True)
    scale = torch.where(amax.isfinite(), (amax / LARGEST).clamp(min=SMALLEST), torch.nan)
    data = (values / scale).clamp(-LARGEST, LARGEST).to(FORMAT)
    return torch.cat([data.view(torch.uint8), scale.view(torch.uint8)], -1)


def dequantize(sent: Tensor) -> Tensor:
    """uint8 [..., 132] -> float32 [..., 128]."""
    data, scale = sent.split((BLOCK, 4), -1)
    return data.contiguous().view(FORMAT).float() * scale.contiguous().view(torch.float32)


def to_rows(values: Tensor) -> Tensor:
    """[..., n] -> [..., blocks, 128], the last block filled up with zeros. A view if 128 divides n."""
    missing = -values.shape[-1] % BLOCK
    return (functional.pad(values, (0, missing)) if missing else values).unflatten(-1, (-1, BLOCK))


def reduce_scatter(rows: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """[ranks, blocks, 128] -> float32 [blocks, 128], the sum over all ranks of what they have for this one.
    Also the bytes that this rank has sent, [ranks, blocks, 132]."""
    sent = quantize(rows)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return dequantize(received).sum(0), sent


def all_reduce(rows: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """[blocks, 128] -> float32 [blocks, 128], the sum over all ranks, the same bits on each. Also the bytes
    that this rank has sent first, [blocks, 132]."""
    ranks, blocks = dist.get_world_size(group), rows.shape[0]
    missing = -blocks % ranks
    padded = functional.pad(rows, (0, 0, 0, missing)) if missing else rows
    part, sent = reduce_scatter(padded.unflatten(0, (ranks, -1)), group)
    mine = quantize(part)
    whole = torch.empty((ranks * mine.shape[0], WIRE), dtype=torch.uint8, device=rows.device)
    compat.process_groups.all_gather(whole, mine, group)
    return dequantize(whole)[:blocks], sent.flatten(0, 1)[:blocks]
