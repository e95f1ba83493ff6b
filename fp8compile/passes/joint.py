"""The subject of the passes over a joint graph: the graph, what is given with it, and what the passes before have found.

A pass is a function of a `Joint`. It changes the graph or the tables here, and returns a count for the log.
`pipeline.JOINT` has all passes in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.fx import Graph, Node

from ..config.policy import Policy
from ..devices.catalog import Device
from ..ir.forward import Forward
from ..ir.inputs import Inputs
from ..ir.matmul import Matmul
from ..ir.records import CollectiveRecord, Gatherable, OpaqueRecord
from .amax_groups import NO_GROUPS, AmaxGroups
from .hoist import NO_CACHE, Cache, Hoisted
from .plan import Operand, Plan
from .written import Written

if TYPE_CHECKING:
    from .collectives import Collective
    from .merge import Merged


@dataclass
class Joint:
    """The joint graph of forward and backward."""

    graph: Graph
    inputs: Inputs
    policy: Policy
    device: Device | None  # decides what pays; None: everything pays
    fnuz: bool  # the device uses the fnuz FP8 encodings
    stateful: bool  # the graph has two inputs for the scaling state, after those of the user
    high_precision: bool  # only observe the tensors that would be quantized
    inference: bool = False  # nothing to differentiate
    saves: bool = False  # the pass `save` follows
    cache: Cache = NO_CACHE
    freezable: frozenset[int] = frozenset()  # parameters that may be kept in FP8 only

    matmuls: list[Matmul] = field(default_factory=list)
    opaque: list[OpaqueRecord] = field(default_factory=list)
    edges: tuple[tuple[int, int], ...] = ()  # between matmuls, by position
    complaints: list[str] = field(default_factory=list)  # what the policy's author should know
    gatherable: dict[int, Gatherable] = field(default_factory=dict)  # parameters that FSDP2 may gather in FP8, and others
    plan: Plan = field(default_factory=Plan)
    pages: tuple[Node, Node] | None = None  # the state inputs of forward and backward, where some slot needs them
    groups: AmaxGroups = NO_GROUPS
    moved: dict[Operand, Collective] = field(default_factory=dict)  # what collectives carry in FP8
    collectives: list[CollectiveRecord] = field(default_factory=list)  # all those whose result an FP8 matmul reads
    merged: list[Merged] = field(default_factory=list)
    forwards: dict[int, tuple[Forward, ...]] = field(default_factory=dict)  # of each weight, by input
    written: Written | None = None
    hoisted: Hoisted | None = None

    @property
    def form(self) -> Written | None:
        """The canonical form; None where the matmuls stay as they are."""
        return self.written if not self.high_precision else None

    def state_groups(self) -> tuple[str, ...]:
        """Process groups whose ranks have to do the same."""
        return tuple(dict.fromkeys((*self.groups.every, *(found.group for found in self.moved.values()))))
