"""resolve: the decision about one matmul, by the policy and the facts of the graph. A pure function.

A policy has settings for all layers, and its rules give others to some of them, also the rules of a shipped
policy. What a graph does with a layer may rule some settings out; then others run. `OVERRIDES` lists what
graphs change: when, what, and why. They apply in this order, after the rule, and the report prints each
change. So it does what a pass changes later, when all decisions are known (`overridden`, by `recast`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from .. import compat
from ..codegen.scaled_mm_kind import EMULATED, how_grouped
from ..config.policy import Choice, Policy, Rule, Site
from ..config.recipe import BUILT_IN, ROW, SETTINGS, WHOLE, Block, Recipe, recipe_holding
from ..devices import support
from ..devices.gpu import Gpu
from ..ir.fx_utils import Matrix
from ..ir.matmul import GEMMS, Decision
from .legality import unfit


@dataclass(frozen=True)
class Facts:
    """What a decision depends on, beside the policy. `objection`, `misaligned`, `late`: why the matmul, its
    sizes, and its operands cannot be FP8; None if they can. `roles`: those of its operands."""

    gpu: Gpu | None
    roles: tuple[str, str]
    weight: Matrix | None = None  # the operand that is a weight; a wgrad has none
    objection: str | None = None
    misaligned: str | None = None
    late: str | None = None
    off: str | None = None  # why all of the graph, or of this weight, is in high precision: an evaluation
    grouped: bool = False  # the rows are divided between the matrices of a stack
    inlined: bool = False  # compiled autograd takes over the backward
    resharded: bool = False  # FSDP2 frees the gathered weight between forward and backward
    frozen: bool = False  # the weight does not train, and may be kept in FP8
    arrived: Block | None = None  # the weight is held in FP8, with a scale for so many elements
    gathered: bool = False  # FSDP2 may gather the weight in FP8
    computed: bool = False  # the weight is computed from parameters in each call
    stateless: bool = False  # a call that neither reads nor moves a history


@dataclass(frozen=True)
class Override:
    """A change of settings. `change` returns them by name; None: `Recipe.current`, without any history."""

    when: Callable[[Facts, Recipe], Any]
    change: Callable[[Facts, Recipe], dict[str, Any]] | None
    why: str


def _weights_current(facts: Facts, recipe: Recipe) -> dict[str, Any]:
    inputs, _, gradients = recipe.current_scaling
    return {"current_scaling": (inputs, True, gradients)}


def _casts_otherwise(facts: Facts, recipe: Recipe) -> bool:
    """True if the weight is held in FP8, with other scales than this recipe gives it. A copy with scales of
    rows serves dgrad, too, as one without scales."""
    block = facts.arrived
    made = [recipe.scaling("weight", gemm).block for gemm in ("fprop", "dgrad")]
    return block is not None and made != [block, WHOLE if block == ROW else block]


def _as_held(facts: Facts, recipe: Recipe) -> dict[str, Any]:
    """The recipe that has the blocks of the weight: this one, if it can have them."""
    block = facts.arrived
    assert block is not None
    name = recipe.name if recipe.built_in.tile == block else recipe_holding(block)
    made = BUILT_IN[name]
    return {
        "name": name,
        "weight_tiles": made.weight_block != block,
        "fp8_format": None,
        "power_of_2_scale": None,
        "serve": recipe.serve if name == "blockwise" else "none",
        "amax_group": recipe.amax_group if made.block == WHOLE else False,
    }


OVERRIDES = (
    Override(
        lambda facts, recipe: facts.grouped,
        lambda _, recipe: {
            "fp8_format": "e4m3",
            "weight_tiles": recipe.weight_tiles and recipe.built_in.tile != WHOLE,
        },
        "grouped matmuls take E4M3, and scales of rows or blocks",
    ),
    Override(
        lambda facts, recipe: facts.inlined,
        None,
        "compiled autograd takes over the backward, where nothing can decide whether a call is cold",
    ),
    Override(
        lambda facts, recipe: facts.resharded,
        lambda _, recipe: {"recast_weights": True},
        (
            "FSDP reshards weights after forward: a copy kept until backward would hold the "
            "whole weight on every rank"
        ),
    ),
    Override(
        _casts_otherwise,
        _as_held,
        "the weight is held in FP8, and its bytes are multiplied as they are",
    ),
    Override(
        lambda facts, recipe: (
            recipe.serve != "none" and facts.gpu is not None and facts.gpu.architecture.fnuz
        ),
        lambda *_: {"serve": "none"},
        "vLLM casts to 224 at most on this GPU, whose E4M3 ends at 240",
    ),
    Override(
        lambda facts, recipe: recipe.serve != "none" and recipe.power_of_2_scale is None,
        lambda facts, _: {"power_of_2_scale": support.serves_powers_of_2(facts.gpu)},
        "vLLM's default on this device",
    ),
    Override(
        lambda facts, recipe: facts.frozen and (recipe.frozen == "fp8" or facts.arrived is not None),
        lambda facts, recipe: {**_weights_current(facts, recipe), "recast_weights": True},
        "a frozen weight never changes, and both layouts are made from its one FP8 copy",
    ),
    Override(
        lambda facts, recipe: facts.computed and recipe.delayed,
        _weights_current,
        "a weight that is computed in each call has no history",
    ),
    Override(
        lambda facts, recipe: facts.gathered and recipe.delayed,
        _weights_current,
        "what is cast before it is gathered has a scale from its own amax",
    ),
    Override(
        lambda facts, recipe: facts.gathered and recipe.built_in.tile,
        lambda _, recipe: {"weight_tiles": True},
        "both layouts of a gathered weight are made from the FP8 values that were sent",
    ),
    Override(
        lambda facts, recipe: facts.stateless,
        None,
        "an evaluation, and a tensor that may be new in each call, have no history",
    ),
)


def settle(recipe: Recipe, facts: Facts) -> tuple[Recipe, tuple[str, ...]]:
    """The settings that run, and a line for each override: "weight_tiles=True: why"."""
    lines: list[str] = []
    for override in OVERRIDES:
        if not override.when(facts, recipe):
            continue
        change = override.change
        changed = recipe.current if change is None else replace(recipe, **change(facts, recipe))
        lines += _difference(recipe, changed, override.why)
        recipe = changed
    return recipe, tuple(lines)


def overridden(decision: Decision, why: str, **settings: Any) -> Decision:
    """The decision with these settings, and a line for the report. What passes find out later."""
    recipe = replace(decision.recipe, **settings)
    lines = _difference(decision.recipe, recipe, why)
    return replace(decision, recipe=recipe, overrides=(*decision.overrides, *lines))


def resolve(site: Site, facts: Facts, policy: Policy) -> Decision:
    """The decision about the matmul at `site`."""
    choice = policy.choose(site)
    rule = policy.rules[choice.rule] if choice.rule is not None else None
    recipe, overrides = settle(choice.recipe, facts)
    if rule is not None:
        which = f"rule {rule.name!r}" if rule.name else choice.label
        overrides = (*_difference(policy.recipe, choice.recipe, f"{which} of the policy"), *overrides)
    chosen, misfit = _kept(site, choice, rule, recipe), facts.misaligned or unfit(facts.weight, recipe)
    either, emulated = False, not recipe.built_in.native(facts.gpu)
    if facts.grouped:
        a, b = (recipe.scaling(role, site.gemm).block for role in facts.roles)
        emulated |= how_grouped(facts.gpu, a, b, not compat.triton.reorders()) == EMULATED
        either = b == recipe.built_in.tile and support.has_mx_of_either_major(facts.gpu) and not emulated
    named = rule is not None and bool(rule.module or rule.parameter)
    held = facts.arrived is not None and choice.recipe.weight_block != facts.arrived
    overruled = rule.recipe if rule is not None and held and policy.owns(choice.rule) else None
    return Decision(
        recipe=recipe,
        overrides=overrides,
        reason=facts.off or facts.objection or chosen or misfit or facts.late,
        rule=choice.label,
        auto=choice.fp8 == "auto",
        wanted=choice.fp8 == "on" and chosen is None and named,
        # a shipped rule that goes by sizes alone is nobody's choice
        on_purpose=chosen is not None and (rule is None or rule.where is None or policy.owns(choice.rule)),
        emulated=emulated,
        either=either,
        overruled=overruled or "",
    )


def _kept(site: Site, choice: Choice, rule: Rule | None, recipe: Recipe) -> str | None:
    """Why the policy keeps a gemm in high precision; None if it does not."""
    if choice.fp8 == "off":
        if rule is not None and rule.kind is not None:
            return site.kind
        why = choice.label if rule is not None and rule.name else f"policy: {choice.label}"
        by_size = rule is not None and rule.where is not None
        return f"{why}: {site.n} x {site.k}, {site.m} rows" if by_size else why
    if recipe.override_linear_precision[GEMMS.index(site.gemm)]:
        if recipe.name == "rowwise_with_gw_hp" and site.gemm == "wgrad":
            return f"recipe {recipe.name} keeps {site.gemm}"
        return f"override_linear_precision keeps {site.gemm}"
    return None


def _difference(before: Recipe, after: Recipe, why: str) -> tuple[str, ...]:
    """A line with the settings that `after` has and `before` has not, if there are any:
    "current_scaling=(False, True, False): why". Those that the recipe does not look at are no difference."""
    names = [field.name for field in fields(Recipe)]
    names = [x for x in names if getattr(before, x) != getattr(after, x)]
    names = [x for x in names if x not in SETTINGS or SETTINGS[x].matters(after)]
    told = [f"{'recipe' if name == 'name' else name}={getattr(after, name)!r}" for name in names]
    return (f"{', '.join(told)}: {why}",) if told else ()
