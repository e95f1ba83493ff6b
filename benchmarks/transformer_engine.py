"""TransformerEngine's arms: linears of a model become TransformerEngine's, and a forward runs in
TransformerEngine's autocast.

TransformerEngine has no graph: its modules call kernels of its own. So `torch.compile` breaks the graph at
each of them and compiles what is between them. The names were read in TransformerEngine 1.x and 2.x:

    transformer_engine.pytorch          Linear, LayerNormLinear, and
                                        autocast (recipe=; from 2.8) or fp8_autocast (fp8_recipe=)
    transformer_engine.common.recipe    Format, DelayedScaling, Float8CurrentScaling (from 2.2)
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# A LayerNorm whose output goes to one linear and nowhere else, by their names in a block
# (examples/train_gpt.py)
FUSED = {"attn_norm": "attn.qkv", "mlp_norm": "mlp.up"}


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"transformer_engine.{name}")
    except ImportError as error:
        why = f"TransformerEngine cannot be imported ({error}): pip install 'transformer_engine[pytorch]'"
        raise RuntimeError(why) from None


def prepare(heads: tuple[str, ...]) -> Callable[[nn.Module], None]:
    """Replace linears by TransformerEngine's, with the same values: all but `heads` and those with a size
    that is no multiple of 16. A LayerNorm before a single linear is replaced with it."""

    def replace(model: nn.Module) -> None:
        te = _module("pytorch")
        modules = dict(model.named_modules())
        for name in modules:
            for norm_name, linear_name in FUSED.items():
                norm, linear = (modules.get(f"{name}.{x}" if name else x) for x in (norm_name, linear_name))
                if isinstance(norm, nn.LayerNorm) and _fits(linear):
                    _put(model, f"{name}.{linear_name}".lstrip("."), _with_norm(te, norm, linear))
                    _put(model, f"{name}.{norm_name}".lstrip("."), nn.Identity())
        for name, module in list(model.named_modules()):
            if name not in heads and _fits(module):
                _put(model, name, _linear(te, module))

    return replace


def autocast(recipe: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """The context of a forward, by the name of a recipe: "DelayedScaling" or "Float8CurrentScaling". E4M3 in
    forward and E5M2 in backward."""

    def context() -> contextlib.AbstractContextManager[Any]:
        te, recipes = _module("pytorch"), _module("common.recipe")
        chosen = getattr(recipes, recipe)(fp8_format=recipes.Format.HYBRID)
        if hasattr(te, "autocast"):
            return te.autocast(enabled=True, recipe=chosen)
        return te.fp8_autocast(enabled=True, fp8_recipe=chosen)

    return context


def _fits(module: nn.Module | None) -> bool:
    return type(module) is nn.Linear and module.in_features % 16 == 0 and module.out_features % 16 == 0


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _made(kind: Any, linear: Any, values: dict[str, Any], **more: Any) -> nn.Module:
    """A module of TransformerEngine's in place of a linear. `values`: its further parameters."""
    weight, bias = linear.weight, linear.bias is not None
    where = {"params_dtype": weight.dtype, "device": weight.device}
    made = kind(linear.in_features, linear.out_features, bias=bias, **where, **more)
    with torch.no_grad():
        for name, value in {"weight": weight, **({"bias": linear.bias} if bias else {}), **values}.items():
            getattr(made, name).copy_(value)
    return made


def _linear(te: Any, linear: Any) -> nn.Module:
    return _made(te.Linear, linear, {})


def _with_norm(te: Any, norm: Any, linear: Any) -> nn.Module:
    values = {"layer_norm_weight": norm.weight, "layer_norm_bias": norm.bias}
    return _made(te.LayerNormLinear, linear, values, eps=norm.eps, normalization="LayerNorm")
