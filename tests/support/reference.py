"""The oracle: one FP8 training step in plain eager PyTorch, independent of the package.

The oracle imports nothing from fp8compile and shares nothing with it. Formats, scales and the cast
(reference_casts.py), the meaning of the options (reference_settings.py), the three matmuls of a linear and
the delayed state are written again from their definitions, as plainly as possible.

    fprop  y  = x w^T    x: "input",    w: "weight"   (forward format)
    dgrad  dx = dy w     dy: "gradient" (gradient format), w: "weight"
    wgrad  dw = dy^T x   dy: "gradient", x: "input"

Each gemm takes its operands with the contracted dimension last. A recipe says which elements of such a copy
share a scale (`Settings.block`): all (delayed, tensorwise), a row (rowwise), 1 x 128 or 128 x 128
(blockwise), 1 x 32 (mxfp8). Two gemms read a tensor, each with a copy of its own; each copy is quantized from
the tensor with its own scales.

`Reference(model)` deep-copies a vanilla model and replaces its eligible weights by `Weight`, a Parameter that
runs its own matmuls in FP8. `Weight` is a subclass and not a mode: a mode entered around the forward is no
longer active when activation checkpointing recomputes in the backward. A stack of weights, as experts have,
is a Weight of three dimensions: each matrix multiplies its own rows, all formats are E4M3, and "one scale" is
one for the stack, or for the rows of all groups.

Delayed state belongs to a slot (parameter name, role, use). Here every reader has its own slot: if q, k and v
read one tensor, the oracle keeps three equal histories and the package keeps one.

A call is cold while some slot has seen only zeros (for 16 such calls at most). In a cold call, a tensor is
cast with the scale of its own amax if its slot is cold. Each path through a model is a graph of its own with
its own cold calls. The arguments that are not tensors determine the path of a call."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.reference_casts import Quantized, amax_of, float32, scale_of, scaled_mm
from tests.support.reference_settings import ROLES, Settings

HEADS = frozenset({"lm_head", "head", "embed_out", "unembed", "score", "classifier", "output_projection"})

Key = tuple[str, str, int]  # (parameter name, role, use)


@dataclass
class Slot:
    """Delayed state of one tensor: amaxes, newest first, and the scale from them (None before the first)."""

    length: int
    history: list[float] = field(default_factory=list)
    scale: float | None = None
    # since the first non-zero amax; an overflow or underflow sets it to 0 until the next non-zero amax
    calls: int = 0

    @property
    def cold(self) -> bool:
        """Whether a cold call scales this tensor by its current amax."""
        return self.scale is None

    def __post_init__(self) -> None:
        self.history = [0.0] * self.length


@dataclass
class Path:
    """What the calls of one path through the model have in common."""

    cold: bool = True  # whether calls are cold, until the next move
    patience: int = 16  # how many more calls may be cold because a slot has seen only zeros
    slots: list[Slot] = field(default_factory=list)
    moves: int = -1  # of the state, at its last call


@dataclass
class Call:
    """What one training forward leaves for its backward and for a recompute of its checkpointed regions."""

    path: Path
    cold: bool
    first: int  # autograd sequence numbers of the nodes of this forward: [first, last)
    last: int = 0
    uses: dict[str, int] = field(default_factory=dict)
    forward: dict[Key, float] = field(default_factory=dict)  # amaxes of inputs and weights
    # amaxes of gradients seen by the running backward
    gradient: dict[Key, float] = field(default_factory=dict)
    expected: set[Key] = field(default_factory=set)  # gradient slots that a backward of this call visits
    # (parameter, use) -> (amax of the input, scale of the input, scale of the weight) of the original
    # forward; a scale of None: current scaling
    scales: dict[tuple[str, int], tuple[float, float | None, float | None]] = field(default_factory=dict)


class Reference:
    """An eager FP8 copy of `model`: call it as the model, then `.backward()` as usual; see `slots`.

    options: the fields of `Settings`, named as in the package.
    exclude: parameters to keep in high precision, besides output heads and shapes that FP8 does not support.
    overrides: options of single parameters, by name.
    The whole model is one graph: one non-finite amax keeps all slots of its direction unchanged. The state
    moves when a forward begins and no other one waits for its backward, by the largest amaxes since then.
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
        self.length = max([s.amax_history_len for s in every if any(map(s.delayed, ROLES))], default=1)
        self._slots: dict[Key, Slot] = {}
        self.raised: dict[bool, dict[Key, float]] = {False: {}, True: {}}  # by direction, since the last move
        self.waiting = self.moves = 0
        self.call: Call | None = None  # the training forward that is running, if any
        self.calls: list[Call] = []
        self.paths: dict[tuple[Any, ...], Path] = {}
        self.model = copy.deepcopy(model)
        self.names = self._install(exclude)

    def of(self, name: str) -> Settings:
        """The settings of a parameter."""
        return self.settings.get(name, self.default)

    def _install(self, exclude: Collection[str]) -> list[str]:
        """Replace the eligible parameters of the copy by Weights; -> their names."""
        tied = {id(m.weight) for m in self.model.modules() if isinstance(m, nn.Embedding)}
        weights: dict[int, Weight] = {}
        for name, parameter in list(self.model.named_parameters()):
            module = name.split(".")[-2] if "." in name else ""
            if name in exclude or module in HEADS or id(parameter) in tied or parameter.dim() not in (2, 3):
                continue
            if min(parameter.shape[-2:]) < 128 or any(size % 16 for size in parameter.shape[-2:]):
                continue
            if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                continue
            if parameter.dim() == 3:
                self.settings[name] = replace(self.of(name), fp8_format="e4m3")
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
        trains = (
            torch.is_grad_enabled()
            and self.model.training
            and any(t.requires_grad for t in tensors + parameters)
        )
        if not trains or any(t.numel() == 0 for t in tensors):
            return self.model(*args, **kwargs)  # evaluations and empty inputs run in high precision
        key = tuple(a for a in (*args, *kwargs.values()) if not isinstance(a, Tensor))
        path = self.paths.setdefault(key, Path())
        self._begin_call(path)
        self.call = Call(path, path.cold, torch._C._autograd._get_sequence_nr())
        try:
            out = self.model(*args, **kwargs)
            self.call.last = torch._C._autograd._get_sequence_nr()
            self.calls.append(self.call)
        finally:
            call, self.call = self.call, None
        keys = [key for key in (*call.forward, *call.expected) if self.of(key[0]).delayed(key[1])]
        path.slots = [self._slots.setdefault(key, Slot(self.length)) for key in keys]
        self._raise(call.forward, False)
        self.waiting += bool(call.expected)
        return out

    # scaling state

    def _scale(self, key: Key, amax: float, call: Call) -> float | None:
        """The scale with which this training call quantizes a tensor with this amax. None: current scaling.

        The scale comes from earlier calls. In a cold call it comes from `amax`, if `amax` is finite, and the
        slot is cold.
        """
        settings, role = self.of(key[0]), key[1]
        if not settings.delayed(role):
            return None
        slot = self._slots.setdefault(key, Slot(self.length))
        stored, fp8_max = slot.scale or 1.0, settings.format(role)[1]
        if call.cold and slot.cold and math.isfinite(amax):
            return scale_of(amax, fp8_max, settings.margin_of(role))
        return stored

    @staticmethod
    def _flushes(settings: Settings, role: str, amax: float, scale: float) -> bool:
        """An underflow: 64 times less than what the scale is for, and within 2**12 of the least number of the
        format."""
        fp8_max = settings.format(role)[1]
        least = 4096 * (2.0**-9 if fp8_max < 1000.0 else 2.0**-16)
        least = min(least, fp8_max / 2 ** settings.margin_of(role) / 64)
        return settings.on_overflow == "current" and 0.0 < float32(amax * scale) < least

    @property
    def slots(self) -> dict[Key, Slot]:
        """The state for reading: moved by what has been seen."""
        slots = copy.deepcopy(self._slots) if self.waiting else self._slots
        self._move(slots)
        return slots

    def _begin_call(self, path: Path) -> None:
        """Moves the state if nothing waits, and decides if the path stays cold."""
        if not self.waiting:
            self._move(self._slots)
            self.moves += 1
        if path.cold and 0 <= path.moves < self.moves:
            path.patience = max(0, path.patience - 1)
            path.cold = path.patience > 0 and any(slot.cold for slot in path.slots)
        path.moves = self.moves

    def _raise(self, amaxes: dict[Key, float], backward: bool) -> None:
        seen = self.raised[backward]
        for key, amax in amaxes.items():
            if self.of(key[0]).delayed(key[1]):
                before = seen.get(key, 0.0)
                seen[key] = amax if math.isnan(amax) or amax > before else before

    def _move(self, slots: dict[Key, Slot]) -> None:
        """Every slot of a direction moves, or none if any amax is not finite."""
        for seen in self.raised.values():
            if all(math.isfinite(amax) for amax in seen.values()):
                self._move_by(seen, slots)
            if slots is self._slots:
                seen.clear()

    def _move_by(self, amaxes: dict[Key, float], slots: dict[Key, Slot]) -> None:
        for key, amax in amaxes.items():
            settings = self.of(key[0])
            slot = slots.setdefault(key, Slot(self.length))
            slot.history = [amax, *slot.history[:-1]]
            waits = slot.calls == 0
            if waits and amax == 0.0:
                continue  # still
            fp8_max, margin = settings.format(key[1])[1], settings.margin_of(key[1])
            # an overflow saturates, and is more than 2 (gradients: 8) times the largest amax in the history
            limit = max(fp8_max, (8.0 if key[1] == "gradient" else 2.0) * fp8_max / 2**margin)
            overflow = settings.on_overflow == "current" and not waits and float32(amax * slot.scale) > limit
            underflow = slot.scale is not None and self._flushes(settings, key[1], amax, slot.scale)
            if underflow and waits:  # the second one, or after an overflow
                slot.history = [amax] + [0.0] * (self.length - 1)
            if slot.calls % settings.interval == 0 or overflow:
                length = 1 if settings.amax_compute_algo == "most_recent" else settings.amax_history_len
                window = max(slot.history[:length])
                if window > 0.0:
                    slot.scale = scale_of(window, fp8_max, margin)
            slot.calls = 0 if overflow or (underflow and not waits) else slot.calls + 1

    # the matmuls of one reader of a weight

    def _begin(
        self, name: str, x: Tensor, w: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Call, int, float | None, float | None]:
        """-> the call, the number of this use of the weight, the scales of x and w. Records amaxes, except in
        a recompute. `needs`: whether x and w need gradients."""
        x_amax = amax_of(x)
        settings = self.of(name)
        # a recompute: a node of an earlier call needs its saved tensors; take the scales of that call
        if self.call is None:
            number = torch._C._current_autograd_node()._sequence_nr()
            call = next(c for c in self.calls if c.first <= number < c.last)
            uses = [(use, s) for (weight, use), s in call.scales.items() if weight == name]
            use, (_, x_scale, w_scale) = next((u for u in uses if u[1][0] == x_amax), uses[0])
            return call, use, x_scale, w_scale
        call = self.call
        use = call.uses.get(name, 0)
        call.uses[name] = use + 1
        w_amax = amax_of(w)
        x_scale = self._scale((name, "input", use), x_amax, call)
        w_scale = self._scale((name, "weight", use), w_amax, call)
        call.scales[name, use] = x_amax, x_scale, w_scale
        fp8_dgrad = needs[0] and not settings.high_dgrad
        fp8_wgrad = needs[1] and not settings.high_wgrad
        if not settings.high_fprop or fp8_wgrad:
            call.forward[name, "input", use] = x_amax
        if not settings.high_fprop or fp8_dgrad:
            call.forward[name, "weight", use] = w_amax
        if fp8_dgrad or fp8_wgrad:
            call.expected.add((name, "gradient", use))
        return call, use, x_scale, w_scale

    def _gradient(self, call: Call, key: Key, dy: Tensor) -> float | None:
        """The scale of dy; None with current scaling. A backward's last gradient moves the gradient slots."""
        amax = amax_of(dy)
        scale = self._scale(key, amax, call)
        if not call.gradient:  # a backward may not visit every slot: the slots of an unused output see zeros
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish(call))
        call.gradient[key] = amax
        if call.gradient.keys() == call.expected:
            self._finish(call)
        return scale

    def _finish(self, call: Call) -> None:
        if call.gradient:
            amaxes = {key: call.gradient.get(key, 0.0) for key in call.expected}
            call.gradient = {}
            self._raise(amaxes, True)
            self.waiting = max(0, self.waiting - 1)

    def matmul(self, weight: Weight, x: Tensor, other: Tensor | None, transposed: bool) -> Tensor:
        """x w^T + bias for a weight [n, k], or x w + bias for one [k, n] (`transposed`); x: [..., k] -> [...,
        n].

        `other` is the bias, or for a stack of weights the end of each one's rows."""
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        with torch._C.DisableTorchFunctionSubclass(), torch.autocast(x.device.type, enabled=False):
            kind = _Linear if weight.dim() == 2 else _Grouped
            return kind.apply(x, weight, other, self, weight.key, transposed, dtype)


class _Linear(torch.autograd.Function):
    """The three matmuls of one reader of one weight."""

    @staticmethod
    def forward(ctx, x, w, bias, owner, name, transposed, dtype):  # noqa: PLR0913
        ctx.owner, ctx.name, ctx.transposed, ctx.dtype, ctx.x_dtype = owner, name, transposed, dtype, x.dtype
        ctx.w_dtype, ctx.bias_dtype, ctx.x_shape = w.dtype, None if bias is None else bias.dtype, x.shape
        ctx.call, use, x_scale, w_scale = owner._begin(name, x, w, ctx.needs_input_grad)
        ctx.key = (name, "gradient", use)
        rows = x.reshape(-1, x.shape[-1])
        w_nk = w.t() if transposed else w
        ctx.settings = settings = owner.of(name)
        kept = []  # for dgrad and wgrad: the FP8 copies that they read, or the tensors in high precision
        if settings.high_dgrad:
            kept += [w_nk.to(dtype), None]
        else:
            kept += settings.quantize(w_nk.t(), "weight", "dgrad", w_scale)[:2]
        if settings.high_wgrad:
            kept += [rows.to(dtype), None]
        else:
            kept += settings.quantize(rows.t(), "input", "wgrad", x_scale)[:2]
        ctx.save_for_backward(*kept)
        # autocast rounds the bias to the dtype of the output; the sum is then in float32
        bias = None if bias is None else bias.to(dtype)
        if settings.high_fprop:
            y = torch.nn.functional.linear(rows.to(dtype), w_nk.to(dtype), bias)
        else:
            x8 = settings.quantize(rows, "input", "fprop", x_scale)
            w8 = settings.quantize(w_nk, "weight", "fprop", w_scale)
            y = scaled_mm(x8, w8, dtype, bias)
        return y.reshape(*x.shape[:-1], w_nk.shape[0])

    @staticmethod
    def backward(ctx, dy):
        owner, dtype, settings = ctx.owner, ctx.dtype, ctx.settings
        w, w_inv, x, x_inv = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        scale = owner._gradient(ctx.call, ctx.key, rows) if ctx.key in ctx.call.expected else None
        dx = dw = db = None
        if needs_x:
            if settings.high_dgrad:
                dx = rows @ w
            else:
                dy8 = settings.quantize(rows, "gradient", "dgrad", scale)
                dx = scaled_mm(dy8, Quantized(w, w_inv, settings.block("weight", "dgrad")), dtype)
            dx = dx.reshape(ctx.x_shape).to(ctx.x_dtype)
        if needs_w:
            if settings.high_wgrad:
                dw = rows.t() @ x
            else:
                dy8 = settings.quantize(rows.t(), "gradient", "wgrad", scale)
                dw = scaled_mm(dy8, Quantized(x, x_inv, settings.block("input", "wgrad")), dtype)
            dw = (dw.t() if ctx.transposed else dw).to(ctx.w_dtype)
        if needs_bias:
            db = rows.float().sum(0).to(dtype).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None, None


class _Grouped(torch.autograd.Function):
    """The three matmuls of a reader of a stack of weights: a loop over groups. Rows of no group are zeros."""

    @staticmethod
    def forward(ctx, x, w, offs, owner, name, transposed, dtype):  # noqa: PLR0913
        ctx.owner, ctx.settings, ctx.transposed, ctx.dtype = owner, owner.of(name), transposed, dtype
        ends = offs.tolist()
        ctx.groups = [slice(*each) for each in zip([0, *ends], ends, strict=False)]
        ctx.inside = slice(0, ends[-1])
        ctx.call, use, *ctx.scales = owner._begin(name, x[ctx.inside], w, ctx.needs_input_grad)
        ctx.key = (name, "gradient", use)
        ctx.save_for_backward(x, w)
        w_nk = w.mT if transposed else w
        y = torch.zeros(x.shape[0], w_nk.shape[1], dtype=dtype)
        made = _each(ctx, "fprop", x, "input"), _each(ctx, "fprop", w_nk, "weight")
        for group, a, b in zip(ctx.groups, *made, strict=True):
            if a is not None:
                y[group] = scaled_mm(a, b, dtype)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        w_kn = w if ctx.transposed else w.mT
        visited = ctx.key in ctx.call.expected
        ctx.scales.append(ctx.owner._gradient(ctx.call, ctx.key, dy[ctx.inside]) if visited else None)
        dx, dw = torch.zeros_like(x), torch.zeros_like(w)
        made = _each(ctx, "dgrad", dy, "gradient"), _each(ctx, "dgrad", w_kn, "weight")
        wgrad = _each(ctx, "wgrad", dy, "gradient"), _each(ctx, "wgrad", x, "input")
        for i, (group, a, b, c, d) in enumerate(zip(ctx.groups, *made, *wgrad, strict=True)):
            if a is not None:
                dx[group] = scaled_mm(a, b, ctx.dtype)
                high = ctx.settings.high_wgrad
                dw_nk = dy[group].t() @ x[group].to(dy.dtype) if high else scaled_mm(c, d, ctx.dtype)
                dw[i] = dw_nk.t() if ctx.transposed else dw_nk
        return dx, dw, None, None, None, None, None


def _each(ctx: Any, gemm: str, tensor: Tensor, role: str) -> list[Quantized | None]:
    """The FP8 copies of each group's rows, or of each matrix of a stack, for one gemm. None for a group
    without rows."""
    stack, settings = tensor.dim() == 3, ctx.settings
    scale = ctx.scales[ROLES.index(role)]
    if scale is None and settings.block(role, gemm) == (0, 0):
        amax, fp8_max = amax_of(tensor if stack else tensor[ctx.inside]), settings.format(role)[1]
        scale = scale_of(amax, fp8_max, settings.margin_of(role), settings.rounded(role))
    parts = list(tensor) if stack else [tensor[group] for group in ctx.groups]
    parts = [part.t() for part in parts] if gemm == "wgrad" else parts
    return [settings.quantize(part, role, gemm, scale) if part.numel() else None for part in parts]


class Weight(nn.Parameter):
    """A parameter whose matmuls with activations run in FP8 in a training call of its owner, and in
    recomputes of that call."""

    owner: Reference
    key: str
    source: Weight | None = None  # a transposed view or a cast refers to its weight here
    turned: bool = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        first = args[0] if args else None
        if name in ("t", "T", "mT", "transpose", "to") and isinstance(first, Weight):
            with torch._C.DisableTorchFunctionSubclass():
                view = func(*args, **kwargs).as_subclass(Weight)
            view.owner, view.key = first.owner, first.key
            view.source = first if first.source is None else first.source
            view.turned = first.turned != (name != "to")
            return view
        product = None
        if name == "linear":
            product = (first, args[1], args[2] if len(args) > 2 else kwargs.get("bias"), False)
        elif name in ("matmul", "__matmul__", "mm"):
            product = (first, args[1], None, True)
        elif name in ("_grouped_mm", "grouped_mm_fallback"):  # torch's, transformers'
            product = (first, args[1], args[2], True)
        elif name == "addmm" and not kwargs:
            product = (args[1], args[2], first, True)
        if product is not None and isinstance(product[1], Weight) and not isinstance(product[0], Weight):
            x, weight, other, transposed = product
            transposed = transposed != weight.turned
            weight = weight if weight.source is None else weight.source
            recompute = torch._C._current_graph_task_id() != -1
            if weight.owner.call is not None or (recompute and torch.is_grad_enabled()):
                return weight.owner.matmul(weight, x, other, transposed)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
