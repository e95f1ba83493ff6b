"""`cache_weights`: FP8 copies of weights serve until these change, bitwise as if cast in each call."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.dryrun import fake_gpu
from fp8compile.optim import AdamW
from tests.support import hooks
from tests.support.cached import BF16, Checkpointed, compiled, same, trained
from tests.support.executed import planning
from tests.support.gpu_steps import unallocated
from tests.support.harness import ALL_FP8, grads_of, noise
from tests.support.models import Mlp, Uses, make

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]
counted = hooks.weight_casts


def mlp() -> nn.Module:
    return make(lambda: Mlp(128, 256))


def begun(cache: bool = True) -> tuple[nn.Module, Callable[..., Tensor], torch.optim.Optimizer]:
    """A small model after one step: its optimizer is known."""
    model = mlp()
    call, optimizer = compiled(model, cache), fused(model)
    trained(model, call, optimizer, 1, 1)
    return model, call, optimizer


# -- never stale --


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def clamped(model: nn.Module) -> torch.optim.Optimizer:
    """A hook of the user's writes to `.data` after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(
        lambda *_: [p.data.clamp_(-0.05, 0.05) for p in model.parameters()] and None
    )
    return optimizer


def both(
    build: Callable[[], nn.Module] = mlp,
    optimizer: Callable[[nn.Module], Any] = fused,
    recipe: str = "tensorwise",
    steps: int = 3,
    micro: int = 3,
) -> int:
    """How often a training casts with the cache. It has the bits of the one without."""
    results = []
    for cache in (False, True):
        model = build()
        with counted() as casts:
            call = compiled(model, cache, recipe)
            results.append(trained(model, call, optimizer(model), steps, micro))
        assert cache or not casts
    assert same(*results)
    return len(casts)


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize(("build", "recipe"), [(Checkpointed, "blockwise"), (lambda: make(Uses), "delayed")])
def test_one_cast_a_step(build: Callable[[], nn.Module], recipe: str) -> None:
    """And two more before the first step, when nobody knows that there is an optimizer."""
    assert both(build, recipe=recipe) == 3 + 1 + 1


class Several:
    """Optimizers for parts of the parameters, as users of Muon have them, or a function that steps."""

    def __init__(self, model: nn.Module, *steps: Callable[[], Any]) -> None:
        self.steps, self.zero_grad = steps, model.zero_grad

    def step(self) -> None:
        for step in self.steps:
            step()


def in_backward(model: nn.Module) -> Several:
    """An optimizer for each parameter, which steps in backward."""
    optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    return Several(model)


def data(model: nn.Module) -> None:
    """A step that writes to `.data`, which changes no version."""
    for p in model.parameters():
        p.data.sub_(0.01 * p.grad)


class Data(torch.optim.Optimizer):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.model = model

    def step(self, closure: Any = None) -> None:
        data(self.model)


def compiled_step(model: nn.Module) -> Several:
    return Several(model, torch.compile(torch.optim.SGD(model.parameters(), lr=1e-2).step, backend="eager"))


def muon(model: nn.Module) -> Several:
    matrices, others = (
        [p for p in model.parameters() if (p.ndim == 2) is matrix] for matrix in (True, False)
    )
    return Several(model, torch.optim.Muon(matrices, lr=0.03).step, torch.optim.AdamW(others, lr=3e-3).step)


def eight_bits(library: str) -> Callable[[nn.Module], Any]:
    return lambda model: pytest.importorskip(library).AdamW8bit(model.parameters(), lr=1e-2)


STEPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True),
    "fused": fused,
    "ours": lambda model: AdamW(model.parameters(), lr=1e-2, compiled=False),
    "data": Data,
    "compiled": compiled_step,
    "by hand": lambda model: Several(model, lambda: data(model)),
    "clamped": clamped,
    "in backward": in_backward,
    "muon": muon,
    "torchao": eight_bits("torchao.optim"),
    "bitsandbytes": eight_bits("bitsandbytes.optim"),
}


@pytest.mark.filterwarnings("ignore")  # bitsandbytes warns at its import
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in ("muon", "torchao") else x for x in STEPPERS]
)
def test_every_kind_of_step_is_noticed(name: str) -> None:
    assert both(mlp, STEPPERS[name]) == (9 if name in ("by hand", "in backward") else 5)


class Ascending(torch.optim.Optimizer):
    """As SAM: it moves the weights, calls the model there, and moves them again; by `.data`, which changes no
    version."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:
        for amount in (-1.0, 2.0):
            closure()
            for p in self.param_groups[0]["params"]:
                p.data.sub_(amount * p.grad)


def test_a_step_that_moves_weights_and_calls_the_model() -> None:
    """Within a step of the weights' own optimizer no copy serves twice."""
    results = []
    for cache in (False, True):
        model, found = mlp(), []
        call, optimizer = compiled(model, cache), Ascending(model)

        def closure(model: Any = model, call: Any = call, found: Any = found) -> None:
            model.zero_grad()
            y = call(noise(1, 48, 128, seed=1))
            y.square().mean().backward()
            found.append({"y": y.detach(), **grads_of(model)})

        for _ in range(2):
            optimizer.step(closure)
        results.append(found)
    assert same(*results)
    assert not torch.equal(results[1][2]["y"], results[1][3]["y"])


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
    fp8compile.refresh_weight_cache()


CHANGES = (load, assign, in_place, of_data, told)


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_between_micro_batches_is_noticed(change: Callable[[nn.Module], None]) -> None:
    results = []
    for cache in (False, True):
        model, call, optimizer = begun(cache)
        before = call(noise(1, 48, 128, seed=1)).detach()
        change(model)
        results.append([{"y": call(noise(1, 48, 128, seed=1)).detach()}])
        assert not torch.equal(before, results[-1][0]["y"])
    assert same(*results)


def test_without_its_optimizer_a_weight_is_not_trusted() -> None:
    model = mlp()
    call = compiled(model)
    optimizer: Any = fused(model)
    trained(model, call, optimizer, 2, 1)
    del optimizer
    gc.collect()
    with counted() as casts:
        first = call(noise(1, 48, 128)).detach()
        for p in model.parameters():
            p.data.mul_(2)
        assert not torch.equal(first, call(noise(1, 48, 128)))
    assert len(casts) == 2


def test_another_optimizers_step_is_enough() -> None:
    """Two models, two optimizers: a step of either casts anew. Weights that no optimizer has are cast in each
    call."""
    models = [mlp() for _ in range(2)]
    calls = [
        compiled(models[0]),
        torch.compile(models[1], backend="fp8", options={"policy": ALL_FP8, "cache_weights": True}),
    ]
    optimizer = fused(models[0])
    trained(models[0], calls[0], optimizer, 1, 1)
    with counted() as casts:
        for call in calls:
            for _ in range(2):
                call(noise(1, 48, 128)).sum().backward()
    assert len(casts) == 1 + 2


def test_a_step_that_failed_stops_no_other_model() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("out of memory")

    other = nn.Linear(4, 4)
    failed = Fails(other.parameters(), lr=1e-2)
    with pytest.raises(RuntimeError, match="out of memory"):
        failed.step()
    assert both() == 5 and failed.param_groups


def test_a_backward_keeps_the_copies_of_its_forward() -> None:
    """New copies are new tensors, so that what a forward has saved stays as it was."""
    model, call, optimizer = begun()
    x = noise(1, 48, 128).requires_grad_()
    gradients = []
    for refreshed in (False, True):
        y = call(x)
        if refreshed:
            for p in model.parameters():
                p.data.mul_(2)
            fp8compile.refresh_weight_cache()
            call(noise(1, 48, 128, seed=1))
        gradients.append(torch.autograd.grad(y.sum(), x)[0])
    assert torch.equal(*gradients)


def test_copies_go_with_their_weights() -> None:
    gc.collect()  # what other tests have left
    before = hooks.kept_copies()
    model: Any = mlp()
    call: Any = compiled(model)
    optimizer: Any = AdamW(model.parameters(), compiled=False, fp8_weights=True)
    trained(model, call, optimizer, 2, 1)
    call(noise(1, 48, 128))
    assert hooks.kept_copies() == before + 1
    del model, call, optimizer
    gc.collect()
    assert hooks.kept_copies() == before and not hooks.weights_written()


def test_measured_calls_see_the_casts_of_weights() -> None:
    found = []
    for cache in (False, True):
        model, call, optimizer = begun(cache)
        fp8compile.stats(model, measure=True)
        trained(model, call, optimizer, 1, 1)
        rows = fp8compile.stats(model).rows()
        found.append({(row["name"], row["role"], row["layout"]): row["sqnr"] for row in rows})
    assert found[0] == found[1]
    assert any(role == "weight" and value for (_, role, _), value in found[0].items())


def test_evaluation_keeps_no_copies() -> None:
    with counted() as casts:
        compiled(mlp().eval())(noise(1, 48, 128))
    assert not casts


# -- with CUDA graphs, which record addresses --

GRAPHS = {"triton.cudagraphs": True}


def test_cuda_graphs_find_new_copies_at_the_old_addresses() -> None:
    """Inductor hears that these inputs are static, so that a replay does not copy them; and they are, over
    steps. (What the step of an optimizer writes: tests/optim/test_fp8_weights.py.)"""
    results: list[Any] = []
    with hooks.static_inputs() as static:
        for cache in (False, True):
            model = mlp()
            optimizer = AdamW(model.parameters(), lr=1e-2, compiled=False)
            with hooks.copies_given() as given, counted() as casts:
                results.append(trained(model, compiled(model, cache, **GRAPHS), optimizer, 3, 2))
            assert len(casts) == 4 * cache
            assert len(given) == 6 * cache and len({*given}) == cache
    assert same(*results)
    forward, backward = static[-2:]
    assert (len(forward), len(backward)) == (3, 2) and {*forward.values(), *backward.values()} == {True}


def test_forwards_before_backwards_at_one_address() -> None:
    """Before the first step each forward casts, and writes the values that are there. After a step they are
    others, and autograd refuses, as it does for a weight that was saved."""
    model = mlp()
    optimizer, x = fused(model), noise(1, 48, 128).requires_grad_()
    call = compiled(model, **GRAPHS)
    one, other = call(x), call(2 * x)
    (one.sum() + other.sum()).backward()
    late = call(x)
    optimizer.step()
    call(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.sum().backward()


def test_a_capture_by_hand_keeps_no_copies(caplog: pytest.LogCaptureFixture) -> None:
    """Each replay of such a graph casts, and the first call that is captured says so."""
    call = compiled(mlp())
    call(noise(1, 48, 128))
    assert "cache_weights has no effect" not in caplog.text
    with hooks.capturing():
        call(noise(1, 48, 128))
    assert "cache_weights has no effect in a CUDA graph" in caplog.text


def test_weights_that_are_computed_are_cast_in_the_graph() -> None:
    weight_norm = nn.utils.parametrizations.weight_norm
    assert both(lambda: make(lambda: weight_norm(nn.Linear(128, 128)))) == 0


class Slices(nn.Module):
    """One weight, read by parts: more copies than a graph has inputs for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.down = nn.Parameter(torch.randn(1024, 128) / 8), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(sum(torch.tanh(x @ part.t()) for part in self.weight.chunk(8)))


def test_what_does_not_fit_is_cast_in_the_graph() -> None:
    assert both(lambda: make(Slices), steps=2, micro=2) == 2 + 1  # of `down` alone


class Penalty(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.up.weight.t() @ self.up.weight).square().mean()


@pytest.mark.slow
def test_a_product_of_two_weights() -> None:
    """The first one is a matmul's input, too: for that it is cast in the graph, with its own history."""
    assert both(lambda: make(Penalty), recipe="delayed") > 0


# -- for a GPU --


@pytest.mark.slow
@pytest.mark.compiled
@planning
def test_a_micro_batch_casts_no_weight() -> None:
    """Graphs of forward and backward read no weight, and casts are a graph of their own without a matmul,
    which writes where CUDA graphs will read."""
    model = unallocated(lambda: Mlp(1024, 2048, bias=False), BF16)
    found = {}
    for cache in (False, True):
        options = {"policy": ALL_FP8, "cache_weights": cache, "triton.cudagraphs": cache}
        call = torch.compile(model, backend="fp8", options=options)
        x = torch.empty((2048, 1024), dtype=BF16, requires_grad=True)
        found[cache] = fake_gpu.trace(lambda call=call, x=x: call(x).sum().backward())
    (casts,) = [graph for graph in found[True].graphs if not any(x.matmul is not None for x in graph.kernels)]
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    cast_bytes = sum(kernel.bytes for kernel in casts.kernels)
    # read twice, for the amax and the cast, and written in two layouts
    assert 4 * weights <= cast_bytes < 6.1 * weights
    micro = found[True].bytes_outside_matmuls - cast_bytes
    assert micro < found[False].bytes_outside_matmuls - 3.5 * weights
    assert found[True].kept_for_backward <= found[False].kept_for_backward
