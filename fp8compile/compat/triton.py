"""Triton kernels: loading generated ones, launching them in a graph, and how Inductor treats launches."""

from __future__ import annotations

import contextlib
import functools
import linecache
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation
from torch._inductor import config
from torch.fx import Graph, Node

_ours: dict[Any, bool] = {}  # Python functions of kernels launched here: may the compiler contract them?
_accesses: dict[Any, Any] = {}  # by such a function and the arguments not given: what it reads and writes


# options of Inductor by which it reorders a graph by data dependencies, after our pass
REORDERING = tuple(f"bucket_{kind}_fx" for kind in ("all_gathers", "reduce_scatters", "all_reduces"))
REORDERING += ("aten_distributed_optimizations.enable_overlap_scheduling",)


def is_on(option: str, options: Mapping[str, Any] | None = None) -> bool:
    """True if this option of Inductor is on. One that a version lacks is off. `options`: a compilation's."""
    given = functools.reduce(lambda x, part: getattr(x, part, None), option.split("."), config)
    return (options or {}).get(option, given) not in (None, False, "none")


def reorders() -> bool:
    """True if Inductor will reorder a graph after our pass by data dependencies. Launches, which write, have
    none."""
    return any(map(is_on, REORDERING))


def max_autotune() -> bool:
    return is_on("max_autotune") or is_on("max_autotune_pointwise")


def converts_wrongly(capability: tuple[int, int]) -> bool:
    """True if Triton may convert float32 to FP8 wrongly on this NVIDIA GPU. 3.6 may; 3.9 does not.

    On sm_89, 3.6 converts in two steps, which rounds twice: `cvt.rz.f16.f32`, then `cvt.rn.satfinite` of
    float16. And its ptxas (12.8, up to sm_90) miscompiles pairs of FP8 numbers that are 16-bit registers: a
    pair of equal values that fills a word on both sides leaves half of it unwritten, and the bytes of a pair
    that is stored in both layouts are taken before the pair is there. (Seen on an H200;
    tests/support/undefined_bytes.py finds it in machine code.)"""
    return capability in ((8, 9), (9, 0)) and _before_3_9()


def widens_early() -> bool:
    """True if Triton may change the layout of a value before the widening of the one bfloat16 tensor that it
    comes from, and so compute it in both layouts. 3.6 does, whatever that costs; 3.9 does not."""
    return _before_3_9()


def _before_3_9() -> bool:
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)


@functools.cache
def load_kernel(name: str, source: str) -> Any:
    """The JIT function `name` of `source`, from a file in Inductor's cache: Triton reads files."""
    from torch._inductor.codecache import PyCodeCache

    kernel = getattr(PyCodeCache.load(source), name)
    # the cache may be deleted while this process keeps the function, whose source Inductor reads again
    file = kernel.fn.__code__.co_filename
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    return kernel


def launch(
    emit: Any,
    function: Any,
    grids: list[tuple],
    arguments: dict[str, Any],
    constants: dict[str, Any] | None = None,
    contracts: bool = False,
) -> Node:
    """Insert the launch of a Triton function, with one grid a configuration. `arguments` are tensors, or
    nodes of numbers. `constants` are values of `tl.constexpr` parameters, and None for arguments that are not
    given. Launches with different constants are tuned apart. `contracts`: a compiler may make one
    instruction, which rounds once, of a product and a sum. (An eager step and Triton's interpreter round
    twice. Triton's own default is to contract, and not to from 3.10 on.)"""
    _ours[_python_function(function)] = contracts
    with emit.graph.inserting_before(emit.anchor):
        node = emit.graph.call_function(
            triton_kernel_wrapper_mutation,
            kwargs={
                "kernel_idx": kernel_side_table.add_kernel(function),
                "constant_args_idx": kernel_side_table.add_constant_args(constants or {}),
                "grid": grids,
                "tma_descriptor_metadata": {},
                "kwargs": arguments,
            },
        )
    node.meta.update(emit.meta, val=None)
    # the kernel needs exactly these strides: without this, Inductor may pad them
    node.meta["eager_input_vals"] = torch.fx.map_arg(((), dict(node.kwargs)), lambda n: n.meta["val"])
    return node


def _python_function(function: Any) -> Any:
    """The Python function inside of a JIT function, which may be inside of an autotuner."""
    while hasattr(function, "fn"):
        function = function.fn
    return function


def eliminate_dead_code(graph: Graph) -> None:
    """Eliminate dead code, but keep the launches, which look pure to torch.fx."""
    kept = set(launches(graph))
    graph.eliminate_dead_code(is_impure_node=lambda node: node in kept or node.is_impure())


def launches(graph: Graph) -> list[Node]:
    return graph.find_nodes(op="call_function", target=triton_kernel_wrapper_mutation)


def launched(node: Node) -> tuple[Any, dict[str, Any]]:
    """The Triton function of a launch and its arguments."""
    kwargs: Any = node.kwargs
    arguments = {**kernel_side_table.get_constant_args(kwargs["constant_args_idx"]), **kwargs["kwargs"]}
    return kernel_side_table.get_kernel(kwargs["kernel_idx"]), arguments


_OPERATIONS = {"Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv, "Mod": operator.mod}
_OPERATIONS |= {"PythonMod": operator.mod, "Max": torch.sym_max, "Min": torch.sym_min}


def size_node(emit: Any, expr: Any, symbol: Callable[[Any], Node]) -> Any:
    """Nodes that compute an integer expression of sizes."""
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        return symbol(expr)
    if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
        op: Any = operator.mul
        parts = [size_node(emit, expr.base, symbol)] * int(expr.exp)
    else:
        op = _OPERATIONS.get(type(expr).__name__)
        if op is None:
            raise NotImplementedError(f"a size that cannot be computed: {expr}")
        parts = [size_node(emit, x, symbol) for x in expr.args]
    return functools.reduce(
        lambda a, b: op(a, b) if isinstance(a, int) and isinstance(b, int) else emit(op, a, b), parts
    )


def stable_sort(graph: Graph) -> None:
    """Put a graph in topological order, changing as little as possible."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def contraction_chosen() -> contextlib.AbstractContextManager[Any]:
    """Inside, Inductor writes into its code whether the compiler may contract one of our kernels. (No version
    takes this from a launch. Read in 2.11, 2.13 and 2.15: CachingAutotuner compiles with `enable_fp_fusion`
    of `triton_meta`, if that has it.) Kernels of others, and Inductor's own, stay as they are."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    define = PythonWrapperCodegen.define_user_defined_triton_kernel

    def defined(self: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        contracts = _ours.get(_python_function(kernel))
        if contracts is None:
            return define(self, kernel, *args, **kwargs)
        write = self.define_kernel

        def written(name: str, body: str, *more: Any, **others: Any) -> Any:
            chosen = f"triton_meta={{'enable_fp_fusion': {contracts}, "
            new = body if chosen in body else body.replace("triton_meta={", chosen, 1)
            return write(name, new, *more, **others)

        with mock.patch.object(self, "define_kernel", written):
            return define(self, kernel, *args, **kwargs)

    return mock.patch.object(PythonWrapperCodegen, "define_user_defined_triton_kernel", defined)


@contextlib.contextmanager
def default_contraction() -> Iterator[None]:
    """Inside, Triton's default for contraction is set to what it is. Triton 3.9 warns where somebody asks for
    it, and torch asks even where it compiles no kernel: which dtypes a GPU has, what a kernel accesses."""
    from triton import knobs

    if not hasattr(knobs.language, "default_fp_fusion"):
        yield
        return
    with knobs.language.scope():
        knobs.language.default_fp_fusion = knobs.language.default_fp_fusion
        yield


def accesses_known() -> contextlib.AbstractContextManager[Any]:
    """Inside, Inductor finds out only once which arguments one of our kernels writes (once more where one is
    not given). By itself it compiles the kernel to Triton's IR for that, twice a launch, and the layers of a
    model launch the same ones, as do the graphs of a model that is compiled block by block."""
    names = "identify_accessed_tensors", "identify_mutated_tensors"  # the second one up to 2.11
    name = next(name for name in names if hasattr(triton_kernel_wrap, name))
    find = getattr(triton_kernel_wrap, name)

    def identify(kernel: Any, arguments: dict[str, Any], *more: Any) -> Any:
        function = _python_function(kernel)
        if function not in _ours:
            return find(kernel, arguments, *more)
        key = function, frozenset(name for name, value in arguments.items() if value is None)
        if key not in _accesses:
            _accesses[key] = find(kernel, arguments, *more)
        return _accesses[key]

    return mock.patch.object(triton_kernel_wrap, name, identify)
