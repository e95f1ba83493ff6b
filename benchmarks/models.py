"""The models that are measured, in vanilla modules: Llama and Qwen3, a DiT block stack, stacked feed-forward
blocks.

None of them knows of FP8. A GPT-2 is in examples/train_gpt.py. Every model has `blocks`, or (`Llama`)
`regions()`: the modules to compile when a model is compiled block by block instead of whole. In practice,
large models are compiled block by block, because one compilation serves all blocks.

A model is made on the meta device and filled by `materialise`, so that billions of parameters are drawn
directly on their device and in their dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def materialise(build: Callable[[], nn.Module], device: str, dtype: torch.dtype) -> nn.Module:
    """`build()` with parameters of `dtype` on `device`: matrices are normal with deviation 0.02, norms one,
    biases zero. They are the same in every process on one kind of device.
    """
    with torch.device("meta"):
        model = build().to(dtype)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return _with_tables(model)


def unallocated(build: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """`build()` on the CPU with unwritten parameters, which use no memory: pages appear when written."""
    with torch.device("meta"):
        model = build().to(dtype)
    return _with_tables(model.to_empty(device="cpu"))


def _with_tables(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Rotary):
            module.fill()
    return model


class Checkpointed(nn.Module):
    """A module whose activations are computed again in backward."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Tensor:
        return checkpoint(self.inner, *args, use_reentrant=False)


# -- Llama --


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama 3 or Qwen3 model, as published. `qk_norm`: norms of each head's queries and keys;
    `tied`: the output head has the weight of the embedding."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 128256
    theta: float = 500000.0
    qk_norm: bool = False
    tied: bool = True

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


LLAMA_8B = LlamaShape(layers=32, width=4096, heads=32, kv_heads=8, hidden=14336)  # Llama-3-8B
LLAMA_1B = LlamaShape(layers=16, width=2048, heads=32, kv_heads=8, hidden=8192)  # Llama-3.2-1B
LLAMA_3B = LlamaShape(layers=28, width=3072, heads=24, kv_heads=8, hidden=8192)  # Llama-3.2-3B
LLAMA_TINY = LlamaShape(layers=2, width=128, heads=2, kv_heads=1, hidden=256, vocabulary=256)
QWEN3_8B = LlamaShape(36, 4096, 32, 8, 12288, vocabulary=151936, theta=1e6, qk_norm=True, tied=False)


class Rotary(nn.Module):
    """Rotary position embedding of [B, H, T, D] queries and keys. Angles are float32, whatever x is."""

    cos: Tensor
    sin: Tensor

    def __init__(self, length: int, head_dim: int, theta: float):
        super().__init__()
        self.length, self.head_dim, self.theta = length, head_dim, theta
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(length, head_dim, dtype=torch.float32), persistent=False)

    def fill(self) -> None:
        """Write the tables in float32, also if `model.to(bfloat16)` has converted them before."""
        device = self.cos.device
        exponents = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim
        frequencies = self.theta**-exponents
        angles = torch.arange(self.length, device=device, dtype=torch.float32)[:, None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        time = x.shape[-2]
        left, right = x.float().chunk(2, dim=-1)
        turned = torch.cat([-right, left], dim=-1)
        return (x.float() * self.cos[:time] + turned * self.sin[:time]).to(x.dtype)


class LlamaBlock(nn.Module):
    """A decoder layer of [B, T, C]: RMSNorm, grouped-query attention with RoPE, RMSNorm, SwiGLU."""

    def __init__(self, shape: LlamaShape, length: int):
        super().__init__()
        self.head_dim = shape.head_dim
        kv = shape.kv_heads * shape.head_dim
        self.attn_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, kv, bias=False)
        self.v = nn.Linear(shape.width, kv, bias=False)
        self.o = nn.Linear(shape.width, shape.width, bias=False)
        norm = functools.partial(nn.RMSNorm, self.head_dim, eps=1e-6) if shape.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()
        self.rotary = Rotary(length, shape.head_dim, shape.theta)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attn_norm(x)
        q, k, v = (p(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = self.rotary(self.q_norm(q)), self.rotary(self.k_norm(k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Head(nn.Module):
    """Final norm, output projection and mean cross-entropy, [B, T, C] and [B, T] -> []."""

    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Llama(nn.Module):
    """A whole model: tokens, targets [B, T] -> mean loss in nats."""

    def __init__(self, shape: LlamaShape, length: int, checkpointing: bool = False):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = blocks(lambda: LlamaBlock(shape, length), shape.layers, checkpointing)
        self.head = Head(shape)
        if shape.tied:
            self.head.lm_head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x, targets)

    def regions(self) -> list[nn.Module]:
        return [*self.layers, self.head]


class LoRA(nn.Module):
    """A frozen linear layer without a bias, and a trained update of low rank."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def adapted(model: nn.Module, rank: int = 16) -> nn.Module:
    """`model`, frozen, with LoRA on all linears of its decoder layers."""
    model.requires_grad_(False)
    for block in [module for module in model.modules() if isinstance(module, LlamaBlock)]:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, LoRA(layer, rank))
    return model


# -- stacks of blocks --


def blocks(build: Callable[[], nn.Module], count: int, checkpointing: bool = False) -> nn.ModuleList:
    return nn.ModuleList(Checkpointed(build()) if checkpointing else build() for _ in range(count))


class Stack(nn.Module):
    """Blocks in a row, without embedding and head. Further inputs (a condition) go to every block. The loss
    is the mean square of the output: it is cheap and gives every element a different gradient."""

    def __init__(self, build: Callable[[], nn.Module], count: int, checkpointing: bool = False):
        super().__init__()
        self.blocks = blocks(build, count, checkpointing)

    def forward(self, x: Tensor, *conditions: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, *conditions)
        return x.float().square().mean()


class FfnBlock(nn.Module):
    """Linear, GELU, Linear, LayerNorm; [N, C] -> [N, C]."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(F.gelu(self.up(x))))


class SineRegression(nn.Module):
    """Stacked feed-forward blocks that learn sin(x) from x, both [N, C]; -> mean squared error."""

    def __init__(self, width: int, count: int):
        super().__init__()
        self.blocks = blocks(lambda: FfnBlock(width), count)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x.float(), target.float())


class DitBlock(nn.Module):
    """A DiT block with adaLN-Zero: [B, T, C] and a condition [B, C] -> [B, T, C]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        modulation = self.modulation(F.silu(condition)).unsqueeze(1)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.chunk(6, dim=-1)
        h = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.proj(y)
        h = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(h), approximate="tanh"))
