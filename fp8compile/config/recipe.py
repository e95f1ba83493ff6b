"""Recipe: how tensors are scaled into FP8. Frozen, hashable, plain data: it is part of every cache key.

``delayed``             one scale a tensor, from the amaxes of earlier training calls: the cast needs no pass of its own
``tensorwise``          one scale a tensor, from its own amax ("current" scaling); no state
``rowwise``             one scale a row of the operand: a token's features, or a feature's tokens; E4M3 throughout
``rowwise_with_gw_hp``  the same with the weight's gradient in high precision, and one scale for the weight in dgrad
``blockwise``           one scale for 1 x 128 elements along the contraction, or 128 x 128 of a weight; powers of two; E4M3
``mxfp8``               one scale for 1 x 32 elements along the contraction, a power of two (E8M0); E4M3 throughout. With
                        `weight_tiles` one for 32 x 32 elements of a weight
``auto``                the one of these that suits the device: ``mxfp8`` where tensor cores have it, else ``delayed``

In all, ``scale = fp8_max / (amax * 2**margin)`` multiplies into FP8. Names and meanings are TransformerEngine's and torchao's;
the blocks are those of DeepSeek-V3 and of the OCP Microscaling specification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..devices import support
from ..devices.cost import ScalingCost
from ..devices.formats import FP8_FORMATS
from ..devices.gpu import Gpu
from ..errors import OptionError, one_of
from . import peers

AMAX_ALGOS = ("max", "most_recent")
ON_OVERFLOW = ("current", "saturate")
FROZEN = ("high_precision", "fp8")
ENCODINGS = ("auto", "ocp", "fnuz")
ROLES = ("input", "weight", "gradient")
# Default margins of gradients with a delayed scale, in E5M2 and in E4M3. Gradients outgrow their history: behind a LayerScale
# of 1e-6, Adam makes them 1,000 times as large in a step. benchmarks/margins.py measures the cost of this headroom.
HEADROOM, HEADROOM_OF_E4M3 = 11, 3


class Block(NamedTuple):
    """The elements that share a scale, in a copy whose contracted dimension is the columns; 0 stands for all of them."""

    rows: int
    columns: int


WHOLE, ROW = Block(0, 0), Block(1, 0)
ROW_OF_GROUP = Block(1, 16)  # a scale for a row of a group of columns, repeated for each 16 of them


class BuiltIn(NamedTuple):
    """What is particular to a recipe.

    `power_of_2`: the allowed values of `power_of_2_scale`, the default first. `cost`: None if its tensors are scaled as those
    of another recipe. `needs`: whether a GPU has such a matmul (else it is emulated); None: every GPU with FP8 has it. `whose`:
    the GPUs that have it. `tile`: the weight's blocks with `weight_tiles`; None: the recipe has no others.
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


# From coarse to fine: a matmul whose operands are scaled in different ways costs as much as the finer way. docs/cost-model.md
# has the sources of the costs.
BUILT_IN = {
    "delayed": BuiltIn(WHOLE, WHOLE, (False,), ScalingCost(amax_apart=True, once=4)),
    "tensorwise": BuiltIn(WHOLE, WHOLE, (False, True), ScalingCost(walks=2, once=2)),
    "rowwise": BuiltIn(ROW, ROW, (False, True), ScalingCost(walks=2, for_each_layout=True), tile=WHOLE),
    "rowwise_with_gw_hp": BuiltIn(ROW, ROW, (False, True), None, tile=WHOLE),
    "blockwise": BuiltIn(
        Block(1, 128), Block(128, 128), (True, False), ScalingCost(copy_bytes=1 + 4 / 128, gemm_rate=0.8, promotes=True)
    ),
    "mxfp8": BuiltIn(
        Block(1, 32),
        Block(1, 32),
        (True,),
        ScalingCost(copy_bytes=1 + 4 / 32),
        needs=support.has_mx,
        whose="Blackwell",
        tile=Block(32, 32),
    ),
}
RECIPES = tuple(BUILT_IN)
AUTO = "auto"
NAMES = (AUTO, *RECIPES)  # what users may write
PREFERRED = ("mxfp8", "delayed", "tensorwise")  # by "auto"; the last one takes all settings
COSTS = {name: made.cost for name, made in BUILT_IN.items() if made.cost is not None}


def recipe_of(delayed: bool, block: tuple[int, int]) -> str:
    """The recipe that scales all tensors in this way: with or without a history, with such blocks."""
    if block == WHOLE:
        return "delayed" if delayed else "tensorwise"
    found = (name for name in COSTS if block in (BUILT_IN[name].block, BUILT_IN[name].weight_block, BUILT_IN[name].tile))
    return next(found, "rowwise")  # a scale for a row of one group, or of one matrix of a stack


class Chosen(NamedTuple):
    """A recipe that "auto" stands for. `why`: for the report, "" if the recipe was named."""

    recipe: Recipe
    why: str = ""


class Scaling(NamedTuple):
    """How one tensor is scaled for one gemm. Gemms with equal scalings share the tensor's FP8 copies."""

    delayed: bool  # the scale comes from state, not from the tensor itself
    block: Block
    wide: bool  # E5M2
    margin: int
    power_of_2: bool
    encoding: str
    history: tuple[int, int, bool] = (0, 0, False)  # delayed: window, interval, whether an overflow asks for the current amax

    @property
    def recipe(self) -> str:
        """The recipe that scales all tensors in this way: a key of `COSTS`."""
        return recipe_of(self.delayed, self.block)


@dataclass(frozen=True)
class Recipe:
    """Validated on construction: OptionError (a ValueError) names the field, the value and what is allowed.

    A recipe with the name "auto" has no scaling of its own: `on` says which recipes it stands for on a device. Its `fp8_format`
    and `power_of_2_scale` stay None where they are not given.
    `fp8_format` is taken in any case and stored in lower case; `override_linear_precision` is (fprop, dgrad, wgrad),
    True keeps that gemm in high precision; a list is accepted and stored as a tuple.
    `fp8_format` is "hybrid" or "e4m3"; None stands for the recipe's own. `margin` is one integer, or three: for inputs
    (activations), weights and gradients; it is stored as three where they differ. None: headroom for gradients with a delayed
    scale, and 0 for all other tensors. Those stay near their history, or have a scale from their own amax, which covers them.
    `amax_history_len`, `amax_compute_algo`, `interval`, `reduce_amax`, `current_scaling` and `on_overflow` matter to delayed
    scaling only. `current_scaling` is (inputs, weights, gradients): True scales that tensor by its current amax.
    `reduce_amax` takes the maximum of amaxes over ranks that run the same graphs: True for all ranks, or a process group or its
    name, a DeviceMesh of one dimension, (mesh, dimension), or the name of a dimension of the parameters' mesh. It is stored by
    its name. `amax_group` is such a group, of the ranks that tensors are sharded over (tensor parallelism): amaxes are those of
    whole tensors then. Amaxes with a history are reduced together, at the end of forward and of backward; a cast by the current
    amax waits for an all-reduce of its own. Recipes with scales of rows or blocks refuse it.
    `on_overflow` says what follows an amax that saturates and is more than twice the amax that its scale was computed from (a
    gradient's: eight times): "current" (the next step scales the tensor by its current amax) or "saturate" (the amax only
    enters the history). `power_of_2_scale` rounds scales down to powers of two; None: the recipe's default (`BUILT_IN`).
    `fp8_encoding` is "auto" (the device's), "ocp" (e4m3fn, e5m2: NVIDIA, MI350) or "fnuz" (MI300). `recast_weights` casts
    weights again in backward instead of keeping their transposed FP8 copies from the forward: 1 byte a parameter less memory, 2
    bytes a parameter more traffic a step (4 if it is float32). "auto" does so where that costs little, or where FP8 would
    otherwise need more memory than bf16 (`passes.recast`). `merge_matmuls` makes one matmul of layers that read the same tensor
    (q, k and v), with one scale for their weights and one for their gradients; "auto" where a described device is faster so
    (`passes.merge`). `cache_weights` keeps the FP8 copies of weights until the weights change: one cast an optimizer step, not
    one a micro-batch (`passes.hoist`). They are scaled by their current amax. `frozen` is "high_precision" or "fp8": weights
    that do not train are kept in FP8 only, where nothing but FP8 matmuls read them (`runtime.frozen`). They are scaled by their
    current amax. `fp8_all_to_all` sends the rows of experts in FP8 to other ranks, where one graph has the all-to-all and its
    experts. `weight_tiles` gives a weight one scale for 32 x 32 elements with `mxfp8`, and one for all with `rowwise`: the FP8
    values of fprop and dgrad are the same. `use_fast_accum` is (fprop, dgrad, wgrad): the FP8
    tensor cores' shorter accumulators, faster and less exact.
    """

    name: str = "delayed"
    fp8_format: str | None = None
    margin: int | tuple[int, int, int] | None = None
    amax_history_len: int = 16
    amax_compute_algo: str = "max"
    interval: int = 1
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    reduce_amax: bool | str = False
    amax_group: bool | str = False
    recast_weights: bool | str = "auto"
    merge_matmuls: bool | str = "auto"
    cache_weights: bool = False
    frozen: str = "high_precision"
    fp8_all_to_all: bool = False
    use_fast_accum: tuple[bool, bool, bool] = (True, False, False)
    current_scaling: tuple[bool, bool, bool] = (False, False, False)
    on_overflow: str = "current"
    power_of_2_scale: bool | None = None
    fp8_encoding: str = "auto"
    weight_tiles: bool = False

    def __post_init__(self) -> None:
        if meant := peers.recipe(self.name):
            raise OptionError.of("recipe", self.name, meant)
        one_of("recipe", self.name, NAMES)
        self._formats()
        integer("amax_history_len", self.amax_history_len, 1, 1 << 20)
        one_of("amax_compute_algo", self.amax_compute_algo, AMAX_ALGOS)
        integer("interval", self.interval, 1, 1 << 20)
        self._three_bools("override_linear_precision", "(fprop, dgrad, wgrad), True = high precision")
        self._three_bools("use_fast_accum", "(fprop, dgrad, wgrad), True = fast accumulation")
        self._three_bools("current_scaling", "(inputs, weights, gradients), True = scaled by the current amax")
        self._margins()
        one_of("on_overflow", self.on_overflow, ON_OVERFLOW)
        self._group("reduce_amax", "True (all ranks), False")
        self._group("amax_group", "False")
        for name in ("recast_weights", "merge_matmuls"):
            given = getattr(self, name)
            if not isinstance(given, bool) and given != "auto":
                raise OptionError.of(name, given, "True, False or 'auto'")
        boolean("cache_weights", self.cache_weights)
        one_of("frozen", self.frozen, FROZEN)
        boolean("fp8_all_to_all", self.fp8_all_to_all)
        boolean("weight_tiles", self.weight_tiles)
        if self.frozen == "fp8" and self.name != AUTO and len({*self.weight_block}) > 1:
            why = "whose dgrad needs other scales of a weight than its fprop: one FP8 copy cannot serve both"
            why += "; or set weight_tiles to True" if self.built_in.tile else ""
            raise OptionError.of("frozen", self.frozen, f"'high_precision' with recipe {self.name!r}, {why}")
        if self.name == "rowwise_with_gw_hp":
            object.__setattr__(self, "override_linear_precision", (*self.override_linear_precision[:2], True))

    def _formats(self) -> None:
        given = self.fp8_format
        if self.name == AUTO:  # what the settings mean is checked for each recipe that it stands for
            if given is not None or self.power_of_2_scale is not None:
                plain = Recipe("tensorwise", given, power_of_2_scale=self.power_of_2_scale)
                object.__setattr__(self, "fp8_format", given and plain.fp8_format)
            one_of("fp8_encoding", self.fp8_encoding, ENCODINGS)
            return
        if given is None:
            given = "e4m3" if self.fine else "hybrid"
        if isinstance(given, str) and given.lower() in FP8_FORMATS:
            given = given.lower()
        one_of("fp8_format", given, FP8_FORMATS)
        if self.fine and given != "e4m3":
            raise OptionError.of("fp8_format", given, f"'e4m3' with recipe {self.name!r}, which uses it throughout")
        object.__setattr__(self, "fp8_format", given)
        one_of("fp8_encoding", self.fp8_encoding, ENCODINGS)
        allowed = self.built_in.power_of_2
        power_of_2 = allowed[0] if self.power_of_2_scale is None else self.power_of_2_scale
        boolean("power_of_2_scale", power_of_2)
        if power_of_2 not in allowed:
            why = ": its scales are E8M0" if allowed[0] else ""
            raise OptionError.of("power_of_2_scale", power_of_2, f"{allowed[0]} with recipe {self.name!r}{why}")
        object.__setattr__(self, "power_of_2_scale", power_of_2)

    def _group(self, key: str, others: str) -> None:
        """A process group, also that of a DeviceMesh, is stored by its name."""
        given = getattr(self, key)
        allowed = f"{others}, a torch.distributed process group or its name, a dimension of a DeviceMesh: 'dp' or (mesh, 'dp')"
        mesh, *dimension = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given,)
        if hasattr(mesh, "get_group"):
            try:
                given = mesh.get_group(*dimension)
            except (RuntimeError, KeyError, ValueError) as error:
                raise OptionError.of(key, given, f"{allowed} ({error})") from None
        name = getattr(given, "group_name", given)
        if not isinstance(name, bool) and not (isinstance(name, str) and name) or (name is True and key == "amax_group"):
            raise OptionError.of(key, given, allowed)
        if key == "amax_group" and name and self.fine:
            raise OptionError.of(key, given, f"False with recipe {self.name!r}, whose scales are of rows or blocks of a shard")
        object.__setattr__(self, key, name)

    def _margins(self) -> None:
        margin = self.margin
        if isinstance(margin, (tuple, list)):
            if len(margin) != 3:
                raise OptionError.of("margin", margin, "an integer, or three: for inputs, weights and gradients")
            for one in margin:
                integer("margin", one, 0, 64)
            margin = margin[0] if len(set(margin)) == 1 else (margin[0], margin[1], margin[2])
        elif margin is not None:
            integer("margin", margin, 0, 64)
        object.__setattr__(self, "margin", margin)

    def _three_bools(self, key: str, meaning: str) -> None:
        three = getattr(self, key)
        if not (isinstance(three, (tuple, list)) and len(three) == 3 and all(isinstance(x, bool) for x in three)):
            raise OptionError.of(key, three, f"three bools {meaning}")
        object.__setattr__(self, key, tuple(three))

    @property
    def delayed(self) -> bool:
        """Whether scales come from state (and state must be kept), not from the tensor itself. "auto": whether they may."""
        return self.name in ("delayed", AUTO) and not all(self.current_scaling)

    @property
    def current(self) -> Recipe:
        """The same recipe without state: tensors are scaled by their current amaxes."""
        return replace(self, name="tensorwise") if self.delayed else self

    def on(self, gpu: Gpu | None) -> tuple[Chosen, ...]:
        """What this recipe is on a GPU (None: on a CPU): itself or, for "auto", those that a layer takes the first of that its
        sizes allow. A recipe that the GPU would only emulate, or that refuses the settings, is not among them."""
        if self.name != AUTO:
            return (Chosen(self),)
        where, refused = "a CPU" if gpu is None else gpu.target, ""
        for name in PREFERRED:
            if not BUILT_IN[name].native(gpu):
                continue
            try:
                chosen = replace(self, name=name)
            except OptionError as error:
                refused = refused or f", as {name} has another {error.key}"
                continue
            if BUILT_IN[name].block != WHOLE and (self.fp8_all_to_all or self.merge_matmuls is True):
                refused = f", as {name} has no {'fp8_all_to_all' if self.fp8_all_to_all else 'merge_matmuls'}"
                continue
            found = (Chosen(chosen, f"auto on {where}{refused}"),)
            if BUILT_IN[name].needs is None:
                return found
            return (*found, Chosen(replace(self, name=PREFERRED[-1]), f"auto on {where}, as {name} needs other sizes"))
        raise AssertionError(self)  # the last one takes all settings

    @property
    def built_in(self) -> BuiltIn:
        return BUILT_IN[self.name]

    @property
    def fine(self) -> bool:
        """Whether a tensor has more than one scale."""
        return self.name != AUTO and self.built_in.block != WHOLE

    @property
    def weight_block(self) -> Block:
        """The elements of a weight that share a scale."""
        return self.weight_tiles and self.built_in.tile or self.built_in.weight_block

    def scaling(self, role: str, gemm: str) -> Scaling:
        """How the "input", "weight" or "gradient" of a "fprop", "dgrad" or "wgrad" is scaled."""
        i = ROLES.index(role)
        delayed = self.name == "delayed" and not self.current_scaling[i] and not (role == "weight" and self.cache_weights)
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
        return Scaling(delayed, block, wide, margin, bool(self.power_of_2_scale), self.fp8_encoding, history)


def boolean(key: str, value: Any) -> None:
    """Raise OptionError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise OptionError.of(key, value, "True or False")


def integer(key: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise OptionError unless `value` is an integer from `least` to `most`."""
    # bool is an int to Python; margin=True is a mistake to everybody else
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError.of(key, value, f"an integer >= {least}")
    if most is not None and value > most:
        raise OptionError.of(key, value, f"an integer <= {most}")
