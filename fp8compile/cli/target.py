"""TARGET of the command line: "path.py:function" or "package.module:function", which gives a model and its inputs.

    def build():
        return model                        # inputs come from --input
        return model, args                  # model(*args)
        return model, args, kwargs          # model(*args, **kwargs)
        return dict(model=..., args=..., kwargs=...)

A single tensor in the place of `args` is the one argument, a mapping there is `kwargs` (what a tokenizer returns). The name
may be dotted, and may be a module that exists already instead of a function. A file is loaded as its own script would be,
with its folder first on sys.path, but not as "__main__"; a module is looked for in the current folder first, as with
`python -m`. What the user's code prints goes wherever the caller has sent sys.stdout.

Everything that can go wrong is a TargetError of one line; if the user's own code raised, its traceback follows, without the
frames that are not the user's. torch is imported by the user's file, or to make inputs, and not before.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import Fp8CompileError, did_you_mean, near

if TYPE_CHECKING:
    from torch import Tensor, nn

_WANTED = "a torch.nn.Module, (model, args), (model, args, kwargs) or dict(model=, args=, kwargs=)"


class TargetError(Fp8CompileError):
    """TARGET or --input cannot be used. `details` is the traceback of the user's code, "" where there is none."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class Target:
    """A model and what it is called with: ``model(*args, **kwargs)``. `name` is TARGET as it was given."""

    name: str
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def load(spec: str, inputs: Sequence[str] = ()) -> Target:
    """The model and inputs that `spec` names. `inputs` ("8x1024:int64", "mask=8x1024:bool") replace those it returns.

    Raises TargetError: no such file, module or function; the user's code raised; what it returned is something else.
    """
    source, name = _parts(spec)
    is_file = source.endswith(".py") or os.sep in source or "/" in source
    module = _from_file(source) if is_file else _from_module(source)
    found = _attribute(module, source, name)
    target = _understood(spec, name, found if _is_model(found) else _called(name, found, source))
    if inputs:
        args, kwargs = parse_inputs(inputs)
        return replace(target, args=args, kwargs=kwargs)
    needed = [] if target.args or target.kwargs else _required(target.model.forward)
    if needed:
        raise TargetError(
            f"{name}() returned a {type(target.model).__name__} without inputs, and its forward takes {', '.join(needed)}: "
            f"return (model, args), or give --input for each, as in --input 8x1024:int64"
        )
    return target


def parse_inputs(inputs: Sequence[str]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Zeros for each of `inputs`: "8x1024:int64" is shape and dtype (float32 if there is none), "name=..." a keyword argument.

    Zeros: they are legal indices of every embedding, and large ones cost no memory. Raises TargetError.
    """
    import torch

    dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    for text in inputs:
        match = re.fullmatch(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?:torch\.)?(?P<dtype>\w+))?", text)
        if match is None:
            raise TargetError(f"--input {text!r} is not SHAPE, SHAPE:DTYPE or NAME=SHAPE:DTYPE, as in 8x1024:int64")
        dtype = match["dtype"] or "float32"
        if dtype not in dtypes:
            raise TargetError(f"--input {text!r}: torch has no dtype {dtype!r}.{did_you_mean(near(dtype, dtypes))}")
        try:
            tensor = torch.zeros([int(size) for size in match["shape"].split("x")], dtype=dtypes[dtype])
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise TargetError(f"--input {text!r}: {str(error).splitlines()[0]}") from None
        if match["name"] in kwargs:
            raise TargetError(f"--input {match['name']!r} is given twice")
        if match["name"]:
            kwargs[match["name"]] = tensor
        else:
            args.append(tensor)
    return tuple(args), kwargs


def user_traceback(error: BaseException) -> str:
    """The traceback of `error` with the user's frames only, "" if it never was in the user's code.

    Where Dynamo was tracing, the user's code had no frames of its own: its errors carry those they would have been.
    """
    traced = getattr(error, "real_stack", None) or ()
    frames = [f for f in (*traceback.extract_tb(error.__traceback__), *traced) if not _foreign(f.filename)]
    if not frames:
        return ""
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames), one_line(error)]
    return "".join(lines)


def one_line(error: BaseException) -> str:
    """Like "ValueError: what it said first", whatever the length of the message. Dynamo's: the error that it met."""
    text = str(error)
    met = re.search(r"""Explanation: .*\bgot (\w+)\((['"])(.*)\2,?\)$""", text, re.MULTILINE)
    if met:
        return f"{met[1]}: {met[3]}"
    said = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


# --- finding the function -------------------------------------------------------------------------


def _parts(spec: str) -> tuple[str, str]:
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name or os.sep in name:
        hint = f", for example {spec.rstrip(':')}:build" if spec.strip(":") else ""
        raise TargetError(f"TARGET {spec!r} is not path.py:function or package.module:function{hint}")
    return source, name


def _from_file(source: str) -> ModuleType:
    path = Path(source)
    if not path.is_file():
        folder = path.parent
        alike = near(path.name, [p.name for p in folder.glob("*.py")]) if folder.is_dir() else []
        what = "is not a file" if path.exists() else "does not exist"
        raise TargetError(f"{source} {what}.{did_you_mean([str(folder / name) for name in alike])}")
    sys.path.insert(0, str(path.resolve().parent))
    # The file's own name would hide a module of that name from everybody else
    name = path.stem if path.stem.isidentifier() and not _importable(path) else f"fp8compile_target_{path.stem}"
    loader = importlib.util.spec_from_file_location(name, path)
    if loader is None or loader.loader is None:
        raise TargetError(f"{source} is not a Python file (its name should end in .py)")
    module = importlib.util.module_from_spec(loader)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    _run(lambda: loader.loader.exec_module(module), f"loading {source}")  # type: ignore[union-attr]
    return module


def _importable(path: Path) -> bool:
    """Whether `import stem` means another file than `path`."""
    if path.stem in sys.modules:
        return True
    try:
        found = importlib.util.find_spec(path.stem)
    except (ImportError, ValueError):
        return False
    return found is not None and (found.origin is None or Path(found.origin).resolve() != path.resolve())


def _from_module(source: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(source)
    except (ImportError, ValueError):
        found = None
    except Exception as error:  # a parent package raised while it was imported
        raise TargetError(f"importing {source} raised {one_line(error)}", user_traceback(error)) from None
    if found is None:
        file = f"{source.replace('.', '/')}.py"
        hint = f"; for the file write {file}" if Path(file).is_file() else ""
        raise TargetError(f"there is no module {source!r} on the path ({os.getcwd()} is first on it){hint}")
    return _run(lambda: importlib.import_module(source), f"importing {source}")


def _attribute(module: ModuleType, source: str, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            own = [key for key, value in vars(found).items() if _is_target(value, module)]
            alike = near(part, own)
            listed = "" if alike or not own else f" It defines {', '.join(own[:12])}{', ...' if len(own) > 12 else ''}."
            raise TargetError(f"{source} has no function {name!r}.{did_you_mean(alike)}{listed}")
        found = getattr(found, part)
    if not (callable(found) or _is_model(found)):
        raise TargetError(f"{source}:{name} is a {type(found).__name__}, not a function that returns {_WANTED}")
    return found


def _is_target(value: Any, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__


# --- calling it -----------------------------------------------------------------------------------


def _called(name: str, function: Callable[[], Any], source: str) -> Any:
    needed = _required(function)
    if needed:
        raise TargetError(
            f"{source}:{name} is called without arguments, and takes {', '.join(needed)}: give them defaults, or write a "
            "function around it"
        )
    return _run(function, f"{name}() of {source}")


def _run(function: Callable[[], Any], what: str) -> Any:
    """Call the user's code. TargetError with its traceback, from the user's first frame on, if it raises or exits."""
    try:
        return function()
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        raise TargetError(f"{what} ended the program with status {error.code!r}: it must return instead") from None
    except BaseException as error:
        raise TargetError(f"{what} raised {one_line(error)}", _own_traceback(error)) from None


def _own_traceback(error: BaseException) -> str:
    """All frames below ours and the import system's: what python would print if the user had called it."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and _foreign(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def _understood(spec: str, name: str, value: Any) -> Target:
    model: Any = value
    args: Any = ()
    kwargs: Any = {}
    if isinstance(value, Mapping):
        unknown = sorted(set(map(str, value)) - {"model", "args", "kwargs"})
        if unknown or "model" not in value:
            wrong = f"with the unknown key {unknown[0]!r}" if unknown else "without the key 'model'"
            raise TargetError(f"{name}() returned a dict {wrong}; wanted is {_WANTED}")
        model, args, kwargs = value["model"], value.get("args", ()), value.get("kwargs", {})
    elif isinstance(value, tuple) and 1 <= len(value) <= 3:
        model, args, kwargs = [*value, (), {}][:3] if len(value) != 2 else [*value, {}]
    if not _is_model(model):
        raise TargetError(f"{name}() returned {_described(value)}; wanted is {_WANTED}")
    if isinstance(args, Mapping) and not kwargs:
        args, kwargs = (), args
    if args is None:
        args = ()
    if kwargs is None:
        kwargs = {}
    if not isinstance(args, (tuple, list)):
        args = (args,)
    if not isinstance(kwargs, Mapping):
        raise TargetError(f"{name}() returned kwargs that are {_described(kwargs)}; wanted is a dict")
    return Target(spec, model, tuple(args), {str(key): item for key, item in kwargs.items()})


def _is_model(value: Any) -> bool:
    torch = sys.modules.get("torch")  # where torch was never imported there is no module
    return torch is not None and isinstance(value, torch.nn.Module)


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _required(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters without which `function` cannot be called; [] where nobody knows."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _foreign(filename: str) -> bool:
    """Whether a frame is ours, torch's or the import system's."""
    if filename.startswith("<frozen") or filename.startswith("<eval_with_key"):
        return True
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # fp8compile
    torch = sys.modules.get("torch")
    roots = [package, os.path.dirname(importlib.__file__)]
    if torch is not None and torch.__file__:
        roots.append(os.path.dirname(torch.__file__))
    path = os.path.abspath(filename)
    return any(path.startswith(root + os.sep) for root in roots)
