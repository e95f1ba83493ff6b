"""The logits as a matrix, where Inductor is to compute them by chunks."""

from ...extension import Feature, Pass
from .flatten import flatten as run_flatten


class ChunkedLogits(Feature):
    name = "chunked_logits"
    passes = {"unite": (Pass("flatten", run_flatten, optional=True),)}
