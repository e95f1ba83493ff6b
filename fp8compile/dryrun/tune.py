"""The fastest policy whose gradients are exact enough. `tune` measures FP8's error, and estimates its gain.

    tuned = fp8compile.tune(model, tokens, targets, device="h100", max_error=0.05)
    tuned.write("policy.toml")  # a commented policy, for options={"policy": "policy.toml"}

docs/tune.md defines the error, and describes the search. Steps run as those of `fp8compile.compare` do, and
times come from `fp8compile.estimate`, of steps with all layers in one recipe.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..config.options import parse
from ..errors import Fp8CompileError, OptionError, TuneError
from ..ir.records import FP8, HIGH_PRECISION
from ..logs import POLICY_VARIABLE
from ..reporting.layer_rows import pattern
from .autocast import wanted
from .compare import Loss, Session
from .estimate import Compiler, device_for
from .extrapolate import Costs, repeated
from .observe import Watched
from .sandbox import modules_of, taken
from .tuned import HIGH, Choice, LayerGroup, Tuned, Whole, candidates, groups_of, policy_of, recipe_of

UNSTEADY = 0.3  # of max_error: two equal runs may differ by so much


def tune(
    model: Callable[..., Any],
    *args: Any,
    loss: Loss | None = None,
    options: Mapping[str, Any] | None = None,
    device: str | None = None,
    max_error: float = 0.05,
    like: tuple[Any, ...] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Tuned:
    """Choose recipe and format for each group of layers of `model(*args, **kwargs)`. See `Tuned`.

    `model`, its arguments and `loss` are those of `fp8compile.compare`: a real batch, in the context of your
    step. `device` names the described device that times are estimated for; None takes that of the policy,
    else "h200". `max_error` is the largest relative error of gradients that FP8 may add to that of bf16, such
    as 0.05. `options` may have a "policy", by name or path: the result extends it, and what its own rules
    keep in high precision stays so.

    `like` is what times are estimated for, if that is not `model` and its batch: (model, args) or (model,
    args, kwargs), of a model whose modules have the same names. It may be on the meta device. Small sizes
    gain nothing from FP8.

    `progress(what)` is called before each of the steps and compilations.

    The model, its gradients, buffers and random numbers, and reports are left as they were. The result
    depends on nothing but the arguments. It takes a trace and a step for each group and candidate, and a
    compilation for each recipe.

    Raises TuneError if no policy is accurate enough or none is faster than bf16; Fp8CompileError if the model
    refuses the batch, if its loss is not finite, if it is not deterministic, or if no GPU can be described
    here (a process with a CUDA device); OptionError (a ValueError) for bad options, as `compare` does.
    """
    if isinstance(max_error, bool) or not isinstance(max_error, (int, float)) or not 0 < max_error < 1:
        raise OptionError.of(
            "max_error", max_error, "a relative error of gradients above 0 and under 1, such as 0.05"
        )
    timed = (model, args, kwargs) if like is None else like
    if not isinstance(timed, tuple) or not 2 <= len(timed) <= 3 or not isinstance(timed[1], (tuple, list)):
        raise OptionError("tune: like has to be (model, args) or (model, args, kwargs), with args a tuple")
    extends = _extends(options or {})
    found = device_for(device or parse({"policy": extends}).policy.device)
    network, its, *named = taken(timed[0]), tuple(timed[1]), *timed[2:]
    modules = modules_of((network, its, *named))
    # early: it may be impossible
    compiler = Compiler(network, modules, its, dict(*named), found, {}, repeated(modules))
    autocast = wanted(modules, None) or (like is None and torch.is_autocast_enabled("cpu"))
    session = Session(model, {"policy": policy_of((), (), extends)}, who="tune")
    study = _Study(session, compiler, autocast, extends, max_error, progress or (lambda what: None))
    return study.result(args, kwargs, loss)


def _extends(options: Mapping[str, Any]) -> str:
    """The name or path of the policy that the result extends."""
    policy = options.get("policy") or os.environ.get(POLICY_VARIABLE) or "default"
    if not isinstance(policy, (str, os.PathLike)) or not {*options} <= {"policy", "strict"}:
        raise OptionError.of(
            "options", dict(options), "a name or path of a policy, {'policy': ...}, which the result extends"
        )
    return os.fspath(policy)


@dataclasses.dataclass
class _Study:
    """Measures and estimates policies."""

    session: Session
    compiler: Compiler
    autocast: bool
    extends: str
    max_error: float
    say: Callable[[str], None]
    floor: dict[str, float] = dataclasses.field(default_factory=dict)  # squared errors of bf16, by parameter
    times: dict[Choice, float] = dataclasses.field(default_factory=dict)  # seconds, by recipes of groups
    wholes: dict[Choice, Whole] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.found = candidates(self.compiler.device.gpu)

    def result(self, *batch: Any) -> Tuned:
        self._begin(*batch)
        name, device, groups = self.session.name, self.compiler.device.name, self.groups
        alone = [self._alone(group) for group in groups]
        bf16, saved = self._saved(dict.fromkeys(map(recipe_of, self.found)))
        rows = [
            {HIGH: (0.0, 0.0), **{one: (saves[recipe_of(one)], error) for one, error in errors.items()}}
            for saves, errors in zip(saved, alone, strict=True)
        ]
        for candidate in self.found:
            self._measured((candidate,) * len(groups), f"{candidate} everywhere")
        self._descend(rows, "mixed")
        # a kernel between two layers counts for one of them: times of one recipe add up best
        for only in saved[0]:
            part = [{c: row[c] for c in row if recipe_of(c) in (HIGH, only)} for row in rows]
            self._descend(part, f"{only}, in part")
        wholes = sorted(self.wholes.values(), key=lambda whole: (whole.seconds, whole.error))
        gains = any(seconds > 0 for saves in saved for seconds in saves.values())
        if wholes[0].seconds == math.inf and gains:
            least = math.sqrt(min(error for errors in alone for error in errors.values()))
            raise TuneError(
                f"tune: no FP8 policy of {name} has an error of gradients of at most {self.max_error:g}; "
                f"the least of one group alone is {least:.2g}. Raise max_error, or train in bf16"
            )
        if wholes[0].seconds >= bf16:
            raise TuneError(
                f"tune: FP8 does not make {name} faster on {device} at these sizes, so train in bf16; give "
                "a larger batch, or the sizes of the real training with like= (--like)"
            )
        shown = tuple({c: (seconds, math.sqrt(error)) for c, (seconds, error) in row.items()} for row in rows)
        return Tuned(
            name, device, self.max_error, self.extends, groups, shown, bf16, tuple(wholes), wholes[0]
        )

    # -- errors

    def _begin(self, *batch: Any) -> None:
        """Take the step in high precision, as bf16 might, and in FP8, which finds the groups."""
        self.batch, step, name = batch, self.session.taking(*batch), self.session.name
        self.say("in high precision")
        self.reference = step(HIGH_PRECISION, None)
        self.session.check_finite(self.reference)
        self.say("once more")
        again = self.reference.error(step(HIGH_PRECISION, None))
        if again > UNSTEADY * self.max_error:
            raise Fp8CompileError(
                f"tune: {name} is not deterministic: the gradients of two equal steps in high precision "
                f"differ by {again:.2g}; seed what is random, or use torch.use_deterministic_algorithms(True)"
            )
        self.say("with the noise of bf16")
        noisy = step(HIGH_PRECISION, Watched({}, noise=True))
        self.floor = {name: self.reference.squared_error(noisy, name) for name in self.reference.gradients}
        self.say("in FP8")
        step(FP8, None)
        report = self.session.report
        assert report is not None
        self.groups = groups_of(report.matmuls, parse({"policy": self.extends}).policy)
        if not self.groups:
            why = f"({report.summary()}); fp8compile.explain says why"
            raise Fp8CompileError(f"tune: no matmul of {name} can become FP8 {why}")

    def _error(self, choice: Choice, what: str) -> float:
        """The squared error of a step."""
        self.say(what)
        self.session.given = {"policy": policy_of(self.groups, choice, self.extends)}
        return self.reference.error(self.session.taking(*self.batch)(FP8, None), self.floor) ** 2

    def _alone(self, group: LayerGroup) -> dict[str, float]:
        """The squared errors of each candidate, with the other groups in high precision."""
        choices = {one: tuple(one if group is other else HIGH for other in self.groups) for one in self.found}
        return {one: self._error(choice, f"{one}: {group.name}") for one, choice in choices.items()}

    # -- times

    def _saved(self, recipes: Collection[str]) -> tuple[float, list[dict[str, float]]]:
        """Seconds of a step in bf16, and those that each group saves in each recipe, from steps with
        everything in it. What other layers save (a norm that is fused with casts) is divided between groups
        by their time in bf16."""
        owner = {group.name: i for i, group in enumerate(self.groups) if "module" in group.where}

        def by_group(costs: Costs) -> dict[int | None, float]:
            found: dict[int | None, float] = dict.fromkeys([None, *range(len(self.groups))], 0.0)
            for fqn, cost in costs.items():
                found[owner.get("".join(pattern(fqn)))] += cost.seconds
            return found

        self.say("estimating bf16")
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            plain = self.compiler.bf16()
        before = by_group(plain)
        body = sum(t for i, t in before.items() if i is not None)
        if not body:
            names = ", ".join(group.name for group in self.groups)
            raise OptionError(f"tune: like has no module with a name of the model's layers: {names}")
        saved: list[dict[str, float]] = [{} for _ in self.groups]
        for recipe in recipes:
            after = by_group(self._costs((recipe,) * len(self.groups), recipe))
            for i, row in enumerate(saved):
                row[recipe] = before[i] - after[i] + (before[None] - after[None]) * before[i] / body
        return _seconds(plain), saved

    def _costs(self, choice: Choice, what: str) -> Costs:
        self.say(f"estimating {what}")
        options = {"policy": policy_of(self.groups, choice, self.extends), "device": self.compiler.device.key}
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            costs, _ = dataclasses.replace(self.compiler, options=options).fp8()
        self.times[tuple(map(recipe_of, choice))] = _seconds(costs)
        return costs

    # -- whole policies

    def _descend(self, rows: Sequence[Mapping[str, tuple[float, float]]], name: str) -> None:
        """From the fastest choice, change groups one by one, where most error goes for the least time, until
        the policy is exact enough. `rows`: (seconds saved, squared error) of each group's candidates."""
        choice = [max(row, key=lambda c: (row[c][0], -row[c][1])) for row in rows]
        while set(choice) != {HIGH}:
            total = sum(row[c][1] for row, c in zip(rows, choice, strict=True))
            if total <= self.max_error**2 and self._measured(tuple(choice), name).seconds < math.inf:
                return
            changes = [
                ((row[now][1] - error) / max(row[now][0] - time, 1e-12), i, other)
                for i, (row, now) in enumerate(zip(rows, choice, strict=True))
                for other, (time, error) in row.items()
                if error < row[now][1]
            ]
            if not changes:
                return
            _, i, choice[i] = max(changes, key=lambda change: change[0])

    def _measured(self, choice: Choice, name: str) -> Whole:
        """Measure a whole policy, and estimate its time if it is exact enough."""
        if choice not in self.wholes:
            error, time = math.sqrt(self._error(choice, name)), math.inf
            if error <= self.max_error:
                recipes = tuple(map(recipe_of, choice))
                if recipes not in self.times:
                    self._costs(choice, name)
                time = self.times[recipes]
            self.wholes[choice] = Whole(name, choice, error, time)
        return self.wholes[choice]


def _seconds(costs: Costs) -> float:
    return sum(cost.seconds for cost in costs.values())
