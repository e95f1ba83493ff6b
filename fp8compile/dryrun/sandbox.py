"""Trace a training step and leave no trace of it: the common part of `explain` and `estimate`.

The model is traced in place, because a copy would have other names, or none (a closure over modules cannot be
copied). All that tracing, and code that Dynamo leaves to eager mode, may change is restored: attributes,
training flags, buffers, gradients, random states, the package's records of graphs, parameters and messages,
and the code that Dynamo compiled for the user's frames.

Parameters and buffers on the meta device are replaced by CPU tensors to which nothing is written
(`placeholders`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn

from .. import compat, logs, process
from .placeholders import unwritten

_numbers = itertools.count()


def unwrapped(model: Any) -> Any:
    """The object that torch.compile was given, if `model` is its wrapper; else `model`."""
    while True:
        inner = getattr(model, "_orig_mod", None) or getattr(model, "_torchdynamo_orig_callable", None)
        if inner is None:
            return model
        model = inner


def taken(model: Any) -> Callable[..., Any]:
    """`unwrapped(model)`; TypeError if it cannot be called, or is a class."""
    model = unwrapped(model)
    if isinstance(model, type) or not callable(model):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"expected a torch.nn.Module or a function of modules, not {kind}")
    return model


def modules_of(model: Any) -> list[nn.Module]:
    """The modules that a callable uses: itself, its bound arguments, closure, globals and attributes."""
    found: list[nn.Module] = []
    seen: set[int] = set()

    def visit(x: Any, depth: int) -> None:
        x = unwrapped(x)
        if id(x) in seen or depth > 4 or isinstance(x, type):
            return
        seen.add(id(x))
        if isinstance(x, nn.Module):
            found.append(x)
            return
        for part in _used_by(x):
            visit(part, depth + 1)

    visit(model, 0)
    return found


def _used_by(x: Any) -> Iterable[Any]:
    if isinstance(x, functools.partial):
        return x.func, *x.args, *x.keywords.values()
    if isinstance(x, types.MethodType):
        return x.__self__, x.__func__
    if isinstance(x, types.FunctionType):
        cells = [cell.cell_contents for cell in x.__closure__ or () if _filled(cell)]
        return *cells, *(x.__globals__[name] for name in x.__code__.co_names if name in x.__globals__)
    if isinstance(x, (list, tuple)):
        return x
    if isinstance(x, dict):
        return x.values()
    has_attributes = callable(x) and hasattr(x, "__dict__") and type(x).__module__ != "builtins"
    return vars(x).values() if has_attributes else ()


def roots_of(modules: list[nn.Module]) -> list[nn.Module]:
    """The modules that are no part of another one."""
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def entry(model: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `model` and has a code object of its own. Dynamo attaches compiled code to code
    objects, so this compiled code is freed with the function."""

    def explained(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    explained.__code__ = explained.__code__.replace(co_name=f"explained_{next(_numbers)}")
    return explained


def inputs(values: Any) -> Any:
    """Copies of the tensors in nested arguments. Meta tensors become zeros on the CPU (`unwritten`)."""

    def copy(x: Any) -> Any:
        return _copy(x).requires_grad_(x.requires_grad) if type(x) is torch.Tensor else x

    return pytree.tree_map(copy, values)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return unwritten(tensor) if tensor.device.type == "meta" else tensor.detach().clone()


def fuse_attention(gm: torch.fx.GraphModule) -> None:
    """Set the dropout of attention to 0 in a Dynamo graph. Attention with dropout is fused on a GPU but not
    on a CPU, where a graph for a described GPU is traced."""
    for node in gm.graph.nodes:
        if node.target is F.scaled_dot_product_attention:
            node.args = (*node.args[:4], *(0.0 for _ in node.args[4:5]), *node.args[5:])
            node.kwargs = {name: 0.0 if name == "dropout_p" else x for name, x in node.kwargs.items()}


@contextlib.contextmanager
def untouched(modules: Iterable[nn.Module], kept: Collection[types.CodeType] = ()) -> Iterator[None]:
    """Inside the context, each of `modules` that is in eval mode is in training mode. At the end, everything
    is as before, but for what Dynamo has compiled for the code objects `kept`."""
    roots = list(modules)
    with contextlib.ExitStack() as stack:
        for part in {id(part): part for root in roots for part in root.modules()}.values():
            stack.enter_context(_kept(part))
        memory: dict[int, Any] = {}
        for root in roots:
            for part in root.modules():
                part.__dict__["_compiled_call_impl"] = None  # undo module.compile(): the sandbox compiles
                if compat.autograd.is_ddp(part):  # whose forward talks to other ranks, awaiting a backward
                    alone = torch.compiler.disable(_of_one_rank, recursive=False)
                    part.__dict__["forward"] = types.MethodType(alone, part)
                _replace(part, memory)
            if not root.training:
                root.train()
        stack.enter_context(_random_states())
        stack.enter_context(process.set_aside())
        stack.enter_context(logs.quiet())
        stack.enter_context(compat.dynamo.compiled_code_goes(kept))
        stack.enter_context(compat.dynamo.other_code(_forwards(roots)))
        yield


def _of_one_rank(ddp: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of DDP without communication. Dynamo does not see it, as it does not see DDP's own: names
    of graphs, which policies match, are those of the module inside."""
    return ddp.module(*args, **kwargs)


def _forwards(modules: Iterable[nn.Module]) -> list[types.FunctionType]:
    """The functions that are the forwards of these modules and their parts."""
    kinds = {type(part) for module in modules for part in module.modules()}
    forwards = [getattr(kind, "forward", None) for kind in kinds]
    return [found for found in forwards if isinstance(found, types.FunctionType)]


@contextlib.contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """At the end, restore a module's attributes, parameters, buffers and gradients: the same objects."""
    tables = [module.__dict__] + [module.__dict__[x] for x in ("_parameters", "_buffers", "_modules")]
    before = [dict(table) for table in tables]
    gradients = [(p, p.grad) for p in module._parameters.values() if p is not None]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for table, items in zip(tables, before, strict=True):
            table.clear()
            table.update(items)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _replace(module: nn.Module, memory: dict[int, Any]) -> None:
    """Replace buffers by copies, and tensors on the meta device by unwritten ones. `memory` maps the id of
    each replaced tensor to its replacement, so that shared tensors stay shared."""
    for table, is_parameter in ((module._parameters, True), (module._buffers, False)):
        for name, tensor in table.items():
            if tensor is None or (is_parameter and tensor.device.type != "meta"):
                continue
            if id(tensor) not in memory:
                made: Any = _copy(tensor)
                if is_parameter:
                    made = nn.Parameter(made, requires_grad=tensor.requires_grad)
                made.__dict__.update(tensor.__dict__)
                memory[id(tensor)] = tensor, made  # keeps `tensor` alive, so that its id stays unique
            table[name] = memory[id(tensor)][1]


@contextlib.contextmanager
def _random_states() -> Iterator[None]:
    state, numpy = random.getstate(), sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy is not None else None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(arrays)
