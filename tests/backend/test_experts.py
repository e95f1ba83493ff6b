"""Grouped matmuls: experts against the oracle, or against high precision where it does not follow."""

from __future__ import annotations

import copy
import random
from unittest import mock

import pytest
import torch
from torch import Tensor

import fp8compile
from tests.support import hooks
from tests.support.executed import executed
from tests.support.executed import planning as where_planned
from tests.support.harness import ALL_FP8, Pair, histories, sqnr
from tests.support.interpreter import OLD_INTERPRETER
from tests.support.models import Experts
from tests.support.operands import B200, ends
from tests.support.reference import Reference
from tests.support.reference_settings import RECIPES

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]

BF16 = torch.bfloat16
SIZES = [0, 1, 15, 16, 17, 257]
TOKENS = 320  # 14 of them belong to no expert


def made(turned: bool = False, count: int = len(SIZES)) -> Experts:
    torch.manual_seed(0)
    return Experts(128, 128, count, turned).to(BF16)


def batch(step: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(tokens, 128, generator=generator).to(BF16) for _ in range(2))  # type: ignore[return-value]


def train(pair: Pair, number: int, sizes: list[int], tokens: int = TOKENS) -> None:
    """A step of this pair with so many rows for each expert. No rows, no gradient."""
    x, dy = batch(number, tokens)
    pair.step(x, ends(sizes), grad=dy)
    for group, size in enumerate(sizes):
        for stack in (pair.model.down_proj, pair.model.gate_up_proj):
            assert stack.grad[group].any() == (size > 0)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("recipe", "turned"), [(recipe, i % 2 == 1) for i, recipe in enumerate(RECIPES)])
def test_steps_of_changing_routes(recipe: str, turned: bool) -> None:
    pair = Pair(made(turned), recipe, policy=ALL_FP8)
    draw = random.Random(0)
    for number in range(6 if recipe == "delayed" else 2):
        train(pair, number, draw.sample(SIZES, len(SIZES)))
    pair.assert_fp8()
    kept = {record.gemm for record in fp8compile.report(pair.model).matmuls if record.decision != "fp8"}
    assert kept == ({"wgrad"} if recipe == "rowwise_with_gw_hp" else set())


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "mxfp8"])
def test_all_tokens_to_one_expert_and_none_to_any(recipe: str) -> None:
    pair = Pair(made(recipe == "mxfp8"), recipe, policy=ALL_FP8)
    for number, sizes in enumerate(([TOKENS, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, TOKENS], [0] * 6, [50] * 6)):
        train(pair, number, sizes)


@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise"])
def test_what_stands_in_rows_of_no_expert_does_not_matter(recipe: str) -> None:
    """Under expert parallelism these rows are never written: they may be NaN."""
    results = []
    for filled in (0.0, float("nan"), 1e30):
        model = made(recipe == "tensorwise")
        options = {"recipe": recipe, "merge_matmuls": False, "policy": ALL_FP8}
        call = torch.compile(model, backend="fp8", options=options)
        for number in range(2):
            x, dy = batch(number)
            x[306:], dy[306:] = filled, 0.0
            results.append(run(model, call, x, ends(SIZES), dy))
        if recipe == "delayed":
            assert all(history[0] > 0 for history, _ in histories(model).values())
    for number, found in enumerate(results):
        for name, tensor in found.items():
            assert torch.equal(tensor, results[number % 2][name]), name


def run(model, call, x: Tensor, offs: Tensor, dy: Tensor, trained: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Output and gradients of a step (of these parameters, or all); rows of no expert are left out."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = call(x, offs)
    y.backward(dy)
    inside = slice(0, int(offs[-1]))
    names = trained or [name for name, _ in model.named_parameters()]
    gradients = {name: model.get_parameter(name).grad.clone() for name in names}
    return {"y": y.detach()[inside], "dx": x.grad[inside], **gradients}  # type: ignore[index]


@pytest.mark.feature("delayed")
def test_a_nan_token_shows_and_moves_no_state() -> None:
    pair = Pair(made(), policy=ALL_FP8)
    train(pair, 0, SIZES)
    before = histories(pair.model)
    x, dy = batch(1)
    x[5] = float("nan")
    pair.model.zero_grad()
    y = pair.compiled(x.requires_grad_(), ends(SIZES))
    y.backward(dy)
    assert y[5].isnan().all() and y[49:].isfinite().all()  # rows of the last expert
    assert histories(pair.model) == before


@pytest.mark.feature("delayed")
def test_frozen_experts_have_no_wgrad() -> None:
    pair = Pair(made().requires_grad_(False), policy=ALL_FP8)
    x, dy = batch(0)
    pair.step(x, ends(SIZES), grad=dy)
    records = fp8compile.report(pair.model).matmuls
    assert [record.gemm for record in records] == ["fprop", "fprop", "dgrad", "dgrad"]
    assert all(record.decision == "fp8" and record.groups == len(SIZES) for record in records)


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize(
    "bad", [[100, 50, 60, 70, 80, 120], [0, 0, 0, 100, 200, TOKENS + 1]], ids=["decreasing", "too many"]
)
def test_ends_that_make_no_sense_are_an_error(bad: list[int]) -> None:
    call = torch.compile(made(), backend="fp8", options={"merge_matmuls": False, "policy": ALL_FP8})
    with pytest.raises(Exception, match="have to rise"):
        call(batch(0)[0].requires_grad_(), torch.tensor(bad, dtype=torch.int32))


def test_a_slice_of_a_stack_is_a_weight() -> None:
    class Sliced(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            drawn = torch.randn(4, 256, 128, generator=torch.Generator().manual_seed(0))
            self.weight = torch.nn.Parameter(drawn.to(BF16))

        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            gate, up = self.weight.chunk(2, 1)
            return torch._grouped_mm(x, gate.mT, offs) * torch._grouped_mm(x, up.mT, offs)

    model, exact = Sliced(), Sliced()
    step = torch.compile(model, backend="fp8", options={"recipe": "tensorwise", "policy": ALL_FP8})
    (x, dy), offs = batch(0), ends([100, 0, 37, 183])
    got, high = run(model, step, x, offs, dy), run(exact, exact, x, offs, dy)
    records = fp8compile.report(model).matmuls
    assert len(records) == 6 and {(r.parameter, r.decision) for r in records} == {("weight", "fp8")}
    for name in high:
        assert sqnr(high[name], got[name]) > 20, name


# -- the plan for a GPU, executed on a CPU, whose memory is NaN until it is written --

STEPS = ([30, 0, 17, 40], [0, 64, 16, 1])


class Counted(torch.nn.Module):
    """Experts of as many rows as their ends say: a size that is data."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = made(count=4)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        rows = offs[-1].item()
        torch._check(rows >= 0)
        torch._check(rows <= x.shape[0])
        return self.experts(x.narrow(0, 0, rows), offs).sum(0, keepdim=True)


def planned(
    recipe: str, model: torch.nn.Module | None = None, dynamic: bool = False, **settings: bool
) -> None:
    """Two steps of the code that is compiled for a described GPU, against the oracle. `dynamic`: as many
    tokens as there are in the groups of a step, else some belong to no expert."""
    model = model or made(count=4)
    plain = copy.deepcopy(model)
    options = {"recipe": recipe, "policy": ALL_FP8, **settings}
    call = torch.compile(model, backend="fp8", options=options, dynamic=dynamic, fullgraph=True)
    reference = Reference(plain, recipe, **settings)
    for number, sizes in enumerate(STEPS):
        x, dy = batch(number, sum(sizes) if dynamic else 96)
        dy = dy[:1] if isinstance(model, Counted) else dy
        got = run(model, call, x, ends(sizes), dy)
        expected = run(reference.model, reference, x, ends(sizes), dy)
        for name in expected:
            assert sqnr(expected[name], got[name]) > 30, f"step {number}: {name}"
    assert [record.decision for record in fp8compile.report(model).matmuls] == ["fp8"] * 6


def planning(test):
    return where_planned(pytest.mark.compat(pytest.mark.compiled(test)))


@pytest.mark.cases(slow=1)
@planning
@pytest.mark.parametrize(("recipe", "dynamic"), [("delayed", False), ("tensorwise", True)])
def test_the_plan_for_a_gpu(recipe: str, dynamic: bool) -> None:
    with executed() as plan:
        planned(recipe, dynamic=dynamic)
    assert plan.scaled == (6 if recipe == "delayed" else 2 * 6)  # the first call of delayed scaling is cold
    assert dynamic or any("transpose" in kernel.name for kernel in plan.kernels if kernel.ours)


@pytest.mark.weekly
@planning
@pytest.mark.parametrize("recipe", ["mxfp8 tiles", "delayed", "rowwise"])
def test_the_plan_for_a_gpu_without_the_matmul(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    """Blackwell takes one of our kernels."""
    name, *tiles = recipe.split()
    if name == "mxfp8" and OLD_INTERPRETER:
        pytest.skip("Triton's interpreter has no `dot_scaled` before 3.7")
    with executed(gpu=B200) as plan:
        planned(name, **({"weight_tiles": True} if tiles else {}))
    warm = 1 if recipe == "delayed" else 2
    assert plan.scaled == 0 and plan.launches("fp8_grouped") == 6 * warm and "emulated" not in caplog.text


@pytest.mark.slow
@planning
def test_the_plan_where_the_library_refuses() -> None:
    with executed() as plan, hooks.refusing("grouped"):
        planned("rowwise")
        notes = fp8compile.report().notes
    assert plan.scaled == 0 and plan.launches("fp8_grouped") == 2 * 6
    refused = [note for note in notes if "no grouped FP8 matmul of 96 x 256 x 128" in note]
    assert any("a generated kernel" in note for note in refused), notes


OTHERS = [pytest.param(*x, marks=pytest.mark.slow) for x in (("blockwise", "b200"), ("rowwise", "h200"))]


@pytest.mark.cases(slow=1)
@planning
@pytest.mark.parametrize(("recipe", "gpu"), [("tensorwise", "h200"), *OTHERS])
def test_the_plan_for_rows_that_are_data(recipe: str, gpu: str) -> None:
    """As in one graph with an all-to-all (torchtitan): Inductor keeps no strides, so all casts are ours."""
    given = (B200,) if gpu == "b200" else ()
    with mock.patch.object(torch._dynamo.config, "capture_scalar_outputs", True), executed(0, *given) as plan:
        planned(recipe, Counted())
    assert plan.launches("fp8_group_order") >= 2 and plan.scaled == (2 * 6 if gpu == "h200" else 0)
