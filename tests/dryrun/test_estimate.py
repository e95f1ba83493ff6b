"""estimate(): the figures of two compilations for a described GPU, by layer and in total."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn

import fp8compile
from fp8compile.devices import catalog
from fp8compile.dryrun import fake_gpu, roofline
from fp8compile.dryrun.autocast import NOTE
from fp8compile.dryrun.estimate import Compiler, Cost, Estimate, _layers, estimate
from fp8compile.dryrun.fake_gpu import Attention, Launch, MatmulLaunch, TensorLayout
from fp8compile.errors import OptionError
from tests.support import hooks, models

pytestmark = pytest.mark.skipif(fake_gpu.unavailable() is not None, reason=fake_gpu.unavailable() or "")

BF16 = torch.bfloat16
WIDTH, TOKENS = 1024, 8192
H200 = catalog.find("h200")


class Net(nn.Module):
    """Blocks in a row and a mean: every repeated part has a number."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(models.SwiGlu(WIDTH, 2 * WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()


@functools.cache
def net(count: int) -> Net:
    with torch.device("meta"):
        return Net(count).to(BF16)


def tokens() -> torch.Tensor:
    return torch.empty(TOKENS, WIDTH, dtype=BF16, device="meta")


@pytest.fixture(scope="module", autouse=True)
def described() -> Iterator[dict]:
    with hooks.described_once() as compilations:
        yield compilations


def estimated(count: int = 2, **settings: Any) -> Estimate:
    return estimate(net(count), tokens(), **settings)


@pytest.fixture
def made() -> Estimate:
    return estimated()


# -- the two compilations --


def test_the_totals_are_those_of_the_described_steps(made, described):
    steps = [
        step
        for compiler, (step, _) in described.values()
        if compiler.model is net(2) and compiler.device.key == "h200"
    ]
    for cost, step in zip((made.bf16, made.fp8), steps, strict=True):
        assert cost.kernels == len(step.kernels) and cost.bytes == sum(k.bytes for k in step.kernels)
        assert cost.bytes_outside_matmuls == step.bytes_outside_matmuls
        assert cost.kept_for_backward == step.kept_for_backward
        assert {d: n for d, n in cost.flops.items() if n} == step.flops
        assert cost.seconds == pytest.approx(sum(roofline.seconds(k, H200) for k in step.kernels))
        matmuls = [k for k in step.kernels if k.matmul]
        assert cost.matmul_seconds == pytest.approx(sum(roofline.seconds(k, H200) for k in matmuls))


@pytest.mark.weekly
def test_steps_are_those_of_torch_compile(made):
    model, x = Net().to(BF16), torch.zeros(TOKENS, WIDTH, dtype=BF16)
    plain, fp8 = torch.compile(model), torch.compile(model, backend="fp8", options={"device": "h200"})
    for cost, compiled in ((made.bf16, plain), (made.fp8, fp8)):
        step = fake_gpu.trace(lambda compiled=compiled: compiled(x).backward(), H200.gpu)
        assert cost.kernels == len(step.kernels) and cost.bytes == sum(k.bytes for k in step.kernels)
        assert cost.kept_for_backward == step.kept_for_backward


def test_bf16_beside_fp8(made):
    gemms = 2 * (3 * 3) - 2  # the input has no gradient, and two layers read it
    flops = gemms * 2 * TOKENS * WIDTH * 2 * WIDTH
    assert made.bf16.flops == {"bfloat16": flops}
    assert {d: n for d, n in made.fp8.flops.items() if n} == {"fp8": flops}
    assert 1.05 < made.speedup < 1.9 and made.fp8.kept_for_backward < made.bf16.kept_for_backward
    assert made.fp8.fp8_matmul_seconds == made.fp8.matmul_seconds < made.bf16.matmul_seconds
    assert made.device == "NVIDIA H200" and made.report.graphs[0].device == "NVIDIA H200"
    assert made.report.fp8_flop_fraction == 1.0 and not made.notes


def test_layers_add_up(made):
    names = [layer.name for layer in made.layers]
    parts = {f"layers.0-1.{part}" for part in ("gate", "up", "down")}
    assert set(names) - {"(elsewhere)"} <= {"layers.0-1", *parts}
    down = next(layer for layer in made.layers if layer.name == "layers.0-1.down")
    assert down.bf16.flops == {"bfloat16": 6 * 2 * TOKENS * WIDTH * 2 * WIDTH}
    given = json.loads(json.dumps(made.to_dict()))
    assert given["speedup"] == made.speedup and str(made).startswith(f"{made.speedup:.2f}x on NVIDIA H200: ")
    for arm in ("bf16", "fp8"):
        for key in ("kernels", "bytes", "bytes_outside_matmuls", "kept_for_backward", "seconds"):
            assert sum(layer[arm][key] for layer in given["layers"]) == pytest.approx(given[arm][key])
        flops = [layer[arm]["flops"].get("fp8", 0) for layer in given["layers"]]
        assert sum(flops) == given[arm]["flops"].get("fp8", 0)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"autocast": False}])
def test_explain_and_estimate_take_one_step(settings):
    """Float32 weights, at a size where FP8 gains over float32 and loses to bf16."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    x = torch.empty(2048, WIDTH, device="meta")
    explained = fp8compile.explain(model, x, device="h200", **settings)
    made = estimate(model, x, device="h200", **settings)
    assert explained.summary() == made.report.summary()
    assert ("slower in FP8" in made.report.summary()) is settings.get("autocast", True)
    assert (NOTE in explained.notes) is (NOTE in made.notes) is (not settings)
    assert made.bf16.flops.keys() == {"float32" if settings else "bfloat16"}


# -- attention --


def operand(*shape: int, dtype: torch.dtype = BF16) -> TensorLayout:
    return TensorLayout("x", shape, (), dtype)


def test_flops_of_attention():
    q, k = operand(2, 8, 100, 64), operand(2, 2, 300, 64)  # grouped queries
    once = 2 * 2 * 8 * 100 * 300 * (64 + 64)
    assert Attention(q, k, k, causal=False, backward=False).flops == once
    assert Attention(q, k, k, causal=True, backward=False).flops == once // 2
    assert Attention(q, k, k, causal=False, backward=True).flops == once * 5 // 2
    assert Attention(q, k, operand(2, 2, 300, 32), causal=False, backward=False).flops == once * 3 // 4


def test_attention_has_a_rate_of_its_own():
    device = H200
    q, k = operand(1, 32, 8192, 128), operand(1, 8, 8192, 128)
    fused = Attention(q, k, k, True, False)
    kernel = Launch("extern", "flash", 10**6, attention=fused)
    fast, slow = roofline.seconds(kernel, device), roofline.seconds(kernel, device, attention=0.44)
    assert fast - device.launch == pytest.approx(fused.flops / (0.71 * device.flops.bf16))
    assert (slow - device.launch) / (fast - device.launch) == pytest.approx(0.71 / 0.44)
    rates = dict.fromkeys(("h200", "h100", "b200"), "cuDNN, 0.71")  # torch 2.11 and later prefer it there
    rates |= dict.fromkeys(("a100", "rtx5090"), "FlashAttention-2, 0.83")
    rates |= {"mi300x": "FlashAttention-2, 0.44"}
    for key, rate in rates.items():
        assert str(roofline.attention_rate(catalog.find(key))) == f"{rate} of the bf16 matmul rate"


def launched(m: int, n: int, k: int, dtype: torch.dtype = BF16, accumulation: str = "fast") -> Launch:
    a, b = operand(m, k, dtype=dtype), operand(k, n, dtype=dtype)
    return Launch("extern", "mm", 0, MatmulLaunch("mm", a, b, operand(m, n), accumulation))


def test_matmuls_take_whole_waves():
    full, over = (roofline.seconds(launched(m, 256, 65536), H200) for m in (128 * 132, 128 * 132 + 1))
    # 132 tiles fill an H200; one more row of tiles takes as long as a second wave
    assert 1.2 < over / full < 2.1
    ideal = [roofline.seconds(launched(m, 256, 65536), H200, waves=False) for m in (128 * 132, 128 * 132 + 1)]
    assert ideal[1] / ideal[0] < 1.001 and ideal[0] < full


def test_fp8_without_fast_accumulation_is_slower_on_hopper():
    e4m3 = torch.float8_e4m3fn
    for waves in (True, False):
        fast, precise, blocks = (
            roofline.seconds(launched(8192, 8192, 8192, e4m3, how), H200, waves=waves)
            for how in ("fast", "precise", "blocks")
        )
        rates = H200.flops
        assert precise / fast == pytest.approx(rates.fp8 / rates.fp8_precise, rel=0.01)
        assert blocks / fast == pytest.approx(1 / 0.8, rel=0.01)
    b200 = catalog.find("b200")
    launches = [launched(8192, 8192, 8192, e4m3, how) for how in ("fast", "precise")]
    assert len({roofline.seconds(launch, b200) for launch in launches}) == 1


@pytest.mark.parametrize(
    "a, b, out, sizes",
    [
        ((96, 64), (64, 32), (96, 32), (1, 96, 32, 64)),
        ((8, 96, 64), (8, 64, 32), (8, 96, 32), (8, 96, 32, 64)),
        ((96, 64), (8, 64, 32), (96, 32), (8, 12, 32, 64)),  # the rows are divided among experts
        ((64, 96), (96, 32), (8, 64, 32), (8, 64, 32, 12)),  # their gradient: the contraction is
    ],
)
def test_sizes_of_a_launch(a, b, out, sizes):
    launch = MatmulLaunch("mm", operand(*a), operand(*b), operand(*out))
    assert launch.sizes == sizes and launch.flops == 2 * math.prod(sizes)


def test_an_optimizer_counts_the_same_in_both_and_without_waves_all_is_shorter(made):
    params = 2 * 3 * WIDTH * 2 * WIDTH
    with_it = estimated(optimizer=14)
    after = 14 * params / H200.bandwidth
    assert with_it.bf16.seconds - made.bf16.seconds == pytest.approx(after)
    assert with_it.fp8.seconds - made.fp8.seconds == pytest.approx(after)
    assert 1 < with_it.speedup < made.speedup
    assert with_it.notes == ("with an optimizer that moves 14 bytes per parameter",)
    assert "optimizer" in with_it.summary()
    ideal = estimated(waves=False)
    assert ideal.bf16.matmul_seconds < made.bf16.matmul_seconds
    assert ideal.fp8.matmul_seconds < made.fp8.matmul_seconds
    assert ideal.bf16.bytes == made.bf16.bytes and "without waves" in ideal.notes[0]


# -- repeated blocks --


FIRST_AND_LAST = [{"blocks": "first 1", "fp8": "off"}, {"module": "layers.9.*", "fp8": "off"}]


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"policy": {"rules": FIRST_AND_LAST}}, "4 and 5"),
        ({}, "3 and 4"),  # the first block has no gradient of its input
        ({"policy": lambda module, name: not name.startswith("layers.9")}, "4 and 5"),
    ],
)
def test_extrapolation_is_the_estimate_of_all_blocks(options, sizes, caplog):
    whole, carried = (estimated(10, options=options, extrapolate=few) for few in (False, True))
    assert carried.notes == (f"10 of layers, extrapolated from {sizes}",) and len(net(10).layers) == 10
    for a, b in ((whole.bf16, carried.bf16), (whole.fp8, carried.fp8)):
        flops = {d: n for d, n in a.flops.items() if n}
        assert {d: n for d, n in b.flops.items() if n > 1} == pytest.approx(flops)
        assert b.seconds == pytest.approx(a.seconds, rel=1e-3)
        assert b.kept_for_backward == pytest.approx(a.kept_for_backward, rel=1e-3)
    assert {layer.name for layer in carried.layers} >= {"layers.0-9.down", "layers.0-9.gate"}
    assert carried.report.summary() == whole.report.summary()
    assert not caplog.records  # such as that no module is called layers.9


def test_what_comes_out_negative_is_refused(monkeypatch):
    """Fewer blocks cost more here."""
    costs = {"norm": Cost(seconds=1)}
    monkeypatch.setattr(Compiler, "_compiled", lambda self, backend, order: (order, None))
    monkeypatch.setattr(
        Compiler, "_by_module", lambda self, order: {**costs, "layers.0.up": Cost(seconds=4 - len(order))}
    )
    with pytest.raises(fp8compile.Fp8CompileError, match=r"layers.0-7.up come out negative.*few of layers"):
        estimated(8, extrapolate=True)


def test_layers_are_joined_by_their_first_number():
    """Only the first number of a name counts repeated blocks: the second one is a layer within a block."""
    names = "0.0.up 0.2 1.0.up 1.2 h.0.mlp.up h.0.mlp.down h.2.mlp.up h.0.norm head norm.3".split() + [""]
    made = list(_layers({name: Cost(kernels=1) for name in names}, {"h.1.mlp.up": Cost(kernels=1)}))
    assert [(layer.name, layer.bf16.kernels, layer.fp8.kernels) for layer in made] == [
        ("0-1.0", 2, 0), ("0-1.2", 2, 0), ("h.0-2.mlp", 3, 1), ("h.0.norm", 1, 0), ("head", 1, 0),
        ("norm.3", 1, 0), ("(elsewhere)", 1, 0),
    ]  # fmt: skip
    sequential = _layers({"0": Cost(kernels=1), "1": Cost(kernels=1)}, {})
    assert [layer.name for layer in sequential] == ["0", "1"]  # separate layers, not blocks


# -- errors --


def test_errors(monkeypatch):
    with pytest.raises(OptionError, match="Did you mean 'h20', 'h200' or"):
        estimated(1, device="h20o")
    with pytest.raises(OptionError, match="FP8 tensor cores.*a100"):
        estimated(1, device="a100")
    with pytest.raises(OptionError, match="autotuning needs the device"):
        estimated(1, options={"max_autotune": True})
    for share in (75, 0, -1.0):
        with pytest.raises(OptionError, match="attention"):
            estimated(1, attention=share)
    with pytest.raises(OptionError, match="three or more equal blocks"):
        estimated(2, extrapolate=True)
    with pytest.raises(fp8compile.Fp8CompileError, match="Dynamo found no graph"):
        estimate(lambda: 1)
    with pytest.raises(RuntimeError, match="reduction dim|shapes cannot be multiplied"):
        estimate(Net(1).to(BF16), torch.empty(4, WIDTH + 1, dtype=BF16, device="meta"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(fp8compile.Fp8CompileError, match='CUDA_VISIBLE_DEVICES=""'):
        estimate(Net(1).to(BF16), tokens())
