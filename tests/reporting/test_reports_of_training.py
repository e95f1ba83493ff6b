"""The output that a user reads after compiling: `fp8compile.report()` to the letter, and one log line for each compilation.

test_report.py tests the classes with hand-made records; here the records come from compiled models.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.nn as nn

import fp8compile
from fp8compile.reporting.report import Report
from tests.support.harness import noise
from tests.support.models import Mlp

pytestmark = pytest.mark.usefixtures("interpreted")


class Tiny(nn.Module):
    """body: 128 -> 256 -> 128 with a GELU, gate: 128 -> 32, head: 128 -> 512; on [batch, tokens, 128]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
        self.gate, self.head = nn.Linear(128, 32, bias=False), nn.Linear(128, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.body(x)
        return self.head(h * self.gate(h).mean(-1, keepdim=True))


def train(compiled, *shape: int) -> None:
    compiled(noise(*shape).requires_grad_()).sum().backward()


def rows(report: Report) -> list[tuple]:
    return sorted((r.fqn, r.gemm, r.m, r.n, r.k, r.decision, r.reason.split(":")[0], r.recipe) for r in report.matmuls)


TINY_ROWS = sorted(
    (fqn, gemm, *size, *decided)
    for fqn, n, k, decided in [
        ("body.0", 256, 128, ("fp8", "", "delayed")),
        ("body.2", 128, 256, ("fp8", "", "delayed")),
        ("gate", 32, 128, ("high_precision", "under 128 wide", "")),
        ("head", 512, 128, ("high_precision", "output head", "")),
    ]
    for gemm, size in (("fprop", (64, n, k)), ("dgrad", (64, k, n)), ("wgrad", (n, k, 64)))
)


@pytest.mark.slow
def test_every_field_of_a_small_model():
    model = Tiny()
    compiled = torch.compile(model, backend="fp8")
    train(compiled, 2, 32, 128)
    report = fp8compile.report(model)
    assert rows(report) == rows(fp8compile.report(compiled)) == rows(fp8compile.report()) == TINY_ROWS
    assert report.opaque == [] and len(report.graphs) == 1
    assert all(r.batch == 1 and not r.dynamic and r.flops == 2 * r.m * r.n * r.k for r in report.matmuls)
    # FLOPs are proportional to the sizes of the weights: two of 128 x 256 are FP8; 32 x 128 and 512 x 128 are not
    assert report.fp8_flop_fraction == pytest.approx(2 * 256 / (2 * 256 + 32 + 512))
    texts = "6 of 12 matmuls, 48.5% of matmul FLOPs; 6 kept: ", "3 output head", "3 under 128 wide"
    assert all(text in report.summary() for text in texts)
    table = str(report)
    for fqn in ("body.0", "body.2", "gate", "head"):
        assert re.search(rf"^{re.escape(fqn)}\s", table, re.MULTILINE), table
    assert "Tiny" in table and "delayed" in table and "under 128 wide" in table


@pytest.mark.slow
def test_two_models_of_one_class():
    """They may share code, but not reports; and a report keeps no model alive."""
    first, model = Mlp(), Mlp()
    for each in (first, model):
        train(torch.compile(each, backend="fp8"), 16, 128)
        assert len(fp8compile.report(each).matmuls) == 6, str(fp8compile.report())
    known = len(fp8compile.report().matmuls)
    gone = weakref.ref(model.up.weight)
    del model, each
    gc.collect()
    assert gone() is None and len(fp8compile.report().matmuls) == known


@pytest.mark.slow
def test_dynamic_shape():
    model = Mlp()
    compiled = torch.compile(model, backend="fp8", dynamic=True)
    for tokens in (24, 40):
        train(compiled, tokens, 128)
    report = fp8compile.report(model)
    assert len(report.graphs) == 1 and all(r.dynamic for r in report.matmuls)
    assert {r.gemm: r.symbolic for r in report.matmuls} == {"fprop": "m", "dgrad": "m", "wgrad": "k"}
    assert rows(report) == sorted(
        (fqn, gemm, *size, "fp8", "", "delayed")
        for fqn, n, k in (("up", 256, 128), ("down", 128, 256))
        for gemm, size in (("fprop", (24, n, k)), ("dgrad", (24, k, n)), ("wgrad", (n, k, 24)))
    )


@pytest.mark.slow
def test_inference_and_evaluation_are_in_it_with_their_reason():
    model = Mlp()
    compiled = torch.compile(model, backend="fp8")
    with torch.no_grad():
        compiled(noise(16, 128))
    train(compiled, 16, 128)
    model.eval()
    train(compiled, 16, 128)
    reasons = {}
    for graph in fp8compile.report(model).graphs:
        assert {r.fqn for r in graph.matmuls} == {"up", "down"}
        reasons[len(graph.matmuls), tuple(sorted({r.reason.split(":")[0] for r in graph.matmuls}))] = graph
    assert set(reasons) == {(2, ("inference",)), (6, ("",)), (6, ("eval mode",))}
    for (_, why), graph in reasons.items():
        assert {r.decision for r in graph.matmuls} == {"fp8" if why == ("",) else "high_precision"}
        assert bool(graph.note) == (why != ("",))


def test_a_model_that_trains_in_eval_mode(caplog: pytest.LogCaptureFixture) -> None:
    """It is in high precision, and that is said. An evaluation, and one that only passes gradients on, need no warning."""
    caplog.set_level("WARNING", "fp8compile")
    model = Mlp().eval()
    with torch.no_grad():
        torch.compile(model, backend="fp8", options={"strict": True})(noise(16, 128))
    frozen = nn.Sequential(nn.Linear(128, 128)).eval().requires_grad_(False)
    train(torch.compile(frozen, backend="fp8"), 16, 128)
    assert not caplog.records
    train(torch.compile(model, backend="fp8"), 16, 128)
    (record,) = caplog.records
    assert "Mlp is in eval mode, and the gradients of its weights are computed" in record.getMessage()
    torch._dynamo.reset()
    with pytest.raises(fp8compile.StrictError, match="trains in high precision"):
        train(torch.compile(model, backend="fp8", options={"strict": True}), 16, 128)


@pytest.mark.slow
def test_what_autograd_does_not_compute_is_not_there_and_what_is_not_fp8_has_a_reason():
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128).requires_grad_(False))
    torch.compile(model, backend="fp8")(noise(16, 128)).sum().backward()
    gemms = sorted((r.fqn, r.gemm) for r in fp8compile.report(model).matmuls)
    assert gemms == [("0", "fprop"), ("0", "wgrad"), ("1", "dgrad"), ("1", "fprop")]
    model = Mlp()
    train(torch.compile(model, backend="fp8", options={"override_linear_precision": (False, True, False)}), 16, 128)
    for r in fp8compile.report(model).matmuls:
        assert r.reason.startswith("override_linear_precision") == (r.decision == "high_precision") == (r.gemm == "dgrad")


# -- the log -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The package's log lines at INFO and above, as its own handlers receive them."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.INFO:
                found.append(record.getMessage())

    handler = Keep()
    logging.getLogger("fp8compile").addHandler(handler)
    yield found
    logging.getLogger("fp8compile").removeHandler(handler)


@pytest.mark.slow
def test_one_line_a_compile(lines):
    """Another shape is another graph."""
    model = Tiny()
    compiled = torch.compile(model, backend="fp8", dynamic=False)
    for tokens in (32, 32, 48, 32):
        train(compiled, 2, tokens, 128)
    told = [line for line in lines if "matmuls" in line]
    assert len(told) == 2 and all("6 of 12 matmuls, 48.5% of matmul FLOPs; 6 kept: " in line for line in told), lines
    found = [{(r.gemm, r.m, r.k) for r in graph.matmuls if r.fqn == "body.0"} for graph in fp8compile.report(model).graphs]
    assert found == [{("fprop", 2 * n, 128), ("dgrad", 2 * n, 256), ("wgrad", 256, 2 * n)} for n in (32, 48)]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a separate Python process with one thread; the test fails if the process fails."""
    path = os.pathsep.join([str(p) for p in sys.path if p])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


@pytest.mark.slow
def test_the_line_is_on_stderr_without_any_setup_and_importing_is_light():
    done = run_python(
        """
        import sys
        import torch

        before = set(sys.modules)
        import fp8compile, fp8compile.reporting.report, fp8compile.config.options
        heavy = ("torch._inductor", "torch._dynamo", "triton")
        assert not [name for name in set(sys.modules) - before if name.startswith(heavy)]
        fp8compile.export
        assert not {"safetensors", "huggingface_hub", "transformers"} & set(sys.modules)

        from tests.support import hooks
        with hooks.interpreted():
            torch.compile(torch.nn.Linear(128, 128), backend="fp8")(torch.randn(16, 128)).sum().backward()
        """
    )
    assert len(re.findall(r"fp8.*2 of 2 matmuls, 100\.0% of matmul FLOPs", done.stderr)) == 1, done.stderr
    assert done.stdout == ""


# -- compiled for real ---------------------------------------------------------------------------------------------------------

WARM = """
    import sys
    import torch
    import torch._inductor.config as config
    from torch._dynamo.utils import counters
    import fp8compile
    from fp8compile import process
    from fp8compile.backend import fp8
    from fp8compile.runtime.ledger import Ledger

    config.fx_graph_cache = True
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Tanh())
    x = torch.randn(32, 128)
    for attempt in range(int(sys.argv[1])):
        torch._dynamo.reset()
        process.of(Ledger).clear()
        counters.clear()
        compiled = torch.compile(model, backend=fp8)
        for _ in range(3):
            compiled(x).square().mean().backward()
        report = fp8compile.report(model)
        rows = sorted((r.fqn, r.gemm, r.m, r.n, r.k, r.decision, r.reason, r.recipe) for r in report.matmuls)
        print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"], rows, sep="|")
    from fp8compile.runtime.state import slots_of
    print(sorted(sum(value != 0 for value in slot.history()) for slot in slots_of(model).values()))
"""


@pytest.mark.weekly
@pytest.mark.compiled
def test_the_report_is_right_when_the_compile_came_from_a_warm_cache(tmp_path):
    """Compiles twice in one process, then in another one: cache misses, then only hits; equal reports; the state moves."""

    def run(attempts: int) -> tuple[list[tuple[int, int, str]], str]:
        code = textwrap.dedent(WARM).replace("sys.argv[1]", repr(str(attempts)))
        *attempts_out, slots = run_python(code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).stdout.splitlines()
        return [(int(hit), int(miss), found) for hit, miss, found in (line.split("|") for line in attempts_out)], slots

    (cold, same_process), moved_twice = run(2)
    ((*counts, other_process),), moved_once = run(1)
    hits, misses = counts
    assert cold[1] > 0 and cold[0] == 0
    assert same_process[0] == cold[1] and same_process[1] == 0
    assert hits == cold[1] and misses == 0
    assert cold[2] == same_process[2] == other_process and cold[2].count("'fp8'") == 2  # the data has no dgrad
    # three training calls each: six for the parameters of two compilations, three in the other process
    assert moved_twice == "[6, 6, 6]" and moved_once == "[3, 3, 3]"


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("mode", ["default", "max-autotune", "reduce-overhead"])
def test_modes_are_accepted(mode):
    model = nn.Sequential(nn.Linear(128, 128))
    train(torch.compile(model, backend="fp8", mode=mode), 32, 128)
    assert [r.decision for r in fp8compile.report(model).matmuls] == ["fp8"] * 3
