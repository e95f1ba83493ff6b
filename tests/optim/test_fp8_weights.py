"""`AdamW(.., fp8_weights=True)`: the step makes the FP8 weights of the next step, bitwise as the next forward would.

tests/equivalence trains with it and without; here is when weights are cast.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

import fp8compile
from fp8compile.optim import AdamW
from tests.optim.test_adamw import MASTERS
from tests.support import hooks
from tests.support.cached import BF16, compiled, same, trained
from tests.support.harness import grads_of, noise
from tests.support.models import Mlp, make

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]
Run = Callable[[Any, AdamW], list[dict[str, Tensor]]]
EVERYWHERE = {"recipe": "tensorwise", "cache_weights": True, "policy": {"rules": [{"fp8": "on"}]}}


def ours(model: nn.Module, early: bool, **more: Any) -> AdamW:
    return AdamW(model.parameters(), lr=1e-2, fp8_weights=early, **{"compiled": False, **more})


def ends(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """All weights and all that the optimizer keeps."""
    state = optimizer.state_dict()["state"]
    kept = {f"{i} {name}": x for i, each in state.items() for name, x in each.items()}
    return {**{name: x.clone() for name, x in model.state_dict().items()}, **kept}


def both(build: Callable[[], nn.Module], run: Run, **more: Any) -> list[str]:
    """The same training without and with `fp8_weights` has the same bits. Returns the casts of the second."""
    results = []
    for early in (False, True):
        model = build()
        optimizer = ours(model, early, **more)
        with hooks.casts_by_place() as found:
            results.append([*run(model, optimizer), ends(model, optimizer)])
        assert early or not any(where.startswith("step") for where, _ in found)
    assert same(*results)
    return [where for where, _ in found]


def steps(recipe: str, count: int = 3, micro: int = 3, **options: Any) -> Run:
    return lambda model, optimizer: trained(model, compiled(model, True, recipe, **options), optimizer, count, micro)


def step(call: Callable[..., Tensor], model: nn.Module, seed: int, dtype: torch.dtype = BF16) -> list[dict[str, Tensor]]:
    y = call(noise(1, 48, 128, seed=seed, dtype=dtype))
    y.sum().backward()
    return [{"y": y.detach()}, grads_of(model)]


def mlp(dtype: torch.dtype = BF16) -> nn.Module:
    return make(lambda: Mlp(128, 256), dtype)


@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise_with_gw_hp", "blockwise"])
def test_the_same_bits_and_no_cast_in_a_forward(recipe: str) -> None:
    found = both(mlp, steps(recipe))
    # three micro-batches before the first step, when nobody knows that there is an optimizer
    given = "+" if recipe != "blockwise" else ""  # rowwise_with_gw_hp has one scale a weight in dgrad
    assert found == ["forward"] * 3 + [f"step{given}"] * 3


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize("master", [master for dtype, master in MASTERS if dtype == BF16 and master])
def test_masters(master: str) -> None:
    assert both(mlp, steps("tensorwise"), master=master) == ["forward"] * 3 + ["step+"] * 3


@pytest.mark.slow
def test_float32_weights_under_autocast() -> None:
    def run(model: nn.Module, optimizer: AdamW) -> list[dict[str, Tensor]]:
        call = compiled(model)

        def autocast(x: Tensor) -> Tensor:
            with torch.autocast("cpu", BF16):
                return call(x)

        return trained(model, autocast, optimizer)

    assert both(lambda: mlp(torch.float32), run) == ["forward"] * 3 + ["step+"] * 3


class Odd(nn.Module):
    """One weight is small, so that it is updated with others; one lies transposed; one is read by slices, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(128, 80), nn.Linear(80, 48), nn.Linear(48, 256)
        self.d = nn.Parameter(torch.randn(128, 256).t())

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.c(self.b(F.gelu(self.a(x)))) @ self.d)
        return F.linear(x, self.d[:128]) + F.linear(x, self.d[128:])


@pytest.mark.slow
def test_small_transposed_and_sliced_weights() -> None:
    found = both(lambda: make(Odd), steps("tensorwise", policy={"rules": [{"fp8": "on"}]}))
    assert found == ["forward"] * 3 + ["step+"] * 3


class Tied(nn.Module):
    """Two graphs that read one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Mlp(128, 256), Mlp(128, 256)
        self.two.up.weight = self.one.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).sin())


def layers() -> nn.Module:
    return nn.Sequential(*(make(lambda: Mlp(128, 256), seed=i) for i in range(3)))


@pytest.mark.slow
@pytest.mark.parametrize("build", [lambda: make(Tied), layers], ids=["a weight of two graphs", "layers that share a graph"])
def test_several_graphs(build: Callable[[], nn.Module]) -> None:
    def run(model: Any, optimizer: AdamW) -> list[dict[str, Tensor]]:
        for part in model.children():
            part.compile(backend="fp8", options=EVERYWHERE)
        return trained(model, model, optimizer, 3, 2)

    count = len(list(build().children()))
    assert both(build, run) == ["forward"] * 2 * count + ["step+"] * 3 * count


# -- weights that others change ----------------------------------------------------------------------------------------


def load(model: nn.Module, _: Any) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def write(model: nn.Module, _: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)


def replace(model: nn.Module, _: Any) -> None:
    for p in model.parameters():
        p.data = p.data * 2


def tell(model: nn.Module, _: Any) -> None:
    for p in model.parameters():
        p.data.mul_(2)
    fp8compile.refresh_weight_cache()


def another(model: nn.Module, _: Any) -> None:
    other = torch.optim.SGD([torch.zeros(3, requires_grad=True)])
    other.step()


@pytest.mark.parametrize("change", [load, write, replace, tell, another])
def test_a_change_between_step_and_forward(change: Callable[[nn.Module, Any], None]) -> None:
    def run(model: nn.Module, optimizer: AdamW) -> list[dict[str, Tensor]]:
        call = compiled(model)
        found = trained(model, call, optimizer, 2, 1)
        change(model, optimizer)
        return found + trained(model, call, optimizer, 1, 2)

    # the first step knows no optimizer, and what the second one has cast is old
    assert both(mlp, run) == ["forward", "step+", "step+", "forward", "step+"]


def test_a_hook_behind_the_step() -> None:
    """It may write to `.data`, which nobody notices: amaxes that the update computed are not taken."""

    def run(model: nn.Module, optimizer: AdamW) -> list[dict[str, Tensor]]:
        optimizer.register_step_post_hook(lambda *_: [p.data.mul_(3) for p in model.parameters()] and None)
        return trained(model, compiled(model), optimizer, 3, 2)

    assert both(mlp, run) == ["forward"] * 2 + ["step"] * 3


def test_a_hook_behind_all_steps() -> None:
    def run(model: nn.Module, optimizer: AdamW) -> list[dict[str, Tensor]]:
        def scale(*_: Any) -> None:
            for p in model.parameters():
                p.data.mul_(3)

        call = compiled(model)
        trained(model, call, optimizer, 1, 1)  # our hook is the first one
        handle = register_optimizer_step_post_hook(scale)
        try:
            return trained(model, call, optimizer, 2, 2)
        finally:
            handle.remove()

    assert both(mlp, run) == ["forward", "step+", "forward"]


class Clamped(AdamW):
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            p.data.clamp_(-0.01, 0.01)


def test_a_class_whose_step_does_more() -> None:
    results = []
    for early in (False, True):
        model = mlp()
        with hooks.casts_by_place() as found:
            optimizer = Clamped(model.parameters(), lr=1e-2, compiled=False, fp8_weights=early)
            results.append(trained(model, compiled(model), optimizer, 3, 2))
    assert same(*results) and [where for where, _ in found] == ["forward"] * 4


def test_without_some_gradients() -> None:
    """Nobody has computed the amax of a weight that was not updated."""

    def run(model: Any, optimizer: AdamW) -> list[dict[str, Tensor]]:
        call, found = compiled(model), []
        for number in range(3):
            found += step(call, model, number)
            if number == 1:
                model.down.weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert both(mlp, run) == ["forward", "step+", "step", "step+"]


@pytest.mark.parametrize(("value", "recipe"), [(float("nan"), "delayed"), (float("inf"), "tensorwise")])
def test_a_step_on_nan(value: float, recipe: str) -> None:
    """A weight becomes NaN or infinite, and is what it would be without."""
    results = []
    for early in (False, True):
        model: Any = mlp()
        optimizer = ours(model, early)
        call = compiled(model, True, recipe)
        trained(model, call, optimizer, 1, 1)
        with hooks.casts_by_place() as found:
            for seed in range(2):
                step(call, model, seed)
            if value == value:
                with torch.no_grad():
                    model.up.weight[3, 5] = value
            else:
                model.up.weight.grad[3, 5] = value
            optimizer.step()
            assert not model.up.weight[3, 5].isfinite()
            optimizer.zero_grad()
            after = step(call, model, 7)
        results.append([{name: x.nan_to_num(7, 8, 9) for name, x in one.items()} for one in after])
    assert same(*results) and [where for where, _ in found] == ["step+"]


@pytest.mark.parametrize("split", ["by kind", "by layer"])
def test_two_optimizers(split: str) -> None:
    """By kind: what the first one casts is old after the second one's step, so it stops to cast. By layer: a weight that an
    optimizer lacks is cast in forward, and so are all of its graph's."""
    results = []
    for early in (False, True):
        model = mlp()
        every = list(model.parameters())
        first = [p for p in every if p.ndim == 2] if split == "by kind" else every[:2]
        second = [p for p in every if not any(p is one for one in first)]
        optimizers: list[Any] = [AdamW(first, lr=1e-2, compiled=False, fp8_weights=early)]
        if split == "by kind":
            optimizers.append(torch.optim.SGD(second, lr=1e-2))
        else:
            optimizers.append(AdamW(second, lr=1e-2, compiled=False, fp8_weights=early))
        call, made = compiled(model), []
        with hooks.casts_by_place() as found:
            for number in range(5):
                made += step(call, model, number)
                for optimizer in optimizers:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
        results.append(made)
    assert same(*results)
    by_kind = ["forward", "step+", "forward", "step+", "forward", "forward", "forward"]
    assert [where for where, _ in found] == (by_kind if split == "by kind" else ["forward"] * 5)


# -- what is called, kept and said -------------------------------------------------------------------------------------


def test_a_graph_that_is_not_called_is_not_cast() -> None:
    """Nor are its copies kept: another graph, for other sizes, may have taken its place."""
    model = mlp()
    optimizer = ours(model, True)
    trained(model, compiled(model), optimizer, 1, 1)
    with hooks.casts_by_place() as found:
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
    assert found == []


def test_old_copies_are_gone_before_new_ones_are_made() -> None:
    model = mlp()
    optimizer = ours(model, True)
    call = compiled(model)
    trained(model, call, optimizer, 2, 1)
    with hooks.casts_by_place() as found:
        trained(model, call, optimizer, 2, 1)
    assert found == [("step+", 0)] * 2


def test_it_warns_once_and_only_without_cache_weights(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()
    results = []
    for early in (False, True):
        model = mlp()
        optimizer = ours(model, early)
        results.append([*trained(model, compiled(model, False), optimizer, 4, 1), ends(model, optimizer)])
        warnings = [record for record in caplog.records if "fp8_weights has no effect" in record.getMessage()]
        assert len(warnings) == early and all(record.levelno == logging.WARNING for record in warnings)
    assert same(*results)
    caplog.clear()
    model = mlp()
    trained(model, compiled(model), ours(model, True), 3, 1)
    assert "no effect" not in caplog.text


def test_checkpoints_are_those_without() -> None:
    model = mlp()
    optimizer = ours(model, True)
    call = compiled(model)
    trained(model, call, optimizer, 2, 1)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert "fp8_weights" not in saved[1]["param_groups"][0]
    expected = trained(model, call, optimizer, 2, 2)
    for early in (False, True):
        other = mlp()
        second = ours(other, early)
        other.load_state_dict(saved[0])
        second.load_state_dict(saved[1])
        found = trained(other, compiled(other), second, 2, 2)
        assert same(expected, found)


@pytest.mark.slow
def test_phases() -> None:
    def run(model: nn.Module, optimizer: AdamW) -> list[dict[str, Tensor]]:
        call, found = compiled(model, True, "delayed", policy={"rules": [{"fp8": "on"}], "schedule": {}}), []
        for precision in ("bf16", "fp8", "bf16", "fp8"):
            fp8compile.set_precision(precision, model)
            found += trained(model, call, optimizer, 2, 2)
        return found

    assert both(mlp, run) == ["forward", "step+", "step+", "forward", "step+", "step+"]


@pytest.mark.slow
def test_with_a_gradient_scaler_that_skips() -> None:
    """A step that is left out changes nothing, and the copies serve on."""

    def run(model: nn.Module, optimizer: AdamW) -> list[dict[str, Tensor]]:
        call = compiled(model)
        scaler, found = torch.amp.GradScaler("cpu", init_scale=2.0), []
        trained(model, call, optimizer, 1, 1)
        for number in range(3):
            y = call(noise(1, 48, 128, seed=number, dtype=torch.float32))
            scaler.scale(y.sum()).backward()
            if number == 1:
                next(model.parameters()).grad.view(-1)[0] = float("inf")  # type: ignore[union-attr]
            found += [{"y": y.detach()}, grads_of(model)]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return found

    assert both(lambda: mlp(torch.float32), run) == ["forward", "step+", "step+", "step+"]


@pytest.mark.slow
def test_copies_and_optimizers_go() -> None:
    model: Any = mlp()
    optimizer: Any = ours(model, True)
    call: Any = compiled(model)
    trained(model, call, optimizer, 2, 1)
    del model, optimizer, call
    torch._dynamo.reset()
    gc.collect()
    assert not hooks.weights_written() and not hooks.kept_copies()
