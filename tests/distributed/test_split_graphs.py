"""DDPOptimizer cuts a graph at the ends of its buckets: each part decides as the whole graph would."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fp8compile
from fp8compile import compat
from fp8compile.runtime.state import slots_of
from tests.support.harness import interpreted
from tests.support.models import Attention, SwiGlu
from tests.support.processes import on_ranks

WIDTH, WORDS = 256, 512  # a weight of 512 x 256 is half a bucket: the smallest bucket has 1 MiB
STEPS = 3


class Llama(nn.Module):
    """Buckets are filled from the end: head and down projection fill one, up and gate the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.attention, self.mlp = Attention(WIDTH), SwiGlu(WIDTH, 512)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return self.output(self.norms[2](x))


class Tied(Llama):
    """One part looks up the table; another part multiplies by it, and other operators follow that matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.output.weight = self.embed.weight
        self.after = nn.Linear(WORDS, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.after(super().forward(tokens).tanh())


class Routed(nn.Module):
    """The gate is in one part, the softmax of its output in another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.choose = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 128)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 1024) for _ in range(2))
        self.output = nn.Linear(1024, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        logits = self.choose(x)
        outputs = [expert(x) for expert in self.experts]
        weights = logits.softmax(-1)
        return self.output(sum(weights[..., i, None] * y for i, y in enumerate(outputs)))


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def decisions(model: nn.Module) -> dict[tuple[str, str], tuple[str, ...]]:
    records = fp8compile.report(model).matmuls
    return {(r.fqn, r.gemm): (r.decision, r.reason, r.rule, r.recipe) for r in records if r.gemm != "matmul"}


def train(model: nn.Module, run: Any, rank: int = 0) -> list[dict[str, Tensor]]:
    """Trains; returns the gradients of each step."""
    found = []
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        model.zero_grad()
        with interpreted():
            run(torch.randint(WORDS, (2, 16))).square().mean().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return found


class Trained(NamedTuple):
    graphs: int
    decisions: dict[tuple[str, str], tuple[str, ...]]
    histories: dict[tuple[str, str, int], list[float]]
    gradients: list[dict[str, Tensor]]


def trained(kind: type[nn.Module], cut: bool, rank: int = 0) -> Trained:
    torch._dynamo.reset()  # otherwise the second model would run the first one's code
    model = build(kind)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1) if cut else model
    gradients = train(model, torch.compile(wrapped, backend="fp8"), rank)
    histories = {key: slot.history() for key, slot in slots_of(model).items()}
    return Trained(len(fp8compile.report(model).graphs), decisions(model), histories, gradients)


def both(kind: type[nn.Module]) -> tuple[Trained, Trained]:
    """A model that is compiled as a whole, and an equal one that is cut."""
    whole, cut = trained(kind, cut=False), trained(kind, cut=True)
    assert whole.graphs == 1 < cut.graphs
    return whole, cut


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", [Llama, Tied, Routed])
def test_parts_decide_as_the_whole_does(one_process, kind: type[nn.Module]) -> None:
    """Decisions, reasons and recipes are equal. So gradients have the same bits, also with delayed scaling."""
    whole, cut = both(kind)
    assert cut.decisions == whole.decisions
    telling = {Llama: ("mlp.down", "down projection"), Tied: ("output", "output head"), Routed: ("choose", "router gate")}
    module, rule = telling[kind]
    assert cut.decisions[module, "fprop"][2] == rule
    for one, other in zip(whole.gradients, cut.gradients, strict=True):
        assert all(torch.equal(gradient, other[name]) for name, gradient in one.items())
    # if two parts read a tensor, each part quantizes it and has its own slot
    extra = cut.histories.keys() - whole.histories.keys()
    assert all(role == "input" for _, role, _ in extra) and (kind is not Llama or not extra)
    assert {key: cut.histories[key] for key in whole.histories} == whole.histories


@pytest.mark.timeout(180)
def test_a_whole_that_cannot_be_traced(one_process, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the whole graph cannot be traced, each part decides from its own nodes."""

    def fails(gm: Any) -> Any:
        raise RuntimeError("an operator without a fake kernel")

    monkeypatch.setattr(compat, "forward_of", fails)
    whole, cut = both(Llama)
    assert "mlp.down" in {key[0] for key, found in cut.decisions.items() if found != whole.decisions[key]}


@pytest.mark.timeout(180)
def test_the_whole_is_traced_once(one_process, monkeypatch: pytest.MonkeyPatch) -> None:
    traced, trace = [], compat.forward_of
    monkeypatch.setattr(compat, "forward_of", lambda gm: traced.append(gm) or trace(gm))
    both(Llama)
    assert len(traced) == 1


def _worker(rank: int) -> tuple[Any, ...]:
    return tuple(trained(Llama, cut=True, rank=rank))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes(tmp_path) -> None:
    """Both processes decide as one process with the whole graph. Gradients are the means of two such processes' gradients."""
    both_ranks = on_ranks(2, tmp_path, _worker)
    replicas = [trained(Llama, cut=False, rank=rank) for rank in range(2)]
    for rank in range(2):
        found = Trained(*both_ranks[rank])
        assert found.graphs > 1 and found.decisions == replicas[rank].decisions
        assert found.histories == replicas[rank].histories
        for step, gradients in enumerate(found.gradients):
            for name, gradient in gradients.items():
                mean = (replicas[0].gradients[step][name] + replicas[1].gradients[step][name]) / 2
                assert torch.equal(gradient, mean), (step, name)
