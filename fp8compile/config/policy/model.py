"""What a policy is: rules in order, named recipes, defaults. Plain frozen dataclasses that check themselves.

The settings of a recipe are read off `Recipe`'s own fields, so that a field added there is a key of rules, `[recipes.NAME]` and
`[defaults]` without another word. `PolicyFile` is one file as it is written; `Policy` is what decides: the file's rules, those
of the policies that it extends, and every recipe resolved. pydantic validates files by these classes and derives the JSON
Schema from them, but nothing here needs it.

A setting is looked up in the rule, in the named recipe, in the options given beside the policy, in `[defaults]`, in `Recipe`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from ...errors import OptionError, describe, near, one_of
from ..recipe import RECIPES, Recipe
from . import match, patterns
from .condition import Where
from .errors import LONGEST_NAME, PolicyError, check_name

Op = Literal["mm", "addmm", "bmm", "baddbmm"]
Gemm = Literal["fprop", "dgrad", "wgrad"]
Kind = Literal["output head", "router gate", "down projection"]
Fp8 = Literal["on", "off", "auto"]
Eval = Literal["high_precision", "fp8"]
SETTINGS: dict[str, str] = {f.name: f.name for f in dataclasses.fields(Recipe) if f.name != "name"}  # key -> field of Recipe
FIELDS: dict[str, str] = {"recipe": "name", **SETTINGS}

_MEANINGS = {
    "fp8_format": 'Formats: "hybrid" (E4M3 for activations and weights, E5M2 for gradients) or "e4m3" (for all).',
    "margin": "scale = FP8 maximum / (amax * 2^margin). An integer from 0 up, or three: for inputs, weights, gradients. "
    "Default: (0, 0, 11) with delayed scaling, (0, 0, 3) with e4m3; 0 for whatever is scaled by its own amax.",
    "amax_history_len": "Delayed scaling: how many amaxes are remembered. An integer from 1 up.",
    "amax_compute_algo": 'Delayed scaling: which of the remembered amaxes gives the scale, "max" or "most_recent".',
    "interval": "Delayed scaling: the scale is computed anew every so many steps. An integer from 1 up.",
    "override_linear_precision": "(fprop, dgrad, wgrad): true keeps that gemm in high precision.",
    "reduce_amax": "Delayed scaling: one all-reduce (maximum) of amaxes over all ranks, or those of the group of this name.",
    "recast_weights": "Cast weights again in backward instead of keeping their transposed FP8 copies.",
    "current_scaling": "Delayed scaling: (inputs, weights, gradients): true scales that tensor by its current amax.",
    "on_overflow": 'Delayed scaling, after an amax far beyond its history: "current" (use it in the next step) or "saturate".',
    "power_of_2_scale": "Round scales down to powers of two. Default: true for blockwise and mxfp8.",
    "fp8_encoding": 'FP8 encodings: "auto" (the device\'s), "ocp" (NVIDIA, MI350) or "fnuz" (MI300).',
    "use_fast_accum": "(fprop, dgrad, wgrad): the tensor cores' fast accumulation, less exact.",
}
_RECIPE_MEANING = "A built-in recipe (" + ", ".join(map(repr, RECIPES)) + ") or the NAME of a [recipes.NAME] table."
_POLICY_MEANING = "Which matmuls of a model become FP8, and how."
_CONFIG: dict[str, Any] = {"extra": "forbid"}


def _key(meaning: str, default: Any = None) -> Any:
    return field(default=default, metadata={"description": meaning})


def _check_settings(self: Any) -> None:
    for key, value in self.settings.items():
        try:
            checked = getattr(Recipe("tensorwise", **{SETTINGS[key]: value}), SETTINGS[key])  # takes all of them
        except OptionError as error:
            raise PolicyError(str(error).removeprefix("fp8 option "), key, value) from None
        object.__setattr__(self, key, checked)  # as Recipe spells it


if TYPE_CHECKING:

    @dataclass(frozen=True)
    class Settings:
        """The settings of a recipe, None where not given."""

        def __init__(self, **settings: Any) -> None: ...
        def check_settings(self) -> None: ...
        @property
        def settings(self) -> dict[str, Any]: ...
else:
    _HINTS = get_type_hints(Recipe)
    Settings = make_dataclass(
        "Settings",
        [(key, _HINTS[name] | None, _key(_MEANINGS.get(key, f"{key} of the recipe."))) for key, name in SETTINGS.items()],
        frozen=True,
        kw_only=True,
        namespace={
            "__doc__": "The settings of a recipe, None where not given.",
            "settings": property(lambda self: {key: getattr(self, key) for key in SETTINGS if getattr(self, key) is not None}),
            "check_settings": _check_settings,
        },
    )


@dataclass(frozen=True, kw_only=True)
class Defaults(Settings):
    """`[defaults]`: for whatever no rule gives another."""

    __pydantic_config__ = {**_CONFIG, "title": "[defaults]"}

    recipe: str | None = _key(_RECIPE_MEANING)

    def __post_init__(self) -> None:
        check_name("recipe", self.recipe, "the name of a recipe")
        self.check_settings()


@dataclass(frozen=True, kw_only=True)
class NamedRecipe(Settings):
    """`[recipes.NAME]`: a recipe with a name, for rules and `[defaults]`."""

    __pydantic_config__ = {**_CONFIG, "title": "[recipes.NAME]"}

    base: str | None = _key("The recipe that this one varies: built-in, or another NAME. Default: " + repr(Recipe().name) + ".")

    def __post_init__(self) -> None:
        check_name("base", self.base, "the name of a recipe")
        self.check_settings()


@dataclass(frozen=True, kw_only=True)
class Rule(Settings):
    """One `[[rules]]`: conditions, which have to hold all, and what becomes of the gemms for which they do.

    Where a key takes one or several values, any of them may fit. They are kept as tuples of strings, None if not given.
    """

    __pydantic_config__ = {**_CONFIG, "title": "[[rules]]"}

    name: str | None = _key("A label for reports.")
    module: str | tuple[str, ...] | None = _key('Glob for the module\'s name ("*" matches dots too), or "re:" and a regex.')
    parameter: str | tuple[str, ...] | None = _key('Glob for the name of the weight, or "re:" and a regex.')
    module_class: str | tuple[str, ...] | None = _key("Glob for the class of the module, or of any module around it.")
    op: Op | tuple[Op, ...] | None = _key("The operator of forward: " + ", ".join(get_args(Op)) + ".")
    gemm: Gemm | tuple[Gemm, ...] | None = _key("fprop (the forward), dgrad (the input's gradient), wgrad (the weight's).")
    where: str | None = _key("A condition on m, n, k of the forward out[m, n] = a[m, k] @ b[k, n]: 'n < 128 or k < 128'.")
    blocks: str | tuple[str, ...] | None = _key('"first 2", "last 1": position among the repeated blocks of the model.')
    layers: str | tuple[str, ...] | None = _key('"first 1", "last 1": position among the weights, in the order of forward.')
    kind: Kind | tuple[Kind, ...] | None = _key("What the graph shows it to be: " + ", ".join(map(repr, get_args(Kind))) + ".")
    fp8: bool | Fp8 = _key(
        "on (or true): FP8. off (or false): high precision. auto: FP8 if it is estimated to be faster on this device.", "auto"
    )
    recipe: str | None = _key(_RECIPE_MEANING)

    def __post_init__(self) -> None:
        check_name("name", self.name, f"a line of 1 to {LONGEST_NAME} characters")
        for key in ("module", "parameter", "module_class"):
            for pattern in self._several(key, "a glob, or a list of globs"):
                patterns.check(key, pattern)
        for key, allowed in (("op", get_args(Op)), ("gemm", get_args(Gemm)), ("kind", get_args(Kind))):
            for value in self._several(key, "one of " + ", ".join(map(repr, allowed)) + ", or a list of them"):
                one_of(key, value, allowed, PolicyError)
        for key in ("blocks", "layers"):
            for value in self._several(key, "such as 'first 2' or 'last 1', or a list of them"):
                if not match.SPAN.fullmatch(value):
                    meant = re.match(r"\s*(first|last)\s*([1-9]\d{0,4})?", value.lower())
                    hint = [f"{meant[1]} {meant[2] or 1}"] if meant else []
                    raise PolicyError.of(key, value, "'first N' or 'last N' with N from 1 to 99999", hint)
        if self.where is not None:
            object.__setattr__(self, "where", self.condition.text)
        fp8 = {True: "on", False: "off"}[self.fp8] if isinstance(self.fp8, bool) else self.fp8
        object.__setattr__(self, "fp8", one_of("fp8", fp8, get_args(Fp8), PolicyError))
        check_name("recipe", self.recipe, "the name of a recipe")
        self.check_settings()

    def __repr__(self) -> str:
        return brief(self)

    def _several(self, key: str, allowed: str) -> tuple[str, ...]:
        """The values of a key that takes one or a list, which is what it holds from now on."""
        given = getattr(self, key)
        if given is None:
            return ()
        values = given if isinstance(given, (tuple, list)) else (given,)
        if not values or not all(isinstance(value, str) for value in values):
            raise PolicyError.of(key, given, allowed)
        object.__setattr__(self, key, tuple(values))
        return tuple(values)

    @cached_property
    def condition(self) -> Where:
        """`where`, compiled."""
        return Where(self.where)  # type: ignore[arg-type]

    @property
    def conditions(self) -> dict[str, Any]:
        """The conditions that are given."""
        return {key: getattr(self, key) for key in match.CONDITIONS if getattr(self, key) is not None}

    def matches(self, site: match.Site) -> bool:
        """Whether all conditions hold for `site`."""
        return match.matches(self, site)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`[schedule]`: steps are optimizer steps. High precision before `warmup_steps` and from `cooldown_at` on."""

    __pydantic_config__ = {**_CONFIG, "title": "[schedule]"}

    warmup_steps: int = _key("Train in high precision for so many steps first.", 0)
    cooldown_at: int | None = _key("The step from which training is in high precision again.")

    def __post_init__(self) -> None:
        for key, value, least in (("warmup_steps", self.warmup_steps, 0), ("cooldown_at", self.cooldown_at, 1)):
            if value is None and key == "cooldown_at":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise PolicyError.of(key, value, f"an integer >= {least}")
        if self.cooldown_at is not None and self.cooldown_at <= self.warmup_steps:
            allowed = f"greater than warmup_steps ({self.warmup_steps}): FP8 is used between the two"
            raise PolicyError.of("cooldown_at", self.cooldown_at, allowed)


@dataclass(frozen=True, kw_only=True)
class PolicyFile:
    """A policy as it is written, alone: names of recipes are not looked up yet."""

    __pydantic_config__ = {**_CONFIG, "title": "fp8compile policy", "json_schema_extra": {"description": _POLICY_MEANING}}

    extends: str | None = _key('The policy whose rules come after these: a shipped one, a path, or "none". Default: "default".')
    device: str | None = _key('Decide as for this device, such as "h100". Default: the one that is used.')
    eval: Eval | None = _key("Precision of evaluation. Default: high_precision.")
    defaults: Defaults = _key("For whatever no rule gives another.", Defaults())
    recipes: dict[str, NamedRecipe] = field(default_factory=dict, metadata={"description": "Recipes with a name."})
    rules: tuple[Rule, ...] = _key("The first whose conditions hold decides. Without one: FP8 where it pays.", ())
    schedule: Schedule | None = _key("High precision at the beginning and at the end of training.")

    def __post_init__(self) -> None:
        for key in ("extends", "device"):
            check_name(key, getattr(self, key), "a name", longest=4096)
        if self.eval is not None:
            one_of("eval", self.eval, get_args(Eval), PolicyError)
        seen: dict[str, int] = {}
        always = None
        for i, rule in enumerate(self.rules):
            conditions = repr(rule.conditions)
            if always is not None or conditions in seen:
                first = label(self.rules, seen[conditions] if always is None else always)
                why = "the same conditions" if always is None else "no conditions, so it decides about everything"
                raise PolicyError(f"this rule is never reached: {first}, before it, has {why}.").under("rules", i)
            seen[conditions] = i
            always = None if rule.conditions else i

    @classmethod
    def build(cls, data: Mapping[str, Any]) -> PolicyFile:
        """From the tables of a TOML file that is known to be well-formed: a shipped one."""
        tables: dict[str, Any] = dict(data)
        tables["rules"] = tuple(Rule(**rule) for rule in data.get("rules", ()))
        tables["recipes"] = {name: NamedRecipe(**recipe) for name, recipe in data.get("recipes", {}).items()}
        tables["defaults"] = Defaults(**data.get("defaults", {}))
        tables["schedule"] = Schedule(**data["schedule"]) if "schedule" in data else None
        return cls(**tables)


@dataclass(frozen=True)
class Policy:
    """What decides about every gemm. Made by `load`, or in Python: ``Policy(rules=(Rule(module="*.mlp.*", fp8="off"),))``.

    The first `own` rules are the user's (None: all), the others came with what it extends. `source` says where it came from,
    for messages; `labels` are the rules' names in reports. Equal, and hashed, by what it decides.
    """

    rules: tuple[Rule, ...] = ()
    recipes: Mapping[str, NamedRecipe] = field(default_factory=dict)
    defaults: Defaults = Defaults()
    schedule: Schedule | None = None
    eval: str = "high_precision"
    device: str | None = None
    source: str = field(default="Python", compare=False)
    own: int | None = field(default=None, compare=False)
    labels: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        for group, kind in ((self.rules, Rule), (self.recipes.values(), NamedRecipe), ((self.defaults,), Defaults)):
            for part in group:
                if not isinstance(part, kind):
                    raise PolicyError(f"expected a {kind.__name__}; got {describe(part)}. load() takes dicts.")
        one_of("eval", self.eval, get_args(Eval), PolicyError)
        check_name("device", self.device, "the name of a device", longest=4096)
        if isinstance(self.rules, Rule):
            raise PolicyError.of("rules", self.rules, "a sequence of Rules: rules=(rule,)")
        if len(self.labels) != len(self.rules):
            object.__setattr__(self, "labels", tuple(label(self.rules, i) for i in range(len(self.rules))))
        for name in self.recipes:
            if name in RECIPES:
                text = f"a recipe called {name!r} is built in; give this one another name."
                raise PolicyError(text, name).under("recipes", name)
            self._chain(name, ("recipes", name, "base"))
        _ = self._effective

    def __repr__(self) -> str:
        return brief(self)

    def choose(self, site: match.Site) -> match.Choice:
        """The first rule whose conditions hold decides; without one, the default recipe where it pays."""
        for i, rule in enumerate(self.rules):
            if rule.matches(site):
                return match.Choice(str(rule.fp8), self._effective[i], i, self.labels[i])
        return match.Choice("auto", self.recipe, None, "")

    @property
    def recipe(self) -> Recipe:
        """Of whatever no rule gives another."""
        return self._effective[-1]

    @cached_property
    def possible(self) -> tuple[Recipe, ...]:
        """Every recipe that a choice may have."""
        always = next((i for i, rule in enumerate(self.rules) if not rule.conditions), len(self.rules))
        return tuple(dict.fromkeys(self._effective[: always + 1]))

    @property
    def delayed(self) -> bool:
        """Whether some choice may need scaling state."""
        return any(recipe.delayed for recipe in self.possible)

    def owns(self, rule: int | None) -> bool:
        """Whether a rule, by its position, is the user's own and did not come with what the policy extends."""
        return rule is not None and (self.own is None or rule < self.own)

    def with_defaults(self, **settings: Any) -> Policy:
        """The policy with `settings` (keys of `[defaults]`) instead of what its `[defaults]` say of them.

        A rule's own settings, and those of a named recipe, stay. Raises OptionError.
        """
        if "name" in settings:
            settings["recipe"] = settings.pop("name")
        unknown = [key for key in settings if key not in FIELDS]
        if unknown:
            raise PolicyError.of("recipe setting", unknown[0], "one of " + ", ".join(FIELDS), near(unknown[0], FIELDS))
        return dataclasses.replace(self, defaults=Defaults(**{**given(self.defaults), **settings}))

    def unmatched(
        self, sites: Sequence[match.Site], modules: Collection[str], parameters: Collection[str], whole: bool
    ) -> list[str]:
        """What is wrong with the user's own rules that decided about none of `sites`; see `match.unmatched`."""
        return match.unmatched(self, sites, modules, parameters, whole)

    @cached_property
    def key(self) -> str:
        """All that it decides by, as text, for cache keys. No path is in it."""
        return json.dumps([self._written, [dataclasses.astuple(recipe) for recipe in self._effective]])

    @cached_property
    def _written(self) -> str:
        parts = [
            [given(rule) for rule in self.rules],
            {name: given(self.recipes[name]) for name in sorted(self.recipes)},
            given(self.defaults),
            given(self.schedule) if self.schedule is not None else None,
            [self.eval, self.device],
        ]
        return json.dumps(parts, sort_keys=True)

    def __hash__(self) -> int:
        return hash(self._written)

    @cached_property
    def _effective(self) -> tuple[Recipe, ...]:
        """The recipe of each rule, and last the default one."""
        default = self._resolve(None, {}, ("defaults",))
        rules = enumerate(self.rules)
        return (*(self._resolve(rule.recipe, self._settings_of(rule, i), ("rules", i)) for i, rule in rules), default)

    def _settings_of(self, rule: Rule, i: int) -> dict[str, Any]:
        """A rule's settings. Where a policy that was extended asks for current scaling, that adds to what the user asks for
        everywhere; a rule of the user's own replaces it."""
        settings, asked = dict(rule.settings), self.defaults.settings.get("current_scaling")
        if asked is not None and "current_scaling" in settings and not self.owns(i):
            settings["current_scaling"] = tuple(a or b for a, b in zip(asked, settings["current_scaling"], strict=True))
        return settings

    def _resolve(self, name: str | None, settings: Mapping[str, Any], path: tuple[str | int, ...]) -> Recipe:
        named_at = path if name is not None else ("defaults",)
        built_in, named = self._chain(name or self.defaults.recipe or Recipe().name, (*named_at, "recipe"))
        merged = {**self.defaults.settings, **named, **settings}
        try:
            return Recipe(name=built_in, **{SETTINGS[key]: value for key, value in merged.items()})
        except OptionError as error:  # settings that are fine one by one
            raise PolicyError(str(error).removeprefix("fp8 option "), error.key, error.value, path) from None

    def _chain(self, name: str, path: tuple[str | int, ...]) -> tuple[str, dict[str, Any]]:
        """The built-in recipe at the end of a chain of named ones, and the settings on the way, the nearest first."""
        settings: dict[str, Any] = {}
        seen: dict[str, None] = {}
        while name not in RECIPES:
            if name in seen:
                circle = " -> ".join(repr(one) for one in (*list(seen)[:8], name))
                raise PolicyError(f"recipes go in a circle: {circle}.", str(path[-1]), name, path)
            seen[name] = None
            if name not in self.recipes:
                known = (*RECIPES, *self.recipes)
                where = path if len(seen) == 1 else ("recipes", list(seen)[-2], "base")
                shown = ", ".join(map(repr, known[:20])) + (", ..." if len(known) > 20 else "")
                error = PolicyError.of("recipe" if len(seen) == 1 else "base", name, f"one of {shown}", near(name, known))
                raise error.under(*where)
            settings = {**self.recipes[name].settings, **settings}
            name = self.recipes[name].base or Recipe().name
        return name, settings


def label(rules: Sequence[Rule], i: int) -> str:
    """What reports and messages call a rule: its name, or "rule 3"."""
    return rules[i].name or f"rule {i + 1}"


def brief(table: Any) -> str:
    """A repr with what differs from the defaults."""
    plain = type(table)()
    shown = [f for f in dataclasses.fields(table) if f.compare and getattr(table, f.name) != getattr(plain, f.name)]
    return f"{type(table).__name__}({', '.join(f'{f.name}={getattr(table, f.name)!r}' for f in shown)})"


def given(table: Any) -> dict[str, Any]:
    """What a table says: its keys that are not None."""
    return {f.name: getattr(table, f.name) for f in dataclasses.fields(table) if getattr(table, f.name) is not None}
