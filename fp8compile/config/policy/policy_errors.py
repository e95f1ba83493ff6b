"""PolicyError: what is wrong with a policy, and where.

The parts are kept apart until the message is read. The code that checks a value knows neither its rule nor
its file; `files` adds both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import OptionError, at_most, describe, did_you_mean

Path = tuple["str | int", ...]
_SHOWN = 5  # errors of one policy
_HEADER = re.compile(r"\s*\[\[?([^\[\]]+)\]\]?\s*(?:#.*)?$")


class PolicyError(OptionError):
    """A policy that cannot be used. `text` is what is wrong, `path` leads to it: ("rules", 1, "gemm").

    `key` and `value` are what was given, `place` names the rule or table for people, `source` and `line` the
    file. Several errors of one policy are the `parts` of one exception.
    """

    def __init__(self, text: str, key: str | None = None, value: Any = None, path: Path = ()) -> None:
        super().__init__(text)
        self.text, self.key, self.value, self.path = text, key, value, path
        self.place = self.source = ""
        self.line: int | None = None
        self.parts: list[PolicyError] = []

    @classmethod
    def of(cls, key: str, value: Any, allowed: str, near: Sequence[str] = ()) -> PolicyError:
        """`allowed` completes "must be ...", `near` are suggestions."""
        return cls(f"{key!r} must be {allowed}; got {describe(value)}.{did_you_mean(near)}", key, value)

    @classmethod
    def made_of(cls, error: OptionError, path: Path = ()) -> PolicyError:
        """An error of a setting, which knows nothing of policies."""
        text = str(error).removeprefix("fp8 option ")
        return error if isinstance(error, PolicyError) else cls(text, error.key, error.value, path)

    @classmethod
    def joined(cls, parts: list[PolicyError]) -> PolicyError:
        """One exception for all of `parts`."""
        if len(parts) == 1:
            return parts[0]
        error = cls("", parts[0].key, parts[0].value)
        error.parts = parts
        return error

    def under(self, *path: str | int) -> PolicyError:
        """The same error, with `path` in front of its own path."""
        for error in self.parts or [self]:
            error.path = (*path, *error.path)
        return self

    def found_in(self, source: str, tables: Mapping[str, Any], content: str | None) -> PolicyError:
        """The same error, with its places in the policy `source`. `content`: the TOML text of `tables`."""
        for error in self.parts or [self]:
            error.place = place_of(error.path, tables)
            error.line = line_of(content, error.path) if content is not None else None
        self.parts.sort(key=lambda error: error.line or 0)
        self.source = f"policy {source}"
        return self

    def __str__(self) -> str:
        line = f"line {self.line}" if self.line is not None else ""
        where = [part for part in (self.source, line, self.place or place_of(self.path)) if part]
        text = self.text
        if self.parts:
            shown = at_most(_SHOWN, [str(part) for part in self.parts])
            text = "\n  ".join([f"{len(self.parts)} errors:", *shown])
        return f"{', '.join(where)}: {text}" if where else text


def place_of(path: Path, tables: Mapping[str, Any] | None = None) -> str:
    """What people call a place: "rule 2 ('mlp')", "[recipes.mine]", "[defaults]", or "" for a file itself."""
    if len(path) > 1 and path[0] == "rules" and isinstance(path[1], int):
        rules = (tables or {}).get("rules")
        rule = rules[path[1]] if isinstance(rules, (list, tuple)) and path[1] < len(rules) else None
        name = rule.get("name") if isinstance(rule, Mapping) else None
        return f"rule {path[1] + 1}" + (f" ({name!r})" if isinstance(name, str) and name else "")
    if len(path) > 1 and path[0] == "recipes":
        return f"[recipes.{path[1]}]"
    return f"[{path[0]}]" if path and path[0] in ("defaults", "schedule", "guard") else ""


def line_of(content: str, path: Path) -> int | None:
    """The line, from 1, of the key to which `path` leads in a TOML text, else of its header, or None.

    It understands the usual way of writing a policy, with one header or key a line.
    """
    # strings over several lines may hold anything: only their line ends count
    text = re.sub(r"('''|\"\"\").*?\1", lambda string: "\n" * string[0].count("\n"), content, flags=re.DOTALL)
    here: Path = ()  # the table that the line is in
    rules, found = 0, None
    for number, line in enumerate(text.split("\n"), 1):
        header = _HEADER.match(line)
        if header:
            here = tuple(part.strip("\"' ") for part in header[1].split("."))
            if here == ("rules",):
                here, rules = ("rules", rules), rules + 1
            found = number if here == path[: len(here)] else found
        elif here == path[: len(here)] and len(here) < len(path):
            if re.match(rf"\s*[\"']?{re.escape(str(path[len(here)]))}[\"']?\s*[=.]", line):
                return number
    return found
