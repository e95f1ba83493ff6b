"""The benchmark of optimizers: its static figures, and its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import optimizers, whole_steps
from fp8compile.dryrun import fake_gpu

needs_description = pytest.mark.skipif(fake_gpu.unavailable() is not None, reason=fake_gpu.unavailable() or "")


@needs_description
def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    assert optimizers.main(["--arms", "torch-fused,torch-foreach,ours", "--out", str(path)]) == 0
    arms = json.loads(path.read_text())["arms"]
    assert arms["torch-fused"] == {"state": 4.0, "moved": 14.0, "launches": None, "counted": False}
    assert arms["torch-foreach"]["moved"] is None
    assert 3.0 < arms["ours"]["state"] <= 3.1 and arms["ours"]["launches"] == 1
    assert "12.13" in capsys.readouterr().out


def test_an_unknown_arm(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        optimizers.main(["--arms", "ours,thiers"])
    assert "thiers: not among torch-fused" in capsys.readouterr().err


def test_an_arm_without_its_library_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(_: object) -> None:
        raise ImportError("no such thing")

    monkeypatch.setitem(optimizers.ARMS, "bitsandbytes-AdamW8bit", missing)
    assert optimizers.main(["--arms", "torch-fused,bitsandbytes-AdamW8bit"]) == 0
    told = capsys.readouterr()
    assert "bitsandbytes-AdamW8bit: left out: no such thing" in told.err and "bitsandbytes" not in told.out


@pytest.mark.slow
@needs_description
def test_whole_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A layer of Llama-3-8B has 7 weights: one cast each, that reads 2 bytes a parameter and writes 2."""
    path = tmp_path / "a.json"
    assert whole_steps.main(["--layers", "1", "--recipes", "delayed", "--out", str(path)]) == 0
    found = json.loads(path.read_text())["recipes"]["delayed"]
    plain, cached, early = (found[arm] for arm in ("plain", "cached", "cached-by-step"))
    assert early["cast_kernels"] == 7 < cached["cast_kernels"]
    assert early["cast_bytes"] == pytest.approx(4, abs=0.01) and cached["cast_bytes"] == pytest.approx(6, abs=0.01)
    assert cached["update_bytes"] < early["update_bytes"] < cached["update_bytes"] + 0.04
    assert early["ms"] < cached["ms"] < plain["ms"] / 1.03
    assert "cached-by-step" in capsys.readouterr().out
