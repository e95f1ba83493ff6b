"""Do gains shrink as sequences get longer? Estimates (nothing is run), next to published measurements.

    python -m benchmarks.sequence_lengths           # all points, 1 to 2 minutes each
    python -m benchmarks.sequence_lengths --model mpt-3b --length 512 --length 8192
    python -m benchmarks.sequence_lengths --show    # only the table: of results/sequence-lengths.jsonl

A step has 32,768 tokens at every length, in one forward and backward. Attention stays in high precision, and
its share of the step grows with the length. Each point is estimated with the rate of FlashAttention-2, as it
was measured, and again with that of FlashAttention-3 or cuDNN, which torch takes now. Estimates extrapolate
from 1 and 2 layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import fp8compile
from fp8compile.dryrun import roofline

from . import machine, tables
from .models import LLAMA_8B, Llama
from .results import RESULTS

sys.path.append(str(machine.ROOT / "examples"))
from train_gpt import CONFIGS, GPT, Config  # noqa: E402

TOKENS = 32768
LENGTHS = (512, 2048, 8192, 32768)
PATH = RESULTS / "sequence-lengths.jsonl"  # not a .json: those are results of `benchmarks.train`

# llm-foundry, scripts/train/benchmarking/README.md: tokens/s per GPU in FP8 (TransformerEngine) over bf16,
# MPT on 8 H100 with FlashAttention-2; 20,480 to 98,304 tokens per forward; activation checkpointing at 32,768
# tokens. bf16 at 2,048 ran on 16.
PUBLISHED = {"mpt-3b": {512: 36527 / 27965, 2048: 30586 / 24142, 8192: 19146 / 16578, 32768: 5856 / 5873}}

# llm-foundry's 3b.yaml: 32 layers of LayerNorm, attention and a GELU MLP, 2560 wide
MPT_3B = Config(layers=32, width=2560, heads=20, context=TOKENS, vocabulary=50368, steps=0, batch_size=0)

MODELS: dict[str, tuple[str, Callable[[int], nn.Module]]] = {
    "gpt2-124m": (
        "GPT-2 124M",
        lambda length: GPT(dataclasses.replace(CONFIGS["gpt2-124m"], context=length)),
    ),
    "mpt-3b": ("MPT 3B", lambda length: GPT(dataclasses.replace(MPT_3B, context=length))),
    "llama-8b": ("Llama-3-8B", lambda length: Llama(LLAMA_8B, length)),
}


def point(model: str, length: int, device: str) -> dict[str, Any]:
    """One line of the results: costs in bf16 and FP8, and speedups at both rates of attention."""
    with torch.device("meta"):
        built = MODELS[model][1](length).bfloat16()
    tokens = torch.zeros(TOKENS // length, length, dtype=torch.long, device="meta")
    share = roofline.FLASH_ATTENTION_2.share
    made = fp8compile.estimate(built, tokens, tokens, device=device, attention=share, extrapolate=True)
    bf16, fp8 = made.bf16.seconds, made.fp8.seconds
    # attention of these sizes is limited by its FLOPs, at either rate
    saved = (1 - share / roofline.CUDNN.share) * made.bf16.attention_seconds
    return {
        "model": model,
        "length": length,
        "batch": TOKENS // length,
        "device": made.device,
        "speedup": made.speedup,
        "speedup_flash_attention_3": (bf16 - saved) / (fp8 - saved),
        "attention_share_of_bf16_time": made.bf16.attention_seconds / bf16,
        "published": PUBLISHED.get(model, {}).get(length),
        "bf16": dataclasses.asdict(made.bf16),
        "fp8": dataclasses.asdict(made.fp8),
        "fp8_flop_fraction": made.report.fp8_flop_fraction,
        "notes": list(made.notes),
        "date": machine.now(),
        **machine.commit(),
        "versions": machine.versions(),
    }


def read(path: Path = PATH) -> dict[tuple[str, str, int], dict[str, Any]]:
    """The last line of each device, model and length."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(line["device"], line["model"], line["length"]): line for line in lines}


def write(points: dict[tuple[str, str, int], dict[str, Any]], path: Path = PATH) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for _, line in sorted(points.items())))


def table(points: dict[tuple[str, str, int], dict[str, Any]]) -> str:
    """A Markdown table of all points."""
    head = ["model", "device", "sequence", "batch", "ms bf16", "ms FP8", "attention, share of bf16"]
    head += ["x bf16 with FlashAttention-2", "with cuDNN or FlashAttention-3", "measured by llm-foundry"]
    rows = [
        (
            MODELS[line["model"]][0],
            line["device"],
            f"{line['length']:,}",
            line["batch"],
            f"{1e3 * line['bf16']['seconds']:,.0f}",
            f"{1e3 * line['fp8']['seconds']:,.0f}",
            f"{line['attention_share_of_bf16_time']:.0%}",
            f"{line['speedup']:.2f}",
            f"{line['speedup_flash_attention_3']:.2f}",
            f"{line['published']:.2f}" if line["published"] else "",
        )
        for _, line in sorted(
            points.items(), key=lambda item: (item[0][0], list(MODELS).index(item[0][1]), item[0][2])
        )
    ]
    sides = ("left", "left") + ("right",) * 8
    return tabulate(rows, head, "github", disable_numparse=True, colalign=sides)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=tuple(MODELS), help="default: all")
    parser.add_argument("--length", action="append", type=int, choices=LENGTHS, help="default: all")
    parser.add_argument("--device", default="h100", help="a description's key (default: h100)")
    parser.add_argument("--show", action="store_true", help="print the table, estimate nothing")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table into this page, too")
    given = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU can only be described in a process without a GPU
    points = read()
    for model in [] if given.show else given.model or MODELS:
        for length in given.length or LENGTHS:
            line = point(model, length, given.device)
            points = {**read(), (line["device"], model, length): line}
            write(points)
            print(f"{model} {length}: {line['speedup']:.2f}", flush=True)
    print(table(points))
    if given.update:
        tables.update(given.update, "sequence lengths", table(points) + "\n")


if __name__ == "__main__":
    main()
