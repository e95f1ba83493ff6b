"""Training steps for a described GPU: nothing is executed, so size costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fp8compile.devices.gpu import H200, Gpu
from fp8compile.dryrun.fake_gpu import Step, trace

from .harness import ALL_FP8
from .models import Mlp

BF16 = torch.bfloat16


def unallocated(build: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """A module whose parameters are never written: the OS allocates no memory, so 0.4 GB cost nothing."""
    with torch.device("meta"):
        model = build().to(dtype)
    return model.to_empty(device="cpu")


def compile_mlp(
    rows: int, dtype: torch.dtype = BF16, dynamic: bool = False, gpu: Gpu = H200, **options: Any
) -> Step:
    """One training step of `Mlp(256, 512)` on `rows` rows; float32 means fp32 weights under bf16 autocast."""
    model = Mlp(256, 512).to(dtype)
    compiled = torch.compile(model, backend="fp8", dynamic=dynamic, options={"policy": ALL_FP8, **options})
    x = torch.randn(rows, 256, dtype=dtype, requires_grad=True)

    def step() -> None:
        with torch.autocast("cpu", BF16, enabled=dtype == torch.float32):
            out = compiled(x)
        out.sum().backward()

    return trace(step, gpu)
