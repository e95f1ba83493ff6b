"""Recipe: how tensors are scaled into FP8. Frozen, hashable, plain data: it is part of every cache key.

``delayed``     a slot's scale comes from the amaxes of earlier training calls, so the cast needs no pass of its own
``tensorwise``  a tensor's scale comes from its own amax ("current" scaling); no state

With either, ``scale = fp8_max / (amax * 2**margin)`` multiplies into FP8. Names and meanings are TransformerEngine's.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from .errors import OptionError
from .formats import FP8_FORMATS

RECIPES = ("delayed", "tensorwise")
AMAX_ALGOS = ("max", "most_recent")


@dataclass(frozen=True)
class Recipe:
    """Validated on construction: OptionError (a ValueError) names the field, the value and what is allowed.

    `fp8_format` is taken in any case and stored in lower case; `override_linear_precision` is (fprop, dgrad, wgrad),
    True keeps that gemm in high precision; a list is accepted and stored as a tuple.
    `amax_history_len`, `amax_compute_algo`, `interval` and `reduce_amax` matter to delayed scaling only.
    `recast_weights` casts weights again in backward instead of keeping their transposed FP8 copies from the forward: 1 byte
    a parameter less memory, 2 bytes a parameter more traffic a step. `use_fast_accum` is (fprop, dgrad, wgrad): the FP8
    tensor cores' shorter accumulators, faster and less exact.
    """

    name: str = "delayed"
    fp8_format: str = "hybrid"
    margin: int = 0
    amax_history_len: int = 16
    amax_compute_algo: str = "max"
    interval: int = 1
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    reduce_amax: bool = False
    recast_weights: bool = False
    use_fast_accum: tuple[bool, bool, bool] = (True, False, False)

    def __post_init__(self) -> None:
        _one_of("recipe", self.name, RECIPES)
        if isinstance(self.fp8_format, str) and self.fp8_format.lower() in FP8_FORMATS:
            object.__setattr__(self, "fp8_format", self.fp8_format.lower())
        _one_of("fp8_format", self.fp8_format, FP8_FORMATS)
        integer("margin", self.margin, 0, 64)
        integer("amax_history_len", self.amax_history_len, 1, 1 << 20)
        _one_of("amax_compute_algo", self.amax_compute_algo, AMAX_ALGOS)
        integer("interval", self.interval, 1, 1 << 20)
        self._three_bools("override_linear_precision", "True = high precision")
        self._three_bools("use_fast_accum", "True = fast accumulation")
        boolean("reduce_amax", self.reduce_amax)
        boolean("recast_weights", self.recast_weights)

    def _three_bools(self, key: str, meaning: str) -> None:
        gemms = getattr(self, key)
        if not (isinstance(gemms, (tuple, list)) and len(gemms) == 3 and all(isinstance(g, bool) for g in gemms)):
            raise OptionError.of(key, gemms, f"three bools (fprop, dgrad, wgrad), {meaning}")
        object.__setattr__(self, key, tuple(gemms))

    @property
    def scaling(self) -> tuple:
        """What decides how a tensor is scaled: recipes that agree on it share its FP8 copies."""
        kept = (self.amax_history_len, self.amax_compute_algo, self.interval) if self.delayed else ()
        return (self.name, self.fp8_format, self.margin, *kept)

    @property
    def delayed(self) -> bool:
        """Whether scales come from state (and state must be kept), not from the tensor itself."""
        return self.name == "delayed"


def boolean(key: str, value: Any) -> None:
    """Raise OptionError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise OptionError.of(key, value, "True or False")


def _one_of(key: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        near = difflib.get_close_matches(value.lower(), allowed) if isinstance(value, str) else ()
        raise OptionError.of(key, value, "one of " + ", ".join(map(repr, allowed)), near)


def integer(key: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise OptionError unless `value` is an integer from `least` to `most`."""
    # bool is an int to Python; margin=True is a mistake to everybody else
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError.of(key, value, f"an integer >= {least}")
    if most is not None and value > most:
        raise OptionError.of(key, value, f"an integer <= {most}")
