"""When the scaling state moves, and what must not disturb it: exact values after known inputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from tests.equivalence.protocols import PROTOCOLS, Run
from tests.features.delayed.test_repeats import Blocks
from tests.features.delayed.test_state import GRADIENT, INPUT, call, constant, padded, ready
from tests.support import hooks
from tests.support.harness import compiled, grads_of, histories, load_scaling, noise, scaling_tensors
from tests.support.hooks import slots_of
from tests.support.models import Mlp, Stack, linear, make

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


def history(model: nn.Module, key: Any = INPUT) -> list[float]:
    """The amaxes that are not 0."""
    return [amax for amax in slots_of(model)[key].history() if amax]


def sgd(model: nn.Module, lr: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def trained(value: float = 1.0) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """A linear that has made one step on 1.0."""
    model, run = ready(value)
    call(run, 1.0)
    sgd(model).step()
    return model, run


# -- forwards without a backward --


def test_a_forward_without_a_backward_holds_nothing_back_after_a_step() -> None:
    """What it has seen joins the step's."""
    model, run = trained()
    optimizer = sgd(model)
    stray = call(run, 8.0, None)
    call(run, 2.0)
    assert history(model) == [8.0, 1.0]
    optimizer.step()
    call(run, 4.0)
    assert history(model) == [4.0, 8.0, 1.0]
    stray.backward(constant(1.0))  # it comes after all, and divides by the scales of its forward
    assert math.isclose(float(run(constant(3.0)).detach()[0, 0]), 128 * 3.0, rel_tol=0.1)


@pytest.mark.parametrize(("cold", "most"), [(True, 32), (False, 64)])
def test_without_an_optimizer_it_is_given_up(cold: bool, most: int) -> None:
    model, run = ready()
    if not cold:
        call(run, 1.0)
        call(run, 1.0)
    call(run, 8.0, None)
    with hooks.cold_calls() as calls:
        for _ in range(most + 4):
            call(run, 2.0)
    assert calls[:most] == [cold] * most and calls[-3:] == [False] * 3
    assert history(model)[:4] == [2.0] * 4


def test_forwards_of_another_model_hold_nothing_back() -> None:
    """A teacher that is called with gradients, or a generator whose discriminator steps first."""
    other = linear()
    stray = [call(compiled(other), 8.0, None)]
    model, run = ready()
    for value in (1.0, 2.0, 4.0):
        stray.append(call(compiled(other), 8.0, None))
        call(run, value)
    assert history(model) == [4.0, 2.0, 1.0]


# -- optimizers --


def test_a_step_that_a_scaler_skips_changes_nothing() -> None:
    model, run = trained()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1.0)
    with torch.no_grad():
        before = model.weight.clone()
    for value, grad in ((2.0, math.inf), (4.0, 1.0)):
        optimizer.zero_grad()
        y = run(constant(value))
        scaler.scale(y.sum() * grad).backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(model.weight, before) and history(model) == [4.0, 2.0, 1.0]
    assert history(model, GRADIENT) == [0.5, 1.0] and scaler.get_scale() == 0.5  # the infinity left no trace


def test_an_optimizer_of_a_part_of_the_weights() -> None:
    """Each step moves all: the rows of a backward that is still to come move when it has run."""
    model = Stack(linear(0.5), linear(0.25))
    run = compiled(model)
    first, second = (sgd(part) for part in model.inner)
    for value in (1.0, 2.0):
        y = run(constant(value))
        first.step()
        y.backward(constant(value))
        second.step()
    name = "inner.1.weight", "gradient", 0
    assert history(model, ("inner.0.weight", "input", 0)) == [2.0, 1.0] == history(model, name)


def test_optimizers_that_step_inside_of_a_backward() -> None:
    """One for each parameter, as its gradient is there: other blocks still wait for their backwards."""
    model = nn.Sequential(*(make(Mlp) for _ in range(3)))
    for block in model:
        block.compile(backend="fp8")
    twin = copy.deepcopy(model)
    for block in twin:
        block.compile(backend="fp8")
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    whole = sgd(twin, 0.1)
    for step in range(4):
        x = noise(16, 128, seed=step, scale=1 + step)
        for run in (model, twin):
            y = x
            for block in run:
                y = checkpoint(block, y, use_reentrant=False)
            y.square().mean().backward()
        whole.step()
        whole.zero_grad()
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert histories(model) == histories(twin)


def test_two_models_in_one_step() -> None:
    """A generator waits while its discriminator takes its steps; each pair moves the discriminator."""
    generator, critic = linear(), linear(0.5)
    make_, judge = compiled(generator), compiled(critic)
    for value in (1.0, 2.0, 4.0):
        fake = make_(constant(value))
        judge(constant(2 * value)).sum().backward()
        judge(constant(3 * value)).sum().backward()
        sgd(critic).step()
        fake.sum().backward()
        sgd(generator).step()
    assert history(generator) == [4.0, 2.0, 1.0]
    assert history(critic) == [12.0, 8.0, 6.0, 4.0, 3.0, 2.0]


# -- several micro-batches --


def test_a_pipeline_moves_once_a_step() -> None:
    """By the largest amax of the step, with the scales of its beginning."""
    model, run = trained()
    before = slots_of(model)[INPUT].scale()
    calls = [call(run, value, None) for value in (2.0, 8.0, 4.0)]
    for y in calls:
        y.backward(torch.ones_like(y))
    assert float(slots_of(model)[INPUT].page.tensor[0, 0]) == before
    sgd(model).step()
    assert history(model) == [8.0, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_micro_batch_voids_the_step_of_its_direction(bad: float) -> None:
    model, run = trained()
    calls = [call(run, value, None) for value in (2.0, bad, 4.0)]
    for y in calls:
        y.backward(torch.ones_like(y))
    model.zero_grad()
    sgd(model).step()
    assert history(model) == [1.0] and history(model, GRADIENT) == [1.0, 1.0]
    call(run, 3.0)
    assert history(model) == [3.0, 1.0]


# -- readers and loads between a forward and its backward --


def test_a_state_that_is_saved_between_forward_and_backward() -> None:
    """It has what the forward has seen; saving changes nothing; what is loaded goes on as the original."""
    model, run = trained()
    y = call(run, 2.0, None)
    weights, saved = copy.deepcopy(model.state_dict()), scaling_tensors(model)
    assert saved["weight.input.0"][13:15].tolist() == [2.0, 1.0]
    y.backward(constant(4.0))
    assert slots_of(model)[INPUT].history() == padded([2.0, 1.0])
    assert slots_of(model)[GRADIENT].history() == padded([4.0, 1.0])
    other = linear()
    other.load_state_dict(weights)
    load_scaling(other, saved)
    resumed = compiled(other)
    with hooks.cold_calls() as calls:
        call(resumed, 3.0)
    assert calls == [False] and history(other) == [3.0, 2.0, 1.0]


def test_a_state_that_is_loaded_between_forward_and_backward() -> None:
    """The backward raises amaxes of the state that was loaded, and divides by the scales of its forward."""
    model, run = trained()
    saved = scaling_tensors(model)
    call(run, 64.0)
    y = call(run, 2.0, None)
    load_scaling(model, saved)
    y.backward(constant(4.0))
    assert history(model) == [1.0] and history(model, GRADIENT) == [4.0, 1.0]


def test_scales_stay_where_graphs_are_recorded_also_after_a_load() -> None:
    """A replay reads what was loaded at the address that it was recorded with."""
    model, run = ready(**{"triton.cudagraphs": True})
    for _ in range(2):
        call(run, 1.0)
    saved = scaling_tensors(model)
    with hooks.states_of_forwards() as states:
        call(run, 4.0)
        call(run, 4.0)
        before = float(states[-1][0][0, 0, 0])
        load_scaling(model, saved)
        call(run, 4.0)
    assert len({scales.data_ptr() for scales, _ in states}) == 1
    assert before == 112.0 and float(states[-1][0][0, 0, 0]) == 448.0


def test_a_second_backward_after_later_steps() -> None:
    """A graph that is kept divides by the scales that its forward multiplied with."""
    model, run = trained()
    x = constant(2.0).requires_grad_()
    model.zero_grad()
    with torch._functorch.config.patch(donated_buffer=False):
        y = run(x)
        y.backward(constant(1.0), retain_graph=True)
        assert x.grad is not None and model.weight.grad is not None
        expected = [x.grad.clone(), model.weight.grad.clone()]
        model.weight.grad = x.grad = None
        for value in (1e3, 1e4):
            call(run, value, value)
        model.weight.grad = None
        y.backward(constant(1.0))
    assert all(map(torch.equal, expected, (x.grad, model.weight.grad)))


def test_a_model_that_moves_to_another_device_takes_its_state_along() -> None:
    """A page of the new device takes the slots over; nothing asks for that of the old one any more."""
    from fp8compile.features.delayed.arena import Where
    from fp8compile.features.delayed.state import page_for

    model, run = trained()
    call(run, 2.0)
    slots = [(model.weight, (role, 0)) for role in ("input", "weight", "gradient")]
    page = slots_of(model)[INPUT].page
    moved = page_for(slots, page.settings, Where(torch.device("meta"), 16))
    assert moved.tensor.device.type == "meta" and page.stale
    assert slots_of(model)[INPUT].page is moved


# -- whatever the schedule --

EVENTS = st.lists(st.sampled_from("fffbbbrse?"), min_size=6, max_size=18).map("".join)


def by_schedule(
    events: str, checkpointed: bool, others: bool, late: bool = False, rank: int = 0, **options: Any
) -> list[Tensor]:
    """Outputs, gradients and state of a training. f: forward; b, r: the backward of the oldest, or newest,
    forward; s: a step, with `late` also while forwards wait. `others`: also evaluations (e) and reads of the
    state (?)."""
    model = Blocks((1, 2), checkpointed, **options)
    optimizer, seen, waiting = sgd(model, 0.05), list[Tensor](), list[Tensor]()
    for i, event in enumerate(events):
        if event == "f":
            x = noise(16, 128, seed=100 * rank + i, scale=2.0 ** ((i + rank) % 7 - 3))
            y = model(x.requires_grad_())
            seen.append(y.detach().clone())
            waiting.append(y)
        elif event in "br" and waiting:
            waiting.pop(0 if event == "b" else -1).square().mean().backward()
            seen += [grad.clone() for grad in grads_of(model).values()]
        elif event == "s" and (late or not waiting):
            optimizer.step()
            optimizer.zero_grad()
        elif event == "e" and others:
            with torch.no_grad():
                model(noise(16, 128, seed=i, scale=100.0))
        elif event == "?" and others:
            fp8compile.stats(model)
            scaling_tensors(model)
    return [*seen, *scaling_tensors(model).values()]


def check_schedule(events: str) -> None:
    expected = by_schedule(events, checkpointed=False, others=False)
    found = by_schedule(events, checkpointed=True, others=True)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found)), events
    # where an optimizer steps before a recomputation, it has other weights and scales than its forward
    expected, found = (by_schedule(events, checkpointed, True, late=True) for checkpointed in (False, True))
    assert len(expected) == len(found)
    for x, y in zip(expected, found, strict=True):
        assert y.isfinite().all() and x.any() == y.any(), events


@pytest.mark.parametrize("examples", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_recomputations_evaluations_and_reads_change_nothing(examples: int) -> None:
    """To the bit, whatever forwards wait, and if their backwards never come."""
    settings(max_examples=examples, deadline=None, derandomize=True)(given(EVENTS)(check_schedule))()


# -- calls that run unfused --


def test_the_report_counts_cold_calls() -> None:
    model = make(Mlp)
    run = compiled(model)
    for step in range(3):
        run(noise(16, 128, seed=step)).sum().backward()
    (graph,) = fp8compile.report(model).graphs
    assert (graph.cold_calls, graph.later_cold_calls) == (1, 0)
    assert "cold" not in str(fp8compile.report(model))
    model.load_state_dict(model.state_dict())
    run(noise(16, 128)).sum().backward()
    report = fp8compile.report(model)
    assert "1 cold call after the first of its weights: unfused, as in eager mode" in str(report)
    assert report.to_dict()["graphs"][0]["later_cold_calls"] == 1


@pytest.mark.cases(test=3, slow=9)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_training_runs_unfused_once_it_is_warm(protocol: str) -> None:
    """But once after weights were loaded."""
    with hooks.cold_calls() as calls:
        Run(lambda: make(Mlp), compiled, sgd)(PROTOCOLS[protocol])
    # the first call, and the dry one before it
    assert len(calls) > 1 and sum(calls) == (2 if protocol in ("loaded weights", "dry runs") else 1)
