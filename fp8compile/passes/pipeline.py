"""All passes in their order, before and after the partitioner splits forward from backward.

`FP8COMPILE_SKIP=fuse,weigh` switches passes off by name, to find out which of them a fault comes from. With
`TORCH_LOGS=+fp8compile` each pass says what it found and which operators it added and removed.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from torch.fx import Graph, GraphModule, Node

from .. import compat
from ..config.policy import Policy
from ..devices.catalog import Device
from ..errors import CapacityExceeded, FrozenFound, OptionError
from ..ir.all_gathers import AllGather
from ..ir.all_to_alls import AllToAll
from ..ir.forwards import Forward
from ..ir.inputs import Inputs
from ..ir.matmul import Matmul, note_products
from ..ir.records import CollectiveRecord, Findings, Gatherable, KeptRecord, OpaqueRecord
from ..ir.state_page import SlotKey
from ..logs import SKIP_VARIABLE, dump, get_logger
from .all_gathers import all_gathers
from .all_gathers import carry as all_gathers_carry
from .all_to_alls import all_to_alls
from .all_to_alls import carry as all_to_alls_carry
from .amax_groups import NO_GROUPS, AmaxGroups, amax_groups, reduce_current
from .async_tp import complete, expose
from .collect import collect, edges
from .collectives import NO_COLLECTIVES, Carry, Collectives, move
from .decide import decide
from .fallbacks import spell, unspell
from .flatten import flatten
from .forwards import forwards
from .fuse import fuse
from .gathered import freezable, gatherable, substitute, unite
from .hoist import NO_CACHE, Cache, Hoisted, hoist
from .layouts import layouts
from .lower import lower, lower_scales, split_casts
from .merge import Merged, merge
from .merged import write_merged
from .plan import Plan, plan
from .profitability import weigh
from .quantize import observe, quantize
from .recast import recast
from .save import Halves, save
from .scatters import scatters
from .try_matmuls import try_matmuls
from .update_state import update_state
from .written import Written

logger = get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Pass(Generic[T]):
    """`run` changes its argument and returns a result for the log. `optional`: the graph is right without this pass."""

    name: str
    run: Callable[[T], object]
    optional: bool = False


@dataclass
class Joint:
    """The joint graph of forward and backward, and what the passes have found in it so far."""

    graph: Graph
    inputs: Inputs
    policy: Policy
    device: Device | None  # decides what pays; None: everything pays
    fnuz: bool  # the device uses the fnuz FP8 encodings
    capacity: tuple[int, int] | None  # rows of the two state inputs; None: the graph has no state
    high_precision: bool  # only observe the tensors that would be quantized
    inference: bool = False  # nothing to differentiate
    matmuls: list[Matmul] = field(default_factory=list)
    opaque: list[OpaqueRecord] = field(default_factory=list)
    edges: tuple[tuple[int, int], ...] = ()  # between matmuls, by position
    complaints: list[str] = field(default_factory=list)  # what the policy's author should know
    plan: Plan = field(default_factory=Plan)
    groups: AmaxGroups = NO_GROUPS
    gatherable: dict[int, Gatherable] = field(default_factory=dict)  # parameters that FSDP2 may gather in FP8, and others
    collectives: Collectives = NO_COLLECTIVES
    merged: list[Merged] = field(default_factory=list)
    cache: Cache = NO_CACHE
    freezable: frozenset[int] = frozenset()  # parameters that may be kept in FP8 only
    hoisted: Hoisted | None = None
    pages: tuple[Node, Node] | None = None  # the state inputs of forward and backward, where some slot needs them
    written: Written | None = None
    forwards: dict[int, tuple[Forward, ...]] = field(default_factory=dict)  # of each weight, by input

    @property
    def rewritable(self) -> Written | None:
        """The canonical form; None where the matmuls stay as they are."""
        return self.written if not self.high_precision else None

    @property
    def saves(self) -> bool:
        """Does the pass `save` follow?"""
        return self.policy.save == "fp8" and self.inputs.training and not self.high_precision and "save" not in skipped()

    def unite(self) -> int:
        return unite(self.graph)

    def spell(self) -> int:
        return spell(self.graph)

    def flatten(self) -> int:
        return flatten(self.graph) if compat.chunks() and not self.inference else 0

    def scatters(self) -> int:
        return scatters(self.graph)

    def collect(self) -> int:
        self.matmuls, self.opaque = collect(self.graph, self.inputs)
        if self.device is not None:  # the operator that PyTorch takes on a GPU, also where a CPU traces for one
            self.opaque = [replace(record, op=record.op.replace("_for_cpu", "")) for record in self.opaque]
        self.edges = edges(self.graph, self.matmuls)
        return len(self.matmuls)

    def decide(self) -> int:
        self.complaints = decide(self.matmuls, self.inputs, self.policy, self.device, self.inference)
        return sum(matmul.fp8 for matmul in self.matmuls)

    def recast(self) -> int:
        return recast(self.matmuls, self.device) if not self.inference else 0

    def weigh(self) -> int:
        return weigh(self.matmuls, self.device, self.cache.inputs, self.freezable) if self.device is not None else 0

    def gather(self) -> int:
        if not self.inference and self.inputs.training:
            self.gatherable = gatherable(self.graph, self.matmuls, self.inputs, self.fnuz)
            if found := freezable(self.gatherable, self.matmuls, self.freezable):
                raise FrozenFound(found)
        return sum(not found.reason for found in self.gatherable.values())

    def make_plan(self) -> int:
        note_products(self.matmuls)
        self.plan = plan(self.matmuls, self.fnuz)
        needed = [len(self.plan.direction(backward)) for backward in (False, True)]
        if any(needed) and self.capacity is not None:
            if any(rows > given for rows, given in zip(needed, self.capacity, strict=True)):
                raise CapacityExceeded({"forward": needed[0], "backward": needed[1]})
            by_index = {compat.input_index(node): node for node in self.graph.find_nodes(op="placeholder")}
            first = len(self.inputs.names)
            self.pages = by_index[first], by_index[first + 1]
        self.groups = amax_groups(self.plan, self.inputs.groups)
        return len(self.plan.operands)

    def all_gathers(self) -> int:
        return self._found(all_gathers(self.matmuls, self.plan))

    def all_to_alls(self) -> int:
        return self._found(all_to_alls(self.matmuls, self.plan))

    def _found(self, more: Collectives) -> int:
        if self.high_precision:
            return 0
        self.collectives |= more
        return len(more.moved)

    def merge(self) -> int:
        if not self.high_precision:
            moved = self.collectives.moved.keys()
            self.merged = merge(self.matmuls, self.plan, self.device, moved, self.inputs.block, self.saves)
        return len(self.merged)

    def note_forwards(self) -> int:
        self.forwards = forwards(self.matmuls, self.plan, self.merged)
        return len(self.forwards)

    def quantize(self) -> int:
        if not self.high_precision:
            self.written = quantize(self.graph, self.matmuls, self.plan, self.pages)
        elif self.pages is not None:
            self.written = observe(self.graph, self.plan, self.pages)
        return 0 if self.written is None else len(self.written.amaxes)

    def substitute(self) -> int:
        return substitute(self.rewritable) if self.rewritable is not None else 0

    def move(self) -> int:
        if self.rewritable is None:
            return 0
        carry: dict[type, Carry] = {AllGather: all_gathers_carry, AllToAll: all_to_alls_carry}
        return move(self.rewritable, self.collectives, self.groups, carry)

    def layouts(self) -> int:
        return layouts(self.rewritable, self.saves) if self.rewritable is not None else 0

    def write_merged(self) -> int:
        return write_merged(self.rewritable, self.plan, self.merged) if self.rewritable is not None else 0

    def reduce_current(self) -> int:
        return reduce_current(self.rewritable, self.groups) if self.rewritable is not None else 0

    def hoist(self) -> int:
        asked = not self.inference and not self.high_precision
        amaxes = self.written.amaxes.values() if self.written is not None else ()
        self.hoisted = hoist(self.graph, self.matmuls, self.cache if asked else NO_CACHE, amaxes)
        return 0 if self.hoisted is None else len(self.hoisted.copies)

    def unspell(self) -> int:
        return unspell(self.graph)

    def update_state(self) -> int:
        if self.pages is None or self.written is None:
            return 0
        return update_state(self.graph, self.plan, self.written, self.pages, self.groups)


JOINT: tuple[Pass[Joint], ...] = (
    Pass("unite", Joint.unite),  # a weight that FSDP2 gathered in FP8 is one tensor, however many operators read it
    Pass("spell", Joint.spell),  # transformers' loops over experts as grouped matmuls
    Pass("flatten", Joint.flatten, optional=True),  # the logits as a matrix, where Inductor is to compute them by chunks
    Pass("scatters", Joint.scatters, optional=True),  # the backward of the experts' permutation as a lookup, which fuses
    Pass("collect", Joint.collect, optional=True),  # every matmul: its name, role and operands
    Pass("decide", Joint.decide),  # FP8, or the reason why not: what is possible, then what the policy says
    Pass("recast", Joint.recast, optional=True),  # which weights are cast again in backward, rather than kept
    Pass("weigh", Joint.weigh, optional=True),  # what FP8 would not make faster stays in high precision
    Pass("gather", Joint.gather),  # which weights FSDP2 may gather in FP8, and which frozen ones may be kept so
    Pass("plan", Joint.make_plan),  # which tensors are quantized, and in which slot the scale of each lives
    Pass("all_gathers", Joint.all_gathers, optional=True),  # which all-gathers of the graph can carry FP8
    Pass("all_to_alls", Joint.all_to_alls, optional=True),  # which all-to-alls can, with `fp8_all_to_all`
    Pass("merge", Joint.merge, optional=True),  # which matmuls of one input become one
    Pass("forwards", Joint.note_forwards),  # how the fprop of each weight casts, for an export
    Pass("quantize", Joint.quantize),  # casts and FP8 matmuls in the graph
    Pass("substitute", Joint.substitute),  # weights that arrive in FP8
    Pass("move", Joint.move),  # the collectives that carry FP8
    Pass("layouts", Joint.layouts),  # which copies are kept for backward
    Pass("write_merged", Joint.write_merged),  # the matmuls that become one
    Pass("reduce_current", Joint.reduce_current),  # current amaxes over the ranks that share a tensor
    Pass("hoist", Joint.hoist),  # casts of weights that are made outside of the graph, with `cache_weights`
    Pass("unspell", Joint.unspell),  # those that stay in high precision as they were
    Pass("update_state", Joint.update_state),  # the next scaling state
)
PARTITIONED: tuple[Pass[Halves], ...] = (
    Pass("save", save, optional=True),  # large tensors that forward keeps, in FP8
)
EARLY_POST_GRAD: tuple[Pass[Graph], ...] = (
    Pass("expose", expose),  # FP8 matmuls, where Inductor fuses them with collectives; nowhere else
)
POST_GRAD: tuple[Pass[Graph], ...] = (
    Pass("complete", complete),  # what Inductor has fused so
    Pass("lower_scales", lower_scales),  # scales of whole tensors; delayed ones become loads from the state
    Pass("split_casts", split_casts),  # a cast into both layouts becomes two
    Pass("try_matmuls", try_matmuls, optional=True),  # which FP8 matmuls the GPU's libraries refuse
    Pass("fuse", fuse, optional=True),  # casts, with what makes their tensors, become generated kernels
    Pass("lower", lower),  # all other operators of ours become ATen and static kernels
)


@dataclass(frozen=True)
class Rewritten:
    """What the passes did to one joint graph."""

    matmuls: tuple[Matmul, ...]
    opaque: tuple[OpaqueRecord, ...]
    inference: bool
    forward: tuple[SlotKey, ...] = ()  # slots, by row of their page
    backward: tuple[SlotKey, ...] = ()
    pages: tuple[str, ...] = ()  # names of the state inputs of forward and backward, where there is state
    complaints: tuple[str, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()
    groups: tuple[str, ...] = ()  # process groups whose ranks have to do the same
    collectives: tuple[CollectiveRecord, ...] = ()
    gatherable: Mapping[int, Gatherable] = field(default_factory=dict)  # by input
    hoisted: Hoisted | None = None
    forwards: Mapping[int, tuple[Forward, ...]] = field(default_factory=dict)  # the fprops of each weight, by input
    findings: Findings | None = None  # what the backend has told of it


def run_joint(
    graph: Graph,
    inputs: Inputs,
    policy: Policy,
    device: Device | None,
    fnuz: bool,
    capacity: tuple[int, int] | None,
    high_precision: bool = False,
    cache: Cache = NO_CACHE,
    freezable: frozenset[int] = frozenset(),
) -> Rewritten:
    """Rewrite a joint graph in place. See `Joint` for the arguments. With `high_precision` the matmuls stay as they are, but
    amaxes are recorded, so that histories exist when FP8 begins.

    Raises CapacityExceeded if the slots do not fit, CopiesMissing if other inputs are needed for the copies of `cache`, and
    FrozenFound, before the graph is changed, if some of the `freezable` parameters can be kept in FP8 only.
    """
    inference = not compat.tag_backward(graph)
    joint = Joint(graph, inputs, policy, device, fnuz, capacity, high_precision, inference, cache=cache, freezable=freezable)
    _run(JOINT, joint, graph)
    graph.eliminate_dead_code()
    done = Rewritten(
        tuple(joint.matmuls),
        tuple(joint.opaque),
        joint.inference,
        complaints=tuple(joint.complaints),
        edges=joint.edges,
        groups=tuple(dict.fromkeys((*joint.groups.every, *joint.collectives.groups))) if joint.written is not None else (),
        collectives=joint.collectives.records,
        gatherable=joint.gatherable,
        hoisted=joint.hoisted,
        forwards=joint.forwards if not high_precision else {},
    )
    if joint.pages is None:
        return done
    forward, backward = (tuple(operand.key for operand in joint.plan.direction(late)) for late in (False, True))
    names = tuple(page.name for page in joint.pages)
    return replace(done, forward=forward, backward=backward, pages=names)


def run_partitioned(forward: GraphModule, backward: GraphModule, visible: int, fnuz: bool) -> tuple[KeptRecord, ...]:
    """Rewrite what a forward keeps for its backward, in both graphs in place; returns what it keeps in FP8. `visible`: how many
    outputs of forward its caller sees."""
    halves = Halves(forward, backward, visible, fnuz)
    _run(PARTITIONED, halves, forward.graph)
    backward.graph.lint()
    return tuple(halves.kept)


def run_post_grad(graph: Graph) -> None:
    """Lower a partitioned graph in place: no operator of ours is left, except on a CPU those with scales of blocks."""
    _run(POST_GRAD, graph, graph)


def run_early_post_grad(graph: Graph) -> None:
    """Lower what Inductor's own passes over a partitioned graph have to see, before they run."""
    _run(EARLY_POST_GRAD, graph, graph)


def skipped() -> tuple[str, ...]:
    """The passes that FP8COMPILE_SKIP names. OptionError for a name of no optional pass."""
    names = tuple(filter(None, (name.strip() for name in os.environ.get(SKIP_VARIABLE, "").split(","))))
    every: tuple[Pass[Any], ...] = (*JOINT, *PARTITIONED, *EARLY_POST_GRAD, *POST_GRAD)
    optional = [step.name for step in every if step.optional]
    for name in names:
        if name not in optional:
            raise OptionError.of(SKIP_VARIABLE, name, f"a comma-separated list of {', '.join(map(repr, optional))}")
    return names


def _run(passes: Sequence[Pass[T]], subject: T, graph: Graph) -> None:
    """Each pass in turn: log what changed, write the graph after it (FP8COMPILE_DUMP, tlparse). Check the graph: behind the
    last pass, and while debugging behind each."""
    leave_out, told = skipped(), logger.isEnabledFor(logging.DEBUG)
    for step in passes:
        if step.name in leave_out:
            logger.info("fp8: %s is skipped (%s)", step.name, SKIP_VARIABLE)
            continue
        before, start = _operators(graph) if told else Counter(), time.perf_counter()
        with compat.symbolic_kernels():
            found = step.run(subject)
        if told:
            graph.lint()
            took = 1e3 * (time.perf_counter() - start)
            logger.debug("%s: %s, %.1f ms%s", step.name, found, took, _changes(before, _operators(graph)))
        dump(f"{step.name}.txt", lambda: str(graph))
    if not told:
        graph.lint()


def _operators(graph: Graph) -> Counter[str]:
    """How often each operator is called."""
    return Counter(_name(node.target) for node in graph.nodes if node.op == "call_function")


def _name(target: Any) -> str:
    return str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))


def _changes(before: Counter[str], after: Counter[str]) -> str:
    """ "; -12 aten.mm.default, +12 fp8compile.scaled_mm.default", "" where nothing changed."""
    changed = {name: after[name] - before[name] for name in sorted({*before, *after}) if after[name] != before[name]}
    return "; " + ", ".join(f"{count:+d} {name}" for name, count in changed.items()) if changed else ""
