"""The oracle's settings: how the package's options determine the casts of a weight's matmuls.

Nothing here is imported from fp8compile. See reference.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.reference_casts import FORMATS, FORMATS_FNUZ, Quantized, quantize, vllm_cast

RECIPES = ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")
ROLES = ("input", "weight", "gradient")


@dataclass(frozen=True)
class Settings:
    """How the matmuls of one weight are quantized; names as in the package."""

    recipe: str = "delayed"
    fp8_format: str | None = None
    margin: int | tuple[int, int, int] | None = None
    amax_history_len: int = 16
    amax_compute_algo: str = "max"
    interval: int = 1
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    current_scaling: tuple[bool, bool, bool] = (False, False, False)
    cache_weights: bool = False
    on_overflow: str = "current"
    power_of_2_scale: bool | None = None
    fp8_encoding: str = "auto"
    weight_tiles: bool = False
    serve: str = "none"

    def __post_init__(self) -> None:
        assert self.recipe in RECIPES and self.amax_compute_algo in ("max", "most_recent")
        assert self.on_overflow in ("current", "saturate") and self.fp8_encoding in ("auto", "ocp", "fnuz")

    @property
    def tensorwise(self) -> bool:
        """One scale a tensor."""
        return self.recipe in ("delayed", "tensorwise")

    def delayed(self, role: str) -> bool:
        current = self.current_scaling[ROLES.index(role)] or (role == "weight" and self.cache_weights)
        return self.recipe == "delayed" and not current

    def format(self, role: str) -> tuple[torch.dtype, float]:
        name = self.fp8_format or ("hybrid" if self.tensorwise else "e4m3")
        return (FORMATS_FNUZ if self.fp8_encoding == "fnuz" else FORMATS)[name][role == "gradient"]

    def margin_of(self, role: str) -> int:
        """The margin option, or else for gradients with delayed scaling 2**11 (E5M2) or 2**3 (E4M3)."""
        if self.margin is None:
            wide = "e5m2" in str(self.format(role)[0])
            return (11 if wide else 3) if role == "gradient" and self.delayed(role) else 0
        return self.margin if isinstance(self.margin, int) else self.margin[ROLES.index(role)]

    def rounded(self, role: str) -> bool:
        """Whether scales are powers of two: not those from a history."""
        return not self.delayed(role) and (
            self.recipe in ("blockwise", "mxfp8") and self.serve == "none"
            if self.power_of_2_scale is None
            else self.power_of_2_scale
        )

    def block(self, role: str, gemm: str) -> tuple[int, int]:
        """The rows and columns that share a scale, in the copy whose columns this gemm contracts; 0: the
        whole dimension."""
        if self.tensorwise or (self.recipe, role, gemm) == ("rowwise_with_gw_hp", "weight", "dgrad"):
            return 0, 0
        if self.recipe == "mxfp8":
            return (32, 32) if role == "weight" and self.weight_tiles else (1, 32)
        if self.recipe == "blockwise":
            return (128, 128) if role == "weight" else (1, 128)
        return (0, 0) if role == "weight" and self.weight_tiles else (1, 0)

    def quantize(self, x: Tensor, role: str, gemm: str, scale: float | None) -> Quantized:
        """x [R, C], a tensor in this role, in FP8 for this gemm. `scale`: with delayed scaling its scale,
        else None."""
        if self.serve == "vllm" and role == "input":
            return vllm_cast(x, self.block(role, gemm), self.rounded(role))
        margin = self.margin_of(role)
        return quantize(x, self.format(role), self.block(role, gemm), margin, self.rounded(role), scale)

    high_fprop = property(lambda self: self.override_linear_precision[0])
    high_dgrad = property(lambda self: self.override_linear_precision[1])
    high_wgrad = property(
        lambda self: self.override_linear_precision[2] or self.recipe == "rowwise_with_gw_hp"
    )
