"""AdamW's step (Loshchilov and Hutter, arXiv 1711.05101), as torch's, in float32 on packed states."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compat
from ..codegen.expressions import converts_by_ptx, saturates
from ..extension import CastInStep
from ..ir import ops
from ..ir.scale import inverse_of
from .states import BLOCK, FIRST, SECOND, follow, half_a_unit, join, pack, split, unpack


class Factors(NamedTuple):
    """The numbers of a step, as float32 tensors without dimensions, so that no new value compiles anything.
    On the CPU, or where the learning rate is a tensor."""

    sign: Tensor  # -1 with maximize
    decay: Tensor  # 1 - lr * weight_decay
    size: Tensor  # lr / (1 - beta1^t)
    correction: Tensor  # 1 / sqrt(1 - beta2^t)
    blend1: Tensor  # 1 - beta1
    blend2: Tensor  # 1 - beta2
    eps: Tensor


def factors(group: dict[str, Any], step: int) -> Factors:
    """A parameter group's factors in its step number `step`, counted from 1. Nothing waits for a device."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    lr = lr.double() if isinstance(lr, Tensor) else lr
    values = (
        -1.0 if group["maximize"] else 1.0,
        1 - lr * group["weight_decay"],
        lr / (1 - beta1**step),
        (1 - beta2**step) ** -0.5,
        1 - beta1,
        1 - beta2,
        group["eps"],
    )

    def number(x: Any) -> Tensor:
        return x.float().reshape(()) if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float32)

    return Factors(*map(number, values))


def update(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    first_scale: Tensor,
    second: Tensor,
    second_scale: Tensor,
    kept: Tensor | None,
    by: Factors,
) -> None:
    """Update a weight and its states in place. All are [blocks, 128], the scales [blocks, 1].

    `kept` is the weight's int16 remainder, its float32 master weight, or None: then the weight is its own
    master. The step takes the moments as they are before they are packed."""
    gradient = gradient.float() * by.sign
    m = unpack(first, first_scale)
    m = m + by.blend1 * (gradient - m)
    v = unpack(second, second_scale)
    v = v + by.blend2 * (gradient * gradient - v)
    if kept is None:
        master = weight.float()
    elif kept.dtype == torch.int16:
        master = join(weight, kept)
    else:
        master = follow(kept, weight)
    master = master * by.decay - by.size * (m / (v.sqrt() * by.correction + by.eps))
    packed = pack(m, FIRST)
    first.copy_(packed.data)
    first_scale.copy_(packed.scale)
    packed = pack(v, SECOND)
    second.copy_(packed.data)
    second_scale.copy_(packed.scale)
    if kept is not None and kept.dtype == torch.int16:
        master, low = split(master)
        kept.copy_(low)
    elif kept is not None:
        kept.copy_(master)
    weight.copy_(master)


def cast_into(weight: Tensor, cast: CastInStep) -> None:
    """Cast an updated weight [R, C], and raise its amax, in plain torch."""
    bits = weight.abs().amax().float().view(torch.int32)
    cast.amax.copy_(torch.maximum(cast.amax, bits))
    ops.cast_into(weight, inverse_of(cast.inverse), cast.fp8_max, cast.rows, cast.columns)


TILE = (32, 8)  # rows of a program, each one block of states; warps


LEAST_EPS = 1e-12  # the kernel's root of a subnormal number is 0 instead of up to 1.1e-19: nothing beside it


def launches(group: dict[str, Any]) -> bool:
    """True if `launch_update` can make a step of this group. It takes the factors as numbers."""
    lr = group["lr"]
    return group["eps"] >= LEAST_EPS and not (isinstance(lr, Tensor) and lr.is_cuda)


def launch_update(given: tuple[Any, ...], cast: CastInStep, width: int) -> None:
    """`update` of these arguments and `cast_into`, in one walk over a weight, with rows of this width."""
    from .triton_adamw import fp8_adamw

    *tensors, by = given
    weight = tensors[0]
    height = weight.numel() // width
    with torch.cuda.device_of(weight):
        fp8_adamw[-(-height // TILE[0]) * (width // BLOCK),](
            *tensors,
            cast.rows,
            cast.columns,
            cast.inverse,
            cast.amax,
            *(x.item() for x in by),
            height,
            width,
            cast.apart,
            *half_a_unit(weight.dtype),
            cast.fp8_max,
            saturates(cast.dtype),
            converts_by_ptx(weight.device),
            TILE[0],
            BLOCK,
            num_warps=TILE[1],
        )


@functools.cache
def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """`update`, compiled once for each combination of dtypes. Only the number of blocks is dynamic: 128 must
    be a constant, or the kernel would loop over a block twice, once for its amax, and read everything
    twice."""
    call = torch.compile(function)

    def run(*args: Any) -> None:
        compat.dynamo.rows_vary(*(x for x in args if isinstance(x, Tensor)))
        call(*args)

    return run


def update_small(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    firsts: list[Tensor],
    seconds: list[Tensor],
    masters: list[Tensor],
    by: Factors,
) -> None:
    """The same for small parameters, whose states are float32 and whose `masters` are too (the weights
    themselves, if they are float32): a few kernels for all of them."""
    floats: list[Any] = [x if x.device.type != "cpu" else x.item() for x in by]
    sign, decay, size, correction, blend1, blend2, eps = floats
    wide = [x.float() for x in gradients]
    if sign < 0:
        wide = list(torch._foreach_neg(wide))
    for master, weight in zip(masters, weights, strict=True):
        if master is not weight:
            master.copy_(follow(master, weight))
    torch._foreach_lerp_(firsts, wide, blend1)
    torch._foreach_lerp_(seconds, torch._foreach_mul(wide, wide), blend2)
    below = torch._foreach_sqrt(seconds)
    torch._foreach_mul_(below, correction)
    torch._foreach_add_(below, eps)
    steps = torch._foreach_div(firsts, below)
    torch._foreach_mul_(steps, size)
    torch._foreach_mul_(masters, decay)
    torch._foreach_sub_(masters, steps)
    pairs = zip(weights, masters, strict=True)
    copied = [(weight, master) for weight, master in pairs if master is not weight]
    if copied:
        torch._foreach_copy_([weight for weight, _ in copied], [master for _, master in copied])
