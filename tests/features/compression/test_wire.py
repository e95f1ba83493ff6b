"""Blocks of gradients as bytes: what every value becomes. And what `compress_gradients` refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8compile
from fp8compile.distributed import compress_gradients, fp8_hook
from fp8compile.features.compression.compression import Compression
from fp8compile.features.compression.wire import WIRE, dequantize, quantize, to_rows

ANY = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=300)


@settings(max_examples=100, deadline=None)
@given(values=ANY)
def test_the_error_of_any_block(values: list[float]) -> None:
    """A sixteenth of a value, or half of E4M3's smallest step, as far as float32's smallest numbers reach."""
    rows = to_rows(torch.tensor(values, dtype=torch.float32))
    sent = quantize(rows)
    assert sent.dtype == torch.uint8 and sent.shape == (*rows.shape[:-1], WIRE)
    found, largest = dequantize(sent), rows.abs().amax(-1, keepdim=True).double() if len(rows) else rows
    limit = (rows.abs().double() / 16).maximum(largest / 448 * 2**-10 * 1.001) + 2.0**-126
    assert ((found.double() - rows.double()).abs() <= limit).all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_block_that_is_not_finite_arrives_as_nan(bad: float) -> None:
    rows = torch.ones(3, 128)
    rows[1, 7] = bad
    found = dequantize(quantize(rows))
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], torch.ones(2, 128))


def test_a_model_of_one_process_is_refused() -> None:
    wrong = "neither wrapped in DistributedDataParallel nor sharded by fully_shard"
    with pytest.raises(ValueError, match=wrong):
        compress_gradients(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="takes the model"):
        compress_gradients(nn.Linear(2, 2).parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"min_elements": -1}, {"sqnr_every": 2.5}, {"min_elements": True}])
def test_bad_arguments(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        compress_gradients(nn.Linear(2, 2), **options)


def test_one_process(one_process: str, caplog: pytest.LogCaptureFixture) -> None:
    model = DistributedDataParallel(nn.Linear(128, 128))
    compress_gradients(model, min_elements=0, sqnr_every=0)
    assert "none is compressed" in caplog.text
    model(torch.ones(2, 128)).sum().backward()
    torch.testing.assert_close(model.module.weight.grad, torch.full((128, 128), 2.0))
    assert not fp8compile.stats(model).rows()
    with pytest.raises(RuntimeError, match="only be called once"):
        compress_gradients(model)


def test_buckets_that_ddp_fills_anew_replace_the_old_ones() -> None:
    state = Compression()
    state.bucket((1, 2), 10, 2)
    other = state.bucket((3,), 10, 1)
    new = state.bucket((2,), 10, 1)
    assert list(state.buckets.values()) == [other, new]
    assert state.bucket((2,), 10, 1) is new


def test_a_hook_by_hand(one_process: str) -> None:
    model = DistributedDataParallel(nn.Linear(128, 128).double())  # no dtype of ours: reduced as it is
    model.register_comm_hook(None, fp8_hook)
    model(torch.ones(2, 128, dtype=torch.float64)).sum().backward()
    assert (model.module.weight.grad == 2).all()
