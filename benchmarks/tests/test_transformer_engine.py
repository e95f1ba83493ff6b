"""TransformerEngine's arms, with a stub of its modules: names, arguments, and what is replaced."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import arms, transformer_engine
from benchmarks.cases import CASES
from benchmarks.cases.base import Fit, Task, parse_case
from benchmarks.measure import Runner

NAMES = [f"transformer_engine{part}" for part in ("", ".pytorch", ".common", ".common.recipe")]


@pytest.fixture
def te(monkeypatch):
    """The stub, as if it were installed."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "transformer_engine_stub"))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import transformer_engine.pytorch as module

    yield module
    for name in NAMES:
        sys.modules.pop(name, None)


def task(name: str) -> Task:
    case, variant, _ = parse_case(name, CASES)
    return Task(case.points("tiny", variant, Fit(1 << 34, 1))[0], "cpu")


def prepared(name: str) -> Task:
    made = task(name)
    arms.ARMS["te-delayed"].prepare(made.model)
    return made


def kinds(model: nn.Module) -> dict[str, str]:
    theirs = {n: type(m) for n, m in model.named_modules() if "transformer_engine" in type(m).__module__}
    ours = {n: type(m) for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.LayerNorm))}
    return {name: kind.__name__ for name, kind in {**ours, **theirs}.items()}


@pytest.mark.slow
def test_linears_and_norms_of_a_gpt_are_replaced(te):
    model = prepared("gpt2-124m").model
    found = kinds(model)
    assert found["blocks.0.attn.qkv"] == found["blocks.1.mlp.up"] == "LayerNormLinear"
    assert found["blocks.0.attn.proj"] == found["blocks.1.mlp.down"] == "Linear"
    assert "blocks.0.attn_norm" not in found and found["norm"] == "LayerNorm"
    assert isinstance(model.lm_head, nn.Linear)


def test_linears_of_other_models_are_replaced_and_norms_stay(te):
    """A Llama's norm goes to several linears, and the norm of a feed-forward block stands after them."""
    llama = prepared("llama-8b-layers").model
    names = [name for name, kind in kinds(llama).items() if kind == "Linear"]
    assert len(names) == 7 * len(llama.blocks) and not any(isinstance(m, nn.Linear) for m in llama.modules())
    assert sum(isinstance(m, nn.RMSNorm) for m in llama.modules()) == 2 * len(llama.blocks)
    assert set(kinds(prepared("ffn-half").model).values()) == {"Linear", "LayerNorm"}
    sizes = nn.Sequential(nn.Linear(64, 24), nn.Linear(24, 64), nn.Linear(64, 32, bias=False))
    transformer_engine.prepare(())(sizes)
    # those that are no multiple of 16 stay
    assert [type(m) is nn.Linear for m in sizes] == [True, True, False]


@pytest.mark.parametrize("name", ["gpt2-124m", "llama-8b-layers", "ffn-half", "dit"])
def test_the_model_computes_what_it_did(te, name):
    plain, changed = task(name), prepared(name)
    batch = next(plain.batches)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=plain.point.autocast):
        assert torch.equal(plain.model(*batch), changed.model(*batch))


@pytest.mark.parametrize(
    ("arm", "wanted"),
    [
        ("eager-te-delayed", "DelayedScaling"),
        pytest.param("te-current", "Float8CurrentScaling", marks=pytest.mark.slow),
    ],
)
def test_a_forward_runs_with_the_recipe(te, arm, wanted):
    chosen, made = arms.ARMS[arm], task("gpt2-124m")
    arms.apply(chosen, made.model, arms.settings(chosen, 1, interpreted=True), each=False)
    made.start()
    runner = Runner(made, chosen.around)
    runner.step()
    assert len(te.seen) == 8  # two blocks of four linears
    assert {(type(used).__name__, used.fp8_format.name) for _, used in te.seen} == {(wanted, "HYBRID")}
    assert not te.active
    assert all(x.grad is None for x in made.model.parameters()) and runner.steps == 1


def test_the_arm_says_what_is_missing():
    with pytest.raises(Exception, match="TransformerEngine cannot be imported"):
        prepared("gpt2-124m")
