"""Policies in a graph: recipes side by side, rules as reasons, strictness, decisions by the device."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fp8compile
from tests.support import hooks
from tests.support.harness import Pair, compiled, noise
from tests.support.models import Attention, Block, Branches, Broken, Mlp, Stack, SwiGlu, make

pytestmark = pytest.mark.usefixtures("interpreted")

CAREFUL = {"recipe": "tensorwise", "fp8_format": "e4m3", "margin": 1}
SHORT = {"margin": 2, "amax_history_len": 3, "interval": 2}


def rules(*given: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"rules": list(given), **rest}


def decisions(model: nn.Module, rows: int = 32, width: int = 128, **options: Any) -> dict[tuple[str, str], Any]:
    """(module, gemm) -> the matmul's record of a training step, which is not run."""
    with hooks.traced():
        torch.compile(model, backend="fp8", options=options)(noise(2, rows, width).requires_grad_()).sum().backward()
    return {(record.fqn, record.gemm): record for record in fp8compile.report(model).matmuls if record.gemm != "matmul"}


@pytest.mark.slow
@pytest.mark.parametrize("default", ["delayed", "tensorwise"])
def test_recipes_side_by_side(default: str) -> None:
    """gate and up read one tensor, each with its own recipe; every gradient and every slot equals the reference's."""
    pair = Pair(
        make(SwiGlu),
        default,
        policy=rules({"module": "gate", **CAREFUL}, {"module": "up", "recipe": "delayed", **SHORT}),
        overrides={"gate.weight": CAREFUL, "up.weight": {"recipe": "delayed", **SHORT}},
    )
    for step in range(6):
        pair.step(noise(40, 128, seed=step, scale=1.0 + step))
    pair.finish()
    assert {key[0] for key in hooks.slots_of(pair.model)} == {"up.weight", *(["down.weight"] if default == "delayed" else [])}


def test_settings_of_slots_that_share_a_page() -> None:
    pair = Pair(
        make(Mlp),
        policy=rules({"module": "down", "amax_compute_algo": "most_recent", "fp8_format": "e4m3", "margin": 3}),
        overrides={"down.weight": {"amax_compute_algo": "most_recent", "fp8_format": "e4m3", "margin": 3}},
        amax_history_len=5,
    )
    for step in range(8):
        pair.step(noise(16, 128, seed=step, scale=8.0 if step == 2 else 1.0))
    pair.finish()


def test_a_rule_for_one_gemm() -> None:
    pair = Pair(
        make(Mlp),
        policy=rules({"module": "up", "gemm": "wgrad", "fp8": "off", "name": "exact wgrad"}),
        overrides={"up.weight": {"override_linear_precision": (False, False, True)}},
    )
    for step in range(3):
        pair.step(noise(32, 128, seed=step))
    pair.finish()
    for record in fp8compile.report(pair.model).matmuls:
        kept = (record.fqn, record.gemm) == ("up", "wgrad")
        assert record.decision == ("high_precision" if kept else "fp8")
        assert (record.reason, record.rule) == (("exact wgrad", "exact wgrad") if kept else ("", ""))


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
    for (module, _), record in found.items():
        if module == "head":
            assert (record.decision, record.rule) == ("fp8", "wide")
        elif module.startswith(("layers.0.", "layers.2.")):
            assert (record.decision, record.rule) == ("high_precision", "edge")
        elif module.endswith(".o"):
            assert (record.decision, record.rule) == ("high_precision", "mixer")
        elif module.endswith((".gate", ".up")):
            assert (record.decision, record.rule) == ("fp8", "wide")
        else:
            assert (record.decision, record.rule) == ("fp8", "down projection" if module.endswith(".down") else "")
    assert len({module for module, _ in found}) == 3 * 7 + 1


@pytest.mark.slow
def test_layers_by_position() -> None:
    """Also in parts: graph breaks leave three graphs, the first layer is in one of them, and the last in another."""
    edge = [{"name": side, "layers": f"{side} 1", "fp8": "off"} for side in ("first", "last")]
    model = make(lambda: Broken(Mlp(), Mlp(), Mlp()))
    found = decisions(model, policy=rules(*edge, extends="none"))
    kept = {module: record.rule for (module, _), record in found.items() if record.decision != "fp8"}
    assert len(fp8compile.report(model).graphs) == 3
    assert kept == {"first.up": "first", "third.down": "last"}


def wrapped(block: nn.Module, how: str, **options: Any) -> nn.Module:
    """A block that is compiled by itself."""
    if how == "torch.compile":
        return torch.compile(block, backend="fp8", options=options)  # type: ignore[return-value]
    block.compile(backend="fp8", options=options)
    return checkpoint_wrapper(block) if how == "checkpointed" else block


@pytest.mark.cases(test=1, slow=3)
@pytest.mark.parametrize("edges", [["first 1", "last 2"], ["last 1"]], ids=str)
@pytest.mark.parametrize("key", ["blocks", "layers"])
@pytest.mark.parametrize("how", ["in place", "torch.compile", "checkpointed"])
def test_positions_of_blocks_that_are_compiled_one_by_one(how: str, key: str, edges: list[str]) -> None:
    """They are those in the model: rules decide as they do when it is compiled whole. Blocks that they treat alike share a
    graph."""
    policy = rules({"name": "edge", key: edges, "fp8": "off"})
    whole = make(lambda: Stack(*(Mlp() for _ in range(5))))
    expected = {(name, gemm): record.decision for (name, gemm), record in decisions(whole, policy=policy).items()}
    torch._dynamo.reset()
    model = make(lambda: Stack(*(Mlp() for _ in range(5))))
    blocks = list(model.inner)
    for i, block in enumerate(blocks):
        model.inner[i] = wrapped(block, how, policy=policy)
    model(noise(2, 32, 128).requires_grad_()).sum().backward()
    found = {
        (f"inner.{i}.{record.fqn}", record.gemm): record.decision
        for i, block in enumerate(blocks)
        for record in fp8compile.report(block).matmuls
    }
    assert found == expected and len({*expected.values()}) == 2
    assert len(fp8compile.report(model).graphs) == (2 if key == "blocks" or edges == ["last 1"] else 3)
    assert not any("place" in name for name in model.state_dict())


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
    assert {record.reason.partition(":")[0] for record in fp8compile.report(model).matmuls} == {"dtype float64"}


def test_a_function_as_policy() -> None:
    """Of modules of which it is false, the matmuls stay in high precision. The rest is as by default."""
    asked = []

    def wanted(module: nn.Module, name: str) -> bool:
        asked.append((type(module), name))
        return name != "inner.1.down"

    found = decisions(make(lambda: Stack(Mlp(), Mlp())), policy=wanted)
    assert {module for (module, _), record in found.items() if record.reason == "policy function"} == {"inner.1.down"}
    assert {module for (module, _), record in found.items() if record.decision != "fp8"} == {"inner.1.down"}
    assert set(asked) == {(nn.Linear, f"inner.{i}.{name}") for i in range(2) for name in ("up", "down")}
    torch._dynamo.reset()
    norms = decisions(make(lambda: Stack(Mlp(), Mlp())), policy=lambda module, name: isinstance(module, nn.Linear), strict=True)
    assert all(record.decision == "fp8" for record in norms.values())
    torch._dynamo.reset()
    with pytest.raises(fp8compile.OptionError, match="policy function raises AttributeError.* for 'inner.0.up', a Linear"):
        decisions(make(lambda: Stack(Mlp())), policy=lambda module, name: module.nothing)


@pytest.mark.slow
def test_blocks_are_the_outermost() -> None:
    """A dense layer, then two with experts: the layers are the blocks, not the experts."""
    model = make(lambda: Stack(Mlp(), *(nn.Sequential(Mlp(), Mlp()) for _ in range(2))))
    found = decisions(model, policy=rules({"name": "edge", "blocks": "first 1", "fp8": "off"}))
    assert {module for (module, _), record in found.items() if record.rule == "edge"} == {"inner.0.up", "inner.0.down"}


@pytest.mark.slow
def test_strict_and_what_is_kept_on_purpose() -> None:
    """With `strict`, a user's rule may keep everything in high precision, and an override is allowed; a model whose sizes leave
    no matmul in FP8 is an error."""
    for name in ({}, {"name": "exact"}):
        decisions(make(Mlp), policy=rules({"module": "*", "fp8": "off", **name}), strict=True)
    narrow = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 128))
    with pytest.raises(fp8compile.StrictError, match="under 128 wide"):
        decisions(narrow, strict=True)
    with pytest.raises(fp8compile.StrictError, match="slower in FP8"):
        decisions(make(Mlp), rows=16, device="h100", strict=True)
    wanted = rules({"module": "down", "fp8": "on", "override_linear_precision": [False, False, True]})
    decisions(make(Mlp), policy=wanted, strict=True)


@pytest.mark.slow
def test_names_without_wrappers_and_a_rule_that_wants_an_output_head() -> None:
    model = make(blocks)
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    policy = rules({"module": "layers.1.mlp.*", "name": "one", "fp8": "off"}, {"module": "head", "name": "two", "fp8": "on"})
    found = decisions(model, policy=policy, strict=True)
    assert {module for (module, _), record in found.items() if record.rule == "one"} == {
        f"layers.1.mlp.{name}" for name in ("gate", "up", "down")
    }
    assert (found["head", "fprop"].decision, found["head", "fprop"].rule) == ("fp8", "two")


@pytest.mark.slow
def test_a_rule_that_matches_nothing(caplog: pytest.LogCaptureFixture) -> None:
    policy = rules({"module": "mlp.*", "fp8": "off"})
    decisions(make(Attention), policy=policy)
    (message,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "mlp.*" in message and "rule 1" in message
    with pytest.raises(fp8compile.StrictError, match="mlp"):
        decisions(make(Attention), policy=policy, strict=True)


def test_what_a_rule_wants_and_cannot_have() -> None:
    def odd() -> nn.Module:
        return make(lambda: nn.Sequential(OrderedDict(up=nn.Linear(128, 128), odd=nn.Linear(128, 136))))

    policy = rules({"module": "odd", "fp8": "on"})
    assert decisions(odd(), policy=policy)["odd", "fprop"].reason.startswith("not a multiple of 16")
    with pytest.raises(fp8compile.StrictError, match="odd.*not a multiple of 16"):
        decisions(odd(), policy=policy, strict=True)
    decisions(odd(), policy=rules({"module": "odd"}), strict=True)  # "auto" does not insist on FP8


@pytest.mark.slow
def test_the_device_decides() -> None:
    """On an H100 so small a model would be slower in FP8. A CPU has no cost model, so all becomes FP8, as requested."""
    found = decisions(make(Mlp), rows=16, device="h100")
    assert {record.decision for record in found.values()} == {"high_precision"}
    for record in found.values():
        assert record.reason.startswith("slower in FP8") and record.bf16_us and record.fp8_us and record.cast_us is not None
    assert {record.decision for record in decisions(make(Mlp), rows=16).values()} == {"fp8"}
    on = rules({"module": "*", "fp8": "on"})
    assert {record.decision for record in decisions(make(Mlp), rows=16, device="h100", policy=on).values()} == {"fp8"}


@pytest.mark.slow
def test_evaluation_in_fp8() -> None:
    """Evaluation in FP8 uses current amaxes; histories neither move nor matter. By default, evaluation is exact."""
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


@pytest.mark.slow
def test_edges() -> None:
    """q, k and v feed the scores, and the scores feed the output projection."""
    model = make(Attention)
    decisions(model)
    (graph,) = fp8compile.report(model).graphs
    names = [record.fqn for record in graph.matmuls]
    ends = {(names[i], names[j]) for i, j in graph.edges if names[i] and names[j]}
    assert ends == {("q", "o"), ("k", "o"), ("v", "o")}
    assert all(i < j for i, j in graph.edges)


def test_branches_keep_their_own_edges() -> None:
    model = make(Branches)
    decisions(model)
    (graph,) = fp8compile.report(model).graphs
    names = [record.fqn for record in graph.matmuls]
    assert graph.edges and not any(names[i] == names[j] for i, j in graph.edges)


def test_operands_of_two_dtypes_are_an_error_as_everywhere() -> None:
    """bf16 weights and float32 activations without autocast: an error in eager mode, and quantizing must not hide it."""
    model = nn.Linear(128, 128).bfloat16()
    with pytest.raises(Exception, match="dtype"):
        compiled(nn.Sequential(model))(noise(32, 128)).sum().backward()
