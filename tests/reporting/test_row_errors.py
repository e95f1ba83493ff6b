"""The errors of rows and columns in measured calls, and what these let others see of their operands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.ir import ops
from fp8compile.ir.schemas import FP8Copy
from fp8compile.runtime import probe
from tests.support import hooks
from tests.support.harness import ALL_FP8, compiled, leaf, like, noise, row_error
from tests.support.models import Experts, Mlp, make
from tests.support.operands import ends
from tests.support.reference_settings import RECIPES, Settings

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]

# of a linear that are measured: with two copies of different values, two of a tensor
TENSORS = dict(zip(RECIPES, (3, 3, 6, 2, 5, 6), strict=True))


def train(run, x: Tensor) -> Tensor:
    y = run(x)
    y.backward(like(y, 1))
    return y


@pytest.mark.parametrize("recipe", RECIPES)
def test_row_errors(recipe: str) -> None:
    """Those of the oracle's casts. Where a transposed copy has values of its own, so have its rows."""
    model, settings = make(lambda: nn.Linear(256, 384, bias=False)), Settings(recipe)
    x = leaf(noise(272, 256, seed=1))
    run = compiled(model, recipe)
    fp8compile.stats(model, measure=True)
    dy = like(train(run, x), 1)
    rows = {(row["role"], row["layout"]): row for row in fp8compile.stats(model) if row["mse"] is not None}
    # a backward of `rowwise_with_gw_hp` gets nothing that the forward has made, which would mark it
    assert len(rows) == TENSORS[recipe]
    tensors = {"input": (x.detach(), "fprop", "wgrad"), "weight": (model.weight.detach(), "fprop", "dgrad")}
    tensors["gradient"] = dy, "dgrad", "wgrad"
    for (role, layout), found in rows.items():
        tensor, plain, late = tensors[role]
        given, gemm = (tensor.t(), late) if layout == "transposed" else (tensor, plain)
        values = settings.quantize(given.contiguous(), role, gemm, None).exact()
        assert found["row_error"] == pytest.approx(row_error(given, values), rel=1e-5), (role, layout)
        assert found["column_error"] == pytest.approx(row_error(given.t(), values.t()), rel=1e-5)


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_row_errors_of_experts(recipe: str) -> None:
    """Rows of a stack are those of all its matrices. One expert is so small that it is lost beside the others
    where all share a scale: not half of the rows."""
    model, settings = make(lambda: Experts(128, 128, 4), torch.bfloat16), Settings(recipe)
    with torch.no_grad():
        model.down_proj[1] *= 1e-7
    x, offs = leaf(noise(320, 128).bfloat16()), ends([100, 0, 37, 183])
    run = compiled(model, recipe, policy=ALL_FP8)
    fp8compile.stats(model, measure=True)
    run(x, offs).sum().backward()
    rows = {(row["name"], row["role"], row["layout"]): row for row in fp8compile.stats(model)}
    layout = "" if recipe == "delayed" else "plain"
    for name, role, tensor in (
        ("gate_up_proj", "input", x),
        ("gate_up_proj", "weight", model.gate_up_proj.flatten(0, 1)),
        ("down_proj", "weight", model.down_proj.flatten(0, 1)),
    ):
        values = settings.quantize(tensor.detach(), role, "fprop", None).exact()
        found = rows[name, role, layout]["row_error"]
        assert found == pytest.approx(row_error(tensor.detach(), values), rel=1e-5)
    down = rows["down_proj", "weight", layout]
    assert down["row_error"] < 0.03 and (down["underflows%"] > 20) == (recipe == "delayed")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("what", ["row_error", "column_error"])
def test_outliers_hide_in_a_norm_over_the_tensor(recipe: str, what: str) -> None:
    """The largest tokens, or one channel, decide it. The others are lost where they share a scale."""
    model = make(lambda: nn.Linear(128, 128, bias=False))
    x = noise(256, 128)
    if what == "row_error":
        x[::50] *= 2.0**18
    else:
        x[:, 7] *= 2.0**20
    run = compiled(model, recipe)
    fp8compile.stats(model, measure=True)
    train(run, x)
    rows = [r for r in fp8compile.stats(model) if r["role"] == "input" and r["layout"] != "transposed"]
    fine = "mxfp8", *(("blockwise", "rowwise", "rowwise_with_gw_hp") if what == "row_error" else ())
    assert len(rows) == 1 and rows[0]["sqnr"] > 25
    assert (rows[0][what] > 0.5) == (rows[0]["underflows%"] > 50) == (recipe not in fine)
    other = "column_error" if what == "row_error" else "row_error"
    assert rows[0][other] < 0.04


def test_rows_are_tokens_where_only_wgrad_is_in_fp8() -> None:
    """It reads a transposed copy, but of the same values as the other one would have."""
    model, x = make(lambda: nn.Linear(128, 128, bias=False)), noise(250, 128)
    x[::50] *= 2.0**18
    rules = [{"gemm": ["wgrad"], "fp8": "on"}, {"fp8": "off"}]
    run = compiled(model, "tensorwise", policy={"rules": rules})
    fp8compile.stats(model, measure=True)
    train(run, leaf(x))
    row = next(row for row in fp8compile.stats(model) if row["role"] == "input")
    values = Settings("tensorwise").quantize(x, "input", "wgrad", None).exact()
    assert row["layout"] == "" and row["sqnr"] > 25
    assert row["row_error"] == pytest.approx(row_error(x, values)) and row["row_error"] > 0.5


def test_other_casts_of_what_is_measured_can_be_tried() -> None:
    """`on_operand` gets each tensor once, and its cast; its error ends the measurement, not the training."""
    model, x = make(Mlp), noise(64, 128)
    x[::40] *= 2.0**18
    run = compiled(model, "delayed")
    train(run, x)
    found = {}

    def on_operand(weight: Tensor, name: probe.Name, x: Tensor, cast: FP8Copy) -> None:
        amax = ops.amax_blocks(x, False, (1, 0))
        scale = ops.current_scale(amax, cast.fp8_max, 0)
        copy = ops.quantize(x, scale, cast.dtype, cast.fp8_max, False, (1, 0))
        rows = probe.measured(x, scale, copy, cast.fp8_max, False, (1, 0))[-1].item()
        assert (weight is model.up.weight, name[0]) not in found
        found[weight is model.up.weight, name[0]] = (x.shape, rows)

    measurement = probe.Measurement(model, on_operand).begin()
    train(run, x)
    assert len(found) == 6 and found[True, "weight"][0] == model.up.weight.shape
    assert found[True, "input"][0] == x.shape and found[True, "input"][1] < 0.03  # with a scale a row
    assert hooks.measured(model.up.weight)["input"]["row_error"] > 0.5
    assert not measurement.failed
    measurement.end()
    again = probe.Measurement(model, lambda *_: 1 // 0).begin()
    train(run, x)
    assert again.failed and not hooks.measuring()
