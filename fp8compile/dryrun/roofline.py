"""How long a described kernel takes at least: the longer of its bytes and its FLOPs at sustained rates, plus a launch.

Matmuls run at the device's rate for their dtype. Fused attention is slower than a matmul and stays in high precision, so with
long sequences it is most of a step: its FLOPs count at a share of the bf16 matmul rate. The shares are FlashAttention-2's,
forward and backward, the one that `scaled_dot_product_attention` takes first (transformers#48163 of August 2026 has timings):

    A100    225 TFLOP/s end to end (FlashAttention-2, arXiv:2307.08691), about 0.83 of the matmuls that it sustains
    H100    FlashAttention-2 reaches 35% of the peak of 989 TFLOP/s (FlashAttention-3, arXiv:2407.08608), 0.44 of 790.
            FlashAttention-3 is 1.5 to 2 times as fast, and so is cuDNN: for those, 0.75
    Ada, consumer Blackwell: as on the A100, whose instructions they share (assumed)
    others: as on the H100 (assumed)

Every other kernel is taken to be limited by its bytes. So is a convolution, which is wrong for a convolutional network.
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
    """Attention's sustained FLOP/s over those of bf16 matmuls."""
    return AMPERE if device.capability in _AS_AMPERE and not device.gfx else HOPPER


def seconds(launch: Launch, device: Device, attention: float | None = None) -> float:
    """The time of one launch; `attention` takes the place of `attention_share(device)`."""
    compute = 0.0
    if launch.matmul is not None:
        compute = launch.matmul.flops / device.flops.of(launch.matmul.dtype)
    elif launch.attention is not None:
        dtype = str(launch.attention.q.dtype).removeprefix("torch.")
        compute = launch.attention.flops / (device.flops.of(dtype) * (attention or attention_share(device)))
    return max(launch.bytes / device.bandwidth, compute) + device.launch
