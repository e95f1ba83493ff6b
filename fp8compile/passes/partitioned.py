"""The subject of the passes after the partitioner: a forward and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule

from ..process import Extras


@dataclass
class Partitioned:
    """A forward and its backward, after the partitioner. `visible`: how many outputs of forward its caller sees; it keeps the
    others. `fnuz`: the device uses the fnuz FP8 encodings. `extras`: of features."""

    forward: GraphModule
    backward: GraphModule
    visible: int
    fnuz: bool = False
    extras: Extras = field(default_factory=Extras)

    @property
    def outputs(self) -> Sequence[object]:
        (output,) = self.forward.graph.find_nodes(op="output")
        return output.args[0]  # type: ignore[return-value]
