"""For warm starts: `scene` trains a small model, and gives all that a second compilation must repeat."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fp8compile
from tests.support import hooks
from tests.support.harness import digest, scaling_tensors


class Small(nn.Linear):
    """One layer: compiling it for a CPU takes few kernels."""

    options: Mapping[str, Any] = {}

    def __init__(self) -> None:
        super().__init__(128, 128, bias=False)


class Timed(Small):
    """With a rule that holds from the second step on."""

    late = {"name": "late", "gemm": "fprop", "during": "1..", "fp8": "off"}
    options = {"policy": {"extends": "none", "rules": [late, {"fp8": "on"}]}, "recipe": "delayed"}


class Checkpointed(Small):
    """With dropout and a residual, in a checkpoint."""

    def inner(self, x: Tensor) -> Tensor:
        return x + F.dropout(super().forward(x), 0.1, self.training)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def counts() -> dict[str, int]:
    """What AOTAutograd's cache has counted."""
    found = counters["aot_autograd"]
    return {name: found[f"autograd_cache_{name}"] for name in ("hit", "miss", "saved", "bypass")}


def scene(kind: type[nn.Module]) -> dict[str, Any]:
    """Train, evaluate and measure a new model."""
    torch.manual_seed(0)
    model = kind()
    compiled = torch.compile(model, backend="fp8", options=dict(kind.options))  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, Any] = {"losses": [], "gradients": [], "state": []}

    def note(*losses: Tensor) -> None:
        seen["losses"] += [loss.item().hex() for loss in losses]
        seen["gradients"].append(digest(*(p.grad for p in model.parameters())))
        state = scaling_tensors(model)
        seen["state"].append([sorted(state), digest(*(state[name] for name in sorted(state)))])

    def loss() -> Tensor:
        return compiled(torch.randn(64, 128)).square().mean()

    for _ in range(3):  # gradients of two calls in a row are added
        for _ in range(2):
            made = loss()
            made.backward()
            note(made)
        optimizer.step()
        optimizer.zero_grad()
    one, other = loss(), loss()  # two forwards, then two backwards
    other.backward()
    one.backward()
    note(one, other)
    model.eval()
    with torch.no_grad():
        seen["evaluation"] = [loss().item().hex() for _ in range(2)]
    model.train()
    fp8compile.stats(model, measure=True)
    made = loss()
    made.backward()
    note(made)
    seen["measured"] = [repr(row) for row in fp8compile.stats(model).rows()]
    seen["stats"] = str(fp8compile.stats(model))
    report = fp8compile.report(model)
    # a process numbers its graphs
    seen["report"] = [re.sub(r"(?m)^graph \d+:", "graph:", str(report)), report.summary()]
    seen["forwards"] = [hooks.forwards_of(p) for p in model.parameters()]
    return seen
