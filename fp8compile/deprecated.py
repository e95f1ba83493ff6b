"""Public names of version 0.2 that have other names now. They go in the release after the next one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from .runtime.calls import freeze_scaling_state
from .runtime.checkpoint import ScalingState
from .runtime.frozen import restore_frozen_weights
from .runtime.phases import set_precision
from .runtime.weight_cache import refresh_weight_cache


def _scaling_state(model: Any) -> dict[str, Any]:
    return ScalingState(model, all_ranks=False).state_dict()


def _load_scaling_state(model: Any, state: Mapping[str, Any] | None, strict: bool = False) -> None:
    ScalingState(model, strict=strict).load_state_dict(state)


NAMES: dict[str, tuple[str, Callable[..., Any]]] = {
    "dry_run": ("freeze_scaling_state", freeze_scaling_state),
    "load_scaling_state": ("ScalingState(model).load_state_dict(state)", _load_scaling_state),
    "refresh": ("refresh_weight_cache", refresh_weight_cache),
    "scaling_state": ("ScalingState(model, all_ranks=False).state_dict()", _scaling_state),
    "set_phase": ("set_precision", set_precision),
    "thaw": ("restore_frozen_weights", restore_frozen_weights),
}


def find(name: str) -> Callable[..., Any]:
    """The function of an old name; warns."""
    new, function = NAMES[name]
    warnings.warn(f"fp8compile.{name} is now fp8compile.{new}", DeprecationWarning, stacklevel=3)
    return function
