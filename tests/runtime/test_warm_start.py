"""A later process takes a graph from AOTAutograd's cache. It does all that the first one did, and only if all is as it was."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fp8compile import compat
from fp8compile.backend import fp8
from fp8compile.devices import catalog
from fp8compile.errors import StrictError, Unfrozen, Unusable
from fp8compile.ir.frozen_graph import freeze, thaw
from fp8compile.runtime import warm_start
from fp8compile.runtime.halves import Halves
from fp8compile.runtime.inner import INTERPRETER
from fp8compile.runtime.interpreter import Eager, boxed
from tests.support.models import Mlp

by_thread = pytest.mark.skipif(not compat.options_by_thread(), reason="torch's options are those of the process")
ROOT = Path(__file__).resolve().parents[2]


def process(cache: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    """What `tests.support.warm` prints, with its caches in a folder."""
    ours = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.warm", *arguments]
    done = subprocess.run(command, env={**os.environ, **ours, **environment}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in (cache / "aotautograd").rglob("*") if path.is_file())


@by_thread
@pytest.mark.compat
@pytest.mark.compiled
def test_a_warm_start_is_the_cold_one_to_the_bit(tmp_path: Path) -> None:
    """Losses, gradients, scaling state, measured casts, statistics, the report and what an export asks for."""
    cold, warm = (process(tmp_path, "delayed", "Model") for _ in range(2))
    assert cold["cache"] == {"hit": 0, "miss": 2, "saved": 2, "bypass": 0}
    assert warm["cache"] == {"hit": 2, "miss": 0, "saved": 0, "bypass": 0}
    assert warm["found"] == cold["found"]
    assert cold["found"]["Model"]["measured"] and cold["found"]["Model"]["losses"]


@by_thread
@pytest.mark.compiled
def test_strict_raises_for_a_graph_that_was_compiled_without(tmp_path: Path) -> None:
    model, x = nn.Linear(8, 8), torch.randn(8, 8)
    counters.clear()
    with (
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        torch.compile(model, backend=fp8)(x).sum().backward()
        assert counters["aot_autograd"]["autograd_cache_saved"] == 1
        torch._dynamo.reset()
        with pytest.raises(StrictError, match="no matmul of Linear becomes FP8"):
            torch.compile(model, backend=fp8, options={"strict": True})(x)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


@pytest.mark.slow
@pytest.mark.compiled
def test_an_entry_that_cannot_be_used_is_compiled_again(tmp_path: Path) -> None:
    cold = process(tmp_path, "delayed", "Model,Checkpointed")
    off = process(tmp_path, "delayed", "Model,Checkpointed", TORCHINDUCTOR_AUTOGRAD_CACHE="0")
    assert off["found"] == cold["found"] and not any(off["cache"].values())
    cut, flipped, gone, _ = entries(tmp_path)
    cut.write_bytes(cut.read_bytes()[:1000])
    content = flipped.read_bytes()
    at = content.index(b"fp8compile.runtime.warm_start")
    flipped.write_bytes(content[:at] + b"X" + content[at + 1 :])
    gone.unlink()
    again = process(tmp_path, "delayed", "Model,Checkpointed")
    assert again["found"] == cold["found"]
    assert again["cache"]["hit"] == 1 and again["cache"]["miss"] == 3
    shutil.rmtree(tmp_path / "fxgraph")
    without_code = process(tmp_path, "delayed", "Model,Checkpointed")
    assert without_code["found"] == cold["found"] and without_code["cache"]["hit"] == 0


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_every_recipe_starts_warm(recipe: str, tmp_path: Path) -> None:
    cold, warm = (process(tmp_path, recipe, "Model,Checkpointed") for _ in range(2))
    assert warm["cache"]["hit"] == cold["cache"]["saved"] == 4
    assert warm["found"] == cold["found"]


@pytest.mark.slow
@pytest.mark.compiled
def test_two_processes_that_write_at_once(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as both:
        one, other = both.map(lambda _: process(tmp_path, "delayed", "Model"), range(2))
    assert one["found"] == other["found"] == process(tmp_path, "delayed", "Model")["found"]


@pytest.fixture(scope="module")
def caches(tmp_path_factory) -> Path:
    """The caches of a process. A second one takes its graphs from a copy of them."""
    folder = tmp_path_factory.mktemp("caches")
    cold = process(folder / "cold", "tensorwise", "Model,Checkpointed")
    warm = process(shutil.copytree(folder / "cold", folder / "warm"), "tensorwise", "Model,Checkpointed")
    assert warm["cache"]["hit"] == cold["cache"]["saved"] == 4 and warm["found"] == cold["found"]
    return folder / "cold"


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize(
    "change",
    [
        "import torch; Mlp.forward = lambda self, x: self.down(torch.relu(self.up(x)))",  # another graph
        "import fp8compile.compat.inductor as i; i.sources_hash = lambda: 'another'",
        "Mlp.__name__ = Mlp.__qualname__ = 'Other'",
        "import os; os.environ['FP8COMPILE_SKIP'] = 'fuse'",
    ],
)
def test_a_process_with_another_fact_compiles(change: str, caches: Path, tmp_path: Path) -> None:
    assert process(shutil.copytree(caches, tmp_path / "copy"), "tensorwise", "Model", change)["cache"]["hit"] == 0


# -- the key, without Inductor's code generation --------------------------------------------------------------------------


class Enough(BaseException):
    """Ends a compilation."""


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[list[str]]:
    """The keys that AOTAutograd's cache is asked for, in the order of compilations, which end there or at our passes."""
    from torch._functorch._aot_autograd import autograd_cache

    made, keys = autograd_cache.autograd_cache_key, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        keys.append(made(*args, **kwargs)[0])
        raise Enough

    with (
        mock.patch.object(Halves, "joint_pass", mock.Mock(side_effect=Enough)),
        mock.patch.object(autograd_cache, "autograd_cache_key", noted),
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        yield keys


def compile_until_enough(model: nn.Module, tokens: int = 32, **options: Any) -> None:
    torch._dynamo.reset()
    with pytest.raises(Enough):
        torch.compile(model, backend=fp8, options=options)(torch.randn(tokens, 128))


class Other(nn.Module):
    """As Mlp, of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.up, self.down = torch.nn.functional.gelu, nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


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
        compile_until_enough(model, **options)
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
    with mock.patch("fp8compile.compat.inductor.sources_hash", lambda: "another"):
        others["sources"] = key(Mlp())
    with mock.patch("fp8compile.devices.formats.fnuz", lambda: True):
        others["encoding"] = key(Mlp())
    with mock.patch("fp8compile.devices.catalog.of", lambda _: catalog.find("h100")):
        others["description"] = key(Mlp())
    assert len({usual, *others.values()}) == 1 + len(others), (usual, others)


@pytest.mark.compat
def test_graphs_that_do_not_use_the_cache(asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def uses(model: nn.Module, **options: Any) -> bool:
        asked.clear()
        compile_until_enough(model, **options)
        return bool(asked)

    assert uses(Mlp()) == compat.options_by_thread()
    assert not uses(Mlp(), save="fp8")
    assert not uses(Mlp(), cache_weights=True)
    assert not uses(Mlp(), policy={"schedule": {"warmup_steps": 1}})
    for name, value in (("enable_autograd_cache", False), ("bundled_autograd_cache", True), ("strict_autograd_cache", True)):
        with torch._functorch.config.patch({name: value}):
            assert not uses(Mlp()), name
    for name, value in (("force_disable_caches", True), ("fx_graph_cache", False)):
        with torch._inductor.config.patch({name: value}):
            assert not uses(Mlp()), name
    monkeypatch.setenv("FP8COMPILE_DUMP", str(tmp_path / "dump"))
    assert not uses(Mlp())
    monkeypatch.delenv("FP8COMPILE_DUMP")
    asked.clear()
    torch._dynamo.reset()
    with pytest.raises(Enough):
        torch.compile(Mlp(), backend=fp8, dynamic=True)(torch.randn(32, 128))
    assert not asked
    with pytest.raises(Enough):
        torch.compile(Mlp(), backend=partial(fp8, inner=INTERPRETER))(torch.randn(32, 128))
    assert not asked


# -- what is kept -----------------------------------------------------------------------------------------------------------


def test_a_graph_of_plain_data_computes_the_same() -> None:
    from fp8compile.ir import ops

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q = ops.quantize(x, ops.amax(x).reciprocal(), torch.float8_e4m3fn, 448.0, False)
        values, _ = torch.max(x[:, 1:3], dim=1)
        return q.float() @ w, values, x.to(torch.bfloat16).view(-1)

    from torch.fx.experimental.proxy_tensor import make_fx

    x, w = torch.randn(16, 16), torch.randn(16, 16)
    graph = make_fx(function)(x, w)
    graph.graph.find_nodes(op="placeholder")[0].meta["fp8_operand"] = ("kept", 1)
    steps = pickle.loads(pickle.dumps(freeze(graph.graph)))
    made = thaw(steps)
    assert [node.name for node in made.graph.nodes] == [node.name for node in graph.graph.nodes]
    assert made.graph.find_nodes(op="placeholder")[0].meta["fp8_operand"] == ("kept", 1)
    for one, other in zip(boxed(Eager(made))([x, w]), graph(x, w), strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype


def test_what_cannot_be_written_is_not_kept() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.relu, (x,)),))
    with pytest.raises(Unfrozen, match="relu"):
        freeze(graph)
    made = torch.fx.GraphModule({}, graph)
    assert warm_start.packed(warm_start.Half(), made, None) is None
    with pytest.raises(Unusable):
        warm_start.unpacked(b"nothing")
    with pytest.raises(Unusable):
        warm_start.unpacked(pickle.dumps(1))
