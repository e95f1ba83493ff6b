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

from torch.fx import Graph, GraphModule

from .. import compat
from ..config.policy import Policy
from ..devices.catalog import Device
from ..errors import OptionError
from ..ir.forward import Forward
from ..ir.inputs import Inputs
from ..ir.matmul import Matmul
from ..ir.records import CollectiveRecord, Findings, Gatherable, KeptRecord, OpaqueRecord
from ..ir.state_page import SlotKey
from ..logs import SKIP_VARIABLE, dump, get_logger
from .all_gathers import all_gathers, move_all_gathers
from .all_to_alls import all_to_alls, move_all_to_alls
from .amax_groups import amax_groups, reduce_current
from .async_tp import complete, expose
from .collect import collect
from .decide import decide
from .fallbacks import spell, unspell
from .flatten import flatten
from .forwards import forwards
from .fuse import fuse
from .gathered import gather, substitute, unite
from .hoist import NO_CACHE, Cache, Hoisted, hoist
from .joint import Joint
from .layouts import layouts
from .lower import lower, lower_scales, split_casts
from .merge import merge
from .plan import plan
from .profitability import weigh
from .quantize import quantize
from .recast import recast
from .save import Partitioned, save
from .scatters import scatters
from .try_matmuls import try_matmuls
from .update_state import update_state
from .write_merged import write_merged

logger = get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Pass(Generic[T]):
    """`run` changes its argument and returns a result for the log. `optional`: the graph is right without this pass."""

    name: str
    run: Callable[[T], object]
    optional: bool = False


JOINT: tuple[Pass[Joint], ...] = (
    Pass("unite", unite),  # a weight that FSDP2 gathered in FP8 is one tensor, however many operators read it
    Pass("spell", spell),  # transformers' loops over experts as grouped matmuls
    Pass("flatten", flatten, optional=True),  # the logits as a matrix, where Inductor is to compute them by chunks
    Pass("scatters", scatters, optional=True),  # the backward of the experts' permutation as a lookup, which fuses
    Pass("collect", collect, optional=True),  # every matmul: its name, role and operands
    Pass("decide", decide),  # FP8, or the reason why not: what is possible, then what the policy says
    Pass("recast", recast, optional=True),  # which weights are cast again in backward, rather than kept
    Pass("weigh", weigh, optional=True),  # what FP8 would not make faster stays in high precision
    Pass("gather", gather),  # which weights FSDP2 may gather in FP8, and which frozen ones may be kept so
    Pass("plan", plan),  # which tensors are quantized, and in which slot the scale of each lives
    Pass("amax_groups", amax_groups),  # over which ranks amaxes are reduced
    Pass("all_gathers", all_gathers, optional=True),  # which all-gathers of the graph can carry FP8
    Pass("all_to_alls", all_to_alls, optional=True),  # which all-to-alls can, with `fp8_all_to_all`
    Pass("merge", merge, optional=True),  # which matmuls of one input become one
    Pass("forwards", forwards),  # how the fprop of each weight casts, for an export
    Pass("quantize", quantize),  # casts and FP8 matmuls in the graph: the canonical form, which the following rewrite
    Pass("substitute", substitute),  # weights that arrive in FP8
    Pass("move_all_gathers", move_all_gathers),
    Pass("move_all_to_alls", move_all_to_alls),
    Pass("layouts", layouts),  # which copies are kept for backward
    Pass("write_merged", write_merged),
    Pass("reduce_current", reduce_current),  # current amaxes over the ranks that share a tensor
    Pass("hoist", hoist),  # casts of weights that are made outside of the graph, with `cache_weights`
    Pass("unspell", unspell),  # those that stay in high precision as they were
    Pass("update_state", update_state),  # the next scaling state
)
PARTITIONED: tuple[Pass[Partitioned], ...] = (
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
    Pass("lower", lower),  # all our other operators become ATen and static kernels
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

    @property
    def added(self) -> tuple[str, ...]:
        """The inputs of the graph that we have added, and that the passes have given a size."""
        return (*self.pages, *(self.hoisted.names if self.hoisted is not None else ()))


def run_joint(
    graph: Graph,
    inputs: Inputs,
    policy: Policy,
    device: Device | None,
    fnuz: bool,
    stateful: bool,
    high_precision: bool = False,
    cache: Cache = NO_CACHE,
    freezable: frozenset[int] = frozenset(),
) -> Rewritten:
    """Rewrite a joint graph in place. See `Joint` for the arguments. With `high_precision` the matmuls stay as they are, but
    amaxes are recorded, so that histories exist when FP8 begins.

    Raises FrozenFound, before the graph is changed, if some of the `freezable` parameters can be kept in FP8 only.
    """
    inference = not compat.tag_backward(graph)
    saves = policy.save == "fp8" and inputs.training and not high_precision and "save" not in skipped()
    joint = Joint(graph, inputs, policy, device, fnuz, stateful, high_precision, inference, saves, cache, freezable)
    _run(JOINT, joint, graph)
    graph.eliminate_dead_code()
    done = Rewritten(
        tuple(joint.matmuls),
        tuple(joint.opaque),
        joint.inference,
        complaints=tuple(joint.complaints),
        edges=joint.edges,
        groups=joint.state_groups() if joint.written is not None else (),
        collectives=tuple(joint.collectives),
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
    halves = Partitioned(forward, backward, visible, fnuz)
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
    """Each pass in turn: log what changed, write the graph after it (FP8COMPILE_DUMP, tlparse). Check the graph: after the
    last pass, and while debugging after each."""
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
