"""A later process takes a graph from AOTAutograd's cache if all is as it was, and does all of the first's."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import compat
from fp8compile.errors import StrictError, Unpicklable, Unusable
from fp8compile.ir import ops
from fp8compile.runtime import warm_start
from fp8compile.runtime.pickled_graph import pickled, unpickled
from tests.support import hooks, warm
from tests.support.models import Mlp

by_thread = pytest.mark.skipif(
    not compat.aot_cache.options_by_thread(), reason="torch's options are those of the process"
)


@contextlib.contextmanager
def caches(folder: Path) -> Iterator[None]:
    """Inside, AOTAutograd's cache is on, and all caches are in this folder."""
    with (
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder)),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        yield


def again(kind: type[nn.Module]) -> tuple[dict[str, Any], dict[str, int]]:
    """What a compilation from nothing but the caches gives, and what it takes from them."""
    hooks.forget()
    counters.clear()
    return warm.scene(kind), warm.counts()


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in (cache / "aotautograd").rglob("*") if path.is_file())


COLD, WARM = {"hit": 0, "miss": 2, "saved": 2, "bypass": 0}, {"hit": 2, "miss": 0, "saved": 0, "bypass": 0}


@pytest.mark.slow
@by_thread
@pytest.mark.compat
@pytest.mark.compiled
@pytest.mark.feature("schedule")
def test_each_set_of_rules_starts_warm(tmp_path: Path) -> None:
    with caches(tmp_path):
        (cold, first), (found, second) = (again(warm.Timed) for _ in range(2))
    assert (first["miss"], second["hit"], second["miss"]) == (3, 3, 0)  # two sets and an evaluation
    assert found == cold and len(set(cold["losses"])) > 1


@pytest.mark.slow
@by_thread
@pytest.mark.compat
@pytest.mark.compiled
def test_a_warm_start_is_the_cold_one_to_the_bit(tmp_path: Path) -> None:
    """Losses, gradients, scaling state, measured casts, statistics, the report and an export's questions."""
    with caches(tmp_path):
        (cold, first), (found, second) = (again(warm.Small) for _ in range(2))
    assert (first, second) == (COLD, WARM)
    assert found == cold
    assert cold["measured"] and cold["losses"] and any(cold["forwards"])


@pytest.mark.weekly
@by_thread
@pytest.mark.compiled
def test_a_graph_is_retained_at_its_first_backward(tmp_path: Path) -> None:
    """Two losses of one forward, as the stock backend allows it, also where the backward is compiled with the
    forward. A second derivative is refused with torch's words."""
    gradients = []
    for retain in (False, True):
        hooks.forget()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
        call = torch.compile(model, backend="fp8", options={"recipe": "tensorwise"})
        x = torch.randn(32, 128)
        with caches(tmp_path / str(retain)):
            y = call(x)
            y[:16].square().mean().backward(retain_graph=retain)
            (y if retain else call(x))[16:].square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))
    with caches(tmp_path), pytest.raises(RuntimeError, match="double backward"):
        x.requires_grad_()
        (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        grad.sum().backward()


@pytest.mark.weekly
@by_thread
@pytest.mark.compiled
def test_an_entry_that_cannot_be_used_is_compiled_again(tmp_path: Path) -> None:
    """The model has dropout in a checkpoint."""
    with caches(tmp_path):
        cold, first = again(warm.Checkpointed)
        found, second = again(warm.Checkpointed)
        assert (first, second, found) == (COLD, WARM, cold)
        with torch._functorch.config.patch(enable_autograd_cache=False):
            found, counted = again(warm.Checkpointed)
        assert found == cold and not any(counted.values())
        good = {path: path.read_bytes() for path in entries(tmp_path)}
        for damage in (cut, flipped, Path.unlink):
            for path in entries(tmp_path):
                path.unlink()
            for path, content in good.items():
                path.write_bytes(content)
            damage(min(good))
            found, counted = again(warm.Checkpointed)
            assert found == cold and counted["hit"] == counted["miss"] == 1, damage
        shutil.rmtree(tmp_path / "fxgraph")
        found, counted = again(warm.Checkpointed)
        assert found == cold and counted["hit"] == 0


def cut(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:1000])


def flipped(entry: Path) -> None:
    content = entry.read_bytes()
    at = content.index(b"fp8compile.runtime.warm_start")
    entry.write_bytes(content[:at] + b"X" + content[at + 1 :])


@pytest.mark.slow
@by_thread
@pytest.mark.compiled
def test_strict_raises_for_a_graph_that_was_compiled_without(tmp_path: Path) -> None:
    model, x = nn.Linear(8, 8), torch.randn(8, 8)
    counters.clear()
    with caches(tmp_path):
        torch.compile(model, backend="fp8")(x).sum().backward()
        assert counters["aot_autograd"]["autograd_cache_saved"] == 1
        torch._dynamo.reset()
        with pytest.raises(StrictError, match="no matmul of Linear becomes FP8"):
            torch.compile(model, backend="fp8", options={"strict": True})(x)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


# -- the key, without Inductor's code generation --


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[list[str]]:
    """The keys that AOTAutograd's cache is asked for, in order; compilations end there or at our passes."""
    with caches(tmp_path), hooks.cache_keys() as keys:
        yield keys


def compile_until_enough(model: nn.Module, **how: Any) -> None:
    torch._dynamo.reset()
    with pytest.raises(hooks.Enough):
        torch.compile(model, backend="fp8", **how)(torch.randn(32, 128))


class Other(Mlp):
    """As Mlp, of another class."""


class Linear(nn.Linear):
    """A class of its own, by which a policy may choose."""


def derived() -> Mlp:
    model = Mlp()
    model.up.__class__ = Linear
    return model


def hooked() -> Mlp:
    model = Mlp()
    model.up.weight.register_hook(lambda grad: grad)
    return model


@by_thread
@pytest.mark.compat
def test_the_key_has_all_that_our_passes_read(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def key(model: nn.Module, **options: Any) -> str:
        asked.clear()
        compile_until_enough(model, options=options)
        assert len(asked) == 1
        return asked[0]

    usual = key(Mlp())
    assert usual == key(Mlp())  # else there is never a hit
    others = {
        "recipe": key(Mlp(), recipe="tensorwise"),
        "rule": key(Mlp(), policy={"rules": [{"module": "up", "fp8": "off"}]}),
        "device": key(Mlp(), device="h100"),
        "root": key(Other()),
        "class": key(derived()),
        "hooks": key(hooked()),
        "mode": key(Mlp().eval()),
        "frozen": key(Mlp().requires_grad_(False)),
    }
    with torch.autocast("cpu", torch.bfloat16):
        others["autocast"] = key(Mlp())
    monkeypatch.setenv("FP8COMPILE_SKIP", "fuse")
    others["skipped"] = key(Mlp())
    monkeypatch.delenv("FP8COMPILE_SKIP")
    for name, fact in hooks.other_facts().items():
        with fact:
            others[name] = key(Mlp())
    assert len({usual, *others.values()}) == 1 + len(others), (usual, others)


@pytest.mark.feature("save", "weight_cache")
@pytest.mark.compat
def test_graphs_that_do_not_use_the_cache(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def uses(model: nn.Module, dynamic: bool | None = None, **options: Any) -> bool:
        asked.clear()
        compile_until_enough(model, dynamic=dynamic, options=options)
        return bool(asked)

    assert uses(Mlp()) == compat.aot_cache.options_by_thread()
    assert not uses(Mlp(), save="fp8")
    assert not uses(Mlp(), cache_weights=True)
    for name, value in (
        ("enable_autograd_cache", False),
        ("bundled_autograd_cache", True),
        ("strict_autograd_cache", True),
    ):
        with torch._functorch.config.patch({name: value}):
            assert not uses(Mlp()), name
    for name, value in (("force_disable_caches", True), ("fx_graph_cache", False)):
        with torch._inductor.config.patch({name: value}):
            assert not uses(Mlp()), name
    monkeypatch.setenv("FP8COMPILE_DUMP", str(tmp_path / "dump"))
    assert not uses(Mlp())
    monkeypatch.delenv("FP8COMPILE_DUMP")
    assert not uses(Mlp(), dynamic=True)
    with hooks.lowered():
        assert not uses(Mlp())


# -- what is kept --


def test_a_graph_of_plain_data_computes_the_same() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q = ops.quantize(x, ops.amax(x).reciprocal(), torch.float8_e4m3fn, 448.0, False)
        values, _ = torch.max(x[:, 1:3], dim=1)
        return q.float() @ w, values, x.to(torch.bfloat16).view(-1)

    x, w = torch.randn(16, 16), torch.randn(16, 16)
    graph = make_fx(function)(x, w)
    graph.graph.find_nodes(op="placeholder")[0].meta["fp8_operand"] = ("kept", 1)
    steps = pickle.loads(pickle.dumps(pickled(graph.graph)))
    made = unpickled(steps)
    assert [node.name for node in made.graph.nodes] == [node.name for node in graph.graph.nodes]
    assert made.graph.find_nodes(op="placeholder")[0].meta["fp8_operand"] == ("kept", 1)
    for one, other in zip(torch.fx.Interpreter(made).run(x, w), graph(x, w), strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype


def test_what_cannot_be_written_is_not_kept() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(lambda x: x, (x,)),))
    made = torch.fx.GraphModule({}, graph)
    assert warm_start.packed(None, made, None) is None
    with graph.inserting_before(x):
        graph.create_node("get_attr", "inner")
    with pytest.raises(Unpicklable, match="get_attr inner"):
        pickled(graph)
    assert warm_start.packed(None, made, None) is None
    with pytest.raises(Unusable):
        warm_start.unpacked(b"nothing")
    with pytest.raises(Unusable):
        warm_start.unpacked(pickle.dumps(1))
