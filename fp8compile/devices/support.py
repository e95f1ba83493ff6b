"""Which devices multiply FP8, in which encodings, and which multiply blocks of 32 with a scale each (MX)."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from . import formats
from .architectures import AMD, OLDEST_NVIDIA
from .gpu import Gpu, gpu_of

if TYPE_CHECKING:
    import torch


def has_mx(gpu: Gpu | None) -> bool:
    """Whether a GPU multiplies 1 x 32 blocks with E8M0 scales: Blackwell does. `gpu` is None for a CPU."""
    return gpu is not None and _reached(gpu.architecture.mx_from)


def has_mx_of_either_major(gpu: Gpu | None) -> bool:
    """Whether our kernels multiply 1 x 32 blocks whose bytes lie along either dimension at full speed."""
    return gpu is not None and has_mx(gpu) and gpu.architecture.either_major


def has_blocks(gpu: Gpu) -> bool:
    """Whether cuBLASLt scales rows and 128-blocks."""
    return _reached(gpu.architecture.blocks_from)


def serves_powers_of_2(gpu: Gpu | None) -> bool:
    """Whether vLLM's scales of blocks are powers of two on this GPU by default: where DeepGEMM multiplies, on
    Hopper and Blackwell (`support_deep_gemm` in vllm/platforms/cuda.py, VLLM_USE_DEEP_GEMM_E8M0)."""
    return gpu is not None and not gpu.gfx and gpu.major in (9, 10, 12)


@functools.cache
def casts_to_e4m3(device: torch.device) -> bool:
    """Whether kernels that Inductor makes for a device may have E4M3 tensors. Triton refuses the type on
    NVIDIA's GPUs before Ada, also to convert it (read in 3.6 and 3.9)."""
    gpu = gpu_of(device)
    return gpu is None or bool(gpu.gfx) or gpu.capability >= OLDEST_NVIDIA


def _reached(version: tuple[int, int] | None) -> bool:
    return version is not None and cuda_version() >= version


def cuda_version() -> tuple[int, int]:
    """The CUDA version that torch was built with; 13.0 for a build without, which only describes GPUs."""
    import torch

    found = re.match(r"(\d+)\.(\d+)", torch.version.cuda or "13.0")
    assert found is not None, torch.version.cuda
    return int(found[1]), int(found[2])


def refusal(devices: Collection[torch.device]) -> str | None:
    """Why one of these devices cannot multiply FP8; None if all of them can."""
    for device in devices:
        if device.type not in ("cpu", "cuda"):
            return f"{device.type} devices have no FP8 matmuls here"
        gpu = gpu_of(device)
        if gpu is None or gpu.architecture.fp8:
            continue
        if gpu.gfx:
            return f"{gpu.gfx} has no FP8 matmuls ({', '.join(AMD[:-1])} and {AMD[-1]} do)"
        have, need = (".".join(map(str, version)) for version in (gpu.capability, OLDEST_NVIDIA))
        needs = f"FP8 matmuls need {need} (RTX 40, L4, H100 or later)"
        return f"{gpu.name} has compute capability {have}; {needs}"
    return None


def encodings(devices: Collection[torch.device]) -> tuple[str, ...]:
    """The FP8 encodings that these devices multiply: a GPU multiplies its own, a CPU emulates both."""
    if not any(device.type == "cuda" for device in devices):
        return "ocp", "fnuz"
    return ("fnuz",) if formats.fnuz() else ("ocp",)
