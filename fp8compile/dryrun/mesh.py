"""A mesh of GPUs for an estimate: how many there are, which of them form a group, and which linears tensor parallelism divides.

    Mesh.of("dp=8,tp=2")        8 times 2 GPUs: 2 neighbours share each layer, 8 such pairs share the batch

Neighbours in a tensor-parallel group are neighbours in a node, as in the usual `init_device_mesh("cuda", (dp, tp))`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..devices import catalog
from ..devices.catalog import Device
from ..devices.links import Links
from ..errors import OptionError, near
from ..ir.records import FP8, GraphReport, MatmulRecord

AXES = ("dp", "tp")
DATA_PARALLEL = ("fsdp", "ddp")


@dataclass(frozen=True)
class Mesh:
    """`dp` groups of `tp` GPUs."""

    dp: int = 1
    tp: int = 1

    @classmethod
    def of(cls, given: Any) -> Mesh:
        """From a mapping, or from the text that the command line takes. Raises OptionError."""
        wanted = "sizes of dp and tp, two GPUs or more together, such as dp=8,tp=2"
        sizes: dict[Any, Any] = {}
        if isinstance(given, Mesh):
            sizes = {axis: getattr(given, axis) for axis in AXES}
        elif isinstance(given, str):
            for part in given.split(","):
                axis, equals, size = (text.strip() for text in part.partition("="))
                if not equals or not (size.isascii() and size.isdecimal()) or axis in sizes:
                    raise OptionError.of("mesh", given, wanted)
                sizes[axis] = int(size)
        elif isinstance(given, Mapping):
            sizes = dict(given)
        else:
            raise OptionError.of("mesh", given, wanted)
        for axis, size in sizes.items():
            if axis not in AXES:
                raise OptionError.of("mesh", given, f"{wanted}; it has no dimension {axis!r}", near(axis, AXES))
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size < 1 << 20:
                raise OptionError.of("mesh", given, wanted)
        made = cls(**sizes)
        if made.gpus < 2:
            raise OptionError.of("mesh", given, wanted)
        return made

    @property
    def gpus(self) -> int:
        return self.dp * self.tp

    def __str__(self) -> str:
        return f"dp {self.dp} x tp {self.tp}"

    def nodes(self, links: Links) -> int:
        return math.ceil(self.gpus / links.gpus)

    def group(self, axis: str, links: Links) -> tuple[float, bool]:
        """Of a group along `axis`: how many of its GPUs are in one node, on the average, and whether it spans nodes."""
        size = getattr(self, axis)
        if axis == "tp":
            return min(size, links.gpus), size > links.gpus
        nodes = self.nodes(links) / math.ceil(self.tp / links.gpus)
        return size / max(1.0, nodes), nodes > 1


def links_for(mesh: Mesh, device: Device) -> Links:
    """The links of the device. OptionError if the description lacks what the mesh needs, or the mesh does not fit the nodes."""
    where = f"the description of {device.name} has no key {{}}: {{}} (docs/cost-model.md says how to add it). "
    known = [each.key for each in catalog.shipped().values() if each.links is not None]
    if device.links is None:
        raise OptionError(where.format("'links'", "how its GPUs are connected is not known") + f"With it: {', '.join(known)}")
    links = device.links
    if links.between is None and mesh.gpus > links.gpus:
        between = where.format("'links.between'", f"a mesh of {mesh.gpus} GPUs needs several nodes of {links.gpus}")
        raise OptionError(f"{between}Take a smaller mesh")
    if links.gpus % mesh.tp and mesh.tp % links.gpus:
        raise OptionError.of("mesh", str(mesh), f"one whose tp divides the {links.gpus} GPUs of a node, or is a multiple")
    return links


# --- tensor parallelism ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Forward matmuls of linears that tensor parallelism divides: `columns` by their outputs, and `row`, which reads what they
    computed, by its inputs."""

    columns: tuple[MatmulRecord, ...]
    row: MatmulRecord
    backward: bool  # whether the input of `columns` has a gradient

    @property
    def linears(self) -> tuple[MatmulRecord, ...]:
        return (*self.columns, self.row)

    @property
    def module(self) -> str:
        """The module that has them all: "blocks.0.attn"."""
        names = [record.fqn.split(".") for record in self.linears]
        return ".".join(os.path.commonprefix(names))  # type: ignore[type-var]


def pairs(graphs: Iterable[GraphReport]) -> Iterator[Pair]:
    """The linears that are divided as Megatron-LM divides them (arXiv:1909.08053): a linear is column-parallel; it is
    row-parallel if its input comes from column-parallel ones, with or without attention between. What no row-parallel linear
    reads, such as an output head, is not divided."""
    for graph in graphs:
        records = graph.matmuls
        before: dict[int, list[int]] = {}
        for start, end in graph.edges:
            before.setdefault(end, []).append(start)
        differentiated = {(r.fqn, r.parameter) for r in records if r.gemm == "dgrad"}
        columns: set[int] = set()
        for position, record in enumerate(records):
            if record.gemm != "fprop":
                continue
            read = sorted(columns.intersection(_linears_before(position, records, before)))
            if not read:
                columns.add(position)
                continue
            parts = tuple(records[i] for i in read)
            yield Pair(parts, record, any((r.fqn, r.parameter) in differentiated for r in parts))


def _linears_before(position: int, records: tuple[MatmulRecord, ...], before: Mapping[int, list[int]]) -> set[int]:
    """The forward matmuls of weights whose outputs reach the one at `position`, through matmuls without a weight."""
    found: set[int] = set()
    seen: set[int] = set()
    waiting = list(before.get(position, ()))
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        if records[each].gemm == "fprop":
            found.add(each)
        elif records[each].gemm == "matmul":
            waiting += before.get(each, ())
    return found


def check_divisible(divided: Iterable[Pair], tp: int) -> None:
    """OptionError if `tp` does not divide the linears."""
    for pair in divided:
        for record, size in (*((r, r.n) for r in pair.columns), (pair.row, pair.row.k)):
            if size % tp:
                raise OptionError.of("mesh", f"tp={tp}", f"one whose tp divides the {size} features of {record.fqn}")


def weight_of(record: MatmulRecord) -> str:
    return record.parameter or f"{record.fqn}.weight"


def fp8_weights(graphs: Iterable[GraphReport]) -> dict[str, MatmulRecord]:
    """The forward matmul of each weight that is only read in FP8, forward and backward, by the weight's name."""
    found: dict[str, MatmulRecord] = {}
    high: set[str] = set()
    for graph in graphs:
        for record in graph.matmuls:
            if record.gemm in ("fprop", "dgrad"):
                if record.gemm == "fprop":
                    found[weight_of(record)] = record
                if record.decision != FP8:
                    high.add(weight_of(record))
    return {name: record for name, record in found.items() if name not in high}
