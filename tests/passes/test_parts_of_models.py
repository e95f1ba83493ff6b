"""Models of which parts are compiled one by one: rules, functions and reports use the names of the model, and
decide as they do where it is compiled whole. (test_fsdp.py: with FSDP2, and in torchtitan's way.)"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import fp8compile
from tests.support import hooks
from tests.support.harness import noise
from tests.support.models import Mlp

pytestmark = pytest.mark.usefixtures("interpreted")
Decisions = dict[tuple[str, str], tuple[str, str]]


class Projection(nn.Module):
    """An output head. (Dynamo does not compile a Linear by itself: its code is torch's.)"""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(128), nn.Linear(128, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.norm(x))


class Net(nn.Module):
    """Blocks, and a head after them."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.out = nn.ModuleList(Mlp() for _ in range(blocks)), Projection()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


class Wrapped(nn.Module):
    """A model in a module for its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


def whole(model: Any, how: dict[str, Any]) -> None:
    model.compile(**how)


def in_place(model: Any, how: dict[str, Any]) -> None:
    for part in (*model.layers, model.out):
        part.compile(**how)


def replaced(model: Any, how: dict[str, Any]) -> None:
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, **how)
    model.out = torch.compile(model.out, **how)


def registered(model: Any, how: dict[str, Any]) -> None:
    """As torchtitan does: what is compiled is a wrapper."""
    for name, layer in model.layers.named_children():
        wrapper = checkpoint_wrapper(layer)
        wrapper.compile(**how)
        model.layers.register_module(name, wrapper)
    model.out.compile(**how)


def decisions(compiled: Callable[..., None], model: Any = None, **options: Any) -> tuple[Decisions, int]:
    """(module, gemm) -> (decision, reason) of all matmuls, and the number of graphs."""
    torch._dynamo.reset()
    model = Net() if model is None else model
    compiled(model, {"backend": "fp8", "options": options})
    with hooks.traced():
        model(noise(32, 128).requires_grad_()).sum().backward()
        torch.optim.SGD(model.parameters(), 0.0).step()
    assert not any("place" in name for name in model.state_dict())
    report = fp8compile.report(model)
    assert not report.outside and len(report.matmuls) == 27
    found = {(x.fqn, x.gemm): (x.decision, x.reason) for x in report.matmuls}
    assert {x.parameter for x in report.matmuls} == {f"{name}.weight" for name, _ in found}
    return found, len(report.graphs)


def rule(**given: Any) -> dict[str, Any]:
    return {"policy": {"rules": [{"fp8": "off", "name": "mine", **given}]}}


# what the rules make of the blocks: how many kinds there are
CASES = {
    "module": (rule(module="layers.1.up"), 2),
    "parameter": (rule(parameter=["layers.0.*.weight", "layers.3.down.weight"]), 3),
    "module_class": (rule(module_class="Net", module="layers.[01].*"), 2),
    "blocks": (rule(blocks=["first 1", "last 1"]), 2),
    "layers": (rule(layers="first 3"), 3),
    "last layers": (rule(layers="last 3"), 2),
    "exclude": ({"exclude": ["layers.0", "out"]}, 2),
    "function": ({"policy": lambda module, name: not name.startswith(("layers.2.", "out"))}, 2),
    "alike": (rule(module="*.down", gemm="wgrad"), 1),
    "no names": ({"recipe": "rowwise"}, 1),
}


@pytest.mark.compat
@pytest.mark.cases(test=3, slow=7)
@pytest.mark.parametrize("case", CASES)
def test_parts_decide_as_the_whole(case: str) -> None:
    """With one graph for blocks that are treated alike. No rule is said to be without effect."""
    options, kinds = CASES[case]
    expected, _ = decisions(whole, **options, strict=True)
    kept = {name.split(".")[1] for (name, _), (decision, _) in expected.items() if decision != "fp8"}
    assert len(kept) > (case != "no names")  # the head, and others
    for compiled in (in_place, registered) if case in ("module", "function") else (replaced,):
        found, graphs = decisions(compiled, **options, strict=True)
        assert found == expected and graphs == kinds + 1  # and one of `out`


def test_the_functions_are_asked_once_about_each_module_of_the_model() -> None:
    asked: list[tuple[str, str]] = []

    def wanted(module: nn.Module, name: str) -> bool:
        asked.append((type(module).__name__, name))
        return True

    decisions(in_place, policy=wanted)
    names = [f"layers.{i}.{part}" for i in range(4) for part in ("up", "down")] + ["out.proj"]
    assert {*asked} == {("Linear", name) for name in names}


def test_names_of_reports_statistics_and_state() -> None:
    model = Net()
    in_place(model, {"backend": "fp8"})
    x = noise(32, 128).requires_grad_()
    for _ in range(2):
        model(x).sum().backward()
    text, names = str(fp8compile.report(model)), {row["name"] for row in fp8compile.stats(model).rows()}
    assert "layers.0-3.up (x4)" in text and "\nout.proj " in text and "24 of 27 matmuls" in text
    assert "(in each of 4 parts)" not in text  # no remarks here
    assert names == {f"layers.{i}.{name}.weight" for i in range(4) for name in ("up", "down")}
    (first,) = (graph for graph in fp8compile.report(model).graphs if len(graph.matmuls) == 24)
    assert {(a // 6, b // 6) for a, b in first.edges} == {(i, i) for i in range(4)}  # within a block
    # of one block, and of a model that has the same graphs
    assert {x.fqn for x in fp8compile.report(model.layers[2]).matmuls} == {"layers.2.up", "layers.2.down"}
    other = Net(2)
    in_place(other, {"backend": "fp8"})
    other(x).sum().backward()
    assert len(fp8compile.report(other).matmuls) == 15 and len(fp8compile.report(model).matmuls) == 27
    assert len(fp8compile.report().graphs) == 2


@pytest.mark.feature("delayed")
def test_names_of_overflows(caplog: pytest.LogCaptureFixture) -> None:
    """Also in a block whose graph was compiled for another one."""
    caplog.set_level(logging.INFO)
    model = Net(2)
    in_place(model, {"backend": "fp8"})
    with hooks.noticed_at_once():
        for step in range(4):
            if step == 2:
                model.layers[1].register_forward_pre_hook(lambda _, args: (args[0] + 1e5,))
            model(noise(32, 128, seed=step).requires_grad_()).sum().backward()
    line = next(x.message for x in caplog.records if "1 overflow" in x.message)
    assert "layers.1.up.weight (input)" in line and "layers.0" not in line


def test_a_model_in_a_wrapper_keeps_its_names() -> None:
    """The compiled module is the model, whatever calls it; where parts are compiled, the outermost is."""
    expected, _ = decisions(whole, exclude=["layers.0"])
    options: dict[str, Any] = {"backend": "fp8", "options": {"exclude": ["layers.0"]}}
    for compiled, name in ((whole, ""), (in_place, "model.")):
        torch._dynamo.reset()
        model = Net()
        compiled(model, options)
        with hooks.traced():
            Wrapped(model)(noise(32, 128).requires_grad_()).backward()
        found = {(x.fqn, x.gemm): (x.decision, x.reason) for x in fp8compile.report(model).matmuls}
        assert found == {(name + module, gemm): made for (module, gemm), made in expected.items()}


@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_in_checkpoints(reentrant: bool) -> None:
    """A reentrant one compiles the training graph in backward, where nothing is known of the model."""

    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + checkpoint(layer, x, use_reentrant=reentrant)
            return self.out(x)

    model = Checkpointed(3)
    in_place(model, {"backend": "fp8", "options": {"exclude": ["layers.1.down"]}})
    with hooks.traced():
        model(noise(32, 128).requires_grad_()).sum().backward()
    graphs = [graph for graph in fp8compile.report(model).graphs if not graph.note]
    found = {(x.fqn, x.decision) for graph in graphs for x in graph.matmuls}
    blocks = {f"layers.{i}.{name}" for i in range(3) for name in ("up", "down")}
    assert {name for name, _ in found} == blocks | {"out.proj"}
    assert {name for name, decision in found if decision != "fp8"} == {"layers.1.down", "out.proj"}


def test_another_model_of_the_same_blocks() -> None:
    """Its blocks have other places: those of a longer model, and of a copy whose blocks were turned round."""
    options = {"backend": "fp8", "options": rule(blocks="last 1")}
    longer, turned = Net(3), copy.deepcopy(Net(2))
    models = [Net(2), longer, turned]
    for model in models:
        in_place(model, options)
        if model is turned:
            turned.layers = nn.ModuleList(reversed(turned.layers))
        with hooks.traced():
            model(noise(32, 128).requires_grad_()).sum().backward()
        last = len(model.layers) - 1
        kept = {x.fqn for x in fp8compile.report(model).matmuls if x.decision != "fp8"}
        assert kept == {f"layers.{last}.up", f"layers.{last}.down", "out.proj"}


def unused(model: nn.Module, caplog: pytest.LogCaptureFixture, steps: int = 2, **options: Any) -> list[str]:
    """The rules that are said to match nothing, by when it is said."""
    torch._dynamo.reset()
    in_place(model, {"backend": "fp8", "options": options})
    optimizer, said = torch.optim.SGD(model.parameters(), 0.0), []
    with hooks.traced():
        for step in range(steps):
            for name, act in (("forward", lambda: model(noise(32, 128).requires_grad_()).sum().backward()),
                              ("step", optimizer.step)):  # fmt: skip
                caplog.clear()
                act()
                said += [f"{name} {step}: {x.message}" for x in caplog.records if "matches no" in x.message]
    return said


def test_a_rule_is_judged_once_all_parts_have_run(caplog: pytest.LogCaptureFixture) -> None:
    """By its name at once; else at the first optimizer step, by the gemms of all parts."""
    assert not unused(Net(), caplog, **rule(module="out.proj"))
    assert not unused(Net(), caplog, **rule(module="layers.3.down", gemm="wgrad"))
    (line,) = unused(Net(), caplog, **rule(module="layers.9.*"))
    assert line.startswith("forward 0: ") and "name like 'layers.9.*'. Near: 'layers.*'" in line
    (line,) = unused(Net(), caplog, **rule(module="layers.3.down", where="n > 4096"))
    assert line.startswith("step 0: ") and "where = 'n > 4096' holds for none of the 3 gemms that its" in line
    with pytest.raises(fp8compile.StrictError, match="holds for none"):
        unused(Net(), caplog, **rule(layers="last 1", where="n > 4096"), strict=True)
    # the last rule is for whatever is left: nothing, here
    rest = {"rules": [{"module_class": "Linear", "fp8": "on"}, {"fp8": "off"}], "extends": "none"}
    assert not unused(Net(), caplog, policy=rest, strict=True)
