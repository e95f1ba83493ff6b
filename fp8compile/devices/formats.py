"""The FP8 formats: torch's dtype and its largest finite value.

E4M3 has more precision (3 mantissa bits), E5M2 has more range (5 exponent bits). ``hybrid`` uses E4M3 for
activations and weights and E5M2 for gradients; ``e4m3`` uses E4M3 for everything. AMD's gfx94x (MI300) uses
its own encodings, "fnuz": no infinities, no negative zero, one NaN, and an E4M3 that ends at 240. gfx95x and
later use the OCP encodings, like NVIDIA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import architectures
from .gpu import gfx_of

if TYPE_CHECKING:
    import torch  # not at run time: torch takes seconds to import, and reading a policy does not need it


@dataclass(frozen=True)
class Format:
    """An FP8 format. `max` is the largest finite value, to which a cast saturates."""

    name: str
    torch_name: str
    max: float

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.torch_name)


E4M3 = Format("e4m3", "float8_e4m3fn", 448.0)
E5M2 = Format("e5m2", "float8_e5m2", 57344.0)
E4M3_FNUZ = Format("e4m3_fnuz", "float8_e4m3fnuz", 240.0)
E5M2_FNUZ = Format("e5m2_fnuz", "float8_e5m2fnuz", 57344.0)

# by (wide, fnuz)
FORMATS = {(False, False): E4M3, (True, False): E5M2, (False, True): E4M3_FNUZ, (True, True): E5M2_FNUZ}

FP8_FORMATS = ("hybrid", "e4m3")


def fnuz() -> bool:
    """Whether this process's GPU computes in fnuz encodings; False on a CPU and CUDA, touching no device."""
    import torch

    if torch.version.hip is None or not torch.cuda.is_available():
        return False
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return architectures.of((0, 0), gfx_of(properties)).fnuz


def pick(wide: bool, fnuz: bool) -> Format:
    """The format of a tensor: `wide` for the range of E5M2, `fnuz` for AMD's encodings."""
    return FORMATS[wide, fnuz]
