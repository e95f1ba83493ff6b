"""Which part of a distributed tensor this rank has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .fsdp import specs_before_sharding


def parts(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The part of each tensor that this rank multiplies by: "[0:128, 64:128] of [128, 128]", or "" for all of it. FSDP2's own
    shards are no parts: they are gathered."""
    sharded = specs_before_sharding()
    found = {}
    for name, tensor in tensors.items():
        spec = sharded[id(tensor)] if id(tensor) in sharded else getattr(tensor, "_spec", None)
        found[name] = "" if spec is None else _part(tensor.shape, spec)
    return found


def _part(shape: torch.Size, spec: Any) -> str:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(shape, spec.mesh, spec.placements)
    if tuple(sizes) == tuple(shape):
        return ""
    return f"[{', '.join(f'{at}:{at + n}' for at, n in zip(offsets, sizes, strict=True))}] of {list(shape)}"
