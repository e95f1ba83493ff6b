"""Which part of a distributed tensor this rank has, and which groups of ranks its mesh has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .fsdp import sharded_pairs, specs_before_sharding


def parts(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The part of each tensor that this rank multiplies by: "[0:128, 64:128] of [128, 128]", or "" for all of
    it. FSDP2's own shards are no parts: they are gathered."""
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


def mesh_groups(tensors: Iterable[Any]) -> dict[str, str]:
    """The names of process groups by the names of dimensions, of the meshes that these parameters live on; ""
    where two meshes have a dimension of one name and of different ranks."""
    sharded = {id(read): parameter for parameter, read in sharded_pairs()}
    owners = [sharded.get(id(tensor), tensor) for tensor in tensors]
    meshes = {id(mesh): mesh for owner in owners if (mesh := getattr(owner, "device_mesh", None)) is not None}
    found: dict[str, str] = {}
    outer: dict[str, str] = {}
    for mesh in meshes.values():
        _note(mesh, found)
        _note(mesh._get_root_mesh(), outer)
    return {**outer, **found}


def _note(mesh: Any, found: dict[str, str]) -> None:
    for name in mesh.mesh_dim_names or ():
        group = mesh.get_group(name).group_name
        found[name] = group if found.get(name, group) == group else ""
