"""From a file, a name, a dict or the environment to a Policy, with errors that say where in the file and what to write.

Shipped policies are read without pydantic: `torch.compile(model, backend="fp8")` has to work where it is not installed. What
users write is validated by it. It gets the data as JSON in strict mode, where "3" is no integer and a list may be a tuple; its
errors are translated by asking our own classes about the offending key, so that there is one wording for each.

A file is read anew by each `load`: it may have been edited.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from ...devices.toml import tomllib
from ...errors import OptionError, describe, did_you_mean, near
from ...logs import POLICY_VARIABLE as VARIABLE
from .errors import PolicyError, place_of
from .lines import line_of
from .model import SETTINGS, Defaults, NamedRecipe, Policy, PolicyFile, Rule, Schedule, given, label

BUILTIN = ("default", "llama", "gpt2", "vit", "moe", "conservative", "accelerate-defaults")
LARGEST_FILE = 256 * 1024  # bytes
MOST_RULES, MOST_RECIPES = 1000, 200
DEEPEST = 16  # nested tables and lists; policies that extend each other
_SHOWN, _MOST_TRANSLATED = 5, 100  # errors of one file

_CONTAINERS = {
    "rules": "a list of tables, each under [[rules]]",
    "defaults": "a table, [defaults]",
    "recipes": "tables, [recipes.NAME]",
    "schedule": "a table, [schedule]",
}
# what people write -> key
_MEANT = {
    "role": "gemm", "gemms": "gemm", "pass": "gemm", "class": "module_class", "cls": "module_class", "type": "module_class",
    "param": "parameter", "weight": "parameter", "fqn": "module", "if": "where", "when": "where", "condition": "where",
    "size": "where", "sizes": "where", "precision": "fp8", "enabled": "fp8", "format": "fp8_format", "label": "name",
    "history": "amax_history_len", "warmup": "warmup_steps", "cooldown": "cooldown_at", "position": "layers", "operator": "op",
    "evaluation": "eval", "gpu": "device", "include": "extends", "inherits": "extends", "fast_accum": "use_fast_accum",
}  # fmt: skip


def load(source: Any = None) -> Policy:
    """The policy that `source` names or holds.

    None: what the environment variable FP8COMPILE_POLICY names, else "default". A string that ends in .toml or has a separator,
    and any Path: a file. Another string: a shipped policy. A dict: the tables of a file. A Policy: itself.
    Raises OptionError, also where a file cannot be read.
    """
    if isinstance(source, Policy):
        return source
    if source is None:
        named = os.environ.get(VARIABLE, "")
        if not named:
            return _shipped("default")
        try:
            return _named(named, None, ())
        except PolicyError as error:
            error.source += f" (from the environment variable {VARIABLE})" if error.source else f"{VARIABLE}={named}"
            raise
    if isinstance(source, (str, os.PathLike)):
        return _named(source, None, ())
    if isinstance(source, Mapping):
        return _from_data(source, "given as a dict", None, (), None)
    allowed = f"a path, a dict, a Policy, or one of {', '.join(map(repr, BUILTIN))}"
    raise PolicyError.of("policy", source, allowed)


def schema() -> dict[str, Any]:
    """JSON Schema of a policy file, for editors. Needs pydantic."""
    made = _adapter().json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_without_null(made)}


def shipped(name: str) -> str:
    """The text of a shipped policy, one of BUILTIN."""
    return (resources.files("fp8compile.config") / "policies" / f"{name}.toml").read_text("utf-8")


def _named(name: str | os.PathLike[str], beside: Path | None, chain: tuple[str, ...]) -> Policy:
    """A shipped policy or a file; a relative path is one from the folder `beside`."""
    text = os.fspath(name)
    if not isinstance(text, str):
        raise PolicyError.of("policy", name, "a path in text, not bytes")
    separators = [separator for separator in ("/", os.sep, os.altsep) if separator]
    if isinstance(name, str) and not text.endswith(".toml") and not any(separator in text for separator in separators):
        if text not in BUILTIN:
            allowed = f"one of {', '.join(map(repr, BUILTIN))}, or a path that ends in .toml or has a '/' in it"
            raise PolicyError.of("policy", text, allowed, near(text, BUILTIN))
        return _shipped(text)
    try:
        path = Path(text).expanduser()
        path = path if beside is None else beside / path
        known = str(path.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, a loop of links, a user without a home
        raise _unreadable(text, str(error)) from None
    if known in chain or len(chain) >= DEEPEST:
        circle = " -> ".join((*chain, known)[-4:])
        raise PolicyError(f"policies extend each other in a circle: {circle}.", "extends", text, ("extends",))
    content = _read(path)
    return _from_data(_parsed(content, str(path)), str(path), path.parent, (*chain, known), content)


def _shipped(name: str) -> Policy:
    file = PolicyFile.build(tomllib.loads(shipped(name)))
    base = None if file.extends == "none" else _shipped(file.extends or "default")
    return dataclasses.replace(_joined(file, base, name), own=0)  # its rules are not the user's own


def _from_data(
    data: Mapping[str, Any], source: str, beside: Path | None, chain: tuple[str, ...], content: str | None
) -> Policy:
    """Validate `data`, and put the policy that it extends behind it. `content` is its TOML text."""
    try:
        file = _validated(_plain(data), source, content)
        base = None if file.extends == "none" else _extended(file.extends or "default", beside, chain)
        return _joined(file, base, source)
    except PolicyError as error:
        if error.source:  # of the policy that is extended
            raise
        _refuse([error], data, source, content)


def _extended(name: str, beside: Path | None, chain: tuple[str, ...]) -> Policy:
    try:
        return _named(name, beside, chain)
    except PolicyError as error:
        if error.key == "policy":
            text = error.text.replace("'policy' must be", "'extends' must be 'none', or", 1)
            raise PolicyError(text, "extends", name, ("extends",)) from None
        if not error.source:
            error.path = ("extends",)
        raise


def _joined(file: PolicyFile, base: Policy | None, source: str) -> Policy:
    """The rules of `base` after the file's; of everything else the file's, where it says something."""
    if base is None:
        base = Policy(source="none")
    settings = {**given(base.defaults), **given(file.defaults)}
    own = (label(file.rules, i) for i in range(len(file.rules)))
    others = (rule.name or f"{name} of {base.source}" for name, rule in zip(base.labels, base.rules, strict=True))
    return Policy(
        rules=(*file.rules, *base.rules),
        recipes={**base.recipes, **file.recipes},
        defaults=Defaults(**settings),
        schedule=file.schedule or base.schedule,
        eval=file.eval or base.eval,
        device=file.device or base.device,
        source=source,
        own=len(file.rules),
        labels=(*own, *others),
    )


# --- files ------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    try:
        if path.is_dir():
            raise _unreadable(str(path), "it is a directory; a policy is a file")
        if not path.exists():
            shipped = near(path.stem, BUILTIN)
            hint = f"; the shipped policy is called {shipped[0]!r}, without .toml" if shipped else ""
            raise _unreadable(str(path), "it does not exist" + hint)
        if not path.is_file():
            raise _unreadable(str(path), "it is not a regular file")
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, PolicyError):
            raise
        raise _unreadable(str(path), (isinstance(error, OSError) and error.strerror) or str(error)) from None
    if len(content) > LARGEST_FILE:
        raise _unreadable(str(path), f"it is larger than {LARGEST_FILE // 1024} KiB")
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _unreadable(str(path), f"it is not UTF-8 (byte 0x{content[error.start]:02x} in line {line})") from None


def _unreadable(path: str, why: str) -> PolicyError:
    error = PolicyError(f"the policy file {path!r} cannot be read: {why}.", "policy", path)
    error.key = None  # not a matter of one key
    return error


def _parsed(content: str, source: str) -> dict[str, Any]:
    deep = _deep_key(content)
    try:
        if deep is not None:
            raise ValueError(f"a key nested too deep (at line {deep})")
        return tomllib.loads(content)
    except (ValueError, RecursionError) as error:  # ValueError: TOMLDecodeError, or an integer of thousands of digits
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        problem = PolicyError(f"not valid TOML: {why}.")
        problem.source = f"policy {source}"
        raise problem from None


def _deep_key(content: str) -> int | None:
    """The line of a key with very many dots, which takes the parser quadratic time and more."""
    for number, line in enumerate(content.splitlines(), 1):
        if line.count(".") > 4 * DEEPEST:
            bare = re.sub(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'', "x", line).partition("#")[0]
            if bare.count(".") > 4 * DEEPEST:
                return number
    return None


# --- validation -------------------------------------------------------------------------------------------------------


@lru_cache(1)
def _adapter() -> Any:
    try:
        from pydantic import TypeAdapter
    except ImportError:
        raise OptionError("policies of your own are validated with pydantic: pip install pydantic") from None
    return TypeAdapter(PolicyFile)


def _validated(data: dict[str, Any], source: str, content: str | None) -> PolicyFile:
    for key, most in (("rules", MOST_RULES), ("recipes", MOST_RECIPES)):
        if isinstance(data.get(key), (list, dict)) and len(data[key]) > most:
            raise PolicyError(f"{len(data[key])} {key}; {most} at most.", key, None, (key,))
    adapter = _adapter()
    from pydantic import ValidationError

    try:
        return adapter.validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problems: dict[tuple[str | int, ...], PolicyError] = {}
        for detail in error.errors(include_url=False):
            path = _cut(detail["loc"])
            if path not in problems and len(problems) < _MOST_TRANSLATED:
                problems[path] = _translated(detail, path, data)
        _refuse(list(problems.values()), data, source, content)


def _cut(loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """pydantic's `loc` up to where our keys end: it goes on into lists, and the branches of a union."""
    return loc[: {"rules": 3, "recipes": 3, "defaults": 2, "schedule": 2}.get(str(loc[0]), 1)] if loc else ()


def _translated(detail: Mapping[str, Any], path: tuple[str | int, ...], data: dict[str, Any]) -> PolicyError:
    """pydantic's error about what `path` leads to, as ours."""
    error = detail.get("ctx", {}).get("error")
    if isinstance(error, PolicyError):
        inner = error.path or ((error.key,) if error.key is not None else ())
        return PolicyError(error.text, error.key, error.value, inner if error.path else (*path, *inner))
    value = _at(data, path)
    table = _table(path[:-1])
    key = str(path[-1]) if path else ""
    if detail["type"] == "unexpected_keyword_argument":
        return PolicyError(_unknown(key, value, table), key, value, path)
    if len(path) == 1 and key in _CONTAINERS or not path or isinstance(path[-1], int) or path[:-1] == ("recipes",):
        allowed = _CONTAINERS.get(str(path[0]) if path else "", "tables and keys")
        return PolicyError.of(str(path[0]) if path else "policy", value, allowed).under(*path)
    try:
        table(**{key: value})
    except PolicyError as ours:
        return PolicyError(ours.text, key, value, path)
    return PolicyError(f"{key!r}: {detail['msg']}; got {describe(value)}.", key, value, path)


def _table(path: tuple[str | int, ...]) -> Callable[..., Any]:
    """The class of the table that `path` leads to."""
    kinds: dict[str, Callable[..., Any]]
    kinds = {"rules": Rule, "recipes": NamedRecipe, "defaults": Defaults, "schedule": Schedule}
    return kinds[str(path[0])] if path else PolicyFile


def _unknown(key: str, value: Any, table: Any) -> str:
    names = [f.name for f in dataclasses.fields(table)]
    names = [name for name in names if name not in SETTINGS] + [name for name in names if name in SETTINGS]
    meant = [_MEANT[key.lower()]] if _MEANT.get(key.lower()) in names else near(key, names)
    text = f"unknown key {key!r} (value {describe(value, 40)}).{did_you_mean(meant)}"
    if not meant and table is PolicyFile:
        if key in SETTINGS or key == "recipe":
            text += f" {key!r} goes into [defaults], [recipes.NAME] or [[rules]]."
        elif key in {f.name for f in dataclasses.fields(Rule)}:
            text += f" {key!r} goes into [[rules]]."
    elif not meant and table is NamedRecipe and key == "recipe":
        text += " Did you mean 'base'?"
    elif not meant and table is Defaults and key in {f.name for f in dataclasses.fields(Rule)}:
        text += f" {key!r} goes into [[rules]]; a rule without conditions holds for everything that is left."
    return f"{text} The keys here are {', '.join(names)}."


def _plain(value: Any, path: tuple[str | int, ...] = (), left: list[int] | None = None) -> Any:
    """`value` in dicts, lists, strings, numbers, booleans and None only, what JSON has. PolicyError for anything else."""
    left = [20_000] if left is None else left
    left[0] -= 1
    key = str(path[-1]) if path else "policy"
    if len(path) > DEEPEST or left[0] < 0:
        raise PolicyError("nested too deep, or too large.", key, None, path[:3])
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise PolicyError.of(key, value, "text that can be encoded").under(*path)
        return str(value)
    if isinstance(value, int) and abs(value) < 2**63:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise PolicyError(f"keys are strings; got {describe(name)}.", key, None, path[:3])
        return {_plain(name, path, left): _plain(part, (*path, name), left) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part, (*path, i), left) for i, part in enumerate(value)]
    shown = "a number that is out of bounds" if isinstance(value, (int, float)) else describe(value)
    raise PolicyError(f"{key!r} must be text, a number, true, false, a list or a table; got {shown}.", key, None, path)


def _at(data: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _refuse(problems: list[PolicyError], data: Any, source: str, content: str | None) -> NoReturn:
    """Raise what is wrong, with places and lines."""
    for problem in problems:
        problem.place = place_of(problem.path, _at(data, (*problem.path[:2], "name")))
        problem.line = line_of(content, problem.path) if content is not None else None
    problems.sort(key=lambda problem: problem.line or 0)
    first = problems[0]
    if len(problems) > 1:
        shown = "".join(f"\n  {problem}" for problem in problems[:_SHOWN])
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        text = f"{len(problems)} errors:{shown}{more}"
        first = PolicyError("", first.key, first.value)
        first.text = text
    first.source = f"policy {source}"
    raise first from None


def _without_null(node: Any) -> Any:
    """A schema without the null that stands for "not given": TOML has none."""
    if isinstance(node, list):
        return [_without_null(part) for part in node]
    if not isinstance(node, dict):
        return node
    made = {key: _without_null(part) for key, part in node.items() if not (key == "default" and part is None)}
    kinds = [part for part in made.get("anyOf", ()) if part != {"type": "null"}]
    if len(kinds) == 1:
        made.pop("anyOf")
        made = {**kinds[0], **made}
    elif kinds:
        made["anyOf"] = kinds
    return made
