"""A policy as the text of a TOML file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .policy_tables import Policy, Rule, given


def to_toml(policy: Policy) -> str:
    """A file that decides as the policy does: with its rules, also those of policies that it extends, but for
    those that are never reached, which a file may not have."""
    first = {"extends": "none", **{key: getattr(policy, key) for key in ("eval", "save", "device")}}
    tables = [(f"[recipes.{json.dumps(name)}]", given(recipe)) for name, recipe in policy.recipes.items()]
    tables += [("[defaults]", given(policy.defaults))]
    singles = {"[schedule]": policy.schedule, "[guard]": policy.guard}
    tables += [(title, given(one)) for title, one in singles.items() if one is not None]
    tables += [("[[rules]]", given(rule)) for rule in _reached(policy)]
    parts = [_lines({key: value for key, value in first.items() if value is not None})]
    return "\n\n".join([*parts, *(f"{title}\n{_lines(values)}".rstrip() for title, values in tables)]) + "\n"


def _reached(policy: Policy) -> Iterator[Rule]:
    seen: set[str] = set()  # conditions of rules that are always active
    for rule in policy.rules:
        if seen.isdisjoint((repr({}), repr(rule.conditions))):
            yield rule
        if rule.during is None:
            seen.add(repr(rule.conditions))


def _lines(values: dict[str, Any]) -> str:
    """JSON of strings, numbers, booleans and lists of them is TOML, too."""
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
