"""The description of a setting of a recipe: its meaning, its values, and the recipes for which it matters.

    interval: int = setting(1, "How many steps lie between updates.", positive, _delayed)

`Recipe` checks its values with it. Options, keys of policies, JSON Schema and reference page use it, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import OptionError, one_of

Check = Callable[[str, Any], Any]  # (key, value) -> the value as it is stored; raises OptionError
MOST = 1 << 20


@dataclass(frozen=True)
class Allowed:
    """A check, and in words the values that it allows."""

    words: str
    check: Check

    def __call__(self, key: str, value: Any) -> Any:
        return self.check(key, value)


@dataclass(frozen=True)
class Setting:
    """`matters(recipe)`: whether the setting changes what a recipe does. `feature`: the folder of `features`
    that it belongs to, "" for the core."""

    meaning: str
    allowed: Allowed
    matters: Callable[[Any], bool]
    feature: str = ""

    def ignored(self, value: Any, *recipes: Any) -> bool:
        """Whether somebody asks for a value that none of these recipes looks at."""
        return value not in (False, "auto") and not any(map(self.matters, recipes))


def every(recipe: Any) -> bool:
    return True


def setting(
    default: Any, meaning: str, allowed: Allowed, matters: Callable[[Any], bool] = every, feature: str = ""
) -> Any:
    """A field of a recipe."""
    described = Setting(meaning, allowed, matters, feature)
    return dataclasses.field(default=default, metadata={"setting": described})


def settings_of(recipe: type) -> Mapping[str, Setting]:
    """The settings of a class of recipes, by name."""
    return {f.name: f.metadata["setting"] for f in dataclasses.fields(recipe) if "setting" in f.metadata}


# -- checks --


@partial(Allowed, "bool")
def boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError.of(key, value, "True or False")
    return value


def integer(key: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer from `least` to `most`."""
    # bool is an int to Python; margin=True is a mistake to everybody else
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError.of(key, value, f"an integer >= {least}")
    if most is not None and value > most:
        raise OptionError.of(key, value, f"an integer <= {most}")
    return value


@partial(Allowed, "an integer >= 1")
def positive(key: str, value: Any) -> int:
    return integer(key, value, 1, MOST)


def one(*allowed: str) -> Allowed:
    return Allowed(", ".join(map(repr, allowed)), lambda key, value: one_of(key, value, allowed))


def in_any_case(*allowed: str) -> Allowed:
    """One of some words, stored in lower case."""

    def check(key: str, value: Any) -> str:
        known = isinstance(value, str) and value.lower() in allowed
        return one_of(key, value.lower() if known else value, allowed)

    return Allowed(", ".join(map(repr, allowed)), check)


def unless_none(allowed: Allowed) -> Allowed:
    """None stands for the recipe's own value."""
    return Allowed(allowed.words, lambda key, value: None if value is None else allowed(key, value))


@partial(Allowed, "bool, 'auto'")
def switch(key: str, value: Any) -> bool | str:
    if not isinstance(value, bool) and value != "auto":
        raise OptionError.of(key, value, "True, False or 'auto'")
    return value


def three_bools(meaning: str) -> Allowed:
    def check(key: str, value: Any) -> tuple[bool, bool, bool]:
        three = isinstance(value, (tuple, list)) and len(value) == 3
        if not three or not all(isinstance(x, bool) for x in value):
            raise OptionError.of(key, value, f"three bools {meaning}")
        return value[0], value[1], value[2]

    return Allowed("three bools", check)


@partial(Allowed, "an integer from 0 to 64, or three")
def margins(key: str, value: Any) -> int | tuple[int, int, int]:
    """One integer, or three where they differ."""
    if not isinstance(value, (tuple, list)):
        return integer(key, value, 0, 64)
    if len(value) != 3:
        raise OptionError.of(key, value, "an integer, or three: for inputs, weights and gradients")
    a, b, c = (integer(key, each, 0, 64) for each in value)
    return a if a == b == c else (a, b, c)


def group(*others: bool) -> Allowed:
    """A process group, also a DeviceMesh's, stored by its name. `others` stand for all ranks, or for none."""
    words = ", ".join({True: "True (all ranks)", False: "False"}[other] for other in others)

    def check(key: str, value: Any) -> bool | str:
        allowed = (
            f"{words}, a torch.distributed process group or its name, a dimension of a "
            "DeviceMesh: 'dp' or (mesh, 'dp')"
        )
        given = value
        mesh, *dimension = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given,)
        if hasattr(mesh, "get_group"):
            try:
                given = mesh.get_group(*dimension)
            except (RuntimeError, KeyError, ValueError) as error:
                raise OptionError.of(key, given, f"{allowed} ({error})") from None
        name = getattr(given, "group_name", given)
        if name in others and isinstance(name, bool) or isinstance(name, str) and name:
            return name
        raise OptionError.of(key, given, allowed)

    return Allowed(f"{'bool, ' * (True in others)}a group or its name", check)
