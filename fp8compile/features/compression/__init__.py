"""Gradients cross the wire in FP8: `fp8compile.distributed.compress_gradients`."""

from .compression import CompressedGradients as CompressedGradients
