"""Invariants of the joint graph and of caching that results do not show: tags for the partitioner, cache
keys, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph

import fp8compile
from fp8compile.errors import OptionError
from tests.support import hooks
from tests.support.harness import noise
from tests.support.models import Mlp, make


def train(model: nn.Module, **options: Any) -> None:
    """A step whose graphs are not run."""
    torch._dynamo.reset()
    with hooks.traced():
        torch.compile(model, backend="fp8", options=options)(noise(128, 128)).sum().backward()


def joint(**options: Any) -> Graph:
    """The joint graph of a small model, after our passes."""
    with hooks.joint_graphs() as graphs:
        train(make(Mlp), **options)
    return graphs[-1]


@pytest.mark.feature("delayed")
def test_each_half_raises_its_amaxes() -> None:
    """The partitioner silently drops a mutation that does not fit into its half of the graph."""
    writes = joint().find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert [node.meta["partitioner_tag"] for node in writes] == ["must_be_in_forward", "must_be_in_backward"]
    slots = [slot for node in writes for slot in node.args[1].args[2]]
    assert slots == [*range(6)], "those of forward first"


@pytest.mark.feature("delayed")
def test_a_lost_write_is_an_error() -> None:
    """If the write is lost all the same, training stops with an error."""
    with (
        hooks.interpreted(),
        hooks.losing_updates(),
        pytest.raises(Exception, match="was lost in this graph"),
    ):
        torch.compile(make(Mlp), backend="fp8")(noise(128, 128)).sum().backward()


@pytest.mark.slow
def test_aotautograd_does_not_cache_our_graphs() -> None:
    """A cache hit would skip the joint pass, and with it the state and the report. It is for code of
    Inductor's alone, which `runtime.warm_start` keeps beside both."""
    with torch._functorch.config.patch(enable_autograd_cache=True), hooks.cached_by_aotautograd() as seen:
        train(make(Mlp))
    assert seen and not seen[0]  # the forward; torch asks the cache before compiling it


def keys(**options: Any) -> set[Any]:
    """The cache keys of our passes in one compilation."""
    with hooks.keys_of_passes() as found:
        train(make(Mlp), **options)
    return set(found)


@pytest.mark.slow
def test_a_cache_key_tells_apart_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = keys()
    assert usual == keys() and len(usual) == 2  # of the passes before and after the partitioner
    assert not usual & keys(recipe="tensorwise")
    assert not usual & keys(policy={"rules": [{"module": "up", "fp8": "off"}]})
    monkeypatch.setenv("FP8COMPILE_SKIP", "fuse")
    assert not usual & keys()
    monkeypatch.delenv("FP8COMPILE_SKIP")
    with hooks.other_facts()["sources"]:
        assert not usual & keys()


# -- passes that are left out --


@pytest.mark.slow
def test_optional_passes_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(Mlp)
    for names, expected in (("", {"high_precision"}), (" weigh,fuse ", {"fp8"}), ("collect", set())):
        monkeypatch.setenv("FP8COMPILE_SKIP", names)
        matmuls = fp8compile.explain(model, noise(128, 128), device="h100").matmuls
        assert {record.decision for record in matmuls} == expected, names


@pytest.mark.parametrize("name", ["quantize", "fusion", "FUSE"])
def test_other_passes_cannot_be_left_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("FP8COMPILE_SKIP", name)
    names = "collect recast weigh try_matmuls fuse".split()  # and those of features
    with pytest.raises(OptionError, match=f"FP8COMPILE_SKIP.*{'.*, '.join(map(repr, names))}"):
        train(make(Mlp))


def test_the_debug_log_tells_what_a_pass_changed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "fp8compile.passes.pipeline"), hooks.lowered():
        torch.compile(make(Mlp), backend="fp8")(noise(128, 128)).sum().backward()
    told = {line.split(":")[0]: line for line in caplog.messages}
    steps = "collect decide weigh plan quantize layouts lower_scales fuse lower"
    assert {*steps.split()} <= told.keys()
    assert any(f"+{count} fp8compile.scaled_mm.default" in told["quantize"] for count in (5, 6))
    assert "aten.mm.default" in told["quantize"] or "aten.addmm.default" in told["quantize"]
    assert ";" not in told["collect"]  # it changes nothing
