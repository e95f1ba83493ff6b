"""A small model that is trained a few steps, and exported."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8compile

WORDS, WIDTH = 96, 128
FP8 = ("up", "down")  # layers of `Small`


class Small(nn.Module):
    """Layers of FP8, with a bias and without, and of high precision: an embedding, a norm, a small head."""

    def __init__(self, hidden: int = 256):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(functional.relu(self.norm(self.up(x)))))


def tokens(seed: int = 0, rows: int = 2, length: int = 16) -> Tensor:
    return torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module, steps: int = 3, recipe: Any = "delayed", **options: Any) -> Any:
    """The model compiled in place of a wrapper, after some steps of training. Evaluations are FP8, too."""
    policy = {"eval": "fp8", **options.pop("policy", {})}
    compiled = torch.compile(model, backend="fp8", options={"recipe": recipe, "policy": policy, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        functional.cross_entropy(compiled(tokens(step)).flatten(0, 1), tokens(step + 1).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return compiled


def exported(
    path: Path, recipe: str, model: nn.Module | None = None, steps: int = 1, **options: Any
) -> tuple[Any, Any, fp8compile.Exported]:
    """A trained model, its compiled wrapper, and the export in `path / "out"`."""
    model = model or Small()
    format = options.pop("format", None)
    compiled = trained(model, steps, recipe, **options)
    return model, compiled, fp8compile.export(model, path / "out", format)


def decompressed(directory: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """The weights of these layers, as compressed-tensors reads them; all have one scheme."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    from tests.support.served import config_of, tensors_of

    (scheme,) = QuantizationConfig.model_validate(config_of(directory)).config_groups.values()
    decompress = BaseCompressor.get_value_from_registry(scheme.format).decompress
    tensors, found = tensors_of(directory), {}
    for name in names:
        own = {last: tensors[f"{name}.{last}"] for last in ("weight", "weight_scale")}
        found[name] = decompress(own, scheme)["weight"]
    return found


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def next_forward(model: Any, ids: Tensor) -> Tensor:
    """What the next training call returns; the scaling state stays as it is."""
    with fp8compile.freeze_scaling_state():
        return model(ids).detach()


def evaluated(model: Any, ids: Tensor) -> Tensor:
    """The output in evaluation."""
    model.eval()
    with torch.no_grad():
        return model(ids)
