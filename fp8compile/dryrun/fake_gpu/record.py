"""Moves graphs traced on the CPU to the described device, and reads the kernels that Inductor makes."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from ...config.operators import MATMULS
from ...passes.collect import module_of
from ...runtime.interpreter import Boxed
from ..placeholders import placeholder_callable
from . import plan_traffic
from .device import CUDA
from .step import BLOCKS, FAST, PRECISE, Attention, Graph, Launch, MatmulLaunch, TensorLayout


def _moved(value: Any) -> Any:
    """`value` with each CPU fake tensor in it replaced by one on cuda:0."""

    def move(t: Any) -> Any:
        if isinstance(t, FakeTensor) and t.device.type == "cpu":
            with t.fake_mode:
                return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=CUDA)
        return t

    return pytree.tree_map(move, value)


def _move_graph(gm: torch.fx.GraphModule) -> None:
    """Change the fake tensors in the metadata, and the device arguments, to cuda:0."""
    for node in gm.graph.nodes:
        node.meta.pop("tensor_meta", None)
        if "val" in node.meta:
            node.meta["val"] = _moved(node.meta["val"])
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CUDA}


@contextlib.contextmanager
def retarget_graphs() -> Iterator[None]:
    """Move graphs at the two entries of Inductor: joint passes, and the lowering of partitioned graphs."""
    from torch._inductor import compile_fx

    joint_passes, lower = compile_fx._recursive_joint_graph_passes, compile_fx.fx_codegen_and_compile

    def moved_joint_passes(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        _move_graph(gm)
        if kwargs.get("input_device") is not None:
            kwargs["input_device"] = CUDA
        return joint_passes(gm, *args, **kwargs)

    def moved_lower(gm: torch.fx.GraphModule, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        _move_graph(gm)
        if (graphs := kwargs.get("cudagraphs")) is not None:
            graphs.value = False  # a plan is not recorded, and a build of torch for CPUs could not
        return lower(gm, _moved(list(example_inputs)), *args, **kwargs)

    with (
        mock.patch.object(compile_fx, "_recursive_joint_graph_passes", moved_joint_passes),
        mock.patch.object(compile_fx, "fx_codegen_and_compile", moved_lower),
    ):
        yield


# -- reading the scheduled graph --

# our matmul operators, one that only Inductor makes (bias_addmm), and those that only a model's code calls
_MATMULS = {**MATMULS, "bias_addmm": MATMULS["addmm"]}
_MATMULS |= dict.fromkeys(("_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm"), MATMULS["mm"])
_MATMUL = re.compile(rf"\b({'|'.join(_MATMULS)})(\.default|\.out|_dtype)?$")
_ATTENTION = re.compile(r"_scaled_dot_product\w*attention")


class _Reader:
    """Turns the scheduler's nodes of one lowered graph into `Launch`s."""

    def __init__(self, lowering: Any) -> None:
        self.sizes = lowering.sizevars

    def number(self, expr: Any) -> int:
        if isinstance(expr, torch.SymInt):
            expr = expr.node.expr
        try:
            return int(expr)
        except TypeError:  # a symbolic size; 2.12 renamed size_hint
            hint = getattr(self.sizes, "optimization_hint", None) or self.sizes.size_hint
            return int(hint(expr, fallback=0))

    def layout(self, tensor: Any) -> TensorLayout:
        """The layout of an Inductor IR node."""
        return self._layout(tensor.get_name(), tensor.get_size(), tensor.get_stride(), tensor.get_dtype())

    def placeholder(self, name: str, tensor: torch.Tensor) -> TensorLayout:
        """The layout of a fake tensor."""
        return self._layout(name, tensor.shape, tensor.stride(), tensor.dtype)

    def _layout(self, name: str, shape: Any, stride: Any, dtype: torch.dtype) -> TensorLayout:
        return TensorLayout(name, tuple(map(self.number, shape)), tuple(map(self.number, stride)), dtype)

    def matmul(self, node: Any) -> MatmulLaunch | None:
        name = getattr(node, "python_kernel_name", None) or getattr(node, "op_overload", "")
        found = _MATMUL.search(str(name))
        if not found:
            return None
        form = _MATMULS[found[1]]
        a, b = (self.layout(node.inputs[i]) for i in (form.a, form.b))
        sums = self.accumulation(node, a) if found[1].startswith("_scaled") else FAST
        return MatmulLaunch(found[1], a, b, self.layout(node), sums)

    def accumulation(self, node: Any, a: TensorLayout) -> str:
        """How a scaled matmul of the library accumulates: FAST, PRECISE or BLOCKS."""
        if len(node.inputs) > 2 and "grouped" not in str(node.python_kernel_name):
            scales = self.layout(node.inputs[2])
            if scales.dtype == torch.float32 and math.prod(scales.shape) > math.prod(a.shape[:-1]):
                return BLOCKS  # more scales than rows
        fast = (getattr(node, "kwargs", None) or {}).get("use_fast_accum")
        if fast is None:
            for call in node.get_origins():
                if call.op == "call_function" and call.target is getattr(node, "op_overload", None):
                    fast = _argument(call, "use_fast_accum")
        return FAST if fast else PRECISE

    def launched(self, node: Any, written: list[Any]) -> MatmulLaunch | None:
        """The matmul of a launch of `fp8_gemm` or `fp8_grouped`, whose first two arguments are a [M, K] and b
        [N, K] or [E, N, K]; None for other kernels."""
        from ...codegen.triton_grouped import fp8_grouped
        from ...codegen.triton_kernels import fp8_gemm

        kernel, *_ = node.get_kernel_and_metadata()
        if kernel is not fp8_gemm and kernel is not fp8_grouped:
            return None
        a, b = (self.layout(t) for t in node.inputs[:2])
        turned = [(*x[:-2], x[-1], x[-2]) for x in (b.shape, b.stride)]
        b = replace(b, shape=turned[0], stride=turned[1])
        sums = BLOCKS if kernel is fp8_gemm else FAST
        return MatmulLaunch(kernel.__name__, a, b, self.layout(written[0]), sums)

    def attention(self, node: Any) -> Attention | None:
        origins = [x for x in node.get_origins() if x.target is getattr(node, "op_overload", None)]
        if not origins or not _ATTENTION.search(str(origins[0].target)):
            return None
        (call,) = origins
        found = [_argument(call, name) for name in ("query", "key", "value")]
        tensors = [x for x in found if isinstance(x, torch.fx.Node)]
        if len(tensors) != 3:
            return None
        q, k, v = (self.placeholder(t.name, t.meta["val"]) for t in tensors)
        return Attention(q, k, v, bool(_argument(call, "is_causal")), "backward" in str(call.target))

    def launch(self, node: Any) -> Launch | None:
        """None for scheduler nodes that launch nothing."""
        from torch._inductor import ir

        if type(node).__name__ == "NopKernelSchedulerNode" or isinstance(node.node, ir.MultiOutput):
            return None
        touched = tuple(plan_traffic.touched(node, self.number))
        moved = sum(x.bytes for x in touched)
        what: dict[str, Any] = {"fqn": _fqn(node), "touched": touched}
        if isinstance(node.node, ir.UserDefinedTritonKernel):
            written = {t.get_name(): t for t in node.node.mutable_args}
            matmul = self.launched(node.node, list(written.values()))
            moved += plan_traffic.read_again(node.node)
            return Launch("user", node.get_name(), moved, matmul, **what)
        if isinstance(node.node, ir.ExternKernel):
            name = str(getattr(node.node, "python_kernel_name", None) or type(node.node).__name__)
            return Launch("extern", name, moved, self.matmul(node.node), self.attention(node.node), **what)
        return Launch("triton", node.get_name(), moved, **what)


def _argument(call: torch.fx.Node, name: str) -> Any:
    """An argument of a call of an operator, by its name; None if it is not given."""
    names = [argument.name for argument in call.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}.get(name)


def _fqn(node: Any) -> str:
    """The module of a scheduler node: that of most of its operators; the deepest one in case of a tie."""
    from torch._inductor import ir

    parts = [part.node for part in node.get_nodes() if part.node is not None]
    if isinstance(node.node, ir.ExternKernel) and (origin := node.node.get_origin_node()) is not None:
        # a matmul that Inductor fused with a sum has no module
        return module_of(origin) or _nearest({origin})
    origins = {x for part in parts for x in part.get_origins()}
    named = Counter(fqn for x in origins if (fqn := module_of(x)))
    return max(sorted(named), key=lambda fqn: (named[fqn], fqn.count(".")), default="") or _nearest(origins)


def _nearest(origins: set[torch.fx.Node], steps: int = 6) -> str:
    """The module of the nearest nodes that a node is computed from, for nodes without a module, such as sums
    of gradients. Skips the zeroed vector of a graph's amaxes (`full`), which belongs to no module."""
    front, zeros = origins, torch.ops.aten.full.default
    for _ in range(steps):
        front = {x for node in front for x in node.all_input_nodes if x.target is not zeros}
        named = sorted({fqn for x in front if (fqn := module_of(x))})
        if named:
            return max(named, key=lambda fqn: fqn.count("."))
    return ""


@contextlib.contextmanager
def instead_of_loading(load: Callable[[Any, str], Boxed]) -> Iterator[None]:
    """Inside the context, Inductor does not load its code: `load(lowering, code)` returns the callable."""
    from torch._inductor.graph import GraphLowering

    def compile_to_module(self: Any) -> Any:
        wrapper, *_ = self.codegen()
        call = load(self, getattr(wrapper, "value", str(wrapper)))
        return mock.Mock(call=call, __file__="described", key="described", runner=None)

    with mock.patch.object(GraphLowering, "compile_to_module", compile_to_module):
        yield


@contextlib.contextmanager
def record(graphs: list[Graph]) -> Iterator[None]:
    """Inside the context, graphs that Inductor lowers are appended to `graphs`. Callables compute nothing."""

    def load(lowering: Any, code: str) -> Boxed:
        reader = _Reader(lowering)
        kernels = [k for node in lowering.scheduler.nodes if (k := reader.launch(node)) is not None]
        graph = lowering.module.graph
        targets = Counter(str(n.target) for n in graph.nodes if n.op == "call_function")
        placeholders = graph.find_nodes(op="placeholder")
        given = zip(placeholders, lowering.example_inputs, strict=True)
        inputs = {n.name: reader.placeholder(n.name, t) for n, t in given if isinstance(t, torch.Tensor)}
        makers = {n.name: module_of(n) for n in placeholders}  # saved tensors keep the forward's metadata
        outputs = frozenset(lowering.get_output_names())
        backward = bool(lowering.is_backward)
        graphs.append(Graph(backward, tuple(kernels), code, targets, inputs, makers, outputs))
        return placeholder_callable(graph, torch.device("cpu"))

    with instead_of_loading(load):
        yield
