"""One training step, in any precision: what it returns and all gradients, to be compared with another's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.harness import grads_of, leaf

Gradient = Callable[[Tensor], Tensor]


def stepped(
    call: Callable[..., Any], module: nn.Module, inputs: Sequence[Tensor], gradient: Gradient
) -> dict[str, Tensor]:
    """Outputs ("output 0", ..), and the gradients of inputs ("input 0", ..) and parameters. `call`: the
    module, or what it was compiled to; `gradient(y)`: the gradient of an output."""
    module.zero_grad()
    leaves = [leaf(x) for x in inputs]
    made = call(*leaves)
    outputs = made if isinstance(made, list) else [made]
    torch.autograd.backward(outputs, [gradient(y).to(y.dtype) for y in outputs])
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)} | grads_of(module, leaves)
    return {name: torch.view_as_real(x) if x.is_complex() else x for name, x in found.items()}
