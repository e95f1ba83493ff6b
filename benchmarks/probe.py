"""A first look at a device, within a minute: `python -m benchmarks.probe`.

    facts      packages, and the device as torch, nvidia-smi and our catalog describe it
    kernel     one generated kernel, compiled and run: its outputs are those of the eager operators, bitwise
    matmuls    kinds of scaling x fprop, dgrad and wgrad of a linear x sizes x output dtypes x bias, each in a
               `try`, beside the product of the same values in float32

The matmuls are ATen's, called as our lowerings call them (`codegen.scaled_mm`, `codegen.scaled_grouped`).
With one scale for an operand, its values are small whole numbers: each sum is exact, on tensor cores too, and
so the result must be. With several scales, values are normal and scales random; each element may be off by
its rounding and by a thousandth of the magnitudes that are summed, because tensor cores keep about 14 bits of
a sum. A result's memory is full of NaN before. Where the package itself would not make the call, a refusal or
a wrong result is no fault.

An error that leaves the device unusable to this process ends it; another process goes on after that matmul.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import itertools
import os
import platform
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8compile.codegen import scaled_grouped, scaled_mm, scaled_mm_kind
from fp8compile.config.recipe import ROW, WHOLE, Block
from fp8compile.devices import catalog, formats, support
from fp8compile.devices.gpu import Gpu, gpu_of
from fp8compile.ir import ops, schemas

from . import lines, machine, show
from .families import FAMILIES, Source
from .kernels import Plan, interpreter
from .worker import one_line

IMPORTED = "torch triton numpy sympy networkx jinja2 tabulate click tqdm pytest hypothesis".split()
OTHERS = "pydantic transformers matplotlib torchao transformer_engine".split()
# tokens, output features, input features
SIZES = {
    "full": [
        *((16, 16, 16), (17, 48, 80), (1, 4096, 4096), (1000, 272, 1040), (1024, 1536, 640)),
        *((8192, 768, 768), (16, 3072, 9216), (256, 3072, 9216), (8192, 1024, 4096), (4096, 50304, 768)),
        *((8192, 4096, 4096), (8192, 14336, 4096)),
    ],
    "tiny": [
        *((16, 16, 16), (17, 48, 80), (1, 256, 256), (100, 272, 144), (128, 192, 640), (512, 48, 48)),
        *((16, 192, 576), (64, 192, 576), (512, 64, 256), (256, 336, 48), (256, 256, 256), (256, 448, 128)),
    ],
}
GEMMS = ("fprop", "dgrad", "wgrad")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OUTPUTS = tuple(itertools.product((BF16, F16, F32), (False, True)))  # dtype, whether there is a bias
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
LINE, SQUARE, MX = Block(1, 128), Block(128, 128), Block(1, 32)
EXPERTS = 4


class Kind(NamedTuple):
    """`weight` is how a weight's scales are laid out, `block` how those of all else are."""

    name: str
    form: str  # of `scaled_mm_kind`
    call: Callable[..., Tensor]
    block: Block
    weight: Block
    outputs: Sequence[tuple[torch.dtype, bool]] = OUTPUTS


ONLY_BF16 = ((BF16, False),)  # all that ATen's matmuls of groups return
KINDS = (
    Kind("per-tensor", "", scaled_mm.tensorwise, WHOLE, WHOLE),
    Kind("rowwise", scaled_mm_kind.ROWWISE, scaled_mm.rowwise, ROW, ROW),
    Kind("blockwise", scaled_mm_kind.BLOCKWISE, scaled_mm.blockwise, LINE, SQUARE),
    Kind("mxfp8", scaled_mm_kind.MX, scaled_mm.mx, MX, MX),
    Kind("grouped", scaled_mm_kind.GROUPED, scaled_grouped.grouped, ROW, ROW, ONLY_BF16),
    Kind("grouped, one expert empty", scaled_mm_kind.GROUPED, scaled_grouped.grouped, ROW, ROW, ONLY_BF16),
)


class Matmul(NamedTuple):
    """One gemm of a linear: a [m, k] and b [n, k]. `ends`: of experts' rows; in a wgrad, columns."""

    kind: Kind
    gemm: str
    m: int
    n: int
    k: int
    ends: tuple[int, ...] = ()

    @property
    def blocks(self) -> tuple[Block, Block]:
        return self.kind.block, self.kind.block if self.gemm == "wgrad" else self.kind.weight

    def chosen(self, gpu: Gpu | None, dtype: torch.dtype) -> bool:
        """Whether the package makes this call on this device, for these sizes."""
        if gpu is None or not self.kind.form:
            return gpu is not None
        if self.ends:
            return scaled_mm_kind.how_grouped(gpu, *self.blocks) == self.kind.form
        return (
            scaled_mm_kind.how(gpu, *self.blocks, self.m, self.n, self.k, dtype, self.gemm == "fprop")
            == self.kind.form
        )


def matmuls(size: str, gpu: Gpu | None) -> Iterator[Matmul]:
    for (tokens, wide, deep), kind, gemm in itertools.product(SIZES[size], KINDS, GEMMS):
        m, n, k = (tokens, wide, deep) if gemm == "fprop" else (tokens, deep, wide)
        if gemm == "wgrad":
            m, n, k = wide, deep, ops.padded_rows(tokens)
        ends: tuple[int, ...] = ()
        if kind.form == scaled_mm_kind.GROUPED:
            counts = [tokens // 2, 0 if "empty" in kind.name else tokens // 8, tokens // 4]
            counts.append(tokens - sum(counts))
            if "empty" not in kind.name and not all(counts):
                continue
            ends = tuple(
                itertools.accumulate(-(-count // 16) * 16 if gemm == "wgrad" else count for count in counts)
            )
            k = ends[-1] if gemm == "wgrad" else k
        if kind.form != scaled_mm_kind.MX or support.has_mx(gpu):
            yield Matmul(kind, gemm, m, n, k, ends)


# -- operands and products --


def operand(
    shape: Sequence[int], block: Block, wide: bool, device: str, groups: int = 0
) -> tuple[Tensor, Tensor]:
    """An FP8 copy and the inverses of its scales, powers of two. `groups`: each row has one for each."""
    dtype = formats.pick(wide, formats.fnuz()).dtype
    if block == WHOLE:
        copy = torch.randint(-2, 3, tuple(shape), device=device, dtype=torch.int8)
        return copy.to(F32).to(dtype), torch.full((1,), 0.5, device=device)
    copy = (3 * torch.randn(tuple(shape), device=device)).to(dtype)
    *outer, rows, columns = shape
    scales = (groups, rows) if groups else (*outer, ops.blocks(rows, block[0]), ops.blocks(columns, block[1]))
    return copy, 2.0 ** torch.randint(-6, 0, scales, device=device).to(F32)


def operands(matmul: Matmul, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a, b and the inverses of their scales. A gradient is in E5M2 where one scale covers it."""
    groups = len(matmul.ends) if matmul.gemm == "wgrad" else 0
    outer = (EXPERTS,) if matmul.ends and not groups else ()
    wide = matmul.kind.block == WHOLE and matmul.gemm != "fprop"
    a, a_inv = operand((matmul.m, matmul.k), matmul.blocks[0], wide, device, groups)
    b, b_inv = operand((*outer, matmul.n, matmul.k), matmul.blocks[1], False, device, groups)
    return a, b, a_inv, b_inv


def product(matmul: Matmul, a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor) -> Tensor:
    """The product of two copies, given in float32."""
    if not matmul.ends:
        x, y = (copy * ops.spread(inv, copy.shape, block)
                for copy, inv, block in zip((a, b), (a_inv, b_inv), matmul.blocks, strict=True))  # fmt: skip
        return x @ y.t()
    found = []
    for group, (start, end) in enumerate(itertools.pairwise((0, *matmul.ends))):
        if matmul.gemm == "wgrad":
            x, y = (copy[:, start:end] * inv[group].unsqueeze(1) for copy, inv in ((a, a_inv), (b, b_inv)))
        else:
            x, y = a[start:end] * a_inv[start:end], b[group] * b_inv[group]
        found.append(x @ y.t())
    return torch.stack(found) if matmul.gemm == "wgrad" else torch.cat(found)


def call(matmul: Matmul, given: tuple[Tensor, ...], dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    fast = matmul.gemm == "fprop"
    if matmul.ends:
        offs = torch.tensor(matmul.ends, dtype=torch.int32, device=given[0].device)
        return matmul.kind.call(schemas.GroupedProduct(*given, offs, dtype, fast, *matmul.blocks))
    return matmul.kind.call(schemas.ScaledProduct(*given, bias, dtype, fast, *matmul.blocks))


def judged(matmul: Matmul, wanted: Tensor, terms: Tensor, got: Tensor) -> tuple[bool, str]:
    """(whether it is right, "exact" or its distance from the noise). `terms`: the summed magnitudes."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False, f"{got.dtype} {list(got.shape)} instead of {wanted.dtype} {list(wanted.shape)}"
    if torch.equal(wanted, got):
        return True, "exact"
    signal, noise = wanted.to(F32), got.to(F32) - wanted.to(F32)
    right = noise.abs() <= 2.0**-10 * terms + 2 * torch.finfo(wanted.dtype).eps * signal.abs()
    db = 20 * (signal.norm(dtype=torch.float64) / noise.norm(dtype=torch.float64)).log10().item()
    wrong = right.numel() - int(right.sum())  # NaN among them
    fine = not wrong and matmul.kind.block != WHOLE
    return fine, f"{db:.1f} dB" + (f", {wrong} of {right.numel()} elements are wrong" if wrong else "")


def unusable(device: str) -> bool:
    """Whether an error has left the device unusable to this process."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def rows(size: str, device: str, begin: int) -> Iterator[dict[str, Any]]:
    """One for each call, from the `begin`-th on."""
    gpu, number = gpu_of(torch.device(device)), 0
    for matmul in matmuls(size, gpu):
        last = number + len(matmul.kind.outputs)
        if last <= begin:
            number = last
            continue
        torch.manual_seed(0)
        given = operands(matmul, device)
        a, b, *scales = (x.to(F32) for x in given)
        reference, terms = product(matmul, a, b, *scales), product(matmul, a.abs_(), b.abs_(), *scales)
        bias = torch.randint(-8, 9, (matmul.n,), device=device).to(F32)
        for dtype, biased in matmul.kind.outputs[max(0, begin - number) :]:
            added = bias.to(dtype) if biased else None
            wanted = (reference if added is None else reference + added.to(F32)).to(dtype)
            row = {
                "what": "matmul",
                "kind": matmul.kind.name,
                "gemm": matmul.gemm,
                "m": matmul.m,
                "n": matmul.n,
                "k": matmul.k,
            }
            row |= {"ends": matmul.ends, "out": str(dtype).removeprefix("torch."), "bias": biased}
            row |= {"chosen": matmul.chosen(gpu, scaled_mm.product_dtype(added, dtype)), "error": None}
            torch.full_like(wanted, torch.nan)  # freed at once: the result comes to lie there
            try:
                row["fine"], row["found"] = judged(matmul, wanted, terms, call(matmul, given, dtype, added))
            except Exception as error:
                row |= {"fine": False, "found": None, "error": one_line(error)}
            yield row
        number = last


# -- facts and one kernel --


def facts(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "what": "facts",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        **machine.commit(),
    }
    found["packages"] = {}
    for name in (*IMPORTED, *OTHERS):
        try:
            if name in IMPORTED:
                importlib.import_module(name)
            found["packages"][name] = importlib.metadata.version(name)
        except Exception as error:
            found["packages"][name] = one_line(error)
    found |= {
        "versions": machine.versions(),
        "cudnn": torch.backends.cudnn.version(),
        "clocks": machine.clocks(),
    }
    gpu = gpu_of(torch.device(device))
    if gpu is not None:
        known = catalog.of(torch.device(device, torch.cuda.current_device()))
        found |= {
            "device": vars(gpu),
            "target": gpu.target,
            "catalog": None if known is None else [known.name, known.origin],
        }
        found["free"] = torch.cuda.mem_get_info()[0]
        found["fp8"] = {"refusal": support.refusal([torch.device(device)]), "mx": support.has_mx(gpu)}
        found["fp8"] |= {"blocks": support.has_blocks(gpu), "grouped": gpu.architecture.grouped}
    return found


def kernel(device: str) -> dict[str, Any]:
    """One generated kernel against the eager operators. On a CPU, Triton's interpreter runs it."""
    family, began = FAMILIES["weight"], time.monotonic()
    found: dict[str, Any] = {"what": "kernel", "family": family.name, "error": None}
    try:
        torch.manual_seed(0)
        inputs = family.inputs(Source(*((1000, 272) if device == "cuda" else (33, 40)), device))
        wanted = family.function(*inputs)
        with interpreter() if device == "cpu" else contextlib.nullcontext():
            plan = Plan(family.function, fused=True, interpreted=device == "cpu")
            got = plan.first(*inputs)
        same = [
            torch.equal(*(x.view(BITS[x.element_size()]) for x in pair))
            for pair in zip(wanted, got, strict=True)
        ]
        wrong = [i for i, equal in enumerate(same) if not equal]
        found |= {"generated": plan.generated, "wrong": wrong, "fine": bool(plan.generated) and not wrong}
    except Exception as error:
        found |= {"fine": False, "error": one_line(error)}
    return found | {"seconds": round(time.monotonic() - began, 1)}


# -- what is printed --


def table(found: list[dict[str, Any]]) -> str:
    """How many of the calls of each kind and gemm are right, the worst of them, and each different failure
    once, those of calls that the package makes last."""
    cells: dict[tuple[str, str], dict[str, list]] = defaultdict(lambda: defaultdict(list))
    failures: dict[tuple[bool, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        row["name"] = row["out"] + (" + bias" if row["bias"] else "")
        cells[row["kind"], row["gemm"]][row["name"]].append(row)
        if not row["fine"]:
            failures[row["chosen"], row["kind"], re.sub(r"\d+", "N", row["error"] or "wrong")].append(row)

    def shown(rows: list) -> str:
        right = [row["found"] for row in rows if row["fine"]]
        worst = min((float(x.split()[0]) for x in right if x != "exact"), default=None)
        return (
            f"{len(right)}/{len(rows)} {'' if not right else 'exact' if worst is None else f'{worst:.0f} dB'}"
        ).strip()

    outs = list(dict.fromkeys(out for line in cells.values() for out in line))
    body = [
        [" ".join(what), *(shown(line[out]) if out in line else "" for out in outs)]
        for what, line in cells.items()
    ]
    parts = ["right results, and the worst of them", show.table(body, ["", *outs])]
    for (chosen, kind, _), rows in sorted(failures.items(), key=lambda item: item[0][0]):
        what = "a fault: the package makes" if chosen else "the package does not make"
        parts.append(f"{kind}, {what} these {len(rows)} calls: {(rows[0]['error'] or 'wrong results')[:200]}")
        shapes = [
            f"{r['gemm']} {r['m']}x{r['n']}x{r['k']} {r['name']}{'' if r['error'] else ', ' + r['found']}"
            for r in rows
        ]
        parts.append(f"    {'; '.join(shapes[:6])}{'; ...' if shapes[6:] else ''}")
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.probe", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--size", choices=tuple(SIZES), help="default: full on cuda, tiny on cpu")
    parser.add_argument(
        "--json",
        type=Path,
        required=True,
        metavar="PATH.jsonl",
        help="one line for each thing that was asked",
    )
    parser.add_argument(
        "--budget", type=float, default=60.0, metavar="SECONDS", help="begin nothing new then (default: 60)"
    )
    parser.add_argument("--begin", type=int, default=0, help=argparse.SUPPRESS)  # the calls before were made
    args = parser.parse_args(argv)
    size, end = args.size or ("full" if args.device == "cuda" else "tiny"), time.monotonic() + args.budget
    if not args.begin:
        for look in (facts, kernel):
            found = look(args.device)
            lines.add(args.json, found)
            print("\n".join(f"{key}: {value}" for key, value in found.items()), flush=True)
    number = args.begin
    for row in rows(size, args.device, args.begin):
        lines.add(args.json, row)
        number += 1
        left = end - time.monotonic()
        if row["error"] and unusable(args.device):
            print(f"the device is unusable to this process after: {row}", flush=True)
            again = f"--device {args.device} --size {size} --budget {left} --begin {number} --json".split()
            os.execv(sys.executable, [sys.executable, "-m", "benchmarks.probe", *again, str(args.json)])
        if left < 0:
            break
    made = lines.read(args.json)
    print(table([row for row in made if row["what"] == "matmul"]))
    of = sum(len(matmul.kind.outputs) for matmul in matmuls(size, gpu_of(torch.device(args.device))))
    print(f"{number} of {of} calls were made" + ("" if number == of else ": out of time"), flush=True)
    return 0 if all(row.get("fine", True) or row.get("chosen") is False for row in made) else 1


if __name__ == "__main__":
    sys.exit(main())
