"""The graph of a model's matmuls as an inline SVG: what multiplies what, in the order of forward, coloured by decision.

A node is one matmul of forward, with a chip for each of its gemms (F, D, W: fprop, dgrad, wgrad). An arrow says that the
output of one reaches the other with no matmul between them; arrows that longer paths imply (a residual connection reaches
every later matmul) are left out by transitive reduction. Runs of equal blocks, layers.1 ... layers.10, are drawn as one, in
a frame; so are parallel experts. Where more than `LIMIT` matmuls are left, the first of them are drawn and a note says so.

Layout is Sugiyama's, in small: rows by the longest path from the inputs, long arrows routed through bends that take a place
in each row between, order within a row by a few sweeps of barycenters.
"""

from __future__ import annotations

import html
import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx

LIMIT = 80
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _BEND, _MARGIN = 212, 46, 22, 34, 18, 14
_LONGEST_NAME = 26
_LETTER = 6.3  # width of one, about


@dataclass(frozen=True)
class Node:
    """One matmul of forward. `chips` are (letter, "fp8" | "high", words); `title` is shown on hover."""

    name: str
    size: str
    chips: tuple[tuple[str, str, str], ...]
    title: str = ""
    weight: bool = True

    @property
    def like(self) -> Hashable:
        """What two nodes have in common that may be drawn as one, but for their names."""
        return self.size, tuple(chip[:2] for chip in self.chips), self.weight


@dataclass
class Run:
    """Blocks `first` to `last` of `container` ("layers"), equal to each other: the first stands for all."""

    container: str
    first: int
    last: int
    nodes: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class Diagram:
    """`svg` is escaped markup; `notes` say what was left out. Falsy if there is nothing to draw."""

    svg: str = ""
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.svg)


def draw(nodes: Mapping[int, Node], edges: Sequence[tuple[int, int]], number: int = 0) -> Diagram:
    """`edges` between keys of `nodes`; keys are in the order of forward. Nothing to draw without an edge.

    `number` tells the diagrams of a page apart.
    """
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(sorted(nodes))
    graph.add_edges_from((a, b) for a, b in edges if a in nodes and b in nodes and a != b)
    if not graph.number_of_edges() or not nx.is_directed_acyclic_graph(graph):
        return Diagram()
    small, runs = _folded(graph, nodes)
    if not nx.is_directed_acyclic_graph(small):  # blocks that take turns with what is outside of them
        small, runs = graph, []
    notes = []
    if small.number_of_nodes() > LIMIT:
        kept = list(nx.lexicographical_topological_sort(small))[:LIMIT]
        notes.append(f"the first {LIMIT} of {small.number_of_nodes()} matmuls are drawn")
        small = small.subgraph(kept)
    small = nx.transitive_reduction(small)
    places, bends, rows = _layout(small)
    return Diagram(_svg(small, nodes, runs, places, bends, rows, number), tuple(notes))


# --- equal blocks ---------------------------------------------------------------------------------


def _folded(graph: networkx.DiGraph, nodes: Mapping[int, Node]) -> tuple[networkx.DiGraph, list[Run]]:
    """The graph with each run of equal blocks replaced by its first block, outermost containers first."""
    graph = graph.copy()
    runs: list[Run] = []
    for depth in range(4):
        containers: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for i in sorted(graph):
            numbers = list(re.finditer(r"(?:^|(?<=\.))\d+(?=\.|$)", nodes[i].name))
            if depth < len(numbers):
                containers[nodes[i].name[: numbers[depth].start()]][int(numbers[depth].group())].append(i)
        for container, blocks in containers.items():
            for run in _runs(container, blocks, nodes):
                _merge(graph, run, blocks)
                runs.append(run)
    return graph, runs


def _runs(container: str, blocks: Mapping[int, list[int]], nodes: Mapping[int, Node]) -> list[Run]:
    """Maximal runs of two and more consecutive blocks with the same matmuls under the same names."""

    def signature(index: int) -> list[Any]:
        head = len(container) + len(str(index))
        return [(nodes[i].name[head:], nodes[i].like) for i in blocks[index]]

    found: list[Run] = []
    previous = None
    for index in sorted(blocks):
        if previous == index - 1 and found and found[-1].last == previous and signature(found[-1].first) == signature(index):
            found[-1].last = index
        else:
            found.append(Run(container, index, index, blocks[index]))
        previous = index
    return [run for run in found if run.count > 1]


def _merge(graph: networkx.DiGraph, run: Run, blocks: Mapping[int, list[int]]) -> None:
    """Remove all but the first block of `run`. What enters or leaves the others enters or leaves the first."""
    block_of, stands_for = {}, {}
    for index in range(run.first, run.last + 1):
        for first, other in zip(blocks[run.first], blocks[index], strict=True):
            block_of[other], stands_for[other] = index, first
    for a, b in list(graph.edges):
        if a not in block_of and b not in block_of:
            continue
        if block_of.get(a) == block_of.get(b):
            continue  # within one block: the first has the same
        graph.remove_edge(a, b)
        if a not in block_of or b not in block_of:
            graph.add_edge(stands_for.get(a, a), stands_for.get(b, b))
    graph.remove_nodes_from([i for i, index in block_of.items() if index != run.first])


# --- layout ---------------------------------------------------------------------------------------


def _layout(graph: networkx.DiGraph) -> tuple[dict[Any, float], dict[tuple[int, int], list[Any]], list[list[Any]]]:
    """(x of the centre of each node and bend, bends of each long edge, rows). A bend is ("bend", a, b, row)."""
    import networkx as nx

    rows: list[list[Any]] = [sorted(generation) for generation in nx.topological_generations(graph)]
    row_of = {node: r for r, row in enumerate(rows) for node in row}
    bends: dict[tuple[int, int], list[Any]] = {}
    above: dict[Any, list[Any]] = defaultdict(list)
    below: dict[Any, list[Any]] = defaultdict(list)
    for a, b in sorted(graph.edges):
        bends[a, b] = [("bend", a, b, r) for r in range(row_of[a] + 1, row_of[b])]
        path = [a, *bends[a, b], b]
        for upper, lower in zip(path, path[1:], strict=False):
            above[lower].append(upper)
            below[upper].append(lower)
        for bend in bends[a, b]:
            rows[bend[3]].append(bend)
    places = {item: x for row in rows for item, x in _packed(row, [0.0] * len(row))}
    for sweep in range(12):
        downwards = sweep % 2 == 0
        near = above if downwards else below
        for r in range(len(rows)) if downwards else reversed(range(len(rows))):
            wanted = {x: sum(places[y] for y in near[x]) / len(near[x]) if near[x] else places[x] for x in rows[r]}
            rows[r].sort(key=lambda item: wanted[item])
            places.update(_packed(rows[r], [wanted[item] for item in rows[r]]))
    return places, bends, rows


def _packed(row: Sequence[Any], wanted: Sequence[float]) -> list[tuple[Any, float]]:
    """The items side by side in this order, without overlap, on average where they are wanted."""
    widths = [_BEND if isinstance(item, tuple) else _WIDTH for item in row]
    out: list[float] = []
    for i, want in enumerate(wanted):
        least = out[-1] + (widths[i - 1] + widths[i]) / 2 + _GAP_X if out else want
        out.append(max(want, least))
    shift = sum(want - x for want, x in zip(wanted, out, strict=True)) / len(out)
    return [(item, x + shift) for item, x in zip(row, out, strict=True)]


# --- markup ---------------------------------------------------------------------------------------


def _svg(
    graph: networkx.DiGraph,
    nodes: Mapping[int, Node],
    runs: Sequence[Run],
    places: Mapping[Any, float],
    bends: Mapping[tuple[int, int], list[Any]],
    rows: Sequence[Sequence[Any]],
    number: int,
) -> str:
    top = {}
    y = float(_MARGIN + 20)
    for row in rows:
        top.update(dict.fromkeys(row, y))
        y += _HEIGHT + _GAP_Y
    framed, frames, rights = _frames(graph, runs, places, top)
    sides = [(x, (_BEND if isinstance(item, tuple) else _WIDTH) / 2) for item, x in places.items()]
    left = min(x - half for x, half in sides) - _MARGIN
    width = max([x + half for x, half in sides] + rights) + _MARGIN - left
    height = y - _GAP_Y + _MARGIN + 6
    out = [
        f'<svg class="graph" role="img" aria-label="graph of matmuls" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="{left:.0f} 0 {width:.0f} {height:.0f}" xmlns="http://www.w3.org/2000/svg">',
        f'<defs><marker id="tip-{number}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0.5 8 4 0 7.5z"/></marker></defs>',
    ]
    out += frames
    for (a, b), path in bends.items():
        points = [(places[a], top[a] + _HEIGHT), *((places[p], top[p] + _HEIGHT / 2) for p in path), (places[b], top[b] - 1)]
        out.append(f'<path class="edge" marker-end="url(#tip-{number})" d="{_curve(points)}"/>')
    times = {i: _product(run.count for run in runs if i in run.nodes) for i in graph}
    out += [_box(nodes[i], places[i], top[i], times[i], framed.get(i, "")) for i in sorted(graph)]
    return "\n".join([*out, "</svg>"])


def _product(numbers: Any) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def _curve(points: Sequence[tuple[float, float]]) -> str:
    text = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        middle = (y0 + y1) / 2
        text += f" C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
    return text


def _frames(
    graph: networkx.DiGraph, runs: Sequence[Run], places: Mapping[Any, float], top: Mapping[Any, float]
) -> tuple[dict[int, str], list[str], list[float]]:
    """(the part of each framed node's name that its frame says already, the frames, the ends of their labels).

    A run has no frame if it is within another's, or if something else would be in it.
    """
    framed: dict[int, str] = {}
    out: list[str] = []
    ends: list[float] = []
    for run in runs:
        inside = [i for i in run.nodes if i in graph]
        if not inside or any(i in framed for i in inside):
            continue
        left, right = min(places[i] for i in inside) - _WIDTH / 2 - 8, max(places[i] for i in inside) + _WIDTH / 2 + 8
        up, down = min(top[i] for i in inside) - 22, max(top[i] for i in inside) + _HEIGHT + 8
        others = set(graph) - set(inside)
        if any(left < places[i] + _WIDTH / 2 and places[i] - _WIDTH / 2 < right and up - 8 < top[i] < down for i in others):
            continue
        framed.update(dict.fromkeys(inside, f"{run.container}{run.first}"))
        label = f"{run.container}{run.first}–{run.last}, one of {run.count} equal blocks"
        out.append(
            f'<rect class="frame" x="{left:.1f}" y="{up:.1f}" width="{right - left:.1f}" height="{down - up:.1f}" rx="8"/>'
            f'<text class="frame-label" x="{left + 8:.1f}" y="{up + 14:.1f}">{html.escape(label)}</text>'
        )
        ends.append(left + 8 + _LETTER * len(label))
    return framed, out, ends


def _box(node: Node, x: float, y: float, times: int, said: str) -> str:
    left = x - _WIDTH / 2
    name = node.name.removeprefix(said).lstrip(".") or node.name
    count = f" ×{times}" if times > 1 and not said else ""
    room = _LONGEST_NAME - len(count)
    shown = (name if len(name) <= room else "…" + name[1 - room :]) + count
    chips = []
    for i, (letter, kind, words) in enumerate(node.chips):
        at = left + _WIDTH - 8 - 19 * (len(node.chips) - i)
        chips.append(
            f'<g class="chip {kind}"><rect x="{at:.1f}" y="{y + 25:.1f}" width="16" height="15" rx="3"/>'
            f'<text x="{at + 8:.1f}" y="{y + 36.5:.1f}">{html.escape(letter)}</text>'
            f"<title>{html.escape(words)}</title></g>"
        )
    return (
        f'<g class="node{"" if node.weight else " weightless"}"><title>{html.escape(node.title)}</title>'
        f'<rect x="{left:.1f}" y="{y:.1f}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>'
        f'<text class="label" x="{left + 9:.1f}" y="{y + 18:.1f}">{html.escape(shown)}</text>'
        f'<text class="size" x="{left + 9:.1f}" y="{y + 36:.1f}">{html.escape(node.size)}</text>'
        f"{''.join(chips)}</g>"
    )
