"""Measure generated kernels: `python -m benchmarks.kernels --family gelu swiglu --shape 32768x4096`.

Each family (`families.FAMILIES`) is compiled twice: with generated kernels ("fp8"), and without ("inductor":
the same graph, lowered to ATen and left to Inductor). Both are compared with a device copy of as many bytes.
GB/s are bytes that must move (each input read once, each output written once) over the median time of all
launches, including the zeroing of amaxes and the second stage of column sums. L2 is flushed before each run.
Before a plan is timed, its outputs are compared with those of the eager operators.

`--static` measures nothing: it counts the bytes and kernels of both compiled plans for a described H200. On a
CPU, generated kernels are interpreted at tiny sizes: outputs are compared and bytes are counted, but nothing
is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule

from fp8compile import compat
from fp8compile.codegen import launch
from fp8compile.dryrun import fake_gpu, kernel_classes
from fp8compile.passes.pipeline import run_post_grad
from fp8compile.runtime.interpreter import Eager, boxed

from . import machine, results, tables
from .families import FAMILIES, Family, Source, must_move
from .options import Parser, destination
from .pool import exit_on_sigterm
from .static import DEVICE
from .worker import one_line

SHAPES = {"full": ("32768x4096", "8192x14336"), "tiny": ("48x64", "33x40")}
PLANS = ("fp8", "inductor")
GOAL = 0.9  # of a copy's bandwidth
RUNS = 50  # of each plan, timed
# Outputs may differ from those of the eager operators where a bfloat16 or a sum is rounded differently. The
# error of the whole output must be smaller than that of one wrong element in a thousand. Each element may
# differ by at most the distance to an FP8 neighbour (a quarter for E5M2).
LEAST_DB = 30.0
NEIGHBOUR, NOTHING = 0.26, 0.02  # allowed error: a part of the element, plus a part of the root mean square


class Wrong(Exception):
    """A plan computes wrong outputs, or launches the wrong kind of kernels."""


# -- compiling --


class Plan:
    """A function compiled by Inductor, with or without generated kernels. `generated`: names of the generated
    kernels that it launches."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], fused: bool, interpreted: bool):
        self.fused, self.interpreted = fused, interpreted
        self.generated: list[str] = []
        torch._dynamo.reset()
        self.compiled = torch.compile(function, backend=self._backend, dynamic=False, fullgraph=True)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.compiled(*inputs)

    def first(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The call that compiles."""
        with contextlib.nullcontext() if self.fused else mock.patch.object(launch, "DEVICES", ()):
            return self(*inputs)

    def _backend(self, gm: GraphModule, inputs: Sequence[Tensor]) -> Any:
        # no cache: a cached graph could come from another plan
        lower = compat.inductor.GraphPass(self._lower, f"kernels-{self.fused}")
        patches = {"post_grad_custom_post_pass": lower, "fx_graph_cache": False}
        return compat.inductor.compile_fx(gm, inputs, self._compile, patches)

    def _compile(self, gm: GraphModule, inputs: Sequence[Tensor], **kwargs: Any) -> Any:
        if not self.interpreted:
            return compat.inductor.compile_inner(gm, inputs, **kwargs)
        self._lower(gm.graph)
        gm.recompile()
        return boxed(Eager(gm))

    def _lower(self, graph: Graph) -> None:
        run_post_grad(graph)
        self.generated += [_name(compat.triton.launched(node)[0]) for node in compat.triton.launches(graph)]


def _name(function: Any) -> str:
    while hasattr(function, "fn"):  # an autotuner wraps a JIT function, which wraps a Python function
        function = function.fn
    return getattr(function, "name", None) or function.__name__


def interpreter() -> contextlib.AbstractContextManager[Any]:
    """Inside the context, CPU graphs get generated kernels, which the tests' interpreter runs. Needs a
    checkout: an installed package has no tests."""
    from tests.support.interpreter import kernels_on_cpu

    return kernels_on_cpu()


# -- checking and timing --


def compare(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> None:
    """Raises `Wrong` if an output of `got` differs too much from `wanted`."""
    for i, (a, b) in enumerate(zip(wanted, got, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise Wrong(f"output {i} is {b.dtype} {list(b.shape)} instead of {a.dtype} {list(a.shape)}")
        signal = a.to(torch.float32, copy=True)
        noise = b.to(torch.float32).sub(signal).abs_()
        power = signal.square().sum(dtype=torch.float64).item()
        limit = signal.abs_().mul_(NEIGHBOUR).add_(NOTHING * math.sqrt(power / max(1, a.numel())))
        wrong = int((~(noise <= limit)).sum())  # of NaN, too
        if wrong:
            raise Wrong(f"output {i}: {wrong} of {a.numel()} elements are not those of the eager operators")
        error = noise.square_().sum(dtype=torch.float64).item()
        if error > power * 10 ** (-LEAST_DB / 10):
            found = 10 * math.log10(power / error)
            raise Wrong(f"output {i} is {found:.0f} dB over its error, not {LEAST_DB:.0f}")


class Device:
    """Times calls on a CUDA device."""

    def __init__(self, runs: int, device: str = "cuda", flush: int = 512 << 20):
        self.runs, self.device = runs, device
        self.flush = torch.empty(flush, dtype=torch.uint8, device=device)  # several times any L2
        self.copies: dict[int, float] = {}
        self.flushes = {launch.name for launch in self.profiled(lambda: None)}

    def milliseconds(self, call: Callable[[], Any]) -> list[float]:
        for _ in range(5):
            self.flush.zero_()
            call()
        torch.cuda.synchronize()
        # launches queue up meanwhile, so that the device never waits for the CPU
        torch.cuda._sleep(20_000_000)
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.runs)]
        for start, end in marks:
            self.flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in marks]

    def copy_gb_per_s(self, size: int) -> float:
        """GB/s of a copy that moves `size` bytes: it reads half of them and writes half."""
        if size not in self.copies:
            source, target = (torch.zeros(size // 2, dtype=torch.uint8, device=self.device) for _ in range(2))
            ms = statistics.median(self.milliseconds(lambda: target.copy_(source)))
            self.copies[size] = 2 * (size // 2) / ms / 1e6
        return self.copies[size]

    def profiled(self, call: Callable[[], Any], calls: int = 3) -> list[kernel_classes.MeasuredKernel]:
        """Each kernel that the device ran."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(calls):
                self.flush.zero_()
                call()
            torch.cuda.synchronize()
        return kernel_classes.launches(profile)

    def kernels(self, call: Callable[[], Any]) -> list[dict[str, Any]]:
        """The kernels that a call launches, with the median time of each."""
        times: dict[str, list[float]] = {}
        for name, microseconds, _ in self.profiled(call):
            if name not in self.flushes:
                times.setdefault(name, []).append(microseconds)
        medians = {name: round(statistics.median(x), 2) for name, x in times.items()}
        return [{"name": name[:200], "us": us, "times": len(times[name])} for name, us in medians.items()]

    def timed(self, call: Callable[[], Any], size: int) -> dict[str, Any]:
        times = self.milliseconds(call)
        ms = statistics.median(times)
        speed, copy = size / ms / 1e6, self.copy_gb_per_s(size)
        return {
            "ms": {"median": ms, "min": min(times), "max": max(times), "runs": len(times)},
            "gb_per_s": speed,
            "copy_gb_per_s": copy,
            "share": speed / copy,
            "kernels": self.kernels(call),
        }


# -- rows --


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.cuda = args.device == "cuda" and not args.static
        self.deadline = time.monotonic() + (args.budget or math.inf)
        self.timer = Device(RUNS) if self.cuda else None
        self.skipped: list[str] = []  # points that are not done
        self.rows: list[dict[str, Any]] = []
        self.session = results.Session("benchmarks.kernels", args.given)

    def run(self, ready: Callable[[dict[str, Any]], None]) -> None:
        """Measures all rows. After each family and shape, `ready` gets the result so far."""
        points = [(family, shape) for shape in self.args.shape for family in self.args.family]
        self.skipped = [f"{name} {shape}" for name, shape in points]
        ready(self.result())
        for name, shape in points:
            if time.monotonic() > self.deadline:
                break
            found = self.rows_of(FAMILIES[name], shape)
            self.rows += found
            self.skipped = self.skipped[1:]
            for row in found:
                print(f"{row['point']} {row['arm']}: {row['error'] or 'fine'}", flush=True)
            ready(self.result())

    def rows_of(self, family: Family, shape: str) -> list[dict[str, Any]]:
        """The rows of both plans."""
        rows, columns = map(int, shape.split("x"))
        found = []
        for plan in PLANS:
            row: dict[str, Any] = {"arm": plan, "kind": "kernels", "point": f"{family.name} {shape}"}
            row |= {"error": None, "family": family.name, "shape": [rows, columns]}
            try:
                row |= (self.estimated if self.args.static else self.measured)(family, plan, rows, columns)
            except Exception as error:
                row["error"] = one_line(error)
            found.append(row)
        return found

    def measured(self, family: Family, plan: str, rows: int, columns: int) -> dict[str, Any]:
        torch.manual_seed(0)
        inputs = family.inputs(Source(rows, columns, self.args.device))
        wanted = family.function(*inputs)
        size = must_move(family, inputs, wanted)
        made = Plan(family.function, plan == "fp8", interpreted=not self.cuda)
        compare(wanted, made.first(*inputs))
        compare(wanted, made(*inputs))  # the first call may have tuned
        if (plan == "fp8") != bool(made.generated):
            raise Wrong(f"generated kernels: {', '.join(made.generated) or 'none'}")
        row = {"bytes": size, "checked": True, "generated": made.generated}
        nothing = dict.fromkeys(("ms", "gb_per_s", "copy_gb_per_s", "share", "kernels"))
        return row | (self.timer.timed(lambda: made(*inputs), size) if self.timer else nothing)

    def estimated(self, family: Family, plan: str, rows: int, columns: int) -> dict[str, Any]:
        source = Source(rows, columns, "cpu", empty=True)
        with FakeTensorMode():
            inputs = family.inputs(source)
            size = must_move(family, inputs, family.function(*inputs))
        made = Plan(family.function, plan == "fp8", interpreted=False)
        step = fake_gpu.trace(lambda: made.first(*family.inputs(source)))
        if not step.kernels:
            raise RuntimeError("nothing was compiled")
        figures = {"gb": sum(k.bytes for k in step.kernels) / 1e9, "kernels": len(step.kernels)}
        return {"bytes": size, "static": figures, "generated": made.generated}

    def result(self) -> dict[str, Any]:
        args = self.args
        self.session.clocks["after"] = machine.clocks()
        described_device = {"name": DEVICE, "memory": 0, "capability": None}
        return {
            **self.session.common,
            "case": "kernels",
            "name": "kernels" if args.complete else "kernels:part",
            "title": "casts with their producers",
            "variant": {},
            "size": args.size,
            "static": args.static,
            "device": described_device if args.static else machine.describe_device(args.device),
            "settings": {"runs": RUNS, "skipped_points": self.skipped, "seconds": self.session.seconds()},
            "goal": None if args.static else GOAL,
            "rows": self.rows,
        }


# -- command line --


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="benchmarks.kernels", description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--family", nargs="+", action="extend", metavar="NAME", help=f"default: all: {', '.join(FAMILIES)}")
    add("--shape", nargs="+", action="extend", metavar="RxC", help=f"default: {' '.join(SHAPES['full'])}")
    args = parser.parse(argv)
    args.complete = not args.family and not args.shape
    args.family, args.shape = args.family or [*FAMILIES], args.shape or [*SHAPES[args.size]]
    for name in args.family:
        if name not in FAMILIES:
            parser.error(f"no family {name!r} (there are: {', '.join(FAMILIES)})")
    for shape in args.shape:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape):
            parser.error(f"--shape {shape}: rows and columns are written 32768x4096")
    if args.static and fake_gpu.unavailable():
        parser.error(f"--static: {fake_gpu.unavailable()}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    exit_on_sigterm()
    interpreted = args.device == "cpu" and not args.static
    bench = Bench(args)
    try:
        with interpreter() if interpreted else contextlib.nullcontext():
            bench.run(lambda so_far: results.write(so_far, destination(args, so_far)))
    finally:  # also if it is stopped
        result = bench.result()
        print(f"\n{tables.text(result)}\n{destination(args, result)}", flush=True)
    return 0 if any(not row["error"] for row in result["rows"]) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
