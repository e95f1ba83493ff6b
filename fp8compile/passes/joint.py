"""The subject of the passes over a joint graph: the graph, what is given with it, and what the passes before have found.

A pass is a function of a `Joint`. It changes the graph or the tables here, and returns a count for the log. It reads decisions
in `matmuls`, what is quantized in `plan`, and the casts in `form`. It tells the user by `remarks`, in the report, and by
`complaints`, which are warnings. What only passes of one feature need is in `extras`. `pipeline.joint_passes()` has all passes
in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Graph, Node

from ..config.policy import Policy
from ..devices.catalog import Device
from ..ir.inputs import Inputs
from ..ir.matmul import Matmul
from ..ir.records import Gatherable, OpaqueRecord
from ..process import Extras
from .amax_groups import NO_GROUPS, AmaxGroups
from .plan import Plan
from .written import Written


@dataclass
class Joint:
    """The joint graph of forward and backward."""

    graph: Graph
    inputs: Inputs
    policy: Policy
    device: Device | None  # decides what pays; None: everything pays
    fnuz: bool  # the device uses the fnuz FP8 encodings
    stateful: bool  # the graph has two inputs for the scaling state, after those of the user
    high_precision: bool = False  # only observe the tensors that would be quantized
    inference: bool = False  # nothing to differentiate
    saves: bool = False  # large tensors that forward keeps will be kept in FP8
    cached: frozenset[int] = frozenset()  # parameters whose copies may be kept between calls
    freezable: frozenset[int] = frozenset()  # parameters that may be kept in FP8 only

    matmuls: list[Matmul] = field(default_factory=list)
    opaque: list[OpaqueRecord] = field(default_factory=list)
    edges: tuple[tuple[int, int], ...] = ()  # between matmuls, by position
    complaints: list[str] = field(default_factory=list)  # what the policy's author should know
    remarks: list[str] = field(default_factory=list)  # what the report says beside its table
    gatherable: dict[int, Gatherable] = field(default_factory=dict)  # parameters that may arrive in FP8, and others
    plan: Plan = field(default_factory=Plan)
    pages: tuple[Node, Node] | None = None  # the state inputs of forward and backward, where some slot needs them
    added: list[str] = field(default_factory=list)  # inputs that a pass has given their sizes
    groups: AmaxGroups = NO_GROUPS
    waits: dict[str, None] = field(default_factory=dict)  # other process groups whose ranks have to do the same
    written: Written | None = None
    extras: Extras = field(default_factory=Extras)  # of features, for their own passes
    results: Extras = field(default_factory=Extras)  # of features, as plain data: what is left of it after the compilation

    @property
    def form(self) -> Written | None:
        """The canonical form; None where the matmuls stay as they are."""
        return self.written if not self.high_precision else None
