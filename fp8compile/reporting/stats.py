"""Statistics of every quantized tensor: `fp8compile.stats(model)`. docs/telemetry.md shows them.

Amaxes and scales of delayed scaling are read from the scaling state. They are available at any time and cost
one copy of each page to the host. All other numbers are measured on request (`measure`, see `stats`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..config.recipe import ROLES
from ..extension import features, stored_scales
from ..ir.frozen import FrozenWeight
from ..runtime.held import held_in
from ..runtime.named_weights import named_weights, unwrapped
from ..runtime.parameters import find
from ..runtime.probe import COLUMNS, CastKind, Measurement
from .columns import aligned
from .layer_rows import alike, repeated

STATE = ("amax", "scale", "scale_inv", "scale_inv_min", "scale_inv_max")
COUNTS = ("overflow_calls", "underflow_calls", "not_finite_calls")
COSTLY = ("overflows%", "underflows%", "mse", "sqnr", "row_error", "column_error")

_asked: WeakKeyDictionary[nn.Module, Measurement] = WeakKeyDictionary()  # what `stats` asked for last


class Stats:
    """A row for each tensor. ``str()`` is a table, ``rows()`` are flat dicts, ``to_dict()`` is for JSON."""

    def __init__(self, rows: list[dict[str, Any]], empty: str = "") -> None:
        self._rows, self._empty = rows, empty

    def rows(self) -> list[dict[str, Any]]:
        """Flat dicts, one per tensor, as ``pandas.DataFrame`` takes them.

        * name: the parameter of the weight. role: "input", "weight" or "gradient"; "reduced" for a bucket of
          gradients that `fp8compile.distributed.compress_gradients` has sent.
        * use: which matmul with that weight, from 0.
        * layout: "" if both layouts hold the same values, else "plain" or "transposed" (contracted over
          tokens, or over the weight's outputs).
        * recipe, format, amax. The recipe of a weight that is kept in FP8 only is "frozen".
        * scale (multiplies into FP8) and scale_inv: None if the tensor has several. scale_inv_min,
          scale_inv_max: over all.
        * overflow_calls, underflow_calls, not_finite_calls: with delayed scaling, how many training calls had
          an amax that the scale did not cover, that was far too small for it, or that was no finite number.
        * overflows%: elements beyond the FP8 maximum when scaled. underflows%: nonzero ones that become zero.
        * mse: of the dequantized copy. sqnr: in dB.
        * row_error: the relative error |x - copy| / |x| of a row, the median over the rows that are not zero.
          column_error: that of a column. Rows are tokens, and those of a weight as it is stored (outputs); in
          layout "transposed" what is a column there. sqnr is a norm over the tensor, which the largest rows
          and columns decide.

        From overflows% on, numbers are measured on request. An unknown number is None. sqnr is also None if
        the error or the signal is zero, row_error and column_error if the signal is.
        """
        return [dict(row) for row in self._rows]

    def to_dict(self) -> dict[str, dict[str, dict[str, Any]]]:
        """{name: {"input.0": {...}, "weight.0": {...}, ...}}, with the keys role.use or role.use.layout."""
        nested: dict[str, dict[str, dict[str, Any]]] = {}
        for row in self._rows:
            rest = {key: value for key, value in row.items() if key not in ("name", "role", "use", "layout")}
            nested.setdefault(row["name"], {})[tensor_of(row)] = rest
        return nested

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows())

    def __str__(self) -> str:
        if not self._rows:
            return f"fp8: {self._empty}"
        several = any(row["scale_inv"] is None and row["scale_inv_min"] is not None for row in self._rows)
        columns = ["amax", *(("scale_inv_min", "scale_inv_max") if several else ("scale", "scale_inv"))]
        columns += [name for name in COUNTS if any(row[name] for row in self._rows)]
        if any(row["mse"] is not None for row in self._rows):
            columns += COSTLY
        lines = []
        for row in self._rows:
            role = row["role"] + (f" {row['use']}" if row["use"] else "")
            role += f", {row['layout']}" if row["layout"] else ""
            numbers = ("-" if row[column] is None else f"{row[column]:.4g}" for column in columns)
            lines.append((row["name"], role, row["recipe"], row["format"] or "-", *numbers))
        # equal layers, such as before the first measurement
        equal = alike(lines, lambda line: line[0], lambda line: line[1:])
        lines = [(name + repeated(len(group)), *group[0][1:]) for name, group in equal]
        return aligned(("tensor", "role", "recipe", "format", *columns), lines, "<<<<" + ">" * len(columns))

    def __repr__(self) -> str:
        return f"<fp8compile.Stats: {len(self._rows)} tensors>"


def stats(model: nn.Module, measure: bool = False) -> Stats:
    """The statistics of every tensor that `model` quantizes: see `Stats.rows`.

    With delayed scaling, amax and scales are those that the next call begins with. With other recipes they
    come from the last measured call, as all other numbers always do.

    `measure` asks for a measured call: the next training call of each compiled part of the model, forward and
    backward, runs eagerly (slower, with the memory of an eager step). Its results are the ordinary ones. Call
    `stats` again after it to read the numbers.

    `model` is the module, or the wrapper that torch.compile or DDP made of it; TypeError for anything else.
    In a distributed job, the numbers are those of this process. All processes have to measure the same call,
    because collectives inside a graph wait for each other.
    """
    model = unwrapped(model)
    if measure:
        before = _asked.pop(model, None)
        if before is not None:
            before.end()
        _asked[model] = Measurement(model).begin()
    rest: dict[str, Any] = {"use": 0, "layout": "", **dict.fromkeys((*STATE, *COUNTS, *COSTLY))}
    others = [{**rest, **row} for feature in features() for row in feature.statistics(model)]
    why = "nothing of this model is quantized yet (fp8compile.report(model) says what was compiled)"
    return Stats(table(model) + others, why)


def table(model: nn.Module, measurement: Measurement | None = None) -> list[dict[str, Any]]:
    """The rows of a model. With a `measurement`: its numbers, with the scales that the measured call used."""
    vectors: dict[int, list[float]] = {}
    rows = []
    weights = named_weights(model)
    scales = stored_scales(weights.values())
    for parameter, weight in weights.items():
        known = find(weight)
        own = [(role, use) for key, role, use in scales if key == id(weight)] if not known.casts else []
        casts = known.casts or {(role, use, ""): CastKind("delayed", "") for role, use in own}
        found = known.measured if measurement is None else measurement.records.get(known, {})
        outside = next(filter(None, (feature.cast_outside(weight) for feature in features())), None)
        stored = held_in(weight)
        gathered, numbers = outside or (None, dict)
        whole = gathered if stored is None else CastKind.of("frozen", stored.data_.dtype)
        if whole is not None:  # no graph casts the weight
            casts = {name: cast for name, cast in casts.items() if name[0] != "weight"}
            casts["weight", 0, ""] = whole
        for name in sorted(casts, key=lambda name: (ROLES.index(name[0]), *name[1:])):
            (role, use, layout), cast = name, casts[name]
            row = {"name": parameter, "role": role, "use": use, "layout": layout}
            row |= {"recipe": cast.recipe, "format": cast.format, **dict.fromkeys((*STATE, *COUNTS, *COSTLY))}
            scale = scales.get((id(weight), role, use)) if cast.recipe == "delayed" else None
            if scale is not None:
                inverse = scale.scale_inv
                row.update(zip(STATE, (scale.amax, scale.scale, inverse, inverse, inverse), strict=True))
                row.update(scale.counts)
            vector = found.get(name)
            if scale is not None and _odd(row["amax"]) and measurement is None:
                vector = None  # of a call before the NaN
            if vector is not None:
                if id(vector) not in vectors:
                    vectors[id(vector)] = vector.tolist()
                row.update(_measured(vectors[id(vector)], measurement is not None or scale is None))
            if role == "weight" and measurement is None:
                row.update(numbers())
            if role == "weight" and stored is not None:
                row.update(_stored(stored))
            rows.append({key: None if _odd(value) else value for key, value in row.items()})
    return rows


def _odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def tensor_of(row: dict[str, Any]) -> str:
    """The tensor that a row describes: "input.0", "gradient.0.transposed"."""
    return ".".join([row["role"], str(row["use"]), *filter(None, [row["layout"]])])


def _stored(weight: FrozenWeight) -> dict[str, Any]:
    """The scales that a weight is kept with. What its cast lost is unknown: its values before are gone."""
    least, most = (x.item() for x in weight.scales.detach().aminmax())
    one = (1 / least, least) if weight.scales.numel() == 1 else (None, None)
    return dict(zip(STATE, (None, *one, least, most), strict=True))


def _measured(vector: list[float], state: bool) -> dict[str, Any]:
    """The columns of a measured vector. `state`: also those that a page would give (amax and scales)."""
    seen = dict(zip(COLUMNS, vector, strict=True))
    elements, error, signal = seen["elements"], seen["error"], seen["signal"]
    row: dict[str, Any] = {}
    if state:
        one = seen["scales"] == 1
        row["amax"] = seen["amax"]
        row["scale"], row["scale_inv"] = (seen["scale"], seen["scale_inv_min"]) if one else (None, None)
        row["scale_inv_min"], row["scale_inv_max"] = seen["scale_inv_min"], seen["scale_inv_max"]
    if elements and (signal or not _odd(seen["amax"])):  # else nothing of it is finite
        for key in ("overflows", "underflows"):
            row[f"{key}%"] = 100 * seen[key] / elements
        row["mse"] = error / elements
        row["sqnr"] = 10 * math.log10(signal / error) if signal > 0 and error > 0 else None
        row["row_error"], row["column_error"] = seen["row_error"], seen["column_error"]
    return row
