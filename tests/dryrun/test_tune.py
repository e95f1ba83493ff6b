"""tune(): groups, the frontier, measured errors, and the policy that it writes. Most times are those of a stand-in."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.config.policy import Policy, load
from fp8compile.devices import catalog
from fp8compile.dryrun import fake_gpu, times, tune
from fp8compile.dryrun.candidates import Candidate, candidates, frontier, groups_of, policy_of, tables
from fp8compile.errors import Fp8CompileError, OptionError
from fp8compile.ir.records import MatmulRecord
from tests.support import hooks, models
from tests.support.compared import HEALTHY, TOKENS, WIDTH, Case, LanguageModel
from tests.support.harness import compiled, noise
from tests.support.times import FACTORS, Times

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]

FEW = (Candidate("delayed", "hybrid"), Candidate("delayed", "e4m3"), Candidate("rowwise"))
BUDGET = 0.001  # each group alone is within it, and no uniform recipe


def an_mlp() -> Case:
    return Case(models.make(models.Mlp), (noise(64, WIDTH),), lambda y: (y - 1).square().mean())


def tuned_mlp(budget: Any = 0.5, case: Case | None = None, **given: Any) -> fp8compile.Tuned:
    case = case or an_mlp()
    return fp8compile.tune(case.model, *case.args, device="h100", loss_budget=budget, **{"loss": case.loss, **given})


Progress = tuple[int, int, str]


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with hooks.tuning(Times, FEW[2:]):
        yield


def tuned(few: tuple[Candidate, ...], budget: float) -> tuple[fp8compile.Tuned, list[Progress]]:
    """The result with these candidates, and what was said meanwhile."""
    seen: list[Progress] = []
    with hooks.tuning(Times, few):
        return tuned_mlp(budget, progress=lambda *it: seen.append(it)), seen


@functools.cache
def result() -> tuple[fp8compile.Tuned, list[Progress]]:
    return tuned(FEW, BUDGET)


@pytest.fixture
def found() -> fp8compile.Tuned:
    return result()[0]


# -- parts -------------------------------------------------------------------------------------------------------------


def test_the_frontier_is_that_of_all_assignments() -> None:
    draw = random.Random(0)
    every = [Candidate("delayed"), Candidate("rowwise"), None]
    options = [{c: (draw.randint(-9, 0) / 8, draw.randint(0, 9) / 8) if c else (0.0, 0.0) for c in every} for _ in range(5)]
    points = frontier(options)
    sums = {c: tuple(sum(x) for x in zip(*(o[one] for o, one in zip(options, c, strict=True)), strict=True))
            for c in itertools.product(every, repeat=5)}  # fmt: skip
    best = {s for s in sums.values() if not any(o != s and o[0] <= s[0] and o[1] <= s[1] for o in sums.values())}
    assert {(p.seconds, p.error) for p in points} == best
    assert all(sums[p.choice] == (p.seconds, p.error) for p in points)


def test_candidates_are_what_the_device_multiplies() -> None:
    labels = [c.label for c in candidates(catalog.find("h100").gpu)]
    assert labels[:4] == ["delayed", "delayed, e4m3", "tensorwise", "tensorwise, e4m3"]
    assert "mxfp8" not in labels and "blockwise" in labels
    assert "mxfp8" in [c.label for c in candidates(catalog.find("b200").gpu)]


def record(fqn: str, reason: str = "", rule: str = "") -> MatmulRecord:
    return MatmulRecord(fqn, "fprop", 512, 256, 256, "high_precision" if reason else "fp8", reason, rule=rule)


def test_groups_and_their_rules() -> None:
    policy = load({"rules": [{"name": "mine", "module": "x", "fp8": "off"}]})
    records = [record("b.0.up"), record("b.1.up"), record("b.0.x.up"), record("head", "output head", "output head"),
               record("b.0.gate", "why"), record("b.1.gate"), record("b.0.down", rule="down projection")]  # fmt: skip
    groups = groups_of(records, policy)
    assert [g.name for g in groups] == ["b.*.up", "b.*.x.up", "b.*.gate", "b.*.down"]
    assert groups[0].where == {"module": r"re:b\.\d+\.up"}, "the glob fits b.0.x.up, too"
    assert groups[1].where == {"module": "b.*.x.up"} and groups[1].modules == ("b.0.x.up",)
    assert groups[2].where == {"module": ["b.1.gate"]}, "and b.0.gate stays as it is"
    down = groups[3]
    assert down.settings == {"current_scaling": (True, False, False)}, "the shipped rule that is put behind ours"
    rule = tables({down: Candidate("delayed", "e4m3")}, "default")["rules"][0]
    assert rule["current_scaling"] == [True, False, False] and rule["fp8_format"] == "e4m3"
    assert "current_scaling" not in tables({down: Candidate("rowwise")}, "default")["rules"][0]
    made = policy_of(dict.fromkeys(groups), "default")
    assert made.own == 4 and all(rule.fp8 == "off" for rule in made.rules[:4])


@pytest.mark.parametrize("given, value", [("0.1%", 0.001), (" 2 %", 0.02), (0.05, 0.05), ("0.05", 0.05)])
def test_budgets(given: Any, value: float) -> None:
    assert tune.budget_of(given) == pytest.approx(value)


@pytest.mark.parametrize("given", ["0.1 percent", "", "-1%", 0, "100%", 1, True, None, math.nan, math.inf])
def test_bad_budgets(given: Any) -> None:
    with pytest.raises(OptionError, match="loss_budget.*such as '0.1%'"):
        tuned_mlp(given)


# -- errors of groups --------------------------------------------------------------------------------------------------


def experts() -> Case:
    x = noise(2, 16, WIDTH).bfloat16()
    return Case(models.make(lambda: models.Stack(models.Moe()), torch.bfloat16), (x,), lambda y: (y - 1).square().mean())


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize(
    ("build", "one_graph"),
    [
        (an_mlp, True),
        pytest.param(experts, False, marks=pytest.mark.slow),
        pytest.param(HEALTHY["tied"], True, marks=pytest.mark.slow),
        pytest.param(HEALTHY["moe"], False, marks=pytest.mark.slow),
    ],
)
def test_a_group_alone_is_as_with_a_policy_of_its_own(build: Any, one_graph: bool) -> None:
    """One graph with all groups in FP8, of which all but one are replaced, has the gradients of a graph with one in FP8, up to
    rounding and the order of sums. Experts are in graphs of their own anyway."""
    case = build()
    measured = hooks.groups_to_tune(case.model, case.args, case.loss)
    candidate = Candidate("rowwise")
    alone = measured.alone(candidate)
    assert measured.whole is one_graph
    for i, error in list(enumerate(alone))[:: len(alone) - 1]:
        choice = tuple(candidate if i == j else None for j in range(len(measured.groups)))
        assert 0 < error < 0.1 and error == pytest.approx(measured.error(choice, ""), rel=0.02), measured.groups[i].name


def test_nothing_is_left_behind() -> None:
    """A training goes on to the bit as without it, and gradients are as before."""
    results = []
    for tuning in (False, True):
        case = an_mlp()
        torch.manual_seed(3)
        run = compiled(case.model)
        optimizer = torch.optim.SGD(case.model.parameters(), 0.1)
        for step in range(3):
            case.loss(run(*case.args)).backward()
            if tuning and step == 1:
                tuned_mlp(case=case)
            optimizer.step()
            optimizer.zero_grad()
        results.append([*(p.detach() for p in case.model.parameters()), torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# -- the choice --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_chosen_policy_fits_and_no_fitting_recipe_is_faster(found: fp8compile.Tuned) -> None:
    assert 0 < found.gap <= found.budget and found.seconds < found.bf16
    timed = [whole for whole in found.wholes if whole.fits]
    assert found.seconds == min(whole.seconds for whole in timed)
    over = [whole for whole in found.wholes if not whole.fits]
    assert over and all(whole.gap > found.budget for whole in over)
    assert len(set(found.choice.values())) > 1 and "high precision" in found.choice.values(), "no recipe fits everywhere"
    assert all(whole.gap <= found.budget for whole in timed)


@pytest.mark.slow
def test_the_file_says_what_was_chosen_and_loads_back(found: fp8compile.Tuned, tmp_path) -> None:
    found.write(tmp_path / "policy.toml")
    text = (tmp_path / "policy.toml").read_text()
    assert "Chosen by `fp8compile tune`" in text and "over the budget" in text and "rowwise everywhere" in text
    assert max(map(len, text.splitlines())) < 400
    read = load(tmp_path / "policy.toml")
    assert read.rules == found.policy.rules and read.own == len(found.groups)
    case = an_mlp()
    report = fp8compile.explain(case.model, *case.args, options={"policy": str(tmp_path / "policy.toml")})
    for row in report.matmuls:
        assert (row.recipe or "high precision") == found.choice[row.fqn].partition(",")[0], row


@pytest.mark.weekly
def test_a_policy_with_a_relative_path_is_extended_from_elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "mine.toml").write_text('device = "h200"\n[[rules]]\nmodule = "layers.0.*"\nfp8 = "off"\n')
    model = models.make(lambda: LanguageModel(models.ResidualMlp(), models.ResidualMlp()))
    tokens = torch.randint(0, TOKENS, (4, 16), generator=torch.Generator().manual_seed(1))
    tuned = fp8compile.tune(model, tokens, device="h100", loss_budget=0.5, options={"policy": "mine.toml"})
    assert list(tuned.choice) == ["layers.*.up", "layers.*.down"]
    assert all(group.modules == (group.name.replace("*", "1"),) for group in tuned.groups), "the rule of the file comes first"
    tuned.write("out/policy.toml")
    assert load("out/policy.toml").rules == tuned.policy.rules
    assert 'extends = "../mine.toml"' in (tmp_path / "out" / "policy.toml").read_text()


@pytest.mark.slow
def test_progress_is_shown_step_by_step() -> None:
    _, seen = result()
    assert [done for done, _, _ in seen[:-1]] == list(range(len(seen) - 1)) and seen[-1][0] == seen[-1][1]
    assert any("rowwise: up" in what for _, _, what in seen)


@pytest.mark.weekly
def test_the_result_of_all_recipes_depends_on_the_arguments_alone(found: fp8compile.Tuned) -> None:
    torch.manual_seed(99)
    assert tuned(FEW, found.budget)[0].to_dict() == found.to_dict()


@pytest.mark.slow
def test_tables_dict_and_picture(found: fp8compile.Tuned, tmp_path) -> None:
    text = str(found)
    assert found.summary() in text and "  up  " in text and "delayed, e4m3" in text
    whole = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert whole["rows"] == found.rows() and sum(row["chosen"] for row in whole["rows"]) == len(found.groups)
    assert [p["chosen"] for p in whole["policies"]].count(True) == 1 and len(whole["frontier"]) > 2
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(OptionError, match="cannot be written"):
        found.write(tmp_path / "no" / "policy.toml")


# -- what it refuses ---------------------------------------------------------------------------------------------------


def one_line(error: pytest.ExceptionInfo[Any]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_budget_that_nothing_meets() -> None:
    with pytest.raises(Fp8CompileError) as error:
        tuned_mlp(1e-7)
    assert "no FP8 policy fits a loss budget of 1e-05%" in one_line(error) and "raise the budget" in str(error.value)


def test_where_fp8_is_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Times, "factors", dict.fromkeys(FACTORS, 1.5))
    with pytest.raises(Fp8CompileError) as error:
        tuned_mlp(0.5)
    assert "does not make Mlp faster on NVIDIA H100" in one_line(error) and "like=" in str(error.value)


@pytest.mark.slow
def test_a_batch_or_a_loss_that_is_of_no_use() -> None:
    with pytest.raises(Fp8CompileError, match="tune: Mlp refuses this batch"):
        fp8compile.tune(models.Mlp(), noise(64, WIDTH + 1), device="h100")
    with pytest.raises(Fp8CompileError, match="the loss of Mlp is nan in high precision.*take a batch") as error:
        tuned_mlp(loss=lambda y: y.sum() * math.nan)
    one_line(error)
    with pytest.raises(OptionError, match="tune: loss"):
        tuned_mlp(loss=lambda y: y)


class Random(nn.Module):
    """Its results depend on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.calls = nn.Linear(WIDTH, WIDTH), itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.up(x) * _next(self.calls)).square().mean()


@torch._dynamo.disable
def _next(calls: Any) -> float:
    return float(next(calls))


def test_a_model_that_is_not_deterministic() -> None:
    with pytest.raises(Fp8CompileError, match="tune: Random is not deterministic") as error:
        fp8compile.tune(Random(), torch.ones(32, WIDTH), device="h100")
    assert "seed what is random" in one_line(error)


def test_wrong_options() -> None:
    with pytest.raises(OptionError, match="'recipe' cannot be given"):
        tuned_mlp(options={"recipe": "rowwise"})
    with pytest.raises(OptionError, match="a name or path"):
        tuned_mlp(options={"policy": Policy()})
    with pytest.raises(OptionError, match="FP8 tensor cores"):
        fp8compile.tune(models.Mlp(), noise(64, WIDTH), device="a100")
    with pytest.raises(OptionError, match="like has no module with a name"):
        tuned_mlp(like=(nn.Sequential(nn.Linear(256, 256)), torch.ones(64, 256)))
    with pytest.raises(OptionError, match="like has to be"):
        tuned_mlp(like=(models.Mlp(), noise(64, WIDTH), 3))


@pytest.mark.weekly
@pytest.mark.compiled
@pytest.mark.skipif(fake_gpu.unavailable() is not None, reason=fake_gpu.unavailable() or "")
def test_with_the_times_of_larger_sizes() -> None:
    """With the times of a described GPU. A batch of 64 tokens for the errors; 16384 tokens, 2048 wide, for the times."""

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
    with hooks.tuning(times.Times, FEW[1:]):
        with pytest.raises(Fp8CompileError, match="faster on NVIDIA H100"):
            fp8compile.tune(small, x, device="h100", loss_budget=0.3)
        found = fp8compile.tune(small, x, device="h100", loss_budget=0.3, like=like)
    whole = fp8compile.estimate(like[0], *like[1], device="h100", options={"policy": found.policy}, extrapolate=True)
    assert found.seconds == pytest.approx(whole.fp8.seconds, rel=1e-6) and found.bf16 == pytest.approx(whole.bf16.seconds)
    assert found.speedup > 1.1
