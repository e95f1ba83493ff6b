"""The plan for a GPU, executed on a CPU: runs the code that Inductor generates for a described device,
unchanged.

Inductor's wrapper runs with its order of launches, its reuse of buffers, its strides and its views of views.
Its kernels and ours run in Triton's interpreter; FP8 matmuls are exact sums, and each call of one has to be
legal on that GPU (`aten`). Memory is filled with NaN when it is allocated, so a read of memory that was never
written shows. Not covered: a device's rounding, its races, and its choice between configurations.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch.fx import GraphModule
from triton.runtime.interpreter import InterpretedFunction

from fp8compile import compat
from fp8compile.devices import support
from fp8compile.devices.gpu import H200, Gpu
from fp8compile.dryrun.fake_gpu import unavailable
from fp8compile.dryrun.fake_gpu.device import CUDA, described_gpu
from fp8compile.dryrun.fake_gpu.record import instead_of_loading, retarget_graphs
from fp8compile.runtime import halves
from tests.support.aten import Grouped, Library, Product
from tests.support.interpreter import interpreting, libdevice, tensor_of

CPU = torch.device("cpu")
# of tests that execute a plan
planning = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")


# -- kernels --


def _reduced(function: Callable[..., np.ndarray]) -> Callable[[tl.tensor, int], tl.tensor]:
    return lambda x, dim: tensor_of(function(x.handle.data, axis=int(dim)), x.dtype)


def _welford(mean: tl.tensor, m2: tl.tensor, weight: tl.tensor, dim: int) -> tuple[tl.tensor, ...]:
    """Combines the means, sums of squared deviations and counts of parts along `dim`."""
    m, s, w = (x.handle.data for x in (mean, m2, weight))
    count = w.sum(int(dim), keepdims=True)
    total = (m * w).sum(int(dim), keepdims=True) / np.maximum(count, 1)
    made = total, (s + w * (m - total) ** 2).sum(int(dim), keepdims=True), count
    return tuple(tensor_of(x.squeeze(int(dim)).astype(np.float32), tl.float32) for x in made)


# NumPy's versions of reductions that Triton defines by a function: interpreted, a call for each element.
REDUCTIONS = {
    "max2": _reduced(np.max),
    "min2": _reduced(np.min),
    "any": _reduced(np.any),
    "welford": _welford,
}


class _Heuristics:
    """Replaces Inductor's `triton_heuristics`: its decorators keep their arguments."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda **told: lambda jitted: (name, told, jitted)


class Launched:
    """A kernel of the plan; `run(*arguments, stream=...)` as in Inductor's launcher."""

    # elements of an axis a program
    LARGEST = {"XBLOCK": 1024, "YBLOCK": 64, "ZBLOCK": 16, "R0_BLOCK": 256, "R1_BLOCK": 16}

    def __init__(self, name: str, source: str, choice: int):
        source = source.replace("triton_helpers.set_driver_to_gpu()", "")
        source = source.replace(
            "from torch._inductor.runtime import triton_helpers, triton_heuristics",
            "from torch._inductor.runtime import triton_helpers\n"
            "from tests.support.executed import heuristics as triton_heuristics",
        )
        self.name = name
        self.kind, self.told, self.jitted = getattr(PyCodeCache.load(source), name)
        self.jitted.fn.__globals__["libdevice"] = libdevice
        self.function = InterpretedFunction(self.jitted.fn)
        self.declared = {parameter.name for parameter in self.jitted.params if parameter.is_constexpr}
        self.signature = self.told["triton_meta"]["signature"]
        self.ours = self.kind == "user_autotune"
        configs = self.told.get("configs") or [{}]
        self.config = configs[choice % len(configs)]
        self.runs = 0

    def run(self, *args: Any, stream: Any = None, **_: Any) -> None:
        self.runs += 1
        constants = self.told["triton_meta"]["constants"]
        # the wrapper also passes arguments that became constants because they are 1 or None
        passed = [name for name in constants if name not in self.declared]
        names = [
            name for name in self.function.arg_names if self.signature[name] != "constexpr" or name in passed
        ]
        extra = self.told["inductor_meta"].get("extra_launcher_args", [])
        given = dict(zip([*names, *extra], args, strict=True))
        config = self.config if self.ours else self._blocks(given)
        expression = triton_heuristics.GridExpr.from_meta(self.told["inductor_meta"], config)
        grid = expression.eval_slow({**given, **config})
        arguments = {name: given[name] for name in names} | constants
        self._check_alignment(arguments)
        with (
            interpreting(triton_helpers),
            mock.patch.multiple(triton_helpers, libdevice=libdevice, **REDUCTIONS),
        ):
            blocks = {k: v for k, v in config.items() if k in self.signature}
            self.function[tuple(map(int, grid))](**arguments, **blocks)

    def _check_alignment(self, arguments: dict[str, Any]) -> None:
        """Arguments that were declared multiples of 16 to the compiler are multiples of 16."""
        (config,) = self.told["triton_meta"]["configs"]
        names = list(self.signature)
        for (position,), properties in config.items():
            value = arguments.get(names[position])
            if ["tt.divisibility", 16] in properties and value is not None:
                number = value.data_ptr() if isinstance(value, Tensor) else value
                assert number % 16 == 0, (
                    f"{self.name}: {names[position]} was declared a multiple of 16 and is at {number}"
                )

    def _blocks(self, given: dict[str, Any]) -> dict[str, int]:
        """Blocks of Inductor's kernels: as large as the axes, up to a limit. (Large ones take no longer.)"""
        wanted = [
            name for name, kind in self.signature.items() if kind == "constexpr" and name.endswith("BLOCK")
        ]
        # "XBLOCK" has "xnumel" elements, "R0_BLOCK" has "r0_numel"
        sizes = {name: given[name.removesuffix("BLOCK").lower() + "numel"] for name in wanted}
        config = {
            name: min(self.LARGEST[name], triton.next_power_of_2(max(1, n))) for name, n in sizes.items()
        }
        if "RSPLIT_SIZE" in self.signature:
            config |= {"RSPLIT_SIZE": max(64, config["XBLOCK"]), "NUM_STAGES": 1}
        return config


heuristics = _Heuristics()


# -- the wrapper --


class _Async:
    """Replaces `AsyncCompile`."""

    def __init__(self, plan: Plan):
        self.plan = plan

    def cpp_pybinding(self, *args: Any, **kwargs: Any) -> Any:  # kernels of numbers on the CPU
        return AsyncCompile().cpp_pybinding(*args, **kwargs)

    def triton(self, name: str, source: str, device_str: str) -> Launched:
        self.plan.kernels.append(Launched(name, source, self.plan.choice))
        return self.plan.kernels[-1]

    def wait(self, scope: dict[str, Any]) -> None:
        pass


class _Extern:
    """Replaces `extern_kernels`: FP8 matmuls are exact sums, other kernels are the real ones."""

    def __init__(self, real: Any, plan: Plan):
        self.real, self.plan = real, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def mm_dtype(self, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        return out.copy_(a.to(out_dtype) @ b.to(out_dtype))

    def _scaled_mm(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Tensor | None = None,
        scale_result: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Without `out`: where Inductor does not know the operator's lowering, it calls the operator."""
        assert scale_result is None and out_dtype is not None
        if out is None:
            out = _empty((a.shape[0], b.shape[1]), (b.shape[1], 1), out_dtype)
        self.plan.library.check(Product(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum, out))
        self.plan.scaled += 1
        if scale_a.dtype == torch.float8_e8m0fnu:
            scales = _in_rows(scale_a, *a.shape), _in_rows(scale_b, *b.shape[::-1]).t()
        else:
            assert scale_a.dtype == scale_b.dtype == torch.float32
            scales = _spread(scale_a, a), _spread(scale_b, b)
        product = (a.double() * scales[0]) @ (b.double() * scales[1])
        return out.copy_(product + bias.double() if bias is not None else product)

    def _grouped_mm(self, a: Tensor, b: Tensor, offs: Tensor, **how: Any) -> Tensor:
        """As torch's on a CPU, but what a GPU leaves unwritten is."""
        out = self.real._grouped_mm(a, b, offs, **how)
        sizes = offs.diff(prepend=offs.new_zeros(1))
        if b.dim() == 3:
            out[offs[-1] :] = float("nan")
        else:
            out[sizes == 0] = float("nan")
        return out

    def _scaled_grouped_mm(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        offs: Tensor,
        bias: Tensor | None = None,
        scale_result: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
    ) -> Tensor:
        """Rows of no group stay unwritten, as on a GPU, and so does the result of a wgrad of no rows
        (pytorch#172439)."""
        assert scale_result is None and out_dtype is not None
        self.plan.library.check(Grouped(a, b, scale_a, scale_b, offs, bias, out_dtype, use_fast_accum))
        self.plan.scaled += 1
        rows, count = b.dim() == 3, offs.shape[0]
        shape = (a.shape[0], b.shape[2]) if rows else (count, a.shape[0], b.shape[1])
        out = _empty(shape, torch.empty(shape, device="meta").stride(), out_dtype)
        start = 0
        for group, end in enumerate(offs.tolist()):
            if rows:
                product = a[start:end].double() @ b[group].double()
                out[start:end] = product * scale_a[start:end, None].double() * scale_b[group].double()
            elif end > start:
                product = a[:, start:end].double() @ b[start:end].double()
                of_a, of_b = (scale.view(count, -1)[group].double() for scale in (scale_a, scale_b))
                out[group] = product * (of_a[:, None] * of_b)
            start = end
        return out


def _spread(scale: Tensor, of: Tensor) -> Tensor:
    """Scales of the tensor, of rows (or columns) or of blocks, spread to the elements of `of`."""
    scale = scale.double()
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    for dim, size in enumerate(of.shape):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, size)
    return scale


def _in_rows(scale: Tensor, rows: int, columns: int) -> Tensor:
    """The scales of 1 x 32 blocks in cuBLASLt's order, spread to the elements.

    cuBLASLt stores tiles of 128 rows by 4 blocks. In a tile, the scale of row r and block c is at 16 (r % 32)
    + 4 (r // 32) + c (cuBLAS, "1D block scaling factors layout").
    """
    tiles = scale.flatten().double().view(-(-rows // 128), -1, 32, 4, 4)  # [.., .., r % 32, r // 32, c]
    spread = tiles.permute(0, 3, 2, 1, 4).reshape(tiles.shape[0] * 128, -1)  # [r, c]
    return spread.repeat_interleave(32, 1)[:rows, :columns]


def _empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory, filled with 0xFF: NaN in every format that has NaN."""
    made = torch.empty_strided(size, stride, dtype=dtype)
    torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage()).fill_(0xFF)
    return made


class Plan:
    """The kernels that were loaded and the number of FP8 matmuls that ran. `choice`: the configuration of our
    kernels. `library`: what the GPU's matmuls take, with the torch of this process."""

    def __init__(self, choice: int = 0, gpu: Gpu = H200):
        self.choice = choice
        major, minor = torch.__version__.split(".")[:2]
        self.library = Library(gpu, (int(major), int(minor)), support.cuda_version())
        self.kernels: list[Launched] = []
        self.scaled = 0  # FP8 matmuls that ran

    def launches(self, name: str) -> int:
        """How often kernels ran whose names begin so."""
        return sum(kernel.runs for kernel in self.kernels if kernel.name.startswith(name))

    def load(self, code: str) -> Callable[[list[Any]], Any]:
        """The callable defined by the source of a wrapper."""
        replaced = {
            "from torch._C import _cuda_getCurrentRawStream as get_raw_stream": (
                "get_raw_stream = lambda index: 0"
            ),
            "async_compile = AsyncCompile()": (
                "async_compile = _async_compile; extern_kernels = _extern(extern_kernels)"
            ),
            "torch._C._dynamo.guards._empty_strided_cuda": "_empty",
            "device(type='cuda', index=0)": "device(type='cpu')",
            "torch.ops.aten._scaled_mm.default(": "extern_kernels._scaled_mm(",
            "torch.ops.aten._scaled_grouped_mm.default(": "extern_kernels._scaled_grouped_mm(",
            "torch.cuda.set_device(0)": "pass",
            "with torch.cuda._DeviceGuard(0):": "if True:",
            "del async_compile": "",
        }
        for old, new in replaced.items():
            code = code.replace(old, new)
        unseen = re.findall(r"(?<!extern_kernels)\._scaled\w*_mm[\w.]*\(", code)
        assert not unseen, f"a call that is not held against the rules of the GPU: {unseen}"
        scope: dict[str, Any] = {
            "__name__": "plan",
            "_async_compile": _Async(self),
            "_extern": lambda real: _Extern(real, self),
            "_empty": _empty,
        }
        exec(compile(code, "<plan>", "exec"), scope)
        return scope["call"]


@contextlib.contextmanager
def executed(choice: int = 0, gpu: Gpu = H200) -> Iterator[Plan]:
    """Inside, graphs are compiled for `gpu`, and run on the CPU."""
    plan = Plan(choice, gpu)
    copy = compat.dynamo.copy_graph

    def copy_graph(gm: GraphModule) -> GraphModule:  # the copy that cold calls run, on the CPU
        copied = copy(gm)
        for node in copied.graph.nodes:
            if node.kwargs.get("device") == CUDA:
                node.kwargs = {**node.kwargs, "device": CPU}
        copied.recompile()
        return copied

    torch._dynamo.reset()
    try:
        with (
            described_gpu(gpu),
            retarget_graphs(),
            instead_of_loading(lambda lowering, code: plan.load(code)),
            mock.patch.object(compat.dynamo, "copy_graph", copy_graph),
            mock.patch.object(halves, "_on", lambda device, args: True),
        ):
            yield plan
    finally:
        torch._dynamo.reset()
