"""What first calls of graphs leave in CUDA's caching allocator: they run eagerly, with copies of their own.

The allocator reuses these blocks, and frees them before it gives up. But cuBLAS, NCCL and the pools of CUDA
graphs cannot have them. So the first warm call gives them back, once for all graphs whose first calls came
before it: a model whose layers are graphs of their own begins a step with all of them. A later cold call,
after weights were loaded, gives nothing back: its step would pay for the same memory again.
"""

from __future__ import annotations

import torch

from ... import process
from .life import PageSet


class Leftovers:
    some = False  # are there any in this process?


def before_call(pages: PageSet, cold: bool) -> None:
    """A forward with these pages begins, and is cold or warm."""
    leftovers = process.of(Leftovers)
    if not _allocates(pages.page.tensor.device):
        pages.first = False
        return
    if cold:
        leftovers.some = True
        return
    # Not while a graph is captured: cudaFree is illegal then. On other streams it is right: it waits for the
    # device, and blocks that are in use, or belong to captured graphs, stay.
    if leftovers.some and torch.cuda.is_current_stream_capturing():
        return
    pages.first = False
    if leftovers.some:
        leftovers.some = False
        torch.cuda.empty_cache()


def _allocates(device: torch.device) -> bool:
    return device.type == "cuda"
