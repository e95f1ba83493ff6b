"""fp8compile: `torch.compile(model, backend="fp8")` trains a vanilla PyTorch model with its matmuls in FP8.

model = torch.compile(model, backend="fp8")     # no import of this package is needed
print(fp8compile.report(model))                 # every matmul: FP8, or why not
print(fp8compile.stats(model))                  # every tensor: amax, scale, on request what FP8 does to it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import distributed as distributed
    from . import optim as optim
    from .backend import fp8 as fp8
    from .config.policy import Policy as Policy
    from .config.policy import PolicyError as PolicyError
    from .config.policy import Rule as Rule
    from .config.policy import Schedule as Schedule
    from .config.recipe import Recipe as Recipe
    from .dryrun.compare import compare as compare
    from .dryrun.comparison import Comparison as Comparison
    from .dryrun.estimate import Estimate as Estimate
    from .dryrun.estimate import estimate as estimate
    from .dryrun.explain import explain as explain
    from .dryrun.guard import Guard as Guard
    from .dryrun.guard import guard as guard
    from .dryrun.tune import tune as tune
    from .dryrun.tuned import Tuned as Tuned
    from .dryrun.watch import monitor as monitor
    from .errors import ExportError as ExportError
    from .errors import Fp8CompileError as Fp8CompileError
    from .errors import LoadError as LoadError
    from .errors import MismatchError as MismatchError
    from .errors import OptionError as OptionError
    from .errors import ShardingError as ShardingError
    from .errors import StateError as StateError
    from .errors import StrictError as StrictError
    from .errors import TuneError as TuneError
    from .features.delayed.checkpoint import ScalingState as ScalingState
    from .features.export.export import Exported as Exported
    from .features.export.export import export as export
    from .features.export.export import served_weights as served_weights
    from .features.export.mismatch import Mismatch as Mismatch
    from .features.export.mismatch import digest as digest
    from .features.export.mismatch import mismatch as mismatch
    from .features.frozen.frozen_weights import restore_frozen_weights as restore_frozen_weights
    from .features.load.contents import Stack as Stack
    from .features.load.load import Loaded as Loaded
    from .features.load.load import fp8_parameters as fp8_parameters
    from .features.load.load import load_fp8 as load_fp8
    from .features.schedule.by_hand import on_step as on_step
    from .features.schedule.by_hand import set_precision as set_precision
    from .features.schedule.by_hand import set_rule as set_rule
    from .features.weight_cache.weight_cache import refresh_weight_cache as refresh_weight_cache
    from .reporting.monitor import Monitor as Monitor
    from .reporting.report import Report as Report
    from .reporting.report import report as report
    from .reporting.stats import Stats as Stats
    from .reporting.stats import stats as stats
    from .runtime.calls import freeze_scaling_state as freeze_scaling_state
    from .runtime.optimizer_steps import set_step as set_step

__version__ = "0.3.0"

# Resolved on first use: importing the package costs nothing, even from within `import torch` (TORCH_LOGS)
_MODULES = {
    "backend": ("fp8",),
    "config.policy": ("Policy", "PolicyError", "Rule", "Schedule"),
    "config.recipe": ("Recipe",),
    "dryrun.compare": ("compare",),
    "dryrun.comparison": ("Comparison",),
    "dryrun.estimate": ("Estimate", "estimate"),
    "dryrun.explain": ("explain",),
    "dryrun.guard": ("Guard", "guard"),
    "dryrun.tune": ("tune",),
    "dryrun.tuned": ("Tuned",),
    "dryrun.watch": ("monitor",),
    "errors": (
        "ExportError",
        "Fp8CompileError",
        "LoadError",
        "MismatchError",
        "OptionError",
        "ShardingError",
        "StateError",
        "StrictError",
        "TuneError",
    ),
    "features.delayed.checkpoint": ("ScalingState",),
    "features.export.export": ("Exported", "export", "served_weights"),
    "features.export.mismatch": ("Mismatch", "digest", "mismatch"),
    "reporting.monitor": ("Monitor",),
    "reporting.report": ("Report", "report"),
    "reporting.stats": ("Stats", "stats"),
    "runtime.calls": ("freeze_scaling_state",),
    "runtime.optimizer_steps": ("set_step",),
    "features.frozen.frozen_weights": ("restore_frozen_weights",),
    "features.load.contents": ("Stack",),
    "features.load.load": ("Loaded", "fp8_parameters", "load_fp8"),
    "features.schedule.by_hand": ("on_step", "set_precision", "set_rule"),
    "features.weight_cache.weight_cache": ("refresh_weight_cache",),
}
_SUBMODULES = ("distributed", "optim")
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names}
# what functions return, for annotations; and the backend, which torch finds by its name
_UNLISTED = {
    "Comparison",
    "Estimate",
    "Exported",
    "Guard",
    "Loaded",
    "Mismatch",
    "Monitor",
    "Report",
    "Stats",
    "Tuned",
    "fp8",
}
__all__ = sorted({*_PUBLIC, *_SUBMODULES} - _UNLISTED)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    import importlib

    if name in _PUBLIC:
        return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    if not name.startswith("_"):
        renamed = importlib.import_module(".deprecated", __name__)
        if name in renamed.NAMES:
            return renamed.find(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *_SUBMODULES})
