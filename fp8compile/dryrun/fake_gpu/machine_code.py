"""The Triton kernels in the code that Inductor wrote, compiled to machine code for the described GPU, and their instructions.

    calls(code)                the launches of Triton kernels in a graph's code, in order, with the numbers they pass
    work(call, capability)     the programs, warps and instructions of a launch, or None

Inductor's kernels and those of others are treated alike: the source is loaded as Inductor loads it, and the function is
compiled with the types, constants and options that Inductor's autotuner would give it, in the first of its configurations.
`ptxas` and `nvdisasm` come with Triton.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from .. import sass
from .step import Call, Launch


@dataclass(frozen=True)
class Work:
    """What a launch executes: so many programs of so many warps, each thread so many instructions, of which `special` go to the
    special function units (exponentials, reciprocals, square roots)."""

    programs: int
    warps: int
    instructions: int
    special: int


def unavailable() -> str | None:
    """Why machine code cannot be made or read here, or None."""
    try:
        for tool in ("ptxas", "nvdisasm"):
            _path(tool)
    except Exception as error:
        return f"needs Triton with ptxas and nvdisasm ({type(error).__name__})"
    return None


def _path(tool: str) -> str:
    return str(getattr(importlib.import_module("triton.knobs").nvidia, tool).path)  # raises where there is none


def calls(code: str) -> list[Call]:
    """The launches in the code of a graph, in the order in which it makes them."""
    tree = ast.parse(code)
    sources: dict[str, str] = {}
    made: list[Call] = []
    for node in _in_order(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _called(node.value) == "async_compile.triton":
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


def work(call: Call, capability: tuple[int, int]) -> Work | None:
    """What a launch executes. None if it is not known: a grid or a loop whose size is not in the code (dynamic sizes)."""
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
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages, "sanitize_overflow": False}
    options["debug"] = tuner.inductor_meta.get("assert_indirect_indexing", True)
    options |= {name: meta[name] for name in ("enable_fp_fusion", "launch_pdl") if name in meta}
    source = ASTSource(tuner.fn, meta["signature"], constants, meta["configs"][0])
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def disassembled(cubin: bytes) -> str:
    """The machine code as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_path("nvdisasm"), "-ndf", "-c", file.name], check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def callers() -> Iterator[list[str]]:
    """Notes the names of the scheduler's nodes that launch a generated kernel, in the order of the code. A node may launch
    none: what some reductions leave is added up by ATen."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.virtualized import V

    names: list[str] = []
    generate = PythonWrapperCodegen.generate_kernel_call

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        node = V.graph.scheduler.current_node
        names.append(node.get_name() if node is not None else "")
        return generate(self, *args, **kwargs)

    with mock.patch.object(PythonWrapperCodegen, "generate_kernel_call", noted):
        yield names


def attached(kernels: list[Launch], code: str, names: list[str]) -> list[Launch]:
    """The launches of a graph with their calls. `names`: the nodes of these calls (`callers`), which have the names of the
    launches. A launch without a call, or with several, stays as it is."""
    made = calls(code)
    if len(made) != len(names):
        return kernels
    by_name = {name: call for name, call in zip(names, made, strict=True) if names.count(name) == 1}
    return [dataclasses.replace(kernel, call=by_name.get(kernel.name)) for kernel in kernels]
