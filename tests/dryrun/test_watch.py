"""monitor(compare_every=...): comparisons while a model trains, which do not change the training."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.errors import OptionError
from fp8compile.reporting import monitor, plots
from tests.support import hooks
from tests.support.harness import compiled, noise, scaling_tensors
from tests.support.models import Mlp, make

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


class Restless(Mlp):
    """With BatchNorm statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(128), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.drop(self.norm(x)))


def train(run, model: nn.Module, steps: int = 4, to: Any = None, **settings: Any) -> list[float]:
    """Losses of a training, with a monitor if there are `settings`."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    watched = fp8compile.monitor(run, **{"every": 1000, "to": to, **settings}) if settings else None
    losses = []
    for step in range(steps):
        loss = (run(noise(16, 128, seed=step)) - 1).square().mean()
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
        torch.manual_seed(0)
        model = make(Restless)
        if in_place:
            model.compile(backend="fp8")
        run, rows = model if in_place else compiled(model), []
        before = vars(run).get("_compiled_call_impl")
        losses = train(run, model, to=rows.extend, **settings)
        state = {**model.state_dict(), **scaling_tensors(model)}
        ends.append((losses, state, torch.get_rng_state(), fp8compile.report(model).summary()))
        assert comparisons(rows) == ([2, 4] if settings else [])
        assert vars(run).get("_compiled_call_impl") is before and "_call_impl" not in vars(run)
    (losses, state, numbers, report), (others, other, again, second) = ends
    assert losses == others and torch.equal(numbers, again) and report == second
    assert state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def test_rows_and_steps(tmp_path) -> None:
    """A step of three runs; rows that `fp8compile plot` leaves out; the step's batch and gradients."""
    model = make(Mlp)
    run, file = compiled(model), io.StringIO()
    optimizer, calls = torch.optim.SGD(model.parameters(), 0.1), []
    with hooks.compared_steps() as seen, fp8compile.monitor(run, 1000, file, compare_every=3):
        for step in range(6):
            x = noise(16, 128, seed=step)
            y = run(x)
            y.retain_grad()
            (3 * y).square().mean().backward()
            calls.append((x, y))
            if step % 2:  # each step has two batches
                optimizer.step()
    ((args, loss), *runs) = seen
    x, y = calls[4]  # the first one of the third step
    assert torch.equal(args[0], x) and args[0] is not x
    output = torch.zeros_like(y, requires_grad=True)
    assert torch.equal(torch.autograd.grad(loss(output), output)[0], y.grad)
    rows = [json.loads(line) for line in file.getvalue().splitlines()]
    assert runs == ["high_precision", "high_precision", "fp8"] and comparisons(rows) == [3]
    whole, *others = rows
    assert whole["name"] == "Mlp" and whole["gradient"] > 20 and whole["flag"] == ""
    kinds = {(row["name"], row["compare"]) for row in others}
    layers = {("up.weight", "layer"), ("down.weight", "layer")}
    assert kinds == layers | {("up.bias", "parameter"), ("down.bias", "parameter")}
    path = tmp_path / "run.jsonl"
    path.write_text(file.getvalue())
    with pytest.raises(fp8compile.OptionError, match="has no lines"):  # the rows of comparisons are not drawn
        plots.read(path)


def test_it_warns_of_a_layer_that_leaves_its_band(caplog) -> None:
    model = make(Mlp)
    run, rows = compiled(model), []
    train(run, model, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with fp8compile.monitor(run, 1000, rows.extend, compare_every=1):
        fp8compile.set_step(0, model)
        run(noise(16, 128)).sum().backward()
        with hooks.wrong_scale(model, "down.weight", "input", 2.0**10):
            optimizer.step()
    assert "out of range in FP8: down.weight: " in caplog.text and "saturate" in caplog.text
    assert rows[0]["flag"] == "down.weight" and rows[1]["name"] == "down.weight"
    assert rows[1]["compare"] == "layer"


def test_an_error_ends_the_comparisons_and_not_the_training(caplog) -> None:
    """And where no call was seen, there is nothing to compare."""
    model = make(Mlp)
    run = compiled(model)
    with hooks.compared_steps(fails=True) as seen:
        assert len(train(run, model, 3, to=print, compare_every=1)) == 3
    assert len(seen) == 1 and caplog.text.count("no longer compares Mlp: ZeroDivisionError") == 1
    other = make(Mlp)
    run = compiled(other)
    run(noise(16, 128)).sum().backward()
    with fp8compile.monitor(run, 1000, print, compare_every=1):
        torch.optim.SGD(other.parameters(), 0.1).step()
    assert "nothing to compare at step 1: no call of the model was seen" in caplog.text


@pytest.mark.cases(test=6, slow=1)
@pytest.mark.parametrize("place", [*hooks.failing_measurements(), "the user's"])
def test_no_error_of_a_measurement_ends_a_training(place: str, caplog) -> None:
    """It is one warning, and the training is the one without a monitor."""
    plain, model = make(Mlp), make(Mlp)
    expected = train(compiled(plain), plain)
    watched = dict(every=1, compare_every=1, to=lambda rows: 1 / int(place != "the user's"))
    run = compiled(model)
    with hooks.failing_measurements().get(place, contextlib.nullcontext()):
        assert train(run, model, **watched) == expected
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and ("planted" in said[0] or "division by zero" in said[0]), said


@pytest.mark.slow
def test_outputs_that_the_loss_does_not_read(caplog) -> None:
    class Both(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return {"unused": y * 2, "loss": y.square().mean()}

    model, rows = make(Both), []
    run, optimizer = compiled(model), torch.optim.SGD(model.parameters(), 0.1)
    with fp8compile.monitor(run, 1000, rows.extend, compare_every=1):
        for _ in range(2):
            run(noise(16, 128))["loss"].backward()
            optimizer.step()
    assert comparisons(rows) == [1, 2] and "WARNING" not in {record.levelname for record in caplog.records}


def test_a_summary_writer_gets_numbers() -> None:
    """Of the whole step and of each row; texts and what is unknown are left out."""
    row = {"step": 5, "compare": "layer", "name": "up.weight", "fprop": 28.5, "dgrad": None, "flag": ""}
    writer = mock.Mock(spec=["add_scalar"])
    write, _ = monitor._sink(writer)
    write([row])
    writer.add_scalar.assert_called_once_with("fp8/up.weight/compare/fprop", 28.5, 5)


def test_errors() -> None:
    model = make(Mlp)
    run = compiled(model)
    run(noise(16, 128)).sum().backward()
    with pytest.raises(OptionError, match="compare_every.*0"):
        fp8compile.monitor(run, 1, print, compare_every=0)
    with pytest.raises(OptionError, match="the object that the training loop calls.* got a Mlp"):
        fp8compile.monitor(model, 1, print, compare_every=1)
