"""Where pages of scaling state are, and when they move: between calls, all of a device in one launch.

Graphs read `scales` and raise `amaxes` (`state_page`). A move makes the next scales of what has been
raised since the last one. The state moves

* at the end of a step of an optimizer that has one of the weights;
* when a training forward begins and no other one waits for its backward: with one forward and one backward at
  a time, scales follow each pair of them.

A recomputation runs while its forward waits, so it reads the same scales, and raises no amax further. In a
pipeline the scales of a step are those of its beginning.

`scales` are new memory at each move: a backward that comes late divides by the scales that its forward
multiplied with. Where Inductor records CUDA graphs they stay where they are (`fixed`). In a CUDA graph that
the user captures, each first forward moves, whatever the host knows: replays run no code of ours.

With `reduce_amax`, a move begins with one all-reduce of the amaxes. So all ranks of such a group have to move
at the same call, with the same rows (`runtime.agreement`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import compat, process
from ...errors import Fp8CompileError
from ...ir.ops import UNSEEN
from ...runtime.optimizer_steps import listen
from .state_page import HISTORY, Rows, new_amaxes, new_page, next_page, scales_of
from .weight_state import find_state

LOCK = threading.RLock()  # guards which page has which slots, and moves: several threads may train
PATIENCE = 16  # cold calls of a tensor that sees only zeros, or without a move
MOST = 64  # warm forwards of the same weights without a move
BYTES = 2**20  # of the pages of an arena
BLOCK, NUMBERS = 64, 4096  # of `fp8_move`, at most: slots at a time, and numbers of their histories
LONGEST = 4096  # the longest history that it takes
WARPS = 4
GONE = (
    "reduce_amax, amax_group: the process group {!r} was destroyed, and this model was compiled for it. "
    "Compile it again: torch._dynamo.reset(), or a new process"
)


@dataclass(frozen=True)
class Where:
    """What pages of one arena have in common. `history`: amaxes that a slot keeps; `groups`: process groups
    over which amaxes are reduced, one after the other; `fixed`: `scales` keep their address."""

    device: torch.device
    history: int
    groups: tuple[str, ...] = ()
    fixed: bool = False


class Arena:
    """Rows of pages. `page`, `scales` and `amaxes` are those of `state_page`, for all rows."""

    def __init__(self, where: Where, rows: int):
        self.where, device = where, where.device
        self.page = new_page(rows, where.history, device)
        self.amaxes = new_amaxes(rows, device)
        self.scales = scales_of(self.page)
        self.by_page: Sequence[Tensor] = ()  # the scales of each page
        self.used = 0  # rows that pages have
        self.pages: list[int] = []  # how many rows each has, in order
        self.parts: list[tuple[int, int]] = []  # rows that move together: the first, and how many
        self.raised = False  # amaxes may have been raised since the last move
        self.edited = False  # rows were written since `scales` were made
        self.moves = 0
        self.stream = 0  # on which `scales` were made
        self._by_row = self._table = torch.empty(0)

    def allot(self, rows: int, parts: tuple[int, ...]) -> int | None:
        """The first of so many new rows; None if there are not enough. `parts`: their sizes, in order."""
        first = self.used
        if first + rows > self.page.shape[0]:
            return None
        self.used += rows
        self.pages.append(rows)
        at = first
        for count in parts:
            self.parts += [(at, count)] if count else []
            at += count
        by_row = list(range(self.used))
        for start, count in self.parts:
            by_row[start : start + count] = [start] * count
        self._by_row = torch.tensor(by_row, device=self.where.device)
        self._table = torch.tensor(self.parts or [(0, 0)], dtype=torch.int32, device=self.where.device)
        self.edited = True
        return first

    def ready(self, moves: bool) -> None:
        """Before a call: `scales` are those of the rows, on this stream. `moves`: no forward waits."""
        if not self.alive:
            raise Fp8CompileError(GONE.format(*self.where.groups))
        if self.edited:
            with compat.autograd.unseen(), LOCK:
                self._renew(scales_of(self.page[: self.used]))
        if moves and self.where.device.type == "cuda" and compat.autograd.capturing():
            self.move()
        if self.where.device.type == "cuda" and not self.where.fixed:
            stream = torch.cuda.current_stream(self.where.device).cuda_stream
            if stream != self.stream:  # the allocator knows of one stream only
                with compat.autograd.unseen(), LOCK:
                    self._renew(self.scales.clone())

    @property
    def alive(self) -> bool:
        """True if its process groups are there."""
        return all(map(compat.process_groups.is_alive, self.where.groups))

    def move(self) -> None:
        """Move all rows whose amaxes have been raised. A collective, with groups."""
        with compat.autograd.unseen(), LOCK:
            page, amaxes = self.page[: self.used], self.amaxes[: self.used]
            for group in self.where.groups:
                compat.process_groups.raise_to_largest(amaxes, group)
            if page.device.type == "cuda" and self.where.history <= LONGEST:
                scales = self.scales if self.where.fixed else torch.empty_like(self.scales[: self.used])
                launch_move(page, scales, amaxes, self._table)
                self._renew(scales)
            else:
                page.copy_(next_page(page, amaxes, self._by_row))
                amaxes.fill_(UNSEEN)
                self._renew(scales_of(page))
            self.raised = False
            self.moves += 1

    def _renew(self, scales: Tensor) -> None:
        if self.where.fixed and scales is not self.scales:
            self.scales[: self.used] = scales
        else:
            self.scales = scales
        self.by_page = self.scales[: self.used].split(self.pages)
        self.edited = False
        if self.where.device.type == "cuda":
            self.stream = torch.cuda.current_stream(self.where.device).cuda_stream

    def now(self, first: int, rows: int) -> Tensor:
        """These rows for reading: moved by what this rank has raised. The state itself stays."""
        with compat.autograd.unseen(), LOCK:
            these = slice(first, first + rows)
            if not self.raised:
                return self.page[these]
            return next_page(self.page[these], self.amaxes[these], self._by_row[these] - first)


class Arenas:
    """Those of this process, and who waits."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Arena]] = []
        # ranks count rows alike, so it must not matter when a rank collects its garbage
        self.kept: list[Arena] = []
        self.waiting: set[Pending] = set()

    def __iter__(self) -> Iterator[Arena]:
        return (arena for made in list(self.made) if (arena := made()) is not None)

    def allot(self, where: Where, rows: int, parts: tuple[int, ...]) -> tuple[Arena, int]:
        """New rows, and the arena that has them."""
        listen(_stepped)
        with LOCK:
            self.made = [made for made in self.made if made() is not None]
            for arena in self:
                if arena.where == where and (first := arena.allot(rows, parts)) is not None:
                    return arena, first
            room = BYTES // (4 * (HISTORY + where.history))
            arena = Arena(where, max(rows, room))
            self.made.append(weakref.ref(arena))
            self.kept += [arena] if where.groups else []
            first = arena.allot(rows, parts)
            assert first is not None
            return arena, first

    def move(self, alone: bool = False) -> bool:
        """Move what has been raised; False if a forward waits for its backward. `alone`: without others."""
        if self.waiting:
            return False
        for arena in self:
            if arena.raised and not (arena.where.groups and (alone or not arena.alive)):
                arena.move()
        return True

    def clear(self) -> None:
        """Nothing waits any more: an optimizer has stepped, or a state was loaded."""
        for pending in list(self.waiting):
            pending.clear()


class Pending:
    """Training forwards of one set of weights, in all graphs that serve it, that wait for their backwards:
    `count`. If these do not come (`given_up`), no forward is counted until one does. `open`: forwards that
    had no backward, waited for or not."""

    def __init__(self) -> None:
        self.count, self.open, self.given_up = 0, 0, False

    def begin(self) -> None:
        self.open += 1
        if not self.given_up:
            self.count += 1
            process.of(Arenas).waiting.add(self)

    def end(self) -> None:
        self.given_up = False
        self.open = max(0, self.open - 1)
        self.count = max(0, self.count - 1)
        if not self.count:
            self.clear()

    def give_up(self) -> None:
        """The backwards that are waited for do not come."""
        self.given_up = True
        self.clear()

    def clear(self) -> None:
        self.count = 0
        process.of(Arenas).waiting.discard(self)


def launch_move(page: Tensor, scales: Tensor, amaxes: Tensor, parts: Tensor) -> None:
    """Move pages in place, write their `scales`, and make `amaxes` unseen, by a program for each part.
    `parts`: int32 [n, 2], the first row and the number of rows of each. Everything is contiguous."""
    from .triton_move import fp8_move  # which needs Triton

    history = Rows(page).length
    rows, columns = configuration(history)
    with torch.cuda.device_of(page):
        fp8_move[parts.shape[0],](
            page, scales, amaxes, parts, history, rows, columns, num_warps=WARPS, enable_fp_fusion=False
        )


def configuration(history: int) -> tuple[int, int]:
    """Slots at a time, numbers of a history (a power of two)."""
    columns = 1 << max(0, history - 2).bit_length()
    return max(1, min(BLOCK, NUMBERS // columns)), columns


def _stepped(optimizer: torch.optim.Optimizer) -> None:
    if compat.autograd.in_backward():
        return  # an optimizer of one parameter, whose gradient is there; others wait
    arenas = process.of(Arenas)
    with LOCK:
        arenas.clear()
        # another optimizer may step on one rank alone
        if any(find_state(p).slots for group in optimizer.param_groups for p in group["params"]):
            arenas.move()
