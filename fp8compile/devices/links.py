"""How the GPUs of a cluster are connected: the `links` of a device's description, read, checked and used.

All rates are bytes/s of one GPU in one direction. A sustained rate is a bus bandwidth ("busbw") as nccl-tests defines it: bytes
that a ring sends from each GPU, divided by the time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .toml import checked_keys


@dataclass(frozen=True)
class Link:
    """One kind of link. `direct`: each pair of GPUs has a wire of its own, so that a smaller group uses fewer wires."""

    name: str
    peak: float
    sustained: float
    direct: bool = False


@dataclass(frozen=True)
class Links:
    """`gpus`: how many GPUs a node has. `inside` a node, and `between` nodes: a GPU's share of the network, None if unknown."""

    gpus: int
    inside: Link
    between: Link | None = None

    def rate(self, here: float, spans_nodes: bool) -> float:
        """The bus bandwidth of a group that has `here` GPUs in each node, on the average.

        A ring over several nodes sends all that it sends over each node's border, too. Its channels cross the border at
        different GPUs, so that the group has the network of `here` GPUs. For 4 nodes of 8 B200 this gives 376 GB/s, measured
        were 377 (github.com/stas00/ml-engineering, network/README.md).
        """
        inside = math.inf
        if here > 1:
            wires = (here - 1) / (self.gpus - 1) if self.inside.direct else 1.0
            inside = self.inside.sustained * wires
        if not spans_nodes:
            return inside
        assert self.between is not None
        return min(inside, here * self.between.sustained)

    def to_toml(self) -> list[str]:
        """The lines of the table, without its head."""
        lines = [f"gpus = {self.gpus}"]
        for field, link in (("inside", self.inside), ("between", self.between)):
            if link is not None:
                name = link.name.replace("\\", "\\\\").replace('"', '\\"')
                rates = f"peak = {link.peak:.4g}, sustained = {link.sustained:.4g}"
                lines.append(f'{field} = {{ name = "{name}", {rates}{", direct = true" if link.direct else ""} }}')
        return lines


def read(where: str, table: Any) -> Links:
    """The links of a description. Raises ValueError, which says what is wrong with the table."""
    given = _checked(where, table, Links, {"gpus", "inside"})
    gpus = given["gpus"]
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 2:
        raise ValueError(f"{where} gpus = {gpus!r} is not a whole number from 2")
    return Links(gpus, **{name: _link(f"{where} {name}", given[name]) for name in ("inside", "between") if name in given})


def _link(where: str, table: Any) -> Link:
    given = _checked(where, table, Link, {"name", "peak", "sustained"})
    for name in ("peak", "sustained"):
        value = given[name]
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not (0 < value < math.inf):
            raise ValueError(f"{where}: {name} = {value!r} is not a positive number")
    if given["sustained"] > given["peak"]:
        more = f"sustained = {given['sustained']:g} is more than the peak, {given['peak']:g}"
        raise ValueError(f"{where}: {more}; both are of one direction")
    if not isinstance(given["name"], str) or not isinstance(given.get("direct", False), bool):
        raise ValueError(f"{where}: name must be a string, and direct true or false")
    return Link(**{**given, "peak": float(given["peak"]), "sustained": float(given["sustained"])})


def _checked(where: str, table: Any, kind: type[Any], needed: set[str]) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise ValueError(f"{where} = {table!r} is not a table")
    return checked_keys(where, table, [field.name for field in dataclasses.fields(kind)], needed)
