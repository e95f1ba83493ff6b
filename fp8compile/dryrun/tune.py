"""The fastest policy whose predicted loss is within a budget. `tune` measures what FP8 costs, and estimates what it saves.

    tuned = fp8compile.tune(model, tokens, targets, device="h100", loss_budget="0.2%")
    tuned.write("policy.toml")                                  # a commented policy, for options={"policy": "policy.toml"}

Layers whose names differ in numbers only are a group (`candidates`). For each group and each candidate, one training step runs
operator by operator with that group alone in FP8, as `fp8compile.compare` runs it. Its *error* is the noise in the gradient:

    error = mean over all elements of trained parameters of min(1, |g_fp8 - g|^2 / |g|^2 - what bf16 has)

where |.| is over one parameter, because Adam scales each parameter's update by its own gradient. Errors of groups are taken to
add up. Times come from `fp8compile.estimate`, of steps with all layers in one recipe. The fastest sums within the budget
(`frontier`), of any recipes and of one recipe each, are measured and estimated again as whole policies, and so is every uniform
recipe. What is returned is the fastest of those whose measured error is within the budget.

The predicted loss gap is LOSS times the error. docs/tune.md says where LOSS comes from, and what the prediction is not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config.options import parse
from ..config.policy import VARIABLE
from ..devices import catalog
from ..errors import Fp8CompileError, OptionError
from ..ir.records import FP8, HIGH_PRECISION
from ..reporting.layers import pattern
from .candidates import Candidate, Choice, Group, Point, candidates, frontier, groups_of, policy_of
from .compare import Loss, Session, Step
from .observe import Watched, sums
from .times import Times, of_modules, seconds
from .tuned import Tuned, Whole

LOSS = 1.0  # relative loss gap for an error of 1
UNSTEADY = 0.1  # of the budget: two equal runs may differ by so much
TRIES = 6  # policies of a frontier that are measured
NEAR = 1.02  # sums of times are off by a few percent
Progress = Callable[[int, int, str], None]


class Unmet(Fp8CompileError):
    """No policy fits the budget, or none is faster than bf16."""


def tune(
    model: Callable[..., Any],
    *args: Any,
    loss: Loss | None = None,
    options: Mapping[str, Any] | None = None,
    device: str | None = None,
    loss_budget: float | str = "0.2%",
    like: Any = None,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Tuned:
    """Choose recipe and format for each group of layers of `model(*args, **kwargs)`. See `Tuned`.

    `model`, its arguments and `loss` are those of `fp8compile.compare`: a real batch, in the context of your step. `device`
    names the described device that times are estimated for; None takes that of the policy, else "h200". `loss_budget` is the
    relative increase of the loss that FP8 may cost: "0.2%" or 0.002. `options` may have a "policy", by name or path: the result
    extends it, and what its own rules keep in high precision stays so.

    `like` is what times are estimated for, if that is not `model` and its batch: (model, args) or (model, args, kwargs), of a
    model whose modules have the same names. It may be on the meta device. Small sizes gain nothing from FP8.

    `progress(done, total, what)` is called before each of the steps and compilations; `total` may grow.

    The model, its gradients, buffers and random numbers, and reports are left as they were. The result depends on nothing but
    the arguments. It takes a step for each group and candidate, run operator by operator, and a compilation for each recipe.

    Raises Fp8CompileError if the model refuses the batch, if its loss is not finite, if it is not deterministic, if no policy
    fits the budget or none is faster, or if no GPU can be described here (a process with a CUDA device); OptionError (a
    ValueError) for bad options, as `compare` does.
    """
    budget = budget_of(loss_budget)
    extends = _extends(options or {})
    base = parse({"policy": extends}).policy
    found = catalog.find(device or base.device or "h200")
    if not found.has_fp8:
        raise OptionError.of("device", found.key, "a device with FP8 tensor cores", ("h100", "h200"))
    timed, its, named = _like(like) if like is not None else (model, args, kwargs)
    times = Times(timed, its, named, found, here=like is None)  # before the work: it may not be possible here
    measured = _Measured(model, args, kwargs, loss, extends, budget, progress or (lambda *_: None))
    return _Search(measured, times, candidates(found.gpu), budget).result()


def budget_of(given: float | str) -> float:
    """A relative increase of the loss: 0.001 of "0.1%" or 0.001. OptionError if it is none."""
    try:
        text = given.strip() if isinstance(given, str) else given
        value = float(text[:-1]) / 100 if isinstance(text, str) and text.endswith("%") else float(text)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value < 1 or isinstance(given, bool):
        raise OptionError.of("loss_budget", given, "a share of the loss above 0 and under 1, such as '0.1%' or 0.001")
    return value


def _extends(options: Mapping[str, Any]) -> str:
    """The name or path of the policy that the result extends."""
    for key in options:
        if key not in ("policy", "strict"):
            raise OptionError(f"tune: option {key!r} cannot be given, only 'policy'; write it into [defaults] of a file")
    policy = options.get("policy") or os.environ.get(VARIABLE) or "default"
    if not isinstance(policy, (str, os.PathLike)):
        raise OptionError(f"tune: policy has to be a name or path, which the result can extend; got {type(policy).__name__}")
    return os.fspath(policy)


def _like(given: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    model, *rest = given if isinstance(given, tuple) else (given,)
    args = rest[0] if rest else ()
    if len(rest) > 2 or (len(rest) == 2 and not isinstance(rest[1], Mapping)):
        raise OptionError("tune: like has to be a model, (model, args) or (model, args, kwargs)")
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    return model, args, dict(rest[1]) if len(rest) == 2 else {}


# -- errors ------------------------------------------------------------------------------------------------------------


class _Measured:
    """The errors of choices, each measured once. `groups`: what there is to choose for."""

    def __init__(
        self, model: Any, args: Any, kwargs: Any, loss: Loss | None, extends: str, budget: float, progress: Progress
    ):
        self.given, self.extends = (args, kwargs, loss), extends
        self.progress, self.done, self.total = progress, 0, 4
        self.session = Session(model, {"policy": policy_of({}, extends)}, who="tune")
        self.say("in high precision")
        step = self.session.taking(*self.given)
        self.reference = step(HIGH_PRECISION, Watched({}))
        self.session.check_finite(self.reference)
        self.floor: dict[str, float] = {}  # what bf16 has, by parameter
        self.say("once more")
        again = self._error(step(HIGH_PRECISION, Watched({})))
        if LOSS * again > UNSTEADY * budget:
            raise Fp8CompileError(
                f"tune: {self.session.name} is not deterministic: the gradients of two equal steps in high precision differ by "
                f"{again:.2g} of their power, as if {100 * LOSS * again:.2g}% of the loss; seed what is random, or use "
                "torch.use_deterministic_algorithms(True)"
            )
        self.say("with the noise of bf16")
        noisy = step(HIGH_PRECISION, Watched({}, noise=True))
        self.floor = {name: self._share(name, noisy) for name in self.reference.gradients}
        self.say("in FP8")
        step(FP8, Watched({}, only=()))
        assert self.session.report is not None
        self.groups = groups_of(self.session.report.matmuls, parse({"policy": extends}).policy)
        if not self.groups:
            raise Fp8CompileError(
                f"tune: no matmul of {self.session.name} can become FP8 ({self.session.report.summary()}); fp8compile.explain "
                "says why"
            )
        self.whole = not any(record.groups or record.merged for record in self.session.report.matmuls)
        self._everything = frozenset(name for group in self.groups for name in group.modules)
        self.known: dict[Choice, float] = {(None,) * len(self.groups): 0.0}

    def say(self, what: str) -> None:
        self.progress(self.done, max(self.total, self.done + 1), what)
        self.done += 1

    def error(self, choice: Choice, what: str) -> float:
        """The error of a whole policy."""
        if choice not in self.known:
            self.say(what)
            self.known[choice] = self._error(self._step(choice)(FP8, Watched({}, only=self._everything)))
        return self.known[choice]

    def alone(self, candidate: Candidate) -> list[float]:
        """The errors of a candidate in each group, with the others in high precision: one graph has all of them in FP8, and
        runs once for each group. Where that graph cannot replace a result (experts, merged matmuls), each group has a graph."""
        if self.whole:
            step = self._step((candidate,) * len(self.groups))
            found = []
            for group in self.groups:
                self.say(f"{candidate.label}: {group.name}")
                watched = Watched({}, only=frozenset(group.modules))
                found.append(self._error(step(FP8, watched)))
                self.whole = self.whole and not watched.unknown
            if self.whole:
                return found
        alone = [tuple(candidate if i == j else None for j in range(len(self.groups))) for i in range(len(self.groups))]
        return [self.error(choice, f"{candidate.label}: {g.name}") for choice, g in zip(alone, self.groups, strict=True)]

    def _step(self, choice: Choice) -> Callable[[str, Watched], Step]:
        self.session.given = {"policy": policy_of(dict(zip(self.groups, choice, strict=True)), self.extends)}
        return self.session.taking(*self.given)

    def _error(self, test: Step) -> float:
        total = weights = 0.0
        for name, gradient in self.reference.gradients.items():
            count = int(torch.count_nonzero(gradient))  # rows of an embedding that the batch does not have are not trained
            total += count * min(1.0, max(0.0, self._share(name, test) - self.floor.get(name, 0.0)))
            weights += count
        return total / weights if weights else 0.0

    def _share(self, name: str, test: Step) -> float:
        """|error|^2 / |gradient|^2 of a parameter; 1 where the gradient is not finite."""
        made: Tensor | None = test.gradients.get(name)
        if made is None:
            return 1.0
        signal, error, *_ = sums(self.reference.gradients[name], made).tolist()
        if not math.isfinite(error):
            return 1.0
        return error / signal if signal > 0 else 0.0


# -- the search --------------------------------------------------------------------------------------------------------


class _Search:
    def __init__(self, measured: _Measured, times: Times, found: Sequence[Candidate], budget: float):
        self.measured, self.times, self.candidates, self.budget = measured, times, found, budget
        self.groups: tuple[Group, ...] = measured.groups
        self.recipes = tuple(dict.fromkeys(candidate.recipe for candidate in found))
        self.estimated: dict[tuple[str | None, ...], float] = {}
        self.weighed: dict[Choice, Whole] = {}
        measured.total += (len(self.groups) + 1) * len(found) + len(self.recipes) + 3

    def result(self) -> Tuned:
        columns = {c: self.measured.alone(c) for c in self.candidates}
        errors = [{c: column[i] for c, column in columns.items()} for i in range(len(self.groups))]
        self._time_recipes()
        options = [
            {None: (0.0, 0.0), **{c: (-self.saved[i][c.recipe], errors[i][c]) for c in self.candidates}}
            for i in range(len(self.groups))
        ]
        points = frontier(options)
        uniform: dict[Choice, str] = {(c,) * len(self.groups): f"{c.label} everywhere" for c in self.candidates}
        together = self._together(uniform, errors)
        for choice, name in uniform.items():
            self._weigh(choice, name)
        self._search(points, together, "mixed")
        for recipe in self.recipes:  # a kernel between two layers counts for one of them, so times of one recipe add up best
            self._search(frontier([{c: x for c, x in row.items() if c is None or c.recipe == recipe} for row in options]),
                         together, f"{recipe}, in part")  # fmt: skip
        self.measured.progress(self.measured.done, self.measured.done, "done")
        fitting = [(whole.seconds, whole.gap, whole) for whole in self.weighed.values() if whole.seconds is not None]
        best = min(fitting, key=lambda found: found[:2], default=None)
        saves = max(max(row.values()) for row in self.saved) > 0
        if best is None and saves:
            every = [(e, g.name, c.label) for g, row in zip(self.groups, errors, strict=True) for c, e in row.items()]
            error, name, label = min(every)
            raise Unmet(
                f"tune: no FP8 policy fits a loss budget of {100 * self.budget:.3g}%: the least is {name} in {label}, at a "
                f"predicted {100 * LOSS * together * error:.2g}%; raise the budget, or train in bf16"
            )
        if best is None or best[0] >= self.bf16:
            raise Unmet(
                f"tune: FP8 does not make {self.measured.session.name} faster on {self.times.device.name} at these sizes, so "
                "train in bf16; give a larger batch, or the sizes of the real training with like= (--like)"
            )
        return Tuned(
            model=self.measured.session.name,
            device=self.times.device.name,
            budget=self.budget,
            loss=LOSS,
            extends=self.measured.extends,
            groups=self.groups,
            candidates=tuple(self.candidates),
            errors=tuple(errors),
            saved=tuple(self.saved),
            together=together,
            bf16=self.bf16,
            points=tuple(Point(self.bf16 + p.seconds, together * p.error, p.choice) for p in points),
            wholes=tuple(sorted(self.weighed.values(), key=lambda w: (not w.fits, w.seconds or 0.0, w.gap))),
            chosen=best[2],
        )

    def _time_recipes(self) -> None:
        """Seconds that each group saves in each recipe, from steps with everything in it. What other layers save (a norm that
        is fused with casts) is shared out among groups by their time in bf16."""
        owner = {group.name if "module" in group.where else "": i for i, group in enumerate(self.groups)}
        self.measured.say("estimating bf16")
        plain = self.times.bf16()
        self.bf16 = seconds(plain)

        def by_group(costs: Mapping[str, Any]) -> dict[Any, float]:
            return of_modules(costs, {fqn: owner.get("".join(pattern(fqn))) for fqn in costs})

        before = by_group(plain)
        if not any(key is not None for key in before):
            names = ", ".join(group.name for group in self.groups)
            raise OptionError(f"tune: like has no module with a name of the model's layers: {names}")
        body = sum(t for key, t in before.items() if key is not None) or math.inf
        self.saved: list[dict[str, float]] = [{} for _ in self.groups]
        for recipe in self.recipes:
            choice = tuple(Candidate(recipe) for _ in self.groups)
            after = by_group(self._costs(choice, f"estimating {recipe}"))
            elsewhere = before[None] - after[None]
            for i in range(len(self.groups)):
                mine = before.get(i, 0.0)
                self.saved[i][recipe] = mine - after.get(i, 0.0) + elsewhere * mine / body

    def _costs(self, choice: Choice, what: str) -> Mapping[str, Any]:
        self.measured.say(what)
        costs = self.times.fp8(policy_of(dict(zip(self.groups, choice, strict=True)), self.measured.extends))
        self.estimated[_recipes(choice)] = seconds(costs)
        return costs

    def _seconds(self, choice: Choice, what: str) -> float:
        if _recipes(choice) not in self.estimated:
            self._costs(choice, f"estimating {what}")
        return self.estimated[_recipes(choice)]

    def _together(self, uniform: Mapping[Choice, str], errors: Sequence[Mapping[Candidate, float]]) -> float:
        """The error of all groups together over the sum of their own: the most of the uniform recipes."""
        ratios = []
        for choice, name in uniform.items():
            total = sum(row[c] for row, c in zip(errors, choice, strict=True) if c is not None)
            if total > 0:
                ratios.append(self.measured.error(choice, name) / total)
        return max(ratios, default=1.0)

    def _search(self, points: Sequence[Point], together: float, name: str) -> None:
        """Weigh the fastest policies of a frontier, until one is within the budget. None that cannot be the result: its sum has
        to come near the fastest so far (NEAR)."""
        tried: set[Choice] = {(None,) * len(self.groups)}
        for _ in range(TRIES):
            left = [p for p in points if LOSS * together * p.error <= self.budget and p.choice not in tried]
            if not left:
                return
            point = min(left, key=lambda p: p.seconds)
            known = [whole.seconds for whole in self.weighed.values() if whole.seconds is not None]
            if self.bf16 + point.seconds > NEAR * min(known, default=self.bf16):
                return
            tried.add(point.choice)
            if self._weigh(point.choice, name).fits:
                return
            together = max(together, self.measured.error(point.choice, name) / point.error)

    def _weigh(self, choice: Choice, name: str) -> Whole:
        """Measure a whole policy, and estimate it if it is within the budget."""
        if choice not in self.weighed:
            gap = LOSS * self.measured.error(choice, name)
            fits = gap <= self.budget
            self.weighed[choice] = Whole(name, choice, gap, self._seconds(choice, name) if fits else None)
        return self.weighed[choice]


def _recipes(choice: Choice) -> tuple[str | None, ...]:
    """What the time of a choice depends on: both formats of a recipe take the same."""
    return tuple(None if candidate is None else candidate.recipe for candidate in choice)
