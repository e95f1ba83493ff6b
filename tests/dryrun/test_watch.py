"""monitor(compare_every=...): comparisons while a model trains, which do not change the training."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.dryrun import compare
from fp8compile.errors import OptionError
from fp8compile.reporting import monitor, plots
from fp8compile.runtime.state import slots_of
from tests.support.harness import compiled, noise
from tests.support.models import Mlp, Parallel, make

pytestmark = pytest.mark.usefixtures("interpreted")


class Restless(Mlp):
    """With BatchNorm statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(128), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.drop(self.norm(x)))


def train(run, model: nn.Module, steps: int = 4, accumulate: int = 1, to: Any = None, **settings: Any) -> list[float]:
    """Losses of a training, with a monitor if there are `settings`."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    watched = fp8compile.monitor(run, 1000, to, **settings) if settings else None
    losses = []
    for step in range(steps):
        for micro in range(accumulate):
            loss = (run(noise(16, 128, seed=2 * step + micro)) - 1).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if watched is not None:
        watched.close()
    return losses


def comparisons(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows if row.get("compare") == "step"]


@pytest.mark.parametrize("in_place", [False, True])
def test_it_changes_nothing_to_the_bit(in_place: bool) -> None:
    ends = []
    for settings in ({}, {"compare_every": 2}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make(Restless)
        if in_place:
            model.compile(backend="fp8")
        run, rows = model if in_place else compiled(model), []
        losses = train(run, model, to=rows.extend, **settings)
        state = {**model.state_dict(), **fp8compile.scaling_state(model)}
        ends.append((losses, state, torch.get_rng_state(), fp8compile.report(model).summary()))
        assert comparisons(rows) == ([2, 4] if settings else [])
        assert not model._forward_hooks and not run._forward_hooks and not run._forward_pre_hooks
    (losses, state, numbers, report), (others, other, again, second) = ends
    assert losses == others and torch.equal(numbers, again) and report == second
    assert state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def test_rows_and_steps(monkeypatch) -> None:
    """A step of three runs; rows that `fp8compile plot` leaves out; the batch and the gradients are those of the step."""
    runs: list[str] = []
    step = compare.Session._step
    monkeypatch.setattr(compare.Session, "_step", lambda self, phase, *rest: (runs.append(phase), step(self, phase, *rest))[1])
    model = make(Mlp)
    run, file = compiled(model), io.StringIO()
    train(run, model, 4, accumulate=2, to=file, compare_every=3)
    rows = [json.loads(line) for line in file.getvalue().splitlines()]
    assert runs == ["high_precision", "high_precision", "fp8"] and comparisons(rows) == [3]
    whole, *others = rows
    assert whole["name"] == "Mlp" and whole["gradient"] > 20 and whole["flag"] == ""
    kinds = {(row["name"], row["compare"]) for row in others}
    expected = {("up.weight", "layer"), ("down.weight", "layer"), ("up.bias", "parameter"), ("down.bias", "parameter")}
    assert kinds == expected
    assert plots._row("run.jsonl", 1, json.dumps(whole)) is None


def test_it_compares_what_the_model_has_just_seen(monkeypatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(compare.Session, "run", lambda self, args, kwargs, loss, repeat: seen.append((args, loss)) or 1 / 0)
    model = make(Mlp)
    run = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fp8compile.monitor(run, 1000, print, compare_every=2):
        for step in range(2):
            x = noise(16, 128, seed=step)
            y = run(x)
            y.retain_grad()
            (3 * y).square().mean().backward()
            optimizer.step()
    ((args, loss),) = seen
    assert torch.equal(args[0], noise(16, 128, seed=1)) and args[0] is not x
    output = torch.zeros_like(y, requires_grad=True)
    assert torch.equal(torch.autograd.grad(loss(output), output)[0], y.grad)


def test_it_warns_of_a_layer_that_leaves_its_band(caplog) -> None:
    model = make(Mlp)
    run, rows = compiled(model), []
    train(run, model, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with fp8compile.monitor(run, 1000, rows.extend, compare_every=1):
        fp8compile.set_step(0, model)
        run(noise(16, 128)).sum().backward()
        slot = slots_of(model)["down.weight", "input", 0]
        slot.page.tensor[slot.row, 0] *= 2.0**10
        slot.page.tensor[slot.row, 1] /= 2.0**10
        optimizer.step()
    assert "out of their band in FP8: down.weight: " in caplog.text and "saturate" in caplog.text
    assert rows[0]["flag"] == "down.weight" and rows[1]["name"] == "down.weight" and rows[1]["compare"] == "layer"


def test_an_error_ends_the_comparisons_and_not_the_training(caplog, monkeypatch) -> None:
    monkeypatch.setattr(compare.Session, "run", lambda *_, **__: 1 / 0)
    model = make(Mlp)
    run = compiled(model)
    assert len(train(run, model, 3, to=print, compare_every=1)) == 3
    assert caplog.text.count("compares Mlp no more: ZeroDivisionError") == 1


def test_a_summary_writer_gets_numbers() -> None:
    """Of the whole step and of each row; texts and what is unknown are left out."""
    row = {"step": 5, "compare": "layer", "name": "up.weight", "fprop": 28.5, "dgrad": None, "flag": ""}
    scalars: dict[str, tuple[float, int]] = {}

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars[name] = (value, step)

    write, _ = monitor._sink(Writer())
    write([row])
    assert scalars == {"fp8/up.weight/compare/fprop": (28.5, 5)}


def test_nothing_seen(caplog) -> None:
    model = make(Mlp)
    run = compiled(model)
    run(noise(16, 128)).sum().backward()
    with fp8compile.monitor(run, 1000, print, compare_every=1):
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert "nothing to compare at step 1: no call of the model was seen" in caplog.text


def test_block_by_block() -> None:
    model = make(lambda: Parallel(Mlp(), Mlp()))
    for block in model.inner:
        block.compile(backend="fp8")
    rows: list[dict[str, Any]] = []
    train(model, model, 1, to=rows.extend, compare_every=1)
    assert {row["name"] for row in rows if row["compare"] == "layer"} == {
        f"inner.{i}.{layer}.weight" for i in (0, 1) for layer in ("up", "down")
    }


def test_errors() -> None:
    model = make(Mlp)
    run = compiled(model)
    run(noise(16, 128)).sum().backward()
    with pytest.raises(OptionError, match="compare_every.*0"):
        fp8compile.monitor(run, 1, print, compare_every=0)
    with pytest.raises(OptionError, match="the object that the training loop calls.* got a Mlp"):
        fp8compile.monitor(model, 1, print, compare_every=1)
