"""Tables of a policy: frozen dataclasses that check the values of their keys, in files and in Python alike.

    @table("[schedule]")
    @dataclass(frozen=True, kw_only=True)
    class Schedule:
        warmup_steps: int = whole("Train in high precision first.", least=0, default=0)

`Schedule(warmup_steps="3")`, and a file that says so, give "'warmup_steps' must be an integer >= 0; got '3'
(str)."
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ...errors import OptionError, describe, did_you_mean, near
from .. import peers
from ..settings import Check, integer, one
from .policy_errors import PolicyError

T = TypeVar("T")
LONGEST_NAME = 100  # characters
FILE = "fp8compile policy"
_TABLES: dict[str, type] = {}  # by their titles
# what people write -> key
_MEANT = {
    "role": "gemm", "gemms": "gemm", "pass": "gemm", "operator": "op", "recipe": "base", "label": "name",
    "class": "module_class", "cls": "module_class", "type": "module_class", "fqn": "module",
    "param": "parameter", "weight": "parameter", "position": "layers", "if": "where", "when": "where",
    "condition": "where", "size": "where", "sizes": "where", "precision": "fp8", "enabled": "fp8",
    "format": "fp8_format", "fast_accum": "use_fast_accum", "history": "amax_history_len",
    "warmup": "warmup_steps", "cooldown": "cooldown_at", "evaluation": "eval", "gpu": "device",
    "include": "extends", "inherits": "extends", "window": "during", "windows": "during", "steps": "during",
    "max_steps": "total_steps", "total": "total_steps",
}  # fmt: skip


# -- checks: of a key's name and value; they return the value as it is stored, or raise PolicyError --


def fitting(fits: Callable[[Any], object], allowed: str) -> Check:
    """The values that fit; `allowed` completes "must be ..."."""

    def check(name: str, given: Any) -> Any:
        if not fits(given):
            raise PolicyError.of(name, given, allowed)
        return given

    return check


def line(allowed: str, longest: int = LONGEST_NAME) -> Check:
    """A line of text."""
    return fitting(
        lambda text: isinstance(text, str) and text.strip() and len(text) <= longest and text.isprintable(),
        allowed,
    )


def choice(literal: Any) -> Check:
    return one(*get_args(literal))


def several(check: Check) -> Check:
    """One value, or a list of them; kept as a tuple."""
    return lambda name, given: tuple(
        check(name, part) for part in (given if isinstance(given, (list, tuple)) and given else [given])
    )


def table_of(cls: type, allowed: str) -> Check:
    mine = fitting(lambda given: isinstance(given, cls), allowed)
    return lambda name, given: made(cls, given) if isinstance(given, Mapping) else mine(name, given)


def tables_of(cls: type, allowed: str) -> Check:
    """A list of tables; kept as a tuple."""
    check, listed = table_of(cls, allowed), fitting(lambda given: isinstance(given, (list, tuple)), allowed)
    return lambda name, given: tuple(
        _each(lambda _, part: check(name, part), enumerate(listed(name, given))).values()
    )


def named_tables_of(cls: type, allowed: str) -> Check:
    check = table_of(cls, allowed)
    named = fitting(
        lambda given: isinstance(given, Mapping) and all(isinstance(key, str) for key in given), allowed
    )
    return lambda name, given: _each(lambda _, part: check(name, part), named(name, given).items())


# -- tables --


def key(meaning: str, check: Check, default: Any = None, **schema: Any) -> Any:
    """A key of a table, whose `default` may be a function. If it is None, None stands for "not given".
    `meaning` and `schema` are for JSON Schema, beside what the annotation says."""
    metadata = {"check": check, "schema": {"description": meaning, **schema}}
    given = {"default_factory" if callable(default) else "default": default}
    return dataclasses.field(**given, metadata=metadata)


def whole(meaning: str, least: int, default: int | None = None) -> Any:
    """A key for an integer from `least` on."""
    return key(meaning, functools.partial(integer, least=least), default, minimum=least)


def table(title: str = "") -> Callable[[type[T]], type[T]]:
    """For a dataclass: its constructor checks all values (PolicyError). A table of a file has a `title`."""

    def checked(cls: Any) -> Any:
        keys = {field.name: field for field in dataclasses.fields(cls)}
        signature, construct = inspect.signature(cls), cls.__init__

        def value(name: str, given: Any) -> Any:
            if name not in keys:
                raise PolicyError(_unknown(name, given, cls), name, given)
            check, default = keys[name].metadata.get("check"), keys[name].default
            return given if check is None or given is default is None else check(name, given)

        @functools.wraps(construct)
        def init(self: Any, /, *args: Any, **given: Any) -> None:
            positional = signature.bind_partial(*args).arguments
            construct(self, **_each(value, dict(**positional, **given).items()))

        cls.__init__ = init
        if title:
            _TABLES[title] = cls
        return cls

    return checked


def made(cls: type[T], given: Mapping[Any, Any]) -> T:
    """The table `cls`, made of a dict as TOML gives it. PolicyError with everything that is wrong."""
    return cls(**{key if isinstance(key, str) else describe(key): value for key, value in given.items()})


def _each(check: Callable[[Any, Any], Any], items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """`check(place, value)` of each item, by its place. PolicyError with everything that is wrong."""
    found, errors = {}, list[PolicyError]()
    for place, value in items:
        try:
            found[place] = check(place, value)
        except OptionError as error:
            found_here = PolicyError.made_of(error).under(place)
            errors += found_here.parts or [found_here]
    if errors:
        raise PolicyError.joined(errors)
    return found


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
    elif instead := peers.option(name):
        hint = f" Here it is {instead}."
    else:
        hint = did_you_mean(near(name, keys))
    return f"unknown key {name!r} (value {describe(value, 40)}).{hint} The keys here are {', '.join(keys)}."


# -- JSON Schema --


def schema() -> dict[str, Any]:
    """JSON Schema of a policy file, for editors."""
    tables = {title: _described(title, cls) for title, cls in _TABLES.items()}
    file = tables.pop(FILE)
    defs = {_TABLES[title].__name__: described for title, described in tables.items()}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": defs, **file}


def _described(title: str, cls: Any) -> dict[str, Any]:
    hints, properties = get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        default = {"default": field.default} if isinstance(field.default, (str, int)) else {}
        properties[field.name] = {**_schema_of(hints[field.name]), **default, **field.metadata["schema"]}
    about = {"title": title, "description": _unwrapped(inspect.getdoc(cls) or ""), "type": "object"}
    return {**about, "properties": properties, "additionalProperties": False}


def _unwrapped(text: str) -> str:
    """A line a paragraph: editors wrap descriptions themselves."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


def _schema_of(hint: Any) -> dict[str, Any]:
    """Of a type. TOML has no None."""
    if dataclasses.is_dataclass(hint):
        return {"$ref": f"#/$defs/{hint.__name__}"}  # type: ignore[union-attr]
    if get_origin(hint) is Literal:
        return {"enum": [*get_args(hint)], "type": "string"}
    parts = [_schema_of(part) for part in get_args(hint) if part not in (NoneType, ...)]
    if get_origin(hint) is dict:
        return {"additionalProperties": parts[1], "type": "object"}
    if get_origin(hint) is tuple and ... in get_args(hint):
        return {"items": parts[0], "minItems": 1, "type": "array"}
    if get_origin(hint) is tuple:
        return {"maxItems": len(parts), "minItems": len(parts), "prefixItems": parts, "type": "array"}
    if parts:
        return parts[0] if len(parts) == 1 else {"anyOf": parts}
    return {"type": {bool: "boolean", int: "integer", str: "string"}[hint]}
