"""The compilation of one Dynamo graph: the core, and what features add to it.

The graph gets inputs for what features give it. AOTAutograd traces forward and backward into one joint graph,
which our passes rewrite. There, they give the new inputs the sizes that are needed. Then the partitioner
makes a forward and a backward, and `runtime.halves` lets Inductor compile each.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from . import compat
from .config.options import Options
from .config.policy import Policy
from .devices import catalog, formats
from .devices.catalog import Device
from .extension import GraphFeature, features
from .frontend.inputs import Inputs
from .ir import cpu, ops
from .ir.merged import both_sides, side_by_side
from .ir.records import HIGH_PRECISION, GraphReport
from .logs import get_logger, say_once
from .passes.joint import Joint, Partitioned, Rewritten
from .passes.pipeline import run_early_post_grad, run_joint, run_partitioned, run_post_grad, skipped
from .process import Extras
from .reporting.findings import add_to_ledger, findings
from .runtime.calls import Calls, Interface
from .runtime.compiled_graph import CompiledGraph
from .runtime.halves import Halves
from .runtime.inner import Inner
from .runtime.owners import Owners

logger = get_logger(__name__)
RECOMPUTABLE = (ops.quantize, ops.quantize_both, ops.amax_blocks, ops.transposed, side_by_side, both_sides)


@dataclass(frozen=True)
class Job:
    """A graph to compile, and what is known of it before it is traced.

    `given`: the inputs of its first call, in Dynamo's own list. `only`: the precision that is asked for,
    whatever the policy says of steps. `facts`: what a later process has to know for certain, see
    `runtime.warm_start`; None: without the cache. `policies`: those under which the graph is compiled, once
    each; `policy`: that of this compilation. `record`: the graph's index in the ledger, once it is there.
    `shared`: what features keep for all compilations of one graph.
    """

    gm: GraphModule
    given: Sequence[Any]
    inputs: Inputs
    options: Options
    inner: Inner
    only: str | None
    policies: tuple[Policy, ...]
    policy: Policy
    facts: str | None = None
    record: int | None = None
    shared: Extras = field(default_factory=Extras)

    @property
    def learns(self) -> bool:
        """True if it is for training: in training mode, with gradients and weights."""
        return self.inputs.training and self.inputs.grad and bool(self.inputs.weights)


class Compilation:
    """One graph, under one policy."""

    def __init__(self, job: Job):
        self.job, self.record, self.options = job, job.record, job.options
        self.tells = job.record is None and job.only != HIGH_PRECISION
        inputs = job.inputs
        weights = tuple(sorted(inputs.weights, key=lambda i: (i not in inputs.parameters, i)))
        self.interface = Interface(
            weights=weights,
            parameters=weights[: len(inputs.parameters)],
            packed=tuple(sorted(inputs.packed)),
            kind=inputs.root_class,
            prefix=inputs.prefix,
            names=tuple(inputs.names),
            trains=inputs.training and inputs.grad,
        )
        made = (feature.of_graph(job) for feature in features())
        self.parts: list[GraphFeature] = [part for part in made if part is not None]
        self.facts = job.facts if all(part.warm for part in self.parts) else None
        self.calls, self.owners = Calls(self.interface), Owners(self.interface)
        known = self.calls, self.owners, self.parts
        self.halves = Halves(job.inner, self._rewrite, self._after, *known)
        self.halves.keeps = self.facts is not None

    def run(self) -> CompiledGraph:
        halves, (gm, examples) = self.halves, self._with_inputs()
        # DDPOptimizer expects one lazy backward a graph
        at_once = len(self.job.policies) > 1
        restore = halves.restore if self.facts is not None else None
        slow = self.job.inner.slow
        if slow:
            what = f"fp8: compiling {self.job.inputs.root}; the first calls take seconds to minutes"
            say_once(logger, logging.INFO, what, "compiling")
        function = compat.inductor.compile_fx(gm, examples, halves.compile, self._patches(), at_once, restore)
        done = halves.rewritten or Rewritten()
        if slow and done.converts and self._device().type == "cpu":
            cpu.load()
        if halves.restored:
            logger.debug("fp8: %s comes from AOTAutograd's cache", self.job.inputs.root)
            if done.findings is not None and self.tells:
                self.record = add_to_ledger(done.findings, self.options.warn)
        made = CompiledGraph(
            function,
            interface=self.interface,
            calls=self.calls,
            owners=self.owners,
            record=self.record,
            parts=self.parts,
            options=self.options,
            done=done,
        )
        for part in self.parts:
            part.compiled(self.job, made)
        # what is compiled keeps this object, and is to keep no input
        self.job = dataclasses.replace(self.job, given=())
        return made

    def _with_inputs(self) -> tuple[GraphModule, list[Any]]:
        """A copy of the graph with inputs for features, and an example of each input."""
        # compile_fx takes ownership, and Dynamo still reads the original's placeholders
        gm = compat.dynamo.copy_graph(self.job.gm)
        examples = list(self.job.given)
        device = self._device()
        for part in self.parts:
            part.place(len(examples))
            for i in range(part.inputs):
                name, value = f"fp8_{type(part).__name__.lower()}_{i}", torch.empty(1, device=device)
                stable = i < len(part.stable) and part.stable[i]
                examples.append(compat.dynamo.add_input(gm, name, value, stable))
        return gm, examples

    def _device(self) -> torch.device:
        weights = self.interface.weights
        return self.job.given[weights[0]].device if weights else torch.device("cpu")

    def _rewrite(self, graph: Graph) -> Rewritten:
        inputs, policy = self.job.inputs, self.job.policy
        device = described(self.options, graph)
        joint = Joint(
            graph=graph,
            inputs=inputs,
            given=self.options.policy,
            policy=policy,
            policies=self.job.policies,
            device=device,
            fnuz=formats.fnuz(),
        )
        for part in self.parts:
            part.before(self.job, joint)
        done = run_joint(joint)
        if done.groups:
            records = (matmul.record() for matmul in done.matmuls if matmul.weight is not None)
            own = (f"{r.fqn.removeprefix(inputs.prefix)} {r.gemm} {r.decision} {r.recipe}" for r in records)
            decisions = [line.strip() for line in own]
            decisions += [line for part in self.parts for line in part.decisions(done)]
            self.calls.decisions = tuple(decisions)
        if self.tells:
            found = findings(done, inputs, self.options.policy, device, self._report)
            done = dataclasses.replace(done, findings=found)
            self.record = add_to_ledger(found, self.options.warn)
        return done

    def _report(self, report: GraphReport, done: Rewritten) -> GraphReport:
        for part in self.parts:
            report = part.report(self.job, report, done)
        return report

    def _after(self, done: Rewritten) -> None:
        for part in self.parts:
            part.after(self.job, done)

    def _partitioned(self, forward: GraphModule, backward: GraphModule, visible: int) -> None:
        halves = Partitioned(forward, backward, visible, formats.fnuz())
        run_partitioned(halves)
        for part in self.parts:
            part.partitioned(self.job, halves, self.record)

    def _patches(self) -> dict[str, Any]:
        """Inductor's options: the user's, and our passes."""
        job, theirs, inputs = self.job, self.options.inductor, self.job.inputs
        after = any(part.partitions for part in self.parts)
        if after and theirs.get("custom_partitioner_fn"):
            self.options.warn(
                "save='fp8' has no effect beside a custom_partitioner_fn, which decides what is kept"
            )
        parts = [type(part).__name__ for part in self.parts]
        of_graph = (parts, job.only, self.tells, inputs.inlined, sorted(inputs.gathered), skipped())
        key = "-".join((*(policy.key for policy in (job.policy, *job.policies)), *map(str, of_graph)))
        names, run = [op.name() for op in RECOMPUTABLE], self._partitioned if after else None
        partitioner = compat.inductor.Partitioner(names, run, f"-{after}-{skipped()}", inputs.packed)
        return {
            **lowering(self.options),
            "joint_custom_pre_pass": compat.inductor.GraphPass(
                self.halves.joint_pass, key, theirs.get("joint_custom_pre_pass"), self.facts or ""
            ),
            "custom_partitioner_fn": theirs.get("custom_partitioner_fn") or partitioner,
        }


def lowering(options: Options) -> dict[str, Any]:
    """The user's Inductor options, and our passes over each partitioned graph."""
    key, theirs = f"{options.policy.key}-{skipped()}", options.inductor
    ours: dict[str, Callable[[Graph], None]] = {"post_grad_custom_post_pass": run_post_grad}
    if compat.inductor.async_tensor_parallel(theirs):
        ours["post_grad_custom_pre_pass"] = run_early_post_grad
    return {
        **theirs,
        **{name: compat.inductor.GraphPass(run, key, theirs.get(name)) for name, run in ours.items()},
    }


def described(options: Options, graph: Graph) -> Device | None:
    """The device for which the cost model weighs FP8: the policy's, else the graph's own, if described."""
    if options.policy.device is not None:
        return catalog.find(options.policy.device)
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    used = dict.fromkeys(value.device for value in values if isinstance(value, torch.Tensor))
    return next((found for device in used if (found := catalog.of(device)) is not None), None)
