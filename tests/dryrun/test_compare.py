"""compare(): a step in FP8 beside high precision. It finds planted faults, and flags nothing healthy."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from fp8compile.dryrun.comparison import BAND, EXPECTED, OUTLIERS
from fp8compile.dryrun.observe import Likeness, dithered, peak_of, sums
from fp8compile.errors import Fp8CompileError, OptionError
from tests.support import hooks, models
from tests.support.compared import HEALTHY, WIDTH, Case, LanguageModel
from tests.support.harness import ALL_FP8, compiled, noise, sqnr

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]

ROWS = 64
Compare = Callable[..., fp8compile.Comparison]


def loss_of(case: Case, run: Callable[..., Any]) -> Tensor:
    result = run(*case.args)
    return case.loss(result) if case.loss is not None else result["loss"]


def train(case: Case, steps: int = 2, lr: float = 1e-3, **options: Any) -> Callable[..., Any]:
    """The compiled model, after some steps."""
    run = compiled(case.model, **options)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr)
    for _ in range(steps):
        loss_of(case, run).backward()
        optimizer.step()
        optimizer.zero_grad()
    return run


def to_one(y: Tensor) -> Tensor:
    return (y - 1).square().mean()


def mlp() -> Case:
    return Case(models.make(models.Mlp), (noise(ROWS, WIDTH),), to_one)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "compare.md"
ALMOST = re.compile(r" +[(+-]*\d\S*")  # numbers, which another CPU may change in their last digits


@functools.cache
def an_mlp() -> tuple[Case, Compare]:
    """An MLP that was never trained. All comparisons have the same graphs."""
    case = mlp()
    return case, functools.partial(hooks.comparing(case.model), loss=to_one)


@functools.cache
def trained() -> tuple[Case, Compare]:
    """Two MLPs between an embedding and a head, after two steps. All comparisons have the same graphs."""
    tokens = torch.randint(0, 160, (4, 16), generator=torch.Generator().manual_seed(1))
    case = Case(models.make(lambda: LanguageModel(models.ResidualMlp(), models.ResidualMlp())), (tokens,))
    return case, hooks.comparing(train(case))


def by_name(found: fp8compile.Comparison) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found.rows()}


# -- numbers --


@pytest.mark.slow
def test_numbers_are_those_of_the_runs() -> None:
    """Losses, gradients and outputs agree with the eager model in float32 and with a compiled step in FP8."""
    case, compare = an_mlp()
    found = compare(*case.args)
    exact, fp8 = copy.deepcopy(case.model), copy.deepcopy(case.model)
    loss = loss_of(case, exact)
    loss.backward()
    ours = loss_of(case, compiled(fp8))
    ours.backward()
    assert found.loss == pytest.approx(loss.item(), rel=1e-6)
    assert found.loss_fp8 == pytest.approx(ours.item(), rel=1e-6)
    rows = by_name(found)
    for name, parameter in exact.named_parameters():
        a, b = parameter.grad, fp8.get_parameter(name).grad
        assert rows[name]["gradient"] == pytest.approx(sqnr(a, b), abs=0.05), name
        assert rows[name]["norm"] == pytest.approx((b.norm() / a.norm()).item(), rel=1e-4)
        cosine = F.cosine_similarity(a.flatten(), b.flatten(), 0).item()
        assert rows[name]["cosine"] == pytest.approx(cosine, rel=1e-4)
    x = case.args[0]
    up, bias, in_fp8 = exact.up(x), exact.up.bias, fp8_linear(exact.up, x)
    assert rows["up.weight"]["output"] == pytest.approx(sqnr(up, in_fp8), abs=0.1)
    assert rows["up.weight"]["fprop"] == pytest.approx(sqnr(up - bias, in_fp8 - bias), abs=0.1)
    assert rows["up.weight"]["dgrad"] is None and rows["down.weight"]["dgrad"] > 20
    assert rows["up.bias"]["kind"] == "parameter" and rows["up.bias"]["output"] is None
    assert found.deterministic is True and found.flagged == []


def test_experts() -> None:
    """Both layouts of a stack of weights are measured, also where each column of each expert has a scale."""
    model = models.make(lambda: models.Moe(WIDTH, WIDTH, 4, 2)).to(torch.bfloat16)
    options = {"recipe": "rowwise", "policy": ALL_FP8}
    x = noise(1, 64, WIDTH).to(torch.bfloat16)
    rows = by_name(fp8compile.compare(model, x, loss=lambda y: y.float().square().mean(), options=options))
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        # the input has no gradient
        gemms = ("fprop", "dgrad", "wgrad") if name == "experts.down_proj" else ("fprop", "wgrad")
        assert all(26 < rows[name][gemm] < 34 for gemm in gemms), rows[name]


def fp8_linear(linear: nn.Linear, x: Tensor) -> Tensor:
    """Independent of the package: both operands in E4M3, scaled by their amaxes."""

    def cast(t: Tensor) -> Tensor:
        scale = 448 / t.abs().max()
        return (t * scale).to(torch.float8_e4m3fn).to(torch.float32) / scale

    return cast(x) @ cast(linear.weight.detach()).t() + linear.bias.detach()


def test_dither_has_a_quarter_of_a_squared_ulp() -> None:
    """Of values on bf16's grid as of any others; a bf16 kernel's own rounding has a twelfth."""
    generator = torch.Generator().manual_seed(0)
    for x in (1 + torch.rand(1 << 16), (1 + torch.rand(1 << 16)).to(torch.bfloat16).float()):
        error = (dithered(x, generator) - x) / 2.0**-7  # one ulp of [1, 2)
        assert error.square().mean().item() == pytest.approx(0.25, rel=0.02)
        assert abs(error.mean().item()) < 0.01
    odd = torch.tensor([0.0, math.inf, -math.inf, math.nan])
    assert torch.equal(dithered(odd, generator).nan_to_num(7.0), odd.nan_to_num(7.0))
    assert dithered(x.bfloat16(), generator).dtype == torch.bfloat16


def test_likeness_and_peaks() -> None:
    a = torch.tensor([3.0, 4.0])
    assert Likeness.of(sums(a, 2 * a)) == (0.0, 1.0, 2.0)
    assert Likeness.of(sums(a, a)).sqnr == math.inf and Likeness.of(sums(0 * a, a)).sqnr == -math.inf
    assert all(map(math.isnan, Likeness.of(sums(a, a / 0))))
    assert peak_of(torch.tensor([0.0, 0.0, 1.0, -2.0, 2.0, 2000.0])).item() == 1000.0
    assert peak_of(torch.zeros(3)).item() == 0.0


@pytest.mark.weekly
def test_table_dict_and_picture(tmp_path) -> None:
    case, compare = trained()
    found = compare(*case.args)
    text = str(found)
    assert "all layers are within the expected range" in text
    assert text.index("layers.0.up.weight") < text.index("norm.weight")
    assert len(found.rows()) == len(found) == len(list(found)) and found.flagged == []
    whole = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert whole["rows"] == found.rows() and whole["flagged"] == [] and whole["deterministic"] is True
    assert {"sqnr", "cosine", "norm"} == set(whole["gradient"])
    assert whole["gradient"]["sqnr"] < whole["gradient_bf16"]["sqnr"]
    assert "and 1 more" in found.table(worst=3) and "and 1 more" not in found.table(worst=None)
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(OptionError, match="cannot be written"):
        found.plot(tmp_path / "missing" / "compare.png")


# -- healthy models, and faults --


@pytest.mark.weekly
@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_flagged_on_healthy_models(name: str) -> None:
    """At the first step, and with a training's scales. (Quick tests ask it of `an_mlp` and `trained`.)"""
    case = HEALTHY[name]()
    compare = hooks.comparing(case.model)
    for train_first in (False, True):
        if train_first:
            train(case)
        found = compare(*case.args, loss=case.loss)
        assert found.flagged == [], str(found)
        layers = [row for row in found.rows() if row["kind"] == "layer"]
        assert layers and found.deterministic
        for row in layers:  # the claim of the band: what is in order is far inside of it
            for gemm, expected in EXPECTED.items():
                assert row[gemm] is None or row[gemm] > expected - BAND / 2, (row["name"], gemm, row[gemm])


@pytest.mark.cases(test=1, slow=3)
@pytest.mark.parametrize("factor", [2.0**10, 2.0**-16])
@pytest.mark.parametrize("role", ["input", "weight", "gradient"])
def test_a_scale_frozen_at_a_wrong_value(role: str, factor: float) -> None:
    case, compare = trained()
    name, wrong = "layers.1.up.weight", factor if role != "gradient" else factor**1.5
    with hooks.wrong_scale(case.model, name, role, wrong):
        found = compare(*case.args)
    first, *_ = found.rows()
    assert first["name"] == name and found.to_dict()["flagged"] == [name], str(found)
    assert f"% of its {role} " + ("saturate" if factor > 1 else "become 0") in first["flag"]
    if (role, factor) == ("input", 2.0**10):
        assert ALMOST.sub("#", str(found)).split("\n\nother")[0] in ALMOST.sub("#", PAGE.read_text())


@pytest.mark.parametrize(
    ("build", "name", "is_trained"), [(an_mlp, "up.weight", 0), (trained, "layers.0.up.weight", 1)]
)
def test_outliers(build: Callable[[], tuple[Case, Compare]], name: str, is_trained: bool) -> None:
    """1000 times as large: an old scale saturates them; with a current one E4M3 resolves the rest, too."""
    case, compare = build()
    weight = case.model.get_parameter(name).data
    before = weight.clone()
    weight.view(-1)[::4099] *= 1000
    found = compare(*case.args)
    weight.copy_(before)
    first = found.rows()[0]
    assert first["name"] == name and first["flag"], str(found)
    assert first["peak"] > OUTLIERS and (first["fprop"] < 1 if is_trained else first["fprop"] > 25)


# -- what it compares --


@pytest.mark.slow
def test_options_and_scales_are_those_of_the_training() -> None:
    case = mlp()
    run = train(case, recipe="rowwise", override_linear_precision=(False, True, False))
    row = by_name(fp8compile.compare(run, *case.args, loss=to_one))["down.weight"]
    assert row["dgrad"] is None and row["wgrad"] is not None
    found = fp8compile.compare(run, *case.args, loss=to_one, options={"recipe": "tensorwise"})
    assert by_name(found)["down.weight"]["dgrad"] is not None


@pytest.mark.slow
def test_dropout_has_one_mask_in_all_runs_and_hooks_of_optimizers_do_not_run() -> None:
    model = models.make(lambda: nn.Sequential(models.Mlp(), nn.Dropout(0.5), models.Mlp()))
    ran: list[Any] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ran.append)
    found = fp8compile.compare(model, noise(ROWS, WIDTH), loss=to_one)
    assert found.deterministic and found.gradient.sqnr > 20
    assert not ran and all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_is_not_deterministic() -> None:
    """Its number comes from outside of torch's random numbers."""

    class Restless(models.Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * drawn(x)

    numbers = iter(range(1, 100))

    @torch._dynamo.disable
    def drawn(x: Tensor) -> Tensor:
        return torch.full((), 1 + 0.01 * next(numbers))

    found = fp8compile.compare(models.make(Restless), noise(ROWS, WIDTH), loss=to_one)
    assert found.deterministic is False and "is not deterministic" in str(found)
    assert " dB in a second run" in str(found)


# -- again --


def test_a_second_comparison_compiles_nothing() -> None:
    """And has the numbers of the first one, which left no state."""
    case, compare = trained()
    first = compare(*case.args).to_dict()
    with torch.compiler.set_stance("fail_on_recompile"):
        assert compare(*case.args).to_dict() == first


# -- bad input --


def one_line(error: BaseException) -> bool:
    return len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    ("build", "arguments", "error", "message"),
    [
        (models.Mlp, {"args": (noise(16, 100),)}, Fp8CompileError,
         "Mlp refuses this batch: RuntimeError: .*models.py"),
        (models.Mlp, {"args": ()}, Fp8CompileError, "Mlp refuses this batch: TypeError"),
        (models.Mlp, {"options": {"recipe": "tensor"}}, OptionError, "recipe"),
        (lambda: nn.Linear(WIDTH, 8), {}, Fp8CompileError,
         "no matmul of Linear becomes FP8 .*explain says why"),
        (lambda: models.Mlp().requires_grad_(False), {}, OptionError,
         "no parameter of Mlp requires gradients"),
        (lambda: models.Mlp().to("meta"), {}, OptionError, "up.weight is on the meta device"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(build, arguments, error, message) -> None:
    model = build()
    given = {"args": (noise(ROWS, WIDTH),), "loss": to_one, **arguments}
    with pytest.raises(error, match=message) as caught:
        fp8compile.compare(model, *given.pop("args"), **given)
    assert one_line(caught.value)


@pytest.mark.parametrize(
    ("factor", "loss", "error", "message"),
    [
        (math.inf, to_one, Fp8CompileError, "loss of Mlp is nan in high precision"),
        (1, None, OptionError, r"needs a scalar loss, but Mlp returned a tensor \[64, 128\]: give loss="),
        (1, lambda y: y, OptionError, r"loss\(output\) returned a tensor \[64, 128\].*has to return"),
        (1, lambda y: 1.0, OptionError, "returned float"),
    ],
)
def test_bad_losses_get_one_line(factor, loss, error, message) -> None:
    _, compare = an_mlp()
    with pytest.raises(error, match=message) as caught:
        compare(factor * noise(ROWS, WIDTH), loss=loss)
    assert one_line(caught.value)


@pytest.mark.slow
def test_the_only_scalar_of_a_tuple_is_the_loss() -> None:
    class Both(models.Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return y, {"mean": to_one(y), "greatest": y.detach().max()}

    expected = fp8compile.compare(models.make(models.Mlp), noise(16, WIDTH), loss=to_one)
    found = fp8compile.compare(models.make(Both), noise(16, WIDTH))
    assert found.loss == expected.loss and found.to_dict()["gradient"] == expected.to_dict()["gradient"]


def test_what_cannot_be_compared() -> None:
    model = models.make(models.Mlp)
    model.up.weight.placements = ("Shard(0)",)  # as a DTensor has
    with pytest.raises(OptionError, match="up.weight is a DTensor .*on one device"):
        fp8compile.compare(model, noise(16, WIDTH), loss=to_one)
    with pytest.raises(TypeError, match="expected a torch.nn.Module"):
        fp8compile.compare(models.Mlp, noise(16, WIDTH))


def test_a_loss_that_only_fp8_breaks() -> None:
    """NaN in FP8 alone is a finding, not an error."""
    case, compare = trained()
    with hooks.wrong_scale(case.model, "layers.1.up.weight", "input", math.nan):
        found = compare(*case.args)
    assert found.to_dict()["flagged"] == ["layers.1.up.weight"]
    assert "fprop is not finite" in found.rows()[0]["flag"]
    assert "nan in FP8; gradient - dB" in str(found)
    json.dumps(found.to_dict(), allow_nan=False)
