"""The weights of a model by their names, whatever torch.compile, DDP, FSDP or checkpointing put around it."""

from __future__ import annotations

from torch import Tensor, nn

from .. import compat
from ..frontend.inputs import plain
from .parameters import share_records


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model that may be weights: parameters, then buffers. Their names leave out the
    wrappers of torch.compile, checkpointing, FSDP and DDP. A tensor with several names has its first."""
    model = unwrapped(model)
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[plain(name)] = tensor
    share_records(found.values())
    return found


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside of the wrappers of torch.compile and DDP. TypeError if `model` is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, not {type(model).__name__}")
    while hasattr(model, "_orig_mod") or compat.autograd.is_ddp(model):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module  # type: ignore[assignment]
    return model
