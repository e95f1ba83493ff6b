"""Rules with windows: each switch is free, and what runs after it is what was compiled so from the start."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8compile
from tests.support import hooks
from tests.support.harness import histories, load_scaling, noise, scaling_tensors
from tests.support.models import Mlp, make

pytestmark = [pytest.mark.usefixtures("interpreted")]

Rules = list[dict[str, Any]]
ON = {"fp8": "on"}
# kinds of windows, for 12 steps: what changes, and at which steps
TIMELINES: dict[str, Rules] = {
    "from": [{"name": "late", "module": "2", "during": "4..", "fp8": "off"}],
    "until": [{"name": "early", "module": "2", "during": "..4", "fp8": "off"}],
    "between": [{"name": "middle", "gemm": "fprop", "during": "4..8", "fp8": "off"}],
    "percent": [{"name": "late", "gemm": "wgrad", "during": "50%..", "fp8": "off"}],
    "several": [
        {"name": "first", "module": "2", "during": ["..4", "8.."], "fp8": "off"},
        {"name": "dgrad", "module": "0", "during": "4..8", "recipe": "rowwise"},
        {"name": "last", "module": "4", "gemm": "fprop", "during": "6..", "fp8": "off"},
    ],
}

APART: Rules = [  # no step has both
    {"name": "late", "module": "0", "during": "100..", "fp8": "off"},
    {"name": "early", "module": "2", "during": "..1", "fp8": "off"},
]


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch._dynamo.reset()
    with hooks.phases_afresh():
        yield


def layers() -> nn.Module:
    first, second, third = (nn.Linear(128, 128) for _ in range(3))
    return nn.Sequential(first, nn.GELU(), second, nn.GELU(), third)


def compiled(
    model: nn.Module, rules: Rules, recipe: str = "delayed", schedule: Any = None, **defaults: Any
) -> Any:
    policy = {"extends": "none", "rules": [*rules, ON], "defaults": {"recipe": recipe, **defaults}}
    if schedule:
        policy["schedule"] = schedule
    return torch.compile(model, backend="fp8", dynamic=False, options={"policy": policy})


def started(rules: Rules, lr: float = 0.1, **how: Any) -> tuple[Any, Any, torch.optim.Optimizer]:
    """A model, what is called instead of it, and an optimizer."""
    model = make(layers)
    return model, compiled(model, rules, **how), torch.optim.SGD(model.parameters(), lr)


def step(run: Any, optimizer: torch.optim.Optimizer, i: int, micro: int = 1) -> list[torch.Tensor]:
    losses = []
    for j in range(micro):
        x = noise(32, 128, seed=10 * i + j)
        loss = F.mse_loss(run(x), x.roll(1, 1))
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any, Any]:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), scaling_tensors(model)))


def resumed(
    state: tuple[Any, Any, Any], rules: Rules, recipe: str = "delayed"
) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """Another model, compiled by these rules, that goes on from this state."""
    weights, of_optimizer, scaling = state
    twin = make(layers, seed=1)
    twin.load_state_dict(weights)
    run, optimizer = compiled(twin, rules, recipe), torch.optim.AdamW(twin.parameters(), 1e-3)
    optimizer.load_state_dict(of_optimizer)
    if recipe == "delayed":
        load_scaling(twin, scaling)
    return twin, run, optimizer


@pytest.mark.cases(test=3, slow=22)
@pytest.mark.parametrize("kind", TIMELINES)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_a_switch_is_a_run_that_was_compiled_so(kind: str, recipe: str) -> None:
    """To the bit: losses, weights and scaling state, given the state before the switch. Only the first call
    is cold, and slots of no set are missing in another one."""
    rules, total = TIMELINES[kind], {"total_steps": 12} if kind == "percent" else {}
    model = make(layers)
    run, optimizer = compiled(model, rules, recipe, total), torch.optim.AdamW(model.parameters(), 1e-3)
    starts, losses, cold = {}, [], []
    policy = fp8compile.Policy.load({"extends": "none", "rules": [*rules, ON], "schedule": total})
    with hooks.cold_calls() as calls:
        for i in range(12):
            starts[i] = state_of(model, optimizer)
            losses += step(run, optimizer, i)
            cold.append(any(calls))
            del calls[:]
    assert cold == [recipe == "delayed"] + [False] * 11
    timeline = policy.timeline
    assert len(timeline) > 1
    for (first, active), (end, _) in zip(timeline[1:], [*timeline[2:], (12, ())], strict=True):
        names = {policy.timed[i].name for i in active}
        alone = [rule for rule in copy.deepcopy(rules) if rule["name"] in names and rule.pop("during")]
        twin, again, other = resumed(starts[first], alone, recipe)
        loaded = histories(twin)
        for i in range(first, end):
            assert torch.equal(torch.stack(step(again, other, i)), losses[i].reshape(1)), (first, i)
    assert all(map(torch.equal, twin.state_dict().values(), model.state_dict().values()))
    if recipe == "delayed":  # slots that this set does not cast stay as they were loaded there
        mine, theirs = histories(model), histories(twin)
        moved = {key for key in theirs if theirs[key] != loaded[key]}
        assert moved and all(mine[key] == theirs[key] for key in moved)


def test_histories_move_where_nothing_is_cast() -> None:
    """A weight that is in high precision in the active set grows by 30: no call is cold then, nor later."""
    model, run, optimizer = started([{"name": "off", "module": "2", "during": "2..4", "fp8": "off"}], 0.0)
    with hooks.cold_calls() as calls:
        for i in range(6):
            if i == 3:
                with torch.no_grad():
                    model[2].weight.mul_(30)
            step(run, optimizer, i)
    assert calls[1:] == [False] * (len(calls) - 1)
    history, _ = histories(model)["2.weight", "weight", 0]
    amax = model[2].weight.abs().max().item()
    assert history[:6] == pytest.approx([amax, amax, amax, amax / 30, amax / 30, amax / 30])


def test_zeros_that_are_not_cast_make_no_call_cold() -> None:
    model, run, optimizer = started([{"name": "off", "module": "0", "during": "..9", "fp8": "off"}], 0.0)
    with hooks.cold_calls() as calls:
        for i in range(4):
            F.mse_loss(run(torch.zeros(32, 128)), noise(32, 128, seed=i)).backward()
            optimizer.step()
    assert calls == [True, False, False, False]
    assert hooks.cold(model)["0.weight", "input", 0]


@pytest.mark.slow
def test_what_is_not_cast_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """An overflow of a tensor that the active set does not cast."""
    caplog.set_level("INFO", "fp8compile")
    for module, told in (("2", False), ("4", True)):
        rule = {"name": "off", "module": module, "during": "1..", "fp8": "off"}
        model, run, optimizer = started([rule], 0.0)
        caplog.clear()
        with hooks.noticed_at_once():
            for i in range(4):
                if i == 2:
                    with torch.no_grad():
                        model[2].weight.mul_(2.0**12)
                step(run, optimizer, i)
        said = [x.message for x in caplog.records if "2.weight (weight)" in x.message]
        assert bool(said) is told, (module, said)


def test_compilations_are_as_many_as_sets() -> None:
    """And a graph for which sets decide alike is compiled once."""
    for name, count in (("0", 3), ("none.0", 1)):
        rules = [
            {"name": "a", "module": name, "during": "2..", "fp8": "off"},
            {"name": "b", "module": name, "gemm": "fprop", "during": "1..", "recipe": "rowwise"},
        ]
        model, run, optimizer = started(rules)
        with hooks.halves() as halves:
            for i in range(4):
                step(run, optimizer, i)
        assert [backward for _, backward in halves] == [False, True] * count
        assert len(fp8compile.report(model).graphs) == 1


def test_micro_batches_checkpoints_and_evaluations() -> None:
    """A set holds for all calls of a step, and recomputations run in that of their forward."""
    block = make(Mlp)
    run = compiled(block, [{"name": "late", "gemm": "fprop", "during": "2..", "fp8": "off"}])
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    with hooks.phases_of_calls() as seen:
        for i in range(4):
            for j in range(2):
                x = noise(32, 128, seed=2 * i + j).requires_grad_()
                checkpoint(run, x, use_reentrant=False).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            block.eval()
            with torch.no_grad():
                run(noise(32, 128))
            block.train()
    assert seen == [""] * 8 + ["late"] * 8
    assert {sum(a > 0 for a in history) for history, _ in histories(block).values()} == {8}


def test_a_resumed_run_is_in_the_right_set() -> None:
    rules = [{"name": "late", "module": "2", "during": "3..", "fp8": "off"}]
    model = make(layers)
    run, optimizer = compiled(model, rules), torch.optim.AdamW(model.parameters(), 1e-3)
    losses: list[torch.Tensor] = []
    for i in range(8):
        if i == 5:
            state = state_of(model, optimizer)
        losses += step(run, optimizer, i)
    torch._dynamo.reset()
    with hooks.phases_afresh():
        twin, again, other = resumed(state, rules)
        fp8compile.set_step(5, twin)
        with hooks.phases_of_calls() as seen, hooks.cold_calls() as calls:
            found = [loss for i in range(5, 8) for loss in step(again, other, i)]
    assert seen == ["late"] * 3 and not any(calls)
    assert torch.equal(torch.stack(found), torch.stack(losses[5:]))


def test_set_rule() -> None:
    """A rule for "by hand" is compiled from the start, with all sets of the timeline."""
    rules = [
        {"name": "mine", "module": "0", "during": "by hand", "fp8": "off"},
        {"name": "early", "module": "2", "during": "..1", "recipe": "rowwise"},
    ]
    model, run, optimizer = started(rules)
    with hooks.phases_of_calls() as seen, hooks.halves() as halves, hooks.cold_calls() as calls:
        for i, (name, on) in enumerate(
            [(None, None), (None, None), ("mine", True), ("early", True), ("mine", None), ("early", None)]
        ):
            if name:
                fp8compile.set_rule(name, on, model if i % 2 else None)
            step(run, optimizer, i)
            assert len(halves) == 8
    assert seen == ["early", "", "mine", "mine+early", "early", ""]
    assert not any(calls[1:])


@pytest.mark.slow
def test_a_set_that_no_step_has_is_compiled_late() -> None:
    _, run, optimizer = started(APART)
    with hooks.phases_of_calls() as seen, hooks.halves() as halves, hooks.cold_calls() as calls:
        step(run, optimizer, 0)
        assert len(halves) == 6  # early, none, late
        fp8compile.set_rule("late", True)
        fp8compile.set_rule("early", True)
        step(run, optimizer, 1)
        assert len(halves) == 8
        step(run, optimizer, 2)
        fp8compile.set_rule("early", False)
        step(run, optimizer, 3)
    assert len(halves) == 8
    assert seen == ["early", "late+early", "late+early", "late"]
    assert not any(calls[1:])


def test_a_late_compilation_that_fails_keeps_the_rules(caplog: pytest.LogCaptureFixture) -> None:
    _, run, optimizer = started(APART)
    step(run, optimizer, 0)
    fp8compile.set_rule("late", True)
    fp8compile.set_rule("early", True)
    with hooks.phases_of_calls() as seen, hooks.failing_compilations():
        step(run, optimizer, 1)
        step(run, optimizer, 2)
    assert seen == ["early", "early"]
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1 and "keeps the rules that it has" in told[0]


@pytest.mark.slow
def test_on_step_may_switch_rules() -> None:
    model, run, optimizer = started([{"name": "mine", "module": "0", "during": "by hand", "fp8": "off"}])
    fp8compile.on_step(lambda step, loss: fp8compile.set_rule("mine", step >= 2, model), model)
    with hooks.phases_of_calls() as seen:
        for i in range(4):
            step(run, optimizer, i)
    assert seen == ["", "", "mine", "mine"]


def test_wrong_switches() -> None:
    model = make(layers)
    policy = {"extends": "none", "rules": [*APART, ON]}
    run = torch.compile(model, backend="fp8", dynamic=True, options={"policy": policy})
    run(noise(32, 128)).sum().backward()
    with pytest.raises(fp8compile.OptionError, match="'late'"):
        fp8compile.set_rule("latest", True)
    with pytest.raises(fp8compile.OptionError, match="True, False or None"):
        fp8compile.set_rule("late", "on")  # type: ignore[arg-type]
    with pytest.raises(fp8compile.OptionError, match="dynamic sizes"):
        fp8compile.set_rule("late", True)  # with "early", which is active now
    with hooks.phases_of_calls() as seen:
        run(noise(48, 128)).sum().backward()
    assert seen == ["early"]


def test_statistics_show_the_active_set() -> None:
    rule = {"name": "mine", "module": "0", "during": "1..2", "recipe": "tensorwise"}
    model, run, optimizer = started([rule])
    found = []
    for i in range(3):
        step(run, optimizer, i)
        rows = fp8compile.stats(model).rows()
        found.append({row["recipe"] for row in rows if row["name"] == "0.weight"})
    assert found == [{"delayed"}, {"tensorwise"}, {"delayed"}]


def test_frozen_weights_that_a_set_keeps_in_high_precision() -> None:
    """Allowed where all sets have them in FP8."""
    for module, error in (("0", True), ("2", False)):
        model = make(layers)
        model[0].weight.requires_grad_(False)
        rules = [{"name": "late", "module": module, "during": "2..", "fp8": "off"}]
        run = compiled(model, rules, frozen="fp8")
        optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], 0.1)
        if error:
            with pytest.raises(Exception, match="frozen.*0.weight"):
                step(run, optimizer, 0)
            continue
        for i in range(4):
            step(run, optimizer, i)
        assert hooks.frozen(model[0].weight)


def test_kept_copies_are_those_of_the_active_set() -> None:
    rules = [{"name": "late", "module": "0", "during": "2..", "fp8": "off"}]
    model, run, optimizer = started(rules, cache_weights=True)
    kept = []
    for i in range(4):
        step(run, optimizer, i, micro=2)
        kept.append(hooks.copies_in_memory())
    assert kept[1] > kept[2] == kept[3] > 0
