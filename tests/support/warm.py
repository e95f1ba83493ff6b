"""One process of the tests of warm starts: it trains a small model and prints, as JSON, all that a second process must repeat.

    python -m tests.support.warm RECIPE MODELS [CHANGE]

MODELS are classes below, separated by commas. CHANGE is Python that runs before they are compiled: a fact that differs from
that of another process.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile.runtime import forwards
from fp8compile.runtime.probe import Measurement
from tests.support.models import Mlp


class Model(nn.Module):
    """An MLP with dropout and a residual; [tokens, width] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.drop = nn.LayerNorm(128), Mlp(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


class Checkpointed(Model):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def digest(tensors: Any) -> str:
    """Of the bits of tensors."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(x.detach().contiguous().view(torch.uint8).numpy().tobytes() if x is not None else b"none")
    return found.hexdigest()[:16]


def scene(kind: type[Model], options: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """Train, evaluate and measure a new model."""
    torch.manual_seed(0)
    model = kind()
    compiled = torch.compile(model, backend="fp8", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, Any] = {"losses": [], "gradients": [], "state": []}

    def note(*losses: Tensor) -> None:
        seen["losses"] += [loss.item().hex() for loss in losses]
        seen["gradients"].append(digest(p.grad for p in model.parameters()))
        state = fp8compile.scaling_state(model)
        seen["state"].append([sorted(state), digest(state[name] for name in sorted(state))])

    def loss() -> Tensor:
        return compiled(torch.randn(64, 128)).square().mean()

    for _ in range(steps):  # gradients of two calls in a row are added
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
    measured = Measurement(model).begin()
    made = loss()
    made.backward()
    measured.end()
    note(made)
    records = [pair for record in measured.records.values() for pair in record.items()]
    seen["measured"] = sorted((str(name), digest([numbers])) for name, numbers in records)
    seen["stats"] = str(fp8compile.stats(model))
    seen["report"] = [str(fp8compile.report(model)), fp8compile.report(model).summary()]
    seen["forwards"] = [[str(known.forward) for known in forwards.of(p)] for p in model.parameters()]
    return seen


def main(recipe: str, models: str, change: str = "") -> None:
    torch.set_num_threads(1)
    exec(change)
    found = {name: scene(globals()[name], {"recipe": recipe}) for name in models.split(",")}
    cache = {name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss", "saved", "bypass")}
    print(json.dumps({"found": found, "cache": cache}))


if __name__ == "__main__":
    main(*sys.argv[1:])
