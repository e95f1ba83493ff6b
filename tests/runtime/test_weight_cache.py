"""`cache_weights`: FP8 copies of weights serve until the weights change, to the bit as if they were cast in each call."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.dryrun import fake_gpu
from fp8compile.runtime.state import slots_of
from fp8compile.runtime.weight_cache import _STEPS, WeightCache
from tests.support import cached
from tests.support.cached import BF16, RECIPES, Checkpointed, Fused, executed_steps, layer, same, trained
from tests.support.gpu_steps import unallocated
from tests.support.harness import ALL_FP8, assert_close, grads_of, interpreted, noise
from tests.support.models import LlamaLayer, Mlp, make

needs_description = pytest.mark.skipif(fake_gpu.unavailable() is not None, reason=fake_gpu.unavailable() or "")


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """How often weights are cast: one entry a cast, the number of its weights."""
    found: list[int] = []
    cast = WeightCache._cast

    def counting(self: WeightCache, weights: Any) -> Any:
        found.append(len(weights))
        return cast(self, weights)

    with mock.patch.object(WeightCache, "_cast", counting):
        yield found


def compiled(model: nn.Module, cache: bool = True, recipe: str = "tensorwise", **options: Any) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return cached.compiled(model, cache, recipe, **options)


def begun(cache: bool = True, recipe: str = "tensorwise") -> tuple[nn.Module, Callable[..., Tensor], torch.optim.Optimizer]:
    """A small model after one step: its optimizer is known."""
    model = make(lambda: Mlp(128, 256))
    call, optimizer = compiled(model, cache, recipe), fused(model)
    trained(model, call, optimizer, 1, 1)
    return model, call, optimizer


@pytest.mark.parametrize(
    ("build", "recipe"),
    [
        *((layer, recipe) for recipe in RECIPES),
        (Checkpointed, "delayed"),
        (Checkpointed, "blockwise"),
        (lambda: make(Fused), "delayed"),
        (lambda: make(Fused), "rowwise"),
    ],
)
def test_the_same_bits_with_one_cast_a_step(build: Callable[[], nn.Module], recipe: str) -> None:
    results = []
    for cache in (False, True):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with counted() as casts:
            results.append(trained(model, compiled(model, cache, recipe), optimizer))
        # until the first step nobody knows that there is an optimizer
        assert len(casts) == (3 + 1 + 1 if cache else 0)
    assert same(*results)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_with_merged_matmuls(recipe: str) -> None:
    results = []
    for cache in (False, True):
        model = layer()
        call = compiled(model, cache, recipe, merge_matmuls=True)
        results.append(trained(model, call, torch.optim.SGD(model.parameters(), lr=1e-2)))
        assert {len(x.merged) for x in fp8compile.report(model).matmuls} == {0, 2, 3}
    assert same(*results)


def test_blocks_that_share_a_graph() -> None:
    """Compiled one by one, four layers are one graph: it keeps the copies of each of them."""
    results = []
    for cache in (False, True):
        model = nn.Sequential(*(layer() for _ in range(4)))
        with torch.no_grad():
            for i, block in enumerate(model):
                block.q.weight.mul_(1 + i) if hasattr(block, "q") else next(block.parameters()).mul_(1 + i)
        torch._dynamo.reset()
        for block in model:
            block.compile(backend="fp8", options={"policy": ALL_FP8, "recipe": "tensorwise", "cache_weights": cache})
        with counted() as casts:
            results.append(trained(model, model, torch.optim.SGD(model.parameters(), lr=1e-2), 3, 2))
        assert len(casts) == (4 * (2 + 1 + 1) if cache else 0)
    assert same(*results)


# -- never stale -------------------------------------------------------------------------------------------------------


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


class Data(torch.optim.Optimizer):
    """Writes to `.data`, which changes no version."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(0.01 * p.grad)


class Compiled:
    """An optimizer whose step is compiled."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        self.step = torch.compile(self.optimizer.step, backend="eager")
        self.zero_grad = self.optimizer.zero_grad


class ByHand:
    """A training loop without an optimizer of torch."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(self) -> None:
        for p in self.model.parameters():
            p.data.sub_(0.01 * p.grad)

    def zero_grad(self) -> None:
        self.model.zero_grad()


class Clamped(torch.optim.SGD):
    """A hook of the user's writes to `.data` behind each step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=1e-2)
        self.register_step_post_hook(lambda *_: [p.data.clamp_(-0.05, 0.05) for p in model.parameters()] and None)


class EachInBackward:
    """An optimizer for each parameter, which steps in backward."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.stepped)

    def stepped(self, p: Any) -> None:
        self.optimizers[p].step()

    def step(self) -> None: ...
    def zero_grad(self) -> None: ...


STEPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True),
    "one by one": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False),
    "fused": fused,
    "data": lambda model: Data(model.parameters()),
    "compiled": Compiled,
    "by hand": ByHand,
    "clamped": Clamped,
    "in backward": EachInBackward,
}


@pytest.mark.parametrize("name", STEPPERS)
def test_every_kind_of_step_is_noticed(name: str) -> None:
    results = []
    for cache in (False, True):
        model = make(lambda: Mlp(128, 256))
        optimizer = STEPPERS[name](model)
        with counted() as casts:
            results.append(trained(model, compiled(model, cache), optimizer))
        expected = 9 if name in ("by hand", "in backward") else 5
        assert len(casts) == (expected if cache else 0)
    assert same(*results)


def test_lbfgs_calls_the_model_within_its_step() -> None:
    losses = []
    for cache in (False, True):
        model = make(lambda: Mlp(128, 256))
        call = compiled(model, cache)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-1, max_iter=3)
        found: list[float] = []

        def closure(model: Any = model, call: Any = call, found: Any = found) -> Tensor:
            model.zero_grad()
            loss = call(noise(32, 128, seed=1)).square().mean()
            loss.backward()
            found.append(loss.item())
            return loss

        with interpreted():
            for _ in range(3):
                optimizer.step(closure)  # type: ignore[arg-type]
        losses.append(found)
    assert losses[0] == losses[1] and len(set(losses[0])) > 5


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def assign(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach() * 2)


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)


def of_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 2


def told(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(2)
    fp8compile.refresh()


@pytest.mark.parametrize("change", [load, assign, in_place, of_data, told])
def test_every_change_between_micro_batches_is_noticed(change: Callable[[nn.Module], None]) -> None:
    results = []
    for cache in (False, True):
        model, call, optimizer = begun(cache)
        with interpreted():
            before = call(noise(32, 128, seed=1)).detach()
            change(model)
            results.append([{"y": call(noise(32, 128, seed=1)).detach()}])
        assert not torch.equal(before, results[-1][0]["y"])
    assert same(*results)


def test_without_its_optimizer_a_weight_is_not_trusted() -> None:
    model = make(lambda: Mlp(128, 256))
    call = compiled(model)
    optimizer: Any = fused(model)
    trained(model, call, optimizer, 2, 1)
    del optimizer
    gc.collect()
    with interpreted(), counted() as casts:
        first = call(noise(32, 128)).detach()
        for p in model.parameters():
            p.data.mul_(2)
        assert not torch.equal(first, call(noise(32, 128)))
    assert len(casts) == 2


def test_another_optimizers_step_is_enough() -> None:
    """Two models, two optimizers: a step of either casts anew. Weights that no optimizer has are cast in each call."""
    models = [make(lambda: Mlp(128, 256)) for _ in range(2)]
    calls = [compiled(models[0]), torch.compile(models[1], backend="fp8", options={"policy": ALL_FP8, "cache_weights": True})]
    optimizer = fused(models[0])
    trained(models[0], calls[0], optimizer, 1, 1)
    with interpreted(), counted() as casts:
        for call in calls:
            for _ in range(2):
                call(noise(32, 128)).sum().backward()
    assert len(casts) == 1 + 2


def test_a_step_that_failed_stops_no_other_model() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("out of memory")

    other = nn.Linear(4, 4)
    failed = Fails(other.parameters(), lr=1e-2)
    with pytest.raises(RuntimeError, match="out of memory"):
        failed.step()
    model = make(lambda: Mlp(128, 256))
    with counted() as casts:
        trained(model, compiled(model), fused(model))
    assert len(casts) == 5 and failed.param_groups


def test_two_forwards_before_two_backwards_and_evaluation_between() -> None:
    results = []
    for cache in (False, True):
        model, call, optimizer = begun(cache, "delayed")
        with interpreted():
            outputs = [call(noise(32, 128, seed=i)) for i in range(2)]
            model.eval()
            evaluated = call(noise(32, 128, seed=7)).detach()
            model.train()
            for y in outputs:
                y.square().sum().backward()
        results.append([{"y": outputs[0].detach(), "e": evaluated}, grads_of(model)])
    assert same(*results)


def test_a_backward_keeps_the_copies_of_its_forward() -> None:
    """New copies are new tensors, so that what a forward has saved stays as it was."""
    model, call, optimizer = begun()
    x = noise(32, 128).requires_grad_()
    gradients = []
    for refreshed in (False, True):
        with interpreted():
            y = call(x)
            if refreshed:
                for p in model.parameters():
                    p.data.mul_(2)
                fp8compile.refresh()
                call(noise(32, 128, seed=1))
            gradients.append(torch.autograd.grad(y.sum(), x)[0])
    assert torch.equal(*gradients)


def test_frozen_weights_and_lora() -> None:
    """Frozen weights are cast once a step as well."""
    model = make(lambda: Mlp(128, 256))
    model.up.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with counted() as casts:
        trained(model, compiled(model), optimizer)
    assert len(casts) == 5


def test_copies_go_with_their_weights() -> None:
    model: Any = make(lambda: Mlp(128, 256))
    call: Any = compiled(model)
    caches: list[WeightCache] = []
    copies = WeightCache.copies

    def noted(self: WeightCache, *args: Any) -> Any:
        caches.append(self)
        return copies(self, *args)

    optimizer: Any = fused(model)
    with mock.patch.object(WeightCache, "copies", noted):
        trained(model, call, optimizer, 2, 1)
        with interpreted():
            call(noise(32, 128))
    kept = caches[-1].kept
    assert len(kept) == 1
    del model, call, optimizer
    torch._dynamo.reset()
    gc.collect()
    assert not kept


def test_phases() -> None:
    """In a phase of high precision no weight is cast; FP8 begins with fresh copies."""
    results = []
    for cache in (False, True):
        model = make(lambda: Mlp(128, 256))
        call = compiled(model, cache, "delayed", policy={**ALL_FP8, "schedule": {}})
        optimizer = fused(model)
        with counted() as casts:
            fp8compile.set_phase("high_precision", model)
            results.append(trained(model, call, optimizer, 2, 2))
            assert not casts
            fp8compile.set_phase("fp8", model)
            results[-1] += trained(model, call, optimizer, 2, 2)
        assert len(casts) == (2 if cache else 0)
    assert same(*results)


def test_phases_decide_alike() -> None:
    """Also where the cost model decides: the warm-up observes what FP8 will scale."""
    model = make(lambda: Mlp(2048, 8192), BF16)
    policy = {"device": "h200", "schedule": {"warmup_steps": 1}}
    torch._dynamo.reset()
    with interpreted():
        call = torch.compile(model, backend="fp8", options={"policy": policy, "cache_weights": True})
        call(noise(512, 2048, dtype=BF16)).sum().backward()
    assert all(record.decision == "fp8" for record in fp8compile.report(model).matmuls)
    slots = slots_of(model)
    assert {role for _, role, _ in slots} == {"input", "gradient"}
    assert all(any(slot.history()) for slot in slots.values())


def test_measured_calls_see_the_casts_of_weights() -> None:
    found = []
    for cache in (False, True):
        model, call, optimizer = begun(cache)
        fp8compile.stats(model, measure=True)
        trained(model, call, optimizer, 1, 1)
        rows = fp8compile.stats(model).rows()
        found.append({(row["name"], row["role"], row["layout"]): row["sqnr"] for row in rows})
    assert found[0] == found[1] and any(role == "weight" and value for (_, role, _), value in found[0].items())


def test_where_it_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    """Evaluation, and CUDA graphs."""
    model = make(lambda: Mlp(128, 256)).eval()
    with counted() as casts, interpreted():
        compiled(model)(noise(32, 128))
        compiled(model, **{"triton.cudagraphs": True})
        model.train()
        call = compiled(model, **{"triton.cudagraphs": True})
        call(noise(32, 128)).sum().backward()
    assert not casts
    assert "cache_weights has no effect with CUDA graphs" in caplog.text


def test_weights_that_are_computed_are_cast_in_the_graph() -> None:
    results = []
    for cache in (False, True):
        model = make(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(128, 128)))
        with counted() as casts:
            results.append(trained(model, compiled(model, cache), fused(model)))
        assert not casts
    assert same(*results)


def test_hooks_are_registered_once() -> None:
    for _ in range(2):
        model = make(lambda: Mlp(128, 256))
        trained(model, compiled(model), fused(model), 1, 1)
    before = _STEPS.changes
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    optimizer.step()
    assert _STEPS.changes == before + 1


# -- for a GPU ---------------------------------------------------------------------------------------------------------


@needs_description
@pytest.mark.parametrize("recipe", ["delayed", *(pytest.param(x, marks=pytest.mark.slow) for x in ("tensorwise", "rowwise"))])
def test_the_plan_of_a_gpu(recipe: str) -> None:
    """Executed on a CPU: what the plan computes without. In the first call no weight was rounded otherwise."""
    (expected, never), (found, casts) = (executed_steps(recipe, cache_weights=cache) for cache in (False, True))
    assert (never, casts) == (0, 2 + 1 + 1)
    for step, pair in enumerate(zip(expected, found, strict=True)):
        assert_close(*pair, 41.0, f"step {step}")


@needs_description
def test_a_micro_batch_casts_no_weight() -> None:
    """The graphs of forward and backward read no weight, and the casts are a graph of their own without a matmul."""
    model = unallocated(lambda: LlamaLayer(1024, 8, 8, 2048), BF16)
    found = {}
    for cache in (False, True):
        call = torch.compile(model, backend="fp8", options={"policy": ALL_FP8, "cache_weights": cache})
        x = torch.empty((1, 2048, 1024), dtype=BF16, requires_grad=True)
        found[cache] = fake_gpu.trace(lambda call=call, x=x: call(x).sum().backward())
    (casts,) = [graph for graph in found[True].graphs if not any(x.matmul is not None for x in graph.kernels)]
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    cast_bytes = sum(kernel.bytes for kernel in casts.kernels)
    assert 4 * weights <= cast_bytes < 6.1 * weights  # read twice, for the amax and the cast, and written in two layouts
    micro = found[True].bytes_outside_matmuls - cast_bytes
    assert micro < found[False].bytes_outside_matmuls - 3.5 * weights
    assert found[True].kept_for_backward <= found[False].kept_for_backward
