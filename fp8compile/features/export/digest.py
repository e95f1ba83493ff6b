"""A digest of a tensor, so that two processes can compare weights without sending them twice."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor, as 64 hexadecimal digits: of the line ``"float8_e4m3fn [256, 128]\\\\n"`` with its
    dtype and shape, and of its bytes in row-major order. It depends on neither device nor strides, and needs
    nothing of fp8compile to be computed elsewhere.

    `tensor` is plain, of any dtype and shape. Raises TypeError for a DTensor, which has a part of it."""
    if hasattr(tensor, "full_tensor"):
        raise TypeError("digest: a DTensor has a part of its values on each rank: give tensor.full_tensor()")
    dtype = str(tensor.dtype).removeprefix("torch.")
    found = hashlib.sha256(f"{dtype} {list(tensor.shape)}\n".encode())
    found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
