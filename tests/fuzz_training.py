"""Random small models, trained by random protocols in FP8 and eagerly, on numbers with which FP8 is exact: all is equal.

    python tests/fuzz_training.py 500 [first seed [seconds]]

So an operand, a layout, a scale or a slot that is not the right one, a gradient that is lost or counted twice, is seen in the
first step, and nothing else is. Graphs run in an FX interpreter (`fp8compile.runtime.interpreted`).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from fuzz_models import UNIT, Model, permutation, ternary
from harness import ALL_FP8, histories, sqnr
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile import logs, ops
from fp8compile.interpreter import Eager
from fp8compile.reports import LEDGER
from fp8compile.runtime import interpreted

FLOOR_DB = 80.0
RECIPES = ("delayed", "delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
COMPILED = ("whole", "whole", "whole", "in place", "blocks", "function")
FP8 = {x for x in vars(torch).values() if isinstance(x, torch.dtype) and "float8" in str(x)}
CONVERSIONS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
Results = dict[str, Tensor]


@dataclass
class Case:
    """What is drawn of a seed, before anything runs. Both sides begin with the same model."""

    seed: int
    rng: random.Random
    recipe: str
    how: str
    options: dict[str, Any]
    dynamic: bool | None
    dtype: torch.dtype
    autocast: bool
    model: nn.Module
    shapes: list[tuple[int, ...]]
    protocols: list[str]

    @classmethod
    def of(cls, seed: int) -> Case:
        rng = random.Random(seed)
        recipe, how = rng.choice(RECIPES), rng.choice(COMPILED)
        protocols = rng.choices(list(PROTOCOLS), k=rng.choice((2, 3, 3, 4)))
        options: dict[str, Any] = {}
        if recipe == "delayed" and ("rescale" in protocols or rng.random() < 0.3):
            options = {"amax_history_len": 2}
        elif recipe in ("tensorwise", "rowwise") and rng.random() < 0.5:
            options = {"power_of_2_scale": True}
        for name, values in {"recast_weights": (True,), "fp8_format": ("e4m3",), "use_fast_accum": ((True,) * 3,)}.items():
            if rng.random() < 0.15 and not (recipe in ("rowwise", "blockwise", "mxfp8") and name == "fp8_format"):
                options[name] = rng.choice(values)
        dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
        autocast = dtype == torch.float32 and rng.random() < 0.2
        model = Model(rng).to(dtype)
        kept = {block.checkpoint for block in model.blocks}  # what torch refuses, with any backend
        refused = {"retained", "threaded"} if "selective" in kept else set()
        refused |= {"partial", "threaded", "no input gradient"} if "reentrant" in kept else set()
        protocols = ["plain" if name in refused else name for name in protocols]
        if recipe == "delayed" and "compiled autograd" in protocols:  # it has to be on from the first call
            protocols = ["compiled autograd", *(name for name in protocols if name != "compiled autograd")]
        rank = rng.choice((2, 2, 3, 4))
        shapes = [_shape(rng, rank, model.width)]
        for _ in range(3):
            shapes.append(_shape(rng, rank, model.width) if rng.random() < 0.3 else shapes[-1])
        dynamic = rng.choice((None, None, None, True))
        return cls(seed, rng, recipe, how, options, dynamic, dtype, autocast, model, shapes, protocols)

    def __str__(self) -> str:
        blocks = []
        for block in self.model.blocks:
            layers = [f"{x.weight.stored} {x.spelled}{' +b' if x.bias is not None else ''}" for x in getattr(block, "each", ())]
            flags = ("+x" * block.residual + " " + block.checkpoint).strip()
            blocks.append(f"{block.kind}({', '.join(layers)}) {flags}".strip())
        flags = [name for name in ("breaks", "two", "tied") if getattr(self.model, name)]
        dtype = "autocast" if self.autocast else str(self.dtype).removeprefix("torch.")
        return (
            f"seed {self.seed}: {self.recipe} {self.options} {self.how} {dtype} dynamic={self.dynamic} {self.shapes} "
            f"{flags}\n  blocks: {'; '.join(blocks)}\n  protocols: {', '.join(self.protocols)}"
        )


def _shape(rng: random.Random, rank: int, width: int) -> tuple[int, ...]:
    if rank == 2:
        return rng.choice((1, 2, 16, 33, 48, 70)), width
    if rank == 3:
        return rng.choice((1, 2, 3)), rng.choice((1, 7, 16)), width
    return 2, rng.choice((1, 3)), rng.choice((5, 8)), width


@dataclass
class Side:
    """One of the two that are compared: `fp8` or eager. Protocols draw the same random numbers for both."""

    case: Case
    model: nn.Module
    fp8: bool
    run: Callable[..., Any] = None  # type: ignore[assignment]
    rng: random.Random = field(default_factory=random.Random)
    shape: tuple[int, ...] = ()
    forwards: int = 0  # in training
    even: bool = True  # all forwards and backwards were whole and of the same parameters
    backwards: int = 0
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compile()

    def compile(self) -> None:
        options = {"recipe": self.case.recipe, "policy": ALL_FP8, **self.case.options}
        how: dict[str, Any] = {"backend": "fp8", "dynamic": self.case.dynamic, "options": options}
        model = self.model
        self.run = model
        self.forwards = self.backwards = 0
        if not self.fp8:
            return
        if self.case.how == "whole":
            self.run = torch.compile(model, **how)
        elif self.case.how == "in place":
            model.compile(**how)
        elif self.case.how == "blocks":
            for block in model.blocks:
                block.compile(**how)
        else:
            self.run = torch.compile(lambda x: model(x), **how)

    # what protocols are made of

    def x(self, requires_grad: bool = True) -> Tensor:
        return ternary(self.rng, *self.shape).to(self.case.dtype).requires_grad_(requires_grad)

    def call(self, x: Tensor) -> list[Tensor]:
        outs = self.plain(x)
        self.forwards += any(y.requires_grad for y in outs)  # else it is an evaluation: all may be frozen
        return outs

    def plain(self, x: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.autocast):
            out = self.run(x)
        return list(out) if isinstance(out, tuple) else [out]

    def gradients(self, outs: list[Tensor]) -> list[Tensor]:
        return [ternary(self.rng, *y.shape).to(y.dtype) * UNIT for y in outs]

    def backward(self, outs: list[Tensor], **kwargs: Any) -> None:
        pairs = [pair for pair in zip(outs, self.gradients(outs), strict=True) if pair[0].requires_grad]
        if pairs:
            self.backwards += 1
            torch.autograd.backward(*zip(*pairs, strict=True), **kwargs)

    def results(self, *xs: Tensor, outs: list[Tensor] = ()) -> Results:  # type: ignore[assignment]
        named = {f"x{i}": x.grad for i, x in enumerate(xs)} | {f"y{i}": y for i, y in enumerate(outs)}
        named |= {name: p.grad for name, p in self.model.named_parameters()}
        return {name: tensor.detach().clone() for name, tensor in named.items() if tensor is not None}


# -- protocols: each is a step, or what may happen between two ----------------------------------------------------------


def plain(s: Side) -> Results:
    x = s.x()
    outs = s.call(x)
    s.backward(outs)
    return s.results(x, outs=outs)


def no_input_gradient(s: Side) -> Results:
    outs = s.call(s.x(False))
    s.backward(outs)
    return s.results(outs=outs)


def two_forwards(s: Side) -> Results:
    one, two = s.x(), s.x()
    first, second = s.call(one), s.call(two)
    pairs = [first, second]
    if s.rng.random() < 0.5:
        pairs.reverse()
    for outs in pairs:
        s.backward(outs)
    return s.results(one, two, outs=first + second)


def together(s: Side) -> Results:
    """Two forwards with one backward."""
    one, two = s.x(), s.x()
    outs = [*s.call(one), *s.call(two)]
    s.backwards += 1
    s.backward(outs)
    return s.results(one, two, outs=outs)


def retained(s: Side) -> Results:
    s.even = False
    x = s.x()
    outs = s.call(x)
    s.backward(outs, retain_graph=True)
    s.backward(outs)
    return s.results(x, outs=outs)


def partial(s: Side) -> Results:
    s.even = False
    x = s.x()
    outs = s.call(x)
    some = [p for p in s.model.parameters() if p.requires_grad]
    some = s.rng.sample(some, s.rng.randint(0, min(2, len(some))))
    gradients = torch.autograd.grad(outs[0], [x, *some], s.gradients(outs[:1]), allow_unused=True)
    return {str(i): g.detach().clone() for i, g in enumerate(gradients) if g is not None} | s.results(outs=outs)


def one_output(s: Side) -> Results:
    """The gradient of the other one is none."""
    s.even = False
    x = s.x()
    outs = s.call(x)
    s.backward(outs[-1:])
    return s.results(x, outs=outs)


def accumulated(s: Side) -> Results:
    for _ in range(s.rng.choice((2, 3))):
        s.backward(s.call(s.x()))
    return s.results()


def forsaken(s: Side) -> Results:
    """A forward whose backward never comes, or comes late."""
    s.even = False
    outs = s.call(s.x())
    if s.rng.random() < 0.5:
        s.kept.append(outs)
    return plain(s)


def evaluated(s: Side) -> Results:
    which = s.rng.choice(("eval", "no_grad", "both", "inference"))
    if which in ("eval", "both"):
        s.model.eval()
    modes = {"eval": contextlib.nullcontext, "inference": torch.inference_mode}
    with modes.get(which, torch.no_grad)():
        outs = s.plain(s.x(False))
    s.model.train()
    return {f"evaluated {name}": y for name, y in s.results(outs=outs).items()} | plain(s)


def dry(s: Side) -> Results:
    x = s.x()
    with fp8compile.dry_run():
        outs = s.plain(x)
    if s.rng.random() < 0.5:
        s.even = False
        s.backward(outs)
    return s.results(x, outs=outs) | {f"after {name}": y for name, y in plain(s).items()}


def hooked_parameters(s: Side) -> Results:
    handles = []
    for p in s.model.parameters():
        if p.requires_grad and p.dim() == 2:
            turn = permutation(s.rng, p.shape[0]).to(p.dtype)
            handles.append(p.register_hook(lambda g, turn=turn: None if g is None else turn @ g))
    results = plain(s)
    for handle in handles:
        handle.remove()
    return results


def hooked_output(s: Side) -> Results:
    x = s.x()
    outs = s.call(x)
    turn = permutation(s.rng, outs[-1].shape[-1]).to(outs[-1].dtype)
    outs[-1].register_hook(lambda g: g @ turn)  # eagerly, that of another one may also have this one's
    seen = []
    x.register_hook(lambda g: seen.append(g.clone()))
    s.backward(outs)
    return s.results(x, outs=outs) | {f"seen {i}": g for i, g in enumerate(seen)}


def checkpointed(s: Side) -> Results:
    """The compiled model in an eager checkpoint."""
    s.even = False
    x, reentrant = s.x(), s.rng.random() < 0.3
    results = checkpoint(lambda x: tuple(s.plain(x)), x, use_reentrant=reentrant)
    s.forwards += 1
    s.backward(list(results))
    return s.results(x, outs=list(results))


def offloaded(s: Side) -> Results:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(), t.dtype), lambda packed: packed[0].clone()):
        x = s.x()
        outs = s.call(x)
    s.backward(outs)
    return s.results(x, outs=outs)


def frozen(s: Side) -> Results:
    """Some parameters have no gradient from here on, or have one again."""
    s.even = False
    some = list(s.model.parameters())
    for p in s.rng.sample(some, s.rng.randint(1, len(some))):
        p.requires_grad_(not p.requires_grad)
    return plain(s)


def moved(s: Side) -> Results:
    """Other weights, as of an optimizer."""
    with torch.no_grad():
        for name, p in s.model.named_parameters():
            if p.dim() > 1 and not name.endswith(("scale", "original0", "original1")) and not _fixed(s.model, name):
                values = p.roll(s.rng.randint(1, 9), s.rng.choice((0, 1)))
                if s.rng.random() < 0.3:
                    p.data = values
                else:
                    p.copy_(values)
    return plain(s)


def _fixed(model: nn.Module, name: str) -> bool:
    owner = model.get_submodule(name.rpartition(".")[0])
    return getattr(owner, "stored", "") in ("norm",)


def replaced(s: Side) -> Results:
    """New parameters, with the values of the old ones."""
    s.even = False
    for module in s.model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and name not in ("original0", "original1") and s.rng.random() < 0.5:
                setattr(module, name, nn.Parameter(p.detach().clone(), p.requires_grad))
    return plain(s)


def rescaled(s: Side) -> Results:
    """Weights and inputs that jump: delayed scales are right again in a later call."""
    s.even = False
    factor = s.rng.choice((0.25, 2.0, 4.0, 64.0))
    with torch.no_grad():
        for module in s.model.modules():
            if hasattr(module, "weight") and hasattr(module, "factor") and s.rng.random() < 0.7:
                w = module.weight
                if w.stored in ("plain", "turned", "strided", "half", "stack", "wide", "copied", "times", "masked", "frozen"):
                    w.w.mul_(factor)
                    w.size *= factor
                    module.factor /= factor
                    if module.bias is not None:
                        module.bias.mul_(factor)
    if s.case.recipe == "delayed":
        for _ in range(4 + 3 * len(s.model.blocks)):  # graphs
            plain(s)
        s.model.zero_grad()
    return plain(s)


def copied(s: Side) -> Results:
    s.model = copy.deepcopy(s.model)
    s.compile()
    return plain(s)


def threaded(s: Side) -> Results:
    """Two threads with one model."""
    s.even = False
    rngs = [random.Random(s.rng.random()) for _ in "12"]
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        try:
            twin = copy.copy(s)
            twin.rng = rngs[i]
            x = twin.x()
            with torch._dynamo.config.patch(specialize_float=True):  # a setting is a thread's
                outs = twin.call(x)
            some = [x, *(p for p in s.model.parameters() if p.requires_grad)]
            found[i] = [*outs, *torch.autograd.grad(outs, some, twin.gradients(outs), allow_unused=True)]
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
        if s.case.seed % 2:
            thread.join()
    for thread in threads:
        thread.join()
    s.forwards += 2
    for value in found.values():
        if isinstance(value, BaseException):
            raise value
    return {f"thread {i} {n}": t.detach() for i, values in found.items() for n, t in enumerate(values) if t is not None}


def compiled_autograd(s: Side) -> Results:
    """Forward and backward in one compiled function, and again in a second call."""
    s.even = False
    x = s.x()
    with torch.autocast("cpu", torch.bfloat16, enabled=s.case.autocast), torch.no_grad():
        shapes = [y for y in _outs(s.model(x))]
    gradients = s.gradients(shapes)

    def step(x: Tensor, *gradients: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=s.case.autocast):
            outs = _outs(s.model(x))
        torch.autograd.backward(outs, gradients)

    if not s.fp8:
        step(x, *gradients)
        return s.results(x)
    options = {"recipe": s.case.recipe, "policy": ALL_FP8, **s.case.options}
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="fp8", options=options)(x, *gradients)
    torch._dynamo.reset()  # what was compiled in it cannot be called outside of it
    return s.results(x)


def _outs(out: Any) -> list[Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


PROTOCOLS: dict[str, Callable[[Side], Results]] = {
    "plain": plain,
    "plain again": plain,
    "no input gradient": no_input_gradient,
    "two forwards": two_forwards,
    "together": together,
    "retained": retained,
    "partial": partial,
    "one output": one_output,
    "accumulated": accumulated,
    "forsaken": forsaken,
    "evaluated": evaluated,
    "dry": dry,
    "hooked parameters": hooked_parameters,
    "hooked output": hooked_output,
    "checkpointed": checkpointed,
    "offloaded": offloaded,
    "frozen": frozen,
    "moved": moved,
    "replaced": replaced,
    "rescale": rescaled,
    "copied": copied,
    "threaded": threaded,
    "compiled autograd": compiled_autograd,
}


# -- running -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted(seen: Counter) -> Iterator[None]:
    """Counts the FP8 operands that are multiplied, two a gemm. Lowered, a gemm on a CPU begins with their conversion."""
    call = Eager.call_function

    def counting(self: Eager, target: Any, args: tuple, kwargs: dict) -> Any:
        whole = target in (ops.scaled_mm, ops.block_mm)
        converted = target in CONVERSIONS and args[0].dtype in FP8 and args[-1] not in FP8
        seen["FP8 operands"] += 2 * whole + converted
        return call(self, target, args, kwargs)

    with mock.patch.object(Eager, "call_function", counting):
        yield


def check(case: Case, seen: Counter) -> None:
    """AssertionError if the two sides differ."""
    torch._dynamo.reset()
    LEDGER.clear()
    logs._said.clear()
    torch._functorch.config.donated_buffer = "retained" not in case.protocols
    sides = [Side(case, copy.deepcopy(case.model), fp8) for fp8 in (False, True)]
    for i, name in enumerate(case.protocols):
        results = []
        for side in sides:
            side.rng, side.shape = random.Random(f"{case.seed} {i}"), case.shapes[i]
            side.model.zero_grad()
            results.append(PROTOCOLS[name](side))
        compare(*results, f"step {i}, {name}")
        if case.recipe == "delayed":
            moved_once(sides[1], f"step {i}, {name}")
        seen[name] += 1
    done = [r for r in fp8compile.report().matmuls if r.decision == "fp8"]
    seen["models"] += 1
    seen["models in FP8"] += bool(done)
    seen["compiled gemms in FP8"] += len(done)


def compare(expected: Results, got: Results, where: str) -> None:
    got = {name: tensor for name, tensor in got.items() if name in expected or tensor.any()}  # AOTAutograd makes zeros of none
    assert expected.keys() == got.keys(), f"{where}: {sorted(expected.keys() ^ got.keys())} on one side only"
    ratios = {name: sqnr(tensor, got[name]) for name, tensor in expected.items() if not _cancels(name, tensor, got[name])}
    low = [f"{name}: {ratio:.1f} dB" for name, ratio in ratios.items() if not ratio >= FLOOR_DB]
    assert not low, f"{where}: {', '.join(low)}"


def _cancels(name: str, expected: Tensor, got: Tensor) -> bool:
    """Gradients of factors are sums of thousands, which may be zero but for last bits."""
    return name.endswith(("scale", "original0")) and torch.allclose(got.double(), expected.double(), rtol=0, atol=2e-6)


def moved_once(side: Side, where: str) -> None:
    """Each training forward moves a history once, and each of its backwards that of the gradients."""
    for gradient, calls in ((False, side.forwards), (True, side.backwards)):
        found = {key: history for key, (history, _) in histories(side.model).items() if (key[1] == "gradient") == gradient}
        moves = {key: sum(amax > 0 for amax in history) for key, history in found.items()}  # a gradient may be all zeros
        most = min([calls, *map(len, found.values())])
        wrong = max(moves.values(), default=most) != most
        assert not (side.even and wrong), f"{where}: in {calls} calls, moved: {moves}"


def one(seed: int, seen: Counter) -> str:
    """What is wrong with that seed, or ""."""
    case = Case.of(seed)
    try:
        check(case, seen)
    except Exception as error:
        return f"{case}\n  {type(error).__name__}: {error}"
    return ""


def run(count: int, first: int = 0, limit_s: float = float("inf")) -> tuple[Counter, list[str]]:
    """Seeds from `first` on; counts, and what failed."""
    seen: Counter = Counter()
    failed = []
    begun = time.perf_counter()
    settings = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True, "specialize_float": True, "suppress_errors": False}
    config = torch._dynamo.config.patch(**settings)
    donated = torch._functorch.config.patch(donated_buffer=True)
    with config, donated, interpreted(), counted(seen), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("fp8compile").setLevel(logging.ERROR)
        for seed in range(first, first + count):
            if (wrong := one(seed, seen)):
                failed.append(wrong)
                print(wrong, flush=True)
            if time.perf_counter() - begun > limit_s:
                print(f"seeds {first} to {seed}", flush=True)
                break
    return seen, failed


if __name__ == "__main__":
    start = time.perf_counter()
    count, first, limit = (int(x) for x in (*sys.argv[1:], *("500", "0", "1000000")[len(sys.argv) - 1 :]))
    found, wrong = run(count, first, limit)
    print(", ".join(f"{name} {number}" for name, number in found.items() if number))
    print(f"{len(wrong)} of {found['models'] + len(wrong)} models fail; {time.perf_counter() - start:.0f} s")
