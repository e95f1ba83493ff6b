"""The subjects of passes: a `Joint`, and after the partitioner a `Partitioned`.

A pass over a joint graph is a function of a `Joint`. It changes the graph or the tables here, and returns a
count for the log. It reads decisions in `matmuls`, what is quantized in `plan`, and the casts in `form`. It
tells the user by `remarks`, in the report, and by `complaints`, which are warnings. What only passes of one
feature need is in `extras`. `pipeline` has all passes in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from torch.fx import Graph, GraphModule

from ..config.policy import Policy, Site
from ..devices.catalog import Device
from ..frontend.inputs import Inputs
from ..ir.matmul import Decision, Matmul, Price
from ..ir.records import Findings, Gatherable, OpaqueRecord
from ..process import Extras
from .plan import Plan
from .written import Written


@dataclass(kw_only=True)
class Rewritten:
    """What the passes did to a joint graph: what is left of a `Joint` after the compilation."""

    matmuls: list[Matmul] = field(default_factory=list)
    opaque: list[OpaqueRecord] = field(default_factory=list)
    edges: tuple[tuple[int, int], ...] = ()  # between matmuls, by position
    converts: bool = False  # some matmul became FP8
    inference: bool = False  # nothing to differentiate
    added: list[str] = field(default_factory=list)  # inputs that a pass has given their sizes
    complaints: list[str] = field(default_factory=list)  # what the policy's author should know
    sites: tuple[Site, ...] = ()  # of a part of a model, for rules that only the whole model can judge
    remarks: list[str] = field(default_factory=list)  # what the report says beside its table
    groups: dict[str, None] = field(default_factory=dict)  # process groups whose ranks have to do the same
    gatherable: dict[int, Gatherable] = field(default_factory=dict)  # which parameters may arrive in FP8
    # of the policies, by position: the first that decides as each does; `gatherable` by policy and input;
    # those that multiply what has arrived in FP8 in high precision
    alike: tuple[int, ...] = ()
    gemms: frozenset[tuple[int, str]] = frozenset()  # those in FP8: the input that is the weight, and which
    verdicts: dict[tuple[int, int], Gatherable] = field(default_factory=dict)
    unfit: frozenset[int] = frozenset()
    results: Extras = field(default_factory=Extras)  # of features, as plain data
    findings: Findings | None = None  # what the backend has told of it


@dataclass(kw_only=True)
class Joint(Rewritten):
    """The joint graph of forward and backward, what is given with it, and what earlier passes have found."""

    graph: Graph
    inputs: Inputs
    given: Policy  # the user's
    policy: Policy  # that of this graph: the rules of one of its sets
    policies: tuple[Policy, ...] = ()  # those of all graphs that are made of this one, in one order
    device: Device | None  # decides what pays; None: everything pays
    fnuz: bool  # the device uses the fnuz FP8 encodings
    saves: bool = False  # large tensors that forward keeps will be kept in FP8
    cached: frozenset[int] = frozenset()  # parameters whose copies may be kept between calls
    freezable: frozenset[int] = frozenset()  # parameters that may be kept in FP8 only

    decided: dict[tuple[Policy, Matmul], tuple[Decision, Price]] = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    # process groups by `amax_group`, for tensors that are scaled by their current amax
    amax_groups: dict[bool | str, str] = field(default_factory=dict)
    written: Written | None = None
    extras: Extras = field(default_factory=Extras)  # of features, for their own passes

    @property
    def form(self) -> Written:
        """The canonical form, which `quantize` writes."""
        assert self.written is not None
        return self.written

    @property
    def done(self) -> Rewritten:
        """Without the graph."""
        return Rewritten(**{one.name: getattr(self, one.name) for one in fields(Rewritten)})


@dataclass
class Partitioned:
    """A forward and its backward, after the partitioner. `visible`: how many outputs of forward its caller
    sees; it keeps the others. `fnuz`: the device uses the fnuz FP8 encodings. `extras`: of features."""

    forward: GraphModule
    backward: GraphModule
    visible: int
    fnuz: bool = False
    extras: Extras = field(default_factory=Extras)

    @property
    def outputs(self) -> Sequence[object]:
        (output,) = self.forward.graph.find_nodes(op="output")
        return output.args[0]  # type: ignore[return-value]
