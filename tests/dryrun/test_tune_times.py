"""tune() with the times of a described GPU: compilations, not the stand-in of test_tune.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.dryrun import fake_gpu
from fp8compile.errors import Fp8CompileError
from tests.support import models


@pytest.mark.slow
@pytest.mark.skipif(fake_gpu.unavailable() is not None, reason=fake_gpu.unavailable() or "")
def test_with_the_times_of_larger_sizes() -> None:
    """A batch of 64 tokens for the errors; 16384 tokens, 2048 wide, for the times."""

    class Net(nn.Module):
        def __init__(self, width: int, blocks: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(models.SwiGlu(width, 2 * width) for _ in range(blocks))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x.float().square().mean()

    torch.manual_seed(0)
    small, x = Net(128, 2), torch.randn(64, 128)
    with pytest.raises(Fp8CompileError, match="faster on NVIDIA H100"):
        fp8compile.tune(small, x, device="h100", loss_budget=0.3)
    with torch.device("meta"):
        like = Net(2048, 4).bfloat16(), (torch.empty(16384, 2048, dtype=torch.bfloat16),)
    tuned = fp8compile.tune(small, x, device="h100", loss_budget=0.3, like=like)
    whole = fp8compile.estimate(like[0], *like[1], device="h100", options={"policy": tuned.policy}, extrapolate=True)
    assert tuned.seconds == pytest.approx(whole.fp8.seconds, rel=1e-6) and tuned.bf16 == pytest.approx(whole.bf16.seconds)
    assert tuned.speedup > 1.1
