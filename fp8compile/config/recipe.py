"""Recipe: how tensors are scaled into FP8. Frozen, hashable, plain data: it is part of every cache key.

``delayed``             one scale per tensor, from the amaxes of earlier training calls: no pass of its own
``tensorwise``          one scale per tensor, from its own amax ("current" scaling); no state
``rowwise``             one scale per row of the operand: a token's features, or a feature's tokens; all E4M3
``rowwise_with_gw_hp``  the same, but the weight's gradient in high precision, and one scale of dgrad's weight
``blockwise``           one scale for 1 x 128 elements along the contraction, or 128 x 128 of a weight; powers
                        of two; E4M3
``mxfp8``               one scale for 1 x 32 elements along the contraction, a power of two (E8M0); E4M3
                        throughout. With `weight_tiles` one for 32 x 32 elements of a weight

In all, ``scale = fp8_max / (amax * 2**margin)`` multiplies into FP8. Names and meanings are
TransformerEngine's and torchao's; blocks are those of DeepSeek-V3 and of the OCP Microscaling specification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..devices import support
from ..devices.cost import ScalingCost
from ..devices.formats import FP8_FORMATS
from ..devices.gpu import Gpu
from ..errors import OptionError, one_of
from . import peers
from .settings import (
    boolean,
    group,
    in_any_case,
    margins,
    one,
    positive,
    setting,
    settings_of,
    switch,
    three_bools,
    unless_none,
)

ROLES = ("input", "weight", "gradient")
# Default margins of gradients with a delayed scale, in E5M2 and in E4M3. Gradients outgrow their history:
# after a LayerScale of 1e-6, Adam makes them 1,000 times as large in a step. notes/accuracy.md measures
# the cost of this headroom.
HEADROOM, HEADROOM_OF_E4M3 = 11, 3


class Block(NamedTuple):
    """The elements that share a scale, in a copy whose columns are the contracted dimension; 0: all."""

    rows: int
    columns: int


# What vLLM raises the amax of 128 elements to, in float32. With powers of two, scales to 1e-10, too.
# Its csrc/quantization/w8a8/fp8/per_token_group_quant.cu has this, and the order of the division
LEAST = (1.000000013351432e-10, 448 * 1.000000013351432e-10)
UNSERVED = "only casts of blocks are known to the bit, as vLLM compiles others by Inductor"

WHOLE, ROW, MX = Block(0, 0), Block(1, 0), Block(1, 32)
ROW_OF_GROUP = Block(1, 16)  # a scale for a row of a group of columns, repeated for each 16 of them


class BuiltIn(NamedTuple):
    """What is particular to a recipe.

    `power_of_2`: the allowed values of `power_of_2_scale`, the default first. `cost`: None if its tensors are
    scaled as those of another recipe. `needs`: whether a GPU has such a matmul (else it is emulated); None:
    every GPU with FP8 has it. `whose`: the GPUs that have it. `tile`: the weight's blocks with
    `weight_tiles`; None: the recipe has no others.
    """

    block: Block  # of inputs and gradients
    weight_block: Block
    power_of_2: tuple[bool, ...]
    cost: ScalingCost | None
    needs: Callable[[Gpu | None], bool] | None = None
    whose: str = ""
    tile: Block | None = None

    def native(self, gpu: Gpu | None) -> bool:
        return self.needs is None or self.needs(gpu)


_OF_BLOCKS = ScalingCost(copy_bytes=1 + 4 / 128, gemm_rate=0.8, promotes=True)
_OF_MX = ScalingCost(copy_bytes=1 + 4 / 32)
# From coarse to fine: a matmul whose operands are scaled in different ways costs as much as the finer way.
# docs/cost-model.md has the sources of the costs.
BUILT_IN = {
    "delayed": BuiltIn(WHOLE, WHOLE, (False, True), ScalingCost(amax_apart=True, once=4)),
    "tensorwise": BuiltIn(WHOLE, WHOLE, (False, True), ScalingCost(walks=2, once=2)),
    "rowwise": BuiltIn(ROW, ROW, (False, True), ScalingCost(walks=2, for_each_layout=True), tile=WHOLE),
    "rowwise_with_gw_hp": BuiltIn(ROW, ROW, (False, True), None, tile=WHOLE),
    "blockwise": BuiltIn(Block(1, 128), Block(128, 128), (True, False), _OF_BLOCKS),
    "mxfp8": BuiltIn(MX, MX, (True,), _OF_MX, support.has_mx, whose="Blackwell", tile=Block(32, 32)),
}
RECIPES = tuple(BUILT_IN)
# The recipe if none is named. A copy of this package without this feature keeps no scale between calls
USUAL = "delayed" if (Path(__file__).parents[1] / "features" / "delayed").is_dir() else "tensorwise"
COSTS = {name: made.cost for name, made in BUILT_IN.items() if made.cost is not None}


def recipe_of(delayed: bool, block: tuple[int, int]) -> str:
    """The recipe that scales all tensors in this way: with or without a history, with such blocks."""
    if block == WHOLE:
        return "delayed" if delayed else "tensorwise"
    for name in COSTS:
        if block in (BUILT_IN[name].block, BUILT_IN[name].weight_block, BUILT_IN[name].tile):
            return name
    return "rowwise"  # a scale for a row of one group, or of one matrix of a stack


def recipe_holding(block: tuple[int, int]) -> str:
    """The recipe that multiplies by a weight as it is, if it is held in FP8 with such blocks. One with scales
    of rows has them in fprop alone."""
    return "rowwise_with_gw_hp" if block == ROW else recipe_of(False, block)


class Scaling(NamedTuple):
    """How one tensor is scaled for one gemm. Gemms with equal scalings share the tensor's FP8 copies."""

    delayed: bool  # the scale comes from state, not from the tensor itself
    block: Block
    wide: bool  # E5M2
    margin: int
    power_of_2: bool
    encoding: str
    history: tuple[int, int, bool] = (0, 0, False)  # delayed: window, interval, are overflows answered
    least: float = 0.0  # cast as a server does it, with amaxes of this or more

    @property
    def divides(self) -> bool:
        """Values are divided by the inverse of the scale. To multiply by a power of two is the same."""
        return self.least > 0 and not self.power_of_2

    @property
    def recipe(self) -> str:
        """The recipe that scales all tensors in this way: a key of `COSTS`."""
        return recipe_of(self.delayed, self.block)


def _with_powers(*allowed: tuple[bool, ...]) -> str:
    """The recipes that allow these values of `power_of_2_scale`."""
    return ", ".join(name for name, made in BUILT_IN.items() if made.power_of_2 in allowed)


def _delayed(recipe: Recipe) -> bool:
    return recipe.delayed


def _whole(recipe: Recipe) -> bool:
    return not recipe.fine


@dataclass(frozen=True)
class Recipe:
    """How tensors are scaled, and what runs in FP8. Each setting is described at its field.

    Validated on construction: OptionError (a ValueError) names the field, the value and what is allowed.
    Lists are stored as tuples, process groups by their names. None stands for the recipe's own value.
    """

    name: str = USUAL
    fp8_format: str | None = setting(
        None,
        "The FP8 formats. hybrid: E4M3 for activations and weights, E5M2 for gradients; e4m3: E4M3 for all "
        "three. Default: hybrid with one scale per tensor, e4m3 with finer scales, which support nothing "
        "else.",
        unless_none(in_any_case(*FP8_FORMATS)),
    )
    margin: int | tuple[int, int, int] | None = setting(
        None,
        "Headroom: scale = FP8 maximum / (amax * 2^margin). Three are for (inputs, weights, gradients). "
        "Default: 0, but 11 for gradients with delayed scaling (3 in E4M3), which may outgrow their history.",
        unless_none(margins),
    )
    amax_history_len: int = setting(16, "How many amaxes are remembered.", positive, _delayed)
    amax_compute_algo: str = setting(
        "max", "Which of the remembered amaxes gives the scale.", one("max", "most_recent"), _delayed
    )
    interval: int = setting(1, "How many steps lie between two updates of a scale.", positive, _delayed)
    override_linear_precision: tuple[bool, bool, bool] = setting(
        (False, False, False),
        "(fprop, dgrad, wgrad): True keeps that gemm in high precision.",
        three_bools("(fprop, dgrad, wgrad), True = high precision"),
    )
    reduce_amax: bool | str = setting(
        False,
        "Take the maximum of amaxes over ranks that run the same graphs: all ranks, a process group or its "
        "name, or a dimension of the parameters' DeviceMesh. One all-reduce at the end of each direction.",
        group(True, False),
        _delayed,
    )
    amax_group: bool | str = setting(
        False,
        "Tensor parallelism: the ranks that share a tensor, so that amaxes are those of whole tensors. A "
        "tensor that is scaled by its current amax waits for an all-reduce of its own.",
        group(False),
        _whole,
    )
    recast_weights: bool | str = setting(
        "auto",
        "Cast weights again in backward instead of keeping their transposed FP8 copies: 1 byte of memory per "
        "parameter less, 2 to 4 bytes of traffic more. auto: where that costs little, or where FP8 would "
        "need more memory than bf16.",
        switch,
    )
    merge_matmuls: bool | str = setting(
        "auto",
        "One matmul for layers that read the same tensor, such as q, k and v, with one scale for their "
        "weights and one for their gradients. auto: where the described device is faster so.",
        switch,
        _whole,
        feature="merge",
    )
    cache_weights: bool = setting(
        False,
        "Keep the FP8 copies of weights until the weights change: one cast per optimizer step, not per "
        "micro-batch. Weights are scaled by their current amax.",
        boolean,
        feature="weight_cache",
    )
    frozen: str = setting(
        "high_precision",
        "What weights that do not train are kept in. fp8: 1 byte per parameter, where nothing but FP8 "
        "matmuls read them; they are scaled by their current amax.",
        one("high_precision", "fp8"),
        feature="frozen",
    )
    fp8_all_to_all: bool = setting(
        False,
        "Experts on several ranks: an all-to-all of the graph sends rows in FP8.",
        boolean,
        _whole,
        feature="collectives",
    )
    use_fast_accum: tuple[bool, bool, bool] = setting(
        (True, False, False),
        "(fprop, dgrad, wgrad): the tensor cores' shorter accumulators, faster and less exact.",
        three_bools("(fprop, dgrad, wgrad), True = fast accumulation"),
    )
    current_scaling: tuple[bool, bool, bool] = setting(
        (False, False, False),
        "(inputs, weights, gradients): True scales that tensor by its current amax.",
        three_bools("(inputs, weights, gradients), True = scaled by the current amax"),
        lambda recipe: recipe.name == "delayed",
    )
    on_overflow: str = setting(
        "current",
        "What follows an amax that saturates and is over twice the amax that its scale comes from (a "
        "gradient's: eight times). current: the scale is recomputed at once; saturate: the amax only enters "
        "the history.",
        one("current", "saturate"),
        _delayed,
    )
    power_of_2_scale: bool | None = setting(
        None,
        "Round scales down to powers of two; with delayed, those of current amaxes. Default: True with "
        f"{_with_powers((True,), (True, False))} (always: {_with_powers((True,))}), else False.",
        unless_none(boolean),
    )
    fp8_encoding: str = setting(
        "auto",
        "How FP8 numbers are encoded. auto: as the device does; ocp: e4m3fn and e5m2 (NVIDIA, MI350); "
        "fnuz: MI300.",
        one("auto", "ocp", "fnuz"),
    )
    weight_tiles: bool = setting(
        False,
        "One scale for 32 x 32 elements of a weight (mxfp8), or for all of it (rowwise), so that the FP8 "
        "values of fprop and dgrad are the same.",
        boolean,
        lambda recipe: bool(recipe.built_in.tile),
    )
    serve: str = setting(
        "none",
        "The server whose casts of inputs training makes, to the bit. vllm: with recipe blockwise; "
        "x / (max(amax, 1e-10) / 448) instead of x * (448 / amax), and power_of_2_scale by GPU unless given: "
        "True on Hopper and Blackwell, else False.",
        one("none", "vllm"),
    )

    def __post_init__(self) -> None:
        if meant := peers.recipe(self.name):
            raise OptionError.of("recipe", self.name, meant)
        one_of("recipe", self.name, RECIPES)
        for key, described in SETTINGS.items():
            self._set(key, described.allowed.check(key, getattr(self, key)))
        if self.fp8_format is None:
            self._set("fp8_format", "e4m3" if self.fine else "hybrid")
        elif self.fine and self.fp8_format != "e4m3":
            self._refuse("fp8_format", "'e4m3'", ", which uses it throughout")
        allowed = self.built_in.power_of_2
        if self.serve != "none":
            self._check_served()
        if self.power_of_2_scale is None:
            if self.serve == "none":  # else by GPU (`passes.resolve`)
                self._set("power_of_2_scale", allowed[0])
        elif self.power_of_2_scale not in allowed:
            self._refuse("power_of_2_scale", str(allowed[0]), ": its scales are powers of two")
        if self.amax_group and self.fine:
            self._refuse("amax_group", "False", ", whose scales are of rows or blocks of a shard")
        if self.frozen == "fp8" and len({*self.weight_block}) > 1:
            why = ", whose dgrad needs other scales of a weight than its fprop: "
            why += "one FP8 copy cannot serve both"
            why += "; or set weight_tiles to True" if self.built_in.tile else ""
            self._refuse("frozen", "'high_precision'", why)
        if self.name == "rowwise_with_gw_hp":
            self._set("override_linear_precision", (*self.override_linear_precision[:2], True))

    def _check_served(self) -> None:
        if self.name != "blockwise":
            raise OptionError.of("serve", self.serve, f"'none' with recipe {self.name!r}: {UNSERVED}")
        if (self.margin if isinstance(self.margin, int) else (self.margin or (0,))[0]) != 0:
            self._refuse("margin", "0 for inputs", f" and serve {self.serve!r}, which has no headroom")
        if self.fp8_encoding == "fnuz":
            self._refuse("fp8_encoding", "'auto' or 'ocp'", f" and serve {self.serve!r}")

    def _set(self, key: str, value: Any) -> None:
        object.__setattr__(self, key, value)

    def _refuse(self, key: str, allowed: str, why: str) -> NoReturn:
        raise OptionError.of(key, getattr(self, key), f"{allowed} with recipe {self.name!r}{why}")

    @property
    def delayed(self) -> bool:
        """Whether scales come from state (and state must be kept), not from the tensor itself."""
        return self.name == "delayed" and not all(self.current_scaling)

    @property
    def current(self) -> Recipe:
        """The same recipe without state: tensors are scaled by their current amaxes."""
        return replace(self, name="tensorwise") if self.delayed else self

    @property
    def built_in(self) -> BuiltIn:
        return BUILT_IN[self.name]

    @property
    def fine(self) -> bool:
        """Whether a tensor has more than one scale."""
        return self.built_in.block != WHOLE

    @property
    def weight_block(self) -> Block:
        """The elements of a weight that share a scale."""
        return self.weight_tiles and self.built_in.tile or self.built_in.weight_block

    def scaling(self, role: str, gemm: str) -> Scaling:
        """How the "input", "weight" or "gradient" of a "fprop", "dgrad" or "wgrad" is scaled."""
        i = ROLES.index(role)
        cached = role == "weight" and self.cache_weights
        delayed = self.name == "delayed" and not self.current_scaling[i] and not cached
        block = self.weight_block if role == "weight" else self.built_in.block
        if self.name == "rowwise_with_gw_hp" and (role, gemm) == ("weight", "dgrad"):
            block = WHOLE
        window = 1 if self.amax_compute_algo == "most_recent" else self.amax_history_len
        history = (window, self.interval, self.on_overflow == "current") if delayed else (0, 0, False)
        wide = self.fp8_format == "hybrid" and role == "gradient"
        if self.margin is None:
            margin = (HEADROOM if wide else HEADROOM_OF_E4M3) if delayed and role == "gradient" else 0
        else:
            margin = self.margin if isinstance(self.margin, int) else self.margin[i]
        powers = bool(self.power_of_2_scale) and not delayed
        least = LEAST[powers] if self.serve != "none" and role == "input" else 0.0
        return Scaling(delayed, block, wide, margin, powers, self.fp8_encoding, history, least)


SETTINGS = settings_of(Recipe)
