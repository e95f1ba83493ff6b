"""A policy as the text of a TOML file."""

from __future__ import annotations

import json
from typing import Any

from .policy_files import unreached
from .policy_tables import Policy, given


def to_toml(policy: Policy) -> str:
    """A file that decides as the policy does: with its rules, also those of policies that it extends, but for
    those that are never reached, which a file may not have."""
    first = {"extends": "none", **{key: getattr(policy, key) for key in ("eval", "save", "device")}}
    tables = [(f"[recipes.{json.dumps(name)}]", given(recipe)) for name, recipe in policy.recipes.items()]
    tables += [("[defaults]", given(policy.defaults))]
    singles = {"[schedule]": policy.schedule, "[guard]": policy.guard}
    tables += [(title, given(one)) for title, one in singles.items() if one is not None]
    hidden = unreached(policy.rules)
    tables += [("[[rules]]", given(rule)) for i, rule in enumerate(policy.rules) if i not in hidden]
    parts = [_lines({key: value for key, value in first.items() if value is not None})]
    return "\n\n".join([*parts, *(f"{title}\n{_lines(values)}".rstrip() for title, values in tables)]) + "\n"


def _lines(values: dict[str, Any]) -> str:
    """JSON of strings, numbers, booleans and lists of them is TOML, too."""
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
