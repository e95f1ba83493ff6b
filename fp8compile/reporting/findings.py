"""What a graph's report says, and what is wrong with it; and how the user is told."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .. import process
from ..config.policy import Policy
from ..config.recipe import BUILT_IN
from ..devices.catalog import Device
from ..frontend.inputs import Inputs
from ..ir.records import Findings, GraphReport
from ..logs import get_logger
from ..passes import legality
from ..passes.joint import Rewritten
from ..passes.remarks import remarks
from ..runtime.ledger import Ledger
from .report import Report

logger: logging.Logger = get_logger(__name__)

LEARNS = (
    "{} is in eval mode, and the gradients of its weights are computed, so that it trains in high "
    "precision. To train in FP8, call train() on it (a BatchNorm or Dropout inside may stay in eval mode); "
    "to evaluate, use torch.no_grad()"
)
INSIDE = (
    "{} computes its gradients inside of the compiled function (torch.func), so that it trains in high "
    "precision. To train in FP8, compile the model or the loss alone, and call backward() on what it returns"
)


def findings(
    done: Rewritten,
    inputs: Inputs,
    policy: Policy,
    device: Device | None,
    of_features: Callable[[GraphReport, Rewritten], GraphReport],
) -> Findings:
    """The report of a graph, and what is wrong with it: no matmul became FP8, or a rule of the policy decides
    nothing. `policy`: the user's. `of_features` adds what features report."""
    training = inputs.training and not done.inference
    name = f"{inputs.root}, {'training' if training else 'evaluation'}"
    why = "inference" if inputs.training else "the model is in eval mode"
    inside = inputs.differentiates and done.inference
    why = "its gradients are computed inside of the graph" if inside else why
    how = "FP8, scaled by current amaxes" if policy.eval == "fp8" else "high precision"
    note = "" if training else f"compiled in {how}: {why}"
    nested = [record for hidden in done.opaque for record in hidden.matmuls]
    opaque = tuple(hidden for hidden in done.opaque if not hidden.matmuls)
    records = (*(matmul.record() for matmul in done.matmuls), *nested)
    described = device.name if device else ""
    notes = remarks(done.matmuls, done.remarks, policy) if training else ()
    report = GraphReport(0, name, records, opaque, note, done.edges, described, notes, prefix=inputs.prefix)
    report = of_features(report, done)
    if not training:
        learns = inside or (not inputs.training and any(matmul.gemm == "wgrad" for matmul in done.matmuls))
        text = (INSIDE if inside else LEARNS).format(inputs.root)
        return Findings(report, training, (), (text,) if learns and policy.eval != "fp8" else ())
    after = []
    where = described or "this device"
    emulated = [matmul for matmul in done.matmuls if matmul.fp8 and matmul.decision.emulated]
    if any(matmul.groups and matmul.recipe.built_in.needs is None for matmul in emulated):
        why = "Inductor's options let it reorder the graph, so none of our kernels can be launched there"
        after.append(f"experts in FP8 are emulated in bf16 on {where}, and not faster: {why}")
    recipes = {matmul.recipe.name for matmul in emulated if matmul.recipe.built_in.needs is not None}
    for recipe in sorted(recipes):
        *others, last = [
            repr(name) for name, made in BUILT_IN.items() if made.needs is None and made.cost is not None
        ]
        whose = f" (tensor cores of {BUILT_IN[recipe].whose} have it)" if BUILT_IN[recipe].whose else ""
        what = f"{recipe} is emulated in bf16 on {where}: the same values, no speedup{whose}."
        after.append(f"{what} For FP8's speed, use {', '.join(others)} or {last}")
    wanted = not inputs.part and any(x.wanted and x.weight is None and legality.fits(x) for x in done.matmuls)
    # no complaint about a part of a model that is only an embedding, a norm, convolutions, an output head, or
    # an expert without tokens in this step: such a part has no FP8, as it should be
    weighted = [matmul for matmul in done.matmuls if matmul.weight is not None]
    kept = [matmul.decision.on_purpose or matmul.reason == legality.NO_ROWS for matmul in weighted]
    nothing = not all(kept) if kept else bool(done.opaque) and inputs.whole and not inputs.part
    if (nothing or wanted) and not any(matmul.fp8 for matmul in done.matmuls):
        insist = (
            "fp8compile.report() lists them; where FP8 is possible, a policy's rule with "
            'fp8 = "on" insists on it'
        )
        after.append(f"no matmul of {inputs.root} becomes FP8: {Report([report]).summary()}. {insist}")
    return Findings(report, training, tuple(done.complaints), tuple(after))


def add_to_ledger(found: Findings, complain: Callable[[str], None]) -> int:
    """Add a graph to the ledger, log its summary, and complain of what is wrong. Returns its index."""
    report = found.report
    index = process.of(Ledger).add(report)
    for complaint in found.before:
        complain(complaint)
    said = f"{report.name}: {report.note}"
    if found.training:
        said = Report([process.of(Ledger).graph(index)]).summary()
    logger.log(logging.INFO if report.matmuls or report.opaque else logging.DEBUG, "fp8: %s", said)
    for complaint in found.after:
        complain(complaint)
    return index
