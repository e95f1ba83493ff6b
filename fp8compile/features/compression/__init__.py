"""Gradients cross the wire in FP8: `fp8compile.distributed.compress_gradients`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...extension import Feature

if TYPE_CHECKING:
    from torch.nn import Module


class CompressedGradients(Feature):
    name = "compression"

    def statistics(self, model: Module) -> Sequence[Mapping[str, Any]]:
        from .compression import rows_of  # late: most models send no gradients

        return rows_of(model)
