"""The graph of a model's matmuls as boxes and arrows, for the HTML page. It reads from the top down.

A box is a matmul of the forward, coloured by the decisions about its gemms. An arrow from one matmul to
another says that the output of the first reaches the second with no matmul between them. A residual
connection reaches every later matmul; only the arrow to the nearest of these is drawn. Runs of equal blocks
are drawn as one block, and so are parallel experts:

    h.0.fc -> h.1.fc -> ... h.11.fc -> head        is drawn as        h.0-11.fc -> head

A box stands below all boxes that lead to it. An arrow that crosses a row of boxes has a place in that row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

from ..ir.records import FP8, GraphReport, MatmulRecord
from .layer_rows import GEMMS, Layer, joined, parts, pattern, size_of, words

if TYPE_CHECKING:
    import networkx

LIMIT = 80  # boxes in a picture
HEIGHT, BEND, GAP_X, GAP_Y, MARGIN = 46.0, 14.0, 22.0, 34.0, 14.0  # pixels
LETTER, MOST = 7.7, 30  # pixels of a letter, letters in the widest box
Edges = Sequence[tuple[int, int]]
Item = Any  # an item of a row: a box, or (from, to, row) for an arrow that crosses the row


@dataclass(frozen=True)
class Box:
    """A matmul. `x`, `y`: its upper left corner. `chips`: (letter, "fp8" or "high", words) for each gemm."""

    x: float
    y: float
    label: str
    size: str
    title: str
    chips: tuple[tuple[str, str, str], ...]
    weight: bool


@dataclass(frozen=True)
class Arrow:
    """A curve through `points`. `implied`: a longer path leads to the same box, as beside a residual."""

    points: tuple[tuple[float, float], ...]
    implied: bool

    @property
    def path(self) -> str:
        """The curve as an SVG path, vertical at every point."""
        text = "M{:.1f} {:.1f}".format(*self.points[0])
        for (x0, y0), (x1, y1) in zip(self.points, self.points[1:], strict=False):
            text += f" C{x0:.1f} {(y0 + y1) / 2:.1f} {x1:.1f} {(y0 + y1) / 2:.1f} {x1:.1f} {y1:.1f}"
        return text


@dataclass(frozen=True)
class Diagram:
    """Boxes of equal size, and arrows, within `width` and `height`. `note`: how many boxes are left out."""

    width: float
    height: float
    box: tuple[float, float]
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    note: str


def draw(report: GraphReport, layers: Sequence[Layer]) -> Diagram | None:
    """The picture of a graph with these layers; None if it has no arrows, or if its arrows form a cycle."""
    import networkx as nx

    layer_of = {id(record): layer for layer in layers for record in layer.records}
    starts = [(-1, i) for i, r in enumerate(report.matmuls) if r.gemm in ("dgrad", "wgrad")]
    flow = nx.DiGraph([*report.edges, *starts])
    backward = nx.descendants(flow, -1) if -1 in flow else set()
    forward = {i: r for i, r in enumerate(report.matmuls) if r.gemm == "fprop" or i not in backward}
    edges = [(a, b) for a, b in report.edges if a in forward and b in forward and a != b]
    named = {i: (r.fqn, (layer_of[id(r)].like, size_of(r))) for i, r in forward.items()}
    # folding may make a cycle (blocks alternate with a matmul outside of them): then draw each as its own box
    for same, arrows in (_folded(named, edges), ({i: [i] for i in forward}, edges)):
        graph = nx.DiGraph(arrows)
        graph.add_nodes_from(same)
        if nx.is_directed_acyclic_graph(graph):
            break
    if not arrows or not nx.is_directed_acyclic_graph(graph):
        return None
    drawn = list(nx.lexicographical_topological_sort(graph))[:LIMIT]
    names = [joined(forward[i].fqn for i in same[box]) or "(root)" for box in drawn]
    counts = [len(same[box]) for box in drawn]
    labels = [name + (f" ×{count}" if count > 1 else "") for name, count in zip(names, counts, strict=True)]
    room = max(len(size_of(forward[i])) + 6 for i in drawn)  # 6 letters for three chips beside the size
    width = 18 + LETTER * min(MOST, max(room, *map(len, labels)))
    corners, arrow_points, size = _layout(graph.subgraph(drawn), width)
    labelled = zip(drawn, labels, strict=True)
    boxes = [_box(forward[i], layer_of[id(forward[i])], label, *corners[i]) for i, label in labelled]
    note = f"the first {LIMIT} of {len(graph)} boxes are drawn" if len(graph) > LIMIT else ""
    return Diagram(*size, (width, HEIGHT), tuple(boxes), tuple(arrow_points), note)


def _box(record: MatmulRecord, layer: Layer, label: str, x: float, y: float) -> Box:
    records = layer.records if record.gemm == "fprop" else (record,)
    chips = []
    for gemm in (gemm for gemm in GEMMS if any(r.gemm == gemm for r in records)):
        # prefers one in high precision
        r = min((r for r in records if r.gemm == gemm), key=lambda r: r.decision == FP8)
        css, decision = ("fp8", "FP8") if r.decision == FP8 else ("high", "high precision")
        chips.append((gemm[0].upper(), css, ", ".join(filter(None, (f"{gemm}: {decision}", words(r))))))
    label = label if len(label) <= MOST else "…" + label[1 - MOST :]
    title, size = f"{layer.name}\n{size_of(record)}\n{layer.why}", size_of(record).replace(" × ", "×")
    return Box(x, y, label, size, title, tuple(chips), record.gemm == "fprop")


def _folded(named: Mapping[int, tuple[str, Hashable]], edges: Edges) -> tuple[dict[int, list[int]], Edges]:
    """Groups of equal matmuls of equal blocks, by the first matmul of each, and the arrows between these.

    `named` gives the name of each matmul, and a key that equal matmuls share.
    """
    blocks: dict[tuple[str, int], list[Hashable]] = defaultdict(list)  # matmuls by (container, number)
    chains: dict[int, list[tuple[str, int]]] = {}  # the blocks around a matmul, outermost first
    for i, (name, like) in named.items():
        pieces = parts(name)
        chains[i] = [("".join(pieces[:at]), int(pieces[at])) for at in range(1, len(pieces), 2)]
        for depth, block in enumerate(chains[i]):
            blocks[block].append((pattern("".join(pieces[2 * depth + 2 :])), like))
    first: dict[tuple[str, int], int] = {}  # block -> number of the first block in its run of equal blocks
    for container, number in sorted(blocks):
        follows = blocks[container, number] == blocks.get((container, number - 1))
        first[container, number] = first[container, number - 1] if follows else number
    same: dict[Hashable, list[int]] = defaultdict(list)
    uses: dict[Hashable, int] = defaultdict(int)  # a module may be called twice
    for i, (name, like) in named.items():
        uses[name, like] += 1
        same[pattern(name), tuple(first[block] for block in chains[i]), like, uses[name, like]].append(i)
    box_of = {i: group[0] for group in same.values() for i in group}

    def within(a: int, b: int) -> bool:
        """False for an arrow from one block of a run to another block of the same run."""
        pairs = zip(chains[a], chains[b], strict=False)
        return not any(x[0] == y[0] and x != y and first[x] == first[y] for x, y in pairs)

    arrows = dict.fromkeys((box_of[a], box_of[b]) for a, b in edges if within(a, b))
    return {group[0]: group for group in same.values()}, list(arrows)


def _layout(
    graph: networkx.DiGraph, width: float
) -> tuple[dict[int, tuple[float, float]], list[Arrow], tuple[float, float]]:
    """Returns (the upper left corner of each box, the arrows, the size of the picture)."""
    import networkx as nx

    rows: list[list[Item]] = [sorted(row) for row in nx.topological_generations(graph)]
    row_of = {box: number for number, row in enumerate(rows) for box in row}
    direct = nx.transitive_reduction(graph)
    paths: list[list[Item]] = []
    above: dict[Item, list[Item]] = defaultdict(list)
    for a in sorted(graph):
        nearest = min((row_of[b] for b in graph[a] if b not in direct[a]), default=None)
        for b in sorted(b for b in graph[a] if b in direct[a] or row_of[b] == nearest):
            paths.append([a, *((a, b, row) for row in range(row_of[a] + 1, row_of[b])), b])
            for upper, item in zip(paths[-1], paths[-1][1:], strict=False):
                above[item].append(upper)
                if item != b:
                    rows[item[2]].append(item)
    x: dict[Item, float] = {}  # centre of each item
    half = {item: (BEND if isinstance(item, tuple) else width) / 2 for row in rows for item in row}
    for row in rows:
        row.sort(key=lambda item: mean([x[upper] for upper in above[item]] or [0]))
        at = -sum(half[item] for item in row) - GAP_X * (len(row) - 1) / 2
        for item in row:
            x[item], at = at + half[item], at + 2 * half[item] + GAP_X
    left = min(x[item] - half[item] for item in x) - MARGIN
    x = {item: x[item] - left for item in x}
    y = {item: MARGIN + (HEIGHT + GAP_Y) * number for number, row in enumerate(rows) for item in row}
    arrows = []
    for a, *bends, b in paths:
        beside = [(x[bend], y[bend] + down) for bend in bends for down in (0, HEIGHT)]
        arrows.append(Arrow(((x[a], y[a] + HEIGHT), *beside, (x[b], y[b] - 1)), b not in direct[a]))
    size = max(x[item] + half[item] for item in x) + MARGIN, max(y.values()) + HEIGHT + MARGIN
    return {box: (x[box] - width / 2, y[box]) for box in graph}, arrows, size
