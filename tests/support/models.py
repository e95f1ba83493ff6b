"""Small vanilla models, 128 to 256 wide, with the structures of common training code. None knows of FP8."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Mlp(nn.Module):
    """up, GELU, down with biases, as in GPT-2; [..., width] -> [..., width]."""

    def __init__(
        self, width: int = 128, hidden: int = 256, bias: bool = True, act: Callable[[Tensor], Tensor] = F.gelu
    ) -> None:
        super().__init__()
        self.act = act
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class ResidualMlp(Mlp):
    """x + Mlp(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class SwiGlu(nn.Module):
    """silu(gate(x)) * up(x), then down, as in Llama: gate and up read one tensor [..., width]."""

    def __init__(self, width: int = 128, hidden: int = 256) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Gated(nn.Module):
    """A norm and a gated feed-forward on a residual stream, as in Llama: gate and up read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(128), SwiGlu()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Lora(nn.Module):
    """A residual MLP of frozen linears; one has a trained update."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.up, self.down = (
            nn.Linear(*sizes, bias=False).requires_grad_(False) for sizes in ((128, 256), (256, 128))
        )
        self.a, self.b = nn.Linear(128, 128, bias=False), nn.Linear(128, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.gelu(self.up(h) + self.b(self.a(h))))


class Attention(nn.Module):
    """Causal self-attention with separate q, k and v projections; [batch, time, width] -> the same."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in "qkvo")

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (f(x).view(batch, time, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, time, width))


class Heads(Attention):
    """Attention, written out. Of one head and with symbolic sizes, the input of `o` is a view of a bmm."""

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            f(x).view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        return self.o(
            ((q @ k.transpose(-2, -1) * 0.1).softmax(-1) @ v).transpose(1, 2).reshape(batch, time, width)
        )


class NormalHeads(Attention):
    """Attention with norms of q and k, whose backward can read FP8. Attention's cannot: v is not merged."""

    def __init__(self, width: int = 256) -> None:
        super().__init__(width)
        self.norm = nn.RMSNorm(width)
        self.q_norm, self.k_norm = nn.RMSNorm(128), nn.RMSNorm(128)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, 128)) for layer in (self.q, self.k, self.v))
        parts = (part.transpose(1, 2) for part in (self.q_norm(q), self.k_norm(k), v))
        return x + self.o(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Pre-norm transformer block: attention and an MLP on a stream [batch, time, width]."""

    def __init__(self, width: int = 128, gated: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = SwiGlu(width) if gated else Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LlamaLayer(nn.Module):
    """A Llama-3-8B decoder layer without its rotary embedding: grouped-query attention and SwiGLU."""

    def __init__(self, dim: int = 4096, heads: int = 32, kv_heads: int = 8, hidden: int = 14336) -> None:
        super().__init__()
        head = dim // heads
        self.head = head
        self.attn_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k, self.v = (nn.Linear(dim, kv_heads * head, bias=False) for _ in "kv")
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attn_norm(x)
        q, k, v = (p(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Rotary(nn.Module):
    """Attention with a rotary embedding, as in Hugging Face's models: the halves of a head are exchanged."""

    def __init__(self, width: int = 128, heads: int = 2, length: int = 64) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in "qkvo")
        self.head = width // heads
        rates = 100.0 ** -torch.linspace(0, 1, self.head // 2)
        angles = torch.outer(torch.arange(length), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        time = x.shape[-2]
        return (x * self.cos[:time] + torch.cat([-two, one], -1) * self.sin[:time]).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class GptLayer(nn.Module):
    """A block with LayerNorm first, one projection to q, k, v, and GELU: GPT-2 (causal, tanh) or ViT."""

    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh" if self.causal else "none"))


class Ffn(nn.Module):
    """Linear, GELU, linear, LayerNorm: one block of a stacked feed-forward network."""

    def __init__(self, dim: int = 4096) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(F.gelu(self.up(x))))


class Stack(nn.Module):
    """Modules in a row."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.inner:
            x = module(x)
        return x


class Checkpointed(Stack):
    """The activations inside each module are recomputed in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self.inner:
            x = checkpoint(module, x, use_reentrant=False)
        return x


class Parallel(Stack):
    """Modules side by side, on inputs of different scales: FP8 roundings of one do not affect the others."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([module(x * (i + 1)) for i, module in enumerate(self.inner)])


class Broken(nn.Module):
    """Three modules in a row with graph breaks between them. (Not in a loop: Dynamo leaves that to eager.)"""

    def __init__(self, first: nn.Module, second: nn.Module, third: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.third = first, second, third

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = self.second(x)
        torch._dynamo.graph_break()
        return self.third(x)


class Twice(nn.Module):
    """Two matmuls use one weight, on different inputs."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(3.0 * torch.tanh(self.linear(x)))


class Uses(nn.Module):
    """One parameter as three weights, and as the weight of a fourth matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(128, 384, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q * k + v) @ self.qkv.weight[:128]


class Positive(nn.Module):
    """A linear with positive weights, and relu: in a row, clipped values make the next inputs too small."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128, bias=False)
        drawn = torch.randn(128, 128, generator=torch.Generator().manual_seed(seed))
        self.linear.weight.data = drawn.abs() / 100

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


class Spelled(nn.Module):
    """The same product written as F.linear, x @ w, x @ w.t() and addmm; [rows, width] -> [rows, width]."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (
            nn.Parameter(torch.randn(width, width) * width**-0.5) for _ in range(4)
        )
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x, self.a))
        x = torch.tanh(x @ self.b)
        x = torch.tanh(x @ self.c.t())
        return torch.addmm(self.bias, x, self.d)


class TwoOutputs(nn.Module):
    """A module with two outputs; a loss may use only one of them."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class Branches(nn.Module):
    """An argument chooses the layers that run: two graphs that share some weights, but not all."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.shared = nn.Linear(width, width)
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width)

    def forward(self, x: Tensor, second: bool = False) -> Tensor:
        x = torch.tanh(self.shared(x))
        return self.two(x) if second else self.one(x)


class Linear(nn.Linear):
    """A linear whose forward is user code, since `nn.Linear().compile()` never compiles anything."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def linear(weight: float = 0.5) -> nn.Linear:
    """A [128, 128] linear without bias, all weights the same."""
    module = Linear(128, 128, bias=False)
    nn.init.constant_(module.weight, weight)
    return module


def make(
    build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> nn.Module:
    """build() with the same weights on every machine: from this seed on the CPU, then moved to the device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
    return model.to(device=device, dtype=dtype)


def relus(count: int = 2) -> list[nn.Module]:
    """MLPs with relu, which rounds nothing: bf16 models have the same intermediates fused and not fused."""
    return [Mlp(act=F.relu) for _ in range(count)]


class Experts(nn.Module):
    """Gated feed-forwards as stacks of matrices. `offs` are the ends of each expert's rows; rows after the
    last end are zeros in the result. `turned`: the stacks lie as [E, inputs, outputs]."""

    def __init__(self, width: int = 128, hidden: int = 128, count: int = 4, turned: bool = False) -> None:
        super().__init__()
        self.turned = turned
        sizes = {"gate_up_proj": (2 * hidden, width), "down_proj": (width, hidden)}
        for name, (out, inner) in sizes.items():
            weight = torch.randn(count, out, inner) * inner**-0.5
            setattr(self, name, nn.Parameter(weight.transpose(1, 2).contiguous() if turned else weight))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        up, down = (w if self.turned else w.transpose(-2, -1) for w in (self.gate_up_proj, self.down_proj))
        gate, value = torch._grouped_mm(x, up.to(x.dtype), offs).chunk(2, -1)
        made = torch._grouped_mm(F.silu(gate) * value, down.to(x.dtype), offs)
        inside = torch.arange(x.shape[0], device=x.device) < offs[-1]
        return torch.where(inside.unsqueeze(1), made, 0)


class Moe(nn.Module):
    """Tokens are sorted by their experts, multiplied and added, as transformers' `grouped_mm` experts do. The
    first features of a token choose its experts, so no error of a matmul changes the choice."""

    def __init__(
        self, width: int = 128, hidden: int = 128, count: int = 4, top: int = 2, turned: bool = False
    ) -> None:
        super().__init__()
        self.count, self.top = count, top
        self.experts = Experts(width, hidden, count, turned)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        probabilities, chosen = tokens[:, : self.count].float().softmax(-1).topk(self.top)
        expert, order = chosen.reshape(-1).sort()
        sizes = torch.histc(expert.float(), self.count, 0, self.count - 1)
        made = self.experts(tokens[order // self.top], sizes.cumsum(0).to(torch.int32))
        made = made * probabilities.reshape(-1)[order].unsqueeze(-1).to(made.dtype)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        return made[back].view(*tokens.shape[:-1], self.top, -1).sum(-2).view(x.shape)
