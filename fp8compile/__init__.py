"""fp8compile: `torch.compile(model, backend="fp8")` trains a vanilla PyTorch model with its matmuls in FP8.

model = torch.compile(model, backend="fp8")     # no import of this package is needed
print(fp8compile.report(model))                 # every matmul: FP8, or why not
print(fp8compile.stats(model))                  # every tensor: amax, scale, and on request what FP8 does to it
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import fp8 as fp8
    from .config.policy import Policy as Policy
    from .config.policy import Rule as Rule
    from .config.policy import Schedule as Schedule
    from .config.recipe import Recipe as Recipe
    from .errors import Fp8CompileError as Fp8CompileError
    from .errors import OptionError as OptionError
    from .errors import StateError as StateError
    from .errors import StrictError as StrictError
    from .estimate import Estimate as Estimate
    from .estimate import estimate as estimate
    from .explain import explain as explain
    from .monitor import Monitor as Monitor
    from .monitor import monitor as monitor
    from .reports import Report as Report
    from .reports import report as report
    from .runtime import dry_run as dry_run
    from .schedule import on_step as on_step
    from .schedule import set_phase as set_phase
    from .schedule import set_step as set_step
    from .statefile import load_scaling_state as load_scaling_state
    from .statefile import scaling_state as scaling_state
    from .telemetry import Stats as Stats
    from .telemetry import stats as stats

__version__ = "0.1.0"

# name -> module. Resolved on first use: importing the package costs nothing, even from within `import torch` (TORCH_LOGS)
_PUBLIC = {
    "fp8": "backend",
    "Fp8CompileError": "errors",
    "OptionError": "errors",
    "StateError": "errors",
    "StrictError": "errors",
    "Estimate": "estimate",
    "estimate": "estimate",
    "explain": "explain",
    "Monitor": "monitor",
    "monitor": "monitor",
    "Policy": "config.policy",
    "Rule": "config.policy",
    "Schedule": "config.policy",
    "Recipe": "config.recipe",
    "Report": "reports",
    "report": "reports",
    "dry_run": "runtime",
    "on_step": "schedule",
    "set_phase": "schedule",
    "set_step": "schedule",
    "load_scaling_state": "statefile",
    "scaling_state": "statefile",
    "Stats": "telemetry",
    "stats": "telemetry",
}
__all__ = sorted(_PUBLIC)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


class _Package(types.ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        """Importing a submodule binds it to its name here; `explain`, `estimate` and `monitor` are to stay functions."""
        super().__setattr__(name, getattr(value, name) if name in _PUBLIC and isinstance(value, types.ModuleType) else value)


sys.modules[__name__].__class__ = _Package
