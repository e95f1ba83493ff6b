"""The described device, which torch, Inductor and Triton see while a step is compiled for an absent GPU."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ... import compat
from ...devices.gpu import Gpu

CUDA = torch.device("cuda", 0)


def _interface(gpu: Gpu) -> type:
    """Inductor's device interface, answering from `gpu` where it does not ask torch.cuda at each call."""
    from torch._dynamo.device_interface import CudaInterface

    class Worker(CudaInterface.Worker):
        get_device_properties = staticmethod(lambda device=None: gpu)
        current_device = staticmethod(lambda: 0)

    answers: dict[str, Callable[..., Any]] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: gpu,
        "is_bf16_supported": lambda *a, **k: True,
        "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": lambda device=None: None,
        "synchronize": lambda device=None: None,
        "get_raw_stream": lambda index: 0,
        "exchange_device": lambda index: 0,
        "maybe_exchange_device": lambda index: 0,
    }
    methods = {name: staticmethod(answer) for name, answer in answers.items()}
    return type("DescribedCuda", (CudaInterface,), {"Worker": Worker, **methods})


def _cuda_answers(gpu: Gpu) -> dict[str, Any]:
    """Replacements in torch.cuda, for code that does not go through a device interface."""
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: False,  # otherwise torch would read the random state of a device
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
    """Empty torch's caches of device properties, so that no description outlives its context."""
    from torch._inductor.runtime.hints import DeviceProperties

    capabilities = vars(importlib.import_module("torch.utils._triton")).values()
    for function in [*capabilities, getattr(DeviceProperties.create, "__func__", None)]:
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@contextlib.contextmanager
def described_gpu(gpu: Gpu) -> Iterator[None]:
    """Inside the context, torch, Inductor and Triton see one device, `gpu`."""
    import torch._functorch.config
    import torch._inductor.config
    from torch._dynamo import device_interface
    from torch._inductor.fx_passes import joint_graph, post_grad
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    device_interface.get_interface_for_device("cpu")  # registers the real ones before the context
    # Inductor traces its patterns once, by running ops. Here they run on the CPU, before the GPU appears.
    # The arguments are those of Inductor's own calls, because these functions run once per distinct
    # argument list and a second run fails.
    trace_joint: Any = joint_graph.lazy_init  # its annotation lacks the argument in 2.11
    trace_joint(torch.device("cpu"))
    post_grad.lazy_init()
    target = GPUTarget("cuda", 10 * gpu.major + gpu.minor, gpu.warp_size)
    triton_driver = mock.MagicMock(get_current_target=lambda: target)
    true, nothing = (lambda *a, **k: True), (lambda *a, **k: None)
    # Constant folding would compute on the device, and so would Inductor's choice whether to pad a matmul's
    # odd sizes. A cached graph would bypass our hooks.
    off = ("fx_graph_cache", "fx_graph_remote_cache", "joint_graph_constant_folding", "shape_padding")
    patches = (
        compat.triton.default_contraction(),
        mock.patch.object(joint_graph, "lazy_init", nothing),
        mock.patch.object(post_grad, "lazy_init", nothing),
        mock.patch.dict(
            device_interface.device_interfaces, dict.fromkeys(("cuda", "cuda:0"), _interface(gpu))
        ),
        mock.patch.multiple("torch.cuda", **_cuda_answers(gpu)),
        mock.patch("torch.version.cuda", "13.0"),
        mock.patch("torch.utils._triton.has_triton", true),
        mock.patch("torch._inductor.scheduler.has_triton", true),
        # CUDA builds make a real tensor here, to initialise the device before a fake one comes (2.11).
        mock.patch("torch._subclasses.fake_tensor.init_gpu_context", nothing),
        # these ask the device's runtime for a guard, and a build for CPUs has no such runtime
        mock.patch.multiple(
            FakeTensor,
            create=True,
            __getitem__=_getitem,
            __invert__=lambda x: torch.bitwise_not(x),
            contiguous=_contiguous,
            copy_=_copy_,
        ),
        # recomputed attention would read the random state of a device
        mock.patch("torch._functorch.partitioners.functionalize_rng_ops", lambda joint, *graphs: graphs[:2]),
        torch._inductor.config.patch({"compile_threads": 1, **dict.fromkeys(off, False)}),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        mock.patch.object(driver, "_active", triton_driver),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        _forget_devices()
        stack.callback(_forget_devices)
        yield


_indexed = FakeTensor.__getitem__


def _getitem(self: torch.Tensor, index: Any) -> torch.Tensor:
    """tensor[index] for ints, slices, None and Ellipsis, built from operators that need no device guard."""
    items = list(index) if isinstance(index, tuple) else [index]
    known = all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in items)
    if self.device.type == "cpu" or not known:
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
            step = 1 if item.step is None else item.step
            self = torch.ops.aten.slice.Tensor(self, dim, item.start, item.stop, step)
        dim += 1
    return self


def _contiguous(
    self: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    as_it_is = self.is_contiguous(memory_format=memory_format)
    return self if as_it_is else torch.ops.aten.clone.default(self, memory_format=memory_format)


def _copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return torch.ops.aten.copy_.default(self, source, non_blocking)
