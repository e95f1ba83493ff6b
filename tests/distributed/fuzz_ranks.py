"""Random models and protocols of `tests/support/fuzz_training`, on two ranks that share the work by DDP or
FSDP2.

    python -m tests.distributed.fuzz_ranks 500 [first seed [seconds]]

Each rank has batches of its own. Beside the parallel training runs one of a replica on each rank, whose
gradients are averaged by hand. In half of the cases, FP8 is exact on all numbers, and the replica is eager: a
wrong operand, or a gradient that is lost, counted twice or not averaged, shows. In the other half numbers are
noise, and the replica trains in FP8 with a state of its own: scales have to be the same. Where that fails,
the same case is run with the backend "aot_eager": it may be torch's.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fp8compile
from fp8compile.distributed import fp8_all_gather
from tests.distributed.ranks import Way, averaged, plain, sharded, whole
from tests.support import fuzz_models, fuzz_protocols, fuzz_training, hooks
from tests.support.fuzz_models import UNIT
from tests.support.fuzz_protocols import Results, Side
from tests.support.harness import ALL_FP8, histories
from tests.support.processes import on_ranks

TIME_LIMIT = 120  # seconds a case
FLOOR_DB = {torch.float32: 90.0, torch.bfloat16: 40.0}  # of another order of additions
SMALL_BUCKET = 2**16  # bytes; DDP's smallest one has 2**20, which few of these models reach

# events of their own: m is an optimizer's step; g is a forward and a backward whose gradients are not reduced
PROTOCOLS = {name: fuzz_protocols.PROTOCOLS[name] for name in (
    "plain", "no input gradient", "accumulated", "evaluated", "forsaken", "dry", "hooked output",
    "checkpointed", "offloaded", "moved", "rescale", "one output", "two forwards", "two forwards in reverse",
    "together", "frozen",
)} | {"not reduced": "gfb", "moved again": "mfb"}  # fmt: skip
# DDP reduces one backward for each forward, and knows at its beginning which parameters are trained
REFUSED = {
    "ddp": {"two forwards", "two forwards in reverse", "together", "frozen", "one output"},
    "fsdp": set[str](),
}
COMPILED = {  # how, and how the replica is
    "ddp": {"outside": "around", "around": "around", "whole": "whole", "before": "before"},
    "fsdp": {"before": "before", "after": "before", "wrapped": "before", "whole": "before"},
}


@dataclass
class OnRanks(fuzz_training.Case):
    """`exact`: FP8 is exact. `uneven`: the second rank has larger batches. `mixed`: FSDP2 gathers bf16 of
    float32. `bucket`: of DDP, in bytes."""

    way: Way = field(default_factory=Way)
    backend: str = "fp8"
    exact: bool = True
    uneven: bool = False
    mixed: bool = False
    bucket: int = 25 * 2**20

    @classmethod
    def of(cls, seed: int, backend: str = "fp8") -> OnRanks:  # type: ignore[override]
        case, rng = cls(**vars(fuzz_training.Case.of(seed)), backend=backend), random.Random(f"ranks {seed}")
        kind = rng.choice(("ddp", "fsdp"))
        gather = kind == "fsdp" and rng.random() < 0.5
        if gather:  # of what is stored as it is multiplied
            with mock.patch.object(fuzz_models, "STORED", ("plain", "plain", "plain", "frozen", "turned")):
                case.model = fuzz_models.Model(random.Random(f"gather {seed}")).to(case.dtype)
            case.shapes = [(*shape[:-1], case.model.width) for shape in case.shapes]
        del case.model.blocks[2:]  # two blocks show what three do, and compile faster
        case.dynamic = case.dynamic if rng.random() < 0.5 else None
        case.exact, case.uneven = rng.random() < 0.5, rng.random() < 0.15
        case.mixed = kind == "fsdp" and case.dtype == torch.bfloat16 and rng.random() < 0.5
        case.bucket = rng.choice((SMALL_BUCKET, case.bucket)) if case.exact else case.bucket
        reshard = rng.choice((None, None, True, False))
        checkpoint = rng.choice(("", "", "outside", "around" if kind == "fsdp" else ""))
        dtype, compiled = torch.bfloat16 if case.mixed else torch.float32, rng.choice(list(COMPILED[kind]))
        # Dynamo leaves all of it to eager: FSDP2's hooks, in a checkpoint
        if compiled == "whole" and checkpoint == "around":
            checkpoint = "outside"
        case.way = Way(
            kind, compiled=compiled, reshard=reshard, checkpoint=checkpoint, dtype=dtype, gather=gather
        )
        reentrant = any(block.checkpoint == "reentrant" for block in case.model.blocks)
        refused = (
            REFUSED[kind]
            | ({"no input gradient"} if reentrant else set())
            | ({"frozen"} if case.mixed else set())
        )
        case.protocols = rng.choices([name for name in PROTOCOLS if name not in refused], k=3)
        if not case.exact:  # what is merged or gathered has one scale
            case.options["merge_matmuls"] = False
            case.options |= (
                {"current_scaling": (False, True, False)} if gather and case.recipe == "delayed" else {}
            )
            case.options |= {"weight_tiles": True} if gather and case.recipe in ("mxfp8", "rowwise") else {}
        if case.recipe == "delayed" and "rescale" in case.protocols:
            case.options["amax_history_len"] = 2
        if case.recipe == "delayed" and not case.uneven and rng.random() < 0.2:
            case.options["reduce_amax"] = True
        for module in case.model.modules():  # FSDP2 takes no scalars, and no strides
            for name, p in list(module.named_parameters(recurse=False)):
                if p.dim() == 0 or (kind == "fsdp" and not p.is_contiguous()):
                    values = p.detach().contiguous() if p.dim() else p.detach()[None]
                    setattr(module, name, nn.Parameter(values, p.requires_grad))
        if kind == "ddp" and not any(p.requires_grad for p in case.model.parameters()):  # which DDP refuses
            case.model.requires_grad_()
        if not case.exact:
            made = torch.Generator().manual_seed(seed)
            for p in case.model.parameters():
                p.data *= torch.rand(p.shape, generator=made).to(p.dtype) + 0.5
        return case

    def some_unused(self) -> bool:
        """Whether some trained parameters get no gradient."""
        model = copy.deepcopy(self.model)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            outs = model(torch.zeros(self.shapes[0], dtype=self.dtype).requires_grad_())
        sum(y.sum() for y in (outs if isinstance(outs, tuple) else (outs,))).backward()  # type: ignore[union-attr]
        return any(p.requires_grad and p.grad is None for p in model.parameters())

    def floor_db(self, protocol: str) -> float:
        """In bf16, DDP and FSDP2 add up gradients of several backwards in another order than a replica
        does."""
        one = PROTOCOLS[protocol].count("b") == 1 and protocol not in ("dry", "not reduced")
        return FLOOR_DB[torch.float32 if one or self.mixed else self.dtype]

    def __str__(self) -> str:
        w = self.way
        flags = [name for name in ("exact", "uneven", "mixed") if getattr(self, name)] + ["gather"] * w.gather
        how = (
            f"  {w.kind}, compiled {w.compiled}, checkpoint {w.checkpoint!r}, "
            f"reshard={w.reshard}, bucket {self.bucket}"
        )
        return (
            f"{super().__str__()}\n{how}, {' '.join(flags)}\n  alone: python -m "
            f"tests.distributed.fuzz_ranks 1 {self.seed}"
        )


@dataclass
class Rank(Side):
    """One side on this rank: the parallel training, or that of a replica."""

    case: OnRanks
    parallel: bool = False
    drawn: int = 0
    # gradients of a replica in bf16, added up as FSDP2 does
    wide: dict[str, Tensor] = field(default_factory=dict)
    ddp: Any = None

    def compile(self) -> None:
        case, model, way = self.case, self.model, self.case.way
        options: Any = {"recipe": case.recipe, "policy": ALL_FP8, **case.options}
        how = {"dynamic": case.dynamic, "fullgraph": False, "backend": case.backend}
        how["options"] = options if case.backend == "fp8" else None
        self.run = model
        if case.mixed and self.parallel:
            model.float()
            for buffer in model.buffers():
                buffer.data = buffer.to(torch.bfloat16)
        elif case.mixed:
            for name, p in model.named_parameters():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(lambda p, name=name: self.widen(name, p))
        if self.parallel and way.kind == "ddp":
            inside = "not" if way.compiled == "outside" else way.compiled
            self.run = sharded(
                model, dataclasses.replace(way, kind="replica", compiled=inside, how=how), None
            )
            settings = {"bucket_cap_mb": case.bucket / 2**20, "find_unused_parameters": case.some_unused()}
            self.run = self.ddp = DistributedDataParallel(self.run, **settings)
            if way.compiled == "outside":
                self.run = torch.compile(self.run, **how)
        elif self.parallel:
            self.run = sharded(model, dataclasses.replace(way, how=how), None)
        elif self.fp8:
            compiled = COMPILED[way.kind][way.compiled]
            twin = dataclasses.replace(way, kind="replica", compiled=compiled, gather=False, how=how)
            self.run = sharded(model, twin, None)
        self.steps = torch.optim.SGD(list(model.parameters()), lr=0.0)

    def widen(self, name: str, p: Any) -> None:
        self.wide[name] = self.wide.get(name, 0) + p.grad.float()
        p.grad = None

    def train(self, protocol: str) -> Results:
        self.wide.clear()
        seen = super().train(protocol)
        for name in self.wide.keys() | dict(self.model.named_parameters()).keys() & seen.keys():
            gradient = self.wide.get(name, seen.get(name))
            seen[name] = whole(gradient) if self.parallel else averaged(gradient, ())  # type: ignore[arg-type]
        return {plain(name): x for name, x in seen.items()}

    def event(self, letter: str) -> None:
        own = {"m": self.move, "g": self.unreduced}
        own[letter]() if letter in own else super().event(letter)
        if letter == "s":  # what it adds up is dropped
            self.wide.clear()

    def draw(self, *shape: int) -> Tensor:
        """Integers or noise, of this rank."""
        self.drawn += 1
        made = torch.Generator().manual_seed((self.case.seed * 1000 + self.drawn) * 2 + dist.get_rank())
        return (
            torch.randint(-1, 2, shape, generator=made).float()
            if self.case.exact
            else torch.randn(shape, generator=made)
        )

    def x(self, requires_grad: bool = True) -> Tensor:
        more = self.case.uneven and dist.get_rank()
        shape = (self.shape[0] + more, *self.shape[1:])
        return self.draw(*shape).to(self.case.dtype).requires_grad_(requires_grad)

    def gradients(self, outs: list[Tensor]) -> list[Tensor]:
        return [self.draw(*y.shape).to(y.dtype) * UNIT for y in outs]

    def unreduced(self) -> None:
        sharded = self.parallel and self.ddp is None
        if sharded:
            self.model.set_requires_gradient_sync(False)  # type: ignore[operator]
        with self.ddp.no_sync() if self.ddp is not None else contextlib.nullcontext():
            self.forward()
            self.backward(self.open.pop())
        if sharded:
            self.model.set_requires_gradient_sync(True)  # type: ignore[operator]

    def move(self) -> None:
        """Weights change by hand, or as in an optimizer's step."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                normed = getattr(self.model.get_submodule(name.rpartition(".")[0]), "stored", "") == "norm"
                if p.dim() > 1 and not name.endswith("scale") and not normed:
                    values = whole(p).roll(self.rng.randint(1, 9), self.rng.choice((0, 1)))
                    p.copy_(
                        distribute_tensor(values, p.device_mesh, p.placements)
                        if isinstance(p, DTensor)
                        else values
                    )
        if self.rng.random() < 0.7:
            self.steps.step()
        elif self.parallel and self.case.way.gather:
            fp8_all_gather(self.model)


def check(case: OnRanks, seen: Counter) -> list[str]:
    """What differs, on this rank."""
    errors: list[str] = []
    hooks.forget_trainings()
    sides = [
        Rank(case, copy.deepcopy(case.model), not case.exact),
        Rank(case, copy.deepcopy(case.model), True, parallel=True),
    ]
    for i, name in enumerate(case.protocols):
        results, states, where = [], [], f"step {i}, {name}"
        for side in sides:
            side.rng, side.shape = random.Random(f"{case.seed} {i}"), case.shapes[i]
            side.model.zero_grad()
            results.append(side.train(PROTOCOLS[name]))
            found = histories(side.model) if case.backend == "fp8" else {}
            states.append(
                {
                    f"state of {plain(key[0])} {key[1:]}": torch.tensor([*h, s])
                    for key, (h, s) in found.items()
                }
            )
        for kept, state in zip(results, states, strict=True):
            kept |= {key: x for key, x in state.items() if key in states[0] and key in states[1]}
        try:
            fuzz_training.compare(*results, where, case.floor_db(name))
            # in two parts of a graph that DDP has cut, two uses of a weight are both first, with one history
            shared = sides[1].ddp is not None and "shared" in str(case)
            if case.recipe == "delayed" and case.backend == "fp8" and not shared:
                fuzz_training.moved_once(sides[1], where)
        except AssertionError as error:
            errors.append(str(error))
        seen[name] += 1
    report = fp8compile.report(sides[1].model)
    seen["models"] += 1
    seen["models in FP8"] += any(r.decision == "fp8" for r in report.matmuls)
    seen["weights gathered in FP8"] += sum(r.dtype == "e4m3" for r in report.gathered)
    return errors


@contextlib.contextmanager
def fuzzing(case: OnRanks) -> Iterator[None]:
    """The settings that these cases need."""
    first = min(case.bucket, dist._DEFAULT_FIRST_BUCKET_BYTES)
    with fuzz_training.fuzzing(), mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", first):
        yield


def _on_rank(rank: int, seed: int, backend: str) -> tuple[list[str], Counter]:
    seen: Counter = Counter()
    case = OnRanks.of(seed, backend)
    with fuzzing(case):
        return check(case, seen), seen


def one(seed: int, seen: Counter, backend: str = "fp8") -> str:
    """What differs or fails, or ""."""
    try:
        found = on_ranks(2, _on_rank, seed, backend, limit=TIME_LIMIT)
    except AssertionError as error:
        return str(error)
    seen.update(found[0][1])
    return "\n".join(f"  rank {rank}, {error}" for rank, (errors, _) in enumerate(found) for error in errors)


def run(count: int, first: int = 0, limit_s: float = float("inf")) -> tuple[Counter, list[str]]:
    """Runs `count` seeds from `first` on, for limit_s seconds at most. Returns counts, and the failures."""

    def beside_the_stock_path(seed: int, seen: Counter) -> str:
        error = one(seed, seen)
        stock = error and one(seed, Counter(), "aot_eager")
        return error and f"{OnRanks.of(seed)}\n{error}\n  with aot_eager: {stock or 'as it should be'}"

    return fuzz_training.over(beside_the_stock_path, count, first, limit_s)


if __name__ == "__main__":
    fuzz_training.main(run)
