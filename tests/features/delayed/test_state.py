"""The scaling state: exact values after known inputs, the calls that move it, and its owners.

Values that are compared for equality come from constants: amaxes of given inputs, weights and output
gradients, which no matmul has rounded.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8compile import ScalingState
from tests.support import hooks
from tests.support.harness import (
    MOVING,
    Pair,
    assert_close,
    compiled,
    histories,
    leaf,
    like,
    load_scaling,
    noise,
    scaling_tensors,
)
from tests.support.hooks import slots_of
from tests.support.models import Branches, Mlp, Parallel, Stack, linear, make
from tests.support.reference_casts import float32, scale_of

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs, pytest.mark.compat]

INPUT, WEIGHT, GRADIENT = (("weight", role, 0) for role in ("input", "weight", "gradient"))


@pytest.fixture
def apart() -> Iterator[None]:
    """For a test whose graphs are no other test's."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def constant(value: float, rows: int = 16) -> Tensor:
    return torch.full((rows, 128), value)


def ready(weight: float = 0.5, **options: Any) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """A linear layer, and what it is compiled to."""
    model = linear(weight)
    return model, compiled(model, **options)


def call(run, value: float = 1.0, grad: float | None = 1.0, rows: int = 16) -> Tensor:
    """One training call on constants: x = value, and dy = grad (None: no backward)."""
    y = run(constant(value, rows).requires_grad_())
    if grad is not None:
        y.backward(torch.full_like(y, grad))
    return y


def padded(values: list[float], length: int = 16) -> list[float]:
    return values + [0.0] * (length - len(values))


# exact values


def test_history_and_scale_after_known_inputs() -> None:
    model, run = ready(0.5, amax_history_len=3, on_overflow="saturate")
    seen: dict[str, list[float]] = {"x": [], "dy": []}
    for x, dy in ((1.0, 8.0), (4.0, 2.0), (2.0, 1e-9), (0.5, 1e-9), (0.25, 3e-9), (0.0, 0.0)):
        call(run, x, dy)
        seen["x"].insert(0, x)
        seen["dy"].insert(0, torch.tensor(dy).item())
        state = slots_of(model)
        assert set(state) == {INPUT, WEIGHT, GRADIENT}
        for key, values, fp8_max in ((INPUT, seen["x"], 448.0), (GRADIENT, seen["dy"], 57344.0 / 2**11)):
            assert state[key].history() == padded(values, 3)[:3]
            assert state[key].scale() == scale_of(max(values[:3]), fp8_max)
            assert state[key].scale_inv() == float32(1.0 / state[key].scale())
        assert state[WEIGHT].history() == padded([0.5] * len(seen["x"]), 3)[:3]
        assert state[WEIGHT].scale() == 896.0


def test_interval() -> None:
    """Scales change at the first non-zero amax, and at every third call from there."""
    model, run = ready(interval=3, on_overflow="saturate")
    values = (0.0, 1.0, 2.0, 4.0, 2.0, 8.0, 1.0, 1.0)
    scales = (1.0, 448.0, 448.0, 448.0, 112.0, 112.0, 112.0, 56.0)
    for value, scale in zip(values, scales, strict=True):
        call(run, value)
        assert slots_of(model)[INPUT].scale() == scale
    assert slots_of(model)[INPUT].history() == padded([1.0, 1.0, 8.0, 2.0, 4.0, 2.0, 1.0, 0.0])


def test_a_longer_history_that_comes_back() -> None:
    """A page with a shorter history drops older amaxes; a longer one must not bring back outdated values."""
    model = linear()
    long, short = compiled(model, amax_history_len=3), compiled(model, amax_history_len=1)
    for value in (4096.0, 512.0, 256.0):
        call(long, value)
    for value in (4.0, 2.0):
        call(short, value)
    call(long, 3.0)
    assert slots_of(model)[INPUT].history() == [3.0, 2.0, 0.0]
    assert slots_of(model)[INPUT].scale() == scale_of(3.0, 448.0)


def test_quantizes_with_the_scale_of_earlier_calls() -> None:
    model, run = ready(1.75)
    for value, expected in ((1.75, 1.75), (7.0, 1.75), (7.0, 7.0), (1.0, 1.0)):
        # sums of 128 equal products: exact in any order
        torch.testing.assert_close(call(run, value), constant(expected * 1.75 * 128), rtol=1e-6, atol=0)


# cold slots


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize("zeros", [3, 8])
def test_a_slot_that_saw_only_zeros_is_cold(zeros: int) -> None:
    """LoRA's B begins as zeros, and so do gradients of what is in front of it. After any number of calls with
    zeros, the first non-zero amax gives the scale at once."""
    model = make(Mlp)
    nn.init.zeros_(model.down.weight)
    pair = Pair(model, amax_history_len=4)
    for step in range(zeros + 2):
        if step == zeros:
            for side in (model, pair.reference.model):
                with torch.no_grad():
                    side.down.weight.detach().copy_(noise(128, 256, seed=9) * 1e-4)
        pair.step(noise(16, 128, seed=step))


# calls that move the state, and calls that do not


def test_eval_and_no_grad_do_not_move_it() -> None:
    """Before all training calls, between them, and between a forward and its backward. It is exact."""
    model, run = ready()
    x = noise(16, 128)
    exact = model(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(run(x), exact, rtol=1e-4, atol=1e-5)  # float32 sums in another order
    assert not slots_of(model)
    y = call(run, 2.0, None)
    before = histories(model)
    with torch.no_grad():
        run(constant(64.0))
    with torch.inference_mode():
        run(constant(64.0))
    model.eval()
    torch.testing.assert_close(run(x), exact, rtol=1e-4, atol=1e-5)
    call(run, 64.0)
    model.train()
    assert histories(model) == before
    y.backward(constant(8.0))
    call(run, 4.0)
    assert slots_of(model)[INPUT].history() == padded([4.0, 2.0])
    assert slots_of(model)[GRADIENT].history() == padded([1.0, 8.0])


@pytest.mark.parametrize(
    ("options", "nested"), [({}, False), ({"current_scaling": (False, False, True)}, True)]
)
def test_reentrant_checkpoint_around_a_compiled_block(options: dict, nested: bool) -> None:
    """Always the forward inside the backward moves the state; also with a checkpoint of the other kind
    inside, and after a forward whose backward never came: what that has seen joins the first step. (The
    other kind: test_repeats.py.)"""
    model = make(Mlp)
    run = compiled(model, **options)
    if not nested:
        run(leaf(noise(16, 128)))

    def block(x: Tensor) -> Tensor:
        return checkpoint(run, x, use_reentrant=False) if nested else run(x)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(1, 5):
        checkpoint(block, leaf(noise(16, 128, seed=step)), use_reentrant=True).sum().backward()
        if nested:  # where only this tells that a new forward is no recomputation of the last one
            optimizer.step()
        found = histories(model)
        assert found
        for (_, role, _), (history, _) in found.items():
            assert sum(amax > 0 for amax in history) == step, role


def test_a_recomputation_reads_what_its_forward_read() -> None:
    """And raises the same amaxes; each step has other scales, so that no backward reads those of the next."""
    run = compiled(linear(), "delayed")
    with hooks.states_of_forwards() as states:
        for _ in range(4):
            checkpoint(run, constant(1.0).requires_grad_(), use_reentrant=False).sum().backward()
    scales, amaxes = zip(*((x.data_ptr(), y.data_ptr()) for x, y in states), strict=True)
    assert scales[::2] == scales[1::2] and len(set(scales)) == 4
    assert len(set(amaxes)) == 1


def test_a_checkpoint_with_hooks_of_the_user_inside() -> None:
    """Offloading sets hooks of its own inside of the checkpoint, which then are the topmost ones in the
    recomputation, too."""
    model, run = ready()

    def block(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda kept: kept):
            y = run(x)
        return y.sin()  # saves y in the checkpoint: its backward computes the block again

    for step in range(1, 4):
        x = constant(float(step)).requires_grad_()
        with hooks.states_of_forwards() as states:
            checkpoint(block, x, use_reentrant=False).sum().backward()
        assert len(states) == 2
        assert slots_of(model)[INPUT].history() == padded([float(i) for i in range(step, 0, -1)])


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize(("bad", "when"), [(math.inf, 0), (math.nan, 2)])
def test_a_non_finite_batch_leaves_no_trace(bad: float, when: int) -> None:
    """After the batch, outputs, gradients and state are those of a model that never saw it."""
    pair = Pair(make(Mlp), amax_history_len=4)  # the reference never sees the batch
    for step in range(4):
        x = noise(16, 128, seed=step, scale=2.0**step)
        if step == when:
            poisoned = x.clone()
            poisoned[3, 5] = bad
            before = histories(pair.model)
            y = pair.compiled(poisoned)
            assert not y[3].isfinite().any() and y[4].isfinite().all()
            # dy of `down` is finite, that of `up` is not: so no gradient slot moves
            y.sum().backward()
            assert step == 0 or histories(pair.model) == before
        pair.step(x)


def test_a_non_finite_gradient_moves_the_forward_only() -> None:
    model, run = ready()
    call(run, 1.0, 1.0)
    y = call(run, 2.0, None)
    grad = torch.ones_like(y)
    grad[0, 0] = math.nan
    y.backward(grad)
    assert slots_of(model)[INPUT].history() == padded([2.0, 1.0])
    assert slots_of(model)[GRADIENT].history() == padded([1.0])
    call(run, 4.0, 4.0)
    assert slots_of(model)[GRADIENT].history() == padded([4.0, 1.0])


@pytest.mark.usefixtures("apart")
def test_a_batch_without_rows_does_not_move_it() -> None:
    model, run = ready()
    call(run, 2.0, 2.0)
    before = histories(model)
    y = call(run, 1.0, 1.0, rows=0)
    assert y.shape == (0, 128)
    assert histories(model) == before
    call(run, 4.0, 4.0)
    assert slots_of(model)[INPUT].history() == padded([4.0, 2.0])


def test_the_state_dict_is_untouched() -> None:
    model, run = ready(0.5)
    before = model.state_dict().keys()
    call(run, 2.0)
    assert model.state_dict().keys() == before and not list(model.buffers())
    model.load_state_dict(linear(4.0).state_dict())
    call(run, 4.0)
    assert slots_of(model)[INPUT].history() == padded([4.0])  # that of the other weights is gone
    assert slots_of(model)[WEIGHT].history() == padded([4.0])


# recompiles, breaks, other graphs


@pytest.mark.usefixtures("apart")
def test_a_buffer_that_is_the_parameter_has_no_slots_of_its_own() -> None:
    """A tensor with several names has its first."""
    model = linear(1.0)
    model.register_buffer("alias", model.weight)
    compiled(model)(torch.ones(16, 128)).sum().backward()
    assert {name for name, _, _ in slots_of(model)} == {"weight"}
    assert not any(name.startswith("alias") for name in ScalingState(model).state_dict())


def test_a_recompile_keeps_the_history() -> None:
    model, run = ready()
    for i, rows in enumerate((16, 32, 48, 16, 7)):
        call(run, float(i + 1), float(i + 1), rows=rows)
    for value in (6.0, 7.0):  # frozen, and thawed
        model.weight.requires_grad_(value == 7.0)
        call(run, value, value)
    torch._dynamo.reset()
    call(compiled(model), 8.0, 8.0)
    for key in (INPUT, GRADIENT):
        assert slots_of(model)[key].history() == padded([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0])


def test_graphs_that_share_some_weights() -> None:
    """Graphs take turns: each reads the state that the other wrote, also between forward and backward."""
    pair = Pair(make(Branches))
    for step, branches in enumerate(([0], [1], [0, 1], [1, 0], [1, 1], [0, 0, 1])):
        pair.zero_grad()
        outs = []
        for i, second in enumerate(branches):
            x = noise(16, 128, seed=10 * step + i, scale=MOVING[step] * 2**i)
            y, expected = pair.compiled(x, bool(second)), pair.reference(x, bool(second))
            assert_close({"y": expected}, {"y": y}, 40.0, f"step {step}.{i}")
            pair.compare_state()
            outs.append((y, expected))
        for y, expected in outs:
            grad = like(y, step)
            y.backward(grad)
            expected.backward(grad)
            pair.compare_state()
        pair.compare_grads()
        pair.steps += 1


# owners of the state


def test_two_layers_never_share() -> None:
    """Two layers in a row, with the same shape and data, have six slots."""
    model = Stack(linear(0.5), linear(0.25))
    run = compiled(model)
    call(run, 1.0, 1.0)
    state = slots_of(model)
    assert len(state) == 6
    assert state["inner.0.weight", "weight", 0].history()[0] == 0.5
    assert state["inner.1.weight", "weight", 0].history()[0] == 0.25
    assert state["inner.0.weight", "input", 0].history()[0] == 1.0
    assert state["inner.1.weight", "input", 0].history()[0] == pytest.approx(64.0, rel=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("apart")
def test_more_instances_than_the_recompile_limit() -> None:
    """Dynamo gives up after 8 versions of a function: instances share code, each with its own state."""
    model = make(lambda: Parallel(*(Mlp() for _ in range(9))))
    for block in model.inner:
        block.compile(backend="fp8")
    pair = Pair(model, compile=lambda model: model)
    with torch._dynamo.config.patch(recompile_limit=8):
        for step, factor in enumerate(MOVING[:3]):
            pair.step(noise(16, 128, seed=step, scale=factor))
    assert len(histories(model)) == 3 * len(pair.reference.names)


def test_a_deleted_model_frees_its_state() -> None:
    model, run = ready()
    for value in (1.0, 2.0):
        call(run, value)
    page = next(iter(slots_of(model).values())).page
    alive = [weakref.ref(model.weight), weakref.ref(page), weakref.ref(page.tensor)]
    del model, run, page
    torch._dynamo.reset()  # Dynamo's own caches hold what they compiled
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


def test_a_parameter_with_the_id_of_another_one_begins_anew() -> None:
    model = linear()
    call(compiled(model))
    state, ids = scaling_tensors(model), set()
    for _ in range(100):
        layer = nn.Linear(1, 1, bias=False)
        assert not slots_of(layer)
        load_scaling(layer, state)
        assert slots_of(layer)
        ids.add(id(layer.weight))
    assert len(ids) < 100


def test_one_of_two_instances_deleted() -> None:
    """The other instance still uses the code; the parameters and the state of the deleted one are freed."""
    models = [linear(0.5), linear(0.25)]
    for model in models:
        model.compile(backend="fp8")
        call(model, 1.0)
    alive = weakref.ref(models[0].weight)
    kept = models[1]
    del model, models
    gc.collect()
    call(kept, 2.0)
    assert slots_of(kept)[INPUT].history() == padded([2.0, 1.0])
    assert alive() is None
