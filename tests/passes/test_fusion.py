"""Training steps with generated kernels, in Triton's interpreter, against the same steps without."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from fp8compile import compat
from fp8compile.codegen import launch, state_kernels, triton_kernels
from fp8compile.ir import state_page
from tests.support import hooks
from tests.support.harness import sqnr
from tests.support.interpreter import Interpreted, kernels_on_cpu
from tests.support.models import Block, Checkpointed, Gated, Mlp, Moe

BF16 = torch.bfloat16


class Alone(nn.Module):
    """A linear after a function of the input."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function, self.up = function, nn.Linear(128, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.function(x))


class Trained(NamedTuple):
    """Outputs and gradients (also of inputs) of each step, the kernels in the order of their launches, their
    descriptions, and the arguments of each launch."""

    steps: list[dict[str, Tensor]]
    made: list[Interpreted]
    kernels: list[Any]
    arguments: list[dict[str, Any]]

    @property
    def names(self) -> list[str]:
        return [kernel.name for kernel in self.made]


def train(build: Callable[[], nn.Module], shapes: list[tuple], fused: bool = True, **options: Any) -> Trained:
    """A step for each shape."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build().to(BF16)
    step = torch.compile(model, backend="fp8", options=options, dynamic=len(set(shapes)) > 1)
    results = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(hooks.lowered() if fused else hooks.interpreted())
        made = stack.enter_context(kernels_on_cpu()) if fused else []
        kernels, arguments = stack.enter_context(hooks.generated())
        for number, shape in enumerate(shapes):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(shape, generator=generator).to(BF16).requires_grad_()
            model.zero_grad()
            y = step(x)
            y.backward(torch.randn(y.shape, generator=generator).to(BF16))
            grads = {name: p.grad.clone() for name, p in model.named_parameters()}
            results.append({"y": y.detach(), "dx": x.grad, **grads})
    return Trained(results, made, kernels, arguments)


def compared(build: Callable[[], nn.Module], shapes: list[tuple], **options: Any) -> Trained:
    """Fused and unfused steps agree. Sums over rows have another order: a few elements may differ."""
    expected, found = (train(build, shapes, fused, **options) for fused in (False, True))
    assert not expected.arguments and found.made
    for number, (a, b) in enumerate(zip(expected.steps, found.steps, strict=True)):
        for name in a:
            assert sqnr(a[name], b[name]) > 40, f"step {number}: {name}"
    return found


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple]] = {
    "mlps": (lambda: nn.Sequential(Mlp(), Mlp(), Mlp()), (40, 128)),
    "rms norm, swiglu": (Gated, (2, 20, 128)),
    "block": (Block, (2, 20, 128)),
    "checkpointed": (lambda: Checkpointed(Mlp()), (33, 128)),
    "experts": (Moe, (2, 20, 128)),
}


@functools.cache
def of(name: str, recipe: str) -> Trained:
    build, shape = MODELS[name]
    return compared(build, [shape] * 2, recipe=recipe)


CASES = [
    ("mlps", "delayed"),
    *(("rms norm, swiglu", recipe) for recipe in ("delayed", "mxfp8")),
    ("experts", "delayed"),
]
CASES += [("block", "tensorwise"), ("checkpointed", "delayed"), ("checkpointed", "rowwise")]
CASES += [("rms norm, swiglu", recipe) for recipe in ("rowwise", "rowwise_with_gw_hp", "blockwise")]
CASES += [("experts", recipe) for recipe in ("rowwise_with_gw_hp", "blockwise", "mxfp8")]


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_fused_training_is_training(name: str, recipe: str) -> None:
    assert any("update" in kernel for kernel in of(name, recipe).names) == (recipe == "delayed")


@pytest.mark.slow
def test_dynamic_rows() -> None:
    made = compared(Gated, [(2, 20, 128), (3, 7, 128)]).names
    assert len(set(made)) <= 14, "kernels take sizes as arguments: one compilation serves all"


@pytest.mark.slow
def test_blocks_of_128_rows_behind_sums_over_rows_are_two_kernels() -> None:
    """With 128 whole rows a program, 8192 tokens would give only 64 programs."""
    found = compared(lambda: nn.Sequential(Gated(), Gated()), [(130, 128)], recipe="blockwise")
    over_rows = [kernel.group for kernel in found.kernels if kernel.group.passes]
    assert all(group.block[0] == 1 for group in over_rows)
    assert any("value" in [x.content for x in group.outputs] for group in over_rows), (
        "a gradient that the residual reads"
    )
    assert any({x.content for x in group.outputs} == {"row"} for group in over_rows), (
        "a norm that nobody else reads"
    )


def test_a_bias_gradient_is_summed_in_the_kernel_of_its_cast() -> None:
    """Of two linears in each of three layers."""
    assert sum(name.endswith("sum", 0, name.rfind("_")) for name in of("mlps", "delayed").names) == 6


def test_launches_with_one_source_share_one_function_whatever_their_slots() -> None:
    """Inductor tunes each function apart, so equal launches of different layers must share one."""
    found = of("mlps", "delayed")
    assert found.arguments and not any(
        isinstance(x, int) for given in found.arguments for x in given.values()
    )
    assert len(set(found.names)) < len(found.names) / 2


def test_both_gradients_of_a_gated_activation_and_what_backward_needs_of_it_are_one_kernel() -> None:
    (backward,) = [
        kernel for kernel in of("rms norm, swiglu", "delayed").made if "silu_backward" in kernel.name
    ]
    stores = [line for line in backward.source.splitlines() if "tl.store(y" in line]
    assert len(stores) == 5 and sum("tl.trans(" in line for line in stores) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("options", "saved"), [({}, 2), ({"recast_weights": True}, 0)])
def test_a_weight_is_read_once_for_both_layouts(options: dict[str, Any], saved: int) -> None:
    """Two weights, both with a dgrad: their transposed copies are kept from forward, or made in backward."""
    found = train(lambda: Mlp(bias=False), [(48, 128)], **options)
    sizes = ("x0: bfloat16 [256, 128]", "x0: bfloat16 [128, 256]")
    weights = [kernel for kernel in found.made if any(size in kernel.source for size in sizes)]
    both = [kernel for kernel in weights if "tl.trans(" in kernel.source and "tl.store(y1" in kernel.source]
    assert len(both) == saved and len(weights) == (2 if saved else 4)


def test_the_log_says_what_stays_with_inductor_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fp8compile.passes.fuse"):
        train(lambda: Alone(lambda x: x.cumsum(0)), [(32, 128)])
    assert "cumsum" in caplog.text and "bytes" in caplog.text


@pytest.mark.cases(test=2, slow=2)
@pytest.mark.parametrize(
    ("slots", "history", "count", "interval", "most_recent", "margin", "bits"),
    [
        (48, 16, 33, 1, False, 0, True),
        (70, 16, 70, 1, False, 1, False),
        (5, 1, 5, 2, False, 0, True),
        (16, 3, 7, 3, True, 0, False),
        (130, 2, 130, 1, False, 0, True),
    ],
)
def test_the_update_kernel_is_next_page(
    slots: int, history: int, count: int, interval: int, most_recent: bool, margin: int, bits: bool
) -> None:
    """Equal bit by bit, over steps with zeros, a NaN and an infinity, overflows and underflows; some slots
    without an amax; more slots than a block."""
    watched = state_page.limit_of(448.0, margin, False), state_page.limit_of(57344.0, 11, True)
    settings = [
        state_page.SlotSettings(448.0 / 2**margin, 1 if most_recent else history, interval, watched[0])
    ] * slots
    recipes = (
        state_page.SlotSettings(28.0, max(1, history - 1), 2, watched[1]),
        state_page.SlotSettings(57344.0, 1, 1),
    )
    for i, other in enumerate(recipes):  # recipes may share a page
        settings[i::3] = [other] * len(settings[i::3])
    kernel = Interpreted(triton_kernels.fp8_update, state_kernels.configuration(history))
    sizes = {"SLOTS": slots, "LENGTH": history, "COUNT": count, "STRIDE": launch.AMAX_STRIDE if bits else 1}
    generator = torch.Generator().manual_seed(0)
    expected = state_page.new_page(slots, history, torch.device("cpu"), settings)
    page, forgotten, marked = expected.clone(), 0, set()
    for step in range(9):
        amax = torch.rand(count, generator=generator) * 10.0 ** torch.randint(
            -6, 6, (count,), generator=generator
        )
        amax[torch.rand(count, generator=generator) < 0.2] = 0
        amax[step % count] = {4: float("nan"), 6: float("inf")}.get(step, 1.0)
        snapshot = state_page.snapshot_of(expected)
        expected = state_page.next_page(expected, snapshot, amax)
        vector = torch.zeros(count, launch.AMAX_STRIDE)
        vector[:, 0] = amax
        kernel[(1, 1, 1)](
            page=page, scales=snapshot, amaxes=vector.view(torch.int32) if bits else amax, **sizes
        )
        assert torch.equal(page, expected), step
        marked |= set() if amax.isfinite().all() else {step % count}
        assert {*torch.nonzero(state_page.Rows(page).not_finite).flatten().tolist()} == marked, step
        cold = state_page.Rows(state_page.numbers_of(snapshot)).cold
        forgotten += int((cold & (state_page.Rows(page).history > 0).sum(1).eq(1)).sum())
    assert forgotten or history == 1


def test_a_long_history_takes_fewer_slots_at_a_time() -> None:
    assert [state_kernels.configuration(history)[0] for history in (16, 1024, 4096)] == [64, 4, 1]
    found = train(lambda: nn.Linear(128, 128), [(16, 128)], amax_history_len=1024)
    assert {kernel.block["BLOCK_R"] for kernel in found.made if kernel.name == "fp8_update"} == {4}


def test_a_graph_that_inductor_reorders_gets_no_kernels() -> None:
    """Bucketing of collectives sorts a graph by data dependencies, and a launch has none."""
    with torch._inductor.config.patch(bucket_all_gathers_fx="all"):
        assert not train(lambda: nn.Linear(128, 128), [(40, 128)]).made


def test_a_source_outlives_the_cache_that_it_came_from() -> None:
    source = "import triton\n\n\n@triton.jit\ndef outlives(x):\n    pass\n"
    with fresh_cache():
        kernel = compat.triton.load_kernel("outlives", source)
    assert "def outlives" in inspect.getsource(kernel.fn)
