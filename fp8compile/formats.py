"""The FP8 formats: torch's dtype and its largest finite value.

E4M3 has the precision (3 mantissa bits), E5M2 the range (5 exponent bits). ``hybrid`` uses E4M3 for activations and
weights and E5M2 for gradients; ``e4m3`` uses E4M3 for everything. AMD's gfx94x (MI300) has its own encodings, "fnuz":
no infinities, no negative zero, one NaN, and an E4M3 that ends at 240; gfx95x and later have the OCP ones, as NVIDIA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import OptionError

if TYPE_CHECKING:
    import torch  # policies are read without it: it takes seconds to import


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

FP8_FORMATS = ("hybrid", "e4m3")


def fnuz() -> bool:
    """Whether this process's GPU computes in the fnuz encodings. False on a CPU and on CUDA, where no device is touched."""
    import torch

    if torch.version.hip is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName.startswith("gfx94")


def pick(fp8_format: str, fnuz: bool) -> tuple[Format, Format]:
    """(format of activations and weights, format of gradients) for an ``fp8_format`` option.

    Raises OptionError for a name that is not in FP8_FORMATS.
    """
    if fp8_format not in FP8_FORMATS:
        raise OptionError.of("fp8_format", fp8_format, "one of " + ", ".join(map(repr, FP8_FORMATS)))
    forward, wide = (E4M3_FNUZ, E5M2_FNUZ) if fnuz else (E4M3, E5M2)
    return forward, wide if fp8_format == "hybrid" else forward
