"""Public names of version 0.2 that have other names now. They work in 0.3 and 0.4 (CONTRIBUTING.md).

The package asks here for each name that it does not know, also while it is imported. So this imports nothing.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

_package: Any = sys.modules[__package__]


def _scaling_state(model: Any) -> dict[str, Any]:
    return _package.ScalingState(model, all_ranks=False).state_dict()


def _load_scaling_state(model: Any, state: Mapping[str, Any] | None, strict: bool = False) -> None:
    _package.ScalingState(model, strict=strict).load_state_dict(state)


def _set_phase(phase: str | None, model: Any = None) -> None:
    _package.set_precision(phase, model)


# the new name, and the function if it is another one
NAMES: dict[str, tuple[str, Callable[..., Any] | None]] = {
    "dry_run": ("freeze_scaling_state", None),
    "load_scaling_state": ("ScalingState(model).load_state_dict(state)", _load_scaling_state),
    "refresh": ("refresh_weight_cache", None),
    "scaling_state": ("ScalingState(model, all_ranks=False).state_dict()", _scaling_state),
    "set_phase": ("set_precision", _set_phase),
    "thaw": ("restore_frozen_weights", None),
}


def find(name: str) -> Callable[..., Any]:
    """The function of an old name; warns."""
    new, function = NAMES[name]
    warnings.warn(f"fp8compile.{name} is now fp8compile.{new}", DeprecationWarning, stacklevel=3)
    return function or getattr(_package, new)
