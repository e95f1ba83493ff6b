"""Every exception that fp8compile raises on purpose, and helpers that describe others in one line.

All derive from :class:`Fp8CompileError`, and from the builtin that a caller would expect (``ValueError`` for
a bad option), so that nobody has to import this package to catch them. Messages say which value was given,
and what to write instead.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_SEPARATORS = str.maketrans("- ", "__")


class Fp8CompileError(Exception):
    """Base class of everything raised on purpose."""


class OptionError(Fp8CompileError, ValueError):
    """An option of ``torch.compile(..., backend="fp8", options={...})`` that cannot be used.

    ``key`` and ``value`` hold what was given (None when the error is not about one option).
    """

    key: str | None = None
    value: Any = None

    @classmethod
    def of(cls, key: str, value: Any, allowed: str, near: Sequence[str] = ()) -> OptionError:
        """The error for ``options[key] = value``. `allowed` completes "must be ..."; `near`: suggestions."""
        error = cls(f"fp8 option {key!r} must be {allowed}; got {describe(value)}.{did_you_mean(near)}")
        error.key, error.value = key, value
        return error


class StrictError(Fp8CompileError, RuntimeError):
    """Something that is only a warning without ``options={"strict": True}``."""


class ShardingError(Fp8CompileError, ValueError):
    """Something of `fully_shard`, or of a recipe, that the FP8 all-gather cannot work with."""


class StateError(Fp8CompileError, ValueError):
    """A scaling state that does not fit the model: ``differences`` lists why, a line each."""

    differences: tuple[str, ...] = ()

    @classmethod
    def of(cls, differences: Sequence[str], fix: str) -> StateError:
        shown = "\n  ".join(at_most(20, differences))
        error = cls(f"this scaling state is of another model or policy:\n  {shown}\n{fix}")
        error.differences = tuple(differences)
        return error


class ExportError(Fp8CompileError, ValueError):
    """A model that `fp8compile.export` cannot write, or a directory that it may not write into."""


class LoadError(Fp8CompileError, ValueError):
    """An FP8 checkpoint that `fp8compile.load_fp8` cannot read, or that does not fit the model."""


class MismatchError(Fp8CompileError, ValueError):
    """What `fp8compile.mismatch` cannot compare."""


class TuneError(Fp8CompileError):
    """No policy that `fp8compile.tune` tried is accurate enough, or none is faster than bf16."""


class Unusable(Fp8CompileError):
    """Internal: what an earlier process has kept of a graph cannot be read."""


class Unpicklable(Fp8CompileError):
    """Internal: a graph holds something that cannot be written to a file as plain data."""


class Retrace(Fp8CompileError):
    """Internal: the model has to change before it is compiled. `then` changes it; Dynamo traces again."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__("the model is changed, and its graph is traced again")
        self.then = then


def need(package: str, who: str) -> None:
    """ImportError if `who` needs a package that is not installed."""
    if find_spec(package) is None:
        text = f"{who} needs {package}, which is not installed: pip install {package}"
        raise ImportError(text, name=package)


def describe(value: Any, limit: int = 80) -> str:
    """``repr`` with the type, cut to `limit` characters: ``'4' (str)``."""
    try:
        text = repr(value)
    except Exception:  # a repr of the user's own; an integer of more than 4300 digits
        text = "something that cannot be shown"
    return f"{text if len(text) <= limit else text[: limit - 3] + '...'} ({type(value).__name__})"


def at_most(most: int, lines: Sequence[str]) -> list[str]:
    """The first lines, and how many more there are."""
    more = len(lines) - most
    return [*lines[:most], f"and {more} more"] if more > 0 else list(lines)


def did_you_mean(near: Sequence[str]) -> str:
    """`` Did you mean 'a' or 'b'?``, or nothing."""
    quoted = [repr(name) for name in near]
    if len(quoted) > 1:
        quoted = [f"{', '.join(quoted[:-1])} or {quoted[-1]}"]
    return f" Did you mean {quoted[0]}?" if quoted else ""


def near(given: Any, names: Iterable[str], least: float = 0.6) -> list[str]:
    """Up to three of `names` that somebody who wrote `given` may have meant, best first; [] if `given` is
    not a str. `least`: how alike they have to be, from 0 to 1.

    Case does not matter, and "-" and " " count as "_". Dotted names are compared whole and by their last
    part: "cudagraphs" finds "triton.cudagraphs".
    """
    if not isinstance(given, str):
        return []
    compared: dict[str, str] = {}
    for name in names:
        whole = name.lower().translate(_SEPARATORS)
        compared[whole] = name
        compared.setdefault(whole.rpartition(".")[2], name)
    close = difflib.get_close_matches(given.lower().translate(_SEPARATORS), compared, 3, least)
    return list(dict.fromkeys(compared[each] for each in close))


def one_of(key: str, value: Any, allowed: Collection[str]) -> str:
    """`value`, if it is one of `allowed`; else raises OptionError, with near matches."""
    if not isinstance(value, str) or value not in allowed:
        raise OptionError.of(key, value, "one of " + ", ".join(map(repr, allowed)), near(value, allowed))
    return value


# -- errors of the user's code --


# Dynamo's errors whose message is a heading, and how that of what they wrap may begin. Read in 2.11 to 2.15
_HEADED = ("TorchRuntimeError", "BackendCompilerFailed")
_WRAPPED = "Dynamo failed to run FX node"


def met(error: BaseException) -> BaseException:
    """The error that Dynamo met in the user's code or in a backend; any other error itself."""
    found: BaseException | None = error
    if type(error).__name__ in _HEADED:
        while found is not None and (
            type(found).__module__.startswith("torch._dynamo") or str(found).startswith(_WRAPPED)
        ):
            found = found.__cause__ or found.__context__
    return found or error


def one_line(error: BaseException) -> str:
    """The class and the first line of the message of an error, or of the one that Dynamo met."""
    error = met(error)
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def one_line_where(error: BaseException) -> str:
    """An error in one line, and where it was raised: the last frame of the user's code in its traceback."""
    frames = user_frames(error)
    where = f" (in {frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return one_line(error) + where


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the user's code in the traceback of `error`.

    While Dynamo traces, the user's code has no frames. Dynamo's errors carry those that it would have had.
    """
    frames = [*traceback.extract_tb(error.__traceback__), *(getattr(error, "real_stack", None) or ())]
    return [frame for frame in frames if not is_foreign(frame.filename)]


def is_foreign(filename: str) -> bool:
    """Whether a frame is ours, torch's, the import system's, or of code without a file."""
    folders = [Path(__file__).parent, Path(importlib.__file__).parent]
    folders += map(Path, getattr(sys.modules.get("torch"), "__path__", ()))
    return filename.startswith("<") or any(map(Path(filename).absolute().is_relative_to, folders))
