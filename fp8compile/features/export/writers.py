"""The ranks that write a checkpoint together: those that have the shards of the model. Of a model without
shards it is this process alone, and nothing is communicated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from ... import compat
from ...errors import ExportError, one_line

T = TypeVar("T")


class Writers:
    """`place`: which one of `count` this rank is. All ranks call each method, in the same order."""

    def __init__(self, model: nn.Module) -> None:
        meshes = compat.fsdp.meshes(model.parameters())
        # of FSDP2 with tensor parallelism, some parameters may be on a part of it
        self._mesh: Any = max(meshes, key=lambda mesh: mesh.size(), default=None)
        self._numbers = _numbers(self._mesh) if self._mesh is not None else [0]
        apart = next((mesh for mesh in meshes if not {*_numbers(mesh)} <= {*self._numbers}), None)
        if apart is not None:
            what = f"parameters are on meshes of ranks {self._numbers} and {_numbers(apart)}"
            raise ExportError(f"{what}, which no rank can gather: make both of one init_device_mesh")
        self.count = len(self._numbers)
        self.place = self._numbers.index(self._mesh.get_rank()) if self._mesh is not None else 0

    @property
    def first(self) -> bool:
        return self.place == 0

    def gather(self, mine: Any) -> list[Any]:
        """What each rank has, a small object, by place."""
        found = [mine]
        for i in reversed(range(self._mesh.ndim)) if self._mesh is not None else ():
            parts = compat.process_groups.gather(found, self._mesh.get_group(i))
            found = [one for part in parts for one in part]
        return found

    def attempt(self, work: Callable[[], T]) -> T:
        """`work()`. An error on one rank is an ExportError on the others, which would wait for it."""
        error = None
        try:
            made = work()
        except Exception as raised:
            error = raised
        said = self.gather(None if error is None else one_line(error))
        if error is not None:
            raise error
        for number, text in zip(self._numbers, said, strict=True):
            if text is not None:
                raise ExportError(f"rank {number}: {text}")
        return made

    def share(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Those that this rank writes. Each goes to the rank that has the fewest bytes until then."""
        sizes = [0] * self.count
        for name, tensor in tensors:
            place = sizes.index(min(sizes))
            sizes[place] += tensor.nbytes
            if place == self.place:
                yield name, tensor


def _numbers(mesh: Any) -> list[int]:
    """The ranks of a mesh, by place."""
    return mesh.mesh.flatten().tolist()
