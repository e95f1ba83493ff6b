"""What the host asks of the device around compiled code.

On a CPU nothing waits, so a read of a tensor costs nothing and is seen by nobody. Here tensors are a GPU's,
and a read of one is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .graphs import _inner

# operators that wait: a number for the host, sizes that are data, data from the host's unpinned memory
WAITS = "_local_scalar_dense item nonzero masked_select unique index_put_ lift_fresh equal is_nonzero".split()
# the same as methods that read the memory of a CPU's tensor without an operator
READS = "item tolist cpu numpy __array__ __bool__ __float__ __int__ __index__ __contains__".split()


class Waited(AssertionError):
    """The host waited for the device."""


def holds(tensors: Sequence[Any]) -> bool:
    """Is one of these on the GPU?"""
    return any(isinstance(x, Tensor) for x in tensors)


def seen(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """An operator runs on the host's behalf."""
    if name.removeprefix("_").startswith(tuple(x.removeprefix("_") for x in WAITS)):
        if name == "lift_fresh" or holds([*args, *kwargs.values()]):
            raise Waited(name)
    masks = (torch.bool, torch.uint8)
    if name == "index" and any(isinstance(x, Tensor) and x.dtype in masks for x in args[1]):
        raise Waited("index by a mask")


def called(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """A function of torch is called on the host."""
    moved = name == "to" and any(str(x) == "cpu" for x in (*args[1:], *kwargs.values()))
    if (name in READS or moved) and holds(args[:1]):
        raise Waited(name)


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen(str(func).split("::")[-1].removeprefix("aten.").split(".")[0], args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called(getattr(func, "__name__", ""), args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def refusing_waits() -> Iterator[None]:
    """Inside, the host may not wait for what is on the GPU. What compiled code does is not seen."""
    from fp8compile.compat import autograd
    from fp8compile.runtime.compiled_graph import CompiledGraph

    places: list[tuple[Any, str]] = [(CompiledGraph, "__call__")]
    with contextlib.suppress(ModuleNotFoundError):  # in a copy without this feature
        from fp8compile.features.delayed.arena import Arena
        from fp8compile.features.delayed.life import PageSet

        places += [(Arena, "move"), (PageSet, "begin_backward")]
    with contextlib.suppress(ModuleNotFoundError):  # as above
        from fp8compile.features.weight_cache.weight_cache import WeightCache

        places.append((WeightCache, "end"))

    def within(stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _Functions(), _Operators():
                return stock(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        # inside of a mode Dynamo would compile nothing, and call nothing that is compiled
        for owner, name in places:
            stack.enter_context(mock.patch.object(owner, name, within(getattr(owner, name))))
        # what is done for us is hidden from the user's modes, and has to be seen here
        stack.enter_context(mock.patch.object(autograd, "_disable_current_modes", contextlib.nullcontext))
        yield


class Body:
    """The calls of one half that was compiled: for each, the addresses of the inputs that are said to stay
    where they are. (In a backward what the forward has saved is one of them: that is for Inductor to hold.
    Those that the graph was given stay.)"""

    def __init__(self, names: Sequence[str], fixed: Sequence[int], backward: bool):
        self.names, self.fixed, self.backward = tuple(names), tuple(fixed), backward
        self.addresses: list[dict[str, int]] = []


@contextlib.contextmanager
def bodies() -> Iterator[list[Body]]:
    """Inside, compiled code is interpreted, and dispatch modes do not see into it. Gives the halves."""
    from fp8compile.compat.autograd import _disable_current_modes
    from fp8compile.runtime.inner import Inner
    from fp8compile.runtime.interpreter import Eager, boxed

    found: list[Body] = []

    def compile(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        body = Body(names, kwargs.get("static_input_idxs") or (), bool(kwargs.get("is_backward")))
        found.append(body)
        run = boxed(Eager(gm))

        def quiet(args: list[Any]) -> Any:
            body.addresses.append(
                {names[i]: args[i].data_ptr() for i in body.fixed if names[i].startswith("primals")}
            )
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return run(args)

        quiet._boxed_call = True  # type: ignore[attr-defined]
        return quiet

    with _inner(Inner(compile)):
        yield found


def planted(where: str, read: Callable[[Tensor], Any]) -> Any:
    """Inside, what decides about a page before a forward ("decide"), or before a backward ("begin_backward"),
    reads it, too, in this way."""
    from fp8compile.features.delayed.life import PageSet

    stock = getattr(PageSet, where)

    def call(self: PageSet) -> Any:
        read(self.page.tensor)
        return stock(self)

    return mock.patch.object(PageSet, where, call)
