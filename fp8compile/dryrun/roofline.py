"""The least time of a described kernel: the longer of bytes and FLOPs at sustained rates, plus a launch.

**Matmuls** run at the device's rate for their dtype, in waves of tiles (`devices.cost.compute`, without the
cost model's limit on what FP8 may gain). `waves=False` counts FLOPs at the full rate.

**Fused attention** is slower than a matmul and stays in high precision, so it takes most of a step with long
sequences. Its FLOPs, forward and backward, count at a share of the bf16 matmul rate. The share is that of the
kernel that `scaled_dot_product_attention` takes:

    Hopper  cuDNN, 0.71: forward 605 and backward 539 TFLOP/s in a training step on an H200, causal, 128 wide,
            8192 tokens (benchmarks/results/nvidia-h200), of 786 for matmuls. Since 2.10, torch prefers cuDNN
            on compute capabilities 9 and 10 if cuDNN is newer than 9.15
            (`check_prefer_cudnn_attention`, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
            The wheels of torch 2.11 and later bring such a cuDNN (transformers#48163, closed for this reason,
            August 2026). FlashAttention-3 and cuDNN are 1.5 to 2 times as fast as FlashAttention-2
            (arXiv:2407.08608), which reaches 35% of the peak of 989 TFLOP/s, 0.44 of the sustained 790.
            FlashAttention-2 runs where an older cuDNN is on LD_LIBRARY_PATH, or where
            TORCH_CUDNN_SDPA_DEPRIORITIZED is set
    B200, B300  cuDNN by the same rule; the share is assumed to be Hopper's
    A100    FlashAttention-2, 225 TFLOP/s end to end (arXiv:2307.08691), about 0.83 of sustained matmuls
    Ada, consumer Blackwell  FlashAttention-2; as on the A100, because they share its instructions (assumed)
    others  FlashAttention-2; 0.44, as on the H100 (assumed)

Every other kernel, generated ones too, is assumed to be limited by its bytes. This includes convolutions, so
it is wrong for convolutional networks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.recipe import COSTS
from ..devices import cost

if TYPE_CHECKING:
    from ..devices.catalog import Device
    from .fake_gpu import Launch, MatmulLaunch

_AS_AMPERE = {(8, 0), (8, 6), (8, 9), (12, 0)}


@dataclass(frozen=True)
class AttentionRate:
    """The kernel of fused attention, and its FLOP/s as a share of those of bf16 matmuls."""

    kernel: str
    share: float

    def __str__(self) -> str:
        return f"{self.kernel}, {self.share:g} of the bf16 matmul rate"


CUDNN = AttentionRate("cuDNN", 0.71)
FLASH_ATTENTION_2 = AttentionRate("FlashAttention-2", 0.44)
FLASH_ATTENTION_2_ON_AMPERE = AttentionRate("FlashAttention-2", 0.83)


def attention_rate(device: Device) -> AttentionRate:
    """What `scaled_dot_product_attention` takes on a device with torch 2.11 or later."""
    if not device.gfx and device.capability[0] in (9, 10):
        return CUDNN
    as_ampere = device.capability in _AS_AMPERE and not device.gfx
    return FLASH_ATTENTION_2_ON_AMPERE if as_ampere else FLASH_ATTENTION_2


def seconds(launch: Launch, device: Device, attention: float | None = None, waves: bool = True) -> float:
    """The seconds of one launch. `attention` replaces the share of `attention_rate(device)`."""
    compute, start = 0.0, device.launch
    if launch.matmul is not None:
        dtype, rate = _rate(launch.matmul)
        compute = launch.matmul.flops / device.flops.of(dtype) / rate
        groups, m, n, k = launch.matmul.sizes
        if waves and groups and m and n and k:
            compute = cost.compute(device, m, n, k, dtype, groups) / rate
            start = cost.start(device, dtype)
    elif launch.attention is not None:
        dtype = str(launch.attention.q.dtype).removeprefix("torch.")
        rate = device.flops.of(dtype) * (attention or attention_rate(device).share)
        compute = launch.attention.flops / rate
    return max(launch.bytes / device.bandwidth, compute) + start


def _rate(matmul: MatmulLaunch) -> tuple[str, float]:
    """The dtype whose rate a matmul runs at, and the part of that rate."""
    if matmul.dtype != "fp8":
        return matmul.dtype, 1.0
    if matmul.accumulation == "blocks":
        return "fp8", COSTS["blockwise"].gemm_rate
    return "fp8_precise" if matmul.accumulation == "precise" else "fp8", 1.0
