"""What ``torch.compile(model, backend="fp8", mode=..., options={...})`` hands us, validated.

Our keys are those of OURS. A key of torch._inductor.config is passed on to Inductor. Any other key is an
OptionError (a ValueError) that lists near matches. Nothing is compiled before all options are valid.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_origin

from ..devices import catalog
from ..errors import OptionError, StrictError, did_you_mean, near, one_of
from ..logs import get_logger, say_once
from . import peers
from .policy import Policy, Rule, load, preceded
from .recipe import SETTINGS, Recipe
from .settings import boolean

logger = get_logger(__name__)

OURS = ("policy", "exclude", "device", "eval", "save", "recipe", *SETTINGS, "strict")
FUNCTION = "policy function"  # the rule that stands for it in reports
_PASSES = ("use_joint_graph_passes", "use_post_grad_passes")  # Inductor's, which do our work


@dataclass(frozen=True)
class Options:
    """`inductor` are config patches for compile_fx: dotted names such as "triton.cudagraphs" -> value.
    `choose(module, name)` says of each module with parameters of its own whether its matmuls may be FP8."""

    policy: Policy
    strict: bool = False
    inductor: dict[str, Any] = field(default_factory=dict)
    choose: Callable[[Any, str], Any] | None = None

    @property
    def recipe(self) -> Recipe:
        """The recipe of every matmul to which no rule gives another."""
        return self.policy.recipe

    def warn(self, message: str) -> None:
        """A warning, said once; StrictError with `strict`."""
        if self.strict:
            raise StrictError(f"{message} (strict=True)")
        say_once(logger, logging.WARNING, message)

    def without(self, parameters: Sequence[str]) -> Options:
        """The same, with the matmuls of these parameters in high precision."""
        # this rule is not the user's: nothing is said where it fits none
        policy, own = self.policy, self.policy.own or 0
        names = "|".join(map(re.escape, parameters)) or "(?!)"
        rule = Rule(name=FUNCTION, parameter=f"re:{names}", fp8="off")
        rules = (*policy.rules[:own], rule, *policy.rules[own:])
        labels = (*policy.labels[:own], FUNCTION, *policy.labels[own:])
        return dataclasses.replace(self, policy=dataclasses.replace(policy, rules=rules, labels=labels))


def parse(options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
    """Validate `options` and `mode`. Inductor's patches are the mode's, overridden by the options'.

    "-" in a key is read as "_", as torch.compile does. Raises OptionError.
    """
    if options is not None and not isinstance(options, Mapping):
        raise OptionError.of("options", options, "a mapping from option names to values")
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if not isinstance(key, str):
            raise OptionError(f"fp8 option names are strings; got {key!r} ({type(key).__name__}).")
        name = key.replace("-", "_")
        if name in ours or name in theirs:
            raise OptionError(f"fp8 option {name!r} is given twice, with {key!r}.")
        (ours if name in OURS else theirs)[name] = value
    ours = {**_spelled(ours.pop("recipe"), ours), **ours} if isinstance(ours.get("recipe"), Recipe) else ours
    strict, excluded = ours.pop("strict", False), _exclusions(ours.pop("exclude", ()))
    boolean("strict", strict)
    settings = {name: ours.pop(name) for name in ("device", "eval", "save") if name in ours}
    given_policy = ours.pop("policy", None)
    choose = given_policy if callable(given_policy) else None
    policy = load(None if choose is not None else given_policy)
    _ = policy.timeline  # raises where a share of all steps is meant, and nobody says how many there are
    policy = preceded(policy, excluded)
    inductor = {**_mode_patches(mode), **_inductor_patches(theirs)}
    # checks each option under its own name; the policy checks all of them together with its recipe
    recipe = ours.get("recipe", "tensorwise")
    named = isinstance(recipe, str) and recipe in policy.recipes
    Recipe("tensorwise" if named else recipe, **{name: ours[name] for name in SETTINGS if name in ours})
    policy = dataclasses.replace(policy.with_defaults(**ours), **settings)
    if policy.device is not None:
        catalog.find(policy.device)
    for text in (*_without_effect(policy, ours), *policy.without_effect()):
        say_once(logger, logging.WARNING, text)
    return Options(policy, strict, inductor, choose)


def _without_effect(policy: Policy, options: Mapping[str, Any]) -> list[str]:
    """A message about options that no recipe of the policy looks at. What one cannot do, `Recipe` refuses."""
    given = ((name, value) for name, value in options.items() if name in SETTINGS)
    unused = [name for name, value in given if SETTINGS[name].ignored(value, *policy.possible)]
    names = ", ".join(map(repr, unused))
    return [f"fp8 option {names}: no effect with recipe={policy.recipe.name!r}"] if unused else []


def _spelled(recipe: Recipe, beside: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a Recipe stands for: its name, and what differs from the defaults of that name."""
    default = Recipe(recipe.name)
    settings = {name: getattr(recipe, name) for name in SETTINGS}
    settings = {name: value for name, value in settings.items() if value != getattr(default, name)}
    twice = [name for name in settings if name in beside]
    if twice:
        raise OptionError(f"fp8 option {twice[0]!r} is given twice: in the recipe, and on its own.")
    return {"recipe": recipe.name, **settings}


def _exclusions(given: Any) -> tuple[Rule, ...]:
    """Rules that come before all others: modules of these names, and all in them, stay in high precision."""
    names = [given] if isinstance(given, str) else given
    listed = isinstance(names, (list, tuple, set, frozenset))
    if not listed or not all(isinstance(name, str) and name for name in names):
        raise OptionError.of(
            "exclude", given, "a list of names of modules, such as ['lm_head', 'layers.0', '*.router']"
        )
    rules = []
    for name in dict.fromkeys(names):
        globs = (name,) if name.startswith("re:") else (name, f"*.{name}", f"{name}.*", f"*.{name}.*")
        rules.append(Rule(name=f"exclude {name}"[:60], module=globs, fp8="off"))
    return tuple(rules)


def _mode_patches(mode: str | None) -> dict[str, Any]:
    if mode is None or mode == "default":
        return {}
    from .. import compat  # here, because it imports Dynamo

    # a mode without joint-graph passes ("lite") leaves no place for FP8 to happen
    every = compat.inductor.inductor_modes()
    modes = {name: given for name, given in every.items() if all(given.get(key, True) for key in _PASSES)}
    return dict(modes[one_of("mode", mode, modes)])


def _inductor_patches(given: dict[str, Any]) -> dict[str, Any]:
    if not given:
        return {}
    from .. import compat

    current = compat.inductor.inductor_config()
    for key, value in given.items():
        if key not in current:
            error = OptionError(f"unknown fp8 option {key!r} (value {value!r}).{_meant(key, current)}")
            error.key, error.value = key, value
            raise error
        if key in _PASSES and value is False:
            raise OptionError.of(key, value, "True (FP8 happens in these passes)")
        expected = compat.inductor.inductor_type(key)
        if not _fits(value, expected):
            wanted = getattr(expected, "__name__", str(expected))
            raise OptionError.of(key, value, f"{wanted} (an Inductor option, now {current[key]!r})")
    return dict(given)


def _meant(key: str, inductor: Collection[str]) -> str:
    """What `key` may have meant: another library's option, or a near miss among ours or Inductor's."""
    if instead := peers.option(key):
        return f" Here it is {instead}."
    if found := near(key, OURS) or near(key, inductor, least=0.85):
        return did_you_mean(found)
    return (
        f" fp8compile's options are {', '.join(OURS)}; any option of torch._inductor.config "
        "is passed on to Inductor."
    )


def _fits(value: Any, expected: Any) -> bool:
    """isinstance, as far as `expected` allows: generics are not checked (torch's wrapper does not either)."""
    if get_origin(expected) is not None or not isinstance(expected, type):
        return True
    whole = expected is float and isinstance(value, int) and not isinstance(value, bool)
    return whole or isinstance(value, expected)
