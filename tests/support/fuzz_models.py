"""Random small models whose matmuls FP8 computes exactly: all operands are -1, 0 or 1, times a power of two.

Between matmuls `residue` brings integers and gradients back to {-1, 0, 1}: it takes the remainder of a
division by 3. A sign would hide errors; the remainder hides none: a gradient that is counted twice, or scaled
by 1.01, stays different.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

UNIT = 2.0**-6  # gradients are integers times this

STORED = ("plain", "plain", "plain", "turned", "strided", "half", "stack", "scaled", "masked", "by row",
          "by column", "cat", "norm", "merged", "times", "copied", "frozen", "detached", "wide")  # fmt: skip
SPELLED = tuple("linear linear at einsum addmm bmm baddbmm tensordot left matmul own".split())
CHECKPOINTS = ("", "", "", "", "non-reentrant", "reentrant", "selective")


def residue(x: Tensor, unit: float = 1.0) -> Tensor:
    """The integers x / unit, minus their nearest multiples of 3, times unit; the gradient passes unchanged.

    The arithmetic is in float32, as a third of an integer is not an integer. A value that differs from an
    integer in its last bits becomes that integer: scales contain 448, which has no exact inverse.
    """
    wide = x.float() / unit
    whole = torch.round(wide)
    last_bits = torch.where((wide - whole).abs() < 1e-3, wide - whole, 0.0).detach()
    return ((wide - 3 * torch.round(wide / 3) - last_bits) * unit).to(x.dtype)


class Quantized(torch.autograd.Function):
    """The identity; its backward returns the residue of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return residue(gradient, 2.0**-6)  # not UNIT: with dynamic shapes, Dynamo makes an input of a global


class Product(torch.autograd.Function):
    """A linear layer with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.to(gradient.dtype), gradient.t() @ x.to(gradient.dtype)


def ternary(rng: random.Random, *shape: int) -> Tensor:
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(rng.randrange(2**31))).float()


def permutation(rng: random.Random, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.eye(size)[torch.randperm(size, generator=generator)]


def power(rng: random.Random) -> float:
    return 2.0 ** rng.randint(-4, 3)


# how a weight [out, in] is computed from what is stored
COMPUTED: dict[str, Callable[[Any], Tensor]] = {
    "turned": lambda s: s.w.t(),
    "half": lambda s: s.w[s.out :],
    "wide": lambda s: s.w[:, 16:-16],
    "stack": lambda s: s.w[1],
    "scaled": lambda s: s.w * s.scale,
    "by row": lambda s: s.w * s.scale,
    "by column": lambda s: s.w * s.scale,
    "masked": lambda s: s.w * s.mask,
    "cat": lambda s: torch.cat([s.second, s.w]),
    "norm": lambda s: s.scale * (s.w / s.w.norm(dim=1, keepdim=True).detach()),
    "merged": lambda s: residue(Quantized.apply(s.w @ s.second)),
    "times": lambda s: s.w * 4,
    "copied": lambda s: s.w.t().contiguous().t(),
    "detached": lambda s: s.w.detach(),
}


class Weight(nn.Module):
    """A matrix [out, in] of -1, 0 and 1 times `size`; `stored` says how it is stored or computed."""

    def __init__(self, rng: random.Random, out: int, into: int, stored: str = "") -> None:
        super().__init__()
        self.stored, self.out, self.size = stored or rng.choice(STORED), out, power(rng)
        kind, size = self.stored, self.size
        shapes = {
            "turned": (into, out),
            "half": (2 * out, into),
            "wide": (out, into + 32),
            "stack": (3, out, into),
        }
        shapes |= {"merged": (out, 64), "cat": (out - out // 2, into)}
        values = ternary(rng, *shapes.get(kind, (out, into)))
        values = values if kind in ("scaled", "by row", "by column", "merged") else values * size
        if kind in ("scaled", "by row", "by column", "norm"):
            shape = {"by row": (out, 1), "by column": (into,)}.get(kind, ())
            self.scale = nn.Parameter(torch.full(shape, size))
        if kind == "permutation":
            values = permutation(rng, out) * size
        elif kind == "masked":
            self.register_buffer("mask", ternary(rng, out, into).abs())
        elif kind == "cat":
            self.second = nn.Parameter(ternary(rng, out // 2, into) * size)
        elif kind == "merged":
            self.second, self.size = nn.Parameter(ternary(rng, 64, into)), 1.0
        elif kind == "times":
            self.size = 4 * size
        elif kind == "norm":
            self.size = size / 2
            values = torch.zeros(out, into)  # four non-zeros a row, so the norm of a row is 2
            for row in values:
                row[rng.sample(range(into), 4)] = torch.tensor([rng.choice((-1.0, 1.0)) for _ in range(4)])
        elif kind == "strided":
            values = values.t().contiguous().t()
        self.w = nn.Parameter(values, kind != "frozen")

    def forward(self) -> Tensor:
        return COMPUTED[self.stored](self) if self.stored in COMPUTED else self.w


def multiply(how: str, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """x w^T + bias; `how` says how it is written."""
    flat = x.reshape(-1, x.shape[-1])
    match how:
        case "linear":
            return F.linear(x, w, bias)
        case "addmm" if bias is not None:
            return torch.addmm(bias, flat, w.t()).view(*x.shape[:-1], -1)
        case "baddbmm" if bias is not None:
            return torch.baddbmm(bias.expand(1, flat.shape[0], -1), flat[None], w.t()[None]).view(
                *x.shape[:-1], -1
            )
        case "einsum":
            y = torch.einsum("...i,oi->...o", x, w)
        case "bmm":
            y = torch.bmm(flat[None], w.t()[None]).view(*x.shape[:-1], -1)
        case "tensordot":
            y = torch.tensordot(x, w.to(x.dtype), dims=([x.dim() - 1], [1]))
        case "left":
            y = (w @ flat.t()).t().reshape(*x.shape[:-1], -1)
        case "own":
            y = Product.apply(flat, w).view(*x.shape[:-1], -1)
        case _:
            y = torch.matmul(x, w.t())
    return y if bias is None else y + bias


class Layer(nn.Module):
    """A linear layer on integers. `forward` returns integers; their gradients are integers times UNIT."""

    def __init__(self, rng: random.Random, into: int, out: int, stored: str = "") -> None:
        super().__init__()
        self.weight = Weight(rng, out, into, stored)
        self.spelled, self.before, self.hook = rng.choice(SPELLED), power(rng), rng.random() < 0.4
        self.factor = 1 / (self.before * self.weight.size)
        self.bias = nn.Parameter(ternary(rng, out) / self.factor) if rng.random() < 0.4 else None

    def forward(self, x: Tensor, w: Tensor | None = None) -> Tensor:
        x = residue(x) * self.before
        return self.after(
            multiply(self.spelled, x, self.weight() if w is None else w, self.bias) * self.factor
        )

    def after(self, y: Tensor) -> Tensor:
        if not self.hook:
            return Quantized.apply(y)
        if y.requires_grad:
            y.register_hook(lambda g: residue(g, 2.0**-6))
        return y


class Block(nn.Module):
    """Layers on [..., width]; `kind` says how they are wired."""

    def __init__(self, rng: random.Random, width: int, kind: str = "") -> None:
        super().__init__()
        self.kind = kind or rng.choice(list(KINDS))
        self.residual, self.checkpoint = rng.random() < 0.3, rng.choice(CHECKPOINTS)
        if self.kind == "hooked":
            self.register_buffer("turn", permutation(rng, width))
        self.width = width
        KINDS[self.kind][0](self, rng, width)

    def layers(self, rng: random.Random, *sizes: tuple[int, int], stored: str = "") -> None:
        self.each = nn.ModuleList(Layer(rng, into, out, stored) for into, out in sizes)

    def inner(self, x: Tensor) -> Tensor:
        return KINDS[self.kind][1](self, x)

    def forward(self, x: Tensor) -> Tensor:
        if not self.checkpoint or not torch.is_grad_enabled():
            y = self.inner(x)
        elif self.checkpoint == "selective":
            saving = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
            y = checkpoint(self.inner, x, use_reentrant=False, context_fn=saving)
        else:
            y = checkpoint(self.inner, x, use_reentrant=self.checkpoint == "reentrant")
        return x + y if self.residual else y


# -- ways to wire layers: a constructor and a forward each --


def _layers(*sizes: tuple[int, int], stored: str = "") -> Callable[[Block, random.Random, int], None]:
    """A constructor of layers [into, out], in widths of the model."""
    return lambda b, rng, d: b.layers(rng, *((into * d, out * d) for into, out in sizes), stored=stored)


_one, _two, _fused = _layers((1, 1)), _layers((1, 1), (1, 1)), _layers((1, 3), (1, 1))


def _mlp(b: Block, rng: random.Random, d: int) -> None:
    hidden = rng.choice((128, 256, 176))
    b.layers(rng, (d, hidden), (hidden, d), (d, hidden))


def _low(b: Block, rng: random.Random, d: int) -> None:
    rank = rng.choice((16, 128))
    b.layers(rng, (d, d), (d, rank), (rank, d))
    b.each[0].weight.w.requires_grad_(False)


def _table(b: Block, rng: random.Random, d: int) -> None:
    b.table = nn.Parameter(ternary(rng, 4, d, 128))


def _beside(b: Block, rng: random.Random, d: int) -> None:
    b.layers(rng, *((d, rng.choice((128, 144, 256))) for _ in "qkv"), stored="plain")
    spelled, biased = rng.choice(("linear", "matmul", "einsum")), rng.random() < 0.3
    for layer in b.each:
        layer.spelled, layer.before = spelled, 1.0
        layer.factor = 1 / layer.weight.size
        layer.bias = nn.Parameter(ternary(rng, layer.weight.out) / layer.factor) if biased else None
    b.last = Layer(rng, 128, d)


def beside(b: Block, x: Tensor) -> Tensor:
    """Three layers of one tensor, which `merge_matmuls` makes one."""
    x = residue(x)
    q, k, v = (
        layer.after(multiply(layer.spelled, x, layer.weight(), layer.bias) * layer.factor) for layer in b.each
    )
    return b.last(residue(q)[..., :128] * residue(k)[..., :128] + v[..., -128:])


def gated(b: Block, x: Tensor) -> Tensor:
    return b.each[1](residue(b.each[0](x)) * residue(b.each[2](x)))


def attention(b: Block, x: Tensor) -> Tensor:
    q, k, v = (residue(y) for y in b.each[0](x).chunk(3, -1))
    q, k, v = (y.reshape(-1, b.width) for y in (q, k, v))
    weights = residue(Quantized.apply(q @ k.t()))
    return b.each[1](Quantized.apply(weights @ v).view(x.shape))


def sliced(b: Block, x: Tensor) -> Tensor:
    """Each third of one parameter in its own matmul."""
    layer = b.each[0]
    x = residue(x) * layer.before
    one, two, three = layer.weight().chunk(3)
    return sum(layer.after(multiply(layer.spelled, x, w, None) * layer.factor) for w in (one, three, two))


def added(b: Block, x: Tensor) -> Tensor:
    """The sum of two matmuls."""
    one, two = b.each
    x = residue(x).reshape(-1, b.width)
    y = torch.addmm(
        x @ one.weight().t(), x, two.weight().t(), beta=1 / one.weight.size, alpha=1 / two.weight.size
    )
    return one.after(y)


def turned(b: Block, x: Tensor) -> Tensor:
    """A matmul of a tensor that is not contiguous."""
    return b.each[0](x.transpose(0, -2) if x.dim() > 2 else x.flip(0)).reshape(x.shape)


def hooked(b: Block, x: Tensor) -> Tensor:
    """A hook multiplies the gradient."""
    y = b.each[0](x)
    if y.requires_grad:
        y.register_hook(lambda g: (residue(g, 2.0**-6) @ b.turn.to(g.dtype)).to(g.dtype))
    return y


def experts(b: Block, x: Tensor) -> Tensor:
    flat = residue(x).reshape(-1, b.width)
    y = residue(Quantized.apply(torch.einsum("td,edf->etf", flat, b.table)))
    return Quantized.apply(torch.einsum("etf,edf->td", y, b.table)).view(x.shape)


def bare(b: Block, x: Tensor) -> Tensor:
    """One matmul directly after the other."""
    one, two = (layer.weight() / layer.weight.size for layer in b.each)
    return Quantized.apply(residue(x) @ one.t() @ two)


Wired = tuple[Callable[[Block, random.Random, int], None], Callable[[Block, Tensor], Tensor]]
KINDS: dict[str, Wired] = {
    "one": (_one, lambda b, x: b.each[0](x)),
    "mlp": (_mlp, lambda b, x: b.each[1](b.each[0](x))),
    "gated": (_mlp, gated),
    "beside": (_beside, beside),
    "shared": (_one, lambda b, x: b.each[0](b.each[0](x))),
    "shared beside": (_one, lambda b, x: b.each[0](x) + b.each[0](x.flip(-1))),
    "parallel": (_two, lambda b, x: b.each[0](x) - b.each[1](x)),
    "half of it": (_two, lambda b, x: (b.each[0](x), b.each[1](x))[1]),
    "no gradient": (_two, lambda b, x: b.each[0](x.detach()) + b.each[1](x)),
    "attention": (_fused, attention),
    "sliced": (_fused, sliced),
    "added": (_two, lambda b, x: added(b, x).view(x.shape)),
    "low rank": (_low, lambda b, x: b.each[0](x) + b.each[2](b.each[1](x))),
    "hooked": (_one, hooked),
    "bare": (_layers((1, 1), (1, 1), stored="permutation"), bare),
    "turned": (_one, turned),
    "experts": (_table, experts),
}


class Model(nn.Module):
    """A sequence of blocks. `breaks`: a graph break after each block. `two`: also returns the middle one."""

    def __init__(self, rng: random.Random, depth: int = 0, kinds: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.width = rng.choice((128, 128, 144, 256))
        depth = depth or rng.choice((1, 1, 2, 2, 3))
        self.blocks = nn.ModuleList(Block(rng, self.width, kind) for kind in kinds or [""] * depth)
        self.breaks, self.two = rng.random() < 0.1, rng.random() < 0.15
        self.tied = rng.random() < 0.15
        if self.tied:
            self.table = nn.Embedding(160, self.width)
            self.table.weight.data = ternary(rng, 160, self.width)

    def forward(self, x: Tensor) -> Any:
        middle = None
        if self.tied:
            x = x + self.table(torch.arange(x.shape[-2], device=x.device))
        for block in self.blocks:
            x = block(x)
            middle = x if middle is None else middle
            if self.breaks:
                torch._dynamo.graph_break()
        if self.tied:
            x = Quantized.apply(F.linear(residue(x), self.table.weight))
        x = x * 1  # hooks inside and outside of the graph are then on different tensors
        return (x, middle * 2) if self.two else x
