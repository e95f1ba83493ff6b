"""What a policy is: rules in order, named recipes, defaults. Frozen dataclasses that `validation` checks.

The settings of a recipe are read off `Recipe`'s own fields: a field that is added there is also a key of
rules, `[recipes.NAME]` and `[defaults]`. `Policy` decides: it has the rules of a file, those of the policies
that the file extends, and every recipe resolved.

A setting is looked up in this order: the rule, the named recipe, the options given beside the policy,
`[defaults]`, `Recipe`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args, get_type_hints

from ...errors import OptionError, near
from .. import peers
from ..operators import MATMULS
from ..recipe import RECIPES, SETTINGS, Recipe
from . import match, patterns, windows
from .condition import checked
from .guard_table import GuardTable
from .policy_errors import PolicyError
from .validation import (
    LONGEST_NAME,
    choice,
    key,
    line,
    named_tables_of,
    several,
    table,
    table_of,
    tables_of,
    whole,
)

Gemm = Literal["fprop", "dgrad", "wgrad"]
Kind = Literal["output head", "router gate", "down projection"]
Fp8 = Literal["on", "off", "auto"]
Eval = Literal["high_precision", "fp8"]
Save = Literal["auto", "fp8"]
if TYPE_CHECKING:
    Op = str
else:
    Op = Literal[tuple(MATMULS)]
T = TypeVar("T")
Several: TypeAlias = T | tuple[T, ...] | None

_RECIPE_MEANING = (
    f"A built-in recipe ({', '.join(map(repr, RECIPES))}), or the NAME of a [recipes.NAME] table."
)
_NAME_OF_RECIPE = line("the name of a recipe")


def _span(name: str, given: Any) -> str:
    text = given if isinstance(given, str) else ""
    if not match.SPAN.fullmatch(text):
        meant = re.match(r"\s*(first|last)\s*([1-9]\d{0,4})?", text.lower())
        hint = [f"{meant[1]} {meant[2] or 1}"] if meant else []
        allowed = "'first N' or 'last N' with N from 1 to 99999, or a list of them"
        raise PolicyError.of(name, given, allowed, hint)
    return text


def _switch(name: str, given: Any) -> str:
    return choice(Fp8)(name, {True: "on", False: "off"}[given] if isinstance(given, bool) else given)


def _brief(table: Any) -> str:
    """A repr with the fields that differ from their defaults."""
    plain, names = type(table)(), [f.name for f in dataclasses.fields(table) if f.compare]
    shown = [name for name in names if getattr(table, name) != getattr(plain, name)]
    return f"{type(table).__name__}({', '.join(f'{name}={getattr(table, name)!r}' for name in shown)})"


_GLOBS = several(patterns.check)
_HINTS = get_type_hints(Recipe)
_FIELDS = [(name, _HINTS[name] | None, key(x.meaning, x.allowed.check)) for name, x in SETTINGS.items()]
_GIVEN = cached_property(lambda self: {k: v for k, v in given(self).items() if k in SETTINGS})
# the settings of a recipe, None where not given
Settings: Any = dataclasses.make_dataclass(
    "Settings", _FIELDS, namespace={"settings": _GIVEN}, frozen=True, kw_only=True
)


@table("[defaults]")
@dataclass(frozen=True, kw_only=True)
class Defaults(Settings):
    """`[defaults]`: the settings where no rule gives others."""

    recipe: str | None = key(_RECIPE_MEANING, _NAME_OF_RECIPE)


@table("[recipes.NAME]")
@dataclass(frozen=True, kw_only=True)
class NamedRecipe(Settings):
    """`[recipes.NAME]`: a recipe with a name, for rules and `[defaults]`."""

    base: str | None = key(
        f"The recipe that this one varies: built-in, or another NAME. Default: {Recipe().name!r}.",
        _NAME_OF_RECIPE,
    )


@table("[[rules]]")
@dataclass(frozen=True, kw_only=True, repr=False)
class Rule(Settings):
    """One `[[rules]]`: conditions, which all have to hold, and the decision for the gemms for which they do.

    If a key takes several values, one of them has to fit. They are kept as tuples of strings, None if not
    given.
    """

    name: str | None = key("A label for reports.", line(f"a line of 1 to {LONGEST_NAME} characters"))
    module: Several[str] = key(
        'Glob for the module\'s name ("*" matches dots too), or "re:" and a regex.', _GLOBS
    )
    parameter: Several[str] = key('Glob for the name of the weight, or "re:" and a regex.', _GLOBS)
    module_class: Several[str] = key("Glob for the class of the module, or of any module around it.", _GLOBS)
    op: Several[Op] = key(f"The operator of forward: {', '.join(MATMULS)}.", several(choice(Op)))
    gemm: Several[Gemm] = key(
        "fprop (the forward), dgrad (the input's gradient), wgrad (the weight's).", several(choice(Gemm))
    )
    where: str | None = key(
        "A condition on m, n, k of the forward out[m, n] = a[m, k] @ b[k, n]: 'n < 128 or k < 128'.",
        lambda name, given: checked(given),
    )
    blocks: Several[str] = key(
        '"first 2", "last 1": position among the repeated blocks of the model.', several(_span)
    )
    layers: Several[str] = key(
        '"first 1", "last 1": position among the weights, in the order of forward.', several(_span)
    )
    kind: Several[Kind] = key(
        f"What the graph shows it to be: {', '.join(map(repr, get_args(Kind)))}.", several(choice(Kind))
    )
    fp8: bool | Fp8 = key(
        "on (or true): FP8. off (or false): high precision. auto: FP8 if it is estimated to be faster "
        "on this device.",
        _switch,
        "auto",
    )
    recipe: str | None = key(_RECIPE_MEANING, _NAME_OF_RECIPE)
    during: Several[str] = key(
        'When the rule is active, in optimizer steps: "1000..", "..200", "1000..5000", or in percent of '
        'total_steps, "90%.."; "by hand": off until set_rule. Default: always.',
        windows.checked,
    )

    __repr__ = _brief

    def __post_init__(self) -> None:
        if self.during == (windows.BY_HAND,) and self.name is None:
            text = "'during': a rule that is switched by hand needs a name, for set_rule."
            raise PolicyError(text, "during", windows.BY_HAND, ("during",))

    @property
    def conditions(self) -> dict[str, Any]:
        """The conditions that are given."""
        return {key: getattr(self, key) for key in match.CONDITIONS if getattr(self, key) is not None}

    def matches(self, site: match.Site) -> bool:
        """Whether all conditions hold for `site`."""
        return all(getattr(self, key) is None or holds(self, site) for key, holds in match.CONDITIONS.items())


@table("[schedule]")
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`[schedule]`: steps are optimizer steps. High precision before `warmup_steps` and from `cooldown_at`
    on; with an empty table, by `set_precision`. It is a first rule with the name "schedule"."""

    warmup_steps: int = whole("Train in high precision for so many steps first.", least=0, default=0)
    cooldown_at: int | None = whole("The step from which training is in high precision again.", least=1)
    total_steps: int | None = whole(
        "The steps of the training, of which windows of rules may give a share.", least=1
    )

    def __post_init__(self) -> None:
        if self.cooldown_at is not None and self.cooldown_at <= self.warmup_steps:
            allowed = f"greater than warmup_steps ({self.warmup_steps}): FP8 is used between the two"
            raise PolicyError.of("cooldown_at", self.cooldown_at, allowed).under("cooldown_at")
        if self.cooldown_at is not None and self.cooldown_at >= (self.total_steps or self.cooldown_at + 1):
            allowed = f"less than total_steps ({self.total_steps})"
            raise PolicyError.of("cooldown_at", self.cooldown_at, allowed).under("cooldown_at")

    @property
    def rule(self) -> Rule | None:
        """The rule for which it stands. `total_steps` alone makes none."""
        during: tuple[str, ...] = (f"..{self.warmup_steps}",) if self.warmup_steps else ()
        during += (f"{self.cooldown_at}..",) if self.cooldown_at is not None else ()
        during = (windows.BY_HAND,) if self == Schedule() else during
        return Rule(name=windows.SCHEDULE, fp8="off", during=during) if during else None


@dataclass(frozen=True)
class Tables:
    """What a policy has, in a file and in Python."""

    rules: tuple[Rule, ...] = key(
        "The first whose conditions hold decides. Without one: FP8 where it pays.",
        tables_of(Rule, "a list of tables, each under [[rules]]"),
        (),
        minItems=0,
    )
    recipes: dict[str, NamedRecipe] = key(
        "Recipes with a name.", named_tables_of(NamedRecipe, "tables, [recipes.NAME]"), dict
    )
    defaults: Defaults = key(
        "The settings where no rule gives others.", table_of(Defaults, "a table, [defaults]"), Defaults()
    )
    schedule: Schedule | None = key(
        "High precision at the beginning and at the end of training.",
        table_of(Schedule, "a table, [schedule]"),
    )
    guard: GuardTable | None = key(
        "What `fp8compile.guard(model)` does while the model trains.",
        table_of(GuardTable, "a table, [guard]"),
    )
    eval: Eval | None = key("Precision of evaluation. Default: high_precision.", choice(Eval))
    save: Save | None = key(
        "How large tensors are kept for backward. Default: auto, as they are.", choice(Save)
    )
    device: str | None = key(
        'Decide as for this device, such as "h100". Default: the one that is used.', line("a name", 4096)
    )


@table()
@dataclass(frozen=True, repr=False)
class Policy(Tables, windows.Timed):
    """Decides about every gemm. Made by `load`, or in Python: ``Policy(rules=(Rule(module="*.mlp.*",
    fp8="off"),))``.

    The first `own` rules are the user's (None: all). The others come from the policies that it extends.
    `source` says in messages where it came from; `labels` are the rules' names in reports. Only fields that
    decide something count for == and hash.
    """

    eval: Eval = key("Precision of evaluation.", choice(Eval), "high_precision")
    save: Save = key("How large tensors are kept for backward.", choice(Save), "auto")
    source: str = field(default="Python", compare=False)
    own: int | None = field(default=None, compare=False)
    labels: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if len(self.labels) != len(self.rules):
            object.__setattr__(self, "labels", tuple(label(self.rules, i) for i in range(len(self.rules))))
        for name in self.recipes:
            if name in RECIPES:
                text = f"a recipe called {name!r} is built in; give this one another name."
                raise PolicyError(text, name).under("recipes", name)
            self._chain(name, ("recipes", name, "base"))
        for rung in self.guard.rungs if self.guard is not None else ():
            self._chain(rung, ("guard", "ladder"))
        _ = self._effective
        self._check_windows()

    __repr__ = _brief

    @staticmethod
    def load(source: Any = None) -> Policy:
        """The policy that `source` names or holds.

        None: the policy that the environment variable FP8COMPILE_POLICY names, else "default". A string that
        ends in .toml or has a separator, and any Path: a file. Another string: a shipped policy. A dict: the
        tables of a file. A Policy: itself. Raises PolicyError (a ValueError), also if a file cannot be read.
        """
        return importlib.import_module(".policy_files", __package__).load(source)  # which imports this module

    def choose(self, site: match.Site) -> match.Choice:
        """The first rule whose conditions hold decides; without one, the default recipe where it pays.
        Windows are for `during`: its policies have none."""
        for i, rule in enumerate(self.rules):
            if rule.matches(site):
                return match.Choice(str(rule.fp8), self._effective[i], i, self.labels[i])
        return match.Choice("auto", self.recipe, None, "")

    @property
    def recipe(self) -> Recipe:
        """The recipe of every gemm to which no rule gives another."""
        return self._effective[-1]

    def named(self, recipe: str) -> Recipe:
        """The recipe of a rule that names it, and gives no settings of its own."""
        return self._resolve(recipe, {}, ("guard", "ladder"))

    @cached_property
    def possible(self) -> tuple[Recipe, ...]:
        """Every recipe that a choice may have, in any set."""
        last = (i for i, rule in enumerate(self.rules) if not rule.conditions and not rule.during)
        always = next(last, len(self.rules))
        return tuple(dict.fromkeys(self._effective[: always + 1]))

    def owns(self, rule: int | None) -> bool:
        """Whether a rule, by its position, is the user's own, not one of a policy that is extended."""
        return rule is not None and (self.own is None or rule < self.own)

    def with_defaults(self, **settings: Any) -> Policy:
        """The policy with `settings` (keys of `[defaults]`) in place of those in its `[defaults]`.

        A rule's own settings, and those of a named recipe, stay. Raises OptionError.
        """
        return dataclasses.replace(self, defaults=Defaults(**{**given(self.defaults), **settings}))

    def without_effect(self) -> list[str]:
        """A message about each setting of the user's own rules that the rule's recipe does not look at."""
        found = []
        for i, rule in enumerate(self.rules):
            recipe = self._effective[i]
            for name, value in rule.settings.items() if self.owns(i) else ():
                if SETTINGS[name].ignored(value, recipe):
                    rest = f"{name!r} has no effect with recipe {recipe.name!r}"
                    found.append(f"policy {self.source}, {self.labels[i]}: {rest}")
        return found

    @cached_property
    def key(self) -> str:
        """Everything that its decisions depend on, as text, for cache keys. No path is in it."""
        parts = [
            [given(rule) for rule in self.rules],
            {name: given(recipe) for name, recipe in self.recipes.items()},
            given(self.defaults),
            given(self.schedule) if self.schedule is not None else None,
            [self.eval, self.device, self.save],
            [dataclasses.astuple(recipe) for recipe in self._effective],
        ]
        return json.dumps(parts, sort_keys=True)

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def _effective(self) -> tuple[Recipe, ...]:
        """The recipe of each rule, and last the default one."""
        default = self._resolve(None, {}, ("defaults",))
        rules = enumerate(self.rules)
        own = [self._resolve(rule.recipe, self._settings_of(rule, i), ("rules", i)) for i, rule in rules]
        return (*own, default)

    def _settings_of(self, rule: Rule, i: int) -> dict[str, Any]:
        """A rule's settings. `current_scaling` in a rule of an extended policy adds to that of `[defaults]`;
        in a rule of the user's own it replaces that."""
        settings, asked = dict(rule.settings), self.defaults.settings.get("current_scaling")
        if asked is not None and "current_scaling" in settings and not self.owns(i):
            both = zip(asked, settings["current_scaling"], strict=True)
            settings["current_scaling"] = tuple(a or b for a, b in both)
        return settings

    def _resolve(self, name: str | None, settings: Mapping[str, Any], path: tuple[str | int, ...]) -> Recipe:
        named_at = path if name is not None else ("defaults",)
        built_in, named = self._chain(name or self.defaults.recipe or Recipe().name, (*named_at, "recipe"))
        merged = {**self.defaults.settings, **named, **settings}
        try:
            return Recipe(name=built_in, **merged)
        except OptionError as error:  # settings that are valid one by one, but not together
            raise PolicyError.made_of(error, path) from None

    def _chain(self, name: str, path: tuple[str | int, ...]) -> tuple[str, dict[str, Any]]:
        """The built-in recipe at the end of a chain of named ones, and the settings, the nearest first."""
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
                allowed = peers.recipe(name) or f"one of {shown}"
                setting = str(path[-1]) if len(seen) == 1 else "base"
                raise PolicyError.of(setting, name, allowed, near(name, known)).under(*where)
            settings = {**self.recipes[name].settings, **settings}
            name = self.recipes[name].base or Recipe().name
        return name, settings


def label(rules: Sequence[Rule], i: int) -> str:
    """What reports and messages call a rule: its name, or "rule 3"."""
    return rules[i].name or f"rule {i + 1}"


def given(table: Any) -> dict[str, Any]:
    """The keys of a table that are not None, with their values."""
    found = {f.name: getattr(table, f.name) for f in dataclasses.fields(table)}
    return {name: value for name, value in found.items() if value is not None}
