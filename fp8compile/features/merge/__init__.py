"""Matmuls of one input become one matmul: the option `merge_matmuls`."""

from ...extension import Feature, Pass
from .merge import merge as run_merge
from .write_merged import write_merged as run_write_merged


class MergedMatmuls(Feature):
    name = "merge"
    passes = {
        "amax_groups": (Pass("merge", run_merge, optional=True),),  # which matmuls of one input become one
        "layouts": (Pass("write_merged", run_write_merged),),
    }
