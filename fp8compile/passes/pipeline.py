"""All passes in their order, before and after the partitioner splits forward from backward.

`JOINT` passes are functions of a `Joint`, those after the partitioner of a `Partitioned`, and those before
and after Inductor's own passes over a half of its graph. Place matters: until `gather` a pass finds and
decides, `plan` chooses the tensors to quantize, `quantize` writes the canonical form, and those after it
rewrite casts.

`FP8COMPILE_SKIP=fuse,weigh` switches passes off by name, to find out which of them a fault comes from. With
`TORCH_LOGS=+fp8compile` each pass says what it found and which operators it added and removed.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from typing import Any

from torch.fx import Graph

from .. import compat
from ..errors import OptionError
from ..extension import Pass, with_passes
from ..logs import SKIP_VARIABLE, dump, get_logger
from . import specification
from .amax_groups import amax_groups, reduce_current
from .collect import collect
from .decide import decide
from .decide import of_each_policy as each
from .fuse import fuse
from .gathered import gather, substitute, unite
from .joint import Joint, Partitioned, Rewritten
from .layouts import layouts
from .lower import lower, lower_scales, split_casts
from .plan import plan
from .profitability import weigh
from .quantize import quantize
from .recast import recast
from .try_matmuls import try_matmuls

logger = get_logger(__name__)

JOINT = (  # each a function of a `Joint`
    Pass("unite", unite),  # a weight that arrives in FP8 is one tensor, however many operators read it
    Pass("collect", collect, optional=True),  # every matmul: its name, role and operands
    Pass("decide", each(decide)),  # FP8, or the reason why not: what is possible, then what the policy says
    Pass("recast", each(recast), optional=True),  # which weights are cast again in backward, rather than kept
    Pass("weigh", each(weigh), optional=True),  # what FP8 would not make faster stays in high precision
    Pass("gather", each(gather)),  # which weights may arrive in FP8
    Pass("plan", plan),  # which tensors are quantized, each once for all its readers
    Pass("amax_groups", amax_groups),  # over which ranks current amaxes are reduced
    Pass("quantize", quantize),  # casts and FP8 matmuls: the canonical form, which the following rewrite
    Pass("substitute", substitute),  # weights that arrive in FP8
    Pass("layouts", layouts),  # which copies are kept for backward
    Pass("reduce_current", reduce_current),  # current amaxes over the ranks that share a tensor
)
POST_GRAD = (  # each a function of a graph
    Pass("lower_scales", lower_scales),  # scales of whole tensors
    Pass("split_casts", split_casts),  # a cast into both layouts becomes two
    Pass("try_matmuls", try_matmuls, optional=True),  # which FP8 matmuls the GPU's libraries refuse
    Pass("fuse", fuse, optional=True),  # casts, with what makes their tensors, become generated kernels
    Pass("lower", lower),  # all our other operators become ATen and static kernels
)


STAGES = {"joint": JOINT, "partitioned": (), "early_post_grad": (), "post_grad": POST_GRAD}  # the core's


def passes(stage: str) -> tuple[Pass, ...]:
    """The passes of a stage, with those of features."""
    return with_passes(stage, STAGES[stage])


def run_joint(joint: Joint) -> Rewritten:
    """Rewrite a joint graph in place."""
    joint.inference = not compat.dynamo.tag_backward(joint.graph)
    _run("joint", joint, joint.graph)
    joint.graph.eliminate_dead_code()
    return joint.done


def run_partitioned(halves: Partitioned) -> None:
    """Rewrite a forward and its backward in place."""
    _run("partitioned", halves, halves.forward.graph)
    _lint(halves.backward.graph, "partitioned", "partitioned")


def run_early_post_grad(graph: Graph) -> None:
    """Lower what Inductor's own passes over a partitioned graph have to see, before they run."""
    _run("early_post_grad", graph, graph)


def run_post_grad(graph: Graph) -> None:
    """Lower a partitioned graph in place. No operator of ours is left, except those of blocks on a CPU."""
    _run("post_grad", graph, graph)


def skipped() -> tuple[str, ...]:
    """The passes that FP8COMPILE_SKIP names. OptionError for a name of no optional pass."""
    names = tuple(filter(None, (name.strip() for name in os.environ.get(SKIP_VARIABLE, "").split(","))))
    optional = [step.name for stage in STAGES for step in passes(stage) if step.optional]
    for name in names:
        if name not in optional:
            allowed = f"a comma-separated list of {', '.join(map(repr, optional))}"
            raise OptionError.of(SKIP_VARIABLE, name, allowed)
    return names


def _run(stage: str, subject: Any, graph: Graph) -> None:
    """Each pass in turn: log what changed, write the graph after it (FP8COMPILE_DUMP, tlparse). Check the
    graph: after the last pass, and while debugging after each."""
    leave_out, told, after = skipped(), logger.isEnabledFor(logging.DEBUG), stage
    for step in passes(stage):
        if step.name in leave_out:
            logger.info("fp8: %s is skipped (%s)", step.name, SKIP_VARIABLE)
            continue
        before, start = _operators(graph) if told else Counter(), time.perf_counter()
        with compat.dynamo.symbolic_kernels():
            found = step.run(subject)
        stage, after = step.name if step.name in specification.STAGES else stage, step.name
        if told:
            _lint(graph, stage, after)
            took = 1e3 * (time.perf_counter() - start)
            logger.debug("%s: %s, %.1f ms%s", step.name, found, took, _changes(before, _operators(graph)))
        dump(f"{step.name}.txt", lambda: str(graph))
    if not told:
        _lint(graph, stage, after)


def _lint(graph: Graph, stage: str, after: str) -> None:
    graph.lint()
    specification.check(graph, stage, after)


def _operators(graph: Graph) -> Counter[str]:
    """How often each operator is called."""
    return Counter(_name(node.target) for node in graph.nodes if node.op == "call_function")


def _name(target: Any) -> str:
    return str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))


def _changes(before: Counter[str], after: Counter[str]) -> str:
    """ "; -12 aten.mm.default, +12 fp8compile.scaled_mm.default", "" where nothing changed."""
    names = sorted({*before, *after})
    changed = {name: after[name] - before[name] for name in names if after[name] != before[name]}
    return "; " + ", ".join(f"{count:+d} {name}" for name, count in changed.items()) if changed else ""
