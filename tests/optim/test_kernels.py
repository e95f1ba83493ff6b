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

pytestmark = pytest.mark.skipif(fake_gpu.unavailable() is not None, reason=fake_gpu.unavailable() or "")


@pytest.mark.compat
@pytest.mark.parametrize(
    ("dtype", "master", "most"),
    [
        (torch.bfloat16, None, 2 + 2 + 2 + 2 + 4),  # the gradient; the weight, m and v are read and written
        (torch.bfloat16, "bf16+remainder", 2 + 2 + 2 + 2 + 4 + 4),
        (torch.bfloat16, "float32", 2 + 2 + 2 + 2 + 4 + 8),
        (torch.float32, None, 4 + 4 + 4 + 2 + 4),
    ],
)
def test_one_kernel_that_moves_each_byte_once(dtype: torch.dtype, master: str | None, most: int) -> None:
    weight = torch.zeros(1024, 4096, dtype=dtype).requires_grad_()
    weight.grad = torch.zeros_like(weight)
    optimizer = AdamW([weight], master=master)
    compiled.cache_clear()
    step = fake_gpu.trace(optimizer.step)
    compiled.cache_clear()
    (kernel,) = step.kernels
    assert kernel.bytes <= (most + 0.13) * weight.numel()
    assert "triton_per_fused" in step.code and "r0_numel = 128" in step.code  # a loop over a block would read everything twice


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
