"""The process, and how graphs run."""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .base import Patched, noting
from .kernels import lowered_as_for_a_gpu

NARROW = (torch.float32, torch.bfloat16, torch.float16)


def forget() -> None:
    """Forget what this process keeps from one compilation or training to the next, Dynamo's code included."""
    from fp8compile import backend, compat

    torch._dynamo.reset()
    compat.flat.on_refusal("fp8", backend._refuse)  # as in a process that has just imported the backend
    forget_trainings()


def forget_trainings() -> None:
    """The same, but compiled code stays, and so do its reports."""
    from fp8compile import logs, process
    from fp8compile.runtime import optimizer_steps, probe

    # measurements that were asked for, and whose models no collection has freed yet
    process.of(probe.Active).clear()
    with contextlib.suppress(ModuleNotFoundError):  # in a copy without this feature
        from fp8compile.features.delayed.arena import Arenas

        # forwards without a backward hold nothing back, and arenas of process groups are forgotten
        arenas = process.of(Arenas)
        arenas.clear()
        arenas.kept.clear()
    # optimizers that no collection has freed yet: a model that had none follows the others
    optimizer_steps.STEPS.of.clear()
    process.of(logs.Said).clear()  # messages that are logged once a process


@contextlib.contextmanager
def strictly(shares: bool = False) -> Iterator[None]:
    """Inside, random numbers are fixed, a fall back to eager is an error, AOTAutograd's cache is off
    (`FP8COMPILE_TEST_CACHE=1` leaves it on), and Dynamo collects no garbage after each compilation. `shares`:
    code stays for many tests."""
    settings = {"fail_on_recompile_limit_hit": True, "suppress_errors": False, "run_gc_after_compile": False}
    if shares:
        settings |= {"recompile_limit": 1000, "accumulated_recompile_limit": 10_000}
    random.seed(0)
    torch.manual_seed(0)
    cache = torch._functorch.config.patch(enable_autograd_cache=bool(os.environ.get("FP8COMPILE_TEST_CACHE")))
    with torch._dynamo.config.patch(settings), cache:
        yield


# -- how graphs run --


def _inner(inner: Any) -> Patched:
    from fp8compile.backend import fp8

    return mock.patch.dict(fp8.__kwdefaults__, inner=inner)


def interpreted() -> Patched:
    """Inside, `backend="fp8"` runs the rewritten graph on the reference operators."""
    from fp8compile.runtime.inner import Inner
    from fp8compile.runtime.interpreter import Eager, boxed

    return _inner(Inner(lambda gm, example_inputs, **kwargs: boxed(Eager(gm))))


@contextlib.contextmanager
def lowered() -> Iterator[None]:
    """Inside, `backend="fp8"` runs the lowered graph eagerly, of the operators that a GPU would get."""
    from fp8compile.runtime.inner import INTERPRETER

    with lowered_as_for_a_gpu(), _inner(INTERPRETER):
        yield


@contextlib.contextmanager
def lowered_for_a_cpu() -> Iterator[list[Any]]:
    """Inside, `backend="fp8"` runs the graphs that Inductor would get for a CPU; the list has them."""
    from fp8compile.runtime import inner

    with _inner(inner.INTERPRETER), noting(inner, "run_post_grad", lambda _, graph: graph) as found:
        yield found


@contextlib.contextmanager
def generating(compiling: Callable[[], Any]) -> Iterator[None]:
    """Inside, `compiling()` is called for each half, which is interpreted as if its code was slow to make."""
    from fp8compile.runtime.inner import Inner
    from fp8compile.runtime.interpreter import Eager, boxed

    def compile(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        compiling()
        return boxed(Eager(gm))

    with _inner(Inner(compile, slow=True)), mock.patch("fp8compile.ir.cpu.load"):
        yield


def backend_with(**options: Any) -> Callable[..., Any]:
    """The backend with these options, for `torch.compile` with a mode."""
    from fp8compile.backend import fp8

    return functools.partial(fp8, options=options)


def traced() -> Patched:
    """Inside, `backend="fp8"` decides and reports, but runs nothing: outputs are placeholders."""
    from fp8compile.dryrun.placeholders import PLACEHOLDERS

    return _inner(PLACEHOLDERS)


def through(see: Callable[..., Any]) -> Patched:
    """Inside, interpreted graphs have `see(call, operator, args, kwargs)` where each `call(operator, args,
    kwargs)` was."""
    from fp8compile.runtime.interpreter import Eager

    stock = Eager.call_function

    def seen(self: Eager, target: Any, args: tuple, kwargs: dict) -> Any:
        return see(lambda *given: stock(self, *given), target, args, kwargs)

    return mock.patch.object(Eager, "call_function", seen)


@contextlib.contextmanager
def calls() -> Iterator[Counter]:
    """How often interpreted graphs call each operator."""
    found: Counter = Counter()

    def see(call: Callable[..., Any], target: Any, *given: Any) -> Any:
        found[target] += 1
        return call(target, *given)

    with through(see):
        yield found


@contextlib.contextmanager
def sent(name: str) -> Iterator[list[tuple[torch.dtype, int]]]:
    """Dtype and bytes of each tensor that interpreted graphs send by a collective of `_c10d_functional`."""
    target, found = getattr(torch.ops._c10d_functional, name).default, list[tuple[torch.dtype, int]]()

    def see(call: Callable[..., Any], called: Any, args: tuple, kwargs: dict) -> Any:
        if called == target:
            found.append((args[0].dtype, args[0].nbytes))
        return call(called, args, kwargs)

    with through(see):
        yield found


@contextlib.contextmanager
def multiplied() -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Copies of the second operand of each FP8 matmul that interpreted graphs run, as it was multiplied:
    values and inverses of scales. In a forward: weights."""
    from fp8compile.ir import ops
    from fp8compile.ir.products import ScaledProduct

    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def see(call: Callable[..., Any], target: Any, args: tuple, kwargs: dict) -> Any:
        if target in (ops.scaled_mm, ops.block_mm):
            product = ScaledProduct(*args)
            found.append((product.b.clone(), product.b_inv.clone()))
        return call(target, args, kwargs)

    with through(see):
        yield found


def export_casts() -> Patched:
    """The weights that exports cast inside."""
    from fp8compile.features.export import export

    return noting(export, "cast", lambda made, layer, held: layer.name)


@contextlib.contextmanager
def widely() -> Iterator[None]:
    """Inside, interpreted graphs compute in float64, eagerly, and round each result once. So their bits
    depend neither on the order of sums nor on approximations of functions, which differ between machines."""
    from fp8compile.ir import products

    def see(call: Callable[..., Any], target: Any, args: tuple, kwargs: dict) -> Any:
        made = call(target, args, kwargs)
        pure = getattr(target, "namespace", "") == "aten" and not any(
            a.alias_info for a in target._schema.arguments
        )
        if not pure or not any(
            isinstance(x, torch.Tensor) and x.dtype in NARROW for x in tree_leaves((args, kwargs))
        ):
            return made
        wide = call(target, *tree_map(_widened, (args, kwargs)))
        return tree_map(lambda x, y: y.to(x.dtype) if isinstance(x, torch.Tensor) else y, made, wide)

    def product(a: torch.Tensor, b: torch.Tensor, out: Any = None) -> torch.Tensor:
        return (a.double() @ b.double().t()).float()

    with through(see), mock.patch.object(products, "multiplied", product):
        yield


def _widened(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.double() if x.dtype in NARROW else x
    return torch.float64 if x in NARROW else x


# -- graphs --


def joint_graphs(note: Callable[[torch.fx.Graph], Any] = lambda graph: graph) -> Patched:
    """The joint graphs that our passes make inside, or what `note` says of each before it changes again."""
    from fp8compile import compilation

    return noting(compilation, "run_joint", lambda done, joint: note(joint.graph))


@contextlib.contextmanager
def halves() -> Iterator[list[tuple[torch.fx.GraphModule, bool]]]:
    """The partitioner's halves inside, before they are lowered, and whether each is a backward."""
    from fp8compile.backend import fp8
    from fp8compile.runtime.inner import Inner

    found: list[tuple[torch.fx.GraphModule, bool]] = []
    before = fp8.__kwdefaults__["inner"]

    def compile(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        from fp8compile import compat

        found.append((compat.dynamo.copy_graph(gm), bool(kwargs.get("is_backward"))))
        return before.compile(gm, example_inputs, **kwargs)

    with _inner(Inner(compile, before.computes, before.eager)):
        yield found


def without_features() -> Any:
    """Inside, the backend looks for features of the package in vain."""
    return mock.patch("fp8compile.extension._features", [])
