"""While a compiled graph runs: autograd's saved tensors, and whether it is in a backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class TensorMarks:
    """A set of tensors by their memory: a saved tensor comes back from autograd as another object. Keeps none alive."""

    def __init__(self) -> None:
        self.marks: dict[int, StorageWeakRef] = {}

    def add(self, tensor: torch.Tensor) -> None:
        self.marks = {address: ref for address, ref in self.marks.items() if not ref.expired()}
        self.marks[tensor.data_ptr()] = StorageWeakRef(tensor.untyped_storage())

    def __contains__(self, tensor: torch.Tensor) -> bool:
        ref = self.marks.get(tensor.data_ptr())
        return ref is not None and not ref.expired()


class _Kept:
    """A saved tensor that no hook has touched."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


@contextlib.contextmanager
def saved_as_they_are(ours: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Inside, tensors that are `ours` are saved for backward past the user's saved-tensor hooks (offloading, compression),
    which hand back copies: what is known by its address has to come back as itself."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        yield
        return
    pack, unpack = hooks
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: _Kept(x) if ours(x) else pack(x), lambda x: x.tensor if isinstance(x, _Kept) else unpack(x)
    ):
        yield


def in_backward() -> bool:
    """Is autograd's engine running a backward on this thread (so that a forward now is a recomputation)?"""
    return torch._C._current_graph_task_id() != -1
