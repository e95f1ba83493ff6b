"""What a step of an optimizer costs: `python -m benchmarks.optimizers`.

Each arm updates the same bf16 parameters: the matrices and norms of `--blocks` Llama-1B blocks. Arms that
need another library are left out if it cannot be imported.

    state      bytes of state for a parameter, masters included; from the optimizer's own tensors
    moved      bytes that a step moves for a parameter, on the schedule that Inductor makes for a described
               H200. The gradient, the weight and the states have to be read, and all but the gradient
               written. For torch's and bitsandbytes' fused kernels, which are not Inductor's, that least
               number. torch's foreach makes several passes: not counted
    launches   kernels for the matrices, each
    ms         with `--device cuda`: the median of `--steps` steps by events, all arms by turns in one process
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8compile.dryrun import fake_gpu
from fp8compile.optim import AdamW

from . import machine
from .show import table

Make = Callable[[Sequence[Tensor]], Any]
BLOCK = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)]
BLOCK += [(2048,), (2048,)]


def torchao(name: str) -> Make:
    def make(parameters: Sequence[Tensor]) -> Any:
        import torchao.optim

        return getattr(torchao.optim, name)(parameters)

    return make


def bitsandbytes(parameters: Sequence[Tensor]) -> Any:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(parameters)


ARMS: dict[str, Make] = {
    "torch-fused": lambda p: torch.optim.AdamW(p, fused=True),
    "torch-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "ours": lambda p: AdamW(p),
    "ours-remainder": lambda p: AdamW(p, master="bf16+remainder"),
    "ours-float32-master": lambda p: AdamW(p, master="float32"),
    "torchao-AdamWFp8": torchao("AdamWFp8"),
    "torchao-AdamW8bit": torchao("AdamW8bit"),
    "bitsandbytes-AdamW8bit": bitsandbytes,
}
BY_INDUCTOR = ("ours", "torchao")


def parameters(shapes: Sequence[tuple[int, ...]], device: str) -> list[Tensor]:
    made = [torch.zeros(shape, dtype=torch.bfloat16, device=device).requires_grad_() for shape in shapes]
    for p in made:
        p.grad = torch.zeros_like(p)
    return made


def tensors(value: Any) -> list[Tensor]:
    """All plain tensors inside of a state, also those of torchao's tensor subclasses."""
    if isinstance(value, dict):
        return [x for part in value.values() for x in tensors(part)]
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        return [x for name in value.__tensor_flatten__()[0] for x in tensors(getattr(value, name))]
    return [value] if isinstance(value, Tensor) else []


def static(arm: str) -> dict[str, Any]:
    """State and traffic of one large matrix."""
    given = parameters([(4096, 4096)], "cpu")
    elements = given[0].numel()
    optimizer = ARMS[arm](given)
    kernels = None
    if arm.startswith(BY_INDUCTOR):
        kernels = fake_gpu.trace(optimizer.step).kernels
    else:
        optimizer.step()
    state = sum(x.nbytes for x in tensors(dict(optimizer.state[given[0]])) if x.numel() * 512 >= elements)
    least = 2 + 4 + 2 * state / elements if arm != "torch-foreach" else None
    return {
        "state": state / elements,
        "moved": sum(k.bytes for k in kernels) / elements if kernels is not None else least,
        "launches": len(kernels) if kernels is not None else None,
        "counted": kernels is not None,
    }


def measured(arms: Sequence[str], blocks: int, steps: int, device: str) -> dict[str, float]:
    """Milliseconds of a step, the median. The arms take turns."""
    optimizers = {arm: ARMS[arm](parameters(BLOCK * blocks, device)) for arm in arms}
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for step in range(steps + 3):
        for arm, optimizer in optimizers.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            optimizer.step()
            end.record()
            end.synchronize()
            if step >= 3:
                times[arm].append(start.elapsed_time(end))
    return {arm: statistics.median(found) for arm, found in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Callable[..., Any] = parser.add_argument
    add("--arms", default=",".join(ARMS), help="comma-separated (default: %(default)s)")
    add("--blocks", type=int, default=4, help="Llama-1B blocks (default: %(default)s)")
    add("--steps", type=int, default=20, help="measured steps (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: the static figures only (default)")
    add("--out", type=Path, metavar="JSON", help="write the result here")
    given = parser.parse_args(argv)
    chosen = given.arms.split(",")
    unknown = [arm for arm in chosen if arm not in ARMS]
    if unknown:
        parser.error(f"--arms: {', '.join(unknown)}: not among {', '.join(ARMS)}")
    rows: dict[str, dict[str, Any]] = {}
    for arm in chosen:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows[arm] = static(arm) if given.device == "cpu" else {}
                ARMS[arm](parameters([(64, 128)], given.device))
        except ImportError as error:
            print(f"{arm}: left out: {error}", file=sys.stderr)
            rows.pop(arm, None)
    if given.device == "cuda":
        for arm, milliseconds in measured(list(rows), given.blocks, given.steps, given.device).items():
            rows[arm]["ms"] = milliseconds
    columns = ("state", "moved", "launches") if given.device == "cpu" else ("ms",)
    shown = []
    for arm, row in rows.items():
        cells = [row.get(column) for column in columns]
        shown.append((arm, *("" if x is None else f"{x:.2f}" if isinstance(x, float) else x for x in cells)))
    heads = {
        "state": "bytes of state",
        "moved": "bytes moved",
        "launches": "kernels a matrix",
        "ms": "ms a step",
    }
    print(table(shown, ("optimizer", *(heads[column] for column in columns))))
    if given.out:
        about = {"date": machine.now(), **machine.commit(), "versions": machine.versions()}
        made = {
            "arms": rows,
            "blocks": given.blocks,
            **about,
            "device": machine.describe_device(given.device),
        }
        given.out.write_text(json.dumps(made, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
