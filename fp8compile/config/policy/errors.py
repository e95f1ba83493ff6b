"""PolicyError: what is wrong with a policy, and where.

The parts are kept apart until the message is read: what checks a value knows neither the rule nor the file that it is in, and
`files` adds both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import OptionError, describe, did_you_mean

LONGEST_NAME = 100  # characters
Path = tuple["str | int", ...]


class PolicyError(OptionError):
    """A policy that cannot be used. `text` is what is wrong, `path` leads to it: ("rules", 1, "gemm").

    `key` and `value` are what was given, `place` names the rule or table for people, `source` and `line` the file.
    """

    def __init__(self, text: str, key: str | None = None, value: Any = None, path: Path = ()) -> None:
        text = _cut(text, 1500)
        super().__init__(text)
        self.text, self.key, self.value, self.path = text, key, value, path
        self.place = self.source = ""
        self.line: int | None = None

    @classmethod
    def of(cls, key: str, value: Any, allowed: str, near: Sequence[str] = ()) -> PolicyError:
        """`allowed` completes "must be ...", `near` are suggestions."""
        return cls(f"{key!r} must be {allowed}; got {describe(value)}.{did_you_mean(near)}", key, value)

    def under(self, *path: str | int) -> PolicyError:
        """The same, found in what `path` leads to."""
        self.path = (*path, *self.path)
        return self

    def __str__(self) -> str:
        where = [self.source, f"line {self.line}" if self.line is not None else "", self.place or place_of(self.path)]
        where = [part for part in where if part]
        return f"{', '.join(where)}: {self.text}" if where else self.text


def place_of(path: Path, name: object = None) -> str:
    """What people call it: "rule 2 ('mlp')", "[recipes.mine]", "[defaults]", or nothing for the file itself."""
    if len(path) > 1 and path[0] == "rules" and isinstance(path[1], int):
        return f"rule {path[1] + 1}" + (f" ({_cut(name, 100)!r})" if isinstance(name, str) and name else "")
    if len(path) > 1 and path[0] == "recipes":
        return f"[recipes.{_cut(str(path[1]), 100)}]"
    return f"[{path[0]}]" if path and path[0] in ("defaults", "schedule") else ""


def _cut(text: str, limit: int) -> str:
    """The beginning and the end of a text that is too long to read."""
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 4 :]}"


def check_name(key: str, value: Any, allowed: str, longest: int = LONGEST_NAME) -> None:
    """Raise PolicyError unless `value` is None or a line of text. `allowed` completes "must be ..."."""
    if value is None:
        return
    if not isinstance(value, str) or not value.strip() or len(value) > longest or not value.isprintable():
        raise PolicyError.of(key, value, allowed)
