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


FP8 = ("fp8", "", "delayed")


def of_linears(tokens: int, linears: dict[str, tuple]) -> list[tuple]:
    """The rows of linears, by name: features out and in, decision, reason, recipe."""
    found = []
    for fqn, (n, k, *decided) in linears.items():
        gemms = {"fprop": (tokens, n, k), "dgrad": (tokens, k, n), "wgrad": (n, k, tokens)}
        found += [(fqn, gemm, *size, *decided) for gemm, size in gemms.items()]
    return sorted(found)


@pytest.mark.slow
def test_every_field_of_a_small_model():
    model = Tiny()
    compiled = torch.compile(model, backend="fp8")
    train(compiled, 2, 32, 128)
    linears = {"body.0": (256, 128, *FP8), "body.2": (128, 256, *FP8)}
    linears["gate"] = (32, 128, "high_precision", "under 128 wide", "")
    linears["head"] = (512, 128, "high_precision", "output head", "")
    report = fp8compile.report(model)
    for found in (report, fp8compile.report(compiled), fp8compile.report()):
        assert rows(found) == of_linears(64, linears)
    assert report.opaque == [] and len(report.graphs) == 1
    assert all(r.batch == 1 and not r.dynamic and r.flops == 2 * r.m * r.n * r.k for r in report.matmuls)


@pytest.mark.slow
def test_dynamic_shape():
    model = Mlp()
    compiled = torch.compile(model, backend="fp8", dynamic=True)
    for tokens in (24, 40):
        train(compiled, tokens, 128)
    report = fp8compile.report(model)
    assert len(report.graphs) == 1 and all(r.dynamic for r in report.matmuls)
    assert {r.gemm: r.symbolic for r in report.matmuls} == {"fprop": "m", "dgrad": "m", "wgrad": "k"}
    assert rows(report) == of_linears(24, {"up": (256, 128, *FP8), "down": (128, 256, *FP8)})


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
    assert len(told) == 2, caplog.messages
    assert all("6 of 12 matmuls, 48.5% of matmul FLOPs; 6 kept: " in line for line in told)
    first, second = fp8compile.report(model).graphs
    assert {r.m for r in first.matmuls if r.gemm == "fprop"} == {2 * 32}
    assert {r.m for r in second.matmuls if r.gemm == "fprop"} == {2 * 48}


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
