"""explain(), compare() and tune() amid a training: it goes on to the bit as without them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from tests.support import hooks, models
from tests.support.compared import WIDTH
from tests.support.harness import compiled, noise, scaling_tensors
from tests.support.times import Compiler

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


class Everything(nn.Module):
    """Changes all that a forward can change: in graphs BatchNorm statistics, and between them its input, an
    attribute, buffers, a counter, random numbers of torch and of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.BatchNorm1d(WIDTH), models.Mlp(), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.calls, self.last = 0, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(F.dropout(self.norm(self.doubled(x)), 0.2))
        return self.second(x) * self.factor()

    @torch._dynamo.disable
    def doubled(self, x: Tensor) -> Tensor:
        self.last = x.mul_(2)
        return self.last

    @torch._dynamo.disable
    def factor(self) -> Tensor:
        self.calls += 1
        self.steps = self.steps + random.randint(1, 5)
        self.norm.running_mean.add_(torch.rand(WIDTH))
        return torch.tensor(1 + random.random())


def everything_of(model: Everything, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that a training step reads or writes, as plain values, and what Dynamo has compiled."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list as entries

    tensors = {**model.state_dict(), **{f"{name}.grad": p.grad for name, p in model.named_parameters()}}
    tensors |= {f"scaling {name}": row for name, row in scaling_tensors(model).items()}
    for i, state in enumerate(optimizer.state.values()):
        tensors |= {f"{i}.{key}": x for key, x in state.items()}
    found: dict[str, Any] = {name: None if x is None else x.clone() for name, x in tensors.items()}
    found["random"], found["torch"] = random.getstate(), torch.get_rng_state().clone()
    found["report"], found["stats"] = str(fp8compile.report(model)), str(fp8compile.stats(model))
    found["calls"], found["last"], found["training"] = model.calls, model.last.clone(), model.training
    found["versions"] = [p._version for p in (*model.parameters(), *model.buffers())]
    found["ids"] = [id(x) for x in (*model.parameters(), *model.buffers())]
    codes = [Everything.forward.__code__, models.Mlp.forward.__code__]
    found["code"] = [id(code) for code in codes], [len(entries(code)) for code in codes]
    assert found["code"][1][0]
    return found


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    equal = (torch.equal(a[k], b[k]) if isinstance(a[k], Tensor) else a[k] == b[k] for k in a)
    return a.keys() == b.keys() and all(equal)


def training(look: Callable[..., None]) -> tuple[list[float], dict[str, Any]]:
    """Losses and the final state of a training, with a look behind a step, amid forward and backward, and
    ahead of a step. After the first step, nothing is compiled any more."""
    torch.manual_seed(0)
    random.seed(0)
    model = models.make(Everything)
    run = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for step in range(4):
        # an overflow: the next call is cold
        x = noise(16, WIDTH, seed=step, scale=30.0 if step == 2 else 1.0)
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            loss = to_one(run(x))
        if step == 2:
            look(run, model, optimizer)
        loss.backward()
        if step == 3:
            look(run, model, optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
        if step == 0:
            look(run, model, optimizer)
        losses.append(loss.item())
    return losses, everything_of(model, optimizer)


def to_one(y: Tensor) -> Tensor:
    return (y - 1).square().mean()


def compare(run: Any, x: Tensor) -> None:
    fp8compile.compare(run, x, loss=to_one)


def tune(run: Any, x: Tensor) -> None:
    with hooks.tuning(Compiler, ["rowwise"]):
        fp8compile.tune(run, x, loss=to_one, device="h100", max_error=0.9)


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("ask", [fp8compile.explain, compare, tune])
def test_a_training_is_the_same_to_the_bit(ask: Callable[..., Any]) -> None:
    """Also beside a question that fails. Neither the user's frames nor the counts of compilations change,
    also not for frames after a graph break."""
    seen = []

    def look(run: Any, model: Everything, optimizer: torch.optim.Optimizer) -> None:
        before, x = everything_of(model, optimizer), noise(16, WIDTH)
        ask(run, x)
        assert same(before, everything_of(model, optimizer)) and torch.equal(x, noise(16, WIDTH))
        if not seen:
            with pytest.raises(Exception, match="running_mean should contain 129"):
                ask(run, noise(16, WIDTH + 1))
            assert same(before, everything_of(model, optimizer))
        seen.append(run)

    losses, end = training(lambda *_: None)
    again, found = training(look)
    assert losses == again and len(seen) == 3
    # two runs have other tensors, and other numbers of graphs
    for of_the_run in ("ids", "versions", "report"):
        found.pop(of_the_run), end.pop(of_the_run)
    assert same(found, end)
