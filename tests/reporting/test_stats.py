"""Telemetry: the numbers equal a plain computation, and which calls are measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile.ir import ops
from fp8compile.reporting.stats import COSTLY, COUNTS, STATE, Stats
from fp8compile.runtime import probe
from tests.support import hooks
from tests.support.harness import compiled, leaf, like, noise, row_error
from tests.support.models import Mlp, Parallel, Stack, linear, make
from tests.support.reference_casts import scale_of

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


def train(run, x: Tensor) -> Tensor:
    y = run(x)
    y.backward(like(y, 1))
    return y


@pytest.fixture
def looked() -> Iterator[list[str]]:
    """A list of the roles of all measured casts."""
    with hooks.measured_casts() as seen:
        yield seen


def all_measured(model: nn.Module) -> bool:
    rows = fp8compile.stats(model).rows()
    return bool(rows) and all(row["mse"] is not None for row in rows)


def none_measured(model: nn.Module) -> bool:
    return all(row["mse"] is None for row in fp8compile.stats(model))


# numbers


def expected(x: Tensor, scale: Tensor, copy: Tensor, fp8_max: float) -> list[float]:
    """Overflows, underflows, error and signal, by element in float64. `scale`: one for each element."""
    a, s, c = (t.double() for t in (x, scale, copy))
    finite = a.isfinite()
    error = (a - c / s)[finite].square().sum()
    beyond = ((a.abs() * s) > fp8_max * (1 + 1e-5)).sum()
    return [beyond.item(), ((a != 0) & (c == 0)).sum().item(), error.item(), a[finite].square().sum().item()]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 128), (128, 128), (1, 32)])
def test_measured(block: tuple[int, int], transposed: bool) -> None:
    """Random, with outliers, tiny values and an infinity; some scales are too large. In parts and at once."""
    x = noise(300, 272, seed=3).bfloat16()
    x[::7, ::5] *= 1e-6
    x[5, 7], x[9, 11], x[17, 0], x[60:80] = 3000.0, 0.0, math.inf, 0.0
    if block == (0, 0):
        scale = torch.tensor([50.0])
    else:
        amax = ops.amax_blocks(x.nan_to_num(posinf=1.0), transposed, block)
        scale = ops.current_scale(amax, 448.0, 0)
        scale[0, 0] *= 8
    copy = ops.quantize(x, scale, torch.float8_e4m3fn, 448.0, transposed, block)
    with hooks.measured_in_parts(1 << 14):
        vector = probe.measured(x, scale, copy, 448.0, transposed, block).tolist()
    at_once = probe.measured(x, scale, copy, 448.0, transposed, block).tolist()
    assert vector == pytest.approx(at_once, rel=1e-6)
    seen = dict(zip(probe.COLUMNS, vector, strict=True))
    source = x.t() if transposed else x
    values = copy[:, : source.shape[1]].float()
    spread = ops.spread(scale, source.shape, block)
    wanted = expected(source.float(), spread.expand(source.shape), values, 448.0)
    assert seen["elements"] == x.numel() and seen["amax"] == math.inf
    assert [seen["overflows"], seen["underflows"]] == wanted[:2] and min(wanted) > 0
    assert seen["error"] == pytest.approx(wanted[2], rel=1e-5)
    assert seen["signal"] == pytest.approx(wanted[3], rel=1e-6)
    exact = values.double() / spread.double()
    assert seen["row_error"] == pytest.approx(row_error(source, exact), rel=1e-5)
    assert seen["column_error"] == pytest.approx(row_error(source.t(), exact.t()), rel=1e-5)
    assert seen["scales"] == scale.numel() and seen["scale"] == scale.max().item()
    assert seen["scale_inv_min"] == pytest.approx(1 / scale.max().item())
    assert seen["scale_inv_max"] == pytest.approx(1 / scale.min().item())


def test_a_tensor_that_is_scaled_to_the_maximum_does_not_overflow() -> None:
    """amax * scale may exceed the maximum by a rounding: that is no overflow."""
    for value in torch.linspace(0.1, 7.0, 200).tolist():
        x = torch.full((16, 16), value)
        scale = ops.current_scale(ops.amax(x), 448.0, 0)
        copy = ops.quantize(x, scale, torch.float8_e4m3fn, 448.0, False)
        assert probe.measured(x, scale, copy, 448.0, False, (0, 0))[probe.COLUMNS.index("overflows")] == 0


def test_delayed_without_measuring() -> None:
    model = linear(0.5)
    run = compiled(model)
    y = run(torch.full((16, 128), 2.0))
    y.backward(torch.full_like(y, 3.0))
    rows = {row["role"]: row for row in fp8compile.stats(model).rows()}
    for role, amax, fp8_max, form in (
        ("input", 2.0, 448.0, "e4m3fn"),
        ("weight", 0.5, 448.0, "e4m3fn"),
        ("gradient", 3.0, 57344.0 / 2**11, "e5m2"),
    ):
        row, scale = rows[role], scale_of(amax, fp8_max)
        inverse = torch.tensor(1 / scale, dtype=torch.float64).float().item()
        assert (row["name"], row["use"], row["layout"]) == ("weight", 0, "")
        assert (row["recipe"], row["format"]) == ("delayed", form)
        assert (row["amax"], row["scale"]) == (amax, scale)
        assert row["scale_inv"] == row["scale_inv_min"] == row["scale_inv_max"] == inverse
        assert row["overflows%"] is row["underflows%"] is row["mse"] is row["sqnr"] is None


def test_an_overflow_and_its_error() -> None:
    """x was 1 in earlier calls, so 4 saturates to 1; a quarter of x vanishes."""
    model = linear()
    run = compiled(model, on_overflow="saturate")
    train(run, torch.ones(16, 128))
    fp8compile.stats(model, measure=True)
    x = torch.full((16, 128), 4.0)
    x[:4], x[4:8] = 1e-9, 1.0
    train(run, x)
    row = next(row for row in fp8compile.stats(model) if row["role"] == "input")
    assert row["overflows%"] == 50.0 and row["underflows%"] == 25.0
    assert row["mse"] == pytest.approx(4.5)
    assert row["sqnr"] == pytest.approx(10 * math.log10((8 * 16 + 4) / (8 * 9)))
    assert (row["amax"], row["scale"]) == (4.0, 112.0)  # the state for the next call


def test_what_is_not_finite_or_zero_is_json() -> None:
    model = linear()
    run = compiled(model, "tensorwise")
    fp8compile.stats(model, measure=True)
    x = torch.ones(16, 128)
    x[0, 0] = math.inf
    run(x).backward(torch.zeros(16, 128))
    stats = fp8compile.stats(model)
    json.dumps(stats.to_dict(), allow_nan=False)
    tensors = stats.to_dict()["weight"]
    gradient = tensors["gradient.0"]
    assert tensors["input.0"]["amax"] is None
    assert (gradient["mse"], gradient["sqnr"], gradient["amax"]) == (0.0, None, 0.0)
    assert "weight" in str(stats) and len(stats) == 3


def test_no_amax_after_a_nan() -> None:
    """The state keeps the amax of the call before. The mark of a page lasts until the host has looked, as the
    call of another model has it do."""
    model, other = make(Mlp), linear()
    run, beside = compiled(model), compiled(other)

    def amaxes() -> list[float | None]:
        run(noise(16, 128)).square().mean().backward()
        read = [row["amax"] for row in fp8compile.stats(model)]
        beside(noise(16, 128)).sum().backward()
        assert read == [row["amax"] for row in fp8compile.stats(model)]
        return read

    before = amaxes()
    fp8compile.stats(model, measure=True)
    assert before == amaxes() and len(before) == 6 and None not in before
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        model.up.weight[3, 5] = math.nan
    for _ in range(3):
        assert amaxes() == [before[0], None, None, None, before[4], None]  # all but x and down.weight
        # not of a call before the NaN
        measured = [row["sqnr"] is not None for row in fp8compile.stats(model)]
        assert measured == [True, False, False, False, True, False]
    fp8compile.stats(model, measure=True)
    with torch.no_grad():
        model.up.weight.fill_(math.nan)
    amaxes()
    up = fp8compile.stats(model).rows()[1]
    assert up["role"] == "weight" and [up[key] for key in ("amax", *COSTLY)] == 7 * [None]
    model.load_state_dict(weights)
    amaxes()  # a cold call
    assert amaxes() == before


@pytest.mark.feature("schedule")
def test_an_amax_comes_back_in_a_phase_of_high_precision(caplog) -> None:
    """A tensor that is not cast is not told of."""
    model = make(Mlp)
    run = compiled(model, policy={"schedule": {"warmup_steps": 100}})
    with hooks.noticed_at_once():
        for factor, known in ((1.0, True), (math.nan, False), (1.0, True)):
            run(noise(16, 128) * factor).square().mean().backward()
            row = fp8compile.stats(model).rows()[0]
            assert (row["amax"] is not None) == known
    assert row["not_finite_calls"] == 1
    assert "an infinity or a NaN" not in caplog.text


def test_equal_rows_share_a_line() -> None:
    """For a recipe without state there are no numbers before a call is measured."""
    row = dict.fromkeys((*STATE, *COUNTS, *COSTLY))
    row |= {"role": "input", "use": 0, "layout": "", "recipe": "tensorwise", "format": "e4m3fn"}
    stats = Stats([{**row, "name": f"h.{i}.fc.weight", "amax": 2.5 if i == 3 else None} for i in range(4)])
    names = [line.split("  ")[0] for line in str(stats).splitlines()[2:]]
    assert names == ["h.0-2.fc.weight (x3)", "h.3.fc.weight"] and len(stats) == len(stats.rows()) == 4


def test_nothing_compiled() -> None:
    model = linear()
    assert fp8compile.stats(model).rows() == [] and "nothing" in str(fp8compile.stats(model))
    with pytest.raises(TypeError, match="Module"):
        fp8compile.stats("model")  # type: ignore[arg-type]


# which calls are measured (tests/equivalence has their results: those of ordinary calls)


def test_a_checkpointed_block_that_is_called_twice(looked) -> None:
    """One of two calls is measured, and the backward begins with the recomputation of the other call. No
    recomputation is measured."""
    model = make(Mlp)
    run = compiled(model)
    for step in range(4):
        if step == 2:
            fp8compile.stats(model, measure=True)
        a, b = (checkpoint(run, leaf(noise(16, 128, seed=step + i)), use_reentrant=False) for i in range(2))
        (a.sum() + 2 * b.sum()).backward()
    assert all_measured(model)
    assert looked.count("weight") == 2


def test_asked_between_forward_and_recomputation(looked) -> None:
    """The recomputation belongs to an ordinary call and is not measured; the next call is."""
    model = make(Mlp)
    run = compiled(model, "tensorwise")
    y = checkpoint(run, leaf(noise(16, 128)), use_reentrant=False)
    fp8compile.stats(model, measure=True)
    y.sum().backward()
    assert not looked
    train(run, noise(16, 128))
    assert set(looked) == {"input", "weight", "gradient"}


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_two_forwards_then_two_backwards(recipe: str) -> None:
    """The first of the two forwards is measured, whichever backward comes first."""
    model = linear()
    run = compiled(model, recipe)
    for order in ((0, 1), (1, 0)):
        train(run, torch.ones(16, 128))
        fp8compile.stats(model, measure=True)
        outputs = [run(torch.full((16, 128), value)) for value in (3.0, 5.0)]
        for i in order:
            outputs[i].backward(torch.full((16, 128), 7.0 + i))
        amaxes = {role: numbers["amax"] for role, numbers in hooks.measured(model.weight).items()}
        assert amaxes == {"input": 3.0, "weight": 0.5, "gradient": 7.0}


def test_a_forward_whose_backward_never_comes(looked) -> None:
    """Later calls do not run eagerly for ever."""
    model = linear()
    run = compiled(model, "tensorwise")
    fp8compile.stats(model, measure=True)
    with hooks.slow_calls() as slow:
        for _ in range(40):
            run(torch.ones(16, 128))
    assert slow[0] and not slow[-1] and set(looked) <= {"input", "weight"}


def test_models_of_one_class(looked) -> None:
    """The models share code; only one of them is measured."""
    first, second = make(Mlp), make(Mlp, seed=1)
    runs = compiled(first, "tensorwise"), compiled(second, "tensorwise")
    for run in runs:
        train(run, noise(16, 128))
    fp8compile.stats(second, measure=True)
    for run in runs:
        train(run, noise(16, 128))
    assert none_measured(first) and all_measured(second) and looked


@pytest.mark.slow
def test_evaluation_is_not_measured(looked) -> None:
    """Also not in FP8."""
    model = make(Mlp)
    run = compiled(model, "tensorwise", eval="fp8")
    train(run, noise(16, 128))
    fp8compile.stats(model, measure=True)
    with torch.no_grad():
        run(noise(16, 128))
    model.eval()
    train(run, noise(16, 128))
    assert not looked
    model.train()
    train(run, noise(16, 128))
    assert set(looked) == {"input", "weight", "gradient"}


def test_parts_that_are_compiled() -> None:
    """The next call of each is measured; names are those of the bare model."""
    model = make(lambda: Parallel(Mlp(), Mlp(), Mlp()))
    model.inner[0] = torch.compile(model.inner[0], backend="fp8", options={"recipe": "tensorwise"})
    for block in model.inner[1:]:
        block.compile(backend="fp8", options={"recipe": "tensorwise"})
    for step in range(2):
        fp8compile.stats(model, measure=True)
        train(model, noise(16, 128, seed=step))
    assert all_measured(model)
    names = {row["name"] for row in fp8compile.stats(model)}
    assert names == {f"inner.{i}.{part}.weight" for i in range(3) for part in ("up", "down")}


def test_a_split_graph_with_a_lazy_backward(one_process: str) -> None:
    model = make(lambda: Stack(Mlp(256, 1024)))
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    run = compiled(wrapped, "rowwise")
    fp8compile.stats(run, measure=True)
    train(run, noise(16, 256))
    assert len(fp8compile.report(model).graphs) > 1
    assert all_measured(wrapped)


@pytest.mark.slow
def test_after_a_reset_a_new_graph_replaces_what_was_known() -> None:
    model, x = make(Mlp), noise(16, 128)
    compiled(model, "delayed")(x).sum().backward()
    assert {row["recipe"] for row in fp8compile.stats(model).rows()} == {"delayed"}
    torch._dynamo.reset()
    assert fp8compile.stats(model).rows()
    compiled(model, "rowwise")(x).sum().backward()
    assert {row["recipe"] for row in fp8compile.stats(model).rows()} == {"rowwise"}


def fresh(model: nn.Module, name: str) -> None:
    """Assigns a new parameter to a module."""
    module = model.get_submodule(name)
    module.weight = nn.Parameter(module.weight.detach().clone())


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "name"), [("delayed", "up"), ("tensorwise", "down")])
def test_an_assigned_weight(recipe: str, name: str) -> None:
    """A new parameter, for the first weight or another, replaces the old one in statistics and reports."""
    model = make(Mlp)
    run = compiled(model, recipe)
    train(run, noise(16, 128))
    before = [(row["name"], row["role"], row["recipe"], row["format"]) for row in fp8compile.stats(model)]
    known = hooks.remembered(model.up.weight)
    for _ in range(3):
        fresh(model, name)
        fp8compile.stats(model, measure=True)
        train(run, noise(16, 128))
        rows = fp8compile.stats(model).rows()
        assert [(row["name"], row["role"], row["recipe"], row["format"]) for row in rows] == before
        assert all(row["mse"] is not None and row["amax"] for row in rows)
        now = hooks.remembered(model.up.weight)
        # the replaced ones are gone, and perhaps models of other tests
        assert now[0] <= known[0] and now[1] <= known[1]
    for part in (model.up, model.down):
        assert len(fp8compile.report(part).graphs) == 1
