"""TARGET of the command line: "path.py:function" or "package.module:function", for a model and its inputs.

docs/cli.md says what the function may return. Its name may be dotted, and may be that of an nn.Module. A
module is searched in the current folder first, as with `python -m`.

Every failure is a TargetError of one line. If the user's own code raised, the error also carries the
traceback, from the user's first frame on.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import operator
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import Fp8CompileError, did_you_mean, near, one_line
from .messages import traceback_of

if TYPE_CHECKING:
    from torch import Tensor, nn

_PARTS = ("model", "args", "kwargs")
_WANTED = "a torch.nn.Module, (model, args), (model, args, kwargs) or dict(model=, args=, kwargs=)"


class TargetError(Fp8CompileError):
    """TARGET or --input cannot be used. `details` is the traceback of the user's code, or ""."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class Target:
    """`module` is that of the function that was named; `spec` is TARGET."""

    spec: str
    module: ModuleType
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def function(self, name: str | None) -> Callable[..., Any] | None:
        """The function `name` beside the one that was named; None for None. TargetError if there is none."""
        if name is None:
            return None
        source = self.spec.rpartition(":")[0]
        found = _named(self.module, source, name)
        if not callable(found):
            raise TargetError(f"{source}:{name} is a {type(found).__name__}, not a function")
        return found


def load(spec: str, inputs: Sequence[str] = ()) -> Target:
    """The model and inputs of the function that `spec` names. `inputs` ("8x1024:int64", "mask=8x1024:bool")
    replace the inputs that the function returns.

    TargetError if the file, module or function does not exist, if the code raises, or if it returns no model.
    """
    source, _, name = spec.rpartition(":")
    if not source or not all(part.isidentifier() for part in name.split(".")):
        hint = f", for example {spec.rstrip(':')}:build" if spec.strip(":") else ""
        raise TargetError(f"TARGET {spec!r} is not path.py:function or package.module:function{hint}")
    is_module = not source.endswith(".py") and all(part.isidentifier() for part in source.split("."))
    read = _imported if is_module else _loaded
    module = _run(lambda: read(source), f"loading {source}")
    target = _understood(spec, module, _found(module, source, name))
    if inputs:
        args, kwargs = parse_inputs(inputs)
        return replace(target, args=args, kwargs=kwargs)
    needed = [] if target.args or target.kwargs else _required(target.model.forward)
    if needed:
        raise TargetError(
            f"{name}() returned a {type(target.model).__name__} without inputs, and its forward takes "
            f"{', '.join(needed)}: return (model, args), or give --input for each, as in --input 8x1024:int64"
        )
    return target


def parse_inputs(inputs: Sequence[str]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Zeros for `inputs`: "8x1024:int64" is shape and dtype (default float32), "name=..." a keyword argument.

    Zeros are valid indices of every embedding; large ones take no memory until written. Raises TargetError.
    """
    import torch

    dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    for text in inputs:
        match = re.fullmatch(
            r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?:torch\.)?(?P<dtype>\w+))?", text
        )
        if match is None:
            raise TargetError(
                f"--input {text!r} is not SHAPE, SHAPE:DTYPE or NAME=SHAPE:DTYPE, as in 8x1024:int64"
            )
        name, dtype = match["name"], match["dtype"] or "float32"
        if dtype not in dtypes:
            raise TargetError(
                f"--input {text!r}: torch has no dtype {dtype!r}.{did_you_mean(near(dtype, dtypes))}"
            )
        if name in kwargs:
            raise TargetError(f"--input {name!r} is given twice")
        try:
            tensor = torch.zeros([int(size) for size in match["shape"].split("x")], dtype=dtypes[dtype])
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise TargetError(f"--input {text!r}: {one_line(error)}") from None
        if name:
            kwargs[name] = tensor
        else:
            args.append(tensor)
    return tuple(args), kwargs


def _loaded(source: str) -> ModuleType:
    path = Path(source)
    if not path.is_file() or path.suffix != ".py":
        alike = near(path.name, [file.name for file in path.parent.glob("*.py")])
        what = "is not a Python file" if path.exists() else "does not exist"
        raise TargetError(f"{source} {what}.{did_you_mean([str(path.parent / name) for name in alike])}")
    sys.path.insert(0, str(path.resolve().parent))
    # a target json.py must not replace the real json
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = f"fp8compile_target_{path.stem}" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    # dataclasses and pickle look up their module there
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _imported(source: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if not f"{source}.".startswith(f"{error.name}."):  # the user's module imports a missing one
            raise
        raise TargetError(
            f"there is no module {source!r} on the path ({os.getcwd()} is first on it)"
        ) from None


def _named(module: ModuleType, source: str, name: str) -> Any:
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        functions = {key: value for key, value in vars(module).items() if inspect.isfunction(value)}
        own = [key for key, value in functions.items() if value.__module__ == module.__name__]
        hint = did_you_mean(near(name, own)) or f" It defines {', '.join(own[:12]) or 'none'}."
        raise TargetError(f"{source} has no function {name!r}.{hint}") from None


def _found(module: ModuleType, source: str, name: str) -> Any:
    """The object called `name` if it is an nn.Module, else the result of calling it."""
    from torch import nn

    found = _named(module, source, name)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise TargetError(
            f"{source}:{name} is a {type(found).__name__}, not a function that returns {_WANTED}"
        )
    needed = _required(found)
    if needed:
        takes = f"{source}:{name} is called without arguments, and takes {', '.join(needed)}"
        raise TargetError(f"{takes}: give them defaults, or write a function around it")
    return _run(found, f"{name}() of {source}")


def _required(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters that a call of `function` must give."""
    parameters = inspect.signature(function).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def _run(function: Callable[[], Any], what: str) -> Any:
    """Call the user's code. TargetError if it exits, or if it raises: then with the user's traceback."""
    try:
        return function()
    except TargetError:
        raise
    except SystemExit as error:
        raise TargetError(
            f"{what} ended the program with status {error.code!r}: it must return instead"
        ) from None
    except Exception as error:
        raise TargetError(f"{what} raised {one_line(error)}", traceback_of(error)) from None


def _understood(spec: str, module: ModuleType, value: Any) -> Target:
    """The target whose function returned `value`."""
    from torch import nn

    if isinstance(value, Mapping):
        given, shown = dict(value), f"a dict with the keys {', '.join(map(repr, value))}"
    else:
        items = value if isinstance(value, tuple) else (value,)
        given = dict(zip_longest(_PARTS, items))
        shown = f"({', '.join(type(item).__name__ for item in items)})"
    model, args, kwargs = map(given.get, _PARTS)
    if isinstance(args, Mapping) and kwargs is None:
        args, kwargs = (), args
    if not isinstance(args, (tuple, list)):
        args = () if args is None else (args,)
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(model, nn.Module) or not set(given) <= set(_PARTS) or not isinstance(kwargs, Mapping):
        raise TargetError(f"{spec.rpartition(':')[2]}() returned {shown}; wanted is {_WANTED}")
    return Target(spec, module, model, tuple(args), dict(kwargs))
