"""What a whole optimizer step costs, with the casts of weights in it: `python -m benchmarks.whole_steps`.

The layers of Llama-3-8B (`--layers`, `--seq` tokens, `--accumulate` micro-batches a step) and the update by
`fp8compile.optim.AdamW`, compiled for a described H200. Nothing is executed or measured: kernels and bytes
are those of Inductor's schedule, and a kernel takes the longer of its bytes and its FLOPs, plus a launch
(`benchmarks.static`).

    plain            weights are cast in each micro-batch
    cached           `cache_weights`: cast in the first forward after a step
    cached-by-step   and the update computes the amaxes: `AdamW(.., fp8_weights=True)`

    micro ms    forward and backward of all micro-batches
    casts       the graph that casts weights, once a step: bytes a parameter that is cast, kernels, ms
    update      bytes a parameter, ms. One kernel a parameter, and the reduction of amaxes of blocks

The bytes that must move once a step, for a bf16 weight whose two FP8 copies are kept: the update reads and
writes its tensors (`benchmarks.optimizers`), the casts read 2 bytes and write 2. What reads the weight again
for its amax reads 2 more.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from fp8compile.dryrun import fake_gpu
from fp8compile.features.weight_cache.weight_cache import CopiesOf, WeightCache
from fp8compile.optim import AdamW
from fp8compile.optim.states import is_small
from fp8compile.optim.update import compiled

from . import arms, machine
from .cases.llama_layers import LAYERS, point
from .models import unallocated
from .optimizers import parameters
from .show import table
from .static import H200, roofline_s

# cache_weights, fp8_weights
ARMS = {"plain": (False, False), "cached": (True, False), "cached-by-step": (True, True)}
COLUMNS = ("micro_ms", "cast_bytes", "cast_kernels", "cast_ms", "update_bytes", "update_ms", "ms")
HEADS = ("micro ms", "casts: bytes", "kernels", "ms", "update: bytes", "ms", "step, ms")


def traced(arm: str, recipe: str, layers: int, seq: int) -> tuple[list[Any], list[Any], nn.Module]:
    """The kernels of a micro-batch and those of the casts, and the model."""
    cached, early = ARMS[arm]
    given = point(layers, LAYERS.variant({"seq": str(seq), "accum": "1"}))
    model = unallocated(given.build, given.dtype)
    how = arms.fp8(recipe, cache_weights=cached)
    arms.apply(arms.Arm(arm, "fp8", how), model, how, each=False)
    shapes = next(given.batches("meta", torch.bfloat16))
    batch = [torch.empty(x.shape, dtype=x.dtype).requires_grad_(x.requires_grad) for x in shapes]
    caches: list[tuple[WeightCache, Any]] = []
    cast = WeightCache._cast

    def noted(self: WeightCache, weights: Any, *others: Any) -> Any:
        caches.append((self, weights))
        return cast(self, weights, *others)

    with mock.patch.object(WeightCache, "_cast", noted):
        graphs = fake_gpu.trace(lambda: model(*batch), H200.gpu).graphs
    casts = [kernel for graph in graphs if not _multiplies(graph) for kernel in graph.kernels]
    if early:
        ((cache, weights),) = caches
        assert cache.given is not None
        amaxes = [torch.ones((), dtype=torch.bfloat16) for _ in cache.given.places]
        casts = list(fake_gpu.trace(lambda: cast(cache, weights, CopiesOf(), None, amaxes), H200.gpu).kernels)
    return [kernel for graph in graphs if _multiplies(graph) for kernel in graph.kernels], casts, model


def _multiplies(graph: Any) -> bool:
    return any(kernel.matmul is not None for kernel in graph.kernels)


def update(master: str | None, with_amax: bool) -> tuple[Any, float]:
    """The kernel that updates one matrix, and the bytes that it moves for an element of it."""
    given = parameters([(4096, 4096)], "cpu")
    optimizer = AdamW(given, master=master, fp8_weights=with_amax)
    compiled.cache_clear()
    with mock.patch.object(AdamW, "_asked", lambda _: frozenset(map(id, given))):
        (kernel,) = fake_gpu.trace(optimizer.step, H200.gpu).kernels
    compiled.cache_clear()
    return kernel, kernel.bytes / given[0].numel()


def row(
    arm: str, recipe: str, master: str | None, layers: int, seq: int, accumulate: int
) -> dict[str, float]:
    micro, casts, model = traced(arm, recipe, layers, seq)
    kernel, each = update(master, ARMS[arm][1])
    sizes = [p.numel() for p in model.parameters() if not is_small(p)]
    updates = [dataclasses.replace(kernel, bytes=int(each * size)) for size in sizes]
    # torch's kernel that takes the largest amax of a block; one launch for about a hundred weights
    if ARMS[arm][1]:
        read = 2 * sum(-(-size // 128) for size in sizes)
        updates += [
            dataclasses.replace(kernel, bytes=read if i == 0 else 0) for i in range(-(-len(sizes) // 100))
        ]
    made = {
        "micro_ms": 1e3 * accumulate * sum(map(roofline_s, micro)),
        "micro_gb_outside_matmuls": accumulate * sum(k.bytes for k in micro if k.matmul is None) / 1e9,
        "cast_bytes": sum(k.bytes for k in casts) / sum(sizes),
        "cast_kernels": len(casts),
        "cast_ms": 1e3 * sum(map(roofline_s, casts)),
        "update_bytes": sum(k.bytes for k in updates) / sum(sizes),
        "update_ms": 1e3 * sum(map(roofline_s, updates)),
    }
    return {**made, "ms": made["micro_ms"] + made["cast_ms"] + made["update_ms"]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Any = parser.add_argument
    add("--recipes", default="delayed,tensorwise", help="comma-separated (default: %(default)s)")
    add(
        "--master",
        choices=("none", "bf16+remainder", "float32"),
        default="bf16+remainder",
        help="default: %(default)s",
    )
    add("--layers", type=int, default=2, help="default: %(default)s")
    add("--seq", type=int, default=2048, help="tokens of a micro-batch (default: %(default)s)")
    add("--accumulate", type=int, default=8, help="micro-batches a step (default: %(default)s)")
    add("--out", type=Path, metavar="JSON", help="write the result here")
    given = parser.parse_args(argv)
    unavailable = fake_gpu.unavailable()
    if unavailable:
        parser.error(unavailable)
    master = None if given.master == "none" else given.master
    rows: dict[str, dict[str, dict[str, float]]] = {}
    shown = []
    for recipe in given.recipes.split(","):
        rows[recipe] = {
            arm: row(arm, recipe, master, given.layers, given.seq, given.accumulate) for arm in ARMS
        }
        for arm, figures in rows[recipe].items():
            cells = [
                f"{figures[name]:.2f}" if isinstance(figures[name], float) else figures[name]
                for name in COLUMNS
            ]
            shown.append((f"{recipe}, {arm}", *cells, f"{rows[recipe]['plain']['ms'] / figures['ms']:.3f}"))
    print(table(shown, ("", *HEADS, "x plain")))
    if given.out:
        chosen = {
            "master": given.master,
            "layers": given.layers,
            "seq": given.seq,
            "accumulate": given.accumulate,
        }
        about = {
            "date": machine.now(),
            **machine.commit(),
            "versions": machine.versions(),
            "device": f"described {H200.name}",
        }
        given.out.write_text(json.dumps({"recipes": rows, **chosen, **about}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
