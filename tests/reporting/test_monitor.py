"""Monitors: the steps that they measure, their rows and outputs, and the picture of a file."""

from __future__ import annotations

import gc
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile import cli
from fp8compile.errors import OptionError
from fp8compile.reporting import plots
from tests.support import hooks
from tests.support.harness import compiled, noise
from tests.support.models import Mlp, Stack, make

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


@pytest.fixture(autouse=True)
def nothing_asked():
    yield
    assert not hooks.measuring()  # every opened monitor was closed


def train(
    run, model: nn.Module, steps: int, optimizer: torch.optim.Optimizer | None = None, accumulate: int = 1
) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(steps):
        for _ in range(accumulate):
            run(noise(16, 128, seed=step, scale=1.0 + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def steps_in(rows: list[dict[str, Any]]) -> list[int]:
    return list(dict.fromkeys(row["step"] for row in rows))


def test_json_lines(tmp_path: Path) -> None:
    model = make(Mlp)
    run = compiled(model)
    path = tmp_path / "run.jsonl"
    with fp8compile.monitor(run, every=3, to=path) as monitor:
        train(run, model, 7)
    train(run, model, 3)  # the monitor is closed
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert steps_in(rows) == [3, 6] and monitor.written == 2
    tensors = {(row["name"], row["role"]) for row in rows}
    assert len(rows) == 12 and len(tensors) == 6 and ("up.weight", "gradient") in tensors
    keys = "step name role use layout recipe format amax scale scale_inv scale_inv_min scale_inv_max"
    counts = "overflow_calls underflow_calls not_finite_calls"
    measured = "overflows% underflows% mse sqnr row_error column_error"
    assert list(rows[0]) == f"{keys} {counts} {measured}".split()
    # inputs grow: the third call read 3 x noise, with a scale for 2 x noise
    first = next(row for row in rows if (row["name"], row["role"]) == ("up.weight", "input"))
    assert first["amax"] == noise(16, 128, seed=2, scale=3.0).abs().max().item()
    assert first["scale"] == pytest.approx(448 / noise(16, 128, seed=1, scale=2.0).abs().max().item())
    assert first["overflows%"] > 0 and first["sqnr"] > 10
    with fp8compile.monitor(run, every=1, to=str(path)):  # appends
        train(run, model, 1)
    assert len(path.read_text().splitlines()) == 18


def test_tensorboard(tmp_path: Path) -> None:
    model = make(Mlp)
    run = compiled(model)
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        with pytest.raises(OptionError, match="pip install tensorboard"):
            fp8compile.monitor(run, 1, f"tensorboard:{tmp_path}")
        return
    with fp8compile.monitor(run, 1, f"tensorboard:{tmp_path}"):
        train(run, model, 1)
    assert list(tmp_path.iterdir())


def test_one_call_of_accumulated_ones() -> None:
    """One call of a step is measured; nothing is measured in the steps between."""
    model = make(Mlp)
    run, rows = compiled(model), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with fp8compile.monitor(run, 2, rows.extend):
        train(run, model, 1, optimizer, accumulate=3)
        assert all(row["mse"] is None for row in fp8compile.stats(model))
        train(run, model, 1, optimizer, accumulate=3)
    assert steps_in(rows) == [2] and len(rows) == 6


def test_a_loop_without_an_optimizer() -> None:
    model = make(Mlp)
    run, rows = compiled(model), []
    with fp8compile.monitor(run, 2, rows.extend) as monitor:
        for step in range(5):
            run(noise(16, 128, seed=step)).sum().backward()
            monitor.step()
    assert steps_in(rows) == [2, 4]


def test_a_step_that_is_set() -> None:
    """Before, where a run was stopped; and while the monitor is open."""
    model = make(Mlp)
    run, rows = compiled(model), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    run(noise(16, 128)).sum().backward()
    fp8compile.set_step(19, model)
    with fp8compile.monitor(run, 10, rows.extend):
        train(run, model, 1, optimizer)
        fp8compile.set_step(28, model)
        train(run, model, 3, optimizer)
    assert steps_in(rows) == [20, 30]


def test_a_second_optimizer_goes_on() -> None:
    """The count continues if the first optimizer still exists, and if the second one has other parameters."""
    model = make(Mlp)
    run, rows = compiled(model), []
    with fp8compile.monitor(run, 2, rows.extend) as monitor:
        train(run, model, 3, torch.optim.SGD([model.down.weight], 1e-3))
        first = torch.optim.SGD(model.parameters(), 1e-3)
        train(run, model, 2, first)
        train(run, model, 2, torch.optim.Adam(model.parameters(), 1e-3))
        monitor.close()
    with fp8compile.monitor(run, 2, rows.extend):
        train(run, model, 1)
    assert steps_in(rows) == [2, 4, 6, 8]


def test_beside_another_model() -> None:
    """A model whose first step comes after those of another one: it is measured at its own steps."""
    other = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(other.parameters(), 1e-3)
    for _ in range(3):
        optimizer.step()
    model = make(Mlp)
    run, rows = compiled(model), []
    with fp8compile.monitor(run, 2, rows.extend) as monitor:
        train(run, model, 4)
    assert steps_in(rows) == [2, 4] and monitor.written == 2


class Full(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(28, "No space left on device")


def test_what_cannot_be_written(caplog) -> None:
    """The monitor warns when it should write, for want of FP8 or of space on a disk; training continues."""
    small, model = make(lambda: Stack(nn.Linear(32, 32), nn.Linear(32, 32))), make(Mlp)
    rows: list[dict[str, Any]] = []
    run, optimizer = compiled(small), torch.optim.SGD(small.parameters(), 0.1)
    with fp8compile.monitor(run, 1, rows.extend):
        run(noise(4, 32)).sum().backward()
        optimizer.step()
    assert not rows and "nothing of it runs in FP8" in caplog.text
    run = compiled(model)
    monitor = fp8compile.monitor(run, 1, Full())
    train(run, model, 2)
    assert monitor.written == 0 and "No space left" in caplog.text


@pytest.mark.feature("schedule")
def test_in_a_warm_up_one_line_says_so(caplog) -> None:
    """Also of a bare module whose parts were compiled, which has been called in high precision alone."""
    model, rows = make(Mlp), []
    run = compiled(model, policy={"schedule": {"warmup_steps": 4}})
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    train(run, model, 1, optimizer)
    with fp8compile.monitor(model, 2, rows.extend):
        train(run, model, 5, optimizer)
    (said,) = [text for text in caplog.messages if text.startswith("monitor of")]
    assert "no training call was in FP8 (in a schedule's phase" in said and steps_in(rows) == [6]


@pytest.mark.slow
def test_a_model_that_is_gone() -> None:
    model = make(Mlp)
    fp8compile.monitor(torch.compile(model, backend="fp8"), 1, print)
    del model
    gc.collect()
    other = make(Mlp, seed=1)
    train(compiled(other), other, 1)


def test_errors(tmp_path: Path) -> None:
    model = make(Mlp)
    run = compiled(model)
    with pytest.raises(OptionError, match="every.*0"):
        fp8compile.monitor(run, 0)
    with pytest.raises(OptionError, match="must be compiled: .* Mlp that is not"):
        fp8compile.monitor(model, 1, print)
    with pytest.raises(TypeError, match="Module"):
        fp8compile.monitor(print, 1)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="'to' must be a path"):
        fp8compile.monitor(run, 1, 5)
    with pytest.raises(OptionError, match="there is no .*missing"):
        fp8compile.monitor(run, 1, tmp_path / "missing" / "run.jsonl")


# the picture


def line(
    step: int,
    name: str,
    role: str = "input",
    overflows: float | None = 0.0,
    sqnr: float | None = 30.0,
    **more: Any,
) -> dict:
    row = {"step": step, "name": name, "role": role, "use": 0, "layout": ""}
    row |= {"scale_inv_min": 0.01, "scale_inv_max": 0.02}
    return {**row, "overflows%": overflows, "sqnr": sqnr, **more}


LINES = [
    *(line(step, "fine", role) for step in (1, 2) for role in plots.COLOURS),
    line(1, "overflows", "gradient", 2.5),
    line(2, "overflows", "gradient", 0.0, layout="transposed"),
    line(1, "rough", sqnr=20.0),
    line(2, "rough", "weight", None, None, scale_inv_min=None, scale_inv_max=None),
    line(1, "worst", overflows=50.0, sqnr=3.0),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in LINES))
    return path


def test_worst_first(file: Path) -> None:
    found = plots.worst_first(plots.read(file))
    assert [layer.name for layer in found] == ["worst", "overflows", "rough", "fine"]
    assert (found[1].overflows, found[2].sqnr) == (2.5, 20.0)
    assert list(found[1].tensors()) == [("gradient", ""), ("gradient", "transposed")]


@pytest.mark.weekly
def test_plot(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["plot", str(file), "--worst", "3"]) == 0
    out, err = capsys.readouterr()
    assert [text.split(":")[0] for text in out.splitlines()] == ["worst", "overflows", "rough"]
    assert "overflows up to 50%, SQNR from 3.0 dB" in out and "run.png" in err
    image = file.with_suffix(".png").read_bytes()
    assert image[:8] == b"\x89PNG\r\n\x1a\n" and len(image) > 10_000
    assert cli.main(["plot", str(file), "-o", str(file.with_name("run.svg"))]) == 0
    svg = file.with_name("run.svg").read_text()
    assert svg.startswith("<?xml") and len(svg) > 10_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no lines"),
        ("step,loss\n1,2\n", "line 1 is none of"),
        (
            json.dumps(LINES[0]) + "\n" + '{"step": 3, "loss": 2.0}\n',
            "line 2 is none of fp8compile.monitor's: it has no 'name'",
        ),
        ("[1, 2]", "it has no 'step'"),
    ],
)
def test_a_file_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(OptionError, match=message):
        plots.read(path)
    assert cli.main(["plot", str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and str(path) in err
