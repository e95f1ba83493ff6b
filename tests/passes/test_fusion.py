"""Training steps with generated kernels, run in Triton's interpreter, against the same steps without kernels."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile import compat
from fp8compile.backend import fp8
from fp8compile.codegen import launch, state_kernels, triton_kernels
from fp8compile.ir import state_page
from tests.support.harness import interpreted, sqnr
from tests.support.interpreter import Interpreted, kernels_on_cpu
from tests.support.models import Block, Checkpointed, Mlp, SwiGlu

BF16 = torch.bfloat16
Steps = list[dict[str, Tensor]]


class RmsBlock(nn.Module):
    """A norm, a gated MLP and a residual, as in Llama."""

    def __init__(self, width: int = 128):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(width), SwiGlu(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def train(build: Callable[[], nn.Module], shapes: list[tuple], fused: bool, **options) -> tuple[Steps, list[str]]:
    """Outputs and gradients (also of inputs) of a step for each shape; the names of the generated kernels."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build().to(BF16)
    step = torch.compile(model, backend=fp8, options=options, dynamic=len(set(shapes)) > 1)
    results = []
    with interpreted(), kernels_on_cpu() if fused else contextlib.nullcontext([]) as made:
        for number, shape in enumerate(shapes):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(shape, generator=generator).to(BF16).requires_grad_()
            model.zero_grad()
            y = step(x)
            y.backward(torch.randn(y.shape, generator=generator).to(BF16))
            grads = {name: p.grad.clone() for name, p in model.named_parameters()}
            results.append({"y": y.detach(), "dx": x.grad, **grads})
    return results, [kernel.name for kernel in made]


def assert_same(build: Callable[[], nn.Module], shapes: list[tuple], **options) -> list[str]:
    """Fused and unfused steps agree. Sums over rows have another order, so a few elements may round differently."""
    expected, none = train(build, shapes, False, **options)
    found, made = train(build, shapes, True, **options)
    assert not none and made
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        for name in a:
            assert sqnr(a[name], b[name]) > 40, f"step {number}: {name}"
    return made


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple]] = {
    "mlp": (Mlp, (40, 128)),
    "rms norm, swiglu": (RmsBlock, (2, 20, 128)),
    "block": (Block, (2, 20, 128)),
    "checkpointed": (lambda: Checkpointed(Mlp()), (33, 128)),
}


EACH = [*((name, "delayed") for name in MODELS), ("block", "tensorwise"), ("checkpointed", "tensorwise")]
EACH += [("rms norm, swiglu", recipe) for recipe in ("rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")]
EACH += [("checkpointed", "rowwise")]


@pytest.mark.parametrize(("name", "recipe"), EACH)
def test_fused_training_is_training(name, recipe):
    build, shape = MODELS[name]
    made = assert_same(build, [shape] * 3, recipe=recipe)
    assert any("update" in kernel for kernel in made) == (recipe == "delayed")


def test_dynamic_rows():
    made = assert_same(RmsBlock, [(2, 20, 128), (3, 7, 128), (5, 33, 128), (2, 20, 128)])
    assert len(set(made)) <= 14, "kernels take sizes as arguments: one compilation serves all"


def test_blocks_of_128_rows_behind_sums_over_rows_are_two_kernels():
    """With 128 whole rows a program, 8192 tokens would give only 64 programs."""
    made: list[Any] = []
    configurations = launch.configurations

    def spy(kernel):
        made.append(kernel)
        return configurations(kernel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "configurations", spy)
        assert_same(lambda: nn.Sequential(RmsBlock(), RmsBlock()), [(2, 100, 128)] * 2, recipe="blockwise")
    over_rows = [kernel for kernel in made if kernel.row_blocks]
    assert all(kernel.block[0] == 1 for kernel in over_rows)
    assert any("value" in [x.content for x in kernel.outputs] for kernel in over_rows), "a gradient that the residual reads"
    assert any({x.content for x in kernel.outputs} == {"row"} for kernel in over_rows), "a norm that nobody else reads"


def test_recipes_of_one_tensor_that_do_not_go_together():
    """One gemm needs scales of rows, another gemm scales of blocks of 128 rows."""
    rules = [{"gemm": gemm, "recipe": recipe} for gemm, recipe in (("dgrad", "rowwise"), ("wgrad", "blockwise"))]
    made = assert_same(RmsBlock, [(2, 20, 128)] * 2, policy={"rules": rules})
    assert any("transpose_scale" in name for name in made)


def test_a_bias_gradient_is_summed_in_the_kernel_of_its_cast():
    _, made = train(Mlp, [(40, 128)] * 2, True)
    assert sum(name.endswith("sum", 0, name.rfind("_")) for name in made) == 2


def test_both_gradients_of_a_gated_activation_and_what_backward_needs_of_it_are_one_kernel():
    with interpreted(), kernels_on_cpu() as made:
        torch._dynamo.reset()
        model = torch.compile(SwiGlu().to(BF16), backend=fp8)
        model(torch.randn(48, 128).to(BF16).requires_grad_()).sum().backward()
    (backward,) = [kernel for kernel in made if "silu_backward" in kernel.name]
    stores = [line for line in backward.source.splitlines() if "tl.store(y" in line]
    assert len(stores) == 5 and sum("tl.trans(" in line for line in stores) == 3


@pytest.mark.parametrize(("options", "saved"), [({}, 2), ({"recast_weights": True}, 0)])
def test_a_weight_is_read_once_for_both_layouts(options, saved):
    """Two weights, both with a dgrad: their transposed copies are kept from the forward, or made in the backward."""
    with interpreted(), kernels_on_cpu() as made:
        torch._dynamo.reset()
        model = torch.compile(Mlp(bias=False).to(BF16), backend=fp8, options=options)
        model(torch.randn(48, 128).to(BF16).requires_grad_()).sum().backward()
    weights = [
        kernel for kernel in made if "x0: bfloat16 [256, 128]" in kernel.source or "x0: bfloat16 [128, 256]" in kernel.source
    ]
    both = [kernel for kernel in weights if "tl.trans(" in kernel.source and "tl.store(y1" in kernel.source]
    assert len(both) == saved and len(weights) == (2 if saved else 4)


def test_the_log_says_what_stays_with_inductor_and_why(caplog):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(128, 128, bias=False)

        def forward(self, x):
            return self.up(x.cumsum(0))

    with caplog.at_level(logging.DEBUG, "fp8compile.passes.fuse"):
        train(Odd, [(32, 128)] * 2, True)
    assert "cumsum" in caplog.text and "bytes" in caplog.text


def test_a_chain_of_a_thousand_operators():
    class Long(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(128, 128, bias=False)

        def forward(self, x):
            for _ in range(500):
                x = (x * 0.5 + 1.0).abs()
            return self.up(x)

    results, made = train(Long, [(16, 128)], True)
    assert made and results[0]["y"].isfinite().all()


def test_launches_with_one_source_share_one_function_whatever_their_slots():
    """Inductor tunes each function separately, so equal launches of different layers must share a function."""
    seen: list[set] = []
    original = compat.launch

    def spy(emit, function, grids, arguments, *constants):
        seen.append({name for name, x in arguments.items() if isinstance(x, int)})
        return original(emit, function, grids, arguments, *constants)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "launch", spy)
        _, made = train(lambda: nn.Sequential(Mlp(), Mlp(), Mlp()), [(40, 128)] * 2, True)
    assert not set.union(*seen), "numbers among the arguments"
    assert len(set(made)) < len(made) / 2


def test_blocks_are_chosen_by_what_a_kernel_does():
    def kernel(rows: bool, sums: bool, heavy: bool) -> Any:
        more = dict(column_amaxes=(), block=(1, 1), span=0, outputs=())
        return SimpleNamespace(row_blocks=rows, sums=("sum",) * sums, heavy=heavy, **more)

    assert launch.configurations(kernel(False, False, False)) == launch.TILES[:2]
    assert launch.configurations(kernel(False, False, True)) == launch.HEAVY_TILES[:2]
    assert launch.configurations(kernel(True, False, False)) == launch.ROW_BLOCKS[:2]
    with torch._inductor.config.patch(max_autotune=True):
        assert launch.configurations(kernel(True, False, False)) == launch.ROW_BLOCKS[:3]
    for heavy in (False, True):  # each block writes one row of partial sums, so all blocks have one height
        for rows in (False, True):
            assert len({height for height, _, _ in launch.configurations(kernel(rows, True, heavy))}) == 1


@pytest.mark.parametrize("bits", [True, False])
@pytest.mark.parametrize(
    ("slots", "history", "count", "interval", "most_recent", "margin"),
    [
        (48, 16, 33, 1, False, 0),
        (70, 16, 70, 1, False, 1),
        (5, 1, 5, 2, False, 0),
        (16, 3, 7, 3, True, 0),
        (130, 2, 130, 1, False, 0),
    ],
)
def test_the_update_kernel_is_next_page(slots, history, count, interval, most_recent, margin, bits):
    """Equal bit by bit, over steps with zeros, a NaN and an infinity; some slots without an amax; more slots than a block."""
    settings = [state_page.SlotSettings(448.0 / 2**margin, 1 if most_recent else history, interval)] * slots
    settings[::3] = [state_page.SlotSettings(57344.0, max(1, history - 1), 2)] * len(settings[::3])  # recipes may share a page
    kernel = Interpreted(triton_kernels.fp8_update, state_kernels.configuration(history))
    sizes = {"SLOTS": slots, "LENGTH": history, "COUNT": count, "STRIDE": launch.AMAX_STRIDE if bits else 1}
    generator = torch.Generator().manual_seed(0)
    expected = state_page.new_page(slots, history, torch.device("cpu"), settings)
    page = expected.clone()
    for step in range(9):
        amax = torch.rand(count, generator=generator) * 10.0 ** torch.randint(-6, 6, (count,), generator=generator)
        amax[torch.rand(count, generator=generator) < 0.2] = 0
        amax[step % count] = {4: float("nan"), 6: float("inf")}.get(step, 1.0)
        snapshot = state_page.snapshot_of(expected)
        expected = state_page.next_page(expected, snapshot, amax)
        vector = torch.zeros(count, launch.AMAX_STRIDE)
        vector[:, 0] = amax
        kernel[(1, 1, 1)](page=page, scales=snapshot, amaxes=vector.view(torch.int32) if bits else amax, **sizes)
        assert torch.equal(page, expected), step


def test_a_graph_that_inductor_reorders_gets_no_kernels():
    """Bucketing of collectives sorts a graph by data dependencies, and a launch has none."""
    with torch._inductor.config.patch(bucket_all_gathers_fx="all"):
        _, made = train(Mlp, [(40, 128)] * 2, True)
    assert not made


def test_an_operand_without_strides():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(128, 128, bias=False)

        def forward(self, x):
            return self.up(x[0, 0].expand(32, 128))

    assert_same(Constant, [(2, 2)] * 2)


def test_a_source_outlives_the_cache_that_it_came_from():
    import inspect

    from torch._inductor.utils import fresh_cache

    source = "import triton\n\n\n@triton.jit\ndef outlives(x):\n    pass\n"
    with fresh_cache():
        kernel = compat.load_kernel("outlives", source)
    assert "def outlives" in inspect.getsource(kernel.fn)


@pytest.mark.parametrize(("history", "block"), [(16, 64), (1024, 4), (4096, 1)])
def test_a_long_history_takes_fewer_slots_at_a_time(history, block):
    with interpreted(), kernels_on_cpu():
        torch._dynamo.reset()
        blocks = []
        tuned = launch.tuned

        def keep(kernel, configs, restore=()):
            if kernel is triton_kernels.fp8_update:
                blocks.append(configs)
            return tuned(kernel, configs, restore)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "tuned", keep)
            model = torch.compile(nn.Linear(128, 128).to(BF16), backend=fp8, options={"amax_history_len": history})
            model(torch.randn(16, 128).to(BF16).requires_grad_()).sum().backward()
    assert {config[0][0] for config in blocks} == {block}
