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
from fp8compile.ir.fx_utils import element_of
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
    descriptions, the arguments of each launch, and the amaxes of each slot afterwards, newest first."""

    steps: list[dict[str, Tensor]]
    made: list[Interpreted]
    kernels: list[Any]
    arguments: list[dict[str, Any]]
    amaxes: dict[tuple[str, str, int], list[float]]

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
    amaxes = {key: slot.history()[: len(shapes)] for key, slot in hooks.slots_of(model).items()}
    return Trained(results, made, kernels, arguments, amaxes)


def compared(build: Callable[[], nn.Module], shapes: list[tuple], **options: Any) -> Trained:
    """Fused and unfused steps agree. Sums over rows have another order: a few elements may differ."""
    expected, found = (train(build, shapes, fused, **options) for fused in (False, True))
    assert not expected.arguments and found.made
    for number, (a, b) in enumerate(zip(expected.steps, found.steps, strict=True)):
        for name in a:
            assert sqnr(a[name], b[name]) > 40, f"step {number}: {name}"
    assert found.amaxes.keys() == expected.amaxes.keys()
    for slot, seen in expected.amaxes.items():
        assert found.amaxes[slot] == pytest.approx(seen, rel=2**-6), slot
        assert min(seen) > 0 and len(set(seen)) == (1 if slot[1] == "weight" else len(seen)), slot
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


RECIPES = {
    "mlps": ["delayed"],
    "rms norm, swiglu": ["delayed", "mxfp8", "rowwise", "rowwise_with_gw_hp", "blockwise"],
    "experts": ["delayed", "rowwise_with_gw_hp", "blockwise", "mxfp8"],
    "block": ["tensorwise"],
    "checkpointed": ["delayed", "rowwise"],
}
CASES = [(name, recipe) for name, recipes in RECIPES.items() for recipe in recipes]


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_fused_training_is_training(name: str, recipe: str) -> None:
    found = of(name, recipe)
    assert bool(found.amaxes) == (recipe == "delayed")
    places = [x for given in found.arguments for name, x in given.items() if name.startswith("amax")]
    raised = [x for x in places if element_of(x)[0].op == "placeholder"]  # type: ignore[index]
    assert len(raised) == len(found.amaxes), "kernels raise the state's amaxes where they are"


class Branches(nn.Module):
    """Two linears of one input, whose outputs have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Linear(128, 128, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x)


@pytest.mark.feature("delayed")
def test_an_amax_of_several_slots_raises_them_all() -> None:
    """The graph takes it once: of the input with two margins, and of the gradient for two weights."""
    rules = {"rules": [{"module": "other", "margin": 2}]}
    found = compared(Branches, [(40, 128)] * 3, policy=rules, merge_matmuls=False)
    assert len(found.amaxes) == 6
    for role in ("input", "gradient"):
        one, other = (found.amaxes[f"{name}.weight", role, 0] for name in ("one", "other"))
        assert one == other and len(one) == 3


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
    contents = [{x.content for x in group.outputs} for group in over_rows]
    assert any("value" in found for found in contents), "a gradient that the residual reads"
    assert {"row"} in contents, "a norm that nobody else reads"


@pytest.mark.feature("delayed")
def test_a_bias_gradient_is_summed_in_the_kernel_of_its_cast() -> None:
    """Of two linears in each of three layers."""
    assert sum(name.endswith("sum", 0, name.rfind("_")) for name in of("mlps", "delayed").names) == 6


class Gate(nn.Module):
    """A linear in FP8, and one beside it that stays in bf16, of the same norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.RMSNorm(128), nn.Linear(128, 128, bias=False)
        self.gate = nn.Linear(128, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.up(x) * self.gate(x).mean(-1, keepdim=True)


def test_what_stays_in_bf16_reads_what_the_kernel_of_the_cast_has_rounded() -> None:
    """The cast reads the norm in float32. Its rounded value is not computed once more."""
    found = compared(Gate, [(40, 128)], exclude=["gate"], recipe="rowwise")
    norms = [kernel for kernel in found.made if "rsqrt" in kernel.name]
    assert norms and all("tl.bfloat16), mask" in kernel.source for kernel in norms)


@pytest.mark.feature("delayed")
def test_launches_with_one_source_share_one_function_whatever_their_slots() -> None:
    """Inductor tunes each function apart, so equal launches of different layers must share one."""
    found = of("mlps", "delayed")
    arguments = [x for given in found.arguments for x in given.values()]
    assert arguments and not any(isinstance(x, int) for x in arguments)
    assert len(set(found.names)) < len(found.names) / 2


@pytest.mark.feature("delayed")
def test_both_gradients_of_a_gated_activation_and_what_backward_needs_of_it_are_one_kernel() -> None:
    made = of("rms norm, swiglu", "delayed").made
    (backward,) = [kernel for kernel in made if "silu_backward" in kernel.name]
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


def test_a_graph_that_inductor_reorders_gets_no_kernels() -> None:
    """Bucketing of collectives sorts a graph by data dependencies, and a launch has none."""
    with torch._inductor.config.patch(bucket_all_gathers_fx="all"):
        assert not train(lambda: nn.Linear(128, 128), [(40, 128)]).made


def test_a_source_outlives_the_cache_that_it_came_from() -> None:
    source = "import triton\n\n\n@triton.jit\ndef outlives(x):\n    pass\n"
    with fresh_cache():
        kernel = compat.triton.load_kernel("outlives", source)
    assert "def outlives" in inspect.getsource(kernel.fn)
