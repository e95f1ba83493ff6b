"""amax_groups: over which ranks current amaxes are reduced, by `amax_group`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch.fx import Node

from .. import compat
from ..config.recipe import WHOLE
from ..errors import OptionError, near
from ..ir.fx_utils import Emitter, arg, aten
from .joint import Joint
from .plan import Operand
from .written import whole


def group_of(joint: Joint, operand: Operand) -> str | None:
    """The group that waits for this operand's current amax."""
    current = operand.scaling.block == WHOLE and not operand.scaling.delayed
    return joint.amax_groups.get(operand.recipe.amax_group) if current else None


def amax_groups(joint: Joint) -> int:
    """OptionError where that is impossible: for two groups in one graph, and for a name of nothing."""
    operands = joint.plan.operands.values()
    shared = {x.recipe.amax_group for x in operands if x.scaling.block == WHOLE}
    joint.amax_groups = named_groups("amax_group", shared, joint.inputs.groups)
    joint.groups |= dict.fromkeys(joint.amax_groups.values())
    return len(joint.groups)


def named_groups(
    key: str, given: Collection[bool | str], dimensions: Mapping[str, str]
) -> dict[bool | str, str]:
    """The names of the process groups that an option gives, by what it gives. `dimensions`: those of the
    parameters' DeviceMesh, and their groups."""
    found: dict[bool | str, str] = {}
    for one in given:
        if one is False:
            continue
        try:
            name = compat.process_groups.group_name(one, dimensions)
        except ValueError:
            raise _unknown(key, one, dimensions) from None
        if name is not None:
            found[one] = name
    names = sorted(set(found.values()))
    if len(names) > 1:
        raise OptionError(f"fp8 option {key!r} must name one process group in a graph; here are {names}")
    return found


def _unknown(key: str, given: bool | str, dimensions: Mapping[str, str]) -> OptionError:
    names = ", ".join(map(repr, dimensions))
    if given in dimensions:
        meshes = "parameters of one graph live on several meshes"
        why = f"{meshes}, whose dimensions of this name are of different ranks"
    elif dimensions:
        why = f"the mesh of the parameters has {names}"
    else:
        why = "the parameters are on no DeviceMesh: pass (mesh, dimension)"
    group = "the name of a process group that this rank is in"
    allowed = f"{group}, or of a dimension of the parameters' DeviceMesh ({why})"
    return OptionError.of(key, given, allowed, near(str(given), dimensions))


def reduce_current(joint: Joint) -> int:
    """Let tensors that are scaled by their current amax wait for that of their group; returns how many do.
    What a collective carries has been reduced already."""
    written = joint.form
    scales = {}
    for operand in written.amaxes:
        group = group_of(joint, operand)
        if group is not None and operand not in written.groups:
            scales[written.scales[whole(operand)][0]] = operand, group
    for scale, (operand, group) in scales.items():
        amax = arg(scale, 0)
        emit = written.after(amax, operand, recompute=None, ac_graph_id=None)
        scale.update_arg(0, reduced(emit, amax, group))
    return len(scales)


def reduced(emit: Emitter, amaxes: Node, group: str, until: Node | None = None) -> Node:
    """The maximum over a group. As integers: so NaN is above all numbers. A maximum of floats may drop it.
    `until`: where the result is waited for, and where `emit` goes on; None: at once.

    The partitioner leaves a collective in backward that can be computed again there, read or not: so the tag.
    """
    emit.meta["partitioner_tag"] = emit.meta["partitioner_tag"].replace("is_", "must_be_in_")
    bits = emit(aten.view.dtype, amaxes, torch.int32)
    started = emit(torch.ops._c10d_functional.all_reduce.default, bits, "max", group)
    emit.anchor = until or emit.anchor
    return emit(aten.view.dtype, emit(torch.ops._c10d_functional.wait_tensor.default, started), torch.float32)
