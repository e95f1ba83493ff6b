"""The versions of torch with which this package was tested."""

from __future__ import annotations

import re
import warnings

import torch

OLDEST, NEWEST = (2, 11), (2, 15)


def check(version: str) -> None:
    """ImportError for a torch that is too old; a warning for one that is newer than all that we tested."""
    found = re.match(r"(\d+)\.(\d+)", version)
    have = (int(found[1]), int(found[2])) if found else OLDEST
    oldest, newest = (".".join(map(str, number)) for number in (OLDEST, NEWEST))
    fix = f"pip install 'torch>={oldest},<{NEWEST[0]}.{NEWEST[1] + 1}'"
    if have < OLDEST:
        raise ImportError(f"fp8compile needs torch {oldest} or later, and this is {version}: {fix}")
    if have > NEWEST:
        told = f"fp8compile was tested with torch {oldest} to {newest}, and this is {version}"
        text = f"{told}: private parts may have moved. If compiling fails: {fix}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def rowwise_returns_float32() -> bool:
    """CUTLASS's row-wise kernel returns bf16 and fp16; from torch 2.15 also float32 (RowwiseScaledMM.cu)."""
    return torch.torch_version.TorchVersion(torch.__version__) >= "2.15"
