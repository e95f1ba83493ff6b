"""merge: which matmuls of one input become one matmul ("horizontal fusion").

    q = linear(x, wq); k = linear(x, wk); v = linear(x, wv)  ->  q, k, v = split(linear(x, [wq; wk; wv]))

fprop    one matmul with the weights' FP8 copies below each other; q, k and v are slices of its result
dgrad    one matmul that contracts all output features: no sum of three gradients of x is left
wgrad    one matmul; the parameters' gradients are slices of its result, each of them contiguous

No parameter is touched: the copies of the weights, and those of the gradients of q, k and v, are written side
by side into one buffer. A matmul takes one scale an operand. So the weights share a scale, that of the
largest of them, and so do the gradients. Each keeps its own amax and its own history.

Merged are the layers that agree in all that a matmul has one of, and whose gradients of x are terms of one
sum. With `merge_matmuls="auto"` the device has to be described, and the model of `devices.cost` has to say
that it pays. The pass changes nothing; `quantize` writes what it returns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from ... import compat
from ...config.recipe import COSTS, WHOLE
from ...devices import cost
from ...devices.catalog import Device
from ...ir.fx_utils import ALIASES, CASTS, SAME, VIEWS, Ranks, aten, call_function, hint, readers, value
from ...ir.matmul import GEMMS, Gemm, Matmul
from ...passes.joint import Joint
from ...passes.magnified import Backward
from ...passes.plan import Plan
from ...passes.quantize import split_addend
from ...passes.readers import BLOCK, inexact, unreadable

MERGED = "one matmul each: {}"
SUMS = (aten.add.Tensor,)


@dataclass(frozen=True, eq=False)
class Merged:
    """Layers whose matmuls are merged. `gemms`: for each kind that they have, one matmul a layer, in the same
    order. `total`: a sum of the gradients of their input, if they have dgrads. `apart`: the layers whose
    result is copied out, because backward reads it and does not read those of others (or only their FP8
    copies), which would be kept as long."""

    gemms: Mapping[Gemm, tuple[Matmul, ...]]
    total: Node | None
    apart: frozenset[Matmul]

    @property
    def every(self) -> list[Matmul]:
        return [matmul for members in self.gemms.values() for matmul in members]


@dataclass
class MergedGroups:
    """What is merged in a graph."""

    merged: list[Merged] = field(default_factory=list)


def merge(joint: Joint) -> int:
    """Choose the groups, in the graph's order. Layers of several blocks are not merged: cross-attention reads
    one tensor in all of them, and the gradients of all would be kept until the last one is there."""
    matmuls, plan, groups = joint.matmuls, joint.plan, joint.extras.of(MergedGroups).merged
    ranks = Ranks(matmuls[0].node.graph) if matmuls else None
    backward = _backward(joint.graph) if joint.saves else None
    of_layer: dict[Matmul, list[Matmul]] = defaultdict(list)
    uses: dict[Node, int] = defaultdict(int)
    for matmul in matmuls:
        if matmul.weight is not None:
            of_layer[matmul.fprop or matmul].append(matmul)
        for matrix in (matmul.a, matmul.b):
            uses[matrix.base] += 1
    together: dict[tuple, list[Matmul]] = defaultdict(list)
    for fprop, its in of_layer.items():
        if all(map(_mergeable, its)) and uses[fprop.b.base] == 1 + any(x.gemm == "dgrad" for x in its):
            roles = [plan.of(matrix, role, x) for x in its for matrix, role in x.roles]
            if not any(operand.carried for operand in roles):
                together[joint.inputs.block(fprop.fqn), _key(fprop, its, plan)].append(fprop)
    for fprops in together.values():
        if ranks is None or len(fprops) < 2:
            continue
        made = _merged(fprops, of_layer, ranks, backward)
        if made is not None and _wanted(made, joint.device):
            groups.append(made)
            for matmul in made.every:
                matmul.merged = made.gemms[matmul.gemm]
    layers = [members for one in groups for members in one.gemms.values()]
    names = dict.fromkeys(" + ".join(x.fqn.rpartition(".")[2] for x in members) for members in layers)
    joint.remarks += [MERGED.format("; ".join(names))] if groups else []
    return len(groups)


def _mergeable(matmul: Matmul) -> bool:
    """True for a linear layer's three FP8 matmuls, with a parameter as weight, and one scale a tensor."""
    weight, sizes = matmul.weight_operand, (matmul.m, matmul.n, matmul.k)
    grouped = matmul.offs is not None or value(matmul.node).dim() != 2
    if not matmul.fp8 or grouped or matmul.recipe.merge_matmuls is False:
        return False
    if any(matmul.recipe.scaling(role, matmul.gemm).block != WHOLE for _, role in matmul.roles):
        return False
    (_, role), _ = matmul.roles
    if matmul.gemm == "wgrad":
        n, shaped = sizes[0], role == "gradient" and matmul.a.transposed and not matmul.b.transposed
    else:
        n = sizes[1] if matmul.gemm == "fprop" else sizes[2]
        forward = matmul.gemm == "fprop"
        shaped = weight is matmul.b and weight.base is matmul.parameter and weight.transposed is forward  # type: ignore[union-attr]
        shaped = shaped and not matmul.a.transposed and value(weight.base).dim() == 2  # type: ignore[union-attr]
    late = matmul.gemm == "fprop" and compat.dynamo.is_backward(matmul.node)
    fits = isinstance(n, int) and n % 16 == 0 and not late
    return shaped and fits and not matmul.flipped and _addend(matmul) is not None


def _addend(matmul: Matmul) -> str | None:
    """What kind of bias a layer has, "" for none; None if it adds something else."""
    bias, rest = split_addend(matmul)
    if rest is not None:
        return None
    return "" if bias is None else str(value(bias).dtype) if bias.op == "placeholder" else None


def _key(fprop: Matmul, its: list[Matmul], plan: Plan) -> tuple:
    """Equal for layers of one input that agree in dtypes, recipes, bias and how the user checkpoints them."""
    gemms = {}
    for x in its:
        tags = x.node.meta.get("recompute"), x.node.meta.get("ac_graph_id")
        gemms[x.gemm] = str(value(x.node).dtype), x.recipe, *tags
    source = plan.of(fprop.a, "input", fprop), str(fprop.a.shape), str(value(fprop.b.base).dtype)
    return (*source, _addend(fprop), *(gemms.get(gemm) for gemm in GEMMS))


def _merged(
    fprops: list[Matmul],
    of_layer: Mapping[Matmul, list[Matmul]],
    ranks: Ranks,
    backward: Backward | None,  # with `save`
) -> Merged | None:
    gemms: dict[Gemm, tuple[Matmul, ...]] = {}
    for gemm in GEMMS:
        members = tuple(x for fprop in fprops for x in of_layer[fprop] if x.gemm == gemm)
        if members and len(members) != len(fprops):
            return None
        if members:
            gemms[gemm] = members
    for members in gemms.values():
        inputs = [x for matmul in members for x in matmul.node.all_input_nodes]
        if ranks.reach(inputs, {matmul.node for matmul in members}):
            return None  # one is computed from another one
    if any(user.op == "output" for fprop in fprops for user in readers(fprop.node, ALIASES)):
        return None  # a slice has other strides than the tensor that the caller expects
    total = total_of([x.node for x in gemms["dgrad"]]) if "dgrad" in gemms else None
    if "dgrad" in gemms and total is None:
        return None
    through = (*ALIASES, *CASTS)  # backward casts again what it reads in another dtype
    late = compat.dynamo.is_backward
    kept = [x for x in fprops if "recompute" not in x.node.meta and any(map(late, readers(x.node, through)))]
    direct = [x for x in kept if any("attention" in str(user.target) for user in readers(x.node, ALIASES))]
    if len(kept) == len(fprops) and 0 < len(direct) < len(fprops):
        # attention reads a copy of its slice that backward keeps, too: after norms of q and k, v stays apart
        rest = [x for x in fprops if x not in direct]
        return _merged(rest, of_layer, ranks, backward) if len(rest) > 1 else None
    if backward is not None:  # slices that are kept in FP8 do not keep the result of the matmul
        unfit = (unreadable(x.node, joint=True) or inexact(x.node, x.node, backward) for x in kept)
        kept = [x for x, why in zip(kept, unfit, strict=True) if x.n % BLOCK.columns or why]
    return Merged(gemms, total, frozenset(kept if len(kept) < len(fprops) else ()))


def _backward(graph: Graph) -> Backward:
    linear = compat.dynamo.tag_backward(graph)
    return Backward(linear, [x for x in graph.find_nodes(op="placeholder") if x not in linear], joint=True)


def total_of(parts: Collection[Node]) -> Node | None:
    """The first sum that contains all of these tensors, each after views and casts. What is summed up on the
    way has no other reader. None if there is no such sum."""
    paths, through = [], (*VIEWS, *SAME, *CASTS, *SUMS)
    for node in parts:
        paths.append({node: None})
        while len(node.users) == 1 and call_function(user := next(iter(node.users)), through):
            if call_function(user, SUMS) and (user.kwargs or user.args[0] is user.args[1]):
                break
            paths[-1][user] = None
            node = user
    return next((node for node in paths[0] if all(node in path for path in paths)), None)


def _wanted(merged: Merged, device: Device | None) -> bool:
    if all(matmul.recipe.merge_matmuls is True for matmul in merged.every):
        return True
    return device is not None and device.has_fp8 and gain(merged, device) > 0


def gain(merged: Merged, device: Device) -> float:
    """Seconds that merging saves in matmuls and the sum of the input's gradients, less copies of results."""
    saved = -sum(4 * hint(x.m) * x.n / device.bandwidth + device.launch for x in merged.apart)
    for gemm, members in merged.gemms.items():
        first = members[0]
        sizes = [(hint(x.m), hint(x.n), hint(x.k)) for x in members]
        along = {"fprop": 1, "dgrad": 2, "wgrad": 0}[gemm]
        whole = tuple(sum(size[i] for size in sizes) if i == along else sizes[0][i] for i in range(3))
        times = [_seconds(first, size, device) for size in (*sizes, whole)]
        saved += sum(times[:-1]) - times[-1]
        if gemm == "dgrad":
            size = whole[0] * whole[1] * value(first.node).dtype.itemsize
            saved += (len(members) - 1) * size / device.bandwidth
    return saved


def _seconds(matmul: Matmul, sizes: tuple[int, ...], device: Device) -> float:
    """Seconds of an FP8 matmul like this one of other sizes."""
    m, n, k = sizes
    scaling, fast = COSTS[matmul.recipe.name], matmul.recipe.use_fast_accum[GEMMS.index(matmul.gemm)]
    emulated, itemsize = matmul.decision.emulated, value(matmul.node).dtype.itemsize
    return cost.block_gemm(device, m, n, k, scaling, itemsize, emulated=emulated, fast=fast)
