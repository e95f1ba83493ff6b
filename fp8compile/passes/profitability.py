"""weigh: keep in high precision what FP8 would not make faster.

    wq, wk, wv read h            one component: their casts of h are shared, so they are decided together
    wo reads y; fprop and dgrad share wo, dgrad and wgrad share dy

Matmuls that share operands form a component. A search starts from all gemms in FP8, and from as few as the
policy allows. It drops or takes in gemms, layers or the whole component as long as the estimated time falls.
So no component ends slower than with the least FP8 that the policy allows (none, where it leaves all matmuls
open). The same holds for the graph, including the costs of scaling that arise once a graph. `devices.cost`
computes the costs from the sizes of the trace and from the nodes that compute and read each tensor
(`tensor_traffic`).

Only matmuls that the policy leaves open are dropped. Their reason says by how much FP8 loses, and from how
many tokens it gains. Matmuls that the policy wants in FP8 stay, and other gemms use their casts for free. All
matmuls get the estimates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import networkx

from ..config.recipe import COSTS
from ..devices import cost
from ..devices.catalog import Device
from ..ir.fx_utils import hint, value
from ..ir.matmul import Matmul, Price
from .gemm_costs import SHORT, Gemm, gemms_of
from .joint import Joint

SLOWER = "slower in FP8"
MOST_MOVES = 64  # gemms; in larger components only layers and the whole are dropped or taken in


def weigh(joint: Joint) -> int:
    """Fill in the estimates, and drop matmuls that do not gain from FP8 on the device; returns how many."""
    matmuls, device = joint.matmuls, joint.device
    if device is None:
        return 0
    candidates = [x for x in matmuls if x.fp8 and all(map(hint, (x.m, x.n, x.k)))]
    if not device.has_fp8:
        left_open = [matmul for matmul in candidates if matmul.decision.auto]
        for matmul in left_open:
            matmul.keep(f"no FP8 on this device: {device.name}")
        return len(left_open)
    gemms = gemms_of(candidates, joint.cached, joint.freezable)
    known: dict[tuple, int | None] = {}
    parts = [_Component(device, part, known) for part in _components(gemms)]
    for part in parts:
        part.improve()
    settled = _settle(device, parts)
    for part in parts:
        part.report(settled)
    for matmul in matmuls:  # also in high precision: then the time of all matmuls of a step is known
        if matmul.price.bf16_us is None:
            matmul.price = Price(_high_precision(matmul, device))
    return sum(not gemm.matmul.fp8 for gemm in gemms)


def _high_precision(matmul: Matmul, device: Device) -> float | None:
    """Estimated microseconds of a matmul in high precision. None if a size is 0 or unknown, or if no tensor
    core has the dtype."""
    m, n, k, batch = map(hint, (matmul.m, matmul.n, matmul.k, matmul.batch))
    dtype = value(matmul.node).dtype
    if not (m and n and k and batch) or dtype not in SHORT:
        return None
    if matmul.groups:
        return 1e6 * Gemm(matmul).seconds(device, False)
    one = cost.gemm(device, m, n, k, SHORT[dtype], dtype.itemsize) - device.launch
    return 1e6 * (batch * one + device.launch)


def _settle(device: Device, parts: list[_Component]) -> str:
    """Drop all matmuls that the policy leaves open, unless the graph saves more than scaling costs once a
    graph. Returns the reason for dropping them, or ""."""
    chosen = {gemm for part in parts for gemm in part.chosen}
    insisted = {cast.recipe for part in parts for gemm in part.insisted for cast, _ in gemm.reads}
    names = {cast.recipe for gemm in chosen for cast, _ in gemm.reads} - insisted
    once = sum(COSTS[name].once for name in names) * device.launch
    gain = sum(part.gain for part in parts)
    if gain > once or all(part.chosen == part.insisted for part in parts):
        return ""
    for part in parts:
        part.chosen = set(part.insisted)
    return (
        f"{SLOWER}: all of the graph would save {1e6 * gain:.1f} us, and scaling costs it {1e6 * once:.1f} us"
    )


def _components(gemms: list[Gemm]) -> Iterator[list[Gemm]]:
    """Groups of gemms that share tensors, each in the order of the graph."""
    graph = networkx.Graph()
    graph.add_nodes_from(gemms)
    for gemm in gemms:
        for cast, _ in gemm.reads:
            graph.add_edge(gemm, cast.base)
    order = {gemm: i for i, gemm in enumerate(gemms)}
    for found in networkx.connected_components(graph):
        yield sorted((x for x in found if isinstance(x, Gemm)), key=order.__getitem__)


class _Component:
    """Gemms that share operands, and which of them are `chosen` to be FP8."""

    def __init__(self, device: Device, gemms: list[Gemm], known: dict[tuple, int | None]):
        self.device, self.gemms, self.known = device, gemms, known
        self.bases = list(dict.fromkeys(cast.base for gemm in gemms for cast, _ in gemm.reads))
        self.everything = set(gemms)
        self.insisted = {gemm for gemm in gemms if not gemm.matmul.decision.auto}
        self.chosen = set(gemms)
        self.layers: dict[Matmul, set[Gemm]] = defaultdict(set)
        for gemm in gemms:
            self.layers[gemm.layer].add(gemm)

    def seconds(self, chosen: set[Gemm], grown: float = 1.0) -> float:
        gemms = sum(gemm.seconds(self.device, gemm in chosen, grown) for gemm in self.gemms)
        return gemms + sum(base.seconds(self.device, chosen, grown) for base in self.bases)

    @property
    def gain(self) -> float:
        """Seconds saved over the least FP8 that the policy allows."""
        return self.seconds(self.insisted) - self.seconds(self.chosen)

    def improve(self) -> None:
        """Search from all gemms in FP8, and from as few as the policy allows: make the change that saves most
        until none saves. Choose the best result."""
        found = [self.descend(set(start)) for start in (self.everything, self.insisted)]
        self.chosen = min((self.insisted, *found), key=self.seconds)

    def descend(self, chosen: set[Gemm]) -> set[Gemm]:
        best = self.seconds(chosen)
        while True:
            tried = [(self.seconds(changed), i, changed) for i, changed in enumerate(self.neighbours(chosen))]
            least, _, changed = min(tried, default=(best, 0, chosen), key=lambda found: found[:2])
            if least >= best:
                return chosen
            chosen, best = changed, least

    def neighbours(self, chosen: set[Gemm]) -> Iterator[set[Gemm]]:
        """`chosen` with one gemm, one layer or everything dropped or taken in."""
        free = self.everything - self.insisted
        groups = [{gemm} for gemm in self.gemms if gemm in free] if len(self.gemms) <= MOST_MOVES else []
        groups += [layer & free for layer in self.layers.values()]
        for group in (*groups, free):
            if group & chosen:
                yield chosen - group
            if group - chosen:
                yield chosen | group

    # -- the report --

    def report(self, settled: str) -> None:
        for gemm in self.gemms:
            matmul = gemm.matmul
            # a dropped gemm reports its costs with its layer in FP8
            state = self.chosen | self.layers[gemm.layer]
            bf16, fp8 = (1e6 * gemm.seconds(self.device, it) for it in (False, True))
            matmul.price = Price(bf16, fp8, 1e6 * self.share(gemm, state), self.break_even(gemm.layer))
            if gemm not in self.chosen:
                matmul.keep(settled or self.reason(gemm))

    def reason(self, gemm: Gemm) -> str:
        """Why a gemm is dropped: what its layer loses in FP8, or it alone if part of the layer is FP8."""
        layer = self.layers[gemm.layer]
        dropped = layer - self.chosen
        whole = dropped == layer
        group = layer if whole else {gemm}
        bf16 = sum(x.seconds(self.device, False) for x in group)
        lost = max(0.0, self.seconds(self.chosen | group) - self.seconds(self.chosen))
        groups = gemm.matmul.groups
        count = f"{gemm.m // groups} rows per expert" if groups else f"m {gemm.m}"
        text = f"{SLOWER}: {bf16 / (bf16 + lost):.2f}x at {count}"
        start = gemm.matmul.price.break_even_m
        if whole and start is None:
            return f"{text}; never faster, at any {'number' if groups else 'm'}"
        if not whole or start is None or start <= gemm.m:
            return text
        return f"{text}; gains from {-(-start // groups)}" if groups else f"{text}; gains from m {start}"

    def share(self, gemm: Gemm, state: set[Gemm], grown: float = 1.0) -> float:
        """Seconds that a gemm bears of the costs of its operands' copies beyond bf16. All readers of a tensor
        bear the same part. Negative where FP8 saves more by not writing a tensor in high precision than it
        adds."""
        total = 0.0
        for base in dict.fromkeys(cast.base for cast, _ in gemm.reads):
            readers = {reader for cast in base.casts for reader, _ in cast.readers if reader in state}
            added = base.seconds(self.device, state, grown) - base.seconds(self.device, set(), grown)
            total += added / max(1, len(readers))
        return total

    def break_even(self, key: Matmul) -> int | None:
        """The tokens from which a layer gains, if all its gemms and all that share its operands are FP8."""
        layer = self.layers[key]
        signature = tuple(self.described(gemm) for gemm in self.gemms if gemm in layer)
        if signature not in self.known:
            now = max(gemm.m for gemm in layer)
            self.known[signature] = cost.break_even(lambda tokens: self.layer_gain(layer, tokens / now))
        return self.known[signature]

    def layer_gain(self, layer: set[Gemm], grown: float) -> float:
        """Seconds that a layer saves, with its part of the casts."""
        bf16 = sum(gemm.seconds(self.device, False, grown) for gemm in layer)
        fp8 = sum(
            gemm.seconds(self.device, True, grown) + self.share(gemm, self.everything, grown)
            for gemm in layer
        )
        return bf16 - fp8

    @staticmethod
    def described(gemm: Gemm) -> tuple:
        """All values that the estimates of a gemm depend on. Most layers of a model agree in them."""
        tensors = [
            (replace(x.base.source, readers=frozenset()), x.base.outside, len(x.readers))
            + (x.recipe, x.again, x.gathered, x.kept, x.turned)
            for x, _ in gemm.reads
        ]
        return (gemm.sizes, gemm.tokens, gemm.dtype, gemm.fast, *tensors)
