"""fp8compile: `torch.compile(model, backend="fp8")` trains a vanilla PyTorch model with its matmuls in FP8.

model = torch.compile(model, backend="fp8")     # no import of this package is needed
print(fp8compile.report(model))                 # every matmul: FP8, or why not
print(fp8compile.stats(model))                  # every tensor: amax, scale, and on request what FP8 does to it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import distributed as distributed
    from . import optim as optim
    from .backend import fp8 as fp8
    from .config.policy import Policy as Policy
    from .config.policy import Rule as Rule
    from .config.policy import Schedule as Schedule
    from .config.recipe import Recipe as Recipe
    from .dryrun.compare import compare as compare
    from .dryrun.comparison import Comparison as Comparison
    from .dryrun.estimate import Estimate as Estimate
    from .dryrun.estimate import estimate as estimate
    from .dryrun.explain import explain as explain
    from .dryrun.tune import tune as tune
    from .dryrun.tuned import Tuned as Tuned
    from .dryrun.watch import monitor as monitor
    from .errors import ExportError as ExportError
    from .errors import Fp8CompileError as Fp8CompileError
    from .errors import OptionError as OptionError
    from .errors import StateError as StateError
    from .errors import StrictError as StrictError
    from .exporting.export import Exported as Exported
    from .exporting.export import export as export
    from .reporting.monitor import Monitor as Monitor
    from .reporting.report import Report as Report
    from .reporting.report import report as report
    from .reporting.stats import Stats as Stats
    from .reporting.stats import stats as stats
    from .runtime.calls import dry_run as dry_run
    from .runtime.checkpoint import ScalingState as ScalingState
    from .runtime.frozen import thaw as thaw
    from .runtime.phases import on_step as on_step
    from .runtime.phases import set_phase as set_phase
    from .runtime.phases import set_step as set_step
    from .runtime.state_dict import load_scaling_state as load_scaling_state
    from .runtime.state_dict import scaling_state as scaling_state
    from .runtime.weight_cache import refresh as refresh

__version__ = "0.2.0"

# Resolved on first use: importing the package costs nothing, even from within `import torch` (TORCH_LOGS)
_MODULES = {
    "backend": ("fp8",),
    "config.policy": ("Policy", "Rule", "Schedule"),
    "config.recipe": ("Recipe",),
    "dryrun.compare": ("compare",),
    "dryrun.comparison": ("Comparison",),
    "dryrun.estimate": ("Estimate", "estimate"),
    "dryrun.explain": ("explain",),
    "dryrun.tune": ("tune",),
    "dryrun.tuned": ("Tuned",),
    "dryrun.watch": ("monitor",),
    "errors": ("ExportError", "Fp8CompileError", "OptionError", "StateError", "StrictError"),
    "exporting.export": ("Exported", "export"),
    "reporting.monitor": ("Monitor",),
    "reporting.report": ("Report", "report"),
    "reporting.stats": ("Stats", "stats"),
    "runtime.calls": ("dry_run",),
    "runtime.checkpoint": ("ScalingState",),
    "runtime.frozen": ("thaw",),
    "runtime.phases": ("on_step", "set_phase", "set_step"),
    "runtime.weight_cache": ("refresh",),
    "runtime.state_dict": ("load_scaling_state", "scaling_state"),
}
_SUBMODULES = ("distributed", "optim")
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_PUBLIC)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC and name not in _SUBMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *_SUBMODULES})
