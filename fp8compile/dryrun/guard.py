"""`fp8compile.guard(model)`: moves gemms that FP8 harms to another recipe, or to high precision, in training.

docs/guard.md says what it watches, when it moves a gemm, and why.

The rungs are tried on the operands that were measured, in the copy that keeps rows as they are: a recipe that
repairs rows and columns there repairs the training (notes/log.md). The copy for the weight's gradient is no
judge, as its rows sum over tokens.

In a distributed job each rank measures its own batch. The ranks vote after each measurement.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from .. import compat
from ..config.policy import Policy, Rule, preceded
from ..config.policy.guard_table import LAST, GuardTable
from ..config.policy.policy_files import to_toml
from ..config.recipe import Recipe
from ..devices.formats import pick
from ..errors import OptionError, at_most
from ..features.schedule import by_hand, moves
from ..ir.frozen import cast
from ..ir.records import FP8, HIGH_PRECISION
from ..ir.scale import inverse_of
from ..ir.schemas import FP8Copy
from ..logs import get_logger, rank, say_once
from ..reporting.stats import table
from ..runtime.named_weights import named_weights, unwrapped
from ..runtime.optimizer_steps import each_step, steps_of
from ..runtime.parameters import ParameterRecord, find
from ..runtime.probe import COLUMNS, Measurement, Name, ending, measured
from .observe import Watched
from .watch import Comparing, Seen

logger = get_logger(__name__)

# The largest harmless values were 0.06, 2.4, 0.1 (1.0 with an offset) and 25 (54). The smallest of what
# failed were 0.75, none, 0.39 and 62 (notes/log.md).
BANDS = {"row_error": 0.1, "overflows%": 3.0, "column_error": 0.2, "underflows%": 40.0}
# The others are out of band in trainings that lose nothing, too.
SURE = {key: BANDS[key] for key in ("row_error", "overflows%")}
REPAIRED = {**BANDS, "underflows%": 20.0}  # of a good median, half of the columns could be lost
# So much of the gradient's error may be left after a move: 0.06 to 0.48 where FP8 failed, 0.88 to 1.1 else.
HELPS = 2 / 3
FAR, MUCH = 0.25, 3.0  # a warning if gradients are off by more than this, and so many times more than bf16's
AHEAD = 2  # steps from a decision to the move, so that what is gathered for a step is known before it
READERS = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "gradient": ("dgrad", "wgrad")}
Votes = dict[tuple[str, str], tuple[str, str]]  # weight and gemm -> rung, and why
_guards: WeakKeyDictionary[nn.Module, Guard] = WeakKeyDictionary()


class Suspect(NamedTuple):
    """A tensor that is cast: a weight's name, the role, and which use of the weight."""

    name: str
    role: str
    use: int


@dataclass(frozen=True)
class Move:
    """A gemm that moved: from this step on, to this rung of the ladder. `why`: what was measured."""

    name: str
    gemm: str
    step: int
    rung: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} {self.gemm} moves to {self.rung} at step {self.step}: {self.why}"


def guard(model: nn.Module, log: str | os.PathLike[str] | None = None) -> Guard:
    """Watch a model while it trains, and move gemms that FP8 harms, as `[guard]` of its policy says.

    A move is a warning, and a rule with a window that is put before all others. `log`: a TOML file with the
    whole policy, written after each move (by rank 0); a training that is given this policy makes the same
    moves at the same steps. In a distributed job, call it on all ranks.

    `model` is the object that the training loop calls: what torch.compile(model, backend="fp8") returned.
    With the module inside of it, steps are not compared with high precision before a move. Returns a `Guard`:
    close it, or use it in a `with`.

    OptionError (a ValueError) for a model that is not compiled, whose policy has no `[guard]`, of which
    nothing is in FP8, or that has a guard; and for a `log` that cannot be written. What is only known after
    the first call is a warning then."""
    inner = unwrapped(model)
    if (known := _guards.get(inner)) is not None and not known.closed:
        raise OptionError(f"guard(model): this {type(inner).__name__} has a guard already: close it first")
    if not compat.autograd.is_compiled(model) and not any(find(x).graphs for x in inner.parameters()):
        raise OptionError("guard(model): compile it first: torch.compile(model, backend='fp8')")
    path = Path(log) if log is not None else None
    if path is not None and (path.suffix != ".toml" or not path.parent.is_dir()):
        raise OptionError.of("log", str(path), "a path in an existing folder that ends in .toml")
    made = _guards[inner] = Guard(model, inner, path)
    return made


class Guard:
    """Watches one model. `moved`: what it has moved, in order."""

    def __init__(self, model: nn.Module, inner: nn.Module, log: Path | None):
        self.log, self.moved, self.closed = log, list[Move](), False
        self._model, self._name = weakref.ref(inner), type(inner).__name__
        self._policy: Policy | None = None
        self._settings = GuardTable()
        self._measurement: Measurement | None = None
        self._counts: dict[Suspect, int] = {}  # measurements in a row that were out of band
        self._tries: dict[tuple[Suspect, str], Tensor] = {}  # by operand and rung
        self._records: dict[str, ParameterRecord] = {}
        self._names: dict[ParameterRecord, str] = {}
        self._before = moves.rules_of(inner)  # of an earlier guard
        if any(find(x).options is not None for x in inner.parameters()):
            self._begin(inner)  # raises what a later call would warn of
        sharded = any(hasattr(parameter, "placements") for parameter in inner.parameters())
        able = compat.autograd.is_compiled(model) and not sharded
        self._comparing = Comparing(model) if able else None
        if self._comparing is not None:
            self._comparing.ends = f"guard of {self._name}: steps are no longer taken in high precision"
        self._forget: Callable[[], None] = each_step(self._at, inner)
        self._arm(steps_of(inner))

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Watch no more. What was moved stays."""
        self.closed = True
        getattr(self, "_forget", lambda: None)()
        if self._measurement is not None:
            self._measurement.end()
        if self._comparing is not None:
            self._comparing.close()

    # -- steps --

    def _begin(self, model: nn.Module) -> None:
        """Once a graph was called: what its policy says."""
        options = next((x.options for x in map(find, model.parameters()) if x.options is not None), None)
        if options is None:
            raise OptionError(f"guard: no training call of {self._name} was compiled for FP8")
        if options.policy.guard is None:
            raise OptionError('guard: the policy of the model has no [guard]: write {"guard": {}} into it')
        if why := by_hand.why_not_late(model):
            raise OptionError(f"guard: {why}, so nothing could move")
        self._policy, self._settings = options.policy, options.policy.guard
        self._records = {name: find(weight) for name, weight in named_weights(model).items()}
        self._names = {record: name for name, record in self._records.items()}

    def _at(self, step: int) -> None:
        """After the `step`-th optimizer step."""
        model = self._model()
        if model is None or self.closed:
            return self.close()
        with ending(f"the guard of {self._name} ends", self.close):
            if self._policy is None:
                self._begin(model)
            measurement, self._measurement = self._measurement, None
            if measurement is not None:
                measurement.end()
                if measurement.failed:
                    return self.close()
                if self._settings.measures(step):  # else the step was changed by `set_step`
                    self._judge(model, measurement, step)
            self._arm(step)

    def _arm(self, step: int) -> None:
        """After `step` steps: begin to measure the next one, if it is due."""
        model = self._model()
        if model is None or self._policy is None or not self._settings.measures(step + 1):
            return
        self._tries.clear()
        last = [operand for operand, count in self._counts.items() if count >= self._settings.patience - 1]
        self._measurement = Measurement(model, self._try if last else None).begin()
        if last and self._comparing is not None:
            self._comparing.waiting = True

    # -- measurements --

    def _try(self, owner: Any, name: Name, given: Tensor, _: FP8Copy) -> None:
        """Cast an operand that may move by each rung."""
        operand = Suspect(self._names.get(find(owner), ""), name[0], name[1])
        if self._counts.get(operand, 0) < self._settings.patience - 1:
            return
        assert self._policy is not None
        for rung in self._settings.rungs:
            if (operand, rung) not in self._tries:
                self._tries[operand, rung] = _cast(given, operand.role, self._policy.named(rung))

    def _rungs(self, name: str, gemm: str) -> list[str]:
        """Those that a gemm has not passed yet."""
        ladder = [*self._settings.rungs, LAST]
        passed = [
            ladder.index(move.rung) + 1 for move in self.moved if (move.name, move.gemm) == (name, gemm)
        ]
        return ladder[max(passed, default=0) :]

    def _judge(self, model: nn.Module, measurement: Measurement, step: int) -> None:
        at = COLUMNS.index("amax")
        amaxes = [vector[at].item() for known in measurement.records.values() for vector in known.values()]
        if not amaxes or not all(map(math.isfinite, amaxes)):
            why = "a tensor was not finite" if amaxes else "nothing was in FP8"
            say_once(logger, logging.INFO, f"guard of {self._name}: step {step} tells nothing: {why}")
            self._move(model, _agreed({}), step + AHEAD)
            return
        rows = [row for row in table(model, measurement) if row["underflows%"] is not None]
        rows = [row for row in rows if row["layout"] != "transposed"]
        bands = SURE if self._comparing is None or self._comparing.closed else BANDS
        operands = [Suspect(row["name"], row["role"], row["use"]) for row in rows]
        found = zip(operands, (_out_of_band(row, bands) for row in rows), strict=True)
        out = {operand: why for operand, why in found if why}
        self._counts = {operand: self._counts.get(operand, 0) + 1 for operand in out}
        ready = {
            x: why for x, why in out.items() if self._counts[x] >= self._settings.patience and self._tried(x)
        }
        wanted = dict(self._votes(ready, measurement))
        if wanted and not self._help(model, wanted, step):
            wanted, self._counts = {}, {x: n for x, n in self._counts.items() if x not in ready}
        self._move(model, _agreed(wanted), step + AHEAD)

    def _tried(self, operand: Suspect) -> bool:
        return any(key[0] == operand for key in self._tries) or self._settings.ladder == (LAST,)

    def _help(self, model: nn.Module, wanted: Votes, step: int) -> bool:
        """True if these moves take a third of the error from the step's gradient, or nothing compares it."""
        if self._comparing is None or self._comparing.closed:
            return True
        errors = self._comparing.of_seen(step, partial(self._errors, model, wanted, step))
        if errors is None:
            return False
        before, after, in_bf16 = errors
        names = ", ".join(dict.fromkeys(name for name, _ in wanted))
        what = f"out of band: {names}; with moves, gradients are off by {after:.3f} instead of {before:.3f}"
        logger.info("fp8: guard of %s: step %d: %s", self._name, step, what)
        helps = after <= HELPS * before
        if not helps and before > max(FAR, MUCH * in_bf16):
            what = f"gradients are off by {before:.2f} (bf16: {in_bf16:.2f}), and no single gemm is to blame"
            logger.warning("fp8: guard of %s: step %d: %s", self._name, step, what)
        return helps

    def _errors(self, model: nn.Module, wanted: Votes, now: int, seen: Seen) -> tuple[float, float, float]:
        """Of the step's gradient: without and with these moves, and with the noise of bf16."""
        assert self._comparing is not None
        session, batch = self._comparing.session, (seen.args, seen.kwargs, seen.loss)
        step = session.taking(*batch)
        reference = step(HIGH_PRECISION, None)
        session.check_finite(reference)
        in_bf16 = reference.error(step(HIGH_PRECISION, Watched({}, noise=True)))
        before = reference.error(step(FP8, None))
        with moves.tried(model, self._rules(Move(*gemm, now, *vote) for gemm, vote in wanted.items())):
            return before, reference.error(session.taking(*batch)(FP8, None)), in_bf16

    def _votes(
        self, ready: Mapping[Suspect, str], measurement: Measurement
    ) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
        """For each gemm in FP8 that reads what is out of band: the first rung that repairs all of it."""
        readers: dict[tuple[str, str], list[Suspect]] = {}
        for operand in ready:
            for gemm in READERS[operand.role]:
                if (self._records[operand.name], gemm) in measurement.gemms:
                    readers.setdefault((operand.name, gemm), []).append(operand)
        for (name, gemm), operands in readers.items():
            rungs = self._rungs(name, gemm)
            fits = (rung for rung in rungs if rung == LAST or all(self._repairs(x, rung) for x in operands))
            why = "; ".join(f"{operand.role}: {ready[operand]}" for operand in operands)
            yield (name, gemm), (next(fits, LAST), why)

    def _repairs(self, operand: Suspect, rung: str) -> bool:
        found = self._tries.get((operand, rung))
        if found is None:
            return False
        seen = dict(zip(COLUMNS, found.tolist(), strict=True))
        for key in ("underflows", "overflows"):
            seen[f"{key}%"] = 100 * seen[key] / max(1.0, seen["elements"])
        return not _out_of_band(seen, REPAIRED)

    # -- moves --

    def _move(self, model: nn.Module, votes: Votes, step: int) -> None:
        names = list(dict.fromkeys(name for name, _ in votes))[: self._settings.most]
        made = [Move(name, gemm, step, *vote) for (name, gemm), vote in votes.items() if name in names]
        if not made:
            return
        assert self._policy is not None
        rules = self._rules(made)
        policy = preceded(self._policy, rules)  # an error before anything has moved
        moves.put(model, rules)
        for move in made:
            logger.warning("fp8: guard of %s: %s", self._name, move)
        self.moved += made
        self._counts = {operand: n for operand, n in self._counts.items() if operand.name not in names}
        if self.log is not None and rank() in (None, 0):
            self.log.write_text(self._text(policy), encoding="utf-8")

    def _rules(self, made: Iterable[Move]) -> tuple[Rule, ...]:
        """With these moves."""
        return (*rules_of([*self.moved, *made], len(self._before)), *self._before)

    def _text(self, policy: Policy) -> str:
        """The decision log."""
        told = at_most(200, [f"# {move}" for move in self.moved])
        return "\n".join([f"# Written by the guard of {self._name}. Moves:", *told, "", to_toml(policy)])


def rules_of(made: list[Move], before: int = 0) -> tuple[Rule, ...]:
    """The rules of some moves: of each gemm, the later one begins where the earlier one ends. `before`: how
    many rules there are already."""
    rules = []
    for i, move in enumerate(made):
        later = [x.step for x in made[i + 1 :] if (x.name, x.gemm) == (move.name, move.gemm)]
        how: dict[str, Any] = {"recipe": move.rung, "fp8": "on", "gemm": move.gemm}
        how = {"fp8": "off", "gemm": move.gemm} if move.rung == LAST else how
        during = f"{move.step}..{later[0] if later else ''}"
        rules.append(Rule(name=f"guard {before + i + 1}", parameter=move.name, during=during, **how))
    return tuple(rules)


SAID = {
    "row_error": "the median row is off by {:.2f}",
    "overflows%": "{:.1f}% saturate",
    "column_error": "the median column is off by {:.2f}",
    "underflows%": "{:.0f}% become 0",
}


def _out_of_band(row: Mapping[str, Any], bands: Mapping[str, float]) -> str:
    """How it is out of these bands; "" if it is not."""
    found = [(key, row[key]) for key in bands if row[key] is not None and not math.isnan(row[key])]
    return ", ".join(SAID[key].format(x) for key, x in found if x > bands[key])


def _cast(x: Tensor, role: str, recipe: Recipe) -> Tensor:
    """COLUMNS of the plain copy of an operand by a recipe, each scale from its own amax. `x`: [R, C]."""
    scaling = recipe.scaling(role, READERS[role][0])
    form, block = pick(scaling.wide, False), scaling.block
    copy, inverse = cast(x.detach(), form.dtype, block, scaling.margin, scaling.power_of_2)
    return measured(x.detach(), inverse_of(inverse), copy, form.max, False, block)


def _agreed(votes: Votes) -> Votes:
    """The votes of all ranks; of two for one gemm, that of the first rank."""
    every = compat.process_groups.gather(votes)
    return {gemm: vote for its in reversed(every) for gemm, vote in its.items()}
