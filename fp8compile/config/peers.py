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
_CAST = "'recipe' (granularity), 'fp8_format' (dtype), or 'override_linear_precision' (a gemm without FP8)"
_SUMS = "'use_fast_accum', for fprop, dgrad and wgrad"
_POWERS = "'power_of_2_scale'"
_BLOCKS = "'recipe': 'blockwise' has blocks of 1 x 128, and of 128 x 128 for weights"
_FROZEN = "'frozen', for weights that do not train"
# option -> what takes its place
_OPTIONS = {
    # torchao
    "module_filter_fn": (
        "'policy', which accepts the same function of (module, name), or 'exclude', a list of names"
    ),
    "_auto_filter_for_recipe": "nothing: the cost model keeps what FP8 would slow down",
    "enable_fsdp_float8_all_gather": _GATHER,
    "precompute_float8_dynamic_scale_for_fsdp": f"{_GATHER}; no per-step call is needed",
    "force_recompute_fp8_weight_in_bwd": "'recast_weights'",
    "round_scales_to_power_of_2": _POWERS,
    "pad_inner_dim": _NOTHING,
    "emulate": "nothing: a CPU emulates FP8",
    "recipe_name": "'recipe'",
    "config": "'recipe' and the other settings",
    "cast_config_input": _CAST,
    "cast_config_input_for_grad_weight": _CAST,
    "cast_config_weight": _CAST,
    "cast_config_weight_for_grad_input": _CAST,
    "cast_config_grad_output": _CAST,
    "cast_config_grad_output_for_grad_weight": _CAST,
    "scaling_type": "'override_linear_precision', for a gemm whose scaling is DISABLED",
    "scaling_granularity": "'recipe'",
    "target_dtype": "'fp8_format'",
    "gemm_config_output": _SUMS,
    "gemm_config_grad_input": _SUMS,
    "gemm_config_grad_weight": _SUMS,
    # TransformerEngine
    "fp8_recipe": "'recipe'",
    "fp8_group": "'reduce_amax'",
    "amax_reduction_group": "'reduce_amax'",
    "is_first_microbatch": "'cache_weights'",
    "use_power_2_scales": _POWERS,
    "use_f32_scales": "'power_of_2_scale', which is its opposite",
    "fp8_quant_fwd_inp": _POWERS,
    "fp8_quant_fwd_weight": _POWERS,
    "fp8_quant_bwd_grad": _POWERS,
    "fp8_gemm_fprop": _SUMS,
    "fp8_gemm_dgrad": _SUMS,
    "fp8_gemm_wgrad": _SUMS,
    "use_split_accumulator": "'use_fast_accum', which is its opposite",
    "x_block_scaling_dim": _BLOCKS,
    "w_block_scaling_dim": _BLOCKS,
    "grad_block_scaling_dim": _BLOCKS,
    "enable_2d_quantization": "'weight_tiles'",
    "backward_override": "'override_linear_precision'",
    "fp8_dpa": _ATTENTION,
    "fp8_mha": _ATTENTION,
    "scaling_factor_compute_algo": "'margin' and 'power_of_2_scale'",
    "enabled": "'exclude', or a rule of 'policy' with fp8 = 'off'",
    "calibrating": "a schedule in 'policy': histories move in phases of high precision, too",
    "fp8_autocast": "nothing: torch.compile takes its place",
    "quantized_model_init": _FROZEN,
    "fp8_model_init": _FROZEN,
    "nvdlfw_inspect": "fp8compile.monitor or fp8compile.compare",
}


def recipe(given: Any) -> str | None:
    """What to write for another library's recipe (its name, class, object or enumeration); None otherwise."""
    if isinstance(given, enum.Enum):
        return f"{given.value!r}, the value of that name"
    name = given if isinstance(given, str) else (given if isinstance(given, type) else type(given)).__name__
    plain = name.lower().replace("_", "").replace("-", "")
    if plain.startswith("nvfp4"):
        return "an FP8 recipe: there is no NVFP4 here"
    if plain == "customrecipe":
        return "the name of a recipe: there are none in code here, and a policy can name its own"
    if plain not in _RECIPES:
        return None
    ours, whose = _RECIPES[plain]
    return f"{ours!r}, which is the name here for {whose}'s {name}"


def option(given: str) -> str | None:
    """What to write for an option of another library."""
    return _OPTIONS.get(given.lower())
