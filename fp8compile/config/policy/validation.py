"""Tables of a policy as pydantic dataclasses, in files and in Python alike, with errors in our own words.

    @table("[schedule]")
    class Schedule:
        warmup_steps: Steps = key("Train in high precision for so many steps first.", "an integer >= 0", 0)

`Schedule(warmup_steps="3")`, and a file that says so, give "'warmup_steps' must be an integer >= 0; got '3' (str)."
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import pydantic.dataclasses
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StrictStr, TypeAdapter, ValidationError
from typing_extensions import dataclass_transform

from ...errors import describe, did_you_mean, near
from .errors import Path, PolicyError

T = TypeVar("T")
LONGEST_NAME = 100  # characters
FILE = "fp8compile policy"
MOST_ERRORS = 50  # of one policy; the search for near matches takes time
_TABLES: dict[str, type] = {}  # by their titles
# part of a policy -> the length of the path to a key in it, and the title of its table
_PARTS = {
    "rules": (3, "[[rules]]"),
    "recipes": (3, "[recipes.NAME]"),
    "defaults": (2, "[defaults]"),
    "schedule": (2, "[schedule]"),
}
# what people write -> key
_MEANT = {
    "role": "gemm", "gemms": "gemm", "pass": "gemm", "class": "module_class", "cls": "module_class", "type": "module_class",
    "param": "parameter", "weight": "parameter", "fqn": "module", "if": "where", "when": "where", "condition": "where",
    "size": "where", "sizes": "where", "precision": "fp8", "enabled": "fp8", "format": "fp8_format", "label": "name",
    "history": "amax_history_len", "warmup": "warmup_steps", "cooldown": "cooldown_at", "position": "layers", "operator": "op",
    "evaluation": "eval", "gpu": "device", "include": "extends", "inherits": "extends", "fast_accum": "use_fast_accum",
    "recipe": "base",
}  # fmt: skip


# --- types and keys ---------------------------------------------------------------------------------------------------


def _line(longest: int, text: str) -> str:
    if not text.strip() or len(text) > longest or not text.isprintable():
        raise ValueError
    return text


def _several(given: Any) -> Any:
    if isinstance(given, str):
        return (given,)
    if given is not None and not isinstance(given, (list, tuple)):
        raise ValueError
    return given


Name = Annotated[StrictStr, AfterValidator(functools.partial(_line, LONGEST_NAME))]
PathOrName = Annotated[StrictStr, AfterValidator(functools.partial(_line, 4096))]
# one T or a list of them; kept as a tuple
Several = Annotated[T | Annotated[tuple[T, ...], Field(min_length=1)] | None, BeforeValidator(_several)]


def key(meaning: str, allowed: str, default: Any = None) -> Any:
    """A key of a table: `meaning` is for the JSON Schema, `allowed` completes "must be ...", `default` may be a function.

    If `allowed` is "", the key's own validator raises all errors about it, as PolicyErrors.
    """
    metadata = {"description": meaning, "allowed": allowed}
    return dataclasses.field(**{"default_factory" if callable(default) else "default": default}, metadata=metadata)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def table(title: str = "", *, kw_only: bool = True) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen pydantic dataclass whose constructor raises PolicyError. A table of a file has a `title`."""

    def made(cls: type[T]) -> type[T]:
        config = ConfigDict(extra="forbid", title=title or cls.__name__)
        checked: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=kw_only, config=config)(cls)
        construct = checked.__init__

        @functools.wraps(construct)
        def init(self: T, *args: Any, **given: Any) -> None:
            try:
                construct(self, *args, **given)
            except ValidationError as error:
                raise _translated(error, checked) from None

        checked.__init__ = init
        if title:
            _TABLES[title] = checked
        return checked

    return made


def validated(cls: type[T], tables: Mapping[str, Any]) -> T:
    """The dataclass `cls`, made of tables as TOML gives them. PolicyError with everything that is wrong."""
    try:
        return TypeAdapter(cls).validate_python(dict(tables))
    except ValidationError as error:
        raise _translated(error, cls) from None


# --- errors -----------------------------------------------------------------------------------------------------------


def _translated(error: ValidationError, cls: type) -> PolicyError:
    """pydantic's errors as ours, one for each key."""
    details: dict[Path, Mapping[str, Any]] = {}
    for detail in error.errors(include_url=False):
        # pydantic's `loc` goes on into lists and the branches of a union; the longest one is in the branch that was meant
        path = tuple(part for part in detail["loc"] if part != "[key]")
        path = path[: _PARTS.get(str(path[0]), (1, ""))[0]] if path else ()
        better = len(detail["loc"]) > len(details[path]["loc"]) if path in details else len(details) < MOST_ERRORS
        if better:
            details[path] = detail
    return PolicyError.joined([_problem(path, detail, cls) for path, detail in details.items()])


def _problem(path: Path, detail: Mapping[str, Any], cls: type) -> PolicyError:
    ours = detail.get("ctx", {}).get("error")
    if isinstance(ours, PolicyError):
        own = () if ours.key is None or path[-1:] == (ours.key,) else (ours.key,)
        return PolicyError(ours.text, ours.key, ours.value, (*path, *(ours.path or own)))
    depth, title = _PARTS.get(str(path[0]) if path else "", (1, ""))
    name = str(path[-1] if len(path) == depth else path[0]) if path else "policy"
    cls = _TABLES[title] if title and len(path) == depth else cls
    value = detail["input"]
    if detail["type"] == "unexpected_keyword_argument":
        return PolicyError(_unknown(name, value, cls), name, value, path)
    allowed = {f.name: f.metadata.get("allowed") for f in dataclasses.fields(cls)}.get(name)
    if not allowed:
        return PolicyError(f"{name!r}: {detail['msg']}; got {describe(value)}.", name, value, path)
    error = PolicyError.of(name, value, allowed, near(value, re.findall("'([^']+)'", allowed)))
    return error.under(*path)


def _unknown(name: str, value: Any, cls: type) -> str:
    """The message about a key that a table does not have: which key was meant, or which table has it."""
    own = list(cls.__annotations__)  # without inherited keys (the settings of a recipe), which come last
    keys = [*own, *(f.name for f in dataclasses.fields(cls) if f.name not in own)]
    homes = [title for title, other in _TABLES.items() if name in {f.name for f in dataclasses.fields(other)}]
    meant = _MEANT.get(name.lower())
    if meant in keys:
        hint = did_you_mean([meant])
    elif homes == [FILE]:
        hint = f" {name!r} goes to the top of the file, above all tables."
    elif homes:
        hint = f" {name!r} goes into {', '.join(homes[:-1])}{' or ' if homes[1:] else ''}{homes[-1]}."
    else:
        hint = did_you_mean(near(name, keys))
    return f"unknown key {name!r} (value {describe(value, 40)}).{hint} The keys here are {', '.join(keys)}."
