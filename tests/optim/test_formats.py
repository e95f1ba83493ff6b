"""Packed moments and split master weights: what every value must become."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8compile.optim.states import FIRST, SECOND, join, pack, power_of_two_scale, split, unpack

BITS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=300)


@settings(max_examples=200, deadline=None)
@given(amax=st.floats(0, 2.0**127, width=32), dtype=st.sampled_from([FIRST, SECOND]))
def test_the_scale_is_the_smallest_power_of_two(amax, dtype):
    scale, largest = power_of_two_scale(torch.tensor([amax]), dtype).item(), torch.finfo(dtype).max
    assert torch.frexp(torch.tensor(scale)).mantissa == 0.5
    assert amax / scale <= largest
    assert scale == 2.0**-126 or amax / (scale / 2) > largest


@pytest.mark.parametrize(("dtype", "precision"), [(FIRST, 2**-4), (SECOND, 2**-11)])
def test_rounding_is_to_nearest(dtype, precision):
    # less than seven binades: no subnormals
    values = torch.rand(64, 128, generator=torch.Generator().manual_seed(0)) + 0.01
    error = (unpack(*pack(values, dtype)) - values).abs() / values
    assert precision / 2 < error.max() <= precision


def test_not_finite_values_do_not_disturb_their_block():
    values = torch.linspace(-1, 1, 128)[None].repeat(3, 1)
    clean = unpack(*pack(values, FIRST))
    values[0, 5], values[1, 5] = float("nan"), float("inf")
    found = unpack(*pack(values, FIRST))
    assert found[:2, 5].isnan().all()
    clean[:2, 5] = found[:2, 5] = 0
    assert torch.equal(found, clean)
    assert unpack(*pack(values.abs(), SECOND))[1, 5] == float("inf")


def test_a_second_moment_never_becomes_zero():
    values = torch.tensor([[1e4, 1e-30] + 126 * [0.0]])
    found = unpack(*pack(values, SECOND))
    assert found[0, 1] > 0
    assert not found[0, 2:].any()


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(bits=BITS)
def test_any_master_weight_comes_back(bits):
    master = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    weight, remainder = split(master)
    found = join(weight, remainder)
    number = ~master.isnan()
    assert torch.equal(found[number], master[number])
    assert found[~number].isnan().all() and weight[~number].isnan().all()
    finite = number & weight.isfinite()
    half = (weight[finite].double() - master[finite].double()).abs()
    nearest = (master[finite].bfloat16().double() - master[finite].double()).abs()
    assert torch.equal(half, nearest)
