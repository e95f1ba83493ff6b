"""The weights of a model that no compiled graph reads: those of linears, and other matrices.

The percentages of a report count compiled matmuls only. Matmuls that Dynamo left to eager, or was not asked
to compile, are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ir.records import TableRecord
from .record_tables import RecordTable, tables

if TYPE_CHECKING:
    from torch import nn


OUTSIDE = "in no compiled graph"
WHY_OUTSIDE = "outside of what was compiled, left to eager by Dynamo, or not called yet"


@dataclass(frozen=True)
class OutsideRecord(TableRecord):
    """A matrix of the model, `rows` x `columns`, that no compiled graph reads. `fqn` is the module that owns
    it, `module` the class of that module, `reason` why no graph reads it."""

    titles, sides = (OUTSIDE, "of", "size"), "<<<"

    fqn: str
    module: str
    parameter: str
    rows: int
    columns: int
    reason: str = WHY_OUTSIDE

    @property
    def name(self) -> str:
        return self.parameter

    @classmethod
    def cells(cls, alike: Sequence[OutsideRecord]) -> tuple[str, ...]:
        return alike[0].module, f"{alike[0].rows} x {alike[0].columns}"


# names of parameters that are looked up or added, not multiplied
TABLES = re.compile(r"embed|position|(^|_)pos(_|$)")


def find(model: nn.Module, read: set[int]) -> list[OutsideRecord]:
    """The matrices of `model` that its graphs do not read, with their owners. `read`: ids of what they read.

    Not counted as matrices: parameters of embeddings, norms and convolutions, vectors with a second dimension
    of size 1, and parameters whose name says embedding or position. The weight of a Linear always counts."""
    from torch.nn import Embedding, EmbeddingBag, Linear

    from .. import compat
    from ..frontend.inputs import plain
    from ..runtime.named_weights import unwrapped

    found: dict[int, OutsideRecord] = {}
    root = unwrapped(model)
    broken, shapes = _broken(root, root is not model), compat.flat.shapes(root)
    for name, module in root.named_modules():
        if isinstance(module, (Embedding, EmbeddingBag)) or "Norm" in type(module).__name__:
            continue
        for last, parameter in module.named_parameters(recurse=False):
            shape = shapes.get(id(parameter), parameter.shape)
            matrix = len(shape) == 2 and min(shape) > 1 and TABLES.search(last) is None
            if (matrix or (isinstance(module, Linear) and len(shape) == 2)) and id(parameter) not in read:
                fqn = plain(name)
                full, (rows, columns) = f"{fqn}.{last}" if fqn else last, shape
                kind = compat.fsdp.class_name(type(module))
                record = OutsideRecord(fqn, kind, full, rows, columns, _why(name, broken))
                found.setdefault(id(parameter), record)
    return list(found.values())


def _broken(root: nn.Module, compiled: bool) -> dict[str, str]:
    """By the names of modules that FSDP took: why a graph of such a module ends early, or "". Dynamo does not
    trace the hooks of FSDP. It compiles the modules inside, and leaves the forward that calls them to eager.
    `compiled`: `root` is compiled by a wrapper."""
    from .. import compat

    taken = (compat.fsdp.is_fully_sharded, compat.flat.is_packed)
    managed = {name: module for name, module in root.named_modules() if any(took(module) for took in taken)}
    itself = compat.autograd.is_compiled_itself
    whole = [name for name, module in root.named_modules() if itself(module) or (compiled and module is root)]
    found = {}
    for name, module in managed.items():
        inner = any(other != name and _within(other, name) for other in managed)
        if inner and any(_within(name, other) for other in whole):
            kind = compat.fsdp.class_name(type(getattr(module, "_fsdp_wrapped_module", module)))
            found[name] = f"FSDP's hooks break the graph of {kind}, and what is left of it runs eagerly"
        else:
            found[name] = ""
    return found


def _within(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def _why(name: str, broken: Mapping[str, str]) -> str:
    owner = max((outer for outer in broken if _within(name, outer)), key=len, default=None)
    return (broken[owner] if owner is not None else "") or WHY_OUTSIDE


def brief(records: Sequence[OutsideRecord]) -> str:
    """ "in no compiled graph: 6 linears (h.0-1.fc1, ...): ... left to eager by Dynamo, ..."."""
    (table,) = tables(records)
    names = list(dict.fromkeys(name.removesuffix(".weight") for name, *_ in table.rows))
    shown = ", ".join(names[:3] + ["..."] * (len(names) > 3))
    what = "linear" if all(record.module.endswith("Linear") for record in records) else "weight"
    return f"{OUTSIDE}: {len(records)} {what}{'s' * (len(records) > 1)} ({shown}): {why(records)}"


def why(records: Sequence[OutsideRecord]) -> str:
    """The reasons of all of them."""
    return "; or ".join(dict.fromkeys(record.reason for record in records))


def page_tables(records: Sequence[OutsideRecord]) -> list[RecordTable]:
    """The table for a page, which says why."""
    about = f"Weights of the model: {why(records)}. No percentage here counts them."
    return [table._replace(about=about) for table in tables(records)]


def text(records: Sequence[OutsideRecord]) -> str:
    reasons = dict.fromkeys(record.reason for record in records)
    return "\n".join([*map(str, tables(records)), *(f"* {reason}" for reason in reasons)])
