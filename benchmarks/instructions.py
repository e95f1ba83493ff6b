"""The least time of a generated kernel by its instructions: what its busiest SM needs to issue them.

    with noted() as names:
        step = fake_gpu.trace(...)
    calls = calls_of(step, names)      how the code launches each Triton kernel of the step
    seconds(call, device)              None where the instructions are not known

Kernels are compiled to machine code for the described GPU, Inductor's and those of others alike: the source
is loaded as Inductor loads it, and the function is compiled with the types, constants and options that
Inductor's autotuner would give it, in the first of its configurations. `ptxas` and `nvdisasm` come with
Triton; it takes about a CPU second for each source. `sass` counts the instructions, loops as often as they
run, however ptxas has unrolled them.

A scheduler issues an instruction of one warp in each clock, and an SM has four schedulers. Programs are
spread evenly, so the busiest scheduler issues those of

    warps = ceil(ceil(programs / SMs) * warps of a program / schedulers)
    clocks = warps * max(instructions of a thread, 8 * special ones)

Special instructions are exponentials, reciprocals and square roots (MUFU). An SM has 16 lanes for them, so
that a warp of 32 takes one of four parts of an SM for 8 clocks. (16 a clock and SM on an H100:
FlashAttention-3, arXiv:2407.08608, section 2.2. Other GPUs of NVIDIA: assumed.) Other units that are narrower
than the schedulers (integers, conversions, shared memory) are left out, and so are dependencies, latencies
and replays: a real kernel is slower. Clocks are at the described highest rate.

Not counted: kernels with loops or grids of a dynamic size, and those whose loop's end is not seen in the code
(one of 36 in each graph of two Llama layers, of 600 instructions). Autotuning may choose another
configuration than the first: of 41 kernels of a Llama layer with two, the other one needs fewer instructions
in 12, by at most 6%.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import math
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from fp8compile.devices.catalog import Device
from fp8compile.dryrun.fake_gpu import Step

from . import sass

SCHEDULERS, WARP, SPECIAL_LANES = 4, 32, 16  # of an SM, threads, of an SM


@dataclass(frozen=True)
class Call:
    """How generated code launches a Triton kernel: its source, and the arguments that are numbers."""

    name: str
    source: str
    arguments: tuple[int | None, ...]


@dataclass(frozen=True)
class Work:
    """What a launch executes: so many programs of so many warps, each thread so many instructions, of which
    `special` go to the special function units (exponentials, reciprocals, square roots)."""

    programs: int
    warps: int
    instructions: int
    special: int


def unavailable(device: Device) -> str | None:
    """Why no instructions can be counted for a device, or None."""
    if device.gfx:
        return "only machine code of NVIDIA GPUs is counted"
    if not device.clock_mhz:
        return f"the description of {device.name} has no clock"
    try:
        for tool in ("ptxas", "nvdisasm"):
            _path(tool)
    except Exception as error:
        return f"needs Triton with ptxas and nvdisasm ({type(error).__name__})"
    return None


def _path(tool: str) -> str:
    # raises where there is none
    return str(getattr(importlib.import_module("triton.knobs").nvidia, tool).path)


# -- times --


def seconds(call: Call, device: Device) -> float | None:
    """The least time to issue a launch's instructions, without the launch itself; None if unknown."""
    found = work(call, device.capability)
    return None if found is None else time_of(found, device)


def time_of(work: Work, device: Device) -> float:
    programs = math.ceil(work.programs / device.sms)
    warps = math.ceil(programs * work.warps / SCHEDULERS)
    special = WARP * SCHEDULERS // SPECIAL_LANES
    return warps * max(work.instructions, special * work.special) / (1e6 * device.clock_mhz)


# -- the code of a graph --


def calls(code: str) -> list[Call]:
    """The launches in the code of a graph, in the order in which it makes them."""
    tree = ast.parse(code)
    sources: dict[str, str] = {}
    made: list[Call] = []
    for node in _in_order(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and _called(node.value) == "async_compile.triton"
        ):
            target, text = node.targets[0], node.value.args[1]
            if isinstance(target, ast.Name) and isinstance(text, ast.Constant):
                sources[target.id] = str(text.value)
        elif isinstance(node, ast.Call) and (name := _called(node).removesuffix(".run")) in sources:
            made.append(Call(name, sources[name], tuple(_number(argument) for argument in node.args)))
    return made


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return ""


def _number(node: ast.AST) -> int | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int) else None


@contextlib.contextmanager
def noted() -> Iterator[dict[str, list[str]]]:
    """Notes, by the code of each graph that Inductor lowers, the names of the scheduler's nodes that launch a
    generated kernel, in the order of the code. A node may launch none: what some reductions leave is added up
    by ATen."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    names: dict[str, list[str]] = {}
    launching: list[str] = []
    generate, codegen = PythonWrapperCodegen.generate_kernel_call, GraphLowering.codegen

    def noted_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        node = V.graph.scheduler.current_node
        launching.append(node.get_name() if node is not None else "")
        return generate(self, *args, **kwargs)

    def noted_codegen(self: Any) -> Any:
        launching.clear()
        made = codegen(self)
        names[getattr(made[0], "value", str(made[0]))] = list(launching)
        return made

    with (
        mock.patch.object(PythonWrapperCodegen, "generate_kernel_call", noted_call),
        mock.patch.object(GraphLowering, "codegen", noted_codegen),
    ):
        yield names


def calls_of(step: Step, names: Mapping[str, list[str]]) -> dict[int, Call]:
    """The calls of the launches of a step, by the `id` of the launch. `names`: what `noted` has found, which
    are the names of the launches, too. A launch without a call, or with several, is not there."""
    found: dict[int, Call] = {}
    for graph in step.graphs:
        made, nodes = calls(graph.code), names[graph.code]
        if len(made) == len(nodes):
            by_name = {name: call for name, call in zip(nodes, made, strict=True) if nodes.count(name) == 1}
            found |= {id(kernel): by_name[kernel.name] for kernel in graph.kernels if kernel.name in by_name}
    return found


# -- machine code --


def work(call: Call, capability: tuple[int, int]) -> Work | None:
    """What a launch executes. None if it is not known: a grid or a loop whose size is not in the code
    (dynamic sizes)."""
    programs = _programs(call)
    counts = _executed(call.source, 10 * capability[0] + capability[1]) if programs is not None else None
    if programs is None or counts is None:
        return None
    return Work(programs, _autotuner(call.source).configs[0].num_warps, *counts)


def _programs(call: Call) -> int | None:
    """The number of programs of a launch."""
    from torch._inductor.runtime.triton_heuristics import GridExpr

    tuner = _autotuner(call.source)
    config = tuner.configs[0]
    fixed = {name for name, kind in tuner.triton_meta["signature"].items() if kind == "constexpr"}
    own = getattr(tuner, "custom_kernel", False)  # constants of Inductor's own kernels are passed, too
    names = [name for name in tuner.fn.arg_names if name not in config.kwargs and not (own and name in fixed)]
    names += tuner.inductor_meta.get("extra_launcher_args", ())
    if len(names) != len(call.arguments):
        return None
    given = {name: value for name, value in zip(names, call.arguments, strict=True) if value is not None}
    try:
        x, y, z = GridExpr.from_meta(tuner.inductor_meta, config).eval_slow({**config.kwargs, **given})
    except NameError:  # a size that the code computes
        return None
    return x * y * z


@functools.cache
def _autotuner(source: str) -> Any:
    """Inductor's object for a kernel. Its module asks for a GPU when it is loaded."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    with mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None):
        module = PyCodeCache.load(source)
    return next(value for value in vars(module).values() if isinstance(value, CachingAutotuner))


@functools.cache
def _executed(source: str, architecture: int) -> tuple[int, int] | None:
    """The instructions of a thread, all and special ones."""
    counts = sass.executed(disassembled(compiled(_autotuner(source), architecture).asm["cubin"]))
    return None if counts is None else (sum(counts.values()), counts["MUFU"])


def compiled(tuner: Any, architecture: int) -> Any:
    """Triton's object for a kernel of Inductor's, as `CachingAutotuner._precompile_config` makes it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    meta, config = tuner.triton_meta, tuner.configs[0]
    constants = {**meta["constants"], **config.kwargs}
    options: dict[str, Any] = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "sanitize_overflow": False,
    }
    options["debug"] = tuner.inductor_meta.get("assert_indirect_indexing", True)
    options |= {name: meta[name] for name in ("enable_fp_fusion", "launch_pdl") if name in meta}
    source = ASTSource(tuner.fn, meta["signature"], constants, meta["configs"][0])
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def disassembled(cubin: bytes) -> str:
    """The machine code as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [_path("nvdisasm"), "-ndf", "-c", file.name], check=True, capture_output=True, text=True
        ).stdout
