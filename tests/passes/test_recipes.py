"""The finer recipes in the graph: shared copies, tensors kept for backward, emulation. Also: the layers that
are recognised as down projections after a gated activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

import fp8compile
from fp8compile.ir import ops
from tests.support import hooks
from tests.support.exact import Several
from tests.support.harness import ALL_FP8, noise
from tests.support.models import Attention, Block, Mlp, SwiGlu, make

pytestmark = pytest.mark.usefixtures("interpreted")


def step(model: nn.Module, x: Tensor, **options) -> fp8compile.Report:
    torch._dynamo.reset()
    torch.compile(model, backend="fp8", options=options)(x).sum().backward()
    return fp8compile.report(model)


def traced(model: nn.Module, x: Tensor, **options) -> fp8compile.Report:
    with hooks.traced():
        return step(model, x, **options)


def graphs(model: nn.Module, x: Tensor, **options) -> list[Graph]:
    """The partitioned graphs of a training step, forward first, before they are lowered."""
    with hooks.halves() as found:
        step(model, x, **options)
    return [gm.graph for gm, _ in found]


def count(graph: Graph, op) -> int:
    return len(graph.find_nodes(op="call_function", target=op))


def blocks_of(graph: Graph) -> list[Any]:
    return [node.args[2] for node in graph.find_nodes(op="call_function", target=ops.amax_blocks)]


# -- emulation --


@pytest.mark.slow
def test_mxfp8_is_emulated_but_on_blackwell():
    model, x = make(Mlp), noise(128, 128)
    report = traced(model, x, recipe="mxfp8", policy=ALL_FP8)
    assert all(record.emulated and record.decision == "fp8" for record in report.matmuls)
    assert "mxfp8 (emulated)" in str(report)
    assert report.to_dict()["graphs"][-1]["matmuls"][0]["emulated"] is True
    report = traced(model, x, recipe="mxfp8", policy=ALL_FP8, device="b200")
    assert not any(record.emulated for record in report.matmuls) and "emulated" not in str(report)
    with pytest.raises(fp8compile.StrictError, match="mxfp8 is emulated.*'blockwise'"):
        traced(model, x, recipe="mxfp8", policy=ALL_FP8, strict=True)
    with pytest.raises(fp8compile.StrictError, match="mxfp8 is emulated in bf16 on NVIDIA H100"):
        traced(model, x, recipe="mxfp8", policy=ALL_FP8, strict=True, device="h100")
    traced(model, x, recipe="mxfp8", policy=ALL_FP8, strict=True, device="b200")


# -- in the graph --


@pytest.mark.slow
def test_readers_share_what_is_scaled_alike():
    """q, k and v read one tensor: one amax, one scale and one copy for each layout, also for their wgrads."""
    forward, backward = graphs(make(Attention), noise(2, 64, 128).requires_grad_(), recipe="rowwise")
    # x: both layouts; y for o: one, since attention's backward has y itself; four weights: both layouts
    assert count(forward, ops.quantize_both) == 1 + 4 and count(forward, ops.quantize) == 1
    assert count(forward, ops.amax_blocks) == 2 * 5 + 1
    assert count(backward, ops.amax_blocks) == 1 + 2 * 4  # y, and four gradients, both layouts
    assert count(forward, ops.block_mm) == 4 and count(backward, ops.block_mm) == 8


TILES = {"recipe": "mxfp8", "weight_tiles": True, "policy": ALL_FP8}


@pytest.mark.parametrize("options", [{"recipe": "blockwise"}, TILES], ids=["128", "32"])
def test_square_blocks_share_their_amax(options: dict[str, Any]) -> None:
    forward, backward = graphs(make(Mlp), noise(128, 128), recast_weights=False, **options)
    block = [32, 32] if options is TILES else [128, 128]
    assert blocks_of(forward).count(block) == 2  # one a weight, whatever the layout
    assert block not in blocks_of(backward)


@pytest.mark.slow
def test_gw_hp_takes_one_scale_for_the_weight_in_dgrad():
    x = noise(128, 128, seed=1).requires_grad_()
    forward, backward = graphs(make(Mlp), x, recipe="rowwise_with_gw_hp")
    blocks = [node.args[7:9] for node in backward.find_nodes(op="call_function", target=ops.block_mm)]
    assert len(blocks) == 2 and all(sorted(pair) == [[0, 0], [1, 0]] for pair in blocks)
    assert count(forward, ops.amax) == 0 and count(backward, ops.amax) == 2  # one for each of the two weights
    assert count(backward, torch.ops.aten.mm.default) == 2


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_nothing_more_is_kept_for_backward(recipe):
    """Kept are FP8 copies, matmuls' results and scales, but no activation that can be recomputed."""
    model, x = make(lambda: Mlp(256, 512), dtype=torch.bfloat16), noise(512, 256, dtype=torch.bfloat16)
    _, backward = graphs(model, x, recipe=recipe)
    inputs = backward.find_nodes(op="placeholder")
    kept = [node.meta["val"] for node in inputs if "tangents" not in node.name]
    kept = [x for x in kept if isinstance(x, Tensor)]
    large = sorted((str(x.dtype), tuple(x.shape)) for x in kept if x.numel() >= 128 * 128)
    # the output of up, for GELU and its backward; the transposed copies of down's weight and of x
    copies = [("torch.float8_e4m3fn", (256, 512)), ("torch.float8_e4m3fn", (512, 256))]
    assert large == [("torch.bfloat16", (512, 512)), *copies]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_recipes_of_single_gemms(recipe):
    """Forward and backward scale a tensor in different ways; the backward graph gets the tangent."""
    recipes = {"fprop": recipe, "dgrad": "delayed", "wgrad": "mxfp8"}
    rules = [{"gemm": gemm, "recipe": name} for gemm, name in recipes.items()]
    model, x = make(lambda: nn.Linear(128, 256)), noise(4, 16, 128).requires_grad_()
    report = step(model, x, policy={"rules": rules})
    assert {r.gemm: r.recipe for r in report.matmuls} == recipes
    assert x.grad.isfinite().all() and model.weight.grad.abs().sum() > 0


# -- down projections --


class Fused(nn.Module):
    """One projection for gate and up."""

    def __init__(
        self, act: Callable[[Tensor], Tensor] | None = F.silu, drop: float = 0.0, first: bool = True
    ) -> None:
        super().__init__()
        self.act, self.drop, self.first = act, drop, first
        self.gate_up = nn.Linear(128, 512, bias=False)
        self.down = nn.Linear(256, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.gate_up(x)
        if self.act is None:
            return self.down(F.glu(h).clamp(-10, 10))
        a, b = h.chunk(2, dim=-1)
        gate, up = (a, b) if self.first else (b, a)
        return self.down(F.dropout(self.act(gate) * up, self.drop))


class Normed(nn.Module):
    """Products, but not of two projections: with a norm's weight, x * sigmoid(x), with a residual's norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(128, 256), nn.RMSNorm(256), nn.Linear(256, 128)
        self.out = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.up(x))
        return self.out(F.dropout(x + self.down(self.norm(h)), 0.1) * 0.5)


class Modulated(nn.Module):
    """adaLN without a shift: a norm of projections' outputs, times one scale for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.condition = nn.Linear(128, 256), nn.Linear(256, 128), nn.Linear(128, 256)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + self.condition(x[:, 0]).unsqueeze(1)
        return self.down(F.rms_norm(self.up(x), (256,)) * scale)


PARTS: list[tuple[Callable[[], nn.Module], set[str]]] = [
    (SwiGlu, {"down"}),
    (Fused, {"down"}),
    (lambda: Fused(F.gelu, 0.1), {"down"}),
    (lambda: Fused(lambda x: F.gelu(x, approximate="tanh"), first=False), {"down"}),
    (lambda: Fused(torch.sigmoid), {"down"}),
    (lambda: Fused(lambda x: x), {"down"}),
    (lambda: Fused(None), {"down"}),
    (lambda: Block(gated=True), {"mlp.down"}),
    (Mlp, set()),
    (Attention, set()),
    (Normed, set()),
    (Modulated, set()),
]


def recognised(model: nn.Module) -> set[str]:
    return {record.fqn for record in fp8compile.report(model).matmuls if record.rule == "down projection"}


def trained(parts: list[tuple[Callable[[], nn.Module], set[str]]]) -> tuple[nn.Module, set[str]]:
    """A step of these models as one, and the names of their down projections."""
    model = make(lambda: Several(build() for build, _ in parts))
    inputs = [noise(2, 64, 128, seed=i) for i in range(len(parts))]
    sum(y.float().sum() for y in torch.compile(model, backend="fp8")(*inputs)).backward()
    return model, {f"{i}.{name}" for i, (_, names) in enumerate(parts) for name in names}


@pytest.mark.slow
def test_down_projections_are_recognised() -> None:
    with hooks.traced():
        model, expected = trained(PARTS)
    assert recognised(model) == expected


@pytest.mark.slow
def test_inputs_of_down_projections_have_no_history() -> None:
    """But their weights have one. Under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        model, expected = trained([PARTS[0], PARTS[2], (Normed, set())])
    assert recognised(model) == expected
    roles = {(name, role) for name, role, _ in hooks.slots_of(model)}
    for name in expected:
        assert (f"{name}.weight", "input") not in roles and (f"{name}.weight", "weight") in roles, name
