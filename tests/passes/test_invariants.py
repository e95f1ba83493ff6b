"""Invariants of the joint graph and of caching that results do not show: tags for the partitioner, cache keys, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.fx import Graph

import fp8compile
from fp8compile import backend, compat
from fp8compile.errors import Fp8CompileError, OptionError
from fp8compile.ir import ops
from fp8compile.passes import pipeline
from fp8compile.runtime import halves
from tests.support.harness import interpreted, noise
from tests.support.models import Mlp, make


def train(model: nn.Module, **options: Any) -> None:
    torch._dynamo.reset()
    with interpreted():
        torch.compile(model, backend="fp8", options=options)(noise(128, 128)).sum().backward()


def joint(look: Callable[[Graph], None], **options: Any) -> None:
    """Trains a small model for a step, and calls `look` with the joint graph after our passes."""
    run = backend.run_joint

    def looked_at(graph: Graph, *args: Any) -> Any:
        done = run(graph, *args)
        look(graph)
        return done

    with mock.patch.object(backend, "run_joint", looked_at):
        train(make(Mlp), **options)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise"])
def test_scales_and_inverses_are_saved(recipe: str) -> None:
    """On a GPU, a recomputed activation need not have the bits of the one whose amax was taken."""
    made = {ops.delayed_scale, ops.delayed_inverse, ops.current_scale, ops.inverse, ops.snapshot}
    seen: list[Any] = []

    def look(graph: Graph) -> None:
        seen.extend(node for node in graph.nodes if node.op == "call_function" and node.target in made)

    joint(look, recipe=recipe)
    assert len(seen) >= 12  # scale and inverse of two inputs, two weights and two gradients
    assert all(node.meta["recompute"] is compat.MUST_SAVE for node in seen if node.target is not ops.current_scale)
    whole = [node for node in seen if node.target is ops.current_scale and recipe in ("delayed", "tensorwise")]
    assert all(node.meta["recompute"] is compat.MUST_SAVE for node in whole)


def test_each_half_writes_its_page() -> None:
    """The partitioner silently drops a mutation that does not fit into its half of the graph."""
    tags: list[str] = []

    def look(graph: Graph) -> None:
        writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        tags.extend(node.meta["partitioner_tag"] for node in writes)

    joint(look)
    assert tags == ["must_be_in_forward", "must_be_in_backward"]


def test_a_lost_write_is_an_error() -> None:
    """If the write is lost all the same, training stops with an error."""
    check = halves._check_update

    def without_writes(gm: Any, page: str, slots: Any) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            gm.graph.erase_node(node)
        check(gm, page, slots)

    with mock.patch.object(halves, "_check_update", without_writes), pytest.raises(Exception, match="was lost in this graph"):
        train(make(Mlp))


def test_aotautograd_does_not_cache_our_graphs() -> None:
    """A cache hit would skip the joint pass, and with it the state and the report. It is for code of Inductor's alone, which
    `runtime.warm_start` keeps beside both."""
    seen: list[bool] = []
    compile_graph = halves.Halves.compile

    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(torch._functorch.config.enable_autograd_cache)
        return compile_graph(self, *args, **kwargs)

    with torch._functorch.config.patch(enable_autograd_cache=True), mock.patch.object(halves.Halves, "compile", compiled):
        train(make(Mlp))
    assert seen and not seen[0]  # the forward; torch asks the cache before compiling it


def keys(**options: Any) -> set[Any]:
    """The cache keys of our passes in one compilation."""
    found: set[Any] = set()
    made = compat.GraphPass.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        found.add(self.uuid())

    with mock.patch.object(compat.GraphPass, "__init__", init):
        train(make(Mlp), **options)
    return found


def test_a_cache_key_tells_apart_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = keys()
    assert usual == keys() and len(usual) == 2  # of the passes before and after the partitioner
    assert not usual & keys(recipe="tensorwise")
    assert not usual & keys(policy={"rules": [{"module": "up", "fp8": "off"}]})
    monkeypatch.setenv("FP8COMPILE_SKIP", "fuse")
    assert not usual & keys()
    monkeypatch.delenv("FP8COMPILE_SKIP")
    with mock.patch("fp8compile.compat.inductor.sources_hash", lambda: "another"):
        assert not usual & keys()


def test_an_operator_of_ours_that_is_left_is_an_error() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(16, 16)
    node = graph.call_function(ops.amax, (x,))
    node.meta["val"] = torch.zeros(1)
    graph.output((node,))
    lower = pipeline.lower
    with mock.patch("fp8compile.passes.lower.LOWERED", ()), pytest.raises(Fp8CompileError, match="survived the lowering"):
        lower(graph)


# -- passes that are left out --------------------------------------------------------------------------------------------


def test_optional_passes_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8COMPILE_SKIP", "collect")
    model = make(Mlp)
    train(model)
    assert not fp8compile.report(model).matmuls
    monkeypatch.setenv("FP8COMPILE_SKIP", " weigh,fuse ")
    train(model)
    assert all(record.decision == "fp8" for record in fp8compile.report(model).graphs[-1].matmuls)


def test_weighing_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(Mlp)
    assert {r.decision for r in fp8compile.explain(model, noise(128, 128), device="h100").matmuls} == {"high_precision"}
    monkeypatch.setenv("FP8COMPILE_SKIP", "weigh")
    assert {r.decision for r in fp8compile.explain(model, noise(128, 128), device="h100").matmuls} == {"fp8"}


@pytest.mark.parametrize("name", ["quantize", "fusion", "FUSE"])
def test_other_passes_cannot_be_left_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("FP8COMPILE_SKIP", name)
    names = "'flatten', 'scatters', 'collect', 'recast', 'weigh', 'all_gathers', 'all_to_alls', 'merge', 'save', 'fuse'"
    with pytest.raises(OptionError, match=f"FP8COMPILE_SKIP.*{names}"):
        train(make(Mlp))


def test_the_debug_log_tells_what_a_pass_changed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "fp8compile.passes.pipeline"):
        train(make(Mlp))
    told = {line.split(":")[0]: line for line in caplog.messages}
    assert {"collect", "decide", "weigh", "plan", "quantize", "update_state", "lower_scales", "fuse", "lower"} <= told.keys()
    assert "+6 fp8compile.scaled_mm.default" in told["quantize"] or "+5 fp8compile.scaled_mm.default" in told["quantize"]
    assert "aten.mm.default" in told["quantize"] or "aten.addmm.default" in told["quantize"]
    assert ";" not in told["collect"]  # it changes nothing
