"""Patterns for names of modules, parameters and classes: globs, or regular expressions after ``re:``.

A regular expression has to match the whole name. A glob that no name can fit is refused when the policy is
loaded: later it would silently do nothing.
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from .policy_errors import PolicyError

PREFIX = "re:"
_SET = re.compile(r"\[!?\]?[^\]]*\]")
_STRANGE = re.compile(r"[^\w.*?-]")


def check(key: str, pattern: Any) -> str:
    """`pattern`. PolicyError for a broken regular expression, or a glob that cannot fit a name of a `key`."""
    if not isinstance(pattern, str):
        raise PolicyError.of(key, pattern, "a glob, or a list of globs")
    if pattern.startswith(PREFIX):
        try:
            matcher(pattern)
        except (re.error, OverflowError) as error:
            text = f"{key!r}: {pattern!r} is not a regular expression: {error}."
            raise PolicyError(text, key, pattern) from None
        return pattern
    why, hint = _impossible(key, pattern)
    if why:
        text = f"{key!r}: the glob {pattern!r} can never match: {why}.{hint and ' ' + hint}"
        raise PolicyError(text, key, pattern)
    return pattern


def fits(patterns: Iterable[str], name: str) -> bool:
    """Whether one of `patterns` matches all of `name`."""
    return any(matcher(pattern)(name) for pattern in patterns)


@lru_cache(4096)
def matcher(pattern: str) -> Callable[[str], object]:
    """A function that is true for the names that `pattern` matches."""
    regex = pattern[len(PREFIX) :] if pattern.startswith(PREFIX) else fnmatch.translate(pattern)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "possible nested set": about Python's future, not about the policy
        return re.compile(regex).fullmatch


def _impossible(key: str, glob: str) -> tuple[str, str]:
    """Why no name fits, and what to do about it; two empty strings if a name may fit."""
    regular = f"{PREFIX!r} begins a regular expression."
    if not glob:
        fix = "'re:' fits the model itself, '*' everything." if key == "module" else "'*' fits every name."
        return "it is empty", fix
    bare = _SET.sub("x", glob)
    if "[" in bare or "]" in bare:
        return "a bracket has no partner", regular
    if "(?!)" in fnmatch.translate(glob):
        return "a set in brackets has its range the wrong way round", ""
    if "/" in bare:
        return "names have dots where this has slashes", f"Did you mean {glob.replace('/', '.')!r}?"
    strange = _STRANGE.search(bare)
    if strange:
        return f"names have no {strange.group()!r}", regular
    if key == "module_class":
        if "." not in bare:
            return "", ""
        last = glob.rpartition(".")[2]
        return "class names have no dots", f"Did you mean {last!r}?" if last else ""
    if bare.startswith(".") or bare.endswith("."):
        side = "begins" if bare.startswith(".") else "ends"
        wider = f"*{glob}" if side == "begins" else f"{glob}*"
        return f"no name {side} with a dot", f"Did you mean {wider!r}?"
    return ("a component between two dots is empty", "Did you mean '.*.'?") if ".." in bare else ("", "")
