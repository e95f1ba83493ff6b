"""The costs of a deep model, from compilations with a few of its repeated blocks.

Blocks are of one kind if their matmuls run alike in the whole model, whatever decides about them. A model is
compiled with two blocks of each run of one kind, and again with one block more of each kind that has more.
That is what a further block of the kind costs:

    A B B B B B C   kinds of the blocks: the first and the last one are kept in high precision, say
    A B B C         costs once
    A B B B C       what it costs more, three times

The blocks that are left out would move the others to places for which the policy decides otherwise. So every
matmul gets the choice that was made about it in the whole model (`Choices`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from torch import nn

from ..config.policy import Choice, Policy, Site
from ..frontend.inputs import plain
from ..ir.records import MatmulRecord
from ..passes.recast import FULL, LITTLE
from .estimate_result import Cost

Costs = dict[str, Cost]  # by module
Judge = Callable[[Policy, Site], Choice]
Order = tuple[int, ...]  # the blocks that are compiled, by their positions in the whole model


@dataclass(frozen=True, eq=False)
class Repeated:
    """A container of equal blocks. `name`: the container's, in its model. `keys`: the blocks', in it."""

    container: nn.Module
    name: str
    keys: tuple[str, ...]

    @contextlib.contextmanager
    def only(self, order: Order) -> Iterator[None]:
        """Inside, the container has these blocks alone, under the names of the first ones."""
        blocks = dict(self.container._modules)
        few = {key: blocks[self.keys[i]] for key, i in zip(self.keys, order, strict=False)}
        self.container._modules.clear()
        self.container._modules.update(few)
        try:
            yield
        finally:
            self.container._modules.clear()
            self.container._modules.update(blocks)

    @property
    def _start(self) -> str:
        return f"{plain(self.name)}." if self.name else ""

    def split(self, name: str) -> tuple[int, str] | None:
        """(position of the block, what follows its name) of the name of a module or parameter; None for one
        outside of the blocks."""
        key, dot, rest = name.removeprefix(self._start).partition(".")
        inside = name.startswith(self._start) and key in self.keys
        return (self.keys.index(key), dot + rest) if inside else None

    def named(self, block: int, rest: str) -> str:
        return self._start + self.keys[block] + rest

    def moved(self, name: str, order: Order) -> str:
        """The name in the whole model of what has this one with these blocks alone."""
        place = self.split(name)
        return name if place is None else self.named(order[place[0]], place[1])

    def kinds(self, matmuls: Iterable[MatmulRecord], decided: bool = True) -> list[Hashable]:
        """What runs in each block, by the report of the whole model; without `decided`, in which gemms, as in
        bf16: a first block may have no dgrad."""
        found: list[set[Hashable]] = [set() for _ in self.keys]
        for record in matmuls:
            if (place := self.split(record.fqn)) is not None:
                i, rest = place
                # which weights are cast again depends on all blocks: each compilation decides it anew
                changed = tuple(line for line in record.overrides if not line.endswith((FULL, LITTLE)))
                how = (record.decision, record.recipe, changed, len(record.merged))
                found[i].add((rest, record.gemm, record.m, record.n, record.k, how if decided else ()))
        return [frozenset(kind) for kind in found]

    def note(self, matmuls: Iterable[MatmulRecord]) -> str:
        """How many blocks the costs in FP8 come from."""
        count, name = len(self.keys), self.name or "the blocks"
        *few, most = sorted({len(order) for order, _ in samples(self.kinds(matmuls))})
        if not few:
            why = "two compilations with some of them, in which all kinds occur, would take as long"
            return f"all {count} of {name} are compiled: {why}"
        return f"{count} of {name}, extrapolated from {few[0]} and {most}"


def repeated(modules: Iterable[nn.Module]) -> Repeated | None:
    """The container of three or more equal blocks with the most parameters; or None."""
    found: list[tuple[int, Repeated]] = []
    for root in modules:
        for name, part in root.named_modules():
            children = {key: x for key, x in part._modules.items() if x is not None}
            forms = {(type(x), *(tuple(p.shape) for p in x.parameters())) for x in children.values()}
            if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(children) > 2 and len(forms) == 1:
                size = sum(p.numel() for p in part.parameters())
                found.append((size, Repeated(part, name, tuple(children))))
    return max(found, key=lambda item: item[0], default=(0, None))[1]


def samples(kinds: Sequence[Hashable]) -> list[tuple[Order, int]]:
    """The blocks to compile at a time, and how often the costs of each compilation count in those of all. So
    any three blocks in a row count as often as they occur: a block may share kernels with both neighbours."""
    again = [i for i in range(2, len(kinds)) if kinds[i - 2] == kinds[i - 1] == kinds[i]]
    first = [i for i in range(len(kinds)) if i not in again]
    further = {kinds[i]: i for i in reversed(again)}
    more = [(tuple(sorted([*first, i])), sum(kinds[j] == kind for j in again)) for kind, i in further.items()]
    made = [(tuple(first), 1 - len(again)), *more]
    whole = [(tuple(range(len(kinds))), 1)]
    return made if sum(len(order) for order, _ in made) < len(kinds) else whole


# -- choices --


class Choices:
    """What a policy chooses for each gemm of the whole model."""

    def __init__(self, blocks: Repeated):
        self.blocks = blocks
        self.made: dict[Hashable, set[Choice]] = {}

    def note(self, policy: Policy, site: Site) -> Choice:
        choice = Policy.choose(policy, site)
        self.made.setdefault(self._key(site), set()).add(choice)
        return choice

    def repeat(self, order: Order) -> Judge:
        """The same choices with these blocks alone. Those of a weight that is used in several ways depend on
        the graph, not on the place, and are made anew."""

        def judge(policy: Policy, site: Site) -> Choice:
            module, parameter = (self.blocks.moved(name, order) for name in (site.module, site.parameter))
            known = self.made.get(self._key(replace(site, module=module, parameter=parameter)), set())
            return next(iter(known)) if len(known) == 1 else Policy.choose(policy, site)

        return judge

    @staticmethod
    def _key(site: Site) -> Hashable:
        return site.module, site.parameter, site.gemm, site.m, site.n, site.k


@dataclass(frozen=True, repr=False)
class _Judged(Policy):
    """A policy whose choices go through a function."""

    judge: Judge = field(default=Policy.choose, compare=False)
    __hash__ = Policy.__hash__

    def choose(self, site: Site) -> Choice:
        return self.judge(self, site)


def judged(judge: Judge) -> Callable[[Policy], Policy]:
    """For `backend.fp8`: the policy that was given, with `judge` to choose."""
    return lambda policy: _Judged(**{f.name: getattr(policy, f.name) for f in fields(policy)}, judge=judge)


# -- costs --


def carried_on(made: Sequence[tuple[Costs, int]], blocks: Repeated) -> Costs:
    """The costs of the whole model, by module: of those with some of its blocks, as often as `samples` says.
    What belongs to a block is divided between all."""
    found: Costs = {}
    count = len(blocks.keys)
    for name in dict.fromkeys(name for costs, _ in made for name in costs):
        place = blocks.split(name)
        names = [name] if place is None else [blocks.named(i, place[1]) for i in range(count)]
        for costs, times in made:
            for each in names if name in costs else ():
                found[each] = found.get(each, Cost()).plus(costs[name], times / len(names))
    return found
