"""decide: give every matmul its decision, FP8 or the reason why not. Changes the records, not the graph.

`legality` says first what is possible, then the policy chooses for the layer. Matmuls that the policy leaves open are for
`weigh` to decide, where a description of the device is known.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from .. import compat
from ..codegen.scaled_mm_kind import EMULATED, how_grouped
from ..config.policy import Choice, Policy, Rule, Site
from ..config.recipe import WHOLE
from ..devices import support
from ..devices.catalog import Device
from ..devices.gpu import gpu_of
from ..ir.fx_utils import hint, value
from ..ir.inputs import Inputs
from ..ir.matmul import GEMMS, Matmul
from . import legality
from .classify import kinds
from .gathered import arrived


def decide(
    matmuls: list[Matmul], inputs: Inputs, policy: Policy, device: Device | None, inference: bool
) -> list[str]:
    """Fill in the decisions; returns complaints about rules of the policy that do not fit this graph."""
    evaluation = not inputs.training or inference
    whole = "eval mode" if not inputs.training else "inference: nothing to differentiate" if inference else None
    layers = _layers(matmuls, inputs)
    known = _kinds(matmuls, inputs)
    sites: list[Site] = []
    complaints: dict[str, None] = {}
    for matmul in matmuls:
        if matmul.weight is None:
            matmul.reason = matmul.not_a_weight
            continue
        site = _site(matmul, inputs, layers, known[matmul.fprop or matmul])
        sites.append(site)
        choice = policy.choose(site)
        gpu = device.gpu if device is not None else gpu_of(value(matmul.node).device)
        matmul.rule, matmul.auto = choice.label, choice.fp8 == "auto"
        matmul.recipe = choice.recipe
        if matmul.offs is not None:  # `aten._scaled_grouped_mm` takes nothing else
            tiles = matmul.recipe.weight_tiles and matmul.recipe.built_in.tile != WHOLE
            matmul.recipe = replace(matmul.recipe, fp8_format="e4m3", weight_tiles=tiles)
        if inputs.inlined:  # compiled autograd takes over the backward: nothing can decide there whether a call is cold
            matmul.recipe = matmul.recipe.current
        if matmul.weight_among(inputs.resharded):  # a copy kept until backward would hold the whole weight, on every rank
            matmul.recipe = replace(matmul.recipe, recast_weights=True)
        if matmul.weight_among(inputs.frozen) and (matmul.recipe.frozen == "fp8" or arrived(matmul.weight)):
            # its values never change, and both layouts come from its one FP8 copy: the other layout is made where it is read
            inputs_too, _, gradients_too = matmul.recipe.current_scaling
            matmul.recipe = replace(matmul.recipe, current_scaling=(inputs_too, True, gradients_too), recast_weights=True)
        gathered = matmul.weight_among(inputs.gathered)  # what is cast before it is sent has scales of its own amaxes
        if (matmul.computed or gathered) and matmul.recipe.delayed:  # a computed weight is another one in each call
            inputs_too, _, gradients_too = matmul.recipe.current_scaling
            matmul.recipe = replace(matmul.recipe, current_scaling=(inputs_too, True, gradients_too))
        if gathered and matmul.recipe.built_in.tile:  # and both layouts of a weight come from what was sent
            matmul.recipe = replace(matmul.recipe, weight_tiles=True)
        matmul.emulated = not matmul.recipe.built_in.native(gpu)
        if matmul.offs is not None:
            a, b = (matmul.recipe.scaling(role, matmul.gemm).block for _, role in matmul.roles)
            matmul.emulated |= how_grouped(gpu, a, b, not compat.reorders()) == EMULATED
            matmul.either = b == matmul.recipe.built_in.tile and support.has_mx_of_either_major(gpu) and not matmul.emulated
        rule = policy.rules[choice.rule] if choice.rule is not None else None
        chosen = _choice(matmul, site, choice, rule)
        if legality.flippable(matmul):  # the gradient of an input that is the transpose of a tensor
            matmul.flip()
        matmul.reason = legality.objection(matmul) or chosen or legality.misaligned(matmul)
        # a shipped rule that goes by sizes alone is nobody's choice
        matmul.on_purpose = chosen is not None and (rule is None or rule.where is None or policy.owns(choice.rule))
        if matmul.fp8 and any(role != "gradient" and compat.is_backward(matrix.base) for matrix, role in matmul.roles):
            matmul.reason = "an input that is made in backward"
        named = rule is not None and (rule.module is not None or rule.parameter is not None)
        if choice.fp8 == "on" and not matmul.fp8 and chosen is None and named:
            complaints[f"{choice.label} wants {matmul.fqn} in FP8, but {matmul.gemm} cannot be: {matmul.reason}"] = None
        evaluated = matmul.parameter is not None and compat.input_index(matmul.parameter) in inputs.evaluated
        loose = matmul.parameter is not None and compat.input_index(matmul.parameter) in inputs.leaves
        if evaluation or evaluated or loose:
            # an evaluation neither reads nor moves a history, and plain tensors (`leaves`) have none, since they may be new in
            # each call: the tensor's own amax scales it
            matmul.recipe = matmul.recipe.current
            if (evaluation or evaluated) and (policy.eval == "high_precision" or not evaluation):
                matmul.reason = whole or "eval mode"
    if evaluation:
        return []
    lost = [label for rule, label in zip(policy.rules, policy.labels, strict=True) if rule.blocks is not None]
    if sites and lost and not inputs.containers:
        complaint = f"{', '.join(dict.fromkeys(lost))}: what is compiled here, {inputs.root}, has no repeated blocks to count"
        complaints[complaint] = None
    return [*complaints, *policy.unmatched(sites, inputs.modules, inputs.parameter_names, whole=inputs.whole)]


def _choice(matmul: Matmul, site: Site, choice: Choice, rule: Rule | None) -> str | None:
    """Why the policy keeps a gemm in high precision; None if it does not."""
    if choice.fp8 == "off":
        if rule is not None and rule.kind is not None:
            return site.kind
        why = choice.label if rule is not None and rule.name else f"policy: {choice.label}"
        return f"{why}: {site.n} x {site.k}, {site.m} rows" if rule is not None and rule.where is not None else why
    if matmul.recipe.override_linear_precision[GEMMS.index(matmul.gemm)]:
        if matmul.recipe.name == "rowwise_with_gw_hp" and matmul.gemm == "wgrad":
            return f"recipe {matmul.recipe.name} keeps {matmul.gemm}"
        return f"override_linear_precision keeps {matmul.gemm}"
    return None


def _kinds(matmuls: list[Matmul], inputs: Inputs) -> dict[Matmul, str]:
    """The kinds of the forward matmuls with a weight. In a part of a larger graph, the matmuls of a weight take the kinds that
    they have there, if the larger graph has as many of them or gives all of them one kind; else the kinds found here."""
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
    """The position of each weight, by the name of its parameter in the model: in the order of first use in forward if the graph
    holds the whole model, else in the order of the model."""
    names = dict.fromkeys(inputs.prefix + matmul.name for matmul in matmuls if matmul.gemm == "fprop")
    known = () if inputs.whole and not inputs.prefix else inputs.matrices
    return {name: i for i, name in enumerate(dict.fromkeys((*known, *names)))}


def _site(matmul: Matmul, inputs: Inputs, layers: dict[str, int], kind: str) -> Site:
    m, n, k = (hint(size) for size in matmul.features)
    forward = matmul.fprop or matmul
    stack = forward.node.meta.get("nn_module_stack") or {}
    classes = [compat.class_name(cls) for _, cls in reversed(list(stack.values()))]
    classes += [inputs.root_class] if inputs.root_class else []  # the stack may begin below it
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
        layer=(layers[inputs.prefix + matmul.name], len(layers)),
        kind=kind,
    )
