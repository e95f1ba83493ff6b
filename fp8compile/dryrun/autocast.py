"""How the step of explain, estimate, compare and tune runs: as it is called, or under bf16 autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

NOTE = "under bf16 autocast, since parameters are float32"


def wanted(modules: Iterable[nn.Module], asked: bool | None) -> bool:
    """Whether to turn on bf16 autocast: `asked`; None: if parameters are float32 and no autocast is on."""
    if asked is not None:
        return asked
    parameters = [p for module in modules for p in module.parameters()]
    already = torch.is_autocast_enabled(_device(parameters))
    return not already and any(p.dtype == torch.float32 for p in parameters)


@contextlib.contextmanager
def autocast(modules: Iterable[nn.Module], asked: bool | None) -> Iterator[str]:
    """Inside the context, bf16 autocast is on where it is `wanted`. Gives a note if nobody asked for it."""
    modules = list(modules)
    on = wanted(modules, asked)
    device = _device([p for module in modules for p in module.parameters()])
    with torch.autocast(device, torch.bfloat16) if on else contextlib.nullcontext():
        yield NOTE if on and asked is None else ""


def _device(parameters: Iterable[torch.Tensor]) -> str:
    """The type of the device of the parameters. A dry run takes those on the meta device to the CPU."""
    return next((p.device.type for p in parameters if p.device.type != "meta"), "cpu")
