"""What is compared, as lines of text: trainings, reports, joint graphs, kernels; and the files."""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

import fp8compile
from fp8compile.dryrun.fake_gpu import Step
from tests.equivalence.protocols import Run
from tests.support.harness import digest

Sections = dict[str, list[str]]
Made = dict[str, Sections]  # by file
EXPECTED, HEAD = Path(__file__).parent / "expected", "== "
SOURCE = re.compile(r"async_compile\.triton\('(fp8_\w+)', '''.*?\n(@triton\.jit.*?)'''", re.DOTALL)
TAGS = ("recompute", "partitioner_tag")


def plain(source: str) -> str:
    """Code without comments, laid out alike."""
    return ast.unparse(ast.parse(source))


def of_run(run: Run) -> list[str]:
    """A line for each output and gradient: a digest of its bits, and its size. Then state, with its newest
    amaxes."""
    lines, weights = [], []
    for key, x in run.seen.items():
        kind, name = key.split(" ", 2)[1:]
        if kind == "weight":
            weights.append(x)
        elif kind == "state":
            *history, scale = x.tolist()
            lines.append(
                f"state {name}: {digest(x)} scale {scale:.6g}, amaxes "
                f"{' '.join(f'{x:.6g}' for x in history[:3])}"
            )
        else:
            lines.append(
                f"{f'{kind} {name}'.strip()}: {digest(x)} {x.double().square().mean().sqrt().item():.4g}"
            )
    return [*lines, f"weights: {digest(*weights)}"]


def of_report(model: Any) -> list[str]:
    """A row for each matmul, and what else is said of the graphs."""
    report, lines = fp8compile.report(model), []
    for graph in report.graphs:
        lines.append(f"graph {graph.name} {graph.note}".rstrip())
        for r in graph.matmuls:
            how = (
                r.decision,
                r.how,
                r.reason,
                f"by {r.rule}" if r.rule else "",
                f"{r.groups} groups" if r.groups else "",
            )
            lines.append(f"{r.fqn} {r.gemm} {r.op} {r.m} x {r.n} x {r.k}: {', '.join(filter(None, how))}")
        lines += map(str, (*graph.opaque, *graph.collectives, *graph.kept, *graph.frozen))
        lines += graph.remarks
    return [*lines, *map(str, report.outside), *map(str, report.gathered)]


def of_graph(graph: Graph) -> list[str]:
    """A line for each node, in order, by numbers instead of names."""
    names, lines = dict[Node, str](), []
    for node in graph.nodes:
        names[node] = f"%{len(names)}"
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: _Name(names[n]))
        given = ", ".join([*map(repr, args), *(f"{key}={x!r}" for key, x in kwargs.items())])
        called = f"{getattr(node.target, '__name__', node.target)}({given})"
        what = node.name if node.op == "placeholder" else called
        found = (getattr(x, "name", x) for x in map(node.meta.get, TAGS))
        tags = [tag for tag in found if tag not in (None, "is_forward")]
        lines.append(
            f"{names[node]}: {_type(node.meta.get('val'))} = {what}{'  # ' if tags else ''}{', '.join(tags)}"
        )
    return lines


class _Name(str):
    __repr__ = str.__str__


def _type(x: Any) -> str:
    if not isinstance(x, Tensor):
        return ", ".join(map(_type, x)) if isinstance(x, (tuple, list)) else type(x).__name__
    return f"{x.dtype}{list(x.shape)}".removeprefix("torch.") + (
        "" if x.is_contiguous() else f" by {list(x.stride())}"
    )


def of_step(step: Step) -> list[str]:
    """What a described GPU would run: digests of our kernels, without Inductor's additions, and matmuls."""
    lines = []
    for graph in step.graphs:
        lines.append(f"{'backward' if graph.backward else 'forward'}: keeps {graph.kept_for_backward} bytes")
        lines += sorted(f"{name} {digest(plain(source))}" for name, source in SOURCE.findall(graph.code))
        for m in filter(None, (launch.matmul for launch in graph.kernels)):
            sides = (
                f"{x.dtype} {list(x.shape)} by {list(x.stride)}".removeprefix("torch.")
                for x in (m.a, m.b, m.out)
            )
            lines.append(f"{m.op} {', '.join(sides)}, {m.accumulation}")
    return lines


def write(path: Path, sections: Sections) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line for name, lines in sections.items() for line in (HEAD + name, *lines, "")))


def read(path: Path) -> Sections:
    found: Sections = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith(HEAD):
            lines = found[line.removeprefix(HEAD)] = []
        elif line:
            lines.append(line)
    return found


def differences(made: Made, folder: Path, most: int = 12) -> list[str]:
    """Where these sections are not those of the files: the first lines that differ."""
    found = []
    for file, title, got in [
        (file, *section) for file, sections in made.items() for section in sections.items()
    ]:
        old = read(folder / f"{file}.txt").get(title, [])
        pairs = [pair for pair in zip(old, got, strict=False) if pair[0] != pair[1]]
        lines = [f"{sign}{line}" for pair in pairs for sign, line in zip("-+", pair, strict=True)]
        if len(old) != len(got):
            changes = difflib.unified_diff(old, got, lineterm="", n=0)
            lines = [line for line in changes if line[:2] not in ("--", "++", "@@")]
        more = [f"... {len(lines) - most} more"] if len(lines) > most else []
        found += ["\n".join([f"{file}.txt, {title}:", *lines[:most], *more])] if lines else []
    return found
