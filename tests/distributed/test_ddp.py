"""DDPOptimizer cuts a graph at the ends of buckets, and each part decides and computes as the whole would."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fp8compile
from tests.distributed.ranks import build
from tests.support.harness import histories
from tests.support.hooks import slots_of
from tests.support.models import Attention, SwiGlu

pytestmark = pytest.mark.usefixtures("interpreted")
WIDTH, WORDS = 256, 512  # a weight of 512 x 256 is half a bucket: the smallest bucket has 1 MiB


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


class Trained(NamedTuple):
    graphs: int
    decisions: dict[tuple[str, str], tuple[str, ...]]
    histories: dict[tuple[str, str, int], tuple[list[float], float]]
    gradients: list[dict[str, Tensor]]


def trained(kind: type[nn.Module] | None, cut: bool, steps: int) -> Trained:
    torch._dynamo.reset()  # otherwise the second model would run the first one's code
    torch.manual_seed(0)
    model, found = kind() if kind else build("over buckets"), []
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1) if cut else model
    call: Any = torch.compile(wrapped, backend="fp8")
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        x = torch.randint(WORDS, (2, 16)) if kind else torch.randn(16, WIDTH) * (1 + step / 4)
        call(x).square().mean().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    records = fp8compile.report(model).matmuls
    decisions = {
        (r.fqn, r.gemm): (r.decision, r.reason, r.rule, r.recipe) for r in records if r.gemm != "matmul"
    }
    return Trained(len(fp8compile.report(model).graphs), decisions, histories(model), found)


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize(
    "kind", [None, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (Llama, Tied, Routed))]
)
def test_a_graph_that_ddp_splits(one_process: str, kind: type[nn.Module] | None) -> None:
    """Decisions, reasons, recipes and state of the parts are those of the whole. So gradients have the same
    bits. (After an overflow only the part that overflowed runs cold, but here nothing overflows.)"""
    steps = 3 if kind else 2
    whole, cut = trained(kind, False, steps), trained(kind, True, steps)
    assert whole.graphs == 1 < cut.graphs
    assert cut.decisions == whole.decisions
    telling = {
        Llama: ("mlp.down", "down projection"),
        Tied: ("output", "output head"),
        Routed: ("choose", "router gate"),
    }
    if kind in telling:
        module, rule = telling[kind]
        assert cut.decisions[module, "fprop"][2] == rule
    for one, other in zip(whole.gradients, cut.gradients, strict=True):
        assert all(torch.equal(gradient, other[name]) for name, gradient in one.items())
    # if two parts read a tensor, each part quantizes it and has its own slot
    extra = cut.histories.keys() - whole.histories.keys()
    assert all(role == "input" for _, role, _ in extra) and (kind is not Llama or not extra)
    assert {key: cut.histories[key] for key in whole.histories} == whole.histories


@pytest.mark.slow
def test_phases_and_layers_of_a_graph_that_ddp_splits(one_process: str) -> None:
    """Parts have both phases, and histories move in both. First and last layers are those of the model."""
    model = build("over buckets")
    rules = [{"layers": "first 1", "fp8": "off"}, {"layers": "last 1", "fp8": "off"}]
    policy = {"rules": rules, "extends": "none", "schedule": {"warmup_steps": 2}}
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    run: Any = torch.compile(ddp, backend="fp8", options={"policy": policy, "reduce_amax": True})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        run(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert {sum(amax > 0 for amax in slot.history()) for slot in slots_of(model).values()} == {step + 1}
    report = fp8compile.report(model)
    assert len(report.graphs) > 1
    kept = {record.fqn for record in report.matmuls if record.decision != "fp8"}
    assert kept == {"blocks.0.up", "out"}
