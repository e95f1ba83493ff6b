"""The scaling state as a file: a resumed run equals an unbroken one; a state that does not fit is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile.errors import StateError
from tests.support.harness import (
    compiled,
    grads_of,
    histories,
    load_scaling,
    noise,
    reloaded,
    scaling_tensors,
)
from tests.support.hooks import slots_of
from tests.support.models import Mlp, Stack, Twice, make

VERSION = "fp8compile.version"
pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


def train(run, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[Tensor]:
    """Losses of the steps from first to last; the inputs grow and shrink."""
    losses = []
    for step in range(first, last):
        x = noise(2, 16, 128, seed=step, scale=1.0 + step % 3)
        optimizer.zero_grad()
        loss = (run(x) - x.flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


class Zero(Mlp):
    """The gradient of `up` is zero as long as nothing trains `down`, which begins as zeros: its slot is cold
    for 16 calls, and cold and warm calls do not give the same bits."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down.weight)
        self.down.weight.requires_grad_(False)


@pytest.mark.cases(test=1, slow=3)
@pytest.mark.parametrize(
    ("build", "stop", "before", "options"),
    [
        (lambda: Stack(Mlp(), Mlp()), 5, True, {}),
        (Twice, 5, False, {}),
        (Mlp, 4, True, {"amax_history_len": 4, "interval": 3, "on_overflow": "saturate"}),
        (Zero, 18, True, {}),
    ],
    ids=["before the first call", "live", "options", "many zeros"],
)
def test_a_resumed_run_is_the_same(build, stop: int, before: bool, options: dict[str, Any]) -> None:
    """Compares runs with and without a stop bit by bit."""
    end = max(stop + 4, 20 if build is Zero else 0)
    model = make(build)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    run = compiled(model, **options)
    losses = train(run, model, optimizer, 0, stop)
    file = reloaded((model.state_dict(), optimizer.state_dict(), scaling_tensors(model)))
    losses = train(run, model, optimizer, stop, end)
    other = make(build, seed=99)
    second = torch.optim.Adam(other.parameters(), 1e-2)
    run = compiled(other, **options)
    if not before:  # load into a model that has run, so that it goes back to the checkpoint
        train(run, other, second, 0, 3)
    other.load_state_dict(file[0])
    second.load_state_dict(file[1])
    load_scaling(other, file[2])
    again = train(run, other, second, stop, end)
    assert all(map(torch.equal, losses, again)), (losses, again)
    expected, got = grads_of(model), grads_of(other)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert histories(model) == histories(other)
    mine, theirs = scaling_tensors(model), scaling_tensors(other)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine) and len(mine) == len(theirs)


@pytest.mark.slow
def test_it_is_plain_tensors(tmp_path) -> None:
    model = make(Mlp)
    compiled(model)(noise(16, 128)).sum().backward()
    state = scaling_tensors(model)
    assert state.keys() - {VERSION} == {f"{name}.{role}.{use}" for name, role, use in slots_of(model)}
    for (name, role, use), slot in slots_of(model).items():
        row = state[f"{name}.{role}.{use}"]
        assert row.dtype == torch.float32 and row.device.type == "cpu"
        assert torch.equal(row[:-1], slot.numbers.tensor) and row[13] == slot.history()[0]
    # safetensors requires it
    assert len({row.untyped_storage().data_ptr() for row in state.values()}) == len(state)
    expected = histories(model)
    compiled(model)(noise(16, 128, scale=9.0)).sum().backward()  # which the state does not see: it is a copy
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(state, tmp_path / "scaling.safetensors")
    other = make(Mlp)
    load_scaling(other, safetensors.load_file(tmp_path / "scaling.safetensors"))
    assert histories(other) == expected


def test_a_checkpoint_without_one_starts_cold() -> None:
    model = make(Mlp)
    for state in (None, {}):
        load_scaling(model, state)
        run = compiled(model)
        for step in range(3):
            run(noise(16, 128, seed=step)).sum().backward()
        assert {sum(amax > 0 for amax in history) for history, _ in histories(model).values()} == {3}
        load_scaling(model, state)
        assert all(not any(history) and scale == 1.0 for history, scale in histories(model).values())
        x = noise(16, 128) * 1e-4
        # its own amax scales it; with scale 1 it vanishes
        torch.testing.assert_close(run(x), model(x), rtol=0.1, atol=1e-3)


@pytest.mark.slow
def test_names_without_wrappers() -> None:
    model = make(lambda: Stack(Mlp()))
    model.inner[0] = torch.compile(model.inner[0], backend="fp8")
    model(noise(16, 128)).sum().backward()
    state = scaling_tensors(model)
    assert "inner.0.up.weight.input.0" in state
    other = torch.compile(make(lambda: Stack(Mlp())), backend="fp8")
    load_scaling(other, state)
    assert histories(other) == histories(model)


@functools.cache
def _state() -> dict[str, Tensor]:
    model = make(Mlp)
    compiled(model)(noise(16, 128)).sum().backward()
    return scaling_tensors(model)


def state_of_mlp() -> dict[str, Tensor]:
    """That of an MLP after a call, to be changed."""
    return dict(_state())


# states that are refused


def test_another_model(caplog: pytest.LogCaptureFixture) -> None:
    model = make(Twice)
    wrong = "unexpected: up.weight.input.0 .the model has no up.weight"
    with pytest.raises(StateError, match=wrong) as caught:
        load_scaling(model, state_of_mlp(), strict=True)
    assert len(caught.value.differences) == 6 and isinstance(caught.value, ValueError)
    assert not slots_of(model)
    with caplog.at_level("WARNING", logger="fp8compile"):
        load_scaling(model, state_of_mlp())
    assert "unexpected: up.weight.input.0 (the model has no up.weight)" in caplog.text
    assert "and 1 more" in caplog.text
    assert not slots_of(model)


def test_other_options(caplog: pytest.LogCaptureFixture) -> None:
    """What fits is taken, with one warning. `strict`: a new model refuses the state at each call that needs
    the loaded slots; a model that has run, at once and unchanged."""
    state, model = state_of_mlp(), make(Mlp)
    run = compiled(model, margin=0, amax_history_len=8, interval=4)
    messages = {
        "up.weight.gradient.0: FP8 maximum / 2**margin 28, here 57344",
        "up.weight.gradient.0: overflow limit (on_overflow, margin, fp8_format) 57344, here 458752",
        "up.weight.input.0: window (amax_history_len, or 1 with most_recent) 16, here 8",
        "up.weight.input.0: amaxes that are kept (the longest amax_history_len) 16, here 8",
        "up.weight.weight.0: interval 1, here 4",
    }

    def refused(what: Callable[[], Any]) -> None:
        with pytest.raises(StateError) as caught:
            what()
        assert messages <= set(caught.value.differences)

    load_scaling(model, state, strict=True)
    for _ in range(2):
        refused(lambda: run(noise(16, 128)))
    with caplog.at_level("WARNING", logger="fp8compile"):
        load_scaling(model, state)
        run(noise(16, 128)).sum().backward()
        run(noise(16, 128)).sum().backward()
    (said,) = [record.getMessage() for record in caplog.records if "scaling state" in record.getMessage()]
    assert "what fits is loaded, and the rest starts cold" in said and "strict=True" in said
    assert any(message in said for message in messages)
    before = histories(model)
    refused(lambda: load_scaling(model, state, strict=True))
    assert histories(model) == before


def test_a_graph_that_has_more() -> None:
    state = {name: row for name, row in state_of_mlp().items() if not name.startswith("down.weight.gradient")}
    model = make(Mlp)
    run = compiled(model)
    load_scaling(model, state, strict=True)
    with pytest.raises(StateError, match="missing: down.weight.gradient.0"):
        run(noise(16, 128))
    load_scaling(model, state)
    run(noise(16, 128)).sum().backward()
    counts = {key: sum(amax > 0 for amax in history) for key, (history, _) in histories(model).items()}
    assert counts.pop(("down.weight", "gradient", 0)) == 1 and set(counts.values()) == {2}
    with pytest.raises(StateError, match="missing: down.weight.gradient.0"):
        load_scaling(model, state, strict=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update({VERSION: torch.tensor([3])}), "version 1 or 2"),
        (lambda s: s.update({"up.weight": torch.zeros(27)}), "no name of a scaling state"),
        (
            lambda s: s.update({"up.weight.input.0": torch.zeros(5)}),
            "float32 vector of 15 numbers or more; it is .*5",
        ),
        (lambda s: s.update({"up.weight.input.0": [1.0]}), "it is list"),
    ],
)
def test_what_is_no_state(change, message: str) -> None:
    state = state_of_mlp()
    change(state)
    with pytest.raises(StateError, match=message):
        load_scaling(make(Mlp), state)
    with pytest.raises(StateError, match="the dict that ScalingState"):
        load_scaling(make(Mlp), [1])


def test_a_recipe_without_state_refuses_one() -> None:
    state, model = state_of_mlp(), make(Mlp)
    load_scaling(model, state, strict=True)
    with pytest.raises(StateError, match="unexpected: down.weight"):
        compiled(model, "rowwise")(noise(16, 128))
