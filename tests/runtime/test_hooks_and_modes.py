"""Calls in the user's checkpoints, dispatch modes and retained graphs, and calls that are not training."""

from __future__ import annotations

import pytest
import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp8compile
from tests.support.harness import Dispatched, scaling_tensors
from tests.support.hooks import slots_of

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.compat]
OFF = {"policy": {"extends": "none", "rules": [{"module": "*", "fp8": "off"}]}}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(1, 128, 128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x[None], self.w)


@pytest.mark.parametrize("options", [{}, {"recipe": "tensorwise"}, OFF])
def test_an_output_of_one_batch_is_no_view(options: dict) -> None:
    """The caller may change the output in place, after cold and after warm calls."""
    model = Expert()
    run, x = torch.compile(model, backend="fp8", options=options), torch.randn(32, 128)
    for _ in range(4):
        y = run(x)
        assert not y._is_view()
        y.add_(1)
        y.square().sum().backward()
    assert all(slot.history()[3] > 0 for slot in slots_of(model).values())


def save_matmuls(_ctx, op, *_args, **_kwargs) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE
    )


@pytest.mark.parametrize("options", [{}, {"recipe": "rowwise"}])
def test_selective_checkpoint_around_a_compiled_block(options: dict) -> None:
    """The user's dispatch mode does not see the state's update; gradients are as without a checkpoint."""
    grads = []
    for selective in (False, True):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
        run = torch.compile(block, backend="fp8", options=options)
        for step in range(3):
            block.zero_grad()
            x = torch.randn(32, 128, generator=torch.Generator().manual_seed(step), requires_grad=True)
            if selective:
                contexts = lambda: create_selective_checkpoint_contexts(save_matmuls)  # noqa: E731
                y = checkpoint(run, x, use_reentrant=False, context_fn=contexts)
            else:
                y = run(x)
            y.sin().sum().backward()
            grads.append([x.grad, *(p.grad for p in block.parameters())])
    for plain, checkpointed in zip(grads[:3], grads[3:], strict=True):
        for a, b in zip(plain, checkpointed, strict=True):
            assert torch.equal(a, b)


def test_a_dispatch_mode_sees_the_same_in_cold_calls_and_in_warm_ones() -> None:
    """The mode sees a compiled graph as one call, whether the call is cold or warm."""
    block = nn.Linear(128, 128)
    run, x = torch.compile(block, backend="fp8"), torch.randn(32, 128)
    run(x).sum().backward()
    seen = []
    for factor in (1.0, 1.0, 40.0, 40.0):  # the third one overflows, and the fourth one is cold
        with Dispatched() as mode:
            run(x * factor).sum()
        seen.append(mode.names)
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert not [op for op in seen[0] if "fp8compile" in op or "clone" in op or "mm" in op]


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_second_backward_through_a_checkpoint(recipe: str) -> None:
    """The second backward recomputes, too, with the scales of the first; the history has moved once."""
    block = nn.Linear(128, 128)
    run = torch.compile(block, backend="fp8", options={"recipe": recipe})
    with torch._functorch.config.patch(donated_buffer=False):  # torch's own condition for retain_graph
        for n in (1.0, 2.0, 3.0, 4.0):
            x = (torch.randn(32, 128) * n).requires_grad_()
            y = checkpoint(run, x, use_reentrant=False)
            if n < 4:
                y.sin().sum().backward()
        block.zero_grad()

        def histories() -> dict:
            return {key: slot.history() for key, slot in slots_of(block).items() if key[1] != "gradient"}

        loss = y.sin().sum()
        loss.backward(retain_graph=True)
        first, before = [x.grad, block.weight.grad], histories()
        x.grad = block.weight.grad = None
        loss.backward()
    assert histories() == before
    assert all(map(torch.equal, first, [x.grad, block.weight.grad]))


@pytest.mark.feature("delayed")
def test_a_dry_run_moves_nothing() -> None:
    """Garbage inputs of a dry run change neither a cold state nor a warm one."""
    model, twin = nn.Linear(128, 128), nn.Linear(128, 128)
    twin.load_state_dict(model.state_dict())
    runs = [torch.compile(m, backend="fp8") for m in (model, twin)]
    garbage = torch.full((32, 128), 1e30)
    for step in range(5):
        x = torch.randn(32, 128)
        with fp8compile.freeze_scaling_state():
            outside = runs[0](garbage if step % 2 else garbage * 0)
        outside.sum().backward()  # the backward after the dry run moves nothing, either
        with fp8compile.freeze_scaling_state():
            dry = runs[0](x)
            dry.square().sum().backward()
        model.zero_grad()
        results = []
        for run, m in zip(runs, (model, twin), strict=True):
            m.zero_grad()
            y = run(x)
            y.square().sum().backward()
            results.append((y, m.weight.grad))
        assert all(map(torch.equal, *results)) and torch.equal(dry, results[0][0])
    mine, theirs = (scaling_tensors(m) for m in (model, twin))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
