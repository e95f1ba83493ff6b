"""The cost model against published measurements, and its arithmetic against results computed by hand."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8compile.config.recipe import COSTS, Recipe
from fp8compile.devices import catalog, cost
from fp8compile.devices.cost import CastInput

H100, H200, B300, NVL = (catalog.find(key) for key in ("h100", "h200", "b300", "h200-nvl"))
# torchao's tables were measured on Meta's H100 with HBM2e; copies reach 2.2 TB/s
# (torchao/testing/training/roofline_utils.py)
TORCHAO_H100 = dataclasses.replace(H100, sustained=dataclasses.replace(H100.sustained, bandwidth=2.2e12))
CELLS = Path(__file__).parent / "data" / "torchao_h100.csv"


def cells(recipe: str) -> dict[tuple[int, int, int], float]:
    with open(CELLS, encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        found = [r for r in rows if r["recipe"] == recipe]
    return {(int(r["m"]), int(r["k"]), int(r["n"])): float(r["speedup"]) for r in found}


@dataclasses.dataclass
class Linear:
    """Estimated seconds of a linear, forward and backward: matmuls in bf16, matmuls in FP8, and the
    additional FP8 `casts`."""

    bf16: float
    fp8: float
    casts: float

    @property
    def speedup(self) -> float:
        """The speedup of FP8, casts included, over bf16."""
        return self.bf16 / (self.fp8 + self.casts)


def linear(device, m, n, k, recipe="delayed", *, fused=(True, True), weight_bytes=2) -> Linear:
    """out[m, n] = x[m, k] @ w[n, k].t(), its dgrad and its wgrad.

    `fused`: whether kernels compute x and the output's gradient, so that casts can be fused into them (the
    kernels read one element for each element that they write). If so, nothing else reads these tensors.
    """
    sizes = ((m, n, k), (m, k, n), (n, k, m))
    bf16 = sum(cost.gemm(device, *size) for size in sizes)
    ways = zip(sizes, Recipe(recipe).use_fast_accum, strict=True)
    fp8 = sum(cost.block_gemm(device, *size, COSTS[recipe], fast=fast) for size, fast in ways)
    tensors = [(m * k, fused[0], 2), (m * n, fused[1], 2), (n * k, False, weight_bytes)]
    added = 0.0
    for elements, joined, itemsize in tensors:
        usual = CastInput(elements, fused=joined, producer_bytes=2 * elements, itemsize=itemsize)
        added += cost.casts(device, usual, COSTS[recipe])
        added -= cost.high_copy(device, dataclasses.replace(usual, high_bytes=2))
    return Linear(bf16, fp8, added)


def estimated(recipe: str) -> dict[tuple[int, int, int], float]:
    return {(m, k, n): linear(TORCHAO_H100, m, n, k, recipe).speedup for m, k, n in cells(recipe)}


# -- published figures --


def test_torchaos_rowwise_table():
    """The signs agree, and the order of the cells (Spearman's rank correlation)."""
    published, ours = cells("rowwise"), estimated("rowwise")
    assert len(published) == 216
    differ = [cell for cell in published if (published[cell] >= 1) != (ours[cell] >= 1)]
    assert 1 - len(differ) / len(published) >= 0.94
    assert all(abs(ours[cell] / published[cell] - 1) < 0.33 for cell in differ)
    # cells in which FP8 never gained for torchao may gain only a little here
    never = [cell for cell in published if cell[0] <= 2048 or cell[2] <= 2048]
    assert all(published[cell] < 1 for cell in never) and max(ours[cell] for cell in never) < 1.12
    speedups = torch.tensor([[values[cell] for cell in published] for values in (published, ours)])
    assert torch.corrcoef(speedups.argsort().argsort().double())[0, 1] > 0.95


def test_signs_of_torchaos_square_linears():
    published, ours = cells("tensorwise"), estimated("tensorwise")
    assert len(published) == 6
    assert all((published[cell] >= 1) == (ours[cell] >= 1) for cell in published)
    # torchao's delayed scaling reads the tensor twice, ours once: only the size between gain and loss differs
    published, ours = cells("delayed"), estimated("delayed")
    assert [cell for cell in published if (published[cell] >= 1) != (ours[cell] >= 1)] == [(2048, 2048, 2048)]


# K, N of a 5B layer
SUITE = {"qkv": (4096, 12288), "proj": (4096, 4096), "fc1": (4096, 16384), "fc2": (16384, 4096)}
TOKENS = 15872


@pytest.mark.parametrize(
    "device, recipe, published",
    [
        (NVL, "delayed", 1.69),
        (NVL, "tensorwise", 1.58),
        (NVL, "blockwise", 1.40),
        (B300, "delayed", 1.61),
        (B300, "tensorwise", 1.41),
    ],
)
def test_transformer_engines_twelve_gemms(device, recipe, published):
    """The casts read tensors from memory. TransformerEngine's current scaling needs more than two walks: the
    share of casts is largest on a B300."""
    layers = [linear(device, TOKENS, n, k, recipe, fused=(False, False)) for k, n in SUITE.values()]
    speedup = sum(x.bf16 for x in layers) / sum(x.fp8 + x.casts for x in layers)
    assert speedup == pytest.approx(published, rel=0.12 if (device, recipe) == (B300, "tensorwise") else 0.05)
    # their rates are those at which the model takes as long as was measured
    assert 1e3 * sum(x.bf16 for x in layers) == pytest.approx(32.0 if device is NVL else 12.76, rel=0.02)


@pytest.mark.parametrize(
    "size, bf16_us, fp8_us",
    # three gemms each, in us, torchao on an H100 (pull request 940: bf16_gemm_s, fp8_gemm_s)
    [(256, 11, 18), (512, 14, 20), (1024, 33, 26), (2048, 81, 55), (4096, 632, 274), (8192, 5027, 2216)],
)
def test_square_gemms(size, bf16_us, fp8_us):
    """Times are within 40%, and the speedup of FP8 is never above the measured one (with 15% for noise)."""
    bf16, fp8 = (3e6 * cost.gemm(TORCHAO_H100, size, size, size, dtype) for dtype in ("bf16", "fp8"))
    assert bf16 == pytest.approx(bf16_us, rel=0.4) and fp8 == pytest.approx(fp8_us, rel=0.4)
    assert bf16 / fp8 < 1.15 * bf16_us / fp8_us


# -- gemms --


def test_what_is_bound_by_the_tensor_cores_and_by_memory():
    for dtype in ("bf16", "fp8", "fp8_precise"):
        size, rate = 132 * 256, H200.flops.of(dtype)  # whole waves
        assert 2 * size**3 / cost.gemm(H200, size, size, size, dtype) == pytest.approx(rate, rel=0.02)
    m, n, k = 16, 8192, 8192
    moved = 2 * (m * k + n * k + m * n)
    assert cost.gemm(H200, m, n, k) == pytest.approx(moved / H200.bandwidth + H200.launch)
    assert cost.gemm(H200, m, n, k, out_bytes=4) > cost.gemm(H200, m, n, k)


def test_a_pipeline_is_filled_once():
    """Kernels take the next tile while they store the last one: three more waves of k cost three times k."""
    one, four = (cost.compute(H200, 128 * waves, 256 * 132, 8192, "fp8") for waves in (1, 4))
    assert four / one == pytest.approx((4 * 8192 + 512) / (8192 + 512))


def test_fp8_needs_a_device_that_has_it():
    with pytest.raises(ValueError, match="A100.* has no FP8"):
        cost.gemm(catalog.find("a100"), 128, 128, 128, "fp8")


sizes = st.integers(1, 20000)


@settings(max_examples=100, deadline=None)
@given(m=sizes, n=sizes, k=sizes)
def test_fp8_is_not_credited_with_more_than_it_can_save(m, n, k):
    bf16, fp8 = cost.gemm(H200, m, n, k), cost.gemm(H200, m, n, k, "fp8")
    flops, read, written = 2 * m * n * k, m * k + k * n, 2 * m * n
    rates = H200.flops
    bf16_floor = max(flops / rates.bf16, (2 * read + written) / rates.bandwidth)
    full = bf16_floor - max(flops / rates.fp8, (read + written) / rates.bandwidth)
    assert bf16 - fp8 <= full + 1e-12
    assert bf16 > 0 and fp8 >= flops / rates.fp8
    # twice the rows never take less time
    assert cost.gemm(H200, 2 * m, n, k) >= bf16 * 0.999


# -- casts: bytes by hand, on a device that moves a byte a second and launches for nothing --


def casts(device, elements, recipe="delayed", layouts=2, again=False, **tensor) -> float:
    return cost.casts(device, CastInput(elements, **tensor), COSTS[recipe], layouts, again)


UNIT = dataclasses.replace(H200, sustained=dataclasses.replace(H200.sustained, bandwidth=1.0), launch=0.0)


@pytest.mark.parametrize(
    "given, moved",
    [
        (dict(), 200 + 200),  # read bf16, write both copies
        (dict(layouts=1), 200 + 100),
        (dict(itemsize=4), 400 + 200),
        (dict(again=True), 2 * 200 + 200),  # a weight that is cast again in backward
        (dict(recipe="tensorwise"), 2 * 200 + 200),
        (dict(recipe="tensorwise", again=True), 3 * 200 + 200),
        (dict(fused=True, producer_bytes=700), 200),
        # bf16 is also written, and read
        (dict(fused=True, producer_bytes=700, high_bytes=2), 200 + 200 + 200),
        (dict(fused=True, producer_bytes=700, recipe="tensorwise"), 700 + 200),
        (dict(itemsize=4, high_bytes=2), 400 + 200 + 400 + 200),  # also converted to bf16
        (dict(high_bytes=2), 200 + 200),  # the bf16 tensor is in memory anyway
        (dict(scattered=True), 3 * 200 + 200),
        (dict(scattered=True, recipe="tensorwise"), 3 * 200 + 200),
    ],
)
def test_bytes_of_casts(given, moved):
    assert casts(UNIT, 100, **given) == pytest.approx(moved)


@pytest.mark.parametrize(
    "given, launches",
    [
        (dict(), 1),
        (dict(fused=True), 0),
        (dict(again=True), 2),
        (dict(recipe="tensorwise"), 2),  # amax, and cast with scale and inverse
        (dict(recipe="tensorwise", fused=True), 1),
    ],
)
def test_launches_of_casts(given, launches):
    idle = dataclasses.replace(
        H200, sustained=dataclasses.replace(H200.sustained, bandwidth=1e30), launch=1.0
    )
    assert casts(idle, 1, **given) == pytest.approx(launches)


# -- break-even --


def test_break_even_of_a_known_function():
    assert cost.break_even(lambda m: m - 1000.5) == 1008
    assert cost.break_even(lambda m: 1.0) == 16
    assert cost.break_even(lambda m: -1.0) is None
    assert cost.break_even(lambda m: 0.0) is None  # equal times are no gain
    assert cost.break_even(lambda m: m - 1000.5 if m != 4096 else -1.0) == 4096 + 16  # after the last loss


def test_break_even_moves_with_width_and_recipe():
    def start(n, k, recipe, **how):
        def gain(m):
            layer = linear(H200, m, n, k, recipe, **how)
            return layer.bf16 - layer.fp8 - layer.casts

        return cost.break_even(gain)

    assert start(128, 128, "tensorwise") is None
    wide, wider = start(2048, 2048, "delayed"), start(8192, 8192, "delayed")
    assert wide is not None and wider is not None and wider < wide
    assert start(2048, 2048, "tensorwise") > wide
    assert start(2048, 2048, "delayed", fused=(False, False)) > wide
    assert start(2048, 2048, "delayed", weight_bytes=4) <= wide
