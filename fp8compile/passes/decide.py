"""decide: give every matmul its decision, FP8 or the reason why not. Changes the records, not the graph.

The facts of each matmul are gathered here. From them and the policy, `resolve` makes the decision. Where a
device is described, `weigh` decides about the matmuls that the policy leaves open.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from .. import compat
from ..config.policy import Site, unmatched
from ..devices.gpu import Gpu, gpu_of
from ..frontend.inputs import Inputs
from ..ir.fx_utils import hint, value
from ..ir.matmul import Decision, Matmul, Price
from . import legality
from .classify import kinds
from .gathered import block_held, not_as_held
from .joint import Joint
from .resolve import Facts, resolve


def of_each_policy(run: Callable[[Joint], int]) -> Callable[[Joint], int]:
    """A pass over decisions, for each policy, so that all graphs that are made of this one plan the same
    slots; last for the graph's own, whose count it returns."""

    def runs(joint: Joint) -> int:
        own, found = joint.policy, 0
        for policy in (*(other for other in joint.policies if other != own), own):
            joint.policy = policy
            for matmul in joint.matmuls:
                matmul.decision, matmul.price = joint.decided.get((policy, matmul), (Decision(), Price()))
            found = run(joint)
            joint.decided.update({(policy, x): (x.decision, x.price) for x in joint.matmuls})
        return found

    return runs


def decide(joint: Joint) -> int:
    """Fill in the decisions, and complain about rules that do not fit the graph; returns how many are FP8."""
    matmuls, inputs, policy, device = joint.matmuls, joint.inputs, joint.policy, joint.device
    whole = "inference: nothing to differentiate" if joint.inference else None
    if not inputs.training:
        whole = "eval mode"
    layers = _layers(matmuls, inputs)
    known = _kinds(matmuls, inputs)
    sites: list[Site] = []
    complaints: dict[str, None] = {}
    for matmul in matmuls:
        if matmul.weight is None:
            matmul.keep(matmul.not_a_weight)
            continue
        if legality.flippable(matmul):  # the gradient of an input that is the transpose of a tensor
            matmul.flip()
        site = _site(matmul, inputs, layers, known[matmul.fprop or matmul])
        sites.append(site)
        gpu = device.gpu if device is not None else gpu_of(value(matmul.node).device)
        facts = _facts(matmul, inputs, gpu, whole, policy.eval == "fp8")
        made = matmul.decision = resolve(site, facts, policy)
        if made.wanted and made.reason is not None and facts.off is None:
            told = f"{made.rule} wants {matmul.fqn} in FP8, but {matmul.gemm} cannot be: {made.reason}"
            complaints[told] = None
        if made.overruled:
            held = f"whose weight is held in FP8, and its bytes decide: {made.recipe.name!r}"
            complaints[f"{made.rule} wants recipe {made.overruled!r} for {matmul.fqn}, {held}"] = None
    if whole is None:
        given = joint.given
        labelled = zip(given.rules, given.labels, strict=True)
        lost = [label for rule, label in labelled if rule.blocks is not None]
        if sites and lost and not inputs.containers:
            why = f"{inputs.root} is compiled alone, and has no first or last block"
            complaints[f"{', '.join(dict.fromkeys(lost))}: ignored, as {why}; name a module instead"] = None
        alone = inputs.whole and not inputs.prefix
        unfit = unmatched(given, sites, inputs.modules, inputs.parameter_names, alone)
        joint.complaints, joint.sites = [*complaints, *unfit], () if alone else tuple(sites)
    return sum(matmul.fp8 for matmul in matmuls)


def _facts(matmul: Matmul, inputs: Inputs, gpu: Gpu | None, evaluation: str | None, in_fp8: bool) -> Facts:
    """`evaluation`: why the graph is one, if it is; `in_fp8`: whether such graphs are in FP8. A weight of a
    module in eval mode stays in high precision in a training graph."""
    assert matmul.weight is not None
    a, b = (role for _, role in matmul.roles)
    evaluated = matmul.weight_among(inputs.evaluated)
    off = None if in_fp8 else evaluation
    if evaluated and evaluation is None:
        off = "eval mode"
    return Facts(
        gpu=gpu,
        roles=(a, b),
        weight=matmul.weight_operand,
        objection=legality.objection(matmul) or not_as_held(matmul),
        misaligned=legality.misaligned(matmul),
        late=legality.late(matmul),
        off=off,
        grouped=matmul.offs is not None,
        inlined=inputs.inlined,
        resharded=matmul.weight_among(inputs.resharded),
        frozen=matmul.weight_among(inputs.frozen),
        arrived=block_held(matmul.weight),
        gathered=matmul.weight_among(inputs.gathered),
        computed=matmul.computed,
        stateless=evaluation is not None or evaluated or matmul.weight_among(inputs.leaves),
    )


def _kinds(matmuls: list[Matmul], inputs: Inputs) -> dict[Matmul, str]:
    """The kinds of the forward matmuls with a weight. In a part of a larger graph, the matmuls of a weight
    take the kinds from there, if there are as many or all are of one kind; else those found here."""
    found = kinds(matmuls, inputs)
    uses = defaultdict(list)
    for matmul in found:
        uses[matmul.name].append(matmul)
    for name, here in uses.items():
        there = (inputs.kinds or {}).get(name, ())
        if len(there) == len(here):
            found.update(zip(here, there, strict=True))
        elif len({*there}) == 1:
            found.update(dict.fromkeys(here, there[0]))
    return found


def _layers(matmuls: list[Matmul], inputs: Inputs) -> dict[str, int]:
    """The position of each weight, by the name of its parameter in the model: in the order of first use in
    forward if the graph holds the whole model, else in the order of the model."""
    names = dict.fromkeys(matmul.name for matmul in matmuls if matmul.gemm == "fprop")
    known = () if inputs.whole and not inputs.prefix else inputs.matrices
    return {name: i for i, name in enumerate(dict.fromkeys((*known, *names)))}


def _site(matmul: Matmul, inputs: Inputs, layers: dict[str, int], kind: str) -> Site:
    m, n, k = (hint(size) for size in matmul.features)
    forward = matmul.fprop or matmul
    stack = forward.node.meta.get("nn_module_stack") or {}
    classes = [compat.fsdp.class_name(cls) for _, cls in reversed(list(stack.values()))]
    classes += [inputs.root_class] if inputs.root_class else []  # the stack may begin below it
    classes += inputs.around
    return Site(
        module=matmul.fqn,
        parameter=matmul.name,
        classes=tuple(classes),
        op=forward.op,
        gemm=matmul.gemm,
        m=m,
        n=n,
        k=k,
        block=inputs.block(matmul.fqn),
        layer=(layers[matmul.name], len(layers)),
        kind=kind,
    )
