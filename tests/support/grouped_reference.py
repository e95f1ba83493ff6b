"""The oracle for experts: grouped matmuls in eager FP8, a loop over the experts in plain torch.

Each matmul of an expert is quantized as a linear layer's (`reference_settings`): inputs and gradients row by row of that
expert, or with one scale for the rows of all experts; weights matrix by matrix, or with one scale for the stack. Formats are
E4M3. Nothing here is imported from fp8compile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.reference_casts import Quantized, amax_of, scale_of, scaled_mm
from tests.support.reference_settings import Settings


class GroupedReference:
    """Replaces `torch._grouped_mm` while a step runs: `with reference.step(): model(x, offs).backward(..)`.

    Weights are told apart by their order in forward. Delayed scales come from the largest of up to 16 amaxes; in the first step
    from the current amax.
    """

    def __init__(self, recipe: str, **settings: Any):
        self.settings = Settings(recipe=recipe, fp8_format="e4m3", **settings)
        self.histories: dict[tuple[int, str], list[float]] = {}
        self.calls = 0

    def step(self) -> Any:
        self.calls = 0
        return _Patched(self)

    def __call__(self, x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        self.calls += 1
        return _Grouped.apply(x, weight, offs, self, self.calls - 1)  # type: ignore[no-any-return]

    def scale(self, number: int, role: str, tensor: Tensor) -> float | None:
        """The scale of a whole tensor; None where rows or blocks have their own."""
        if not self.settings.tensorwise:
            return None
        amax, reach = amax_of(tensor), self.settings.format(role)[1]
        history = self.histories.setdefault((number, role), [])
        seen = max(history[:16]) if history and self.settings.delayed(role) else amax
        history.insert(0, amax)
        return scale_of(seen, reach, self.settings.margin_of(role))


class _Patched:
    def __init__(self, reference: GroupedReference):
        self.reference = reference

    def __enter__(self) -> None:
        self.kept, torch._grouped_mm = torch._grouped_mm, self.reference  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        torch._grouped_mm = self.kept


def _groups(offs: Tensor) -> list[tuple[int, int, int]]:
    ends = [0, *offs.tolist()]
    return [(group, start, end) for group, (start, end) in enumerate(zip(ends, ends[1:], strict=False)) if end > start]


class _Grouped(torch.autograd.Function):
    """x [M, K], weight [E, K, N] (a transposed view as a rule), offs [E] -> [M, N]; rows of no group are zeros."""

    @staticmethod
    def forward(ctx, x, weight, offs, owner, number):
        ctx.owner, ctx.number, settings = owner, number, owner.settings
        inside = x[: int(offs[-1])]
        ctx.scales = owner.scale(number, "input", inside), owner.scale(number, "weight", weight)
        ctx.save_for_backward(x, weight, offs)
        y = x.new_zeros(x.shape[0], weight.shape[2])
        for group, start, end in _groups(offs):
            x8 = settings.quantize(x[start:end], "input", "fprop", ctx.scales[0])
            w8 = settings.quantize(weight[group].t(), "weight", "fprop", ctx.scales[1])
            y[start:end] = scaled_mm(x8, w8, x.dtype)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, offs = ctx.saved_tensors
        owner, settings = ctx.owner, ctx.owner.settings
        scale = owner.scale(ctx.number, "gradient", dy[: int(offs[-1])])
        dx, dw = torch.zeros_like(x), torch.zeros_like(weight)
        w_scale = ctx.scales[1]
        if settings.block("weight", "dgrad") == (0, 0) and w_scale is None:  # rowwise_with_gw_hp
            w_scale = scale_of(amax_of(weight), settings.format("weight")[1])
        for group, start, end in _groups(offs):
            rows = dy[start:end]
            w8: Quantized = settings.quantize(weight[group], "weight", "dgrad", w_scale)
            dx[start:end] = scaled_mm(settings.quantize(rows, "gradient", "dgrad", scale), w8, x.dtype)
            x8 = settings.quantize(x[start:end].t(), "input", "wgrad", ctx.scales[0])
            if settings.high_wgrad:
                dw[group] = x[start:end].t() @ rows
            else:
                dw[group] = scaled_mm(x8, settings.quantize(rows.t(), "gradient", "wgrad", scale), weight.dtype)
        return dx, dw, None, None, None
