"""Grouped matmuls: experts against an eager FP8 reference in plain torch, and against high precision."""

from __future__ import annotations

import itertools
import random
from unittest import mock

import pytest
import torch
from torch import Tensor

import fp8compile
from fp8compile import compat
from fp8compile.devices.gpu import Gpu
from fp8compile.dryrun.fake_gpu import unavailable
from tests.support.executed import executed
from tests.support.grouped_reference import GroupedReference
from tests.support.harness import ALL_FP8, histories, sqnr
from tests.support.interpreter import OLD_INTERPRETER
from tests.support.models import Experts, Moe
from tests.support.operands import ends
from tests.support.reference_settings import RECIPES

BF16 = torch.bfloat16
SIZES = [0, 1, 15, 16, 17, 257]
TOKENS = 320  # 14 of them belong to no expert


def run(model, call, x: Tensor, offs: Tensor, dy: Tensor, trained: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Output and gradients of a step (of these parameters, or all); rows of no expert are left out."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = call(x, offs)
    y.backward(dy)
    inside = slice(0, int(offs[-1]))
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if not trained or name in trained}
    return {"y": y.detach()[inside], "dx": x.grad[inside], **gradients}  # type: ignore[index]


def made(turned: bool = False, count: int = len(SIZES)) -> Experts:
    torch.manual_seed(0)
    return Experts(128, 128, count, turned).to(BF16)


def batch(step: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(tokens, 128, generator=generator).to(BF16) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("turned", [False, True], ids=["[E, out, in]", "[E, in, out]"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_ten_steps_of_changing_routes(recipe: str, turned: bool) -> None:
    model, plain, exact = made(turned), made(turned), made(turned)
    step = torch.compile(model, backend="fp8", options={"recipe": recipe, "policy": ALL_FP8})
    reference = GroupedReference(recipe)
    draw = random.Random(0)
    for number in range(10):
        sizes = draw.sample(SIZES, len(SIZES))
        x, dy = batch(number)
        got = run(model, step, x, ends(sizes), dy)
        with reference.step():
            expected = run(plain, plain, x, ends(sizes), dy)
        high = run(exact, exact, x, ends(sizes), dy)
        for name in expected:
            assert sqnr(expected[name], got[name]) > 30, f"step {number}: {name}"
            assert sqnr(high[name], got[name]) > 20, f"step {number}: {name}"  # behind two or three matmuls in FP8
        empty = sizes.index(0)
        assert not got["down_proj"][empty].any() and not got["gate_up_proj"][empty].any()
    kept = {record.gemm for record in fp8compile.report(model).matmuls if record.decision != "fp8"}
    assert kept == ({"wgrad"} if recipe == "rowwise_with_gw_hp" else set())


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_matmul_is_near_high_precision(recipe: str) -> None:
    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 128, 256, generator=torch.Generator().manual_seed(0)).to(BF16))

        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            return torch._grouped_mm(x, self.weight, offs)

    model, exact = One(), One()
    step = torch.compile(model, backend="fp8", options={"recipe": recipe, "policy": ALL_FP8})
    (x, _), offs = batch(0), ends([100, 0, 37, 183])
    dy = torch.randn(TOKENS, 256, generator=torch.Generator().manual_seed(7)).to(BF16)
    got, high = run(model, step, x, offs, dy), run(exact, exact, x, offs, dy)
    for name, floor in (("y", 28), ("dx", 24), ("weight", 24)):
        assert sqnr(high[name], got[name]) > floor, name


@pytest.mark.parametrize("sizes", [[TOKENS, 0, 0, 0], [0, 0, 0, TOKENS], [0, 0, 0, 0], [80, 80, 80, 80]], ids=str)
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "mxfp8"])
def test_all_tokens_to_one_expert_and_none_to_any(recipe: str, sizes: list[int]) -> None:
    model, exact = made(count=4), made(count=4)
    step = torch.compile(model, backend="fp8", options={"recipe": recipe, "policy": ALL_FP8})
    for number in range(2):
        x, dy = batch(number)
        got, high = run(model, step, x, ends(sizes), dy), run(exact, exact, x, ends(sizes), dy)
        for name in high:
            assert sqnr(high[name], got[name]) > 20, name
        for group, size in enumerate(sizes):
            assert got["down_proj"][group].any() == (size > 0)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise"])
def test_what_stands_in_rows_of_no_expert_does_not_matter(recipe: str) -> None:
    """Under expert parallelism these rows are never written: they may be NaN."""
    results = []
    for filled in (0.0, float("nan"), 1e30):
        torch._dynamo.reset()
        model = made(count=4)
        step = torch.compile(model, backend="fp8", options={"recipe": recipe, "policy": ALL_FP8})
        for number in range(2):
            x, dy = batch(number)
            x[300:], dy[300:] = filled, 0.0
            results.append(run(model, step, x, ends([100, 100, 0, 100]), dy))
        if recipe == "delayed":
            assert all(history[0] > 0 for history, _ in histories(model).values())
    for number, found in enumerate(results):
        for name, tensor in found.items():
            assert torch.equal(tensor, results[number % 2][name]), name


def test_a_nan_token_shows_and_moves_no_state() -> None:
    model = made(count=4)
    step = torch.compile(model, backend="fp8", options={"policy": ALL_FP8})
    x, dy = batch(0)
    offs = ends([100, 100, 0, 120])
    run(model, step, x, offs, dy)
    before = histories(model)
    x[5] = float("nan")
    got = run(model, step, x, offs, dy)
    assert got["y"][5].isnan().all() and got["y"][200:].isfinite().all()
    after = histories(model)
    assert after == before


def test_frozen_experts_have_no_wgrad() -> None:
    model = made(count=4).requires_grad_(False)
    step = torch.compile(model, backend="fp8", options={"policy": ALL_FP8})
    x, dy = batch(0)
    x.requires_grad_()
    step(x, ends([100, 100, 0, 120])).backward(dy)
    records = fp8compile.report(model).matmuls
    assert [record.gemm for record in records] == ["fprop", "fprop", "dgrad", "dgrad"]
    assert all(record.decision == "fp8" and record.groups == 4 for record in records)


@pytest.mark.parametrize("turned", [False, True], ids=["[E, out, in]", "[E, in, out]"])
@pytest.mark.parametrize("given", [{}, {"device": "b200"}, {"device": "b200", "recast_weights": True}], ids=str)
def test_tiles_of_weights(given: dict, turned: bool) -> None:
    """One scale for 32 x 32 elements: against the reference, with two copies of a weight and with one."""
    model, plain = made(turned), made(turned)
    options = {"recipe": "mxfp8", "weight_tiles": True, "policy": ALL_FP8, **given}
    step = torch.compile(model, backend="fp8", options=options)
    reference = GroupedReference("mxfp8", weight_tiles=True)
    for number in range(2):
        (x, dy), offs = batch(number), ends(SIZES)
        got = run(model, step, x, offs, dy)
        with reference.step():
            expected = run(plain, plain, x, offs, dy)
        for name in expected:
            assert sqnr(expected[name], got[name]) > 30, f"step {number}: {name}"


class LowRank(torch.nn.Module):
    """Experts with frozen weights and a low-rank update of each: beside them, or added to the weights, as PEFT does."""

    def __init__(self, added: bool, rank: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts, self.added = made(count=4), added
        self.experts.requires_grad_(False)
        self.a = torch.nn.Parameter(torch.randn(4, rank, 128).to(BF16) * 128**-0.5)
        self.b = torch.nn.Parameter(torch.randn(4, 256, rank).to(BF16) * 0.1)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        up, down = self.experts.gate_up_proj, self.experts.down_proj
        if self.added:
            gate, value = torch._grouped_mm(x, (up + self.b @ self.a).transpose(-2, -1), offs).chunk(2, -1)
        else:
            low = torch._grouped_mm(torch._grouped_mm(x, self.a.transpose(-2, -1), offs), self.b.transpose(-2, -1), offs)
            gate, value = (torch._grouped_mm(x, up.transpose(-2, -1), offs) + low).chunk(2, -1)
        return torch._grouped_mm(torch.nn.functional.silu(gate) * value, down.transpose(-2, -1), offs)


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
@pytest.mark.parametrize("added", [False, True], ids=["beside", "added"])
def test_low_rank_updates_of_experts(added: bool, recipe: str) -> None:
    """Frozen stacks have fprop and dgrad in FP8 and no wgrad; the updates learn."""
    model, exact = LowRank(added), LowRank(added)
    rules = [{"where": "n >= 128 and k >= 128", "fp8": "on"}, {"fp8": "off"}]
    call = torch.compile(model, backend="fp8", options={"recipe": recipe, "policy": {"rules": rules}})
    for number, sizes in enumerate(([100, 0, 17, 203], [0, 257, 16, 47])):
        x, dy = batch(number)
        got = run(model, call, x, ends(sizes), dy, trained=("a", "b"))
        high = run(exact, exact, x, ends(sizes), dy, trained=("a", "b"))
        for name in high:
            assert sqnr(high[name], got[name]) > (18 if name in "ydx" else 15), (number, name)
    found = {(record.parameter, record.gemm) for record in fp8compile.report(model).matmuls if record.decision == "fp8"}
    frozen = {("experts.down_proj", "fprop"), ("experts.down_proj", "dgrad")}
    assert frozen <= found and ("experts.down_proj", "wgrad") not in found
    assert added or {("experts.gate_up_proj", "fprop"), ("experts.gate_up_proj", "dgrad")} <= found


def test_float32_weights_are_quantized_as_they_are() -> None:
    """A model that casts its float32 weights for the matmul, as torchtitan's experts do."""
    torch.manual_seed(0)
    model, plain = Experts(128, 128, 4), made(count=4)
    plain.to(torch.float32).load_state_dict(model.state_dict())
    step = torch.compile(model, backend="fp8", options={"recipe": "tensorwise", "policy": ALL_FP8})
    (x, dy), offs = batch(0), ends([100, 100, 0, 120])
    got = run(model, step, x, offs, dy)
    exact = run(plain, plain, x, offs, dy)
    assert got["down_proj"].dtype == torch.float32 and {r.decision for r in fp8compile.report(model).matmuls} == {"fp8"}
    for name in exact:
        assert sqnr(exact[name], got[name]) > 20, name


@pytest.mark.parametrize("bad", [[100, 50, 60, 120], [100, 200, 300, TOKENS + 1]], ids=["decreasing", "too many"])
def test_ends_that_make_no_sense_are_an_error(bad: list[int]) -> None:
    model = made(count=4)
    step = torch.compile(model, backend="fp8", options={"policy": ALL_FP8})
    with pytest.raises(Exception, match="have to rise"):
        step(batch(0)[0], torch.tensor(bad, dtype=torch.int32))


def test_any_number_of_tokens() -> None:
    """Dynamic shapes: one compilation serves all."""
    model, exact = made(count=4), made(count=4)
    step = torch.compile(model, backend="fp8", options={"recipe": "tensorwise", "policy": ALL_FP8}, dynamic=True)
    for number, sizes in enumerate(([16, 0, 3, 45], [1, 1, 1, 1], [0, 257, 16, 15])):
        x, dy = batch(number, sum(sizes))
        got, high = run(model, step, x, ends(sizes), dy), run(exact, exact, x, ends(sizes), dy)
        for name in high:
            assert sqnr(high[name], got[name]) > 18, name


def planned(recipe: str, tokens: int | None = TOKENS, **settings: bool) -> None:
    """Three steps of the code that is compiled for a described GPU, against the reference. `tokens` None: as many as there are
    in the groups of a step, so that sizes are symbols."""
    model, plain = made(count=4), made(count=4)
    options = {"recipe": recipe, "policy": ALL_FP8, **settings}
    step = torch.compile(model, backend="fp8", options=options, dynamic=tokens is None)
    reference = GroupedReference(recipe, **settings)
    for number, sizes in enumerate(([100, 0, 17, 183], [0, 257, 16, 15], [1, 1, 1, 1])):
        x, dy = batch(number, tokens or sum(sizes))
        got = run(model, step, x, ends(sizes), dy)
        with reference.step():
            expected = run(plain, plain, x, ends(sizes), dy)
        for name in expected:
            assert sqnr(expected[name], got[name]) > 30, f"step {number}: {name}"
    assert all(record.decision == "fp8" for record in fp8compile.report(model).matmuls)


@pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
def test_the_plan_for_any_number_of_tokens() -> None:
    with executed() as plan:
        planned("tensorwise", None)
    assert plan.scaled == 3 * 6


@pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
@pytest.mark.parametrize(
    "recipe",
    ["mxfp8 tiles", *(pytest.param(x, marks=pytest.mark.slow) for x in ("delayed", "rowwise", "blockwise", "mxfp8"))],
)
def test_the_plan_for_a_gpu_without_the_matmul(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    """Blackwell takes a kernel of ours."""
    name, *tiles = recipe.split()
    if name == "mxfp8" and OLD_INTERPRETER:
        pytest.skip("Triton's interpreter has no `dot_scaled` before 3.7")
    with executed(gpu=Gpu("NVIDIA B200", 10, 0, 148, 180 << 30)) as plan:
        planned(name, **({"weight_tiles": True} if tiles else {}))
    warm = 2 if recipe == "delayed" else 3
    assert plan.scaled == 0 and plan.launches("fp8_grouped") == 6 * warm and "emulated" not in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
def test_the_plan_where_no_kernel_can_be_launched(caplog: pytest.LogCaptureFixture) -> None:
    """Experts are multiplied in bf16, and a warning says so."""
    with mock.patch.object(compat, "reorders", lambda: True), executed(gpu=Gpu("NVIDIA B200", 10, 0, 148, 180 << 30)) as plan:
        planned("rowwise")
    assert plan.scaled == plan.launches("fp8_grouped") == 0 and "experts in FP8 are emulated in bf16" in caplog.text


@pytest.mark.compat
@pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
@pytest.mark.parametrize(
    "recipe", ["tensorwise", "blockwise", *(pytest.param(x, marks=pytest.mark.slow) for x in ("delayed", "rowwise"))]
)
def test_the_plan_for_a_gpu(recipe: str) -> None:
    """Code for a described H200, run on a CPU, whose memory is NaN until it is written."""
    with executed() as plan:
        planned(recipe)
    assert plan.scaled == {"delayed": 2 * 6, "blockwise": 0}.get(recipe, 3 * 6)  # the first call of delayed scaling is cold
    assert any("transpose" in kernel.name for kernel in plan.kernels if kernel.ours)


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


@pytest.mark.compat
@pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
@pytest.mark.parametrize(
    ("recipe", "gpu"),
    [
        pair if pair == ("blockwise", "b200") else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in itertools.product(["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"], ["h200", "b200"])
    ],
)
def test_the_plan_for_rows_that_are_data(recipe: str, gpu: str) -> None:
    """As in one graph with an all-to-all (torchtitan): Inductor keeps no strides there, so all casts are kernels of ours."""
    if recipe == "mxfp8" and gpu == "b200" and OLD_INTERPRETER:
        pytest.skip("Triton's interpreter has no `dot_scaled` before 3.7")
    given = (Gpu("NVIDIA B200", 10, 0, 148, 180 << 30),) if gpu == "b200" else ()
    with mock.patch.object(torch._dynamo.config, "capture_scalar_outputs", True), executed(0, *given) as plan:
        model, plain = Counted(), Counted()
        step = torch.compile(model, backend="fp8", options={"recipe": recipe, "policy": ALL_FP8}, fullgraph=True)
        for number, sizes in enumerate(([100, 0, 17, 183], [0, 257, 16, 15], [1, 1, 1, 1])):
            x, dy = batch(number)
            got = run(model, step, x, ends(sizes), dy[:1])
            high = run(plain, plain, x, ends(sizes), dy[:1])
            for name in high:
                assert sqnr(high[name], got[name]) > 20, (number, name)
        assert [record.decision for record in fp8compile.report(model).matmuls] == ["fp8"] * 6
    assert plan.launches("fp8_group_order") >= 2


def test_a_layer_of_experts_between_training_and_evaluation() -> None:
    """Checkpointing, accumulation over two batches, an evaluation in between: as without them."""
    from torch.utils.checkpoint import checkpoint

    grads = []
    for kept in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Moe(128, 128).to(BF16)
        layer = torch.compile(model, backend="fp8", options={"policy": ALL_FP8})
        for number in range(3):
            x = torch.randn(40, 128, generator=torch.Generator().manual_seed(number)).to(BF16).requires_grad_()
            y = layer(x) if kept else checkpoint(layer, x, use_reentrant=False)
            y.backward(torch.ones_like(y))
            if number == 1 and not kept:
                model.eval()
                with torch.no_grad():
                    layer(x)
                model.train()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


def test_a_slice_of_a_stack_is_a_weight() -> None:
    class Sliced(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 256, 128, generator=torch.Generator().manual_seed(0)).to(BF16))

        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            gate, up = (torch._grouped_mm(x, half.transpose(-2, -1), offs) for half in self.weight.chunk(2, 1))
            return gate * up

    model, exact = Sliced(), Sliced()
    step = torch.compile(model, backend="fp8", options={"recipe": "tensorwise", "policy": ALL_FP8})
    (x, dy), offs = batch(0), ends([100, 0, 37, 183])
    got, high = run(model, step, x, offs, dy), run(exact, exact, x, offs, dy)
    records = fp8compile.report(model).matmuls
    assert len(records) == 6 and {(r.parameter, r.decision) for r in records} == {("weight", "fp8")}
    for name in high:
        assert sqnr(high[name], got[name]) > 20, name
