"""PyTorch's own databases of operators and modules as an oracle: their samples, run by `backend="fp8"` and by the stock path.

The stock path is Inductor's `compile_fx` without our passes, whose graphs torch's own interpreter runs. It is what our backend
is built upon, with the same decompositions. So what has no FP8 matmul has the same bits. `aot_eager` has other decompositions,
which round elsewhere: it says what can be run at all.

Samples are put into one graph, for a compilation costs more than they do. Where such a graph fails or differs, its halves are
looked at, until one sample is left.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import fp8compile
from tests.support.harness import sqnr

DTYPES = (torch.float32, torch.bfloat16)
EVERY = {"rules": [{"fp8": "on"}]}  # also the smallest matmul
LOOKED_AT = 200  # of an operator's samples, from which some are taken

Outcome = list[Tensor | None] | Exception


@dataclass(frozen=True)
class Case:
    """A sample: `call(*make())` are its outputs. `make` gives fresh tensors or modules, with the same numbers each time."""

    name: str
    make: Callable[[], Any]
    call: Callable[[Any], Any]


class Together(nn.Module):
    """The calls of several cases, as one module. What requires a gradient is a parameter."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.calls, self.given = [case.call for case in cases], [case.make() for case in cases]
        owned = [x for x in tree_leaves(self.given) if isinstance(x, nn.Module)]
        self.owned = nn.ModuleList(owned)  # `train` and `parameters` reach them

    def forward(self) -> list[Any]:
        return [call(given) for call, given in zip(self.calls, self.given, strict=True)]

    def leaves(self, i: int) -> list[Tensor]:
        found = [x for x in tree_leaves(self.given[i]) if isinstance(x, (Tensor, nn.Module))]
        nested = [[*x.parameters()] if isinstance(x, nn.Module) else [x] for x in found]
        return [x for xs in nested for x in xs if x.requires_grad]


def run(cases: Sequence[Case], compile: Callable[[nn.Module], Callable[[], Any]]) -> list[list[Tensor | None]]:
    """Outputs and gradients of each case."""
    model = Together(cases)
    torch.manual_seed(0)
    outputs = [[x for x in tree_leaves(out) if isinstance(x, Tensor)] for out in compile(model)()]
    ends = [x for out in outputs for x in out if x.requires_grad and x.layout == torch.strided]
    leaves = [model.leaves(i) for i in range(len(cases))]
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in ends]
    grads: Iterator[Tensor | None] = iter(())
    if ends and any(leaves):
        grads = iter(torch.autograd.grad(ends, sum(leaves, []), given, allow_unused=True))
    return [[*out, *(islice(grads, len(own)))] for out, own in zip(outputs, leaves, strict=True)]


def outcome(cases: Sequence[Case], compile: Callable[[nn.Module], Callable[[], Any]]) -> list[list[Tensor | None]] | Exception:
    try:
        torch._dynamo.reset()
        return run(cases, compile)
    except Exception as error:
        return error


# -- the ways to run -----------------------------------------------------------------------------------------------------


def ours(model: nn.Module, **options: Any) -> Callable[[], Any]:
    return torch.compile(model, backend="fp8", dynamic=False, options={"policy": EVERY, "recipe": "tensorwise", **options})


def stock(model: nn.Module) -> Callable[[], Any]:
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor.compile_fx import compile_fx

    def inner(gm: torch.fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        return boxed_nop(gm, inputs)

    return torch.compile(model, backend=functools.partial(compile_fx, inner_compile=inner), dynamic=False)


def aot_eager(model: nn.Module) -> Callable[[], Any]:
    return torch.compile(model, backend="aot_eager", dynamic=False)


def inductor(model: nn.Module) -> Callable[[], Any]:
    return torch.compile(model, dynamic=False)


def eager(model: nn.Module) -> Callable[[], Any]:
    return model


# -- comparing -----------------------------------------------------------------------------------------------------------


def plain(x: Tensor) -> Tensor:
    x = x.detach()
    if x.layout != torch.strided:
        x = x.to_dense()
    if x.is_quantized:
        x = x.dequantize()
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """The same dtype, shape and bits; a NaN is a NaN."""
    if one is None or other is None:
        return one is other
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    return bool(((a := plain(one)) == (b := plain(other))).logical_or((a != a) & (b != b)).all())


def ratio(expected: Tensor | None, got: Tensor | None) -> float:
    """Their SQNR in dB, -inf for tensors that cannot be compared."""
    if expected is None or got is None or (expected.dtype, expected.shape) != (got.dtype, got.shape):
        return math.inf if expected is got else -math.inf
    return sqnr(plain(expected), plain(got))


def converted() -> int:
    """The FP8 matmuls of what was compiled last."""
    return sum(record.decision == "fp8" for record in fp8compile.report().matmuls)


@dataclass
class Found:
    """What became of cases: how many had the bits of the stock path, or FP8 matmuls, or failed everywhere; `faults` by name."""

    cases: int = 0
    equal: int = 0
    fp8: int = 0
    refused: list[str] = field(default_factory=list)  # by the stock path, too
    random: list[str] = field(default_factory=list)  # the stock path does not repeat itself
    faults: dict[str, str] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)  # the least SQNR of what has FP8 matmuls


def check(cases: Sequence[Case], floor: float, found: Found, theirs: Callable = stock, mine: Callable = ours) -> Found:
    """Compare cases, all together and then those that are not equal by themselves."""
    if not cases:
        return found
    expected, got = outcome(cases, theirs), outcome(cases, mine)
    if isinstance(expected, list) and isinstance(got, list):
        differing = [case for case, *both in zip(cases, expected, got, strict=True) if not alike(*both)]
        found.cases += len(cases) - len(differing)
        found.equal += len(cases) - len(differing)
        if differing and len(cases) > 1:
            for case in differing:
                check([case], floor, found, theirs, mine)
            return found
        if not differing:
            return found
    elif len(cases) > 1:
        for half in (cases[: len(cases) // 2], cases[len(cases) // 2 :]):
            check(half, floor, found, theirs, mine)
        return found
    found.cases += 1
    one(cases[0], expected, got, floor, found, theirs)
    return found


def alike(expected: Sequence[Tensor | None], got: Sequence[Tensor | None]) -> bool:
    return len(expected) == len(got) and all(map(same, expected, got))


def one(case: Case, expected: Any, got: Any, floor: float, found: Found, theirs: Callable) -> None:
    """A case by itself that is not equal."""
    fp8 = converted()
    if isinstance(expected, Exception):
        if isinstance(got, Exception):
            found.refused.append(case.name)
        return
    if isinstance(got, Exception):
        found.faults[case.name] = f"{type(got).__name__}: {got}"
        return
    ratios = [ratio(*both) for both in zip(expected[0], got[0], strict=True)]
    if fp8:
        found.fp8 += 1
        found.floors[case.name] = min(ratios)
        if not min(ratios) >= floor:
            found.faults[case.name] = f"{fp8} FP8 matmuls, {', '.join(f'{x:.1f}' for x in ratios)} dB"
        return
    again = outcome([case], theirs)
    if isinstance(again, list) and not alike(expected[0], again[0]):
        found.random.append(case.name)
        return
    found.faults[case.name] = f"no FP8 matmul, and not equal: {', '.join(f'{x:.1f}' for x in ratios)} dB"


# -- samples -------------------------------------------------------------------------------------------------------------


def fresh(given: Any, owned: bool) -> Any:
    """Copies of the tensors in `given`. Those with gradients are parameters if `owned`, else activations."""

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        new = x.detach().clone()
        return nn.Parameter(new) if x.requires_grad and owned else new.requires_grad_(x.requires_grad)

    return tree_map(copy, given)


def spread(items: Sequence[Any], number: int) -> list[Any]:
    number = min(number, len(items))
    return [items[i * len(items) // number] for i in range(number)]


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}".rstrip(".")


def cases_of(op: Any, dtype: torch.dtype, number: int, change: Callable = lambda x: x) -> list[Case]:
    """Samples of an entry of `op_db` that eager mode can run. `change`: of each floating tensor."""
    if dtype not in op.supported_dtypes("cpu"):
        return []
    trains = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    torch.manual_seed(0)
    samples = list(islice(op.sample_inputs("cpu", dtype, requires_grad=trains), LOOKED_AT))
    found = []
    for i, sample in spread(list(enumerate(samples)), number):
        given = tree_map(
            lambda x: change(x) if isinstance(x, Tensor) and x.is_floating_point() else x,
            (sample.input, (sample.args, sample.kwargs)),
        )

        def make(given: Any = given) -> Any:
            return fresh(given[0], False), fresh(given[1], True)

        def call(given: Any, op: Callable = op.op, end: Callable = sample.output_process_fn_grad) -> Any:
            first, (args, kwargs) = given
            return end(op(first, *args, **kwargs))

        found += runnable(Case(f"{name_of(op)} {str(dtype)[6:]} {i}", make, call))
    return found


def cases_of_module(info: Any, dtype: torch.dtype, number: int) -> list[Case]:
    """Samples of an entry of `module_db` that eager mode can run, in training mode."""
    torch.manual_seed(0)
    made = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True)
    found = []
    for i, sample in spread(list(enumerate(islice(made, LOOKED_AT))), number):

        def make(sample: Any = sample) -> Any:
            torch.manual_seed(1)
            of, given = sample.constructor_input, fresh((sample.forward_input.args, sample.forward_input.kwargs), False)
            module = info.module_cls(*of.args, **of.kwargs).to(dtype)
            if info.is_lazy:
                module(*given[0], **given[1])
            return module, given

        def call(given: Any) -> Any:
            module, (args, kwargs) = given
            return module(*args, **kwargs)

        found += runnable(Case(f"{info.name} {str(dtype)[6:]} {i}", make, call))
    return found


def runnable(case: Case) -> list[Case]:
    try:
        return [] if isinstance(outcome([case], eager), Exception) else [case]
    except Exception:  # it cannot be made
        return []
