"""The fastest policy whose gradients are exact enough. `tune` measures the error of FP8, and estimates the time that it saves.

    tuned = fp8compile.tune(model, tokens, targets, device="h100", max_error=0.05)
    tuned.write("policy.toml")                                  # a commented policy, for options={"policy": "policy.toml"}

Layers whose names differ in numbers only are a group (`candidates`). For each group and each candidate, one training step runs
eagerly with that group alone in FP8, as `fp8compile.compare` runs it. The error of a step is that of its gradients:

    error^2 = mean over all elements of trained parameters of min(1, |g_fp8 - g|^2 / |g|^2 - what bf16 has)

where |.| is over one parameter, because Adam scales each parameter's update by its own gradient. Squares of groups are assumed
to add up. Times come from `fp8compile.estimate`, of steps with all layers in one recipe. From the fastest choice, groups change
one by one to a candidate with a smaller error, until the sum is small enough. The result is measured and estimated again as a
whole policy; so is every uniform recipe. The fastest of those whose measured error is at most `max_error` is returned.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..config.options import parse
from ..config.policy import VARIABLE
from ..devices import catalog
from ..errors import Fp8CompileError, OptionError, TuneError
from ..ir.records import FP8, HIGH_PRECISION
from ..reporting.layer_rows import pattern
from .candidates import Candidate, Choice, LayerGroup, candidates, groups_of, policy_of
from .compare import ComparedStep, Loss, Session
from .observe import Watched, sums
from .times import Times, of_modules, seconds
from .tuned import Tuned, Whole

UNSTEADY = 0.3  # of max_error: two equal runs may differ by so much
Progress = Callable[[str], None]
Row = dict[Candidate | None, tuple[float, float]]


def tune(
    model: Callable[..., Any],
    *args: Any,
    loss: Loss | None = None,
    options: Mapping[str, Any] | None = None,
    device: str | None = None,
    max_error: float = 0.05,
    like: tuple[Any, ...] | None = None,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Tuned:
    """Choose recipe and format for each group of layers of `model(*args, **kwargs)`. See `Tuned`.

    `model`, its arguments and `loss` are those of `fp8compile.compare`: a real batch, in the context of your step. `device`
    names the described device that times are estimated for; None takes that of the policy, else "h200". `max_error` is the
    largest relative error of gradients that FP8 may add to that of bf16, such as 0.05. `options` may have a "policy", by name
    or path: the result extends it, and what its own rules keep in high precision stays so.

    `like` is what times are estimated for, if that is not `model` and its batch: (model, args) or (model, args, kwargs), of a
    model whose modules have the same names. It may be on the meta device. Small sizes gain nothing from FP8.

    `progress(what)` is called before each of the steps and compilations.

    The model, its gradients, buffers and random numbers, and reports are left as they were. The result depends on nothing but
    the arguments. It takes a trace and a step for each group and candidate, and a compilation for each recipe.

    Raises TuneError if no policy is exact enough or none is faster than bf16; Fp8CompileError if the model refuses the batch,
    if its loss is not finite, if it is not deterministic, or if no GPU can be described here (a process with a CUDA device);
    OptionError (a ValueError) for bad options, as `compare` does.
    """
    if "loss_budget" in kwargs:
        raise OptionError("tune: 'loss_budget' is gone, since no study supports one; give max_error, such as 0.05")
    if isinstance(max_error, bool) or not isinstance(max_error, (int, float)) or not 0 < max_error < 1:
        raise OptionError.of("max_error", max_error, "a relative error of gradients above 0 and under 1, such as 0.05")
    timed = (model, args, kwargs) if like is None else like
    if not isinstance(timed, tuple) or not 2 <= len(timed) <= 3 or not isinstance(timed[1], (tuple, list)):
        raise OptionError("tune: like has to be (model, args) or (model, args, kwargs), with args a tuple")
    extends = _extends(options or {})
    found = catalog.find(device or parse({"policy": extends}).policy.device or "h200")
    if not found.has_fp8:
        raise OptionError.of("device", found.key, "a device with FP8 tensor cores", ("h100", "h200"))
    network, its, *named = timed
    times = Times(network, tuple(its), dict(*named), found, here=like is None)  # before the work: it may not be possible here
    errors = _Errors(model, (args, kwargs, loss), extends, max_error, progress or (lambda what: None))
    return _Search(errors, times, candidates(found.gpu), max_error).result()


def _extends(options: Mapping[str, Any]) -> str:
    """The name or path of the policy that the result extends."""
    policy = options.get("policy") or os.environ.get(VARIABLE) or "default"
    if not isinstance(policy, (str, os.PathLike)) or not {*options} <= {"policy", "strict"}:
        raise OptionError.of("options", dict(options), "a name or path of a policy, {'policy': ...}, which the result extends")
    return os.fspath(policy)


class _Errors:
    """The errors of choices, squared, each measured once. `groups`: what there is to choose for."""

    def __init__(self, model: Any, given: tuple[Any, ...], extends: str, max_error: float, say: Progress):
        self.given, self.extends, self.say = given, extends, say
        self.session = Session(model, {"policy": policy_of((), (), extends)}, who="tune")
        self.name = self.session.name
        step = self.session.taking(*given)
        say("in high precision")
        self.reference = step(HIGH_PRECISION, None)
        self.session.check_finite(self.reference)
        self.floor: dict[str, float] = {}  # what bf16 has, by parameter
        say("once more")
        again = math.sqrt(self._squared(step(HIGH_PRECISION, None)))
        if again > UNSTEADY * max_error:
            raise Fp8CompileError(
                f"tune: {self.name} is not deterministic: the gradients of two equal steps in high precision differ by "
                f"{again:.2g}; seed what is random, or use torch.use_deterministic_algorithms(True)"
            )
        say("with the noise of bf16")
        noisy = step(HIGH_PRECISION, Watched({}, noise=True))
        self.floor = {name: self._share(name, noisy) for name in self.reference.gradients}
        say("in FP8")
        step(FP8, None)
        assert self.session.report is not None
        self.groups = groups_of(self.session.report.matmuls, parse({"policy": extends}).policy)
        if not self.groups:
            why = f"({self.session.report.summary()}); fp8compile.explain says why"
            raise Fp8CompileError(f"tune: no matmul of {self.name} can become FP8 {why}")
        self.known: dict[Choice, float] = {(None,) * len(self.groups): 0.0}

    def of(self, choice: Choice, what: str) -> float:
        if choice not in self.known:
            self.say(what)
            self.session.given = {"policy": policy_of(self.groups, choice, self.extends)}
            self.known[choice] = self._squared(self.session.taking(*self.given)(FP8, None))
        return self.known[choice]

    def alone(self, i: int, candidate: Candidate) -> float:
        """The error of a candidate in one group, with the others in high precision."""
        choice = tuple(candidate if i == j else None for j in range(len(self.groups)))
        return self.of(choice, f"{candidate.label}: {self.groups[i].name}")

    def _squared(self, test: ComparedStep) -> float:
        total = weights = 0.0
        for name, gradient in self.reference.gradients.items():
            count = int(torch.count_nonzero(gradient))  # rows of an embedding that the batch does not have are not trained
            total += count * min(1.0, max(0.0, self._share(name, test) - self.floor.get(name, 0.0)))
            weights += count
        return total / weights if weights else 0.0

    def _share(self, name: str, test: ComparedStep) -> float:
        """|error|^2 / |gradient|^2 of a parameter; 1 where the gradient is not finite."""
        if name not in test.gradients:
            return 1.0
        signal, error, *_ = sums(self.reference.gradients[name], test.gradients[name]).tolist()
        return 1.0 if not math.isfinite(error) else error / signal if signal > 0 else 0.0


class _Search:
    def __init__(self, errors: _Errors, times: Times, found: Sequence[Candidate], max_error: float):
        self.errors, self.times, self.candidates, self.max_error = errors, times, found, max_error
        self.groups: tuple[LayerGroup, ...] = errors.groups
        self.estimated: dict[tuple[str | None, ...], float] = {}  # seconds of a step
        self.wholes: dict[Choice, Whole] = {}

    def result(self) -> Tuned:
        alone = [{c: self.errors.alone(i, c) for c in self.candidates} for i in range(len(self.groups))]
        recipes = tuple(dict.fromkeys(candidate.recipe for candidate in self.candidates))
        saved = self._time(recipes)
        for candidate in self.candidates:
            self._weigh((candidate,) * len(self.groups), f"{candidate.label} everywhere")
        for only in (None, *recipes):  # a kernel between two layers counts for one of them: times of one recipe add up best
            rows: list[Row] = [
                {None: (0.0, 0.0), **{c: (row[c.recipe], errors[c]) for c in self.candidates if only in (None, c.recipe)}}
                for row, errors in zip(saved, alone, strict=True)
            ]
            self._descend(rows, "mixed" if only is None else f"{only}, in part")
        exact = [whole for whole in self.wholes.values() if whole.seconds is not None]
        best = min(exact, key=lambda whole: (whole.seconds, whole.error), default=None)
        if best is None and max(max(row.values()) for row in saved) > 0:
            least = math.sqrt(min(min(row.values()) for row in alone))
            raise TuneError(
                f"tune: no FP8 policy of {self.errors.name} has an error of gradients of at most {self.max_error:g}; the least "
                f"of one group alone is {least:.2g}. Raise max_error, or train in bf16"
            )
        if best is None or best.seconds is None or best.seconds >= self.bf16:
            raise TuneError(
                f"tune: FP8 does not make {self.errors.name} faster on {self.times.device.name} at these sizes, so train in "
                "bf16; give a larger batch, or the sizes of the real training with like= (--like)"
            )
        return Tuned(
            model=self.errors.name,
            device=self.times.device.name,
            max_error=self.max_error,
            extends=self.errors.extends,
            groups=self.groups,
            candidates=tuple(self.candidates),
            errors=tuple({c: math.sqrt(error) for c, error in row.items()} for row in alone),
            saved=tuple(saved),
            bf16=self.bf16,
            wholes=tuple(sorted(self.wholes.values(), key=lambda w: (w.seconds is None, w.seconds or 0.0, w.error))),
            chosen=best,
        )

    def _time(self, recipes: Sequence[str]) -> list[dict[str, float]]:
        """Seconds that each group saves in each recipe, from steps with everything in it. What other layers save (a norm that
        is fused with casts) is divided between groups by their time in bf16."""
        owner = {group.name: i for i, group in enumerate(self.groups) if "module" in group.where}

        def by_group(costs: Mapping[str, Any]) -> dict[Any, float]:
            return of_modules(costs, {fqn: owner.get("".join(pattern(fqn))) for fqn in costs})

        self.errors.say("estimating bf16")
        plain = self.times.bf16()
        self.bf16, before = seconds(plain), by_group(plain)
        body = sum(t for i, t in before.items() if i is not None)
        if not body:
            names = ", ".join(group.name for group in self.groups)
            raise OptionError(f"tune: like has no module with a name of the model's layers: {names}")
        saved: list[dict[str, float]] = [{} for _ in self.groups]
        for recipe in recipes:
            after = by_group(self._costs((Candidate(recipe),) * len(self.groups), recipe))
            for i, row in enumerate(saved):
                mine = before.get(i, 0.0)
                row[recipe] = mine - after.get(i, 0.0) + (before[None] - after[None]) * mine / body
        return saved

    def _costs(self, choice: Choice, what: str) -> Mapping[str, Any]:
        self.errors.say(f"estimating {what}")
        costs = self.times.fp8(policy_of(self.groups, choice, self.errors.extends))
        self.estimated[_recipes(choice)] = seconds(costs)
        return costs

    def _descend(self, rows: Sequence[Row], name: str) -> None:
        """From the fastest choice, change one group after the other, each time where the most error goes for the least time,
        until the whole policy is exact enough. `rows`: (seconds saved, error) of each group's candidates."""
        choice = [max(row, key=lambda c: (row[c][0], -row[c][1])) for row in rows]
        limit = self.max_error**2
        while any(choice):
            total = sum(row[c][1] for row, c in zip(rows, choice, strict=True))
            if total <= limit and self._weigh(tuple(choice), name).seconds is not None:
                return
            changes = []
            for i, (row, now) in enumerate(zip(rows, choice, strict=True)):
                for other, (time, error) in row.items():
                    if (less := row[now][1] - error) > 0:
                        changes.append((less / max(row[now][0] - time, 1e-12), i, other))
            if not changes:
                return
            _, i, choice[i] = max(changes, key=lambda change: change[0])

    def _weigh(self, choice: Choice, name: str) -> Whole:
        """Measure a whole policy, and estimate its time if it is exact enough."""
        if choice not in self.wholes:
            error, time = math.sqrt(self.errors.of(choice, name)), None
            if error <= self.max_error:
                if _recipes(choice) not in self.estimated:
                    self._costs(choice, name)
                time = self.estimated[_recipes(choice)]
            self.wholes[choice] = Whole(name, choice, error, time)
        return self.wholes[choice]


def _recipes(choice: Choice) -> tuple[str | None, ...]:
    """What the time of a choice depends on: both formats of a recipe take the same."""
    return tuple(None if candidate is None else candidate.recipe for candidate in choice)
