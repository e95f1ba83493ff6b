"""What version 0.2.0 wrote and called still works: files with a scaling state; old names, with a warning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fp8compile
from tests.support.harness import compiled, scaling_tensors

# "one": scaling_state(model), "all": that of ScalingState(model)
SAVED = Path(__file__).parent / "data" / "state-0.2.0.pt"
POLICY = {"rules": [{"fp8": "on"}]}
RENAMED = {
    "scaling_state": "ScalingState",
    "load_scaling_state": "ScalingState",
    "dry_run": "freeze_scaling_state",
    "refresh": "refresh_weight_cache",
    "set_phase": "set_precision",
    "thaw": "restore_frozen_weights",
}

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


def linears() -> nn.Module:
    """The model that the file is of."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 16, bias=False))


def same(row: torch.Tensor, saved: torch.Tensor) -> bool:
    """Is a row what a file of version 1 has? There the amaxes, and the patience, follow the limit."""
    if row.numel() == 1:  # the version
        return (int(row), int(saved)) == (2, 1)
    known, met, amaxes = row[:7], row[8:13], row[13:]
    theirs = torch.cat([saved[:3], saved[6:]])  # without three numbers of the call before
    return torch.equal(torch.cat([known, amaxes]), theirs) and not met.any() and 0 < row[7] < row[3]


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("kind", ["one", "all"])
def test_a_file_of_0_2_0(kind: str, called: bool) -> None:
    saved = torch.load(SAVED)
    model = linears()
    run = compiled(model, policy=POLICY, amax_history_len=4)
    if called:
        run(torch.ones(32, 64)).sum().backward()
    fp8compile.ScalingState(model, strict=True).load_state_dict(saved[kind])
    loaded = scaling_tensors(model)
    assert len(loaded) == 7 and loaded.keys() == saved["one"].keys()
    assert all(same(row, saved["one"][name]) for name, row in loaded.items())
    run(torch.ones(32, 64)).sum().backward()  # strict: every slot fits the graph
    moved = scaling_tensors(model)
    assert all(
        torch.equal(row, moved[name]) is (name == "fp8compile.version") for name, row in loaded.items()
    )


@pytest.mark.feature("schedule", "weight_cache", "frozen")
def test_old_names_warn_and_name_the_new_one() -> None:
    for name, new in RENAMED.items():
        said = rf"fp8compile.{name} is now fp8compile.{new}\b"
        with pytest.warns(DeprecationWarning, match=said) as caught:
            assert callable(getattr(fp8compile, name))
        assert caught[0].filename == __file__
        assert new in fp8compile.__all__ and name not in fp8compile.__all__
    with pytest.raises(AttributeError, match="no attribute 'scaling_stat'"):
        _ = fp8compile.scaling_stat


@pytest.mark.feature("schedule", "weight_cache")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_functions_do_what_they_did() -> None:
    saved, model = torch.load(SAVED), linears()
    fp8compile.load_scaling_state(model, saved["one"])
    state = fp8compile.scaling_state(model)
    assert state.keys() == saved["one"].keys()
    assert all(same(row, saved["one"][name]) for name, row in state.items())
    more = {**saved["one"], "2.weight.input.0": torch.ones(15)}
    with pytest.raises(fp8compile.StateError, match="unexpected"):
        fp8compile.load_scaling_state(model, more, strict=True)
    run = compiled(model, policy={**POLICY, "schedule": {}}, amax_history_len=4)
    with fp8compile.dry_run():
        run(torch.ones(32, 64)).sum().backward()
    assert fp8compile.set_phase("high_precision", model) is None and fp8compile.refresh() is None
    fp8compile.set_phase(phase=None, model=model)
