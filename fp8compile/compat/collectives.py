"""Process groups: by name, and whether all of their ranks are about to do the same."""

from __future__ import annotations

import sys
import traceback
from collections import Counter

import torch
import torch.distributed as dist

_asked: Counter[str] = Counter()  # group -> how often its ranks were compared
_alike: set[tuple[str, str]] = set()  # (group, what) that its ranks have agreed on


def group_name(given: bool | str) -> str | None:
    """The name of the default process group (True) or of another one; None where there is no process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.group.WORLD.group_name if given is True else str(given)  # type: ignore[union-attr]


def is_default_group(name: str) -> bool:
    return name == group_name(True)


def in_pipeline(functions: str = "") -> bool:
    """Is a stage of torch.distributed.pipelining on the stack, in a function whose name contains `functions`?"""
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe()))
    file = "distributed/pipelining/stage.py"
    return any(functions in code.co_name and code.co_filename.replace("\\", "/").endswith(file) for code in codes)


def inferring_shapes() -> bool:
    """Is a pipeline stage running on uninitialised memory, to learn the shapes of its outputs? (It does so with gradients,
    before its first real call and whenever shapes change.)"""
    return in_pipeline("_inference")


def different(name: str, what: str) -> list[int]:
    """The ranks of a group whose `what` is not ours. Each rank of the group has to call this as often as the others; else it
    waits for them until the group's store times out, and raises. Once all ranks have agreed on a `what`, it is not compared
    again, because a rank may recompile a graph on its own."""
    if (name, what) in _alike:
        return []
    c10d = torch.distributed.distributed_c10d
    group = c10d._resolve_process_group(name)  # type: ignore[arg-type]
    store, count = c10d._get_process_group_store(group), _asked[name]
    _asked[name] += 1
    store.set(f"fp8compile/{count}/{group.rank()}", what)
    said = [store.get(f"fp8compile/{count}/{rank}").decode() for rank in range(group.size())]
    if len(set(said)) == 1:
        _alike.add((name, what))
    return [rank for rank, other in enumerate(said) if other != what]
