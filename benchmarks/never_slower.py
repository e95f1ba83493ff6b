"""Is a model ever slower in FP8 than in bf16? Compares the rooflines of random models for a described GPU.

    python -m benchmarks.never_slower [--count 200] [--seed 0] [--device h200] [--json PATH]

Each model is drawn from a seed: a family (MLP, attention, GPT, Llama), widths from 64 to 8192, 16 to 32768
tokens, one to three blocks, bf16 weights or float32 under autocast. It is compiled three times: by Inductor
alone, and by this backend with each of two recipes. The backend decides by the device's description which
matmuls become FP8. `static` computes the roofline time of a compilation: each kernel that Inductor would
launch takes the longer of its bytes and its FLOPs, plus 2 us. Nothing is executed, nothing is measured.

The claim is ``roofline(fp8) <= roofline(bf16)`` for every model and recipe. Exits with 1 if it does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from fp8compile.devices import catalog
from fp8compile.dryrun import fake_gpu

from . import static
from .machine import commit, now
from .models import LlamaBlock, LlamaShape, unallocated

FAMILIES = ("mlp", "attention", "gpt", "llama")
RECIPES = ("delayed", "tensorwise")


@dataclass(frozen=True)
class Shape:
    """A model and its input. `hidden` is the inner width of a feed-forward block, `tokens` the number of
    tokens in a batch."""

    family: str
    tokens: int
    width: int
    hidden: int
    blocks: int
    heads: int
    bias: bool
    autocast: bool

    def __str__(self) -> str:
        extras = "".join((" bias" if self.bias else "", " autocast" if self.autocast else ""))
        return (
            f"{self.family} x{self.blocks}, {self.tokens} tokens, {self.width} wide, "
            f"{self.hidden} hidden{extras}"
        )


def draw(seed: int) -> Shape:
    """A random shape: the same for a seed on any machine. The logarithms of sizes are uniform."""
    rng = random.Random(seed)

    def log_uniform(least: int, most: int, step: int) -> int:
        size = math.exp(rng.uniform(math.log(least), math.log(most)))
        return max(least, min(most, step * round(size / step)))

    family = rng.choice(FAMILIES)
    # round and odd sizes; with heads, the width is a multiple of 64, so that heads of 64 divide it
    step = rng.choice((64, 256)) if family != "mlp" else rng.choice((16, 64, 256))
    width = log_uniform(64, 8192, step)
    head = 128 if width % 128 == 0 and width >= 1024 else 64
    width = max(head, width // head * head) if family != "mlp" else width
    sequences = rng.choice((1, 1, 2, 4))
    tokens = max(16, log_uniform(16, 32768, rng.choice((1, 16, 128))) // sequences * sequences)
    return Shape(
        family=family,
        tokens=tokens,
        width=width,
        hidden=log_uniform(64, 4 * width if width <= 4096 else 16384, step) if width > 64 else 256,
        blocks=rng.randint(1, 3),
        heads=max(1, width // head),
        bias=rng.random() < 0.5,
        autocast=rng.random() < 0.25,
    )


class Mlp(nn.Module):
    """Linear, activation, Linear; [N, C] -> [N, C]."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.up = nn.Linear(shape.width, shape.hidden, bias=shape.bias)
        self.down = nn.Linear(shape.hidden, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Self-attention with one fused projection, [B, T, C] -> [B, T, C]."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.proj = nn.Linear(shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Gpt(nn.Module):
    """A GPT-2 block."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(shape.width), Attention(shape)
        self.norm2, self.mlp = nn.LayerNorm(shape.width), Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Blocks(nn.Module):
    """Blocks in a row. (Not an nn.Sequential: Dynamo compiles each of its modules separately.)"""

    def __init__(self, shape: Shape, length: int):
        super().__init__()
        self.blocks = nn.ModuleList(block(shape, length) for _ in range(shape.blocks))

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.blocks:
            x = inner(x)
        return x


def block(shape: Shape, length: int) -> nn.Module:
    if shape.family == "llama":
        groups = next(n for n in (4, 2, 1) if shape.heads % n == 0)
        sizes = LlamaShape(shape.blocks, shape.width, shape.heads, shape.heads // groups, shape.hidden)
        return LlamaBlock(sizes, length)
    return {"mlp": Mlp, "attention": Attention, "gpt": Gpt}[shape.family](shape)


def compiled(shape: Shape, recipe: str | None, device: str) -> tuple[fake_gpu.Step, Any]:
    """The launches of one training step, compiled by Inductor alone (`recipe` None) or by this backend, and
    the backend's report."""
    sequences = next(n for n in (4, 2, 1) if n == 1 or (shape.tokens % n == 0 and shape.tokens >= 64 * n))
    length = shape.tokens // sequences
    dtype = torch.float32 if shape.autocast else torch.bfloat16
    model = unallocated(lambda: Blocks(shape, length), dtype)
    size = (shape.tokens, shape.width) if shape.family == "mlp" else (sequences, length, shape.width)
    x = torch.empty(size, dtype=torch.bfloat16).requires_grad_()
    how: dict[str, Any] = {}
    if recipe is not None:
        how = {"backend": fp8compile.fp8, "options": {"recipe": recipe, "device": device}}
    model.compile(**how, dynamic=False)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if shape.autocast else contextlib.nullcontext():
            y = model(x)
        y.float().sum().backward()

    found = fake_gpu.trace(step, catalog.find(device).gpu)
    if not found.kernels:
        raise RuntimeError(f"nothing was compiled for {shape}")
    return found, fp8compile.report() if recipe is not None else None


def compare(shape: Shape, device: str = "h200") -> dict[str, Any]:
    """A row of the results: roofline times in ms, and the share of the FLOPs in FP8."""
    row: dict[str, Any] = asdict(shape)
    row["bf16_ms"] = static.figures(compiled(shape, None, device)[0])["roofline_ms"]
    for recipe in RECIPES:
        figures = static.figures(compiled(shape, recipe, device)[0])
        row[f"{recipe}_ms"] = figures["roofline_ms"]
        tensor = {k: v for k, v in figures.items() if k.startswith("tflop.")}
        row[f"{recipe}_fp8"] = figures.get("tflop.fp8", 0.0) / max(1e-12, sum(tensor.values()))
    return row


def slower(row: dict[str, Any]) -> list[str]:
    """The recipes with which a row's model is slower than in bf16. Allows for rounding: sums over equal
    kernels may differ in the last bits."""
    return [recipe for recipe in RECIPES if row[f"{recipe}_ms"] > row["bf16_ms"] * (1 + 1e-9)]


def summary(rows: list[dict[str, Any]]) -> str:
    lines = [f"{len(rows)} models"]
    for recipe in RECIPES:
        speeds = sorted(row["bf16_ms"] / row[f"{recipe}_ms"] for row in rows)
        some = sum(row[f"{recipe}_fp8"] > 0 for row in rows)
        lines.append(
            f"{recipe}: some of it in FP8 for {some}; roofline speed over bf16: worst {speeds[0]:.3f}, "
            f"median {speeds[len(speeds) // 2]:.3f}, best {speeds[-1]:.3f}; slower: "
            f"{sum(recipe in slower(r) for r in rows)}"
        )
    return "\n".join(lines)


def write(path: Path, rows: list[dict[str, Any]], given: argparse.Namespace) -> None:
    """Write JSON lines: one for the run, one per model. (The files *.json in that folder are results of
    `benchmarks.train`, in another format.)"""
    command = (
        f"python -m benchmarks.never_slower --count {given.count} --seed {given.seed} --device {given.device}"
    )
    device = f"described {catalog.find(given.device).name}"
    head = {"command": command, "device": device, "torch": torch.__version__, "date": now(), **commit()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in (head, *rows)), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.never_slower", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first model; the others follow")
    parser.add_argument("--device", default="h200")
    parser.add_argument(
        "--json", type=Path, help="where to write the results: a line of JSON for the run and one a model"
    )
    given = parser.parse_args(arguments)
    unavailable = fake_gpu.unavailable()
    if unavailable:
        parser.error(unavailable)
    rows, start = [], time.monotonic()
    for seed in range(given.seed, given.seed + given.count):
        shape = draw(seed)
        row = {"seed": seed, **compare(shape, given.device)}
        rows.append(row)
        speeds = ", ".join(f"{recipe} {row['bf16_ms'] / row[f'{recipe}_ms']:.3f}" for recipe in RECIPES)
        print(f"{seed:4d} {shape}: {speeds}{'  SLOWER' if slower(row) else ''}", flush=True)
    print(f"{summary(rows)}\n{time.monotonic() - start:.0f} s")
    if given.json:
        write(given.json, rows, given)
    return 1 if any(map(slower, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
