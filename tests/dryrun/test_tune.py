"""tune(): groups, measured errors, the choice, and the policy that it writes. Most times are made up."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.config.policy import Policy, load
from fp8compile.devices import catalog
from fp8compile.dryrun import estimate, fake_gpu
from fp8compile.dryrun.tuned import HIGH, candidates, groups_of, policy_of, tables
from fp8compile.errors import Fp8CompileError, OptionError, TuneError
from fp8compile.ir.records import MatmulRecord
from tests.support import hooks, models
from tests.support.compared import TOKENS, WIDTH, Case, LanguageModel
from tests.support.harness import compiled, noise
from tests.support.times import FACTORS, Compiler

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]

FEW = ("delayed", "delayed, e4m3", "rowwise")
LARGEST = 0.03  # each group alone is within it, and no uniform recipe


def an_mlp() -> Case:
    return Case(models.make(models.Mlp), (noise(64, WIDTH),), lambda y: (y - 1).square().mean())


def tuned_mlp(largest: Any = 0.7, **given: Any) -> fp8compile.Tuned:
    model, args, loss = an_mlp()
    return fp8compile.tune(model, *args, loss=loss, device="h100", max_error=largest, **given)


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with hooks.tuning(Compiler, FEW[2:]):
        yield


def tuned() -> fp8compile.Tuned:
    with hooks.tuning(Compiler, FEW):
        return tuned_mlp(LARGEST)


result = functools.cache(tuned)


@pytest.fixture
def found() -> fp8compile.Tuned:
    return result()


# -- parts --


def test_candidates_are_what_the_device_multiplies() -> None:
    found = candidates(catalog.find("h100").gpu)
    assert found[:4] == ("delayed", "delayed, e4m3", "tensorwise", "tensorwise, e4m3")
    assert "mxfp8" not in found and "blockwise" in found and "mxfp8" in candidates(catalog.find("b200").gpu)


def record(fqn: str, reason: str = "", rule: str = "") -> MatmulRecord:
    return MatmulRecord(fqn, "fprop", 512, 256, 256, "high_precision" if reason else "fp8", reason, rule=rule)


def test_groups_and_their_rules() -> None:
    policy = load({"rules": [{"name": "mine", "module": "x", "fp8": "off"}]})
    records = [record("b.0.up"), record("b.1.up"), record("b.0.x.up"),
               record("head", "output head", "output head"), record("b.0.gate", "why"), record("b.1.gate"),
               record("b.0.down", rule="down projection")]  # fmt: skip
    groups = groups_of(records, policy)
    assert [g.name for g in groups] == ["b.*.up", "b.*.x.up", "b.*.gate", "b.*.down"]
    assert groups[0].where == {"module": r"re:b\.\d+\.up"}, "the glob fits b.0.x.up, too"
    assert groups[1].where == {"module": "b.*.x.up"} and groups[1].modules == ("b.0.x.up",)
    assert groups[2].where == {"module": ["b.1.gate"]}, "and b.0.gate stays as it is"
    down = groups[3]  # the shipped rule is put after ours
    assert down.settings == {"current_scaling": (True, False, False)}
    rule = tables([down], ("delayed, e4m3",), "default")["rules"][0]
    assert rule["current_scaling"] == [True, False, False] and rule["fp8_format"] == "e4m3"
    assert "current_scaling" not in tables([down], ("rowwise",), "default")["rules"][0]
    made = policy_of(groups, (HIGH,) * len(groups), "default")
    assert made.own == 4 and all(rule.fp8 == "off" for rule in made.rules[:4])


@pytest.mark.parametrize("given", ["5%", "0.05", 0, -0.1, 1, True, None, math.nan, math.inf])
def test_bad_errors(given: Any) -> None:
    with pytest.raises(OptionError, match="max_error.*such as 0.05"):
        tuned_mlp(given)


# -- errors of groups --


def relative_error(case: Case, policy: Any) -> float:
    """Of a training step's gradients with this policy: the root mean square over trained elements."""
    grads = []
    for options in ({"policy": {"rules": [{"fp8": "off"}]}}, {"policy": policy}):
        case.model.zero_grad()
        case.loss(compiled(case.model, **options)(*case.args)).backward()
        trained = {name: p for name, p in case.model.named_parameters() if p.grad is not None}
        grads.append({name: p.grad.double().clone() for name, p in trained.items()})
        torch._dynamo.reset()
    squares = []
    for name, g in grads[0].items():
        squares.append((g.count_nonzero().item(), ((grads[1][name] - g).norm() / g.norm()).item() ** 2))
    return math.sqrt(sum(n * square for n, square in squares) / sum(n for n, _ in squares))


@pytest.mark.slow
def test_the_error_is_that_of_the_gradients_of_a_step(found: fp8compile.Tuned) -> None:
    assert relative_error(an_mlp(), found.policy) == pytest.approx(found.error, rel=0.02)
    for i, group in enumerate(found.groups):
        for candidate in FEW[1:]:
            alone = tuple(candidate if i == j else HIGH for j in range(len(found.groups)))
            error = relative_error(an_mlp(), tables(found.groups, alone, "default"))
            assert 0 < error == pytest.approx(found.alone[i][candidate][1], rel=0.02), group.name


# -- the choice --


@pytest.mark.slow
def test_the_chosen_policy_fits_and_no_fitting_recipe_is_faster(found: fp8compile.Tuned) -> None:
    assert 0 < found.error <= found.max_error and found.seconds < found.bf16
    timed = [whole for whole in found.wholes if whole.seconds < math.inf]
    assert found.seconds == min(whole.seconds for whole in timed)
    assert all(w.error <= found.max_error for w in timed)
    others = [whole for whole in found.wholes if whole.seconds == math.inf]
    # no recipe fits everywhere
    assert {f"{candidate} everywhere" for candidate in FEW} <= {w.name for w in others}
    assert all(w.error > found.max_error for w in others)
    assert len(set(found.choice.values())) > 1


@pytest.mark.slow
def test_the_choice_is_the_best_of_all(found: fp8compile.Tuned) -> None:
    """No choice of groups that are exact enough together, by the sum of squares, is faster."""
    seconds = []
    for rows in itertools.product(*(row.values() for row in found.alone)):
        if sum(error**2 for _, error in rows) <= found.max_error**2:
            seconds.append(found.bf16 - sum(saved for saved, _ in rows))
    assert found.seconds == pytest.approx(min(seconds))


@pytest.mark.slow
def test_the_file_says_what_was_chosen_and_loads_back(found: fp8compile.Tuned, tmp_path) -> None:
    found.write(tmp_path / "policy.toml")
    text = (tmp_path / "policy.toml").read_text()
    for part in ("Chosen by `fp8compile tune`", "error too large", "rowwise everywhere"):
        assert part in text
    assert max(map(len, text.splitlines())) < 400
    read = load(tmp_path / "policy.toml")
    assert read.rules == found.policy.rules and read.own == len(found.groups)
    case = an_mlp()
    report = fp8compile.explain(case.model, *case.args, options={"policy": str(tmp_path / "policy.toml")})
    for row in report.matmuls:
        assert (row.recipe or "high precision") == found.choice[row.fqn].partition(",")[0], row
    with pytest.raises(OptionError, match="cannot be written"):
        found.write(tmp_path / "no" / "policy.toml")


@pytest.mark.weekly
def test_a_policy_with_a_relative_path_is_extended_from_elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "mine.toml").write_text('device = "h200"\n[[rules]]\nmodule = "layers.0.*"\nfp8 = "off"\n')
    model = models.make(lambda: LanguageModel(models.ResidualMlp(), models.ResidualMlp()))
    tokens = torch.randint(0, TOKENS, (4, 16), generator=torch.Generator().manual_seed(1))
    tuned = fp8compile.tune(model, tokens, device="h100", max_error=0.7, options={"policy": "mine.toml"})
    assert list(tuned.choice) == ["layers.*.up", "layers.*.down"]
    # the rule of the file comes first
    assert all(group.modules == (group.name.replace("*", "1"),) for group in tuned.groups)
    tuned.write("out/policy.toml")
    assert load("out/policy.toml").rules == tuned.policy.rules
    assert 'extends = "../mine.toml"' in (tmp_path / "out" / "policy.toml").read_text()


@pytest.mark.weekly
def test_the_result_of_all_recipes_depends_on_the_arguments_alone(found: fp8compile.Tuned) -> None:
    torch.manual_seed(99)
    assert tuned().to_dict() == found.to_dict()


# -- what it refuses --


def one_line(error: pytest.ExceptionInfo[Any]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_error_that_nothing_meets() -> None:
    with pytest.raises(TuneError) as error:
        tuned_mlp(1e-4)
    assert "has an error of gradients of at most 0.0001" in one_line(error)
    assert "Raise max_error" in str(error.value)


def test_where_fp8_is_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiler, "factors", dict.fromkeys(FACTORS, 1.5))
    with pytest.raises(TuneError) as error:
        tuned_mlp()
    assert "does not make Mlp faster on NVIDIA H100" in one_line(error) and "like=" in str(error.value)


def test_a_model_that_is_not_deterministic() -> None:
    """Its results depend on how often it was called."""
    calls = itertools.count(1)

    @torch._dynamo.disable
    def number() -> float:
        return float(next(calls))

    class Random(models.Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * number()).square().mean()

    with pytest.raises(Fp8CompileError, match="tune: Random is not deterministic") as error:
        fp8compile.tune(Random(), torch.ones(32, WIDTH), device="h100")
    assert "seed what is random" in one_line(error)


def test_wrong_options() -> None:
    with pytest.raises(OptionError, match="'options' must be a name or path of a policy"):
        tuned_mlp(options={"recipe": "rowwise"})
    with pytest.raises(OptionError, match="a name or path of a policy"):
        tuned_mlp(options={"policy": Policy()})
    with pytest.raises(OptionError, match="FP8 tensor cores"):
        fp8compile.tune(models.Mlp(), noise(64, WIDTH), device="a100")
    with pytest.raises(OptionError, match="like has no module with a name"):
        tuned_mlp(like=(nn.Sequential(nn.Linear(256, 256)), (torch.ones(64, 256),)))
    model = models.Mlp()
    for like in (model, (model,), (model, 3), (model, (noise(64, WIDTH),), {}, {})):
        with pytest.raises(OptionError, match="like has to be"):
            tuned_mlp(like=like)


@pytest.mark.weekly
@pytest.mark.compiled
@pytest.mark.skipif(fake_gpu.unavailable() is not None, reason=fake_gpu.unavailable() or "")
def test_with_the_times_of_larger_sizes() -> None:
    """With times of a described GPU. For errors, a batch of 64 tokens; for times, 16384, 2048 wide."""

    class Net(nn.Module):
        def __init__(self, width: int, blocks: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(models.SwiGlu(width, 2 * width) for _ in range(blocks))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x.float().square().mean()

    small, x = models.make(lambda: Net(128, 1)), noise(64, 128)
    with torch.device("meta"):
        like = Net(2048, 3).bfloat16(), (torch.empty(16384, 2048, dtype=torch.bfloat16),)
    with hooks.tuning(estimate.Compiler, FEW[1:]):
        with pytest.raises(Fp8CompileError, match="faster on NVIDIA H100"):
            fp8compile.tune(small, x, device="h100", max_error=0.5)
        found = fp8compile.tune(small, x, device="h100", max_error=0.5, like=like)
    options = {"policy": found.policy}
    whole = fp8compile.estimate(like[0], *like[1], device="h100", options=options, extrapolate=True)
    assert found.seconds == pytest.approx(whole.fp8.seconds, rel=1e-6)
    assert found.bf16 == pytest.approx(whole.bf16.seconds)
    assert found.speedup > 1.1
