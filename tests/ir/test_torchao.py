"""torchao 0.18 as an independent oracle: its casts byte for byte, and its Float8Linear on a CPU (`emulate`).

Our operators are compared with torchao's functions on one tensor, and a compiled linear with Float8Linear.
Its matmuls are sums of equal numbers, and differ at most by the rounding to bf16.

torchao clamps amaxes to at least 1e-12, and computes powers of two from float32 logarithms. The tests at the
end show the differences, and both packages' treatment of zeros, infinities and NaN.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fp8compile.config.options import OURS, parse
from fp8compile.config.recipe import ROW, WHOLE, Block
from fp8compile.errors import OptionError
from fp8compile.ir import ops
from tests.support.harness import assert_fp8, compiled, noise, sqnr
from tests.support.stepped import stepped

torchao = pytest.importorskip("torchao")
from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: E402
from torchao.float8.config import CastConfig, Float8GemmConfig, ScalingGranularity  # noqa: E402
from torchao.float8.float8_linear import Float8Linear  # noqa: E402
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic  # noqa: E402

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MAX = {E4M3: 448.0, E5M2: 57344.0}
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
BLOCKS_32, BLOCKS_128, SQUARES = Block(1, 32), Block(1, 128), Block(128, 128)


def ramp(rows: int, columns: int, low: float, high: float) -> Tensor:
    """Noise whose columns grow from 10^low to 10^high."""
    return noise(rows, columns, seed=3) * torch.logspace(low, high, columns)


def zero_rows(rows: int, columns: int) -> Tensor:
    x = noise(rows, columns, seed=4)
    x[::3], x[:, 5::7] = 0.0, 0.0
    return x


def outlier(rows: int, columns: int) -> Tensor:
    x = noise(rows, columns, seed=5)
    x[rows // 2, columns // 3] = -7e4
    return x


CASES = {
    "normal": lambda r, c: noise(r, c, seed=1),
    "zero rows": zero_rows,
    "zeros": lambda r, c: torch.zeros(r, c),
    "huge": lambda r, c: noise(r, c, seed=2) * 1e28,
    # every amax over 1e-12
    "tiny": lambda r, c: (noise(r, c, seed=2).sign() + noise(r, c, seed=6) / 8) * 1e-10,
    "one outlier": outlier,
    "subnormal in FP8": lambda r, c: ramp(r, c, -6.0, 0.0),
    "wide": lambda r, c: ramp(r, c, -4.0, 4.0),
    "equal": lambda r, c: torch.full((r, c), 1.75),
}
every_case = pytest.mark.parametrize("case", CASES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def raw(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def ours(
    x: Tensor, block: Block, power_of_2: bool, transposed: bool = False, dtype: torch.dtype = E4M3
) -> tuple[Tensor, ...]:
    """-> values, scales and inverses, from the operators that the package's graphs contain."""
    amax = ops.amax(x) if block == WHOLE else ops.amax_blocks(x, transposed, block)
    scale = ops.current_scale(amax, MAX[dtype], 0, power_of_2)
    return ops.quantize(x, scale, dtype, MAX[dtype], transposed, block), scale, ops.inverse(scale)


def theirs(x: Tensor, dim: int | None, power_of_2: bool, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """-> values and scales: one scale for the tensor (`dim` None), or for each vector along `dim`."""
    granularity = ScalingGranularity.TENSORWISE if dim is None else ScalingGranularity.AXISWISE
    how = {"scaling_granularity": granularity, "axiswise_dim": dim, "round_scales_to_power_of_2": power_of_2}
    made: Any = hp_tensor_to_float8_dynamic(x, dtype, None, **how)
    return made._data, made._scale


def untransposed(copy: Tensor, x: Tensor) -> Tensor:
    """The transpose of a transposed copy, without its zero padding."""
    assert not raw(copy[:, x.shape[0] :]).any()
    return copy[:, : x.shape[0]].t()


@every_dtype
@every_case
def test_casts_of_tensors_and_rows(case: str, dtype: torch.dtype) -> None:
    for shape in ((80, 160), (37, 144), (1, 16)):
        check_tensors_and_rows(CASES[case](*shape).to(dtype))


def check_tensors_and_rows(x: Tensor) -> None:
    for power_of_2 in (False, True):
        for form in (E4M3, E5M2):
            expected, scale = theirs(x, None, power_of_2, form)
            for transposed in (False, True):
                got, got_scale, _ = ours(x, WHOLE, power_of_2, transposed, form)
                assert torch.equal(raw(untransposed(got, x) if transposed else got), raw(expected))
                assert got_scale.item() == scale.item() or not x.any()
        for transposed, dim in ((False, -1), (True, 0)):
            expected, scale = theirs(x, dim, power_of_2)
            got, got_scale, _ = ours(x, ROW, power_of_2, transposed)
            assert torch.equal(raw(untransposed(got, x) if transposed else got), raw(expected))
            seen = x.abs().amax(dim) > 0
            assert torch.equal(got_scale.flatten()[seen], scale.flatten()[seen])


@pytest.mark.cases(test=17, slow=1)
@every_dtype
@every_case
def test_casts_of_blocks(case: str, dtype: torch.dtype) -> None:
    """1 x 128, 128 x 1 (along tokens, for wgrad) and 128 x 128; no powers of two, as in torchao."""
    # has Triton kernels: needs triton
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    x = CASES[case](384, 256).to(dtype)
    values, scale_inv = kernels.torch_blockwise_scale_act_quant_lhs(x)
    columns, columns_inv = kernels.torch_blockwise_scale_act_quant_rhs(x)
    squares, squares_inv = kernels.torch_blockwise_scale_weight_quant(x)
    for expected, expected_inv, block, transposed in (
        (values, scale_inv, BLOCKS_128, False),
        (columns, columns_inv.t(), BLOCKS_128, True),
        (squares, squares_inv, SQUARES, False),
        (squares, squares_inv.t(), SQUARES, True),
    ):
        got, _, got_inv = ours(x, block, False, transposed)
        assert torch.equal(raw(untransposed(got, x) if transposed else got), raw(expected))
        seen = ops.amax_blocks(x, transposed, block) > 0
        assert got_inv.shape == expected_inv.shape and torch.equal(got_inv[seen], expected_inv[seen])
        assert (got_inv[~seen] == 1.0).all() and (expected_inv[~seen] < 1e-14).all()


@every_dtype
@every_case
def test_casts_of_microscaling_blocks(case: str, dtype: torch.dtype) -> None:
    """1 x 32 with E8M0 scales, rounded up (RCEIL), as cuBLAS documents it."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = CASES[case](96, 160).to(dtype)
    for source, transposed in ((x, False), (x.t().contiguous(), True)):
        scale, expected = mx.to_mx(source, E4M3, 32, mx.ScaleCalculationMode.RCEIL)
        got, _, got_inv = ours(x, BLOCKS_32, True, transposed)
        assert torch.equal(raw(got), raw(expected))
        seen = ops.amax_blocks(x, transposed, BLOCKS_32) > 0
        assert torch.equal(raw(got_inv.to(torch.float8_e8m0fnu))[seen], raw(scale)[seen])
        assert torch.equal(got_inv.to(torch.float8_e8m0fnu).float(), got_inv)  # the encoding is exact
        assert (raw(scale)[~seen] == 0).all() and (got_inv[~seen] == 1.0).all()


# -- a linear --


def both(recipe: str, x: Tensor, dy: Tensor, w: Tensor) -> list[dict[str, Tensor]]:
    """Output and gradients of a step of torchao's linear, and of ours."""
    linear = nn.Linear(w.shape[1], w.shape[0], bias=False).to(x.dtype)
    with torch.no_grad():
        linear.weight.copy_(w)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    # torchao's rowwise scales are, too
    rounded: dict[str, Any] = {"power_of_2_scale": True} if recipe != "tensorwise" else {}
    runs = Float8Linear.from_float(linear, config), compiled(linear, recipe, dynamic=False, **rounded)
    results = [stepped(run, linear, [x], lambda y: dy) for run in runs]
    assert_fp8(linear)
    return results


def assert_bf16(expected: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    """Equal, except for the rounding of sums in another order."""
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        error, size = (got[name].double() - tensor.double()).abs(), tensor.double().abs()
        assert tensor.isfinite().all() and got[name].isfinite().all(), name
        last = 2.0**-7 if tensor.dtype == torch.bfloat16 else 2.0**-16
        assert (error <= last * size + 1e-6 * size.max()).all(), f"{name}: {sqnr(tensor, got[name]):.1f} dB"


@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_linear(recipe: str) -> None:
    w = noise(144, 160, seed=7, scale=0.05).bfloat16()
    for case in ("normal", "zero rows", "huge", "one outlier", "wide"):
        size = 1e-20 if case == "huge" else 1e-3
        assert_bf16(*both(recipe, CASES[case](37, 160).bfloat16(), CASES[case](37, 144).bfloat16() * size, w))
    expected, got = both(recipe, noise(48, 160, seed=1), noise(48, 144, seed=2, scale=1e-5), w.float())
    for name, tensor in expected.items():
        assert sqnr(tensor, got[name]) > 110.0


# -- where we differ --


def test_next_to_a_power_of_two() -> None:
    """A scale just below a power of two: torchao's float32 logarithm rounds it up, and the amax saturates."""
    amax = torch.nextafter(torch.tensor(448.0 * 2.0**-30), torch.tensor(1.0))
    x = amax.reshape(1, 1)
    _, scale = theirs(x, -1, True)
    _, got_scale, _ = ours(x, ROW, True)
    assert scale.item() == 2.0**30 and scale.item() * amax.item() > 448.0
    assert got_scale.item() == 2.0**29


def test_microscaling_of_zeros_infinities_and_nan() -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = torch.ones(4, 32)
    x[0], x[1, 3], x[2, 3], x[3] = 0.0, float("inf"), float("nan"), 1e-36
    scale, expected = mx.to_mx(x, E4M3, 32, mx.ScaleCalculationMode.RCEIL)
    got, _, got_inv = ours(x, BLOCKS_32, True)
    # torchao: 2^-127 for zeros, 2^127 for an infinity (which saturates), NaN for a block with a NaN
    assert raw(scale).flatten().tolist() == [0, 254, 255, 0]
    assert expected.float()[1, 3] == 448.0 and expected.float()[2].isnan().all()
    assert not expected[3].float().any()  # an amax under 448 * 2^-127 is lost
    # ours: 1 for all three, and only the value itself is lost; the smallest amaxes use all of E8M0's range
    assert got_inv.flatten().tolist() == [1.0, 1.0, 1.0, 2.0**-127]
    for row in (1, 2):
        assert got.float()[row, 3].isnan() and (got.float()[row].nan_to_num(1.0) == 1.0).all()
    assert sqnr(x[3], got[3].float() * got_inv[3]) > 28.0


def test_each_name_of_its_configs_has_a_hint() -> None:
    configs = Float8LinearConfig, CastConfig, Float8GemmConfig
    names = {field.name for config in configs for field in dataclasses.fields(config)} - {*OURS}
    assert len(names) > 12
    for name in names:
        with pytest.raises(OptionError, match="Here it is "):
            parse({name: True})


def test_a_checkpoint_of_its_fp8_all_gather_loads_beside_it(tmp_path: Path) -> None:
    """As from-torchao.md says: its tensors are of a class that torchao's import makes known to torch."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        theirs, ours = nn.Sequential(nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 32))
        weight = theirs[0].weight.detach().clone()
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        convert_to_float8_training(theirs, config=config)
        fully_shard(theirs)
        dcp.save({"model": theirs.state_dict()}, checkpoint_id=tmp_path)
        fully_shard(ours)
        dcp.load({"model": ours.state_dict()}, checkpoint_id=tmp_path)
        loaded = ours[0].weight.to_local()
        assert type(loaded) is Tensor and torch.equal(loaded, weight)
    finally:
        dist.destroy_process_group()
