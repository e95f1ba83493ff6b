"""Triton kernels as machine code, without a GPU: traced from a model for a described GPU, compiled by Triton,
and examined.

    for kernel in traced("llama", "delayed"):
        code = compile_kernel(kernel, kernel.configs[0], TARGETS["sm_90"])
        resources(code).spills
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8compile import compat
from fp8compile.codegen import triton_grouped, triton_kernels
from fp8compile.codegen.expressions import TRITON_DTYPE
from fp8compile.devices.formats import pick
from fp8compile.dryrun.fake_gpu import trace
from tests.support import hooks
from tests.support.gpu_steps import unallocated
from tests.support.harness import ALL_FP8
from tests.support.models import Ffn, GptLayer, LlamaLayer, Moe, Rotary

BF16 = torch.bfloat16
Config = tuple[int, int, int]

TARGETS = {
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
SHARED = {  # bytes of shared memory that a program may use
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}


# -- the models, at the sizes of the real ones: nothing runs and nothing is written, so size costs nothing --

# name: (builder, shape of the input); ViT has 197 tokens an image
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "llama": (LlamaLayer, (1, 8192, 4096)),
    "gpt2": (lambda: GptLayer(768, 12, causal=True), (16, 1024, 768)),
    "ffn": (Ffn, (16384, 4096)),
    "vit": (lambda: GptLayer(768, 12, causal=False), (64, 197, 768)),
    "moe": (lambda: Moe(2048, 768, 128, 8), (1, 8192, 2048)),
    "rotary": (lambda: Rotary(4096, 32, 8192), (1, 8192, 4096)),
}
RECIPES = ("delayed", "tensorwise")
HANDWRITTEN = {**vars(triton_kernels), **vars(triton_grouped)}
CONTRACTED = ("fp8_gemm", "fp8_grouped")  # whose products and sums may become one instruction


# -- which kernels a model gets --


@dataclasses.dataclass(frozen=True)
class Generated:
    """A kernel as it is launched: source, block sizes to choose from, types of arguments, constants."""

    model: str
    name: str
    source: str
    configs: tuple[Config, ...]
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """Source and constants: kernels with the same text are the same kernel."""
        return f"{self.source}{self.constants or ''}"

    @property
    def title(self) -> str:
        """What it computes: its name, without the hash of a generated source."""
        return self.name if self.name in HANDWRITTEN else self.name.rpartition("_")[0]

    @property
    def recipe(self) -> str:
        return self.model.partition(" ")[2]

    @property
    def form(self) -> str:
        """The text without name, comments, and numbers of several digits, which differ between sizes."""
        text = re.sub(r"#.*", "", self.source.replace(self.name, "kernel")) + str(self.constants)
        return re.sub(r"(?<![\w.])\d{2,}(?![\w.])", _size, text) + str([kind for _, kind in self.types])


def _size(number: re.Match[str]) -> str:
    """Triton vectorises multiples of 16 differently from other sizes."""
    return "multiple" if int(number[0]) % 16 == 0 else "size"


def traced(name: str, recipe: str, dynamic: bool = False, amd: bool = False) -> list[Generated]:
    """The kernels of a training step, each once, as launched on an H200. `amd`: with AMD's conversions."""
    build, shape = MODELS[name]
    model = unallocated(build, BF16)
    # weights are cast into both layouts
    options: dict[str, Any] = {"recipe": recipe.split()[0], "policy": ALL_FP8, "recast_weights": False}
    options["weight_tiles"] = "tiles" in recipe
    compiled = torch.compile(model, backend="fp8", dynamic=dynamic, options=options)
    x = torch.empty(shape, dtype=BF16, requires_grad=True)
    found: dict[str, Generated] = {}

    def noted(function: Any, arguments: dict[str, Any], constants: dict[str, Any], contracts: bool) -> None:
        jitted = function.fn
        assert contracts == (jitted.fn.__name__ in CONTRACTED), jitted.fn.__name__
        written = jitted.fn.__name__ not in HANDWRITTEN
        source = pathlib.Path(jitted.fn.__code__.co_filename).read_text() if written else jitted.src
        configs = tuple((c.kwargs["BLOCK_R"], c.kwargs["BLOCK_C"], c.num_warps) for c in function.configs)
        given = ((key, x.meta["val"] if isinstance(x, torch.fx.Node) else x) for key, x in arguments.items())
        types = tuple((key, _type(x.dtype) if isinstance(x, torch.Tensor) else "i32") for key, x in given)
        kernel = Generated(
            f"{name} {recipe}", jitted.fn.__name__, source, configs, types, tuple(constants.items())
        )
        found.setdefault(kernel.text, kernel)

    with hooks.launched(noted, amd):
        trace(lambda: compiled(x).sum().backward())
    return list(found.values())


def _type(dtype: torch.dtype) -> str:
    """Triton's name for a pointer to elements of this dtype."""
    name = TRITON_DTYPE[dtype].removeprefix("tl.")
    for long, short in (("bfloat", "bf"), ("float8", "fp8"), ("float", "fp"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return "*" + short + name.removeprefix(long)
    raise AssertionError(name)


def with_fnuz(kernel: Generated) -> Generated:
    """The same kernel in the FP8 encodings of gfx942."""
    source, types = kernel.source, dict(kernel.types)
    for ocp, fnuz in ((pick(wide, False), pick(wide, True)) for wide in (False, True)):
        old, new = (TRITON_DTYPE[form.dtype].removeprefix("tl.") for form in (ocp, fnuz))
        source = source.replace(f"tl.{old})", f"tl.{new})").replace(
            str(ocp.dtype)[6:] + "\n", str(fnuz.dtype)[6:] + "\n"
        )
        source = re.sub(rf"(?<![\w.]){re.escape(str(ocp.max))}(?![\w.])", str(fnuz.max), source)
        types = {
            key: kind.replace(old.replace("float", "fp"), new.replace("float", "fp"))
            for key, kind in types.items()
        }
    return dataclasses.replace(kernel, source=source, types=tuple(types.items()))


# -- compiling and reading --


@dataclasses.dataclass(frozen=True)
class Resources:
    """Of a compiled kernel: registers a thread, spilled bytes (AMD: registers), shared memory a block."""

    registers: int
    spills: int
    shared: int


def compile_kernel(kernel: Generated, config: Config, target: GPUTarget) -> Any:
    """Compiles a kernel for a target as Inductor would: pointers are declared multiples of 16."""
    jitted = HANDWRITTEN.get(kernel.name) or compat.triton.load_kernel(kernel.name, kernel.source)
    rows, columns, warps = config
    constants = {**dict(kernel.constants), "BLOCK_R": rows, "BLOCK_C": columns}
    return compile_function(jitted, dict(kernel.types), constants, target, num_warps=warps)


def compile_function(
    jitted: Any, types: dict[str, str], constants: dict[str, Any], target: GPUTarget, **options: int
) -> Any:
    """Compiles a JIT function: arguments of these types, the rest constants. Contracted as its launch is."""
    signature = {name: types.get(name, "constexpr") for name in jitted.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")
    }
    source = ASTSource(fn=jitted, signature=signature, constexprs=constants, attrs=aligned)
    chosen = {"enable_fp_fusion": jitted.fn.__name__ in CONTRACTED, **options}
    return triton.compile(source, target=target, options=chosen)


def compile_source(source: str, block: Config, target: GPUTarget, **options: int) -> Any:
    """Compiles a generated kernel with float inputs and one scale an output, by what its comments say."""
    function = compat.triton.load_kernel(re.findall(r"def (\w+)\(", source)[0], source)
    named = re.findall(r"# ([xy]\d+): (?:\w+ )?(\w+)", source)
    types = {key: _type(getattr(torch, dtype)) for key, dtype in named}
    types |= {
        key: "*fp32" if key.startswith("s") else "*i32"
        for key in function.arg_names
        if re.match(r"s\d|sums|amax", key)
    }
    constants = {"BLOCK_R": block[0], "BLOCK_C": block[1]}
    return compile_function(function, types, constants, target, num_warps=block[2], **options)


def resources(compiled: Any) -> Resources:
    """Reads the resources from the cubin (with cuobjdump), or from the metadata of AMD's code object.

    The object knows static shared memory, Triton's metadata the memory requested at the launch: the larger
    one counts.
    """
    if "hsaco" in compiled.asm:
        data = compiled.asm["hsaco"]
        spills = _metadata(data, "vgpr_spill_count") + _metadata(data, "sgpr_spill_count")
        shared = max(_metadata(data, "group_segment_fixed_size"), compiled.metadata.shared)
        return Resources(_metadata(data, "vgpr_count"), spills, shared)
    text = _printed(compiled, "cuobjdump", "--dump-resource-usage")
    counts = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    shared = max(counts["SHARED"], compiled.metadata.shared)
    return Resources(counts["REG"], counts["STACK"] + counts["LOCAL"], shared)


def sass_of(compiled: Any) -> str:
    """The machine code of a kernel for an NVIDIA GPU, as text."""
    return _printed(compiled, "nvdisasm", "-ndf", "-c")


def executed(sass: str, rounds: int) -> Counter[str]:
    """The instructions of a thread, by name: `rounds` times those of the longest loop, and the others once.
    What comes after the end of the program is calls, slow paths such as those of an exact division."""
    sass = re.split(r"^\s+/\*[0-9a-f]+\*/\s+EXIT\b", sass, maxsplit=1, flags=re.MULTILINE)[0]
    names: list[str] = []
    labels: dict[str, int] = {}
    longest = 0, 0
    for label, name, rest in re.findall(
        r"^(\.\w+):|^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)(.*);", sass, re.MULTILINE
    ):
        if label:
            labels[label] = len(names)
            continue
        names.append(name)
        if name == "BRA" and (back := re.search(r"\((\.\w+)\)", rest)) and back[1] in labels:
            longest = max(longest, (labels[back[1]], len(names)), key=lambda loop: loop[1] - loop[0])
    again = Counter(names[slice(*longest)])
    return Counter(names) + Counter({name: (rounds - 1) * count for name, count in again.items()})


def _printed(compiled: Any, tool: str, *arguments: str) -> str:
    """What a tool that comes with Triton prints of a kernel's machine code."""
    backend = importlib.import_module("triton.backends.nvidia")
    path = pathlib.Path(backend.__file__ or "").parent / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(path), *arguments, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _metadata(data: bytes, key: str) -> int:
    """A number in the metadata of an AMD code object, which are in MessagePack format."""
    name = f".{key}".encode()
    at = data.index(bytes([0xA0 | len(name)]) + name) + 1 + len(name)
    if data[at] < 0x80:
        return data[at]
    size = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}[data[at]]
    return int.from_bytes(data[at + 1 : at + 1 + size], "big")
