"""FrozenWeight: a weight that does not train, kept in FP8 only (`frozen="fp8"`, or from an FP8 checkpoint).
Its dtype seems unchanged.

    w.dtype is bfloat16; w.shape is (N, K)
    w.data_ [N, K] FP8, w.inv_ [1] float32                       one scale for the weight; or
    w.data_ [N, K] FP8, w.inv_ [N / 128, K / 128] float32        one for each square block, rounded up; or
    w.data_ [N, K] FP8, w.inv_ [N, 1] float32                    one for each row

Compiled FP8 matmuls read `data_` and `inv_` themselves, as they read a weight that FSDP2 has gathered in FP8.
All other readers get plain tensors with the values that FP8 has left. `copy_` (what `load_state_dict` does)
casts the new values. Any other write is an error, because FP8 would round it; so is `requires_grad_()`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from ..config.recipe import WHOLE, Block
from ..errors import Fp8CompileError
from . import ops
from .gathered_weight import GatheredWeight

aten = torch.ops.aten
FIX = "call fp8compile.restore_frozen_weights(model) first, which gives it back in its own dtype"
HELD = "kept in FP8 only (frozen='fp8', or load_fp8)"
# FP8 would round small updates away
FIX_WRITES = f"{FIX}; one that is written in each step, as by an EMA, needs a rule frozen = 'high_precision'"


class Stored(NamedTuple):
    """The scales of a weight in the FP8 checkpoint that it comes from: a dtype that holds `inv_` exactly,
    their name ("weight_scale" or "weight_scale_inv"), and their shape."""

    dtype: torch.dtype
    name: str
    shape: tuple[int, ...]


class FrozenWeight(GatheredWeight):
    """`margin` and `power_of_2`: how `copy_` scales new values. `stored`: its scales in the FP8 checkpoint
    that it comes from; None: it was cast here."""

    margin: int
    power_of_2: bool
    stored: Stored | None

    def __init__(
        self,
        data: Tensor,
        inv: Tensor,
        dtype: torch.dtype,
        block: Block = WHOLE,
        margin: int = 0,
        power_of_2: bool = False,
        stored: Stored | None = None,
    ):
        super().__init__(data, inv, dtype, None, block)
        self.margin, self.power_of_2, self.stored = margin, power_of_2, stored

    @property
    def how(self) -> tuple[Block, int, bool]:
        return self.block, self.margin, self.power_of_2

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes in memory: FP8 values and scales."""
        return self.data_.nbytes + self.inv_.nbytes

    @property
    def scales(self) -> Tensor:
        """What multiplies the FP8 values, without padding."""
        return self.inv_

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["data_", "inv_"], {"dtype": self.dtype, "how": (*self.how, self.stored)}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: dict[str, Any], size: Any, stride: Any
    ) -> FrozenWeight:
        return FrozenWeight(inner["data_"], inner["inv_"], meta["dtype"], *meta["how"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FrozenWeight({tuple(self.shape)}, dtype={self.dtype}, kept in {self.data_.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:  # a file has the plain parameter
        return nn.Parameter(self.dequantized(), requires_grad=False).__reduce_ex__(protocol)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self.requires_grad = requires_grad
        return self

    def like(self, data: Tensor, inv: Tensor) -> FrozenWeight:
        return FrozenWeight(data, inv, self.dtype, *self.how, self.stored)

    def _take(self, values: Tensor) -> FrozenWeight:
        """Cast new values, as a load does."""
        if isinstance(values, FrozenWeight):
            values = values.dequantized()
        values = values.to(device=self.device, dtype=self.dtype).expand(self.shape)
        if torch.equal(values, self.dequantized()):
            return self  # what `state_dict()` gave: a checkpoint's own scales would be others after a cast
        data, inv = cast(values, self.data_.dtype, *self.how)
        self.data_.copy_(data)
        self.inv_.copy_(inv)
        self.stored = None
        return self

    def of_fsdp(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator by which FSDP2 makes shards; set by `frozen_shard`."""
        return NotImplemented

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0] if args else None
        if isinstance(first, FrozenWeight):
            made = first.of_fsdp(func, args, kwargs or {})
            if made is not NotImplemented:
                return made
        if isinstance(first, FrozenWeight) and func is aten.clone.default:
            return first.like(first.data_.clone(), first.inv_.clone())
        if isinstance(first, FrozenWeight) and func is aten.copy_.default:
            return first._take(args[1])
        arguments = func._schema.arguments
        given = {x.name: value for x, value in zip(arguments, args, strict=False)} | (kwargs or {})
        written = [given.get(x.name) for x in arguments if x.alias_info and x.alias_info.is_write]
        if any(isinstance(x, FrozenWeight) for x in pytree.tree_leaves(written)):
            what = f"{func} would write to a weight that is {HELD}"
            raise Fp8CompileError(f"{what}: {FIX_WRITES}")
        if torch.device(given.get("device") or "cpu").type == "meta":
            raise Fp8CompileError(f"a weight that is {HELD} would lose its values on the meta device: {FIX}")
        return super().__torch_dispatch__(func, types, args, kwargs)


def _set_requires_grad(weight: FrozenWeight, requires_grad: bool) -> None:
    if requires_grad:
        raise Fp8CompileError(f"a weight that is {HELD} cannot train: {FIX}")
    _REQUIRES_GRAD.__set__(weight, requires_grad)


def _set_data(weight: FrozenWeight, values: Tensor) -> None:
    """Torch would take the new memory, and we would go on with the FP8 values. Only what changes nothing is
    let through: `Module.to` writes back what it has read."""
    alike = (values.shape, values.dtype, values.device) == (weight.shape, weight.dtype, weight.device)
    if not alike or isinstance(values, FrozenWeight) or not torch.equal(values, weight.dequantized()):
        what = f"other values, dtype or device for a weight that is {HELD}"
        raise Fp8CompileError(f"{what}: {FIX_WRITES}")


_REQUIRES_GRAD: Any = Tensor.requires_grad
_DATA: Any = Tensor.data
FrozenWeight.requires_grad = property(_REQUIRES_GRAD.__get__, _set_requires_grad)  # type: ignore[assignment]
FrozenWeight.data = property(_DATA.__get__, _set_data)  # type: ignore[assignment]


def _changed(name: str) -> Any:
    """A method that returns the tensor itself where there is nothing to change. Here it returns a plain
    tensor in any case: with the weight itself, `Module.to` would swap parameters, which torch refuses where
    there are weak references to them."""
    original = getattr(Tensor, name)

    def method(self: FrozenWeight, *args: Any, **kwargs: Any) -> Tensor:
        made = original(self, *args, **kwargs)
        return self.dequantized() if made is self else made

    method.__name__ = name
    return method


for _name in ("to", "cpu", "cuda", "half", "bfloat16", "float", "double"):
    setattr(FrozenWeight, _name, _changed(_name))


def cast(
    weight: Tensor, dtype: torch.dtype, block: Block, margin: int, power_of_2: bool
) -> tuple[Tensor, Tensor]:
    """A plain weight [R, C] in FP8, and the inverse of its scales: bitwise what a graph makes of it."""
    largest, whole = torch.finfo(dtype).max, block == WHOLE
    amax = ops.amax(weight) if whole else ops.amax_blocks(weight, False, block)
    scale = ops.current_scale(amax, largest, margin, power_of_2)
    return ops.quantize(weight, scale, dtype, largest, False, block), ops.inverse(scale)
