"""Triton kernels on a CPU: Triton's interpreter, made to round as the hardware does.

Triton decides at import whether it compiles or interprets. Tests do both in one process, so Triton's library
of functions (`tl.max`, `tl.sum`) is replaced while an interpreted kernel runs. The interpreter's conversions
truncate to bfloat16 and differ from torch for FP8: they are replaced by torch's, which round to nearest even,
and saturate as NVIDIA's do (cvt.rn.satfinite).

A kernel may touch only its own tensors: each load, store and atomic operation is checked.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from triton.language import standard
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, TensorHandle
from triton.runtime.jit import JITFunction

with contextlib.suppress(ImportError):
    import triton.experimental.gluon  # noqa: F401  # the interpreter imports it later, and it copies Triton's functions

from fp8compile import compat
from fp8compile.codegen.expressions import saturates
from fp8compile.codegen.inline import Inliner
from tests.support import hooks

TORCH = {
    tl.float32: torch.float32,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
OLD_INTERPRETER = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _convert(data: np.ndarray, source: Any, target: Any, _rounding: Any = None) -> np.ndarray:
    bits = np.ascontiguousarray(data).view({1: np.uint8, 2: np.int16, 4: np.int32}[data.dtype.itemsize])
    given = torch.from_numpy(bits.copy()).view(TORCH[source])
    wide = given.to(torch.float32)
    if saturates(TORCH[target]):
        largest = torch.finfo(TORCH[target]).max
        wide = wide.clamp(-largest, largest)  # NaN stays
    made = wide.to(TORCH[target])
    result = made.view(BITS[made.element_size()]).numpy()
    return result.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[made.element_size()])


BUILDER = interpreter.InterpreterBuilder
_dot, _binary, _block_type = BUILDER.create_dot, BUILDER.binary_op, tl.block_type.__init__
_types: dict[Any, dict[str, Any]] = {}


def _bf16_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
    """The interpreter's own multiplies the bits of bfloat16."""
    if a.dtype.scalar == tl.bfloat16:
        wide = [_convert(x.data, tl.bfloat16, tl.float32).view(np.float32) for x in (a, b)]
        a, b = (interpreter.TensorHandle(data, tl.float32) for data in wide)
    return _dot(self, a, b, *more)


def _compared(self: Any, *args: Any) -> Any:
    """Restores the boolean dtype of a broadcast comparison of two scalars, which the interpreter loses."""
    made = _binary(self, *args)
    return TensorHandle(made.data, tl.int1) if made.data.dtype == np.bool_ else made


def _known_type(self: Any, element: Any, shape: Any) -> None:
    """A type is made for each value of each program, and few of them differ."""
    key = element.name, *(getattr(size, "value", size) for size in shape)
    if key not in _types:
        _block_type(self, element, shape)
        _types[key] = vars(self)
    vars(self).update(_types[key])


class Memory:
    """The addresses that a kernel may touch: those of its arguments."""

    def __init__(self, tensors: Iterable[Any]):
        self.ranges: list[tuple[int, int]] = []
        for x in tensors:
            if isinstance(x, torch.Tensor) and x.numel():
                extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
                self.ranges.append((x.data_ptr(), x.data_ptr() + extent * x.element_size()))

    def check(self, pointers: np.ndarray, mask: np.ndarray) -> None:
        touched = pointers[np.broadcast_to(mask, pointers.shape)]
        if touched.size:
            low, high = int(touched.min()), int(touched.max())
            assert any(first <= low and high < end for first, end in self.ranges), (
                "a kernel touches what is not its own"
            )


@contextlib.contextmanager
def _guarded(memory: Memory):
    """Inside, interpreted kernels may touch only this memory."""

    def checked(name: str, pointers: int, mask: int) -> Callable[..., Any]:
        stock = getattr(BUILDER, name)

        def call(self: Any, *args: Any) -> Any:
            memory.check(args[pointers].data, args[mask].data)
            return stock(self, *args)

        return call

    places = {"create_masked_load": (0, 1), "create_masked_store": (0, 2), "create_atomic_rmw": (1, 3)}
    with mock.patch.multiple(BUILDER, **{name: checked(name, *place) for name, place in places.items()}):
        yield


def tensor_of(data: Any, dtype: tl.dtype, number: bool = False) -> tl.tensor:
    """`number`: it is no block, although numpy holds it as [1]."""
    data = np.asarray(data)
    return tl.tensor(
        TensorHandle(data, dtype),
        tl.block_type(dtype, list(data.shape)) if data.shape and not number else dtype,
    )


class _Library:
    """Replaces `libdevice`: each function is torch's, in float64, so that an element's bits do not depend on
    its neighbours (on how torch divides a tensor into vectors)."""

    NAMES = {"rint": "round", "nearbyint": "round", "llrint": "round", "fast_dividef": "div"}

    def __getattr__(self, name: str) -> Callable[..., tl.tensor]:
        function = getattr(torch, self.NAMES.get(name, name))

        def call(*args: Any) -> tl.tensor:
            tensors = [x for x in args if isinstance(x, tl.tensor)]
            dtype, number = tensors[0].dtype, not any(x.type.is_block() for x in tensors)
            wide = [
                torch.tensor(x.handle.data if isinstance(x, tl.tensor) else x, dtype=torch.float64)
                for x in args
            ]
            made = function(*wide)
            if made.dtype == torch.bool:
                return tensor_of(made.numpy(), tl.int1, number)
            return tensor_of(made.to(TORCH.get(dtype, torch.float64)).numpy(), dtype, number)

        return call


libdevice = _Library()


@contextlib.contextmanager
def _with_libdevice(names: dict[str, Any]):
    """Inside, a kernel that reads these globals calls torch instead of `libdevice`."""
    real = names.get("libdevice")
    names["libdevice"] = libdevice
    try:
        yield
    finally:
        names["libdevice"] = real


@functools.cache
def _library(*modules: Any) -> dict[tuple[Any, str], Any]:
    """The jitted functions of Triton and of these modules, interpreted."""
    found = {}
    for module in (tl, standard, *modules):
        for name, member in vars(module).items():
            if isinstance(member, JITFunction):
                found[module, name] = InterpretedFunction(member.fn)
    return found


def _modules(jitted: JITFunction) -> set[Any]:
    """The package's modules in which a jitted function finds others that it calls, and these find theirs."""
    found: set[Any] = set()
    waiting = [jitted]
    while waiting:
        module = sys.modules.get(waiting.pop().fn.__module__)
        if module is not None and module not in found and module.__name__.startswith("fp8compile."):
            found.add(module)
            waiting += [x for x in vars(module).values() if isinstance(x, JITFunction)]
    return found


class Interpreted:
    """Stands for a JIT function: `kernel[grid](**arguments)` runs it here."""

    def __init__(self, jitted: JITFunction, config: tuple[int, ...]):
        self.jitted, self.name = jitted, jitted.fn.__name__
        self.source = "".join(linecache.getlines(jitted.fn.__code__.co_filename))
        self.block = {"BLOCK_R": config[0], "BLOCK_C": config[1]}
        self.arg_names = jitted.arg_names

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            memory, called = Memory([*args, *kwargs.values()]), _modules(self.jitted)
            programs = grid(self.block) if callable(grid) else grid
            with interpreting(*called), _guarded(memory), _with_libdevice(self.jitted.fn.__globals__):
                InterpretedFunction(self.jitted.fn)[programs](*args, **kwargs, **self.block)

        return run


class OnCpu:
    """Stands for a JIT function of a module, whose last two arguments are BLOCK_R and BLOCK_C. `blocks`:
    those of its launches; `told`: what else the launches say."""

    def __init__(self, monkeypatch: Any, module: Any, name: str):
        self.jitted, self.blocks = getattr(module, name), set[tuple[int, int]]()
        self.told: list[dict[str, Any]] = []
        monkeypatch.setattr(module, name, self)

    def __getitem__(self, grid: Any) -> Any:
        def run(*given: Any, **told: Any) -> None:
            *arguments, rows, columns = given
            self.blocks.add((rows, columns))
            self.told.append(told)
            Interpreted(self.jitted, (rows, columns))[grid](*arguments)

        return run


def _ptx(
    text: str, _constraints: str, values: list[tl.tensor], dtype: tl.dtype, *_: Any, **_more: Any
) -> tl.tensor:
    """The PTX in our kernels: four conversions to FP8, or two of bfloat16 (`codegen.expressions`)."""
    if "cvt." not in text:
        words = values[0].handle.data.reshape(-1, 2).astype(np.uint32) @ np.array([1, 1 << 16], np.uint32)
        assert "shl.b32 a, $2, 16; and.b32 b, $2, 0xffff0000; mov.b32 $0, a; mov.b32 $1, b;" in text
        pairs = np.stack([words << 16, words & 0xFFFF0000], 1).astype(np.uint32)
        return tensor_of(pairs.view(np.float32).reshape(values[0].handle.data.shape), dtype)
    kinds = {"cvt.rn.satfinite.e4m3x2": tl.float8e4nv, "cvt.rn.satfinite.e5m2x2": tl.float8e5}
    (target,) = [kind for name, kind in kinds.items() if name in text]
    return tensor_of(_convert(values[0].handle.data, tl.float32, target), dtype)


@contextlib.contextmanager
def interpreting(*modules: Any):
    """Inside, interpreted functions can run. `modules`: whose jitted functions they call, beside Triton's."""
    with contextlib.ExitStack() as stack:
        for (module, name), function in _library(*modules).items():
            stack.enter_context(mock.patch.object(module, name, function))
        stack.enter_context(mock.patch.object(interpreter, "_convert_float", _convert))
        stack.enter_context(mock.patch.object(tl, "inline_asm_elementwise", _ptx))
        stack.enter_context(mock.patch.multiple(BUILDER, create_dot=_bf16_dot, binary_op=_compared))
        stack.enter_context(mock.patch.object(tl.block_type, "__init__", _known_type))
        stack.enter_context(mock.patch.object(InterpretedFunction, "__call__", _caller()))
        stack.enter_context(mock.patch.object(interpreter, "_patch_lang_tensor", _patch_tensor))
        stack.enter_context(_restored())
        stack.enter_context(np.errstate(all="ignore"))
        yield


_patch = interpreter._patch_lang_tensor


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    # one element, in any shape (Triton 3.6)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _caller():
    """A `__call__` by which one interpreted function calls another.

    Triton's own patches the language at each call, which takes longer than the rest; this one patches once a
    module.
    """
    patched: set[int] = set()

    def call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    return call


@contextlib.contextmanager
def _restored():
    """Restores Triton's language at the end: before 3.7, parts stay patched, and the compiler fails."""
    modules, classes = (tl, tl.core, tl.math, standard), (tl.tensor, tl.core.tensor_descriptor_base)
    before = {owner: dict(vars(owner)) for owner in (*modules, *classes)}
    try:
        yield
    finally:
        for owner, members in before.items():
            for name, member in dict(vars(owner)).items():
                if name in members and member is not members[name]:
                    setattr(owner, name, members[name])
                elif name not in members and owner in classes:
                    # names added to modules stay: interpreted functions use them
                    delattr(owner, name)


def launched(call: Any, given: Any, target: Any, lower: Any, dynamic: bool) -> GraphModule:
    """The graph of `call`, in which `lower` makes a launch of the one call of `target`. The interpreter runs
    it on the CPU."""
    traced = make_fx(call, tracing_mode="symbolic" if dynamic else "fake")(*given)
    (node,) = traced.graph.find_nodes(op="call_function", target=target)
    with hooks.launching(lambda kernel, tiles: Interpreted(kernel, tiles[-1])):
        result = lower(node, Inliner())
    if result is not None:  # else `lower` has replaced the node's results
        node.replace_all_uses_with(result)
    traced.graph.erase_node(node)
    traced.graph.lint()
    traced.recompile()
    assert len(compat.triton.launches(traced.graph)) == 1
    return traced


@contextlib.contextmanager
def kernels_on_cpu(
    config: tuple[int, int, int] | None = None, choose: Callable[[Any], Any] | None = None, **limits: int
):
    """Inside, CPU graphs get generated kernels, and the interpreter runs them. Yields the list of the kernels
    made. `config`: the tile of each; `choose`, `other` and `limits`: see `hooks.launching`."""
    made: list[Interpreted] = []

    def tuned(kernel: JITFunction, configs: Any) -> Interpreted:
        made.append(Interpreted(kernel, configs[-1]))
        return made[-1]

    with hooks.launching(tuned, (lambda kernel: config) if config else choose, **limits):
        yield made


@contextlib.contextmanager
def offsets():
    """The widths in bytes of the offsets that interpreted kernels add to pointers, but for single numbers."""
    widths: set[int] = set()
    add = BUILDER.create_addptr

    def recorded(self: Any, pointer: Any, offset: Any) -> Any:
        if offset.data.size > 1:
            widths.add(offset.data.dtype.itemsize)
        return add(self, pointer, offset)

    with mock.patch.object(BUILDER, "create_addptr", recorded):
        yield widths
