"""What FSDP1 (`FullyShardedDataParallel`) manages. It packs the parameters of a module into a flat one. In a
forward, the module has views of the flat one in their place, plain tensors, which are new ones each time.
With `use_orig_params=True` the optimizer and `parameters()` have the original parameters, whose data are a
rank's parts. Read in 2.11, 2.13 and 2.15."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Size, nn
from torch._dynamo.callback import callback_handler

from .dynamo import frames

FREED = ("FULL_SHARD", "HYBRID_SHARD")  # strategies that free parameters after forward, but not the root's


def packed(inputs: Sequence[Any]) -> frozenset[int]:
    """Which of a graph's inputs are views that stand for parameters, by position."""
    found = owners(inputs, range(len(inputs)))
    return frozenset(i for i, value in enumerate(inputs) if found[i] is not value)


def owners(args: Sequence[Any], positions: Iterable[int]) -> Sequence[Any]:
    """The arguments of a call, with the original parameters instead of the views at these positions."""
    found, known = list(args), dict[int, dict[int, nn.Parameter]]()
    for i in positions:
        flat: Any = getattr(args[i], "_base", None)
        if not getattr(flat, "_is_flat_param", False) or flat._params is None:
            continue
        if id(flat) not in known:
            known[id(flat)] = {id(view): own for view, own in zip(flat._tensors, flat._params, strict=True)}
        found[i] = known[id(flat)].get(id(args[i]), args[i])
    return found


def freed(inputs: Sequence[Any]) -> frozenset[int]:
    """Which of a graph's inputs are such views whose memory is freed after forward and gathered in backward.
    To be asked within the backend, while the forward of the module that packed them is under way."""
    packers = [m for m in _under_way() if m._handle is not None]
    stay = [m._handle for m in packers if m._is_root or m._handle._sharding_strategy.name not in FREED]
    kept = {id(handle.flat_param) for handle in stay}
    return frozenset(i for i in packed(inputs) if id(inputs[i]._base) not in kept)


def is_flattened(tensor: Any) -> bool:
    """True if FSDP1 has packed this parameter, or if it is the flat one."""
    return getattr(tensor, "_fsdp_flattened", False)


def is_packed(module: nn.Module) -> bool:
    """True if this is FSDP1's wrapper of a module."""
    return (kind := _kind()) is not None and isinstance(module, kind)


def shapes(model: nn.Module) -> dict[int, Size]:
    """The shapes of the whole parameters that are packed in a model, by the ids of the original ones."""
    kind: Any = _kind() or ()
    flats = [m._handle.flat_param for m in model.modules() if isinstance(m, kind) and m._handle is not None]
    pairs = (zip(flat._params, flat._shapes, strict=True) for flat in flats if flat._params is not None)
    return {id(parameter): shape for several in pairs for parameter, shape in several}


def on_refusal(backend: str, tell: Callable[..., None]) -> None:
    """Have `tell(**keywords)`, with those that `torch.compile` passes to a backend of this name, called where
    Dynamo begins to compile for it, and will leave everything to eager: inside of FSDP1 with
    `use_orig_params=False`. `torch._dynamo.reset()` forgets this."""

    def begins(_: Any) -> None:
        if any(not module._use_orig_params and module._handle is not None for module in _under_way()):
            frames = (variables.get("compiler_fn") for variables in _variables("torch._dynamo"))
            made = next((made for made in frames if made is not None), None)
            given = getattr(made, "_torchdynamo_orig_backend", made)
            if getattr(given, "compiler_name", "") == backend:
                tell(**given.kwargs)  # type: ignore[union-attr]

    known = [getattr(callback, "__qualname__", "") for callback in callback_handler.start_callbacks]
    if begins.__qualname__ not in known:
        callback_handler.register_start_callback(begins)


def _under_way() -> Iterator[Any]:
    """The FSDP1 modules whose forward is under way."""
    for variables in _variables("torch.distributed.fsdp.fully_sharded_data_parallel") if _kind() else ():
        if isinstance(caller := variables.get("self"), _kind()):
            yield caller


def _variables(package: str) -> Iterator[dict[str, Any]]:
    """The local variables of the frames on the stack that run code of this package. Not of other frames: a
    frame that was asked keeps what it holds then to its end, also what it deletes (up to Python 3.12)."""
    for frame in frames():
        if str(frame.f_globals.get("__name__")).startswith(package):
            yield frame.f_locals


def _kind() -> Any:
    module = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return getattr(module, "FullyShardedDataParallel", None)
