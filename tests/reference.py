"""The oracle: one FP8 training step in plain eager PyTorch, independent of the package.

Nothing here is imported from fp8compile, and nothing is shared with it: formats, scales, the cast, the three matmuls of a
linear and the delayed state are written out again from their definition, in the plainest way there is.

    fprop  y  = x w^T    x: "input",    w: "weight"   (forward format)
    dgrad  dx = dy w     dy: "gradient" (gradient format), w: "weight"
    wgrad  dw = dy^T x   dy: "gradient", x: "input"

    scale = float32(min(FLT_MAX, fp8_max / (amax * 2**margin)))      scale_inv = float32(1 / scale)
    q(x)  = to_fp8(clamp(float32(x) * scale, -fp8_max, fp8_max)),    inf and NaN -> NaN

`Reference(model)` deep-copies a vanilla model and replaces its eligible weights by `Weight`, a Parameter that runs the matmuls
that read it in FP8. A subclass and not a mode, because a mode that is entered around the forward is gone when activation
checkpointing recomputes in the backward.

Delayed state belongs to a slot (parameter name, role, use). Here every reader has a slot of its own: q, k and v that read one
tensor have three equal histories where the package keeps one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

FLT_MAX = torch.finfo(torch.float32).max
# name -> ((dtype, max) of activations and weights, (dtype, max) of gradients)
FORMATS = {
    "hybrid": ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)),
    "e4m3": ((torch.float8_e4m3fn, 448.0), (torch.float8_e4m3fn, 448.0)),
}
HEADS = frozenset({"lm_head", "head", "embed_out", "unembed", "score", "classifier", "output_projection"})

Key = tuple[str, str, int]  # (parameter name, role, use)


def float32(value: float) -> float:
    """`value` rounded to float32, as a Python float."""
    return torch.tensor(value, dtype=torch.float64).to(torch.float32).item()


def amax_of(x: Tensor) -> float:
    """max|x| as float32: 0 for an empty tensor, NaN if there is one."""
    return x.detach().float().abs().max().item() if x.numel() else 0.0


def usable(amax: float) -> bool:
    """Whether a scale can be made of this amax."""
    return math.isfinite(amax) and amax > 0.0


def scale_of(amax: float, fp8_max: float, margin: int = 0) -> float:
    """The scale of a tensor whose amax is known: 1 for an amax of 0, inf or NaN."""
    if not usable(amax):
        return 1.0
    return float32(min(FLT_MAX, fp8_max / (amax * 2.0**margin)))


def inverse(scale: float) -> float:
    """scale_inv: what multiplies FP8 values to get back what they stand for."""
    return float32(1.0 / scale)


def cast(x: Tensor, scale: float, dtype: torch.dtype, fp8_max: float) -> Tensor:
    """FP8 values of x * scale: saturating, round to nearest even; inf and NaN become NaN."""
    x = x.detach().float()
    y = (x * torch.tensor(scale, dtype=torch.float32, device=x.device)).clamp(-fp8_max, fp8_max)
    return torch.where(x.isfinite(), y, torch.full_like(y, math.nan)).to(dtype)


def scaled_mm(a: Tensor, inv_a: float, b: Tensor, inv_b: float, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a[m, k] @ b[k, n] of FP8 operands, * inv_a * inv_b + bias in float32, rounded once to out_dtype.

    The sum runs in float64, which holds every product exactly and most sums: an oracle that depends on no BLAS and no CPU.
    """
    out = (a.to(torch.float64) @ b.to(torch.float64)).to(torch.float32)
    out = out * torch.tensor(inv_a, device=out.device) * torch.tensor(inv_b, device=out.device)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


@dataclass
class Slot:
    """Delayed state of one tensor: amaxes newest first, and the scale that they gave (None before the first)."""

    length: int
    history: list[float] = field(default_factory=list)
    scale: float | None = None
    calls: int = 0  # counted from the first non-zero amax

    def __post_init__(self) -> None:
        self.history = [0.0] * self.length


@dataclass(frozen=True)
class Settings:
    """How the matmuls of one weight are quantized; names as in the package."""

    recipe: str = "delayed"
    fp8_format: str = "hybrid"
    margin: int = 0
    amax_history_len: int = 16
    amax_compute_algo: str = "max"
    interval: int = 1
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)

    def __post_init__(self) -> None:
        assert self.recipe in ("delayed", "tensorwise") and self.amax_compute_algo in ("max", "most_recent")

    @property
    def delayed(self) -> bool:
        return self.recipe == "delayed"

    def format(self, role: str) -> tuple[torch.dtype, float]:
        return FORMATS[self.fp8_format][role == "gradient"]

    high_fprop = property(lambda self: self.override_linear_precision[0])
    high_dgrad = property(lambda self: self.override_linear_precision[1])
    high_wgrad = property(lambda self: self.override_linear_precision[2])


@dataclass
class Call:
    """What one training forward leaves for its backward and for a recompute of its checkpointed regions."""

    first: int  # autograd sequence numbers of the nodes of this forward: [first, last)
    last: int = 0
    uses: dict[str, int] = field(default_factory=dict)
    forward: dict[Key, float] = field(default_factory=dict)  # amaxes of inputs and weights
    gradient: dict[Key, float] = field(default_factory=dict)  # amaxes of gradients seen by the running backward
    expected: set[Key] = field(default_factory=set)  # gradient slots that a backward of this call visits
    # (parameter, use) -> (amax of the input, scale of the input, scale of the weight) of the original forward
    scales: dict[tuple[str, int], tuple[float, float, float]] = field(default_factory=dict)


class Reference:
    """An eager FP8 copy of `model`: call it as the model, then `.backward()` as usual; see `grads()` and `slots`.

    options: those of `Settings`, as the package names them. exclude: parameters to keep in high precision besides output heads
    and shapes that FP8 does not take. overrides: options of single parameters, by name.
    The whole model is one graph: a non-finite amax anywhere keeps all slots of that direction where they are.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: str = "delayed",
        *,
        exclude: Collection[str] = (),
        overrides: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self.default = Settings(recipe, **options)
        self.settings = {name: replace(self.default, **given) for name, given in overrides.items()}
        every = (self.default, *self.settings.values())
        self.length = max([s.amax_history_len for s in every if s.delayed], default=1)
        self.slots: dict[Key, Slot] = {}
        self.call: Call | None = None  # the training forward that is running
        self.calls: list[Call] = []
        self.model = copy.deepcopy(model)
        self.names = self._install(exclude)

    def of(self, name: str) -> Settings:
        """Those of a parameter."""
        return self.settings.get(name, self.default)

    def _install(self, exclude: Collection[str]) -> list[str]:
        """Replace the eligible parameters of the copy by Weights; -> their names."""
        tied = {id(m.weight) for m in self.model.modules() if isinstance(m, nn.Embedding)}
        weights: dict[int, Weight] = {}
        for name, parameter in list(self.model.named_parameters()):
            module = name.split(".")[-2] if "." in name else ""
            if name in exclude or module in HEADS or id(parameter) in tied or parameter.dim() != 2:
                continue
            if min(parameter.shape) < 128 or any(size % 16 for size in parameter.shape):
                continue
            if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                continue
            weight = torch.Tensor._make_subclass(Weight, parameter.detach(), parameter.requires_grad)
            weight.owner, weight.key = self, name
            weights[id(parameter)] = weight
        for module in self.model.modules():
            for attribute, parameter in module._parameters.items():
                if id(parameter) in weights:
                    module._parameters[attribute] = weights[id(parameter)]
        return [weight.key for weight in weights.values()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        parameters = list(self.model.parameters())
        trains = torch.is_grad_enabled() and self.model.training and any(t.requires_grad for t in tensors + parameters)
        if not trains or any(t.numel() == 0 for t in tensors):
            return self.model(*args, **kwargs)  # high precision: evaluation, or no rows
        self.call = Call(torch._C._autograd._get_sequence_nr())
        try:
            out = self.model(*args, **kwargs)
            self.call.last = torch._C._autograd._get_sequence_nr()
            self.calls.append(self.call)
        finally:
            call, self.call = self.call, None
        self._update(call.forward)
        return out

    def grads(self) -> dict[str, Tensor]:
        """Copies of the gradients of all parameters that have one."""
        return {name: p.grad.detach().clone() for name, p in self.model.named_parameters() if p.grad is not None}

    # scaling state

    def _scale(self, key: Key, amax: float, fp8_max: float) -> float:
        """The scale that this training call quantizes with: it comes from earlier calls, or from amax in a cold slot."""
        settings = self.of(key[0])
        if settings.delayed:
            slot = self.slots.setdefault(key, Slot(self.length))
            if slot.scale is not None:
                return slot.scale
        return scale_of(amax, fp8_max, settings.margin)

    def _update(self, amaxes: dict[Key, float]) -> None:
        """End of one direction of one call: every slot moves, or none if any amax is not finite."""
        amaxes = {key: amax for key, amax in amaxes.items() if self.of(key[0]).delayed}
        if not all(math.isfinite(amax) for amax in amaxes.values()):
            return
        for key, amax in amaxes.items():
            settings = self.of(key[0])
            slot = self.slots.setdefault(key, Slot(self.length))
            slot.history = [amax, *slot.history[:-1]]
            if slot.calls == 0 and amax == 0.0:
                continue  # still cold
            if slot.calls % settings.interval == 0:
                length = 1 if settings.amax_compute_algo == "most_recent" else settings.amax_history_len
                window = max(slot.history[:length])
                if window > 0.0:
                    slot.scale = scale_of(window, settings.format(key[1])[1], settings.margin)
            slot.calls += 1

    # the matmuls of one reader of a weight

    def _begin(self, name: str, x: Tensor, w: Tensor) -> tuple[Call, int, float, float]:
        """-> the call, which use of the weight this is, the scales of x and w; records amaxes unless this is a recompute."""
        x_amax = amax_of(x)
        settings = self.of(name)
        fp8_max = settings.format("input")[1]
        if self.call is None:  # a recompute: the call whose node asks for its saved tensors, with the scales it used
            number = torch._C._current_autograd_node()._sequence_nr()
            call = next(c for c in self.calls if c.first <= number < c.last)
            uses = [(use, s) for (weight, use), s in call.scales.items() if weight == name]
            use, (_, x_scale, w_scale) = next((u for u in uses if u[1][0] == x_amax), uses[0])
            return call, use, x_scale, w_scale
        call = self.call
        use = call.uses.get(name, 0)
        call.uses[name] = use + 1
        w_amax = amax_of(w)
        x_scale = self._scale((name, "input", use), x_amax, fp8_max)
        w_scale = self._scale((name, "weight", use), w_amax, fp8_max)
        call.scales[name, use] = x_amax, x_scale, w_scale
        fp8_dgrad = x.requires_grad and not settings.high_dgrad
        fp8_wgrad = w.requires_grad and not settings.high_wgrad
        if not settings.high_fprop or fp8_wgrad:
            call.forward[name, "input", use] = x_amax
        if not settings.high_fprop or fp8_dgrad:
            call.forward[name, "weight", use] = w_amax
        if fp8_dgrad or fp8_wgrad:
            call.expected.add((name, "gradient", use))
        return call, use, x_scale, w_scale

    def _gradient(self, call: Call, key: Key, dy: Tensor) -> float:
        """The scale of dy; the last gradient of a backward of this call moves the gradient slots."""
        amax = amax_of(dy)
        scale = self._scale(key, amax, self.of(key[0]).format("gradient")[1])
        if not call.gradient:  # an output that the loss does not use leaves gradients of zeros
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish(call))
        call.gradient[key] = amax
        if call.gradient.keys() == call.expected:
            self._finish(call)
        return scale

    def _finish(self, call: Call) -> None:
        if call.gradient:
            amaxes = {key: call.gradient.get(key, 0.0) for key in call.expected}
            call.gradient = {}
            self._update(amaxes)

    def matmul(self, weight: Weight, x: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        """x w^T + bias for a weight [n, k], or x w + bias for one [k, n] (`transposed`); x: [..., k] -> [..., n]."""
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        with torch._C.DisableTorchFunctionSubclass(), torch.autocast(x.device.type, enabled=False):
            return _Linear.apply(x, weight, bias, self, weight.key, transposed, dtype)


class _Linear(torch.autograd.Function):
    """The three matmuls of one reader of one weight."""

    @staticmethod
    def forward(ctx, x, w, bias, owner, name, transposed, dtype):  # noqa: PLR0913
        ctx.owner, ctx.name, ctx.transposed, ctx.dtype, ctx.x_dtype = owner, name, transposed, dtype, x.dtype
        ctx.w_dtype, ctx.bias_dtype, ctx.x_shape = w.dtype, None if bias is None else bias.dtype, x.shape
        ctx.call, use, ctx.x_scale, ctx.w_scale = owner._begin(name, x, w)
        ctx.key = (name, "gradient", use)
        rows = x.reshape(-1, x.shape[-1])
        w_nk = w.t() if transposed else w
        ctx.settings = settings = owner.of(name)
        x8 = cast(rows, ctx.x_scale, *settings.format("input"))
        w8 = cast(w_nk, ctx.w_scale, *settings.format("weight"))
        high = settings.high_dgrad or settings.high_wgrad
        ctx.save_for_backward(x8, w8, *((rows.to(dtype), w_nk.to(dtype)) if high else ()))
        if settings.high_fprop:
            y = torch.nn.functional.linear(rows.to(dtype), w_nk.to(dtype), None if bias is None else bias.to(dtype))
        else:
            # autocast hands the bias over in the output's dtype; it is added in float32
            y = scaled_mm(
                x8, inverse(ctx.x_scale), w8.t(), inverse(ctx.w_scale), dtype, None if bias is None else bias.to(dtype)
            )
        return y.reshape(*x.shape[:-1], w_nk.shape[0])

    @staticmethod
    def backward(ctx, dy):
        owner, dtype, settings = ctx.owner, ctx.dtype, ctx.settings
        x8, w8, *high = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        scale, dy8 = 1.0, None
        if ctx.key in ctx.call.expected:
            scale = owner._gradient(ctx.call, ctx.key, rows)
            dy8 = cast(rows, scale, *settings.format("gradient"))
        dx = dw = db = None
        if needs_x:
            if settings.high_dgrad:
                dx = rows @ high[1]
            else:
                dx = scaled_mm(dy8, inverse(scale), w8, inverse(ctx.w_scale), dtype)
            dx = dx.reshape(ctx.x_shape).to(ctx.x_dtype)
        if needs_w:
            if settings.high_wgrad:
                dw = rows.t() @ high[0]
            else:
                dw = scaled_mm(dy8.t(), inverse(scale), x8, inverse(ctx.x_scale), dtype)
            dw = (dw.t() if ctx.transposed else dw).to(ctx.w_dtype)
        if needs_bias:
            db = rows.float().sum(0).to(dtype).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None, None


class Weight(nn.Parameter):
    """A parameter whose products with activations run in FP8 during a training call of its owner, and in recomputes of it."""

    owner: Reference
    key: str
    source: Weight | None = None  # set in a transposed view: the weight itself

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        first = args[0] if args else None
        if name in ("t", "T", "mT") and isinstance(first, Weight):
            with torch._C.DisableTorchFunctionSubclass():
                view = func(*args, **kwargs).as_subclass(Weight)
            view.owner, view.key, view.source = first.owner, first.key, first
            return view
        product = None
        if name == "linear":
            product = (first, args[1], args[2] if len(args) > 2 else kwargs.get("bias"), False)
        elif name in ("matmul", "__matmul__", "mm"):
            product = (first, args[1], None, True)
        elif name == "addmm" and not kwargs:
            product = (args[1], args[2], first, True)
        if product is not None and isinstance(product[1], Weight) and not isinstance(product[0], Weight):
            x, weight, bias, transposed = product
            if weight.source is not None:
                weight, transposed = weight.source, not transposed
            recompute = torch._C._current_graph_task_id() != -1
            if weight.owner.call is not None or (recompute and torch.is_grad_enabled()):
                return weight.owner.matmul(weight, x, bias, transposed)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
