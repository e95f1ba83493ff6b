"""Process groups: by name, and whether all of their ranks are about to do the same."""

from __future__ import annotations

import datetime
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from .dynamo import frames
from .fsdp import sharded_pairs

PATIENCE = 30.0  # seconds until a rank says for whom it waits


def _functional(name: str) -> tuple[Any, ...]:
    """The functional collective of this name; none where torch was built without torch.distributed."""
    return (getattr(torch.ops._c10d_functional, name).default,) if dist.is_available() else ()


# as targets of nodes
ALL_GATHER = _functional("all_gather_into_tensor")
ALL_TO_ALL = _functional("all_to_all_single")
WAIT = _functional("wait_tensor")

_asked: Counter[str] = Counter()  # group -> how often its ranks were compared
_alike: set[tuple[str, str]] = set()  # (group, what) that its ranks have agreed on


def all_gather(whole: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    """The parts of all ranks, one after another. Renamed in 2.13."""
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(whole, part, group=group)


def reduce_scatter(part: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
    """The sum over all ranks of what they have for this one. Renamed in 2.13."""
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(part, whole, group=group)


def gather(mine: Any, group: Any = None) -> list[Any]:
    """What each rank of a group (None: of all) has, in order; in a process without groups what it has."""
    found = [mine] * (dist.get_world_size(group) if has_groups() else 1)
    if len(found) > 1:
        dist.all_gather_object(found, mine, group=group)
    return found


def has_groups() -> bool:
    """True if this process has process groups."""
    return dist.is_available() and dist.is_initialized()


def group_name(given: bool | str, dimensions: Mapping[str, str]) -> str | None:
    """The name of the default process group (True), of the group of a mesh's dimension, or of another group;
    None where there are no process groups. ValueError if there are some, but none of this name."""
    if not has_groups():
        return None
    if given is True:
        return dist.group.WORLD.group_name  # type: ignore[union-attr]
    name = dimensions.get(str(given), str(given))
    if not is_alive(name):
        raise ValueError(name)
    return name


def mesh_groups(tensors: Iterable[Any]) -> dict[str, str]:
    """The names of process groups by the names of dimensions, of the meshes that these parameters live on; ""
    where two meshes have a dimension of one name and of different ranks."""
    sharded = {id(read): parameter for parameter, read in sharded_pairs()}
    owners = [sharded.get(id(tensor), tensor) for tensor in tensors]
    meshes = {id(mesh): mesh for owner in owners if (mesh := getattr(owner, "device_mesh", None)) is not None}
    found: dict[str, str] = {}
    outer: dict[str, str] = {}
    for mesh in meshes.values():
        _note_dimensions(mesh, found)
        _note_dimensions(mesh._get_root_mesh(), outer)
    return {**outer, **found}


def _note_dimensions(mesh: Any, found: dict[str, str]) -> None:
    for name in mesh.mesh_dim_names or ():
        group = mesh.get_group(name).group_name
        found[name] = group if found.get(name, group) == group else ""


def is_alive(name: str) -> bool:
    """True if there is a process group of this name, False if it was destroyed."""
    return has_groups() and any(group.group_name == name for group in _groups())


def is_default_group(name: str) -> bool:
    return name == group_name(True, {})


def ranks_of(name: str) -> frozenset[int]:
    """The global ranks of a process group."""
    return frozenset(dist.get_process_group_ranks(_group(name)))


def rank_in(name: str) -> int:
    """This rank's number in a process group."""
    return dist.get_rank(_group(name))


def _group(name: str) -> Any:
    return next(group for group in _groups() if group.group_name == name)


def _groups() -> list[Any]:
    """The process groups that this rank is in."""
    return list(torch.distributed.distributed_c10d._world.pg_map)


def largest(amax: torch.Tensor, name: str) -> torch.Tensor:
    """The maximum of an amax over a group; of its bits, where NaN is largest. Of floats, it may drop NaN."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(amax.view(torch.int32), "max", name)).view(torch.float32)


def raise_to_largest(amaxes: torch.Tensor, name: str) -> None:
    """Raise integers to their maximum over a group, in place."""
    dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=_group(name))


def in_pipeline(functions: str = "") -> bool:
    """True if a stage of torch.distributed.pipelining is on the stack, in a function with `functions` in its
    name."""
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    return any(functions in frame.f_code.co_name for frame in frames("distributed/pipelining/stage.py"))


def inferring_shapes() -> bool:
    """True if a pipeline stage is running on uninitialised memory, to learn the shapes of its outputs. (It
    does so with gradients, before its first real call and whenever shapes change.)"""
    return in_pipeline("_inference")


class Alone(Exception):
    """(ranks, seconds): these ranks have not come to compare, for so long."""


def _timeout(group: Any) -> datetime.timedelta:
    """After which a collective of the group fails: its backends' shortest. Read in 2.11, 2.13 and 2.15."""
    backends = [group._get_backend(device) for device in group._device_types]
    limits = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends]
    return min((limit for limit in limits if limit), default=dist.constants.default_pg_timeout)


def _missing(store: Any, count: int, ranks: Iterable[int], seconds: float) -> list[int]:
    """Those of the ranks that have not come to comparison `count`, at the latest after so many seconds."""
    keys = {rank: f"fp8compile/{count}/{rank}" for rank in ranks}
    try:
        store.wait(list(keys.values()), datetime.timedelta(seconds=seconds))
        return []
    except RuntimeError:  # after that time; if the store is lost, the next line raises, too
        return [rank for rank, key in keys.items() if not store.check([key])]


def different(name: str, what: str, more: str, waiting: Callable[[list[int], float], None]) -> dict[int, str]:
    """The ranks of a group whose `what` or `more` is not ours, and both of theirs, in lines.

    Once all ranks have agreed on a `what`, it is not compared again, whatever `more` is then, because a rank
    may recompile a graph on its own. Otherwise each rank of the group has to call this as often as the
    others. A rank that they leave alone cannot know what they do: they may still compile. After `PATIENCE`
    seconds it calls `waiting` with the missing ranks and the seconds that are left. After half of the group's
    timeout it raises `Alone`: before the others give up, who wait for this rank in a graph's collective."""
    key, said = hashlib.sha256(what.encode()).hexdigest(), f"{what}\n{more}"
    if (name, key) in _alike:
        return {}
    c10d = torch.distributed.distributed_c10d
    group = c10d._resolve_process_group(name)  # type: ignore[arg-type]
    store, count, ranks = c10d._get_process_group_store(group), _asked[name], range(group.size())
    _asked[name] += 1
    mine = hashlib.sha256(said.encode()).hexdigest()
    store.set(f"fp8compile/{count}/{group.rank()}", mine)
    limit = _timeout(group).total_seconds() / 2
    missing = _missing(store, count, ranks, min(PATIENCE, limit))
    if missing and limit > PATIENCE:
        waiting(missing, limit - PATIENCE)
        missing = _missing(store, count, missing, limit - PATIENCE)
    if missing:
        store.set(f"fp8compile/{count}/{group.rank()}/said", said)  # for those who come after all
        raise Alone(missing, limit)
    others = [rank for rank in ranks if store.get(f"fp8compile/{count}/{rank}").decode() != mine]
    if not others:
        _alike.add((name, key))
        return {}
    store.set(f"fp8compile/{count}/{group.rank()}/said", said)  # each rank sees a difference, and comes here
    return {rank: store.get(f"fp8compile/{count}/{rank}/said").decode() for rank in others}
