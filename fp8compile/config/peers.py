"""Names of torchao and TransformerEngine, and those here: hints for errors about a recipe or an option."""

from __future__ import annotations

import enum
from typing import Any

# names without case, "_" and "-" -> the recipe here, and whose name it is
_RECIPES = {
    "delayedscaling": ("delayed", "TransformerEngine"),
    "float8currentscaling": ("tensorwise", "TransformerEngine"),
    "currentscaling": ("tensorwise", "TransformerEngine"),
    "current": ("tensorwise", "TransformerEngine"),
    "float8blockscaling": ("blockwise", "TransformerEngine"),
    "mxfp8blockscaling": ("mxfp8", "TransformerEngine"),
    "dynamic": ("tensorwise", "torchao"),
    "axiswise": ("rowwise", "torchao"),
}
_GATHER = "fp8compile.distributed.fp8_all_gather(model), called once after fully_shard"
_NOTHING = "nothing: fp8compile decides it by itself"
_ATTENTION = "nothing: fp8compile leaves attention in high precision"
# option -> what takes its place
_OPTIONS = {
    # torchao
    "module_filter_fn": (
        "'policy', which accepts the same function of (module, name), or 'exclude', a list of names"
    ),
    "enable_fsdp_float8_all_gather": _GATHER,
    "precompute_float8_dynamic_scale_for_fsdp": f"{_GATHER}; no per-step call is needed",
    "force_recompute_fp8_weight_in_bwd": "'recast_weights'",
    "round_scales_to_power_of_2": "'power_of_2_scale'",
    "pad_inner_dim": _NOTHING,
    "emulate": "nothing: on a device without FP8 matmuls that run on a CPU are emulated",
    "recipe_name": "'recipe'",
    "config": "'recipe' and the other settings",
    # TransformerEngine
    "fp8_recipe": "'recipe'",
    "fp8_group": "'reduce_amax'",
    "amax_reduction_group": "'reduce_amax'",
    "is_first_microbatch": "'cache_weights'",
    "use_power_2_scales": "'power_of_2_scale'",
    "use_split_accumulator": "'use_fast_accum', which is its opposite",
    "fp8_dpa": _ATTENTION,
    "fp8_mha": _ATTENTION,
    "scaling_factor_compute_algo": "'margin' and 'power_of_2_scale'",
    "enabled": "'exclude', or a rule of 'policy' with fp8 = 'off'",
}


def recipe(given: Any) -> str | None:
    """What to write for another library's recipe (its name, class, object or enumeration); None otherwise."""
    if isinstance(given, enum.Enum):
        return f"{given.value!r}, the value of that name"
    name = given if isinstance(given, str) else (given if isinstance(given, type) else type(given)).__name__
    plain = name.lower().replace("_", "").replace("-", "")
    if plain.startswith("nvfp4"):
        return "an FP8 recipe: there is no NVFP4 here"
    if plain not in _RECIPES:
        return None
    ours, whose = _RECIPES[plain]
    return f"{ours!r}, which is the name here for {whose}'s {name}"


def option(given: str) -> str | None:
    """What to write for an option of another library."""
    return _OPTIONS.get(given.lower())
