"""GatheredWeight: a weight that FSDP2 has gathered in FP8. It looks like a tensor of its own dtype.

    w = GatheredWeight(data [N, K] FP8, inv [1] float32, torch.bfloat16)
    w.dtype is bfloat16; linear(x, w) computes with dequantize(data, inv, bfloat16)

With a `block`, inv is [N / rows, K / columns], rounded up: one for each block.

Under torch.compile, `data` and `inv` are two inputs of the graph. There, `dequantize` is a node that our
passes know: an FP8 matmul reads `data` itself. All other readers get the values that FP8 has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from .. import compat
from ..config.recipe import WHOLE, Block
from . import ops

aten = torch.ops.aten


class GatheredWeight(Tensor):
    """`read`, if any, is called with the name of each operator that reads the values outside of compiled
    graphs. `block`: the rows and columns that share a scale; 0 stands for all of them."""

    data_: Tensor
    inv_: Tensor
    read: Callable[[str], None] | None
    block: Block

    @staticmethod
    def __new__(cls, data: Tensor, inv: Tensor, dtype: torch.dtype, *_: Any, **__: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=dtype, device=data.device
        )  # requires no gradient: the parameter that is made of it does

    def __init__(
        self,
        data: Tensor,
        inv: Tensor,
        dtype: torch.dtype,
        read: Callable[[str], None] | None = None,
        block: Block = WHOLE,
    ):
        self.data_, self.inv_, self.read, self.block = data, inv, read, block

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["data_", "inv_"], {"dtype": self.dtype, "block": self.block}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: dict[str, Any], size: Any, stride: Any
    ) -> GatheredWeight:
        return GatheredWeight(inner["data_"], inner["inv_"], meta["dtype"], block=meta["block"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, dtype={self.dtype}, gathered in {self.data_.dtype})"

    __torch_function__ = compat.autograd.no_torch_function  # type: ignore[assignment]

    def dequantized(self) -> Tensor:
        """The values that FP8 has left: a plain tensor of the weight's own dtype and shape."""
        blocks = [[*self.block]] if self.block != WHOLE else []
        return ops.dequantize(self.data_, self.inv_, self.dtype, *blocks)

    def like(self, data: Tensor, inv: Tensor) -> Any:
        """Such a weight with these FP8 values and inverses of scales."""
        return GatheredWeight(data, inv, self.dtype, self.read, self.block)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, GatheredWeight) and same(func, first, args):
            return first.like(func(first.data_, *args[1:], **kwargs), first.inv_)

        def values(x: GatheredWeight) -> Tensor:
            if x.read is not None:
                x.read(str(func).removesuffix(".default"))
            return x.dequantized()

        args, kwargs = pytree.tree_map_only(GatheredWeight, values, (args, kwargs))
        return func(*args, **kwargs)


def same(func: Any, weight: GatheredWeight, args: Sequence[Any]) -> bool:
    """True if an operator gives the same tensor again."""
    if func in (aten.detach.default, aten.alias.default):
        return True
    if func is not aten.as_strided.default or [*args[1]] != [*weight.shape]:
        return False
    return [*args[2]] == [*weight.stride()] and not any(args[3:])
