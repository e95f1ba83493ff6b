"""Async tensor parallelism: Inductor fuses FP8 matmuls with collectives."""

from ...extension import Feature, Pass
from .async_tp import complete, expose


class AsyncTensorParallel(Feature):
    name = "async_tp"
    passes = {
        "early_post_grad": (Pass("expose", expose),),  # FP8 matmuls, where Inductor fuses them; nowhere else
        "post_grad": (Pass("complete", complete),),  # what Inductor has fused so
    }
