"""fp8compile: `torch.compile(model, backend="fp8")` trains a vanilla PyTorch model with its matmuls in FP8.

model = torch.compile(model, backend="fp8")     # no import of this package is needed
print(fp8compile.report(model))                 # every matmul: FP8, or why not
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import fp8 as fp8
    from .errors import Fp8CompileError as Fp8CompileError
    from .errors import OptionError as OptionError
    from .errors import StrictError as StrictError
    from .recipe import Recipe as Recipe
    from .reports import Report as Report
    from .reports import report as report

__version__ = "0.1.0"

# name -> module. Resolved on first use: importing the package costs nothing, even from within `import torch` (TORCH_LOGS)
_PUBLIC = {
    "fp8": "backend",
    "Fp8CompileError": "errors",
    "OptionError": "errors",
    "StrictError": "errors",
    "Recipe": "recipe",
    "Report": "reports",
    "report": "reports",
}
__all__ = ["Fp8CompileError", "OptionError", "Recipe", "Report", "StrictError", "fp8", "report"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
