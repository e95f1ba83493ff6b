"""`AdamW(.., fp8_weights=True)`: the step makes the FP8 weights of the next step, bitwise as the next forward
would.

tests/equivalence trains with it and without; here is when weights are cast.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
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
from tests.features.weight_cache.test_weight_cache import CHANGES, assign
from tests.support import hooks
from tests.support.cached import BF16, compiled, layer, options_of, same, trained
from tests.support.harness import ALL_FP8, grads_of, noise
from tests.support.models import Mlp, Moe, make

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]
Run = Callable[[Any, AdamW], list[dict[str, Tensor]]]


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
        assert early or "update" not in found
    assert same(*results)
    return found


def step(call: Callable[..., Tensor], model: nn.Module, seed: int) -> list[dict[str, Tensor]]:
    y = call(noise(1, 48, 128, seed=seed, dtype=BF16))
    y.sum().backward()
    return [{"y": y.detach()}, grads_of(model)]


def mlp(dtype: torch.dtype = BF16) -> nn.Module:
    return make(lambda: Mlp(128, 256), dtype)


def uneven() -> nn.Module:
    """Of the weights that are merged, all but the first are larger."""
    model: Any = layer()
    for name, p in model.named_parameters():
        if p.dim() == 2 and name.split(".")[-2] not in ("q", "gate"):
            p.data.mul_(8)
    return model


class Odd(nn.Module):
    """One weight is small, and updated with others; one lies transposed; one is read by slices, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(128, 80), nn.Linear(80, 48), nn.Linear(48, 256)
        self.d = nn.Parameter(torch.randn(128, 256).t())

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.c(self.b(F.gelu(self.a(x)))) @ self.d)
        return F.linear(x, self.d[:128]) + F.linear(x, self.d[128:])


@pytest.mark.cases(test=3, slow=4)
@pytest.mark.parametrize(
    ("build", "recipe", "master", "casts"),
    [
        (mlp, "delayed", None, "update"),
        (mlp, "blockwise", None, "forward"),
        (uneven, "delayed", "bf16+remainder", "update"),
        (mlp, "tensorwise", None, "forward"),
        (lambda: make(Odd), "delayed", None, "forward"),
        (lambda: make(Moe, BF16), "delayed", None, "update"),
        (lambda: make(lambda: Moe(turned=True), BF16), "delayed", None, "update"),
    ],
)
def test_the_same_bits(build: Callable[[], nn.Module], recipe: str, master: Any, casts: str) -> None:
    """Three micro-batches come before the first step, when nobody knows that there is an optimizer, and no
    scale."""

    def run(model: nn.Module, optimizer: AdamW) -> list[dict[str, Tensor]]:
        merged = {"merge_matmuls": True} if recipe == "delayed" else {}
        call = compiled(model, True, recipe, policy={"rules": [{"fp8": "on"}]}, **merged)
        return trained(model, call, optimizer)

    assert both(build, run, master=master) == ["forward"] * 4 + [casts] * (2 if casts == "update" else 1)


def test_scales_that_change() -> None:
    """Ten steps that let weights grow and shrink: what has another scale afterwards is cast again."""
    scales: list[tuple[float, ...]] = []

    def run(model: Any, optimizer: AdamW) -> list[dict[str, Tensor]]:
        call, found = compiled(model, True, "delayed"), []
        for number in range(10):
            optimizer.param_groups[0]["weight_decay"] = -30.0 if number % 4 < 2 else 30.0
            found += step(call, model, number)
            optimizer.step()
            optimizer.zero_grad()
            scales.append(tuple(2.0 ** x.abs().max().log2().floor().item() for x in model.parameters()))
        return found

    assert both(mlp, run)[-8:] == ["update"] * 8
    changes = [a != b for a, b in itertools.pairwise(scales[-9:])]
    assert any(changes) and not all(changes)


def test_cuda_graphs_find_what_a_step_wrote_at_the_old_addresses() -> None:
    """And a backward that comes after the step is an error, as of a weight that was saved."""
    results = []
    for cache, early in ((False, False), (True, True)):
        model: Any = mlp()
        optimizer = ours(model, early)
        options = {"triton.cudagraphs": True}
        with hooks.copies_given() as given, hooks.casts_by_place() as found:
            call = compiled(model, cache, "delayed", **options)
            results.append(trained(model, call, optimizer, 3, 2))
        if cache:
            assert len({*given}) == 1 and len(given) == 6
            assert found == ["forward"] * 2 + ["update"] * 3
    assert same(*results)
    late = call(noise(1, 48, 128, dtype=BF16).requires_grad_())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.sum().backward()


@pytest.mark.slow
def test_several_graphs() -> None:
    """Three, two of which read one weight: a step writes the copies of one of these."""

    def tied() -> nn.Module:
        model: Any = nn.Sequential(*(Mlp() for _ in range(3)))
        model[1].up.weight = model[0].up.weight
        return model

    def run(model: Any, optimizer: AdamW) -> list[dict[str, Tensor]]:
        for part in model:
            part.compile(backend="fp8", options=options_of("delayed", cache_weights=True))
        return trained(model, model, optimizer, 3, 2)

    casts = ["forward"] * 9 + ["update"] * 2 + ["forward"] + ["update"] * 2
    assert both(lambda: make(tied), run) == casts


# -- weights that others change --


def another_step(_: nn.Module) -> None:
    torch.optim.SGD([torch.zeros(3, requires_grad=True)]).step()


@pytest.mark.parametrize("change", [*(change for change in CHANGES if change is not assign), another_step])
def test_a_change_between_step_and_forward(change: Callable[[nn.Module], None]) -> None:
    def run(model: nn.Module, optimizer: AdamW) -> list[dict[str, Tensor]]:
        call = compiled(model, True, "delayed")
        found = trained(model, call, optimizer, 2, 1)
        change(model)
        return found + trained(model, call, optimizer, 1, 2)

    # the first step knows no optimizer, and what the second one has cast is old
    assert both(mlp, run) == ["forward", "forward", "update", "forward", "update"]


def triple(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(3)


def of_the_optimizer(model: nn.Module, optimizer: AdamW) -> Any:
    return optimizer.register_step_post_hook(lambda *_: triple(model))


def of_all_optimizers(model: nn.Module, optimizer: AdamW) -> Any:
    return register_optimizer_step_post_hook(lambda *_: triple(model))


class Tripled(AdamW):
    """An optimizer whose step does more."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            p.data.mul_(3)


def by_its_class(kind: type[AdamW]) -> Callable[[nn.Module, AdamW], Any]:
    def write(_: nn.Module, optimizer: AdamW) -> Any:
        optimizer.__class__ = kind
        return contextlib.nullcontext()

    return write


@pytest.mark.parametrize("write", [of_the_optimizer, of_all_optimizers, by_its_class(Tripled)])
def test_what_writes_after_the_update(
    write: Callable[[nn.Module, AdamW], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It may write to `.data`, which nobody notices."""

    def run(model: nn.Module, optimizer: AdamW) -> list[dict[str, Tensor]]:
        call = compiled(model, True, "delayed")
        trained(model, call, optimizer, 1, 1)  # our hook is the first one
        with write(model, optimizer), hooks.copies_held() as held:
            found = trained(model, call, optimizer, 2, 2)
        assert len(held) == 2  # those of the two forwards: no step has prepared any
        return found

    assert both(mlp, run)[1:] == ["forward", "forward"]
    assert caplog.text.count("fp8_weights has no effect") == 1


def test_a_class_that_changes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first optimizer of this process: torch wraps the step of its class, not AdamW's."""
    monkeypatch.setattr(AdamW, "step", AdamW.step.__wrapped__)  # type: ignore[attr-defined]
    model, kind = mlp(), type("Renamed", (AdamW,), {})
    optimizer = kind(model.parameters(), lr=1e-2, fp8_weights=True, compiled=False)
    ours(model, False)
    assert kind.step is not AdamW.step
    with hooks.casts_by_place() as found:
        trained(model, compiled(model, True, "delayed"), optimizer, 3, 1)
    assert found == ["forward", "forward", "update", "update"]


def test_an_update_that_cannot_cast(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `compiled=False` on a GPU, or a learning rate there."""
    monkeypatch.setattr(AdamW, "_casts", lambda *_: False)

    def run(model: nn.Module, optimizer: AdamW) -> list[dict[str, Tensor]]:
        return trained(model, compiled(model, True, "delayed"), optimizer, 3, 1)

    assert both(mlp, run) == ["forward"] * 3
    assert caplog.text.count("the update casts with compiled=True") == 1


def test_without_some_gradients() -> None:
    """Nobody has computed the amax of a weight that was not updated."""

    def run(model: Any, optimizer: AdamW) -> list[dict[str, Tensor]]:
        call, found = compiled(model, True, "delayed"), []
        for number in range(3):
            found += step(call, model, number)
            if number == 1:
                model.down.weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert both(mlp, run) == ["forward", "forward", "forward", "update"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_on_nan(value: float) -> None:
    """A weight becomes NaN or infinite, and is what it would be without."""
    results = []
    for early in (False, True):
        model: Any = mlp()
        optimizer = ours(model, early)
        call = compiled(model, True, "delayed")
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
    assert same(*results) and found == ["forward", "update"]


@pytest.mark.parametrize("split", ["by kind", "by layer"])
def test_two_optimizers(split: str) -> None:
    """By kind: what the first one casts is old after the second one's step, so it stops to cast. By layer: a
    weight that an optimizer lacks is cast in forward, and so are all of its graph's."""
    results = []
    for early in (False, True):
        model: Any = mlp()
        parts = [[model.up.weight, model.down.weight], [model.up.bias, model.down.bias]]
        if split == "by layer":
            parts = [list(model.up.parameters()), list(model.down.parameters())]
        optimizers: list[Any] = [AdamW(part, lr=1e-2, compiled=False, fp8_weights=early) for part in parts]
        if split == "by kind":
            optimizers[1] = torch.optim.SGD(parts[1], lr=1e-2)
        call, made = compiled(model, True, "delayed"), []
        with hooks.casts_by_place() as found:
            for number in range(5):
                made += step(call, model, number)
                for optimizer in optimizers:
                    optimizer.step()
                model.zero_grad()
        results.append(made)
    assert same(*results)
    by_kind = ["forward", "forward", "update", "forward", "update", "forward", "forward"]
    assert found == (by_kind if split == "by kind" else ["forward"] * 5)


# -- what is called, kept and said --


def test_a_graph_that_is_not_called_is_not_cast() -> None:
    """Nor are its copies kept: another graph, for other sizes, may have taken its place."""
    model = mlp()
    optimizer = ours(model, True)
    trained(model, compiled(model, True, "delayed"), optimizer, 1, 1)
    with hooks.casts_by_place() as found:
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
    assert found == []


def test_old_copies_are_gone_before_new_ones_are_made() -> None:
    model = mlp()
    optimizer = ours(model, True)
    call = compiled(model, True, "delayed")
    trained(model, call, optimizer, 2, 1)
    with hooks.copies_held() as held, hooks.casts_by_place() as found:
        trained(model, call, optimizer, 2, 1)
    assert held == [0] * 2 and found == ["update"] * 2


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
    assert "no effect" not in caplog.text and "fp8_weights" not in optimizer.state_dict()["param_groups"][0]


@pytest.mark.slow
def test_phases() -> None:
    """In a phase of high precision no weight is cast; FP8 begins with fresh copies."""
    results, casts = [], []
    for cache, early in ((False, False), (True, False), (True, True)):
        model = mlp()
        optimizer = ours(model, early)
        call = compiled(model, cache, "delayed", policy={**ALL_FP8, "schedule": {}})
        results.append([])
        with hooks.casts_by_place() as found:
            for precision in ("bf16", "fp8", "bf16", "fp8"):
                fp8compile.set_precision(precision, model)
                results[-1] += trained(model, call, optimizer, 2, 2)
        casts.append(found)
    assert same(results[0], results[1]) and same(results[0], results[2])
    assert casts == [[], ["forward"] * 4, ["forward", "update", "update"] * 2]


@pytest.mark.slow
def test_autocast_and_a_gradient_scaler_that_skips() -> None:
    """A step that is left out changes nothing, and the copies serve on."""

    def run(model: nn.Module, optimizer: AdamW) -> list[dict[str, Tensor]]:
        call = compiled(model, True, "delayed")
        scaler, found = torch.amp.GradScaler("cpu", init_scale=2.0), []
        for number in range(4):
            with torch.autocast("cpu", BF16):
                y = call(noise(1, 48, 128, seed=number))
            scaler.scale(y.sum()).backward()
            if number == 2:
                next(model.parameters()).grad.view(-1)[0] = float("inf")  # type: ignore[union-attr]
            found += [{"y": y.detach()}, grads_of(model)]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return found

    assert both(lambda: mlp(torch.float32), run) == ["forward", "forward", "update", "update"]


class Viewed(nn.Module):
    """Weights that are read as matrices with other rows than theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(256, 128, 1) / 8)
        self.b = nn.Parameter(torch.randn(256, 256) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.a.view(256, 128))), self.b.view(256, 2, 128).view(256, 256))


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(128, 256) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.a.view(256, 128))


class Product(nn.Module):
    """A weight is the input of a matmul, too, so its amax is among what comes from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(128, 128) / 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.a), self.a @ self.b)


@pytest.mark.parametrize("build", [Viewed, Halved, Product])
def test_what_a_step_cannot_write(build: Callable[[], nn.Module]) -> None:
    def run(model: nn.Module, optimizer: AdamW) -> list[dict[str, Tensor]]:
        with hooks.copies_begin_with(123.0):
            return trained(model, compiled(model, True, "delayed"), optimizer, 4, 1)

    assert "forward" in both(lambda: make(build), run)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="its Dynamo does not see another size of the data")
def test_other_data_under_the_same_parameter() -> None:
    """The graph of its former size is there, and its copies are not written."""
    results = []
    for early in (False, True):
        model: Any = make(lambda: nn.Linear(128, 256, bias=False), BF16)
        call, found = compiled(model, True, "delayed"), []
        for rows in (256, 512):
            if rows == 512:
                step(call, model, 7)
                model.weight.data = noise(rows, 128, seed=1, dtype=BF16)
                model.weight.grad = None
            optimizer = ours(model, early)
            for seed in range(3):
                found += step(call, model, seed)
                optimizer.step()
                optimizer.zero_grad()
        results.append(found)
    assert same(*results)
