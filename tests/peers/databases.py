"""PyTorch's own databases of operators and modules as an oracle: their samples, run by `backend="fp8"` and by
the stock path.

The stock path is Inductor's `compile_fx` without our passes, whose graphs torch's own interpreter runs. It is
what our backend is built upon, with the same decompositions. So what has no FP8 matmul has the same bits.
`aot_eager` has other decompositions, which round elsewhere.

Samples are put into one graph, for a compilation costs more than they do. Where such a graph fails or
differs, its halves are looked at, until one sample is left.
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
from tests.support.tiers import spread

DTYPES = (torch.float32, torch.bfloat16)
EVERY = {"rules": [{"fp8": "on"}]}  # also the smallest matmul
LOOKED_AT = 200  # of an operator's samples, from which some are taken
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
UNDEFINED |= {"resize_", "resize_as_"}

Results = list[Tensor | None]  # outputs and gradients of a case
Way = Callable[[nn.Module], Callable[[], Any]]


@dataclass(frozen=True)
class Case:
    """A sample: `call(*make())` are its outputs. `make` gives fresh tensors or modules of equal numbers."""

    name: str
    make: Callable[[], Any]
    call: Callable[[Any], Any]
    defined: bool = True  # whether the values of its outputs are


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


def run(cases: Sequence[Case], compile: Way) -> list[Results]:
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
    found = [[*out, *(islice(grads, len(own)))] for out, own in zip(outputs, leaves, strict=True)]
    zeros = [[x if x is None else x.new_zeros(x.shape) for x in own] for own in found]
    return [own if case.defined else zero for case, own, zero in zip(cases, found, zeros, strict=True)]


def outcome(cases: Sequence[Case], compile: Way) -> list[Results] | Exception:
    try:
        torch._dynamo.reset()
        return run(cases, compile)
    except Exception as error:
        return error


# -- the ways to run --


def ours(model: nn.Module, **options: Any) -> Callable[[], Any]:
    given = {"policy": EVERY, "recipe": "tensorwise", **options}
    return torch.compile(model, backend="fp8", dynamic=False, options=given)


def stock(model: nn.Module) -> Callable[[], Any]:
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor.compile_fx import compile_fx

    def inner(gm: torch.fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        return boxed_nop(gm, inputs)

    return torch.compile(model, backend=functools.partial(compile_fx, inner_compile=inner), dynamic=False)


def inductor(model: nn.Module) -> Callable[[], Any]:
    return torch.compile(model, dynamic=False)


def eager(model: nn.Module) -> Callable[[], Any]:
    return model


# -- comparing --


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


def converted(cases: Sequence[Case]) -> list[int]:
    """The FP8 matmuls of each of the cases that were compiled last, by the names of their weights."""
    done = [record.fqn for record in fp8compile.report().matmuls if record.decision == "fp8"]
    if len(cases) == 1:
        return [len(done)]
    return [sum(name.startswith(f"given.{i}.") for name in done) for i in range(len(cases))]


@dataclass
class Found:
    """What became of cases, by name."""

    equal: list[str] = field(default_factory=list)  # with the bits of the stock path
    floors: dict[str, float] = field(default_factory=dict)  # with FP8 matmuls: the least SQNR
    refused: list[str] = field(default_factory=list)  # by the stock path, too
    random: list[str] = field(default_factory=list)  # the stock path does not repeat itself
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def cases(self) -> int:
        return sum(map(len, (self.equal, self.floors, self.refused, self.random, self.faults)))


def check(cases: Sequence[Case], floor: float, found: Found, theirs: Way = stock, mine: Way = ours) -> Found:
    """Compare cases, all together. Where they fail, each half by itself; a wrong one by itself."""
    expected, got = outcome(cases, theirs), outcome(cases, mine)
    if len(cases) == 1:
        return one(cases[0], expected, got, floor, found, theirs)
    if isinstance(expected, Exception) or isinstance(got, Exception):
        for half in (cases[: len(cases) // 2], cases[len(cases) // 2 :]):
            check(half, floor, found, theirs, mine)
        return found
    for case, fp8, *both in zip(cases, converted(cases), expected, got, strict=True):
        if not right(case, fp8, *both, floor, found):
            check([case], floor, found, theirs, mine)
    return found


def right(case: Case, fp8: int, expected: Results, got: Results, floor: float, found: Found) -> bool:
    """Counts a case that has the bits of the stock path or, with FP8 matmuls, a ratio over the floor."""
    if fp8 and (least := min(map(ratio, expected, got))) >= floor:
        found.floors[case.name] = least
    elif alike(expected, got):
        found.equal.append(case.name)
    else:
        return False
    return True


def alike(expected: Results, got: Results) -> bool:
    return len(expected) == len(got) and all(map(same, expected, got))


def one(case: Case, expected: Any, got: Any, floor: float, found: Found, theirs: Way) -> Found:
    """A case by itself. What the stock path refuses, ours need not do."""
    if isinstance(expected, Exception):
        found.refused.append(case.name)
    elif isinstance(got, Exception):
        found.faults[case.name] = f"{type(got).__name__}: {got}"
    elif not right(case, fp8 := converted([case])[0], expected[0], got[0], floor, found):
        again = outcome([case], theirs)
        if not fp8 and isinstance(again, list) and not alike(expected[0], again[0]):
            found.random.append(case.name)
        else:
            ratios = ", ".join(f"{ratio(*both):.1f}" for both in zip(expected[0], got[0], strict=True))
            found.faults[case.name] = f"{fp8} FP8 matmuls, {ratios} dB"
    return found


# -- samples --


def fresh(given: Any, owned: bool = True) -> Any:
    """Copies of the tensors in `given`. If `owned`, those with gradients are parameters, except for the first
    tensor of all."""
    first = next((x for x in tree_leaves(given) if isinstance(x, Tensor)), None)

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        new = x.detach().clone()
        if x.requires_grad and owned and x is not first:
            return nn.Parameter(new)
        return new.requires_grad_(x.requires_grad)

    return tree_map(copy, given)


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
            (sample.input, sample.args, sample.kwargs),
        )

        def call(given: Any, run: Callable = op.op, end: Callable = sample.output_process_fn_grad) -> Any:
            first, args, kwargs = given
            return end(run(first, *args, **kwargs))

        defined = op.name not in UNDEFINED
        found += runnable(
            Case(f"{name_of(op)} {str(dtype)[6:]} {i}", functools.partial(fresh, given), call, defined)
        )
    return found


def cases_of_module(info: Any, dtype: torch.dtype, number: int) -> list[Case]:
    """Samples of an entry of `module_db` that eager mode can run, in training mode."""
    torch.manual_seed(0)
    made = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True)
    found = []
    for i, sample in spread(list(enumerate(islice(made, LOOKED_AT))), number):

        def make(sample: Any = sample) -> Any:
            torch.manual_seed(1)
            of = sample.constructor_input
            given = fresh((sample.forward_input.args, sample.forward_input.kwargs), False)
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
