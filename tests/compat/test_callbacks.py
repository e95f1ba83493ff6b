"""Where Dynamo gives up what it has compiled, a warning says so with the cause."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fp8compile
from fp8compile.errors import StrictError

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("interpreted")]
SOME, ALL = "Calls that no compiled code fits", "All its calls"
LIMIT = {"fail_on_recompile_limit_hit": False, "recompile_limit": 3}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)

    def forward(self, x: Tensor | None, mode: str = "") -> Tensor | None:
        if mode == "loop":
            for _ in range(2):
                torch._dynamo.graph_break()
        return self.linear(x) * (1 + len(mode)) if x is not None else None


def modes(call: Any, x: Tensor) -> None:
    for mode in ("a", "b", "c"):
        call(x, mode)


CALLS: dict[str, tuple[Callable[[Any, Tensor], Any], str, str]] = {
    "the limit": (modes, "exceeding the recompile_limit cache size limit (currently set to 3)", SOME),
    "a graph break": (lambda call, x: call(x, "loop"), "mode == ''", ALL),
    "nothing to compute": (lambda call, x: call(None), "type of 'x'", ALL),
    "an error, suppressed": (lambda call, x: call(x[:, :1]), "size mismatch at index 1", ALL),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_warning_says_why(name: str, caplog: pytest.LogCaptureFixture) -> None:
    others, cause, lost = CALLS[name]
    model, x = Layer(), torch.ones(64, 128)
    call = torch.compile(model, backend="fp8", dynamic=False)
    suppressed = contextlib.suppress(RuntimeError) if "suppressed" in name else contextlib.nullcontext()
    config = torch._dynamo.config.patch(suppress_errors="suppressed" in name, **LIMIT)
    with config, caplog.at_level(logging.WARNING, "fp8compile"):
        compiled = call(x)
        assert not torch.equal(compiled, model(x)) and not caplog.records
        for _ in range(2):
            with suppressed:
                others(call, x)
        assert torch.equal(call(x), model(x) if lost == ALL else compiled)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("fp8compile")]
    assert len(said) == 1 and said[0].startswith("fp8: Layer: Dynamo no longer compiles forward (")
    assert cause in said[0] and f"{lost} run in eager mode" in said[0] and "\n" not in said[0], said


def test_with_strict_it_is_an_error() -> None:
    call = torch.compile(Layer(), backend="fp8", options={"strict": True})
    call(torch.ones(64, 128))
    with pytest.raises(StrictError, match=r"Dynamo no longer compiles forward .*strict=True"):
        call(None)


def test_under_ddp(one_process: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where DDPOptimizer puts a converter of its own in the place of Dynamo's."""
    call = torch.compile(DistributedDataParallel(Layer()), backend="fp8")
    with torch._dynamo.config.patch(**LIMIT), caplog.at_level(logging.WARNING, "fp8compile"):
        call(torch.ones(64, 128))
        modes(call, torch.ones(64, 128))
    assert [record for record in caplog.records if "Dynamo no longer compiles" in record.getMessage()]


def test_what_was_compiled_can_be_saved() -> None:
    call, x, file = torch.compile(Layer(), backend="fp8"), torch.ones(64, 128), io.BytesIO()
    made = call(x)
    torch.save(call, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), made)


class Disabled(nn.Module):
    """Calls `inner` in a function that Dynamo is not to trace, but for what it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Layer(), nn.Parameter(torch.eye(128))

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(x) + 1.0

    @torch.compiler.disable(recursive=False)
    def outside(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.scale


def test_what_is_disabled_stays_so() -> None:
    """Dynamo looks at the callers of its own code for that, from the second compilation on at ours."""
    model = Disabled()
    call = torch.compile(model, backend="fp8", dynamic=False)
    for rows in (32, 64, 96):
        call(torch.ones(rows, 128)).sum().backward()
    graphs = fp8compile.report(model).graphs
    assert len(graphs) == 3 and {x.fqn for graph in graphs for x in graph.matmuls} == {"inner.linear"}
