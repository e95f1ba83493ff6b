"""Ranks that reduce amaxes together compare their graphs before the first call: the amaxes of different
graphs would be mixed up, or a collective would hang without saying why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch

from .. import compat
from ..errors import Fp8CompileError
from ..logs import get_logger

logger = get_logger(__name__)


def agree(groups: Iterable[str], slots: str, decisions: Sequence[str]) -> None:
    """Fp8CompileError if ranks of these groups have other slots or decisions, or do not come to compare."""
    lines = (slots, *decisions)
    # with each group before an error: others wait for this rank
    found = {group: _different(group, slots, decisions) for group in groups}
    for group, others in ((group, others) for group, others in found.items() if others):
        rank, text = next(iter(others.items()))
        theirs = text.split("\n")
        pairs = zip_longest(theirs[1:], lines[1:], fillvalue="nothing")
        unlike = (f"rank {rank} has {a}, this one {b}" for a, b in pairs if a != b)
        differs = next(unlike, f"this one has {slots[:200]}")
        raise Fp8CompileError(
            f"ranks {list(others)} of the process group {group!r}, with which this rank shares amaxes "
            "(reduce_amax, amax_group) or FP8 all-gathers, have another graph here, with other slots or "
            f"decisions: {differs}. Ranks that run different layers (stages, experts) need groups of their "
            "own: options={'reduce_amax': group}, with the group of those that run the same. Where ranks see "
            "other sizes, write fp8 = 'on' or 'off' in rules instead of 'auto'"
        )


def _different(group: str, slots: str, decisions: Sequence[str]) -> dict[int, str]:
    """As `process_groups.different`. Fp8CompileError names the graph, and the ranks that did not come."""
    rank, graph = torch.distributed.get_rank(), slots[:200] or "no tensor with a history"

    def waiting(missing: list[int], seconds: float) -> None:
        logger.warning(
            "fp8: rank %d waits for ranks %s of the process group %r to compile a graph "
            "with %s; gives up in %.0f s",
            *(rank, missing, group, graph, seconds),
        )

    try:
        return compat.process_groups.different(group, slots, "\n".join(decisions), waiting)
    except compat.process_groups.Alone as alone:
        missing, seconds = alone.args
        raise Fp8CompileError(
            f"reduce_amax, amax_group: rank {rank} has compiled a graph that ranks {missing} of the process "
            f"group {group!r} have not compiled within {seconds:.0f} s, half of the group's timeout: "
            f"{graph}. No rank may compile a graph with other slots alone: all have to go the same way "
            "through the model, with inputs of the same sizes (drop the last batch, or pad it). Where sizes "
            'differ, write fp8 = "on" or "off" in rules instead of "auto". If the others only compile for '
            "longer, give the group a longer timeout"
        ) from None
