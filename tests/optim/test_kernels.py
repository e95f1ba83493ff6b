"""What a step would launch on a described GPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fp8compile.devices import support
from fp8compile.devices.gpu import Gpu
from fp8compile.dryrun import fake_gpu
from fp8compile.optim import AdamW
from fp8compile.optim.update import compiled
from tests.support import hooks
from tests.support.cached import layer, same
from tests.support.executed import executed
from tests.support.harness import ALL_FP8, assert_close, grads_of, noise

pytestmark = pytest.mark.skipif(fake_gpu.unavailable() is not None, reason=fake_gpu.unavailable() or "")


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.compat
@pytest.mark.parametrize(
    ("dtype", "master", "most"),
    [
        # the gradient; the weight, m and v are read and written
        pytest.param(torch.bfloat16, None, 2 + 2 + 2 + 2 + 4, marks=pytest.mark.slow),
        (torch.bfloat16, "bf16+remainder", 2 + 2 + 2 + 2 + 4 + 4),
        pytest.param(torch.float32, None, 4 + 4 + 4 + 2 + 4, marks=pytest.mark.slow),
    ],
)
def test_one_kernel_that_moves_each_byte_once(dtype: torch.dtype, master: str | None, most: int) -> None:
    weight = torch.zeros(1024, 4096, dtype=dtype).requires_grad_()
    weight.grad = torch.zeros_like(weight)
    compiled.cache_clear()
    step = fake_gpu.trace(AdamW([weight], master=master).step)
    compiled.cache_clear()
    (kernel,) = step.kernels
    assert kernel.bytes <= (most + 0.13) * weight.numel()
    # a loop over a block would read everything twice
    assert "triton_per_fused" in step.code and "r0_numel = 128" in step.code


def test_before_ada_the_update_is_not_compiled() -> None:
    """Triton has no E4M3 there: the kernel would not compile."""
    weight = torch.zeros(64, 128).requires_grad_()
    weight.grad = torch.zeros_like(weight)
    with mock.patch.object(support, "gpu_of", lambda device: Gpu(major=8, minor=0)):
        support.casts_to_e4m3.cache_clear()
        try:
            step = fake_gpu.trace(AdamW([weight]).step)
        finally:
            support.casts_to_e4m3.cache_clear()
    assert not step.kernels


@pytest.mark.weekly
def test_the_plan_of_a_gpu() -> None:
    """Executed on a CPU: casts between calls, and in the update, whose bits are those
    without. The plan of a forward that casts rounds otherwise."""
    results = []
    for cache, early in ((False, False), (True, False), (True, True)):
        torch._dynamo.reset()
        compiled.cache_clear()
        model, found = layer(), []
        optimizer = AdamW(model.parameters(), lr=1e-2, master="bf16+remainder", fp8_weights=early)
        options = {
            "policy": ALL_FP8,
            "recipe": "tensorwise",
            "cache_weights": cache,
            "power_of_2_scale": True,
        }
        with executed(0), hooks.casts_by_place() as made:
            call = torch.compile(model, backend="fp8", options=options)
            for seed in range(2):
                y = call(noise(1, 64, 128, seed=seed, dtype=torch.bfloat16))
                y.backward(noise(*y.shape, seed=9, dtype=torch.bfloat16))
                found.append({"y": y.detach().clone(), **grads_of(model)})
                optimizer.step()
                optimizer.zero_grad()
        casts = ["forward"] * 2 * cache + ["update"] * early
        assert made == casts
        results.append([*found, dict(model.named_parameters())])
    compiled.cache_clear()
    without, cached, early_ones = results
    assert same(cached, early_ones)
    assert_close(without[0], cached[0], 41.0, "the first step")
