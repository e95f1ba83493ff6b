"""A GPU as torch describes it: one class for GPUs of this process, GPUs only described, and fake GPUs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from . import architectures
from .architectures import Architecture

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Properties of a GPU, by the names of `torch.cuda.get_device_properties`. The defaults are an H200's.
    `L2_cache_size` is None if it is unknown."""

    name: str = "NVIDIA H200"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    total_memory: int = 141 << 30
    L2_cache_size: int | None = 60 << 20
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    shared_memory_per_block: int = 48 << 10
    shared_memory_per_block_optin: int = 227 << 10
    shared_memory_per_multiprocessor: int = 228 << 10
    memory_bus_width: int = 6144
    memory_clock_rate: int = 3201000
    clock_rate: int = 1980000
    gcnArchName: str = ""

    @property
    def capability(self) -> tuple[int, int]:
        """NVIDIA's compute capability: (9, 0) is Hopper."""
        return self.major, self.minor

    @property
    def gfx(self) -> str:
        """AMD's architecture, such as "gfx942"; "" for NVIDIA."""
        return gfx_of(self)

    @property
    def target(self) -> str:
        """The architecture as compilers name it: "sm_90", "gfx942"."""
        return self.gfx or "sm_{}{}".format(*self.capability)

    def keeps(self, size: int) -> bool:
        """True if `size` bytes, read a moment ago, are still in L2. Half of it is counted: what else moves
        takes the rest, and in large ones each half keeps a copy of what its units read. If unknown: no."""
        return self.L2_cache_size is not None and 2 * size <= self.L2_cache_size

    @property
    def architecture(self) -> Architecture:
        return architectures.of(self.capability, self.gfx)


H200 = Gpu()


def gfx_of(properties: Any) -> str:
    """AMD's architecture without its features ("gfx942:sramecc+:xnack-" -> "gfx942"); "" for other GPUs, for
    which torch may put the device's name into `gcnArchName`."""
    name = str(getattr(properties, "gcnArchName", "") or "").split(":")[0]
    return name if name.startswith("gfx") else ""


def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU of this process that `device` names; None for a CPU. What torch does not give is an H200's, but
    for the size of L2, which is unknown then."""
    if device.type != "cuda":
        return None
    import torch

    properties = torch.cuda.get_device_properties(device)
    names = [field.name for field in dataclasses.fields(Gpu) if hasattr(properties, field.name)]
    given = {name: getattr(properties, name) for name in names}
    return Gpu(**{**given, "L2_cache_size": given.get("L2_cache_size") or None})  # some drivers say 0
