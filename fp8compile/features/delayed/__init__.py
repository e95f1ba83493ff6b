"""Delayed scaling: the scale of a tensor comes from the amaxes of earlier training calls, so that no cast
waits for its own tensor's.

    slots          plan: which operands have a slot, a row of the graph's page of state
    store          the scale of each comes from the state
    raise_amaxes   what a call has seen joins the state, at the end of each direction
    load_scales    after the partitioner: a stored scale is a load

`graph` gives each call its page and tells whether it is cold; `arena` moves the state between calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.nn import Module

from ...compat.inductor import MUST_RECOMPUTE, MUST_SAVE
from ...compilation import Job
from ...extension import Feature, Pass, StoredScale
from ...frontend.inputs import roots
from ...ir.fx_utils import hint, value
from ...ir.ops import APART
from ...ir.records import HIGH_PRECISION
from ...logs import get_logger, say_once
from ...passes import specification
from ...passes.specification import ONE, WIDE, Rules, rule, typed
from ...runtime.interpreter import WHETHER_COLD
from . import loads, slot_ops
from .graph import DelayedGraph
from .raise_amaxes import raise_amaxes
from .state import Page
from .state_dict import prepare_load, scaling_state
from .state_page import READ
from .store import load_scales, slots, store
from .weight_state import find_state

logger = get_logger(__name__)

INLINED = (
    "compiled autograd takes over the backward, in which delayed scaling cannot keep its state: every "
    "tensor is scaled by its current amax, as with recipe 'tensorwise'"
)


class DelayedScaling(Feature):
    name = "delayed"
    passes = {
        "amax_groups": (Pass("slots", slots),),
        "reduce_current": (Pass("store", store), Pass("raise_amaxes", raise_amaxes)),
        "post_grad": (Pass("load_scales", load_scales),),
    }

    def of_graph(self, job: Job) -> DelayedGraph | None:
        if not job.learns:
            return None
        histories = [recipe.amax_history_len for recipe in job.options.policy.possible if recipe.delayed]
        if histories and job.inputs.inlined:
            say_once(logger, logging.WARNING, f"fp8: {INLINED}")
        if not histories or job.inputs.inlined or job.only == HIGH_PRECISION:
            return DelayedGraph(job, 0)
        loads.listen(roots(job.gm, job.inputs.packed))
        return DelayedGraph(job, max(histories))

    def stored_scales(self, weights: Iterable[Tensor]) -> Mapping[tuple[int, str, int], StoredScale]:
        pages: dict[Page, Tensor] = {}
        return {
            (id(weight), role, use): slot.stored(pages)
            for weight in weights
            for (role, use), slot in sorted(find_state(weight).slots.items())
        }

    def keep(self, model: Module) -> Callable[[], None]:
        saved = scaling_state(model)
        return lambda: prepare_load(model, saved, strict=False, quiet=True)()


# -- what `specification` checks --


def _stored(y: Node, scales: Node, *given: Any) -> Rules:
    votes = y.target is slot_ops.votes
    rows = given[0] if votes else given[1:2]
    page = scales.op == "placeholder" and typed(WIDE, scales, sizes=(None, READ, APART))
    yield "stored scales are read of the input for scales", page
    yield "a slot is a row of the input for scales", all(0 <= i < hint(value(scales).shape[0]) for i in rows)
    yield "a stored scale is one float32", votes or typed(WIDE, given[0], y, sizes=ONE)


def _like_votes(y: Node, votes: Node, amax: Node, index: int, *_: Any) -> bool:
    return typed(WIDE, votes, sizes=(None,)) and 0 <= index < hint(value(votes).shape[0]) - 1


STORED = slot_ops.delayed_scale, slot_ops.delayed_inverse
RULES = dict.fromkeys((*STORED, slot_ops.votes), _stored)
RULES[slot_ops.agreed_scale] = rule("an agreed scale is one of the votes", _like_votes)
specification.admit(RULES, since="reduce_current", until="lower_scales")
specification.SCALES |= dict.fromkeys(STORED, (MUST_SAVE, MUST_RECOMPUTE))  # views of the input for scales
specification.SCALES[slot_ops.agreed_scale] = (MUST_SAVE,)
WHETHER_COLD.add(slot_ops.votes)
