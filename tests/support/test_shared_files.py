"""C++ kernels that share files: fewer files, and the bits of kernels with a file each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.utils import fresh_cache

from tests.support import shared_files
from tests.support.harness import noise
from tests.support.models import Mlp, make

KERNEL = """#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0)
{
    #pragma GCC ivdep
    for (int i = 0; i < 1; i++) (void)in_ptr0;
}
"""


@contextlib.contextmanager
def counted(cache: Path) -> Iterator[list[int]]:
    """How many files are compiled inside, in a cache of its own."""
    files: list[int] = []
    cache.mkdir(exist_ok=True)
    with fresh_cache(dir=str(cache)):
        yield files
        files.append(len(list(cache.rglob("*.main.cpp"))))


def trained(**how: bool) -> list[Tensor]:
    """Outputs and gradients of three steps: cold, and two warm ones."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make(Mlp)
    compiled = torch.compile(model, backend="fp8", **how)
    found = []
    for step in range(3):
        model.zero_grad()
        out = compiled(noise(64 + 16 * step if how.get("dynamic") else 64, 128))
        out.square().sum().backward()
        found += [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return found


@pytest.mark.weekly
@pytest.mark.compiled
@pytest.mark.compat
@pytest.mark.parametrize("dynamic", [False, True])
def test_shared_files_are_fewer_and_compute_the_same(tmp_path: Path, dynamic: bool) -> None:
    """With symbolic sizes, kernels take numbers beside their tensors. As in a second process, all is loaded from the cache
    then."""
    with counted(tmp_path / "shared") as shared, torch._inductor.config.patch(compile_threads=2):
        together = trained(dynamic=dynamic)
        CppPythonBindingsCodeCache.cache_clear()
        before = len(list(tmp_path.rglob("*.so")))
        with mock.patch("torch._inductor.cpp_builder.run_compile_cmd", side_effect=AssertionError("compiles")):
            again = trained(dynamic=dynamic)
        assert before and before == len(list(tmp_path.rglob("*.so")))
    with counted(tmp_path / "apart") as apart, mock.patch.object(shared_files, "ON", False):
        alone = trained(dynamic=dynamic)
    few = apart[0] // shared_files.MOST + 2  # each half has a file that is not full
    assert apart[0] >= 6 and shared[0] <= few, (apart, shared)
    assert len(together) == len(alone) == len(again) == 15
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(together, alone, again, strict=True))


def test_what_may_share_a_file() -> None:
    assert shared_files._may_share(KERNEL)
    assert not shared_files._may_share("#define WIDE 1\n" + KERNEL)  # others in the file would see it
    assert not shared_files._may_share("#pragma GCC optimize(\"fast-math\")\n" + KERNEL)
    assert shared_files._may_share(KERNEL.replace("GCC ivdep", "omp simd"))
    assert not shared_files._may_share(KERNEL + KERNEL)
    assert not shared_files._may_share(KERNEL.replace("kernel(", "other("))
    assert not shared_files._may_share(KERNEL + 'extern "C" int helper();\n')


def test_a_source_of_two_kernels() -> None:
    helper = KERNEL.replace("\nextern", "\n#include <omp.h>\nstatic int helper() { return 1; }\nextern", 1)
    source, bindings = shared_files.together([(("const float*",), KERNEL), (("const float*", "int64_t"), helper)])
    assert source.count("#include") == 2 and source.index("#include <omp.h>") < source.index("namespace")
    assert source.count("void kernel(") == 2 and 'extern "C"' not in source
    assert "kernel_1::kernel(parse_arg<float*>(args, 0), parse_arg<int64_t>(args, 1))" in bindings


def as_an_array(template: str) -> str:
    """Inductor's bindings as torch 2.15 writes them: arguments come as an array, not as a tuple."""
    for old, new in (
        ("PyObject* args, size_t n", "PyObject* const* args, size_t n"),
        ("PyTuple_GET_ITEM(args, n)", "args[n]"),
        ("PyObject* self, PyObject* args", "PyObject* self, PyObject* const* args, Py_ssize_t nargs"),
        ("!PyTuple_CheckExact(args)", "false"),
        ("PyTuple_GET_SIZE(args)", "nargs"),
        ("{entry_func}_py, METH_VARARGS", "reinterpret_cast<PyCFunction>((void (*)()){entry_func}_py), METH_FASTCALL"),
    ):
        template = template.replace(old, new)
    return template


@pytest.mark.slow
@pytest.mark.compat
@pytest.mark.parametrize("array", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_errors_of_a_kernel_are_those_of_python(tmp_path: Path, array: bool) -> None:
    """A call with too few arguments, and an exception in a kernel."""
    throws = KERNEL.replace("#pragma GCC ivdep", 'if (in_ptr0 != nullptr) throw std::runtime_error("by zero");')
    given = CppPythonBindingsCodeCache.suffix_template
    template = mock.patch.object(CppPythonBindingsCodeCache, "suffix_template", as_an_array(given) if array else given)
    with template, fresh_cache(dir=str(tmp_path)):
        assert array == ("METH_FASTCALL" in shared_files.together([((), KERNEL)])[1]) or "METH_FASTCALL" in given
        kernels = [shared_files._Waiting(("const float*",), source) for source in (KERNEL, throws)]
        one, two = shared_files._load(kernels, None)()
        assert one(torch.ones(1)) is None
        with pytest.raises(RuntimeError, match="requires 1 args"):
            one()
        with pytest.raises(RuntimeError, match="by zero"):
            two(torch.ones(1))
