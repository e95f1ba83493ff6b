"""How long compiling takes, as ratios to Inductor without us: `python -m benchmarks.compile_time`.

    described   tracing and code generation of a training step of `--layers` layers for a described H200, and
                the Triton kernels that a compilation would hand to Triton: distinct sources, each of which is
                compiled once
    cpu         the first training step on this machine, cold (empty caches) and warm (a new process, the same
                caches)

Times are CPU seconds of the process and of its children (the C++ compiler), because a machine may be shared.
Each figure has a process of its own. Kernels are compiled by one process. In both cases a small graph is
compiled before, so that imports and Inductor's own patterns do not count. On this machine, `import_s` is what
a process pays once for importing our backend.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from .pool import ROOT, environment
from .show import table

ARMS = "bf16,fp8-delayed,fp8-tensorwise,fp8-rowwise"


def cpu_seconds() -> tuple[float, float]:
    """CPU seconds of this process, and of the children that it has waited for."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime


def described(arm: str, layers: int) -> dict[str, Any]:
    """Compile `layers` Llama layers, whole, for a described H200."""
    import torch

    from fp8compile.dryrun import fake_gpu

    from . import arms
    from .models import LLAMA_1B, FfnBlock, LlamaBlock, Stack, unallocated
    from .worker import TRITON_SOURCE

    def compiled(build: Callable[[], Any]) -> Any:
        model = unallocated(build, torch.bfloat16)
        arms.apply(arms.ARMS[arm], model, arms.settings(arms.ARMS[arm], 1, interpreted=False), each=False)
        x = torch.empty(2, 4096, LLAMA_1B.width, dtype=torch.bfloat16, requires_grad=True)
        return fake_gpu.trace(lambda: model(x))

    compiled(lambda: Stack(lambda: FfnBlock(LLAMA_1B.width), 1))
    began = sum(cpu_seconds())
    step = compiled(lambda: Stack(lambda: LlamaBlock(LLAMA_1B, 4096), layers))
    took = sum(cpu_seconds()) - began
    sources = {source for _, source in TRITON_SOURCE.findall(step.code)}
    return {"cpu_s": took, "launches": len(step.kernels), "kernels": len(sources)}


def first_step(arm: str, layers: int) -> dict[str, Any]:
    """The first training step on this machine."""
    import torch

    from . import arms
    from .models import LlamaBlock, LlamaShape, Stack, materialise

    shape = LlamaShape(layers=layers, width=256, heads=4, kv_heads=2, hidden=512)
    model = materialise(lambda: Stack(lambda: LlamaBlock(shape, 128), layers), "cpu", torch.bfloat16)
    x = torch.randn(2, 128, shape.width, dtype=torch.bfloat16, requires_grad=True)
    # imports, and Inductor's own patterns
    torch.compile(torch.square)(torch.ones(8, requires_grad=True)).sum().backward()
    start = sum(cpu_seconds())
    if arms.ARMS[arm].kind == "fp8":
        importlib.import_module("fp8compile.backend")
    before = cpu_seconds()
    arms.apply(arms.ARMS[arm], model, arms.settings(arms.ARMS[arm], 1, interpreted=False), each=False)
    model(x).backward()
    own, children = (after - start for after, start in zip(cpu_seconds(), before, strict=True))
    return {"cpu_s": own + children, "python_s": own, "import_s": sum(before) - start}


def measured(what: str, arm: str, layers: int, cache: str) -> dict[str, Any]:
    """The result of a process of its own."""
    env = environment(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1", TORCHINDUCTOR_CACHE_DIR=cache)
    command = [sys.executable, "-m", "benchmarks.compile_time", "--one", what, arm, str(layers)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{what} {arm}, {layers} layers: failed\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def shown(title: str, rows: list[dict[str, Any]]) -> None:
    cells = [[f"{x:.2f}" if isinstance(x, float) else x for x in row.values()] for row in rows]
    print(f"### {title}\n\n{table(cells, list(rows[0]), markdown=True)}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.compile_time", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--arms", default=ARMS, help=f"which are compared with the first one (default: {ARMS})")
    add("--layers", default="4,8,16", help="of the described model (default: 4,8,16)")
    add("--cpu-layers", type=int, default=2, help="of the model on this machine (default: 2)")
    add("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        what, arm, layers = given.one
        print(json.dumps({"described": described, "cpu": first_step}[what](arm, int(layers))))
        return
    from . import arms

    names = [arm.name for arm in arms.parse_arms(given.arms)]
    rows: list[dict[str, Any]] = []
    for layers in map(int, given.layers.split(",")):
        for name in names:
            with tempfile.TemporaryDirectory() as cache:
                made = measured("described", name, layers, cache)
            first = next((row for row in rows if row["layers"] == layers), made)
            rows.append({"layers": layers, "arm": name, **made, "ratio": made["cpu_s"] / first["cpu_s"]})
    shown("Described H200: tracing and code generation", rows)
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = (measured("cpu", name, given.cpu_layers, cache) for _ in range(2))
        first = rows[0] if rows else {"cold_s": cold["cpu_s"], "warm_s": warm["cpu_s"]}
        row = {"arm": name, "import_s": warm["import_s"], "of_it_python_s": cold["python_s"]}
        row |= {"cold_s": cold["cpu_s"], "warm_s": warm["cpu_s"]}
        over = {part: row[f"{part}_s"] / first[f"{part}_s"] for part in ("cold", "warm")}
        rows.append({**row, **over})
    shown(f"This machine: first training step, {given.cpu_layers} layers", rows)


if __name__ == "__main__":
    main()
