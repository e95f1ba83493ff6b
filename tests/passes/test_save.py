"""`save="fp8"`: what forward keeps for backward in FP8 (`passes.save`). Outputs and state are those without it, to the bit, and
each gradient is as exact."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile.dryrun import fake_gpu
from fp8compile.passes import save
from tests.support.harness import ALL_FP8, compiled, grads_of, histories, interpreted, leaf, noise, sqnr
from tests.support.models import Block, Checkpointed, GptLayer, LlamaLayer, Mlp, Stack, SwiGlu, make

__all__ = ["interpreted"]
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: Stack(*(LlamaLayer(128, 4, 2, 256) for _ in range(2))),
    "gpt": lambda: Stack(*(GptLayer(128, 4, causal=True) for _ in range(2))),
    "vit": lambda: Stack(*(GptLayer(128, 4, causal=False) for _ in range(2))),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of a test is large."""
    monkeypatch.setattr(save, "LEAST", 0)
    torch._dynamo.reset()


class Twins:
    """A model compiled without and with `save`; both take the same steps."""

    def __init__(self, model: nn.Module, wrap: Callable[[nn.Module], Callable[..., Any]] = lambda model: model, **options: Any):
        self.models = [model, copy.deepcopy(model)]
        how = {"policy": ALL_FP8, **options}
        self.compiled = [compiled(wrap(x), save=kind, **how) for x, kind in zip(self.models, ("auto", "fp8"), strict=True)]

    def __call__(self, *inputs: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
        """(output, the inputs as leaves) of each; outputs are equal to the bit."""
        made = []
        for function in self.compiled:
            leaves = [leaf(x) for x in inputs]
            made.append((function(*leaves), leaves))
        assert torch.equal(made[0][0], made[1][0])
        return made

    def step(self, *inputs: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The gradients of each."""
        made = self(*inputs)
        for out, _ in made:
            out.square().mean().backward()
        return tuple(grads_of(model, leaves) for model, (_, leaves) in zip(self.models, made, strict=True))  # type: ignore

    def kept(self) -> list[fp8compile.Report]:
        return [record for graph in fp8compile.report(self.models[1]).graphs for record in graph.kept]

    def same_state(self) -> None:
        one, other = map(histories, self.models)
        assert one.keys() == other.keys()

    def zero(self) -> None:
        for model in self.models:
            model.zero_grad()


def exact(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model = copy.deepcopy(model).double()
    x = leaf(x.double())
    model(x).square().mean().backward()
    return grads_of(model, [x])


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("name", list(MODELS))
def test_gradients_are_as_exact(interpreted, name: str, dtype: torch.dtype) -> None:
    """Within 1 dB against high precision, in the mean of some steps: a single one depends on luck."""
    model = make(MODELS[name], dtype)
    twins = Twins(model)
    noises: dict[str, list[float]] = {}
    for number in range(12):
        x = noise(4, 128, 128, seed=number, dtype=dtype)
        expected = exact(model, x)
        without, with_ = twins.step(x)
        twins.zero()
        if number:  # the first step is cold
            for key, tensor in expected.items():
                sums = noises.setdefault(key, [0.0, 0.0])
                for i, grads in enumerate((without, with_)):
                    sums[i] += float((grads[key].double() - tensor).square().sum() / tensor.square().sum())
    assert twins.kept()
    worst = {key: 10 * math.log10(with_ / without) for key, (without, with_) in noises.items()}
    print(name, dtype, {k: round(v, 2) for k, v in sorted(worst.items(), key=lambda x: -x[1])[:8]})
    assert max(worst.values()) <= 1.0, worst
