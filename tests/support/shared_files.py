"""C++ kernels of one graph, several to a file: tests that compile for the CPU take half the time.

Inductor gives each C++ kernel a file of its own, of which the compiler spends half a second on the headers and the bindings.
After `install()`, up to `MOST` kernels of a graph share a file: the same sources, with the same flags, each in a namespace of
its own.

    cpp_fused_0 = async_compile.cpp_pybinding([...], source)     namespace kernel_0 { source }  kernels() returns
    cpp_fused_1 = async_compile.cpp_pybinding([...], source)     namespace kernel_1 { source }  (kernel_0, kernel_1)
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST = 8  # few, so that several files can be compiled at a time
ON = True

_ENTRY = re.compile(r'extern\s+"C"\s+void\s+kernel\s*\(')
_INCLUDE = re.compile(r"^\s*#\s*include\b.*\n", re.MULTILINE)
_DIRECTIVE = re.compile(r"^\s*#(?!pragma +(?:GCC +)?(?:ivdep|unroll|omp)\b)", re.MULTILINE)  # those are for one loop
_BINDING = """
static PyObject* {name}_py({signature}) {{
    try {{
        if ({given} != {count}) [[unlikely]]
            throw std::runtime_error("requires {count} args");
        {name}::kernel({parsed});
        Py_RETURN_NONE;
    }} catch (std::exception const& e) {{
        PyErr_SetString(PyExc_RuntimeError, e.what());
    }} catch (...) {{
        PyErr_SetString(PyExc_RuntimeError, "unhandled error");
    }}
    return nullptr;
}}
static PyMethodDef {name}_method = {{
    "kernel", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>({name}_py)), {flags}, ""}};
"""
# how Inductor's `parse_arg` takes arguments: (signature, number of arguments, flags of the method)
_TUPLE = ("PyObject*, PyObject* args", "PyTuple_GET_SIZE(args)", "METH_VARARGS")
_ARRAY = ("PyObject*, PyObject* const* args, Py_ssize_t count", "count", "METH_FASTCALL")  # torch 2.15


@dataclass
class _Waiting:
    """Stands in a generated module where a kernel will be."""

    types: tuple[str, ...]
    source: str


def together(types_and_sources: list[tuple[tuple[str, ...], str]]) -> tuple[str, str]:
    """A source with all these kernels, and the source of the Python functions that call them."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    array = "PyObject* const* args" in CppPythonBindingsCodeCache.suffix_template
    signature, given, flags = _ARRAY if array else _TUPLE
    includes: dict[str, None] = {}
    bodies, bindings, made = [], [], []
    for i, (types, source) in enumerate(types_and_sources):
        name = f"kernel_{i}"
        includes.update(dict.fromkeys(line.strip() for line in _INCLUDE.findall(source)))
        body = _ENTRY.sub("void kernel(", _INCLUDE.sub("", source))
        bodies.append(f"namespace {{ namespace {name} {{\n{body}\n}} }}\n")
        parsed = ", ".join(f"parse_arg<{kind.replace('const ', '')}>(args, {n})" for n, kind in enumerate(types))
        how = {"signature": signature, "given": given, "flags": flags}
        bindings.append(_BINDING.format(name=name, count=len(types), parsed=parsed, **how))
        made.append(f"PyCFunction_New(&{name}_method, nullptr)")
    entry = f'static PyObject* every() {{ return Py_BuildValue("({"N" * len(made)})", {", ".join(made)}); }}\n'
    return "\n".join([*includes, *bodies]), "".join(bindings) + entry


def _may_share(source: str) -> bool:
    """Is this a kernel as Inductor writes it, with nothing in it that would have an effect on others in its file?"""
    alone = len(_ENTRY.findall(source)) == 1 and source.count('extern "C"') == 1
    return alone and not _DIRECTIVE.search(_INCLUDE.sub("", source))


def _load(kernels: list[_Waiting], submit: Callable | None) -> Callable[[], tuple]:
    """Begin to compile kernels in one file; call the result for their Python functions."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    source, bindings = together([(x.types, x.source) for x in kernels])
    escaped = bindings.replace("{", "{{").replace("}", "}}")
    fields = {"entry_function": "kernels", "call_entry_function": "return every({});", "extra_parse_arg": escaped}
    cache = type("KernelsOfAFile", (CppPythonBindingsCodeCache,), fields)
    get = cache.load_pybinding_async([], source, submit_fn=submit)  # type: ignore[attr-defined]
    return lambda: get()()


@functools.cache
def install() -> None:
    """From here on, in this process."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads, kernel_code_log

    own_binding, own_wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        if not ON or not _may_share(source_code):
            return own_binding(self, argtypes, source_code)
        kernel_code_log.info("CPP+Bindings Kernel:\n%s", source_code)
        return _Waiting(tuple(argtypes), source_code)

    def wait(self: Any, scope: dict[str, Any]) -> None:
        names = [name for name, value in scope.items() if isinstance(value, _Waiting)]
        submit = self.submit if get_compile_threads() > 1 else None
        groups = [names[i : i + MOST] for i in range(0, len(names), MOST)]
        files = [(group, _load([scope[name] for name in group], submit)) for group in groups]
        for group, functions in files:
            scope.update(zip(group, functions(), strict=True))
        own_wait(self, scope)

    AsyncCompile.cpp_pybinding, AsyncCompile.wait = cpp_pybinding, wait  # type: ignore[method-assign]
