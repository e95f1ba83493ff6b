"""The kinds of matmuls in the whole graph, where only a part of it is compiled.

DDPOptimizer cuts a graph where its buckets end. A product of two projections and the down projection after
it, a head and its loss, or a gate and its softmax may then be in two graphs. So the forward of the whole
graph is traced once, when the first part is compiled, and the matmuls of all parts keep the kinds that they
have in the whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch.fx import GraphModule

from .. import compat
from ..frontend.inputs import capture
from ..frontend.owner import in_model
from ..logs import get_logger
from .classify import kinds
from .collect import find

logger = get_logger(__name__)

KEPT = "fp8compile_kinds"  # key in the whole graph's metadata, which all its parts read


def whole_kinds(gm: GraphModule) -> Mapping[str, tuple[str, ...]] | None:
    """The kinds of the forward matmuls of each weight, by its name, in the graph that `gm` is a part of. None
    if `gm` is whole, or if the whole graph cannot be traced: then each part is classified by itself."""
    found = compat.split.uncut(gm)
    if found is None:
        return None
    whole, inputs = found
    if KEPT not in whole.meta:
        try:
            whole.meta[KEPT] = _kinds(whole, inputs)
        except Exception as error:
            logger.debug(
                "fp8: the graph that DDP has cut could not be traced, so each part decides alone: %s", error
            )
            whole.meta[KEPT] = None
    return whole.meta[KEPT]


def _kinds(gm: GraphModule, example_inputs: Any) -> dict[str, tuple[str, ...]]:
    inputs = in_model(gm, capture(gm, example_inputs))
    matmuls, _ = find(compat.split.forward_of(gm), inputs)
    found: dict[str, list[str]] = defaultdict(list)
    for matmul, kind in kinds(matmuls, inputs).items():
        found[matmul.name].append(kind)
    return {name: tuple(kinds) for name, kinds in found.items()}
