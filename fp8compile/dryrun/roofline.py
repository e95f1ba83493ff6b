"""The least time of a described kernel: the longer of its bytes and its FLOPs at sustained rates, plus a launch.

Matmuls run at the device's rate for their dtype. Fused attention is slower than a matmul and stays in high precision, so it
takes most of a step with long sequences. Its FLOPs count at a share of the bf16 matmul rate. The shares are those of
FlashAttention-2, forward and backward, which `scaled_dot_product_attention` prefers (timings: transformers#48163, August 2026):

    A100    225 TFLOP/s end to end (FlashAttention-2, arXiv:2307.08691), about 0.83 of the sustained matmul rate
    H100    FlashAttention-2 reaches 35% of the peak of 989 TFLOP/s (FlashAttention-3, arXiv:2407.08608), 0.44 of the sustained
            790. FlashAttention-3 and cuDNN are 1.5 to 2 times as fast: 0.75 for them
    Ada, consumer Blackwell: as on the A100, because they share its instructions (assumed)
    others: as on the H100 (assumed)

Every other kernel is assumed to be limited by its bytes. This includes convolutions, so it is wrong for convolutional networks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..devices.catalog import Device
    from .fake_gpu import Launch

AMPERE = 0.83
HOPPER = 0.44
FLASH_ATTENTION_3 = 0.75
_AS_AMPERE = {(8, 0), (8, 6), (8, 9), (12, 0)}


def attention_share(device: Device) -> float:
    """Sustained FLOP/s of fused attention divided by those of bf16 matmuls."""
    return AMPERE if device.capability in _AS_AMPERE and not device.gfx else HOPPER


def seconds(launch: Launch, device: Device, attention: float | None = None) -> float:
    """The seconds of one launch. `attention` replaces `attention_share(device)`."""
    compute = 0.0
    if launch.matmul is not None:
        compute = launch.matmul.flops / device.flops.of(launch.matmul.dtype)
    elif launch.attention is not None:
        dtype = str(launch.attention.q.dtype).removeprefix("torch.")
        compute = launch.attention.flops / (device.flops.of(dtype) * (attention or attention_share(device)))
    return max(launch.bytes / device.bandwidth, compute) + device.launch
