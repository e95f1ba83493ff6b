"""What tests reach inside of fp8compile, all in this file.

Tests enter by `torch.compile(model, backend="fp8")`, by public names, or by graphs as text. Where that does not show enough,
they ask this file: a change of the inside changes it, and no test. Nothing here is imported before it is used, so that tests
of options and reports need no compiler.

Three ways to run a graph without Inductor's code generation, which takes seconds a graph:

interpreted    as our joint passes leave it, on the reference implementations of our operators: decisions, state, numerics
lowered        after our passes over each half, too: as Inductor would get it, operator by operator
traced         no half is run: what the passes decide and report
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

Patched = contextlib.AbstractContextManager[Any]


@contextlib.contextmanager
def noting(owner: Any, name: str, note: Callable[..., Any]) -> Iterator[list[Any]]:
    """`note(result, *args, **kwargs)` of each call of `owner.name` inside; `self` is the first argument of a method."""
    found: list[Any] = []
    stock = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        found.append(note(result, *args, **kwargs))
        return result

    with mock.patch.object(owner, name, call):
        yield found


# -- the process ---------------------------------------------------------------------------------------------------------


def forget() -> None:
    """Forget what this process keeps from one compilation or training to the next, Dynamo's code included."""
    torch._dynamo.reset()
    forget_trainings()


def forget_trainings() -> None:
    """The same, but compiled code stays, and so do its reports."""
    from fp8compile import logs
    from fp8compile.runtime import phases, probe

    probe.ACTIVE.clear()  # measurements that were asked for, and whose models no collection has freed yet
    phases._state.steps.clear()  # optimizers that no collection has freed yet: a model that had none follows the others
    logs.forget()  # messages that are logged once a process


@contextlib.contextmanager
def strictly(shares: bool = False) -> Iterator[None]:
    """Inside, random numbers are fixed, a fall back to eager is an error, AOTAutograd's cache is off (`FP8COMPILE_TEST_CACHE=1`
    leaves it on), and Dynamo collects no garbage after each compilation. `shares`: code stays for many tests."""
    settings = {"fail_on_recompile_limit_hit": True, "suppress_errors": False, "run_gc_after_compile": False}
    if shares:
        settings |= {"recompile_limit": 1000, "accumulated_recompile_limit": 10_000}
    settings = {name: value for name, value in settings.items() if hasattr(torch._dynamo.config, name)}
    random.seed(0)
    torch.manual_seed(0)
    cache = torch._functorch.config.patch(enable_autograd_cache=bool(os.environ.get("FP8COMPILE_TEST_CACHE")))
    with torch._dynamo.config.patch(settings), cache:
        yield


# -- how graphs run ------------------------------------------------------------------------------------------------------


def _inner(inner: Any) -> Patched:
    from fp8compile.backend import fp8

    return mock.patch.dict(fp8.__kwdefaults__, inner=inner)


def interpreted() -> Patched:
    """Inside, `backend="fp8"` runs the rewritten graph on the reference operators."""
    from fp8compile.runtime.inner import Inner
    from fp8compile.runtime.interpreter import Eager, boxed

    return _inner(Inner(lambda gm, example_inputs, **kwargs: boxed(Eager(gm))))


def lowered() -> Patched:
    """Inside, `backend="fp8"` runs the lowered graph operator by operator."""
    from fp8compile.runtime.inner import INTERPRETER

    return _inner(INTERPRETER)


def run_by(interpreter: Any) -> Patched:
    """Inside, lowered graphs and cold calls are run by `interpreter(graph module)`, which has `env` and `boxed_run`."""
    from fp8compile.runtime import inner

    return mock.patch.object(inner, "Eager", interpreter)


def traced() -> Patched:
    """Inside, `backend="fp8"` decides and reports, but runs nothing: outputs are placeholders."""
    from fp8compile.dryrun.placeholders import PLACEHOLDERS

    return _inner(PLACEHOLDERS)


def through(see: Callable[..., Any]) -> Patched:
    """Inside, interpreted graphs have `see(call, operator, args, kwargs)` where each `call(operator, args, kwargs)` was."""
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
    """The dtype and bytes of each tensor that interpreted graphs send by this collective of `_c10d_functional`."""
    target, found = getattr(torch.ops._c10d_functional, name).default, list[tuple[torch.dtype, int]]()

    def see(call: Callable[..., Any], called: Any, args: tuple, kwargs: dict) -> Any:
        if called == target:
            found.append((args[0].dtype, args[0].nbytes))
        return call(called, args, kwargs)

    with through(see):
        yield found


# -- graphs --------------------------------------------------------------------------------------------------------------


def joint_graphs() -> Patched:
    """The joint graphs that our passes make inside."""
    from fp8compile import backend

    return noting(backend, "run_joint", lambda done, graph, *_, **__: graph)


@contextlib.contextmanager
def halves() -> Iterator[list[tuple[torch.fx.GraphModule, bool]]]:
    """The halves that the partitioner makes inside, before they are lowered, and whether each is a backward."""
    from fp8compile.backend import fp8
    from fp8compile.runtime.inner import Inner

    found: list[tuple[torch.fx.GraphModule, bool]] = []
    before = fp8.__kwdefaults__["inner"]

    def compile(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        from fp8compile import compat

        found.append((compat.copy_graph(gm), bool(kwargs.get("is_backward"))))
        return before.compile(gm, example_inputs, **kwargs)

    with _inner(Inner(compile, before.computes, before.eager)):
        yield found


# -- state ---------------------------------------------------------------------------------------------------------------


def slots_of(model: nn.Module) -> dict[tuple[str, str, int], Any]:
    """(parameter name, role, use) -> slot, which has `history()` and `scale()`."""
    from fp8compile.runtime.state import slots_of

    return slots_of(model)


def cold(model: nn.Module) -> dict[tuple[str, str, int], bool]:
    """For each slot, whether the next call takes the current amax of its tensor."""
    return {key: bool(slot.numbers.cold) for key, slot in slots_of(model).items()}


def pages_of_forwards() -> Patched:
    """The page of state that each forward is given, and whether it is a recomputation. Keeps them alive: no two share memory
    by chance."""
    from fp8compile.runtime.calls import Calls

    return noting(Calls, "open", lambda opened, *_, **__: (opened[1], opened[0].again))


def overflow_lines() -> Patched:
    """Inside, no line about overflows was logged yet. Gives what has `missed`: overflows since the last line."""
    from fp8compile.runtime import overflow

    return mock.patch.object(overflow, "_Said", type("Said", (), {"at": float("-inf"), "missed": 0}))


def cold_calls() -> Patched:
    """Of each forward of compiled graphs: whether it is cold."""
    from fp8compile.runtime.calls import Calls

    return noting(Calls, "forward", lambda how, *_, **__: how is not None and how.cold)


def weight_casts() -> Patched:
    """How often `cache_weights` casts: an entry a cast, the number of its weights."""
    from fp8compile.runtime.weight_cache import WeightCache

    return noting(WeightCache, "_cast", lambda done, cache, weights, *_, **__: len(weights))


@contextlib.contextmanager
def casts_by_place() -> Iterator[list[tuple[str, int]]]:
    """Each cast of `cache_weights`: "forward" or "step", with a "+" if the update has given the amaxes; and how many copies
    its cache held then."""
    from fp8compile.runtime.weight_cache import WeightCache

    found: list[tuple[str, int]] = []
    cast, now = WeightCache._cast, WeightCache.cast_now
    where = ["forward"]

    def noted(self: WeightCache, weights: Any, amaxes: Any = ()) -> Any:
        held = sum(len(kept.copies) for kept in self.kept.values())
        found.append((where[-1] + ("+" if len(amaxes) else ""), held))
        return cast(self, weights, amaxes)

    def inside(self: WeightCache, *args: Any) -> None:
        where.append("step")
        now(self, *args)
        where.pop()

    with mock.patch.object(WeightCache, "_cast", noted), mock.patch.object(WeightCache, "cast_now", inside):
        yield found


@contextlib.contextmanager
def bytes_of_copies() -> Iterator[list[int]]:
    """The bytes of the copies that each graph compiled inside keeps between its calls, as its report's remarks count them."""
    from fp8compile.reporting import findings

    found: list[int] = []
    with mock.patch.object(findings, "remarks", lambda matmuls, sharded, copies=0: found.append(copies) or ()):
        yield found


def kept_copies() -> int:
    """For how many sets of weights `cache_weights` keeps copies."""
    from fp8compile.runtime.weight_cache import _STEPS

    return sum(len(cache.kept) for cache in _STEPS.caches.values())


def weights_written() -> int:
    """How many weights wait for an optimizer that casts them."""
    from fp8compile.runtime.weight_cache import _STEPS

    return len(_STEPS.written)


def steps_noticed() -> int:
    """Steps of optimizers that `cache_weights` has noticed, and calls of `refresh`."""
    from fp8compile.runtime.weight_cache import _STEPS

    return _STEPS.changes


@contextlib.contextmanager
def weights_kept_in_fp8() -> Iterator[list[int]]:
    """An entry for each weight that a call keeps in FP8 only, as it does so: how many of them are still alive in high
    precision."""
    from fp8compile.runtime import frozen

    found: list[int] = []
    before: list[weakref.ref] = []
    stock = frozen._frozen

    def counting(module: nn.Module, name: str, form: Any) -> tuple[int, int]:
        before.append(weakref.ref(module._parameters[name]))  # type: ignore[arg-type]
        sizes = stock(module, name, form)
        found.append(sum(reference() is not None for reference in before))
        return sizes

    with mock.patch.object(frozen, "_frozen", counting):
        yield found


@contextlib.contextmanager
def frozen_values() -> Iterator[list[torch.Tensor]]:
    """The FP8 values of weights that are put into modules inside."""
    from fp8compile.runtime import frozen

    found: list[torch.Tensor] = []
    stock = frozen._replace

    def replace(module: Any, name: str, weight: Any, *rest: Any) -> Any:
        found.append(weight.data_)
        return stock(module, name, weight, *rest)

    with mock.patch.object(frozen, "_replace", replace):
        yield found


def refresh_gathered_scales(parameter: Any) -> None:
    """What `fp8_all_gather` does before a forward, for the weights that are gathered with this one."""
    from fp8compile.runtime.parameters import find

    find(parameter).gathered.scales.refresh(False, True)


def frozen(parameter: Any) -> bool:
    """Whether this parameter is kept in FP8 only."""
    from fp8compile.ir.frozen import FrozenWeight

    return isinstance(parameter, FrozenWeight)


# -- phases --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def phases_afresh() -> Iterator[None]:
    """Inside, no optimizer has stepped and no phase, step or callback was set. Behind it, all is as before."""
    from fp8compile.runtime import phases

    before, state = phases._state, phases._State()
    state.hook = before.hook  # the hook finds the state through the module; a second hook would count each step twice
    with mock.patch.object(phases, "_state", state):
        state.listen()
        yield
    if before.hook is None:
        state.hook.remove()


def phases_of_calls() -> Patched:
    """The phase of each call of a graph with a schedule."""
    from fp8compile.runtime.phases import ScheduledGraph

    return noting(ScheduledGraph, "phase", lambda phase, *_, **__: phase)


def steps_of(model: nn.Module) -> int:
    """The steps that a schedule counts for a model."""
    from fp8compile.runtime.phases import steps_of

    return steps_of(model)


# -- warm starts ---------------------------------------------------------------------------------------------------------


class Enough(BaseException):
    """Ends a compilation of which a test has seen enough."""


@contextlib.contextmanager
def cache_keys() -> Iterator[list[str]]:
    """The keys that AOTAutograd's cache is asked for. Compilations end there, or at our passes: with `Enough`."""
    from torch._functorch._aot_autograd import autograd_cache

    from fp8compile.runtime.halves import Halves

    made, keys = autograd_cache.autograd_cache_key, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        keys.append(made(*args, **kwargs)[0])
        raise Enough

    with (
        mock.patch.object(Halves, "joint_pass", mock.Mock(side_effect=Enough)),
        mock.patch.object(autograd_cache, "autograd_cache_key", noted),
    ):
        yield keys


def other_facts() -> dict[str, Patched]:
    """Contexts in which our passes read another fact of the process."""
    from fp8compile.devices import catalog

    return {
        "sources": mock.patch("fp8compile.compat.inductor.sources_hash", lambda: "another"),
        "encoding": mock.patch("fp8compile.devices.formats.fnuz", lambda: True),
        "description": mock.patch("fp8compile.devices.catalog.of", lambda _: catalog.find("h100")),
    }


@contextlib.contextmanager
def keys_of_passes() -> Iterator[set[Any]]:
    """The cache keys of our graph passes that compilations make inside."""
    from fp8compile import compat

    found: set[Any] = set()
    made = compat.GraphPass.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        found.add(self.uuid())

    with mock.patch.object(compat.GraphPass, "__init__", init):
        yield found


def cached_by_aotautograd() -> Patched:
    """Whether AOTAutograd's cache is on where a half is compiled, for each half."""
    from fp8compile.runtime.halves import Halves

    return noting(Halves, "compile", lambda *_, **__: torch._functorch.config.enable_autograd_cache)


def forwards_of(parameter: Any) -> list[str]:
    """What an export asks for: the forward matmuls of a parameter."""
    from fp8compile.runtime import forwards

    return [str(known.forward) for known in forwards.of(parameter)]


# -- other passes --------------------------------------------------------------------------------------------------------


def saving_small_tensors(least: int = 0) -> Patched:
    """Inside, `save="fp8"` keeps tensors of any size in FP8, or of at least so many bytes."""
    from fp8compile.passes import save

    return mock.patch.object(save, "LEAST", least)


@contextlib.contextmanager
def generated() -> Iterator[tuple[list[Any], list[dict[str, Any]]]]:
    """The descriptions of the kernels that are generated inside, and the arguments of each launch by name."""
    from fp8compile import compat
    from fp8compile.codegen import launch

    kernels: list[Any] = []
    arguments: list[dict[str, Any]] = []
    configurations, launched = launch.configurations, compat.launch

    def configured(kernel: Any) -> Any:
        kernels.append(kernel)
        return configurations(kernel)

    def call(emit: Any, function: Any, grids: Any, given: dict[str, Any], *constants: Any) -> Any:
        arguments.append(given)
        return launched(emit, function, grids, given, *constants)

    with mock.patch.object(launch, "configurations", configured), mock.patch.object(compat, "launch", call):
        yield kernels, arguments


@contextlib.contextmanager
def failing_passes(when: Callable[[], bool]) -> Iterator[None]:
    """Inside, our passes raise `ZeroDivisionError("ours")` for a graph at which `when()`."""
    from fp8compile import backend

    run = backend.run_joint

    def fail(*args: Any) -> Any:
        if when():
            raise ZeroDivisionError("ours")
        return run(*args)

    with mock.patch.object(backend, "run_joint", fail):
        yield


# -- measured calls ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def measured_casts() -> Iterator[list[str]]:
    """The roles of the tensors that are measured inside: an entry for each cast."""
    from fp8compile.runtime.probe import Look

    seen: list[str] = []
    stock = Look.__call__

    def look(self: Look, node: torch.fx.Node, args: tuple, result: Any) -> None:
        if self.measurements and "fp8_operand" in node.meta:
            seen.append(node.meta["fp8_operand"].role)
        stock(self, node, args, result)

    with mock.patch.object(Look, "__call__", look):
        yield seen


def slow_calls() -> Patched:
    """For each call of a half inside, whether it runs operator by operator for a measurement."""
    from fp8compile.runtime.probe import Looking

    return noting(Looking, "at", lambda look, *_, **__: look is not None)


def measured(parameter: torch.Tensor) -> dict[str, dict[str, float]]:
    """What was measured of a linear with this weight: role -> numbers by name."""
    from fp8compile.runtime import parameters, probe

    vectors = parameters.find(parameter).measured
    return {name[0]: dict(zip(probe.COLUMNS, vector.tolist(), strict=True)) for name, vector in vectors.items()}


def measuring() -> bool:
    """Whether a measurement waits for a call."""
    from fp8compile.runtime import probe

    return bool(probe.ACTIVE)


def measured_in_parts(elements: int) -> Patched:
    """Inside, so many elements of a tensor are measured at a time."""
    from fp8compile.runtime import probe

    return mock.patch.object(probe, "CHUNK", elements)


def failing_measurements() -> dict[str, Patched]:
    """Contexts in each of which another part of a measurement fails."""
    from fp8compile.dryrun import watch
    from fp8compile.reporting import monitor
    from fp8compile.runtime import probe

    parts = [(watch, "_copied"), (watch, "rows_of"), (watch.Session, "run"), (monitor, "table")]
    parts += [(probe, "measured"), (probe.Measurement, "wants")]
    error = MemoryError("planted")
    return {f"{owner.__name__}.{name}": mock.patch.object(owner, name, side_effect=error) for owner, name in parts}


def remembered(parameter: torch.Tensor) -> tuple[int, int]:
    """Of the graph that has run with this parameter: the sets of weights that it knows, and the tensors in its report."""
    from fp8compile.runtime.compiled_graph import CompiledGraph
    from fp8compile.runtime.ledger import LEDGER

    graphs = [x for x in gc.get_objects() if type(x) is CompiledGraph and x.owners.casts]
    (graph,) = [graph for graph in graphs if any(id(parameter) in key for key in graph.owners.met)]
    return len(graph.owners.met), len(LEDGER.graphs()[graph.record][1])


@contextlib.contextmanager
def slow_gpu(folder: Path) -> Iterator[str]:
    """The name of a GPU with slow matmuls, described in this folder: small ones gain there, too."""
    from fp8compile.devices import catalog
    from fp8compile.logs import DEVICES_VARIABLE

    h200 = catalog.find("h200")
    rates = catalog.Rates(bf16=1e12, fp16=1e12, fp32=1e12, fp8=2e12, bandwidth=h200.bandwidth)
    slow = dataclasses.replace(h200, key="slow", name="Slow GPU", sustained=rates, launch=1e-9, origin="calibrated")
    with mock.patch.dict(os.environ, {DEVICES_VARIABLE: str(folder / "devices.toml")}):
        catalog.store(slow)
        yield slow.name


# -- steps that are compared, estimated, tuned ---------------------------------------------------------------------------


def comparing(model: Any, **options: Any) -> Callable[..., Any]:
    """`fp8compile.compare` of one model, with its options: graphs are compiled once for all calls."""
    from fp8compile.dryrun.compare import Session

    session = Session(model, options or None)

    def compare(*args: Any, loss: Callable[[Any], torch.Tensor] | None = None, **kwargs: Any) -> Any:
        return session.run(args, kwargs, loss)

    return compare


@contextlib.contextmanager
def wrong_scale(model: nn.Module, name: str, role: str, factor: float) -> Iterator[None]:
    """Inside, the scale of one tensor is the right one times a factor."""
    slot = slots_of(model)[name, role, 0]
    row = slot.page.tensor[slot.row]
    before = row.clone()
    row[0] *= factor
    row[1] /= factor
    try:
        yield
    finally:
        row.copy_(before)


@contextlib.contextmanager
def compared_steps(fails: bool = False) -> Iterator[list[Any]]:
    """What comparisons take inside: (args, loss) of a comparison, then the phase of each run. `fails`: they divide by zero
    before the first run."""
    from fp8compile.dryrun.compare import Session

    found: list[Any] = []
    run, step = Session.run, Session._step

    def compare(self: Session, args: Any, kwargs: Any, loss: Any = None, repeat: bool = True) -> Any:
        found.append((args, loss))
        return 1 / 0 if fails else run(self, args, kwargs, loss, repeat)

    def taken(self: Session, phase: str, *rest: Any) -> Any:
        found.append(phase)
        return step(self, phase, *rest)

    with mock.patch.object(Session, "run", compare), mock.patch.object(Session, "_step", taken):
        yield found


@contextlib.contextmanager
def described_once() -> Iterator[dict[tuple, tuple[Any, Any]]]:
    """Inside, `estimate` compiles a model once for each device, options and backend; all else is computed from that. Gives
    (compiler, (step on the described GPU, report)) of each compilation."""
    from fp8compile.dryrun.estimate import Compiler

    made: dict[tuple, tuple[Any, Any]] = {}
    stock = Compiler._compiled

    def compiled(self: Compiler, backend: Callable, container: Any, blocks: int) -> Any:
        cast = torch.is_autocast_enabled("cpu")
        key = (id(self.model), backend.__name__, repr(self.options), self.device.gpu, id(container), blocks, cast)
        if key not in made:
            made[key] = self, stock(self, backend, container, blocks)  # the model stays alive, and its id its own
        return made[key][1]

    with mock.patch.object(Compiler, "_compiled", compiled):
        yield made


@contextlib.contextmanager
def tuning(times: type, candidates: Sequence[Any]) -> Iterator[None]:
    """Inside, `tune` takes its times from `times`, and has few candidates: each takes a trace."""
    from fp8compile.dryrun import tune

    with mock.patch.object(tune, "Times", times), mock.patch.object(tune, "candidates", lambda gpu: candidates):
        yield


@contextlib.contextmanager
def weighed() -> Iterator[dict[tuple[str, str], tuple[Any, str]]]:
    """The matmuls with weights of the last graph that was weighed inside, by (name, gemm), each with its reason before."""
    from fp8compile.passes import pipeline

    found: dict[tuple[str, str], tuple[Any, str]] = {}
    weigh = pipeline.weigh

    def noted(matmuls: Sequence[Any], *rest: Any) -> int:
        before = {matmul: matmul.reason for matmul in matmuls}
        result = weigh(matmuls, *rest)
        found.clear()
        found.update({(m.fqn, m.gemm): (m, before[m]) for m in matmuls if m.weight is not None})
        return result

    with mock.patch.object(pipeline, "weigh", noted):
        yield found


# -- kernels -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def launching(tuned: Callable[..., Any], choose: Callable[[Any], Any] | None = None, **limits: int) -> Iterator[None]:
    """Inside, graphs for a CPU get generated kernels: `tuned(function, configurations)` is launched, with the configuration
    that `choose(kernel)` names, or with the default one. `limits`: other values of constants of `codegen.launch`."""
    from fp8compile.codegen import launch

    configurations = launch.configurations

    def chosen(kernel: Any) -> Any:
        return (choose(kernel) if choose else configurations(kernel)[0],)

    with mock.patch.multiple(launch, DEVICES=("cpu", "cuda"), tuned=tuned, configurations=chosen, **limits):
        yield


@contextlib.contextmanager
def launched(see: Callable[..., Any], amd: bool = False) -> Iterator[None]:
    """`see(function, arguments, constants)` gets each launch that is written inside. `amd`: with an AMD GPU's conversions."""
    from fp8compile import compat
    from fp8compile.codegen import kernel

    launch = compat.launch

    def noted(emit: Any, function: Any, grids: Any, arguments: dict[str, Any], constants: Any = None) -> Any:
        see(function, arguments, constants or {})
        return launch(emit, function, grids, arguments, constants)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(compat, "launch", noted))
        if amd:
            stack.enter_context(mock.patch.object(kernel, "saturates", lambda dtype: False))
        yield


def cuda_version(*version: int) -> Patched:
    """Inside, torch was built with this CUDA."""
    from fp8compile.devices import support

    return mock.patch.object(support, "cuda_version", lambda: version)


def fnuz() -> Patched:
    """Inside, the GPU has the fnuz encodings."""
    from fp8compile.devices import formats

    return mock.patch.object(formats, "fnuz", lambda: True)


@contextlib.contextmanager
def block_mm_by(way: str, tile: tuple[int, ...] = (64, 32, 4, 1)) -> Iterator[None]:
    """Inside, a matmul of blocks is lowered in this way, and our kernel has this tile."""
    from fp8compile.codegen import block_gemm, scaled_mm_kind

    tiles = mock.patch.object(block_gemm, "configurations", lambda *_: (tile,))
    with mock.patch.object(scaled_mm_kind, "how", lambda *_: way), tiles:
        yield


@contextlib.contextmanager
def matmuls_for(gpu: Any, tile: tuple[int, ...] = (64, 32, 4, 1)) -> Iterator[None]:
    """Inside, matmuls are lowered for this GPU; those of groups have this tile."""
    from fp8compile.codegen import grouped_gemm, scaled_grouped, scaled_mm

    tiles = mock.patch.object(grouped_gemm, "configurations", lambda *_: (tile,))
    one, other = (mock.patch.object(module, "gpu_of", lambda _: gpu) for module in (scaled_grouped, scaled_mm))
    with one, other, tiles:
        yield


@contextlib.contextmanager
def scales_of_products() -> Iterator[list[torch.Tensor]]:
    """The scales that ATen's matmul gets inside; no matmul runs."""
    from fp8compile.codegen import scaled_mm

    found: list[torch.Tensor] = []
    with mock.patch.object(scaled_mm, "scaled", lambda a, b, a_scale, b_scale, *_: found.extend((a_scale, b_scale))):
        yield found


def files_apart() -> Patched:
    """Inside, each C++ kernel is compiled in a file of its own."""
    return mock.patch("fp8compile.compat.inductor.few_files", contextlib.nullcontext)


@contextlib.contextmanager
def traffic(answer: tuple[int, int] | None = None) -> Iterator[list[tuple[int, int]]]:
    """The bytes that a fused kernel and Inductor would move, for each group that is compared inside; or `answer` for all."""
    from fp8compile.passes import fuse

    found: list[tuple[int, int]] = []
    compare = fuse.compare

    def noted(*given: Any) -> tuple[int, int]:
        found.append(answer or compare(*given))
        return found[-1]

    with mock.patch.object(fuse, "compare", noted):
        yield found


def matmuls_unread() -> Patched:
    """Inside, a described step does not read Inductor's matmuls: on NVIDIA it falls back for fnuz operands."""
    from fp8compile.dryrun.fake_gpu.record import _Reader

    return mock.patch.object(_Reader, "matmul", lambda *_: None)


def groups_to_tune(model: nn.Module, args: tuple, loss: Callable[[Any], torch.Tensor] | None) -> Any:
    """What `tune` measures: `groups`, `alone(candidate)`, `error(choice, name)`, and `whole` where one graph tells all."""
    from fp8compile.dryrun.tune import _Measured

    return _Measured(model, args, {}, loss, "default", 0.5, lambda *_: None)


def without_ptxas() -> Patched:
    """Inside, Triton's assembler is not there."""
    from fp8compile.dryrun.fake_gpu import machine_code

    return mock.patch.object(machine_code, "_path", mock.Mock(side_effect=RuntimeError))


def losing_updates() -> Patched:
    """Inside, graphs lose the writes of their scaling state before the check for them."""
    from fp8compile.runtime import halves

    check = halves._check_update

    def without_writes(gm: Any, page: str, slots: Any) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            gm.graph.erase_node(node)
        check(gm, page, slots)

    return mock.patch.object(halves, "_check_update", without_writes)


def without_lowerings() -> Patched:
    """Inside, no operator of ours is lowered."""
    return mock.patch("fp8compile.passes.lower.LOWERED", ())


def ranks_agree() -> Patched:
    """Inside, the other ranks, which are not there, have said what this one says."""
    return mock.patch("fp8compile.compat.different", return_value={})
