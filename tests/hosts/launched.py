"""What the tests of hosts share: the variables that a launcher sets, and replicas to compare with."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


def launched(rank: int) -> None:
    """Set what torchrun sets. The process group exists already."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": dist.get_world_size(), "LOCAL_WORLD_SIZE": dist.get_world_size()}
    os.environ.update({name: str(number) for name, number in names.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of a tensor, sharded or not."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By the name that the user gave to the parameter: that of the model without wrappers."""
    wrappers = ("_orig_mod.", "_checkpoint_wrapped_module.", "module.")
    found = {}
    for name, p in model.named_parameters():
        for wrapper in wrappers:
            name = name.replace(wrapper, "")
        found[name] = whole(p.grad)
    return found


def average(model: nn.Module) -> None:
    """The gradients of a replica, over the ranks: as FSDP2 adds them up."""
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def summary(report: Any) -> list[tuple[str, str, str]]:
    """(module, gemm, decision) of every matmul in FP8 or not, sorted."""
    return sorted((m.fqn, m.gemm, m.decision) for m in report.matmuls)
