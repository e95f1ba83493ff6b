"""How the step of explain, estimate, compare and tune runs: as it is called, or under bf16 autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

NOTE = "under bf16 autocast, since parameters are float32"


def wanted(modules: Sequence[nn.Module], asked: bool | None) -> bool:
    """Whether to turn on bf16 autocast: `asked`; None: if parameters are float32 and no autocast is on."""
    if asked is not None:
        return asked
    already = torch.is_autocast_enabled(_device(modules))
    return not already and any(p.dtype == torch.float32 for module in modules for p in module.parameters())


@contextlib.contextmanager
def autocast(modules: Sequence[nn.Module], asked: bool | None) -> Iterator[str]:
    """Inside the context, bf16 autocast is on where it is `wanted`. Gives a note if nobody asked for it."""
    on = wanted(modules, asked)
    with torch.autocast(_device(modules), torch.bfloat16) if on else contextlib.nullcontext():
        yield NOTE if on and asked is None else ""


def _device(modules: Sequence[nn.Module]) -> str:
    """The type of the device of the parameters. A dry run takes those on the meta device to the CPU."""
    kinds = (p.device.type for module in modules for p in module.parameters())
    return next((kind for kind in kinds if kind != "meta"), "cpu")
