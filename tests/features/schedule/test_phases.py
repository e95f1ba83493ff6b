"""Phases: the phase of each step, histories recorded in high precision, switches that change only matmuls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from tests.support import hooks
from tests.support.harness import histories, noise
from tests.support.models import Mlp, SwiGlu, linear, make

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    with hooks.phases_afresh():
        yield


@pytest.fixture
def seen() -> Iterator[list[str]]:
    """The phase of each call of a scheduled graph."""
    with hooks.phases_of_calls() as found:
        yield found


def scheduled(model: nn.Module, **times: Any):
    return torch.compile(model, backend="fp8", dynamic=False, options={"policy": {"schedule": times}})


def step(run, optimizer, seed: int, micro: int = 1, rows: int = 32) -> None:
    for i in range(micro):
        run(noise(rows, 128, seed=seed + i)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_steps_not_calls_are_counted(seen: list[str]) -> None:
    """Nor evaluations. A new shape recompiles in the middle of the run; the new graph knows the step."""
    model = make(Mlp)
    run = scheduled(model, warmup_steps=2, cooldown_at=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(6):
        step(run, optimizer, i, micro=2, rows=32 if i < 2 else 48)
        model.eval()
        with torch.no_grad():
            run(noise(32, 128))
        model.train()
    assert seen == ["schedule"] * 4 + [""] * 4 + ["schedule"] * 4


@pytest.mark.slow
def test_weights_are_continuous() -> None:
    """In high precision, results equal plain compilation's from the same weights bit by bit; in FP8 not."""
    model, twin = make(SwiGlu), make(SwiGlu)
    run = scheduled(model, warmup_steps=3, cooldown_at=5)
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)
    reference = torch.optim.SGD(twin.parameters(), 1.0, momentum=0.9)
    for i in range(8):
        twin.load_state_dict(model.state_dict())
        reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step(run, optimizer, i)
        step(twin, reference, i)
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        exact = all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)
        assert exact is (i not in (3, 4)), i


def test_fp8_begins_with_the_histories_of_the_warm_up() -> None:
    """The first FP8 step quantizes with the warm-up's scale: it saturates at the warm-up's largest amax."""
    model = linear(1.0)
    run = scheduled(model, warmup_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def seen(value: float) -> float:
        y = run(torch.full((16, 128), value, requires_grad=True))
        y.backward(torch.ones_like(y))
        optimizer.step()
        return y[0, 0].item() / 128

    assert [seen(value) for value in (2.0, 1.0)] == [2.0, 1.0]
    found = {role: history[:3] for (_, role, _), (history, _) in histories(model).items()}
    assert found == {"input": [1.0, 2.0, 0.0], "weight": [1.0, 1.0, 0.0], "gradient": [1.0, 1.0, 0.0]}
    assert seen(100.0) == pytest.approx(2.0)
    assert histories(model)["weight", "input", 0][0][:3] == [100.0, 1.0, 2.0]


def test_two_compilations_and_no_more() -> None:
    torch._dynamo.reset()
    model = make(Mlp)
    run = scheduled(model, warmup_steps=1, cooldown_at=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hooks.halves() as compiled:
        for i in range(5):
            step(run, optimizer, i)
    assert [backward for _, backward in compiled] == [False, True] * 2
    assert len(fp8compile.report(model).graphs) == 1  # listed once
    assert fp8compile.report(model).fp8_flop_fraction == 1.0


@pytest.mark.slow
def test_set_precision_and_set_step(seen: list[str]) -> None:
    model, other = make(Mlp), make(SwiGlu)
    run, run_other = scheduled(model, warmup_steps=10), scheduled(other)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1)

    def both() -> list[str]:
        del seen[:]
        (run(noise(32, 128)) + run_other(noise(32, 128))).sum().backward()
        optimizer.step()
        return list(seen)

    assert both() == ["schedule", ""]
    fp8compile.set_precision("fp8", model)
    assert both() == ["", ""]
    fp8compile.set_precision("bf16")
    assert both() == ["schedule", "schedule"]
    fp8compile.set_precision(None)
    assert both() == ["schedule", ""]
    fp8compile.set_step(9)
    assert both() == ["schedule", ""]
    assert both() == ["", ""]
    fp8compile.set_step(0, model)
    assert both() == ["schedule", ""]


def test_set_step_before_an_optimizer_has_the_model() -> None:
    """A callback does so when a run begins. Optimizers of other models, which the model follows until then,
    do not matter."""
    other, model = nn.Linear(2, 2), nn.Linear(2, 2)
    before, optimizer = torch.optim.SGD(other.parameters(), 0.1), torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        before.step()
    fp8compile.set_step(5, model)
    assert hooks.steps_of(model) == 5
    optimizer.step()
    assert hooks.steps_of(model) == 6 and hooks.steps_of(other) == 3
    fp8compile.set_step(0, model)
    optimizer.step()
    assert hooks.steps_of(model) == 1
    frozen_first = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    torch.optim.SGD(frozen_first[1].parameters(), 0.1).step()
    assert hooks.steps_of(frozen_first) == 1


def test_set_precision_without_a_schedule(caplog) -> None:
    torch.compile(make(Mlp), backend="fp8")(noise(32, 128)).sum().backward()
    fp8compile.set_precision("bf16")
    assert any("schedule" in record.message for record in caplog.records if record.levelname == "WARNING")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp8compile.set_precision("bfloat16"), "'fp8', 'bf16' or None"),
        (lambda: fp8compile.set_precision(["fp8"]), "'fp8', 'bf16' or None"),
        (lambda: fp8compile.set_step(-1), ">= 0"),
        (lambda: fp8compile.on_step(3), "callable"),
        (lambda: fp8compile.on_step(print, every=0), ">= 1"),
    ],
)
def test_errors(call, message: str) -> None:
    with pytest.raises(fp8compile.OptionError, match=message):
        call()


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()
        self.body.up.weight.requires_grad_(False)

    def forward(self, x):
        return (self.body(x) - x).square().mean()


def test_a_callback_on_the_loss(seen: list[str]) -> None:
    """It sets the phase of the whole model, also of what is frozen, once a step of several optimizers."""
    model = make(WithLoss)
    run = scheduled(model)
    optimizers = [torch.optim.SGD([p], 0.5) for p in model.parameters() if p.requires_grad]
    asked: list[tuple[int, float | None]] = []

    def decide(step: int, loss: float | None) -> str | None:
        asked.append((step, loss))
        return "bf16" if step >= 4 else None

    remove = fp8compile.on_step(decide, model, every=2)
    mine = []
    for i in range(8):
        if i == 6:
            remove()
        loss = run(noise(32, 128, seed=i))
        mine.append(loss.item())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert asked == [(2, mine[1]), (4, mine[3]), (6, mine[5])]
    assert seen == [""] * 4 + ["schedule"] * 4


@pytest.mark.slow
def test_a_reentrant_checkpoint(seen: list[str]) -> None:
    """Its forward inside of the backward runs in its step's phase: the first one was an evaluation."""
    block = make(Mlp)
    run = scheduled(block, warmup_steps=2)
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    for i in range(4):
        checkpoint(run, noise(32, 128, seed=i).requires_grad_(), use_reentrant=True).sum().backward()
        optimizer.step()
        assert {sum(a > 0 for a in history) for history, _ in histories(block).values()} == {i + 1}
    assert seen == ["schedule"] * 2 + [""] * 2


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize(("before", "after"), [("bf16", "fp8"), ("fp8", "bf16")])
def test_a_switch_before_a_recomputation(seen: list[str], before: str, after: str) -> None:
    """A recomputation runs in the phase of its forward, whatever was set in between, and moves no history."""
    block = make(Mlp)
    run = scheduled(block)
    fp8compile.set_precision(before)
    out = checkpoint(run, noise(32, 128).requires_grad_(), use_reentrant=False)
    fp8compile.set_precision(after)
    out.sum().backward()
    assert seen == [{"bf16": "schedule", "fp8": ""}[before]] * 2
    assert {sum(a > 0 for a in history) for history, _ in histories(block).values()} == {1}


def compiled_optimizer(model: nn.Module) -> Callable[[], Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return torch.compile(lambda: optimizer.step(), backend="eager")


def new_optimizers(model: nn.Module) -> Callable[[], Any]:
    """A count goes on with the next optimizer."""
    return lambda: torch.optim.SGD(model.parameters(), 0.1).step()


def of_other_parameters(model: nn.Module) -> Callable[[], Any]:
    """Frozen parameters, and the full parameters that a sharded model passes to its graphs, count the
    training's steps."""
    elsewhere = nn.Parameter(torch.zeros(3))
    elsewhere.grad = torch.ones(3)
    return torch.optim.SGD([elsewhere], 0.1).step


@pytest.mark.parametrize("optimizer", [compiled_optimizer, new_optimizers, of_other_parameters])
def test_steps_of_every_optimizer(seen: list[str], optimizer: Callable[[nn.Module], Any]) -> None:
    model = make(Mlp)
    run, stepped = scheduled(model, warmup_steps=2), optimizer(model)
    for i in range(4):
        run(noise(32, 128, seed=i)).sum().backward()
        stepped()
    assert seen == ["schedule"] * 2 + [""] * 2


def test_the_first_step_of_a_second_training(seen: list[str]) -> None:
    """The counted steps of another model that has trained in this process are not its own."""
    first, second = make(Mlp), make(Mlp)
    remove = fp8compile.on_step(lambda step, loss: None, first)
    run, others = torch.compile(first, backend="fp8"), torch.optim.SGD(first.parameters(), 0.1)
    for i in range(3):
        step(run, others, i)
    remove()
    run, optimizer = scheduled(second, warmup_steps=2), torch.optim.SGD(second.parameters(), 0.1)
    for i in range(3):
        step(run, optimizer, i)
        step(torch.compile(first, backend="fp8"), others, i)
    assert seen == ["schedule"] * 2 + [""]


@pytest.mark.parametrize("made", ["before", "later", "never"])
def test_steps_of_a_model_that_no_graph_reads(seen: list[str], made: str) -> None:
    """A critic or a first stage in eager trains in between: its steps are not those of the model, which has
    an optimizer from the beginning, or gets one. Gradients may reach it meanwhile. What trains by copies, so
    that no optimizer has it, follows the others once gradients have reached it."""
    model, critic = make(Mlp), nn.Linear(128, 1)
    run, of_critic = scheduled(model, warmup_steps=2), torch.optim.SGD(critic.parameters(), 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if made == "before" else None
    for i in range(3):
        for j in range(3):
            out = run(noise(32, 128, seed=j))
            critic(out if optimizer and not i else out.detach()).mean().backward()
            of_critic.step()
        critic(run(noise(32, 128, seed=i))).mean().backward()
        if made == "later":
            optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
        if optimizer:
            optimizer.step()
    high = 5 if made == "never" else 8
    assert seen == ["schedule"] * high + [""] * (12 - high)
