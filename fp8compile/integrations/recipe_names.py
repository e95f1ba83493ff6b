"""Accelerate's names for an FP8 recipe, one to one to our options.

    recipe_options({"fp8_format": "HYBRID", "amax_history_len": 1024, "amax_compute_algo": "most_recent"})
    -> {"recipe": "delayed", "fp8_format": "hybrid", "amax_history_len": 1024,
        "amax_compute_algo": "most_recent"}

The names are those of `TERecipeKwargs` and of the section `fp8_config` of a file of `accelerate config`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config.options import parse
from ..errors import OptionError, describe, did_you_mean, near

# Accelerate's name -> our option. A file has longer names than TERecipeKwargs has
_SAME = {
    "fp8_format": "fp8_format",
    "margin": "margin",
    "interval": "interval",
    "amax_history_len": "amax_history_len",
    "amax_history_length": "amax_history_len",
    "amax_compute_algo": "amax_compute_algo",
    "amax_compute_algorithm": "amax_compute_algo",
    "override_linear_precision": "override_linear_precision",
}
_FLAGS = {
    "use_autocast_during_eval": ("eval", {True: "fp8", False: "high_precision"}),
    "use_mxfp8_block_scaling": ("recipe", {True: "mxfp8", False: "delayed"}),
}
_MS_AMP = "it says what MS-AMP keeps in FP8. Leave it out; fp8compile.optim.AdamW keeps"
# Options of torchao and MS-AMP: why there is no option of ours, and what to write
_NONE = {
    "opt_level": f"{_MS_AMP} an optimizer's state in FP8",
    "optimization_level": f"{_MS_AMP} its state in FP8",
    "enable_fsdp_float8_all_gather": (
        "call fp8compile.distributed.fp8_all_gather(model) after sharding, and leave it out"
    ),
    "pad_inner_dim": "fp8compile keeps a matmul in high precision if FP8 cannot have its sizes. Leave it out",
    "config": "it is torchao's. Leave it out, and write a recipe: options={'recipe': 'rowwise'}",
    "module_filter_func": (
        "write a rule of a policy instead: {'rules': [{'module': '*.mlp.*', 'fp8': 'off'}]}"
    ),
}


def recipe_options(recipe: Any) -> dict[str, Any]:
    """Our options for a recipe of Accelerate: a dict, or an object as `TERecipeKwargs`. None: not given.

    The options are checked. OptionError names a key that has no counterpart, and what to write instead. A
    `margin` holds for inputs, weights and gradients, as in Transformer Engine; it replaces our headroom for
    gradients. Leave it out to keep that."""
    found: dict[str, Any] = {}
    for key, value in _items(recipe).items():
        if value is None:
            continue
        name = key.removeprefix("fp8_") if isinstance(key, str) and key != "fp8_format" else key
        if name == "backend":
            _check_backend(key, value)
        elif name in _NONE:
            raise _error(key, value, f"accelerate's {key!r} has no counterpart: {_NONE[name]}.")
        elif name in _SAME:
            _put(found, _SAME[name], _value(key, value), key)
        elif name in _FLAGS:
            option, meanings = _FLAGS[name]
            if not isinstance(value, bool):
                raise OptionError.of(key, value, "True or False")
            _put(found, option, meanings[value], key)
        else:
            known = (*_SAME, *_FLAGS, *_NONE)
            meant = did_you_mean(near(name, known))
            keys = ", ".join((*_SAME, *_FLAGS))
            text = f"accelerate's FP8 recipes have no key {describe(key)}.{meant} The keys are {keys}."
            raise _error(key, value, text)
    options = {"recipe": "delayed", **found}
    parse(options)
    return options


def _items(recipe: Any) -> dict[Any, Any]:
    if isinstance(recipe, Mapping):
        return dict(recipe)
    if dataclasses.is_dataclass(recipe) and not isinstance(recipe, type):
        return {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    wanted = "a dict of accelerate's names, or an object such as TERecipeKwargs()"
    raise OptionError.of("recipe", recipe, wanted)


def _put(found: dict[str, Any], option: str, value: Any, key: str) -> None:
    if found.get(option, value) != value:
        text = f"accelerate's {key!r} is given twice, as {found[option]!r} and as {value!r}. Leave one out."
        raise _error(key, value, text)
    found[option] = value


def _value(key: str, value: Any) -> Any:
    if key.endswith("fp8_format") and isinstance(value, str) and value.upper() == "E5M2":
        text = f"accelerate's {key!r}: 'E5M2' for all tensors is not for training. Write 'HYBRID'."
        raise _error(key, value, text)
    return value.lower() if isinstance(value, str) else value


def _check_backend(key: str, value: Any) -> None:
    if not isinstance(value, str) or value.upper() != "TE":
        fix = "Leave it out, and the keys of that backend with it"
        why = f"only the keys of Transformer Engine ('TE') have counterparts. {fix}"
        raise _error(key, value, f"accelerate's {key!r} is {describe(value)}: {why}.")


def _error(key: Any, value: Any, text: str) -> OptionError:
    error = OptionError(text)
    error.key, error.value = key, value
    return error
