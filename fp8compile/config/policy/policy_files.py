"""Makes a Policy of a file, a name, a dict or the environment, and a file of a Policy. Errors say where they
are, and what to write.

Whatever the source, its tables go through `validation`. A file may come from somebody else: reading one
executes nothing. Each `load` reads a file anew, because it may have been edited.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ...devices.toml import tomllib
from ...errors import near
from ...logs import POLICY_VARIABLE as VARIABLE
from .policy_errors import PolicyError
from .policy_tables import Defaults, Policy, Rule, Tables, given, label
from .validation import FILE, key, line, made, table

BUILTIN = ("default", "fast", "llama", "gpt2", "vit", "moe", "conservative", "accelerate-defaults", "vllm")


@table(FILE)
@dataclass(frozen=True)
class PolicyFile(Tables):
    """Which matmuls of a model become FP8, and how."""

    extends: str | None = key(
        'The policy whose rules come after these: a shipped one, a path, or "none". Default: "default".',
        line("a name", 4096),
    )

    def __post_init__(self) -> None:
        """Names of recipes are looked up later, because the policy that this file extends may define them."""
        for i, j in unreached(self.rules).items():
            nothing = "no conditions, so it decides about everything"
            has = "the same conditions" if self.rules[j].conditions else nothing
            text = f"this rule is never reached: {label(self.rules, j)}, before it, has {has}."
            raise PolicyError(text).under("rules", i)


def unreached(rules: Sequence[Rule]) -> dict[int, int]:
    """The positions of rules that are never reached: with that of a rule before, always active, that has no
    conditions or the same ones."""
    seen, found = dict[str, int](), dict[int, int]()  # conditions -> rule
    for i, rule in enumerate(rules):
        conditions = repr(rule.conditions)
        before = next((seen[known] for known in (repr({}), conditions) if known in seen), None)
        if before is not None:
            found[i] = before
        elif not rule.during:
            seen[conditions] = i
    return found


def load(source: Any = None) -> Policy:
    """`Policy.load`."""
    if isinstance(source, Policy):
        return source
    if source is None:
        named = os.environ.get(VARIABLE, "")
        if not named:
            return _shipped("default")
        try:
            return _named(named, None, ())
        except PolicyError as error:
            error.source += (
                f" (from the environment variable {VARIABLE})" if error.source else f"{VARIABLE}={named}"
            )
            raise
    if isinstance(source, (str, os.PathLike)):
        return _named(source, None, ())
    if isinstance(source, Mapping):
        return _from_tables(source, "given as a dict")
    names = ", ".join(map(repr, BUILTIN))
    allowed = f"a path, a dict, a Policy, a function (module, name) -> bool, or one of {names}"
    raise PolicyError.of("policy", source, allowed)


def shipped(name: str) -> str:
    """The text of a shipped policy, one of BUILTIN."""
    return (resources.files("fp8compile.config") / "policies" / f"{name}.toml").read_text("utf-8")


def _named(
    name: str | os.PathLike[str], beside: Path | None, chain: tuple[str, ...], key: str = "policy"
) -> Policy:
    """A shipped policy or a file; a relative path begins at the folder `beside`. `key` names it."""
    text = os.fspath(name)
    if not isinstance(text, str):
        raise PolicyError.of("policy", name, "a path in text, not bytes")
    separated = any(separator in text for separator in ("/", os.sep, os.altsep) if separator)
    if isinstance(name, str) and not text.endswith(".toml") and not separated:
        if text not in BUILTIN:
            names = ", ".join(map(repr, BUILTIN))
            allowed = f"one of {names}, or a path that ends in .toml or has a '/' in it"
            allowed = allowed if key == "policy" else f"'none', or {allowed}"
            raise PolicyError.of(key, text, allowed, near(text, BUILTIN))
        return _shipped(text)
    try:
        path = Path(text).expanduser()
        path = path if beside is None else beside / path
        known = str(path.resolve())
    except (OSError, ValueError, RuntimeError) as error:
        # a null byte, a loop of links, a user without a home
        raise _unreadable(text, str(error)) from None
    if known in chain:
        circle = " -> ".join((*chain, known)[-4:])
        raise PolicyError(f"policies extend each other in a circle: {circle}.", "extends", text, ("extends",))
    content = _read(path)
    return _from_tables(_parsed(content, str(path)), str(path), content, path.parent, (*chain, known))


def _shipped(name: str) -> Policy:
    content = shipped(name)
    # its rules are not the user's own
    return dataclasses.replace(_from_tables(tomllib.loads(content), name, content), own=0)


def _from_tables(
    tables: Mapping[str, Any],
    source: str,
    content: str | None = None,
    beside: Path | None = None,
    chain: tuple[str, ...] = (),
) -> Policy:
    """Validate `tables`, and add the rules of the policy that they extend. `content`: their TOML text."""
    try:
        file = made(PolicyFile, tables)
        base = None if file.extends == "none" else _extended(file.extends or "default", beside, chain)
        return _joined(file, base, source)
    except PolicyError as error:
        if not error.source:  # an error of the policy that is extended knows its own source
            error.found_in(source, tables, content)
        raise


def _extended(name: str, beside: Path | None, chain: tuple[str, ...]) -> Policy:
    try:
        return _named(name, beside, chain, "extends")
    except PolicyError as error:
        if not error.source:
            error.path = ("extends",)
        raise


def _joined(file: PolicyFile, base: Policy | None, source: str) -> Policy:
    """The file's rules, then those of `base`. All else is the file's where given, else that of `base`."""
    if base is None:
        base = Policy(source="none")
    settings = {**given(base.defaults), **given(file.defaults)}
    own = (label(file.rules, i) for i in range(len(file.rules)))
    labelled = zip(base.labels, base.rules, strict=True)
    others = (rule.name or f"{name} of {base.source}" for name, rule in labelled)
    return Policy(
        rules=(*file.rules, *base.rules),
        recipes={**base.recipes, **file.recipes},
        defaults=Defaults(**settings),
        schedule=file.schedule or base.schedule,
        guard=file.guard or base.guard,
        eval=file.eval or base.eval,
        save=file.save or base.save,
        device=file.device or base.device,
        source=source,
        own=len(file.rules),
        labels=(*own, *others),
    )


def preceded(policy: Policy, rules: Sequence[Rule]) -> Policy:
    """The policy with further rules of the user's own, which have names, before all others."""
    labels = (*(str(rule.name) for rule in rules), *policy.labels)
    own = None if policy.own is None else policy.own + len(rules)
    return dataclasses.replace(policy, rules=(*rules, *policy.rules), own=own, labels=labels)


# -- files --


def _read(path: Path) -> str:
    try:
        content = path.read_bytes()
        return content.decode("utf-8").removeprefix("\ufeff")
    except FileNotFoundError:
        similar = near(path.stem, BUILTIN)
        hint = f"; the shipped policy is called {similar[0]!r}, without .toml" if similar else ""
        raise _unreadable(str(path), "it does not exist" + hint) from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        where = f"byte 0x{content[error.start]:02x} in line {line}"
        raise _unreadable(str(path), f"it is not UTF-8 ({where})") from None
    except (OSError, ValueError) as error:
        raise _unreadable(str(path), getattr(error, "strerror", None) or str(error)) from None


def _unreadable(path: str, why: str) -> PolicyError:
    return PolicyError(f"the policy file {path!r} cannot be read: {why}.", value=path)


def _parsed(content: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(content)
    except ValueError as error:  # TOMLDecodeError is one
        problem = PolicyError(f"not valid TOML: {error}.")
        problem.source = f"policy {source}"
        raise problem from None


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
