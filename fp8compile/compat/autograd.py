"""While a compiled graph runs: autograd's saved tensors, and whether a backward is running."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._dynamo.compiled_autograd as dynamo_autograd
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._python_dispatch import _disable_current_modes

no_torch_function = torch._C._disabled_torch_function_impl  # of a tensor subclass
VERSIONS_AND_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)  # the key of both


class TensorMarks:
    """Notes on tensors by their memory, because autograd hands back new objects. Keeps no tensor alive."""

    def __init__(self) -> None:
        self.marks: dict[int, tuple[StorageWeakRef, Any]] = {}

    def add(self, tensor: torch.Tensor, note: Any) -> None:
        for address, mark in list(self.marks.items()):  # pop in place: another thread may be adding a mark
            if mark[0].expired():
                self.marks.pop(address, None)
        self.marks[tensor.data_ptr()] = StorageWeakRef(tensor.untyped_storage()), note

    def note(self, tensor: torch.Tensor) -> Any:
        """The note with which a tensor was added; None if it was not."""
        mark = self.marks.get(tensor.data_ptr())
        return None if mark is None or mark[0].expired() else mark[1]


def storage_of(tensor: torch.Tensor) -> int:
    """Tells apart the memory of tensors that are alive."""
    return tensor.untyped_storage()._cdata


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if one is a view of the other, or both are views of a third. Takes fake tensors."""
    return storage_of(a) == storage_of(b)


class _Kept:
    """A saved tensor that no hook has touched."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


_NOTHING = contextlib.nullcontext()


def saved_as_they_are(ours: Callable[[torch.Tensor], bool]) -> AbstractContextManager[Any]:
    """Inside, tensors that are `ours` are saved for backward without the user's saved-tensor hooks
    (offloading, compression). Those hooks hand back copies, and we find our tensors by their addresses."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return _NOTHING
    pack, unpack = hooks
    return torch.autograd.graph.saved_tensors_hooks(
        lambda x: _Kept(x) if ours(x) else pack(x), lambda x: x.tensor if isinstance(x, _Kept) else unpack(x)
    )


def unseen(values: Sequence[Any] = ()) -> AbstractContextManager[Any]:
    """Inside, neither autograd nor the user's dispatch modes see what is computed, as in a compiled graph.
    With fake tensors among `values` this does nothing: their mode has to see all operators."""
    return _NOTHING if any(isinstance(x, FakeTensor) for x in values) else _Unseen()


class _Unseen:
    """A class, because each call of a compiled graph pays for it."""

    def __enter__(self) -> None:
        below = torch._C._AutoDispatchBelowAutograd()
        self.guards = below, torch._C._ExcludeDispatchKeyGuard(VERSIONS_AND_VIEWS)
        for guard in self.guards:
            guard.__enter__()
        self.modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else None
        if self.modes is not None:
            self.modes.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.modes is not None:
            self.modes.__exit__(*error)
        for guard in reversed(self.guards):
            guard.__exit__(*error)


def in_backward() -> bool:
    """True if autograd's engine runs a backward on this thread (so that a forward now is a checkpoint's)."""
    return torch._C._current_graph_task_id() != -1


def capturing() -> bool:
    """True if a CUDA graph is being captured on this thread's stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def recomputing() -> bool:
    """True if a forward that runs now is inside of a backward, with saved-tensor hooks. A checkpoint sets
    some. (Not a reentrant one, whose forward in the backward is the first with gradients.)"""
    return in_backward() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def compiled_autograd() -> bool:
    """True if compiled autograd will take over the backward of what runs now. It copies our backward graph
    into a graph of its own. Our Python code does not run then, so the host can decide nothing in backward."""
    return dynamo_autograd.compiled_autograd_enabled


def in_compiled_autograd() -> bool:
    """True if compiled autograd's own graph is being compiled or run."""
    return dynamo_autograd.in_compiled_autograd_region


def is_compiled(module: torch.nn.Module) -> bool:
    """True if any part of this module is compiled: by torch.compile or module.compile(), with any backend."""
    return any(map(is_compiled_itself, module.modules()))


def is_compiled_itself(module: torch.nn.Module) -> bool:
    """As `is_compiled`, but not a part of it."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def is_ddp(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.parallel.DistributedDataParallel)


def hooks_after_step(optimizer: torch.optim.Optimizer) -> tuple[list[Callable], list[Callable]]:
    """The hooks that run when a step of this optimizer ends: its own, and those of all optimizers."""
    return list(optimizer._optimizer_step_post_hooks.values()), list(_global_optimizer_post_hooks.values())
