"""Compile a training step for a GPU that is not there, and read what it would launch.

Dynamo and AOTAutograd trace the step on the CPU. From Inductor's joint passes on, the graph's fake tensors say cuda:0 and every
question about the device is answered from a `Gpu` description, so Inductor runs its GPU passes, partitions, schedules, fuses
and writes Triton source. Nothing is executed: the compiled forward stops the step, and the backward was compiled before it.

    step = trace(lambda: torch.compile(model, backend="fp8")(x).sum().backward())
    step.bytes_outside_matmuls, step.flops, step.kept_for_backward, step.code

The figures are static, as Inductor's scheduler counts bytes (each buffer once a kernel): they compare two compilations of one
model and are no measurement. Limits: one graph with its backward a step (no graph breaks), no autotuning, and a process without
a CUDA device.

Private names of torch are patched here; where they moved between 2.11 and 2.15 the code says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

CUDA = torch.device("cuda", 0)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What Inductor asks of a device; fields that `torch.cuda.get_device_properties` has carry its names."""

    name: str = "NVIDIA H200"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    total_memory: int = 141 << 30
    L2_cache_size: int = 60 << 20
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    shared_memory_per_block: int = 48 << 10
    shared_memory_per_block_optin: int = 227 << 10
    shared_memory_per_multiprocessor: int = 228 << 10
    memory_bus_width: int = 6144
    memory_clock_rate: int = 3201000
    clock_rate: int = 1980000
    gcnArchName: str = ""

    @property
    def capability(self) -> int:
        return 10 * self.major + self.minor


H200 = Gpu()
A100 = Gpu("NVIDIA A100", 8, 0, 108, 80 << 30, 40 << 20)


@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor that a kernel reads, as it is laid out in memory (symbolic sizes by their hints).

    `buffer` names the memory: operands that are views of one buffer share it.
    """

    buffer: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_major(self) -> bool:
        return self.stride[-1] == 1

    @property
    def col_major(self) -> bool:
        return self.stride[-2] == 1


@dataclasses.dataclass(frozen=True)
class Matmul:
    """One matmul launch: out[..., m, n] = a[..., m, k] @ b[..., k, n]."""

    op: str
    a: Operand
    b: Operand
    out: Operand

    @property
    def flops(self) -> int:
        count = 2 * self.a.shape[-1]
        for size in self.out.shape:
            count *= size
        return count

    @property
    def dtype(self) -> str:
        """Of the operands: "fp8", "bfloat16", "float32", ..."""
        return "fp8" if self.a.dtype.itemsize == 1 else str(self.a.dtype).removeprefix("torch.")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch: a Triton kernel that Inductor wrote, a "user" Triton kernel, or an "extern" one (cuBLAS, an ATen op)."""

    kind: str
    name: str
    bytes: int
    matmul: Matmul | None = None


@dataclasses.dataclass(frozen=True)
class Graph:
    """One graph that Inductor lowered: the forward, the backward, or an inference graph."""

    backward: bool
    kernels: tuple[Kernel, ...]
    code: str
    targets: Counter[str]  # ATen (and other) targets of the FX graph that was lowered
    inputs: dict[str, Operand]  # tensors only, by placeholder name

    @property
    def kept_for_backward(self) -> int:
        """Bytes that a backward graph gets from its forward (AOTAutograd names parameters primals_*, gradients tangents_*)."""
        if not self.backward:
            return 0
        kept = [t for name, t in self.inputs.items() if not name.startswith(("primals", "tangents"))]
        return sum(t.dtype.itemsize * torch.Size(t.shape).numel() for t in kept)


@dataclasses.dataclass(frozen=True)
class Step:
    """All graphs of one step, forward first."""

    graphs: tuple[Graph, ...]

    @property
    def kernels(self) -> list[Kernel]:
        return [k for g in self.graphs for k in g.kernels]

    @property
    def matmuls(self) -> list[Matmul]:
        return [k.matmul for k in self.kernels if k.matmul is not None]

    @property
    def bytes_outside_matmuls(self) -> int:
        return sum(k.bytes for k in self.kernels if k.matmul is None)

    @property
    def flops(self) -> dict[str, int]:
        """Matmul FLOPs by operand dtype."""
        total: Counter[str] = Counter()
        for m in self.matmuls:
            total[m.dtype] += m.flops
        return dict(total)

    @property
    def kept_for_backward(self) -> int:
        return sum(g.kept_for_backward for g in self.graphs)

    @property
    def code(self) -> str:
        return "\n".join(g.code for g in self.graphs)


class _Compiled(Exception):
    """Raised where the compiled forward would run."""


def unavailable() -> str | None:
    """Why this process cannot describe a GPU, or None."""
    if torch.cuda.is_available():
        return "this process has a CUDA device; the harness describes one where there is none"
    try:
        importlib.import_module("triton.backends.compiler")
    except ImportError:
        return "needs triton"
    return None


def trace(step: Callable[[], Any], gpu: Gpu = H200) -> Step:
    """Run `step`, a forward (and backward) of a torch.compile'd callable on CPU tensors, far enough to compile it for `gpu`."""
    graphs: list[Graph] = []
    torch._dynamo.reset()
    try:
        with _describe(gpu), _retarget_graphs(), _record(graphs), contextlib.suppress(_Compiled):
            step()
    finally:
        torch._dynamo.reset()
    # A backward that is lowered ahead of time comes before its forward's in some versions.
    return Step(tuple(sorted(graphs, key=lambda g: g.backward)))


# -- the described device ----------------------------------------------------------------------------------------------


def _interface(gpu: Gpu) -> type:
    """Inductor's device interface, answering from `gpu`."""
    from torch._dynamo.device_interface import CudaInterface

    class Worker(CudaInterface.Worker):
        get_device_properties = staticmethod(lambda device=None: gpu)
        current_device = staticmethod(lambda: 0)

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_compute_capability": lambda device=None: gpu.capability,
        "get_device_properties": lambda device=None: gpu,
        "is_bf16_supported": lambda *a, **k: True,
        "is_dtype_supported": lambda *a, **k: True,
        "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": lambda device=None: None,
        "synchronize": lambda device=None: None,
        "get_raw_stream": lambda index: 0,
        "exchange_device": lambda index: 0,
        "maybe_exchange_device": lambda index: 0,
    }
    return type("DescribedCuda", (CudaInterface,), {"Worker": Worker, **{k: staticmethod(f) for k, f in answers.items()}})


def _cuda_answers(gpu: Gpu) -> dict[str, Any]:
    """Replacements in torch.cuda, for code that does not go through a device interface."""
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: False,  # else RNG states of a device would be read
        "is_current_stream_capturing": lambda: False,  # asked by Dynamo (2.15)
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": lambda *a, **k: gpu,
        "get_device_capability": lambda *a, **k: (gpu.major, gpu.minor),
        "get_device_name": lambda *a, **k: gpu.name,
        "mem_get_info": lambda *a, **k: (gpu.total_memory, gpu.total_memory),
        "synchronize": lambda *a, **k: None,
        "get_rng_state": lambda *a, **k: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *a, **k: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
    }


def _forget_devices() -> None:
    """Empty torch's caches of what a device can do, so that no description outlives its context."""
    from torch._inductor.runtime.hints import DeviceProperties

    capabilities = vars(importlib.import_module("torch.utils._triton")).values()
    for function in [*capabilities, getattr(DeviceProperties.create, "__func__", None)]:
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@contextlib.contextmanager
def _describe(gpu: Gpu) -> Iterator[None]:
    """Inside, torch, Inductor and Triton find one device, `gpu`."""
    import torch._functorch.config
    import torch._inductor.config
    from torch._dynamo import device_interface
    from torch._inductor.fx_passes import joint_graph, post_grad
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    device_interface.get_interface_for_device("cpu")  # registers the real interfaces, which must not happen inside
    triton_driver = mock.MagicMock()
    triton_driver.get_current_target = lambda: GPUTarget("cuda", gpu.capability, gpu.warp_size)
    true = lambda *a, **k: True  # noqa: E731
    with contextlib.ExitStack() as stack:

        def patch(module: str, attribute: str, value: Any) -> None:
            """Patch a name that may be missing in some versions."""
            target = importlib.import_module(module)
            if hasattr(target, attribute):
                stack.enter_context(mock.patch.object(target, attribute, value))

        # Patterns are traced once, by running ops: on the CPU, before the GPU appears. The arguments are those of Inductor's
        # own calls, because these functions run once for each distinct argument list and a second run fails.
        trace_joint: Any = joint_graph.lazy_init  # its annotation lacks the argument in 2.11
        trace_joint(torch.device("cpu"))
        post_grad.lazy_init()
        for passes in (joint_graph, post_grad):
            patch(passes.__name__, "lazy_init", lambda *a, **k: None)
        interface = _interface(gpu)
        stack.enter_context(mock.patch.dict(device_interface.device_interfaces, {"cuda": interface, "cuda:0": interface}))
        for name, answer in _cuda_answers(gpu).items():
            patch("torch.cuda", name, answer)
        patch("torch.version", "cuda", "13.0")
        patch("torch.utils._triton", "has_triton", true)
        patch("torch._inductor.scheduler", "has_triton", true)
        # A CUDA build makes a real tensor here, to initialise the device before autograd meets a fake one (2.11).
        patch("torch._subclasses.fake_tensor", "init_gpu_context", lambda *a, **k: None)
        # tensor[...] asks the device's runtime for a guard, which is not there.
        stack.enter_context(mock.patch.object(FakeTensor, "__getitem__", _getitem))
        stack.enter_context(mock.patch.object(FakeTensor, "__invert__", lambda x: torch.bitwise_not(x), create=True))
        # recomputed attention would take the random state of a device
        patch(
            "torch._functorch.partitioners", "functionalize_rng_ops", lambda joint, forward, backward, *_: (forward, backward)
        )
        # Constant folding would compute on the device; a cached graph would not come through our hooks.
        uncached = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "joint_graph_constant_folding": False}
        stack.enter_context(torch._inductor.config.patch({"compile_threads": 1, **uncached}))
        stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False))
        previous = driver._active
        driver.set_active(triton_driver)
        stack.callback(setattr, driver, "_active", previous)
        _forget_devices()
        stack.callback(_forget_devices)
        yield


_indexed = FakeTensor.__getitem__


def _getitem(self: torch.Tensor, index: Any) -> torch.Tensor:
    """tensor[index] of ints, slices, None and Ellipsis, out of operators that need no device guard."""
    items = list(index) if isinstance(index, tuple) else [index]
    if self.device.type == "cpu" or not all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in items):
        return _indexed(self, index)
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (self.dim() - sum(i is not None for i in items) + 1)
    dim = 0
    for item in items:
        if item is None:
            self = self.unsqueeze(dim)
        elif isinstance(item, int):
            self, dim = self.select(dim, item), dim - 1
        elif item != slice(None):
            self = torch.ops.aten.slice.Tensor(self, dim, item.start, item.stop, 1 if item.step is None else item.step)
        dim += 1
    return self


# -- CPU graphs become cuda:0 graphs -----------------------------------------------------------------------------------


def _moved(value: Any) -> Any:
    """`value` with each CPU fake tensor in it replaced by one on cuda:0."""

    def move(t: Any) -> Any:
        if isinstance(t, FakeTensor) and t.device.type == "cpu":
            with t.fake_mode:
                return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=CUDA)
        return t

    return pytree.tree_map(move, value)


def _move_graph(gm: torch.fx.GraphModule) -> None:
    """Fake tensors in the metadata and device arguments now say cuda:0."""
    for node in gm.graph.nodes:
        node.meta.pop("tensor_meta", None)
        if "val" in node.meta:
            node.meta["val"] = _moved(node.meta["val"])
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CUDA}


@contextlib.contextmanager
def _retarget_graphs() -> Iterator[None]:
    """Move graphs at the two doors of Inductor: the joint passes, and the lowering of each partitioned graph."""
    from torch._inductor import compile_fx

    joint_passes, lower = compile_fx._recursive_joint_graph_passes, compile_fx.fx_codegen_and_compile

    def moved_joint_passes(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        _move_graph(gm)
        if kwargs.get("input_device") is not None:
            kwargs["input_device"] = CUDA
        return joint_passes(gm, *args, **kwargs)

    def moved_lower(gm: torch.fx.GraphModule, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        _move_graph(gm)
        return lower(gm, _moved(list(example_inputs)), *args, **kwargs)

    with (
        mock.patch.object(compile_fx, "_recursive_joint_graph_passes", moved_joint_passes),
        mock.patch.object(compile_fx, "fx_codegen_and_compile", moved_lower),
    ):
        yield


# -- reading the scheduled graph ---------------------------------------------------------------------------------------

_MATMUL = re.compile(
    r"\b(_scaled_mm|_scaled_mm_v2|_scaled_grouped_mm|_grouped_mm|mm|addmm|bias_addmm|bmm|baddbmm)(\.default|\.out)?$"
)


class _Reader:
    """Turns the scheduler's nodes of one lowered graph into `Kernel`s."""

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

    def operand(self, tensor: Any) -> Operand:
        """Of an Inductor IR node."""
        return self._operand(tensor.get_name(), tensor.get_size(), tensor.get_stride(), tensor.get_dtype())

    def placeholder(self, name: str, tensor: torch.Tensor) -> Operand:
        """Of a fake tensor."""
        return self._operand(name, tensor.shape, tensor.stride(), tensor.dtype)

    def _operand(self, name: str, shape: Any, stride: Any, dtype: torch.dtype) -> Operand:
        return Operand(name, tuple(map(self.number, shape)), tuple(map(self.number, stride)), dtype)

    def matmul(self, node: Any) -> Matmul | None:
        found = _MATMUL.search(str(getattr(node, "python_kernel_name", None) or getattr(node, "op_overload", "")))
        if not found:
            return None
        op = found[1]
        first = 1 if op in ("addmm", "bias_addmm", "baddbmm") else 0
        a, b = (self.operand(t) for t in node.inputs[first : first + 2])
        return Matmul(op, a, b, self.operand(node))

    def kernel(self, node: Any) -> Kernel | None:
        """None for scheduler nodes that launch nothing."""
        from torch._inductor import ir

        if type(node).__name__ == "NopKernelSchedulerNode" or isinstance(node.node, ir.MultiOutput):
            return None
        moved = int(node.get_read_write_buffers_sizes())
        if isinstance(node.node, ir.UserDefinedTritonKernel):
            # Inductor takes every argument for read, also the tensors that are only written. Ours write all that they mutate.
            written = {t.get_name(): t for t in node.node.mutable_args}
            moved -= sum(self.number(t.get_numel()) * t.get_dtype().itemsize for t in written.values())
            return Kernel("user", node.get_name(), moved)
        if isinstance(node.node, ir.ExternKernel):
            name = str(getattr(node.node, "python_kernel_name", None) or type(node.node).__name__)
            return Kernel("extern", name, moved, self.matmul(node.node))
        return Kernel("triton", node.get_name(), moved)


@contextlib.contextmanager
def _record(graphs: list[Graph]) -> Iterator[None]:
    """Where Inductor would load the code that it generated, append a `Graph` and hand back a module that cannot run."""
    from torch._inductor.graph import GraphLowering

    def compile_to_module(self: Any) -> Any:
        wrapper, *_ = self.codegen()
        reader = _Reader(self)
        kernels = [k for node in self.scheduler.nodes if (k := reader.kernel(node)) is not None]
        targets = Counter(str(n.target) for n in self.module.graph.nodes if n.op == "call_function")
        names = [n.name for n in self.module.graph.nodes if n.op == "placeholder"]
        inputs = {
            name: reader.placeholder(name, t)
            for name, t in zip(names, self.example_inputs, strict=True)
            if isinstance(t, torch.Tensor)
        }
        graphs.append(Graph(bool(self.is_backward), tuple(kernels), getattr(wrapper, "value", str(wrapper)), targets, inputs))
        return mock.Mock(call=mock.Mock(side_effect=_Compiled), __file__="described", key="described", runner=None)

    with mock.patch.object(GraphLowering, "compile_to_module", compile_to_module):
        yield
