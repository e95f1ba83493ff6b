"""Policies in a graph: recipes side by side, rules as reasons, strictness, decisions by the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fp8compile
from tests.support import hooks
from tests.support.harness import Pair, compiled, noise
from tests.support.models import Attention, Block, Broken, Mlp, Stack, SwiGlu, make

pytestmark = pytest.mark.usefixtures("interpreted")

CAREFUL = {"recipe": "tensorwise", "fp8_format": "e4m3", "margin": 1}
SHORT = {"margin": 2, "amax_history_len": 3, "interval": 2}


def rules(*given: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"rules": list(given), **rest}


def decisions(
    model: nn.Module, rows: int = 32, width: int = 128, **options: Any
) -> dict[tuple[str, str], Any]:
    """(module, gemm) -> the matmul's record of a training step, which is not run."""
    run = torch.compile(model, backend="fp8", options=options)
    with hooks.traced():
        run(noise(2, rows, width).requires_grad_()).sum().backward()
    return {(r.fqn, r.gemm): r for r in fp8compile.report(model).matmuls if r.gemm != "matmul"}


SIDE_BY_SIDE = {"gate": CAREFUL, "up": {"recipe": "delayed", **SHORT}}  # they read one tensor
ON_ONE_PAGE = {"down": {"amax_compute_algo": "most_recent", "fp8_format": "e4m3", "margin": 3}}


@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize(
    ("build", "default", "settings"),
    [(Mlp, "delayed", ON_ONE_PAGE), (SwiGlu, "delayed", SIDE_BY_SIDE), (SwiGlu, "tensorwise", SIDE_BY_SIDE)],
)
def test_settings_of_rules(build: type[nn.Module], default: str, settings: dict[str, dict[str, Any]]) -> None:
    """Every gradient and every slot equals that of the reference with these settings."""
    given = rules(*({"module": name, **setting} for name, setting in settings.items()))
    overrides = {f"{name}.weight": setting for name, setting in settings.items()}
    pair = Pair(make(build), default, policy=given, overrides=overrides, amax_history_len=5)
    for step in range(8):
        pair.step(noise(40, 128, seed=step, scale=8.0 if step == 2 else 1.0))
    pair.finish()


def blocks() -> nn.Module:
    parts = {"layers": nn.Sequential(*(Block(gated=True) for _ in range(3))), "head": nn.Linear(128, 256)}
    return nn.Sequential(OrderedDict(parts))


@pytest.mark.slow
def test_conditions_see_the_model() -> None:
    """Blocks by position, classes of surrounding modules, parameters, positions among the weights, sizes."""
    found = decisions(
        make(blocks),
        policy=rules(
            {"name": "edge", "blocks": "first 1", "fp8": "off"},
            {"name": "edge", "blocks": "last 1", "fp8": "off"},
            {"name": "mixer", "module_class": "Attention", "parameter": "*.o.weight", "fp8": "off"},
            {"name": "wide", "where": "n > k and m >= 64", "kind": "output head", "fp8": "on"},
            {"name": "wide", "where": "n > k and m >= 64", "module": "*.mlp.*", "margin": 2},
        ),
    )
    inner = {"o": ("high_precision", "mixer"), "gate": ("fp8", "wide"), "up": ("fp8", "wide")}
    inner["down"] = ("fp8", "down projection")
    for (module, _), record in found.items():
        expected = inner.get(module.rpartition(".")[2], ("fp8", ""))
        if module == "head":
            expected = ("fp8", "wide")
        elif module.startswith(("layers.0.", "layers.2.")):
            expected = ("high_precision", "edge")
        assert (record.decision, record.rule) == expected, module
    assert len({module for module, _ in found}) == 3 * 7 + 1


def test_layers_by_position() -> None:
    """Also in parts: breaks leave three graphs, with the first layer in one, and the last in another."""
    edge = [{"name": side, "layers": f"{side} 1", "fp8": "off"} for side in ("first", "last")]
    model = make(lambda: Broken(Mlp(), Mlp(), Mlp()))
    found = decisions(model, policy=rules(*edge, extends="none"))
    kept = {module: record.rule for (module, _), record in found.items() if record.decision != "fp8"}
    assert len(fp8compile.report(model).graphs) == 3
    assert kept == {"first.up": "first", "third.down": "last"}


def test_blocks_of_what_has_none(caplog: pytest.LogCaptureFixture) -> None:
    policy = rules({"name": "edge", "blocks": "first 1", "fp8": "off"})
    decisions(make(Mlp), policy=policy)
    assert any("edge" in record.message and "compiled alone" in record.message for record in caplog.records)
    with pytest.raises(fp8compile.StrictError, match="compiled alone"):
        decisions(make(Mlp), policy=policy, strict=True)


def test_what_cannot_be_fp8_is_nobodys_choice() -> None:
    """The reason is the dtype, not the rule that would keep the layer in high precision, too."""
    model = make(Mlp).double()
    options = {"policy": rules({"name": "mine", "module": "up", "fp8": "off"})}
    with hooks.traced():
        torch.compile(model, backend="fp8", options=options)(noise(32, 128).double()).sum().backward()
    reasons = {record.reason.partition(":")[0] for record in fp8compile.report(model).matmuls}
    assert reasons == {"dtype float64"}


def test_a_function_as_policy() -> None:
    """Of modules of which it is false, the matmuls stay in high precision. The rest is as by default."""
    asked = []

    def wanted(module: nn.Module, name: str) -> bool:
        asked.append((type(module), name))
        return name != "inner.1.down"

    two = lambda: Stack(Mlp(), Mlp())  # noqa: E731
    found = decisions(make(two), policy=wanted)
    kept = {(module, record.reason) for (module, _), record in found.items() if record.decision != "fp8"}
    assert kept == {("inner.1.down", "policy function")}
    assert set(asked) == {(nn.Linear, f"inner.{i}.{name}") for i in range(2) for name in ("up", "down")}
    torch._dynamo.reset()
    linears = decisions(make(two), policy=lambda module, name: isinstance(module, nn.Linear), strict=True)
    assert all(record.decision == "fp8" for record in linears.values())
    torch._dynamo.reset()
    wrong = "policy function raises AttributeError.* for 'inner.0.up', a Linear"
    with pytest.raises(fp8compile.OptionError, match=wrong):
        decisions(make(two), policy=lambda module, name: module.nothing)


def odd() -> nn.Module:
    return nn.Sequential(OrderedDict(up=nn.Linear(128, 128), odd=nn.Linear(128, 136)))


@pytest.mark.parametrize(
    "policy",
    [
        rules({"module": "*", "fp8": "off"}),
        rules({"module": "down", "fp8": "on", "override_linear_precision": [False, False, True]}),
    ],
)
def test_strict_takes_what_is_kept_on_purpose(policy: dict[str, Any]) -> None:
    decisions(make(Mlp), policy=policy, strict=True)


@pytest.mark.cases(test=2, slow=2)
@pytest.mark.parametrize(
    ("build", "options", "says"),
    [
        (odd, {"policy": rules({"module": "odd", "fp8": "on"})}, "odd.*not a multiple of 16"),
        (Attention, {"policy": rules({"module": "mlp.*", "fp8": "off"})}, "mlp"),
        (lambda: nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 128)), {}, "under 128 wide"),
        (Mlp, {"rows": 16, "device": "h100"}, "slower in FP8"),
    ],
)
def test_strict_refuses(
    build: Callable[[], nn.Module], options: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What a rule wants and cannot have, a rule that matches nothing, and a model without FP8."""
    with pytest.raises(fp8compile.StrictError, match=says):
        decisions(make(build), strict=True, **options)
    torch._dynamo.reset()
    if build is Attention:  # without `strict` it is a warning
        decisions(make(build), **options)
        (message,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert "mlp.*" in message and "rule 1" in message


def test_edges() -> None:
    """q, k and v feed the scores, and the scores feed the output projection."""
    model = make(Attention)
    decisions(model)
    (graph,) = fp8compile.report(model).graphs
    names = [record.fqn for record in graph.matmuls]
    ends = {(names[i], names[j]) for i, j in graph.edges if names[i] and names[j]}
    assert ends == {("q", "o"), ("k", "o"), ("v", "o")}
    assert all(i < j for i, j in graph.edges)


@pytest.mark.slow
def test_evaluation_in_fp8() -> None:
    """Evaluation in FP8 uses current amaxes; histories neither move nor matter. By default, it is exact."""
    model = make(Mlp)
    x = noise(32, 128)
    expected = model(x).detach()
    for settings, close in (({"eval": "fp8"}, False), ({}, True)):
        torch._dynamo.reset()
        run = compiled(model, **settings)
        run(x.requires_grad_()).sum().backward()
        before = {key: slot.history() for key, slot in hooks.slots_of(model).items()}
        for switch in (torch.no_grad, torch.enable_grad):
            model.train(switch is torch.no_grad)
            with switch():
                y = run(x.detach())
            error = float((y.detach() - expected).norm() / expected.norm())
            assert (error < 1e-5) is close and error < 0.1
        model.train()
        assert before == {key: slot.history() for key, slot in hooks.slots_of(model).items()}
        evaluated = [graph for graph in fp8compile.report(model).graphs if graph.note]
        recipes = {record.recipe for graph in evaluated for record in graph.matmuls}
        assert len(evaluated) == 2 and recipes == ({""} if close else {"tensorwise"})


@pytest.mark.feature("delayed")
def test_operands_of_two_dtypes_are_an_error_as_everywhere() -> None:
    """bf16 weights, float32 activations, no autocast: an error in eager, which quantizing must not hide."""
    model = nn.Linear(128, 128).bfloat16()
    with pytest.raises(Exception, match="dtype"):
        compiled(nn.Sequential(model))(noise(32, 128)).sum().backward()
