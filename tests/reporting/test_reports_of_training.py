"""The output that a user reads after compiling: `fp8compile.report()` to the letter, and one log line for
each compilation.

test_report.py tests the classes with hand-made records; here the records come from compiled models.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn as nn

import fp8compile
from fp8compile.reporting.report import Report
from tests.support import hooks
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
    return sorted(
        (r.fqn, r.gemm, r.m, r.n, r.k, r.decision, r.reason.split(":")[0], r.recipe) for r in report.matmuls
    )


def test_a_line_before_it_is_compiled(caplog) -> None:
    """Only one, and none where no code is generated."""
    train(torch.compile(Tiny(), backend="fp8"), 4, 16, 128)
    assert "fp8: compiling" not in caplog.text
    seen: list[str] = []
    with hooks.generating(lambda: seen.append(caplog.text)):
        for _ in range(2):
            torch.compiler.reset()
            train(torch.compile(Tiny(), backend="fp8"), 4, 16, 128)
    said = "fp8: compiling Tiny; the first calls take seconds to minutes"
    assert len(seen) == 4 and all(text.count(said) == 1 for text in seen)


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
    # FLOPs are proportional to weights' sizes: two of 128 x 256 are FP8; 32 x 128 and 512 x 128 are not
    assert report.fp8_flop_fraction == pytest.approx(2 * 256 / (2 * 256 + 32 + 512))
    table = str(report)
    for fqn in ("body.0", "body.2", "gate", "head"):
        assert re.search(rf"^{re.escape(fqn)}\s", table, re.MULTILINE), table
    assert "Tiny" in table and "delayed" in table and "under 128 wide" in table


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
    """It is in high precision, and that is said. An evaluation, and one that only passes gradients on, need
    no warning."""
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


# -- the log --


@pytest.mark.slow
def test_one_line_a_compile(caplog: pytest.LogCaptureFixture) -> None:
    """Another shape is another graph."""
    caplog.set_level("INFO", "fp8compile")
    model = Tiny()
    compiled = torch.compile(model, backend="fp8", dynamic=False)
    for tokens in (32, 32, 48, 32):
        train(compiled, 2, tokens, 128)
    told = [line for line in caplog.messages if "matmuls" in line]
    assert len(told) == 2 and all(
        "6 of 12 matmuls, 48.5% of matmul FLOPs; 6 kept: " in line for line in told
    ), caplog.messages
    found = [
        {(r.gemm, r.m, r.k) for r in graph.matmuls if r.fqn == "body.0"}
        for graph in fp8compile.report(model).graphs
    ]
    assert found == [{("fprop", 2 * n, 128), ("dgrad", 2 * n, 256), ("wgrad", 256, 2 * n)} for n in (32, 48)]


@pytest.mark.slow
def test_the_line_is_on_stderr_without_any_setup_and_importing_is_light():
    code = """
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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"fp8.*2 of 2 matmuls, 100\.0% of matmul FLOPs", done.stderr)) == 1, done.stderr
    assert done.stdout == ""
