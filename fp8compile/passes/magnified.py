"""What becomes of FP8's rounding of a tensor on its way through a backward, to the gradients.

A copy in E4M3 has a relative error of 2.6% an element. What backward computes from it may have a much
larger one: 1 - x where x is near 1, exp(x) where x is large, a comparison with what was exact. So backward
may read a copy only if all that it computes of it, up to where it becomes part of a gradient, is known to be
safe.

The nodes that depend on the copy are walked in order. As long as they take one element to one, with exact
tensors as factors, each is a function of it, however it is spelled (`Rounded`). Its values at many points
tell what it makes of a rounding: an error that is small relative to each value (`_near`), or relative to the
values that it usually has (`_bounded`), as that of an activation's derivative; or neither.

    s = tanh(x8); y = 1 - s * s; dx = g * y      y is at most 1, and 0.8 of the rounding is left
    y = 1 - x8 * x8; dx = g * y                  where x is near 1, nothing of y is left

Where several elements meet, or other tensors are added, there is no such function. There, only gradients go
on: they are linear in what they depend on, and sums of terms that are safe. The rest may get a bias, be cast
for a matmul with a gradient, or be multiplied with one.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node, map_arg

from .. import compat
from ..codegen.expressions import CONSTANTS
from ..codegen.traffic import fusable
from ..config.operators import MATMULS
from ..ir.fx_utils import CASTS, FLOATS, PERMUTES, SAME, SLICES, VIEWS, aten, call_function, root, value

THROUGH = (*VIEWS, *PERMUTES, *CASTS, *SAME, aten.expand.default, aten.clone.default)
PARTS = (*THROUGH, *SLICES, operator.getitem)  # what computes nothing
# what takes one element to one; values tell the rest. No logarithm: what it is taken of is a probability, as
# a rule, and where that is near 1 nothing is left
PRODUCTS, SUMS = frozenset({"mul", "div"}), frozenset({"add", "sub"})
ONE_TO_ONE = frozenset(
    "where neg abs exp exp2 expm1 log1p sigmoid tanh erf relu reciprocal square pow clamp clamp_min clamp_max"
    " minimum maximum sgn sign rsub eq ne lt le gt ge logical_and logical_or logical_not bitwise_and"
    " bitwise_or bitwise_not".split()
)
ELEMENTWISE = PRODUCTS | SUMS | ONE_TO_ONE

STEP = 2.0**-5  # a rounding: on average 2.6%, at most 2**-4
_positive = 10.0 ** torch.linspace(-6, 2, 321, dtype=torch.float64, device="cpu")
_x = torch.cat([-_positive, _positive, torch.zeros(1, dtype=torch.float64, device="cpu")])
POINTS = torch.stack([_x, _x * (1 + STEP), _x * (1 - STEP)])  # as they are, and rounded
SMALL, USUAL = _x.abs() < 1e-2, (_x.abs() >= 1e-2) & (_x.abs() <= 4)


class Magnified(Exception):
    """Why an error is not bounded."""


@dataclass(frozen=True)
class Rounded:
    """A tensor that is a function of one element of another one, `of`, times exact tensors, `factors`. `at`:
    the function at `POINTS`. `near`: the factors are exact, or near to what they would be."""

    of: Any
    at: Tensor
    factors: tuple[str, ...] = ()
    near: bool = True

    def times(self, *factors: str, near: bool = True) -> Rounded:
        return replace(self, factors=tuple(sorted((*self.factors, *factors))), near=self.near and near)


class Settled:
    """A tensor with a bounded error that is no function of one element."""


@dataclass(frozen=True)
class Backward:
    """What is known of the graph of a backward. `linear`: the nodes that depend on a gradient. `inputs`:
    those that are inputs of the forward, too. `joint`: the forward is in the same graph, and backward may
    compute its pointwise operators again."""

    linear: Collection[Node]
    inputs: Collection[Node]
    joint: bool = False


State = Rounded | Settled | Magnified
Given = Mapping[Node, Rounded | Settled]


def magnified(x: Node, backward: Backward) -> str:
    """Why a copy of a tensor in FP8 would be too inexact for what backward computes of it; "" if it would
    not. `x`: an input of the backward, or a node of it; in a joint graph, a node of the forward."""
    try:
        with compat.dynamo.real_tensors():
            _Walk(backward).through(x)
    except Magnified as reason:
        return str(reason)
    return ""


class _Walk:
    def __init__(self, backward: Backward):
        self.backward, self.linear, self.joint = backward, backward.linear, backward.joint
        self.states: dict[Node, State] = {}

    def through(self, x: Node) -> None:
        self.states[x] = Rounded(x, POINTS)
        queue, seen = [*x.users], set[Node]()
        heapq.heapify(queue)
        while queue:
            node = heapq.heappop(queue)
            if node not in seen and (state := self.after(node)) is not None:
                self.states[node] = state
                for user in node.users:
                    heapq.heappush(queue, user)
            seen.add(node)

    def after(self, node: Node) -> State | None:
        """The state of a node. None: what follows need not be looked at."""
        given: Any = {x: self.states[x] for x in node.all_input_nodes if x in self.states}
        early = self.joint and not compat.dynamo.is_backward(node)
        if early and not (call_function(node, PARTS) or _name(node) in ELEMENTWISE):
            return None  # forward reads the tensor itself
        if self.joint and not early and not fusable(node, ()) and not _ours(node):
            return None  # it reads what forward has written
        try:
            for state in given.values():
                if isinstance(state, Magnified):
                    raise state
            return self.made(node, given)
        except Magnified as reason:
            if early:
                return reason  # of interest if backward reads it
            raise

    def made(self, node: Node, given: Given) -> State | None:
        if call_function(node, PARTS):
            return self.moved(node, *next(iter(given.items())))
        if _name(node) in ELEMENTWISE:
            made = self.elementwise(node, given)
            return None if isinstance(made, Settled) and node in self.linear else made
        for x, state in given.items():
            self.settle(x, state)
        if all(x in self.linear for x in given):
            return None
        if _ours(node) or _name(node) in MATMULS and node in self.linear:
            return None if node in self.linear else Settled()
        raise Magnified("backward returns it" if node.op == "output" else f"backward takes its {_name(node)}")

    def settle(self, x: Any, state: Rounded | Settled) -> None:
        """No function of one element follows. Magnified if the error is not bounded."""
        if isinstance(state, Rounded) and not _near(state) and not _bounded(state):
            raise Magnified(f"{_name(x)} in backward magnifies its error")

    def moved(self, node: Node, x: Node, state: Rounded | Settled) -> State | None:
        """After a cast, or an operator that gives elements other places."""
        if isinstance(state, Settled):
            return state
        if call_function(node, CASTS):
            if value(node).dtype not in FLOATS:
                raise Magnified("backward rounds it")
            return replace(state, at=state.at.double())
        if x not in self.linear and _near(state):
            return Rounded(node, POINTS)
        self.settle(x, state)
        if x in self.linear:
            return None
        return Rounded(node, state.at, tuple(f"{node}({factor})" for factor in state.factors), state.near)

    def elementwise(self, node: Node, given: Given) -> State | None:
        if _name(node) in PRODUCTS and not node.kwargs:
            return self.product(node, given)
        rounded = {x: state for x, state in given.items() if isinstance(state, Rounded)}
        if len(rounded) == len(given):
            if (made := _function(node, rounded)) is not None:
                return made
            if _name(node) == "where":
                return self.choice(node, rounded)
            if _name(node) in SUMS and all(x in self.linear for x in given):
                for x, state in given.items():
                    self.settle(x, state)
                return None  # terms of a gradient
            if _name(node) == "add" and node not in self.linear and any(map(self.is_bias, node.args)):
                for x, state in given.items():
                    self.settle(x, state)
                return Settled()
        raise Magnified(f"{_name(node)} in backward magnifies its error")

    def is_bias(self, x: Any) -> bool:
        """A parameter that is a vector: what is added to a normalised value, and not what cancels it."""
        return isinstance(x, Node) and (source := root(x)) in self.backward.inputs and value(source).dim() < 2

    def product(self, node: Node, given: Given) -> Rounded | Settled:
        a, b = node.args[:2]
        one, other = _factor(a, given), _factor(b, given)
        if _name(node) == "div":
            if isinstance(other, Settled):
                raise Magnified("div in backward magnifies its error")
            other = replace(other, at=1 / other.at, factors=tuple(f"1/{factor}" for factor in other.factors))
        if isinstance(one, Settled) or isinstance(other, Settled):
            self.settle(a, one)
            self.settle(b, other)
            return Settled()
        if a not in given or b not in given or one.of is other.of:
            product = replace(one if a in given else other, at=one.at * other.at, factors=())
            return replace(product.times(*one.factors, *other.factors), near=one.near and other.near)
        # one becomes a factor: the other may be a function only with what follows
        for safe in (_near, _bounded):
            for kept, x, state in ((one, b, other), (other, a, one)):
                if safe(state):
                    return kept.times(str(x), near=_near(state))
        raise Magnified(f"{_name(node)} in backward magnifies its error")

    def choice(self, node: Node, given: Mapping[Node, Rounded]) -> State | None:
        """After a choice of one of two tensors by a third one."""
        by: Any = node.args[0]
        if by not in given:
            if node in self.linear:
                for x, state in given.items():
                    self.settle(x, state)
                return None
            if all(map(_near, given.values())):
                return Rounded(node, POINTS)
        elif not (chosen := given[by]).factors:
            yes, zero, parts = chosen.at.bool(), torch.zeros((), dtype=torch.float64, device="cpu"), []
            options: tuple[Any, ...] = node.args[1:]
            for x, where in zip(options, (yes, ~yes), strict=True):
                option: Any = _factor(x, given)
                if x in given and option.of is not chosen.of:
                    self.settle(x, option)
                    option = Rounded(
                        chosen.of, torch.ones((), dtype=torch.float64, device="cpu"), (str(x),), _near(option)
                    )
                part = replace(option, of=chosen.of, at=torch.where(where, option.at, zero))
                parts += [part] if part.at.any() else []
            if len({part.factors for part in parts}) == 1:
                at = torch.stack([part.at for part in parts]).sum(0)
                return replace(parts[0], at=at, near=all(part.near for part in parts))
            if node in self.linear:
                for part in parts:
                    self.settle(node, part)
                return None
        raise Magnified("where in backward magnifies its error")


def _function(node: Node, given: Mapping[Node, Rounded]) -> Rounded | None:
    """The result as a function of one element, if it is one: of an element of which all inputs are functions,
    or of the inputs' own if their errors are small relative to them. They are then as good as a copy."""
    if any(x not in given and _number(x) is None for x in node.all_input_nodes):
        return None
    anew = {x: Rounded(x, POINTS) if _near(state) else state for x, state in given.items()}
    for states in (given, anew):
        first, *others = states.values()
        if all(state.of is first.of and state.factors == first.factors for state in others):
            homogeneous = _name(node) in SUMS | {"neg"} and all(x in given for x in node.args)
            if homogeneous or not first.factors:
                at = {x: state.at for x, state in states.items()}
                near_all = all(state.near for state in states.values())
                return replace(first, at=_evaluated(node, at), near=near_all)
    return None


def _factor(x: Any, given: Given) -> Rounded | Settled:
    if x in given:
        return given[x]
    number = _number(x)
    at = torch.tensor(1.0 if number is None else number, dtype=torch.float64, device="cpu")
    return Rounded(x, at, (str(x),) if number is None else ())


def _near(state: Rounded) -> bool:
    """True if the error is small relative to each value, and no value is very large where a copy has few
    bits, near 0."""
    at = state.at.double()
    exact = at[0].abs()
    if not state.near or not at.isfinite().all():
        return False
    return bool((_error(at) <= 5 * exact).all() and exact[SMALL].max() <= 4 * exact[~SMALL].max())


def _bounded(state: Rounded) -> bool:
    """True if the error is small relative to the values that a function has for usual arguments, and no
    others are much larger. If it grows as an activation does, this is asked of f(x) / x. Or if the error is
    small relative to f(0), and no value is near 0 but what a large argument makes small (a softplus)."""
    at = state.at.double()
    if not at.isfinite().all():
        return False
    exact, error = at[0].abs(), _error(at)
    if (error <= 2 * exact.maximum(exact[-1])).all() and (error <= 8 * exact * _x.abs().clamp(min=1)).all():
        return True
    for power in (0, 1, 2):
        ratio = (at / POINTS**power)[:, :-1]
        usual = ratio[0].abs()[USUAL[:-1]].max()
        if ratio.abs().max() <= 4 * usual and (_error(ratio) <= 2 * usual).all():
            return True
    return False


def _error(at: Tensor) -> Tensor:
    """The error of a function's values, relative to that of its argument."""
    return (at[1:] - at[0]).abs().amax(0) / STEP


def _evaluated(node: Node, at: Mapping[Node, Tensor]) -> Tensor:
    """What an operator makes of the values at all points."""

    def given(x: Node) -> Tensor:
        return at[x] if x in at else torch.tensor(_number(x), dtype=torch.float64, device="cpu")

    args, kwargs = map_arg((node.args, node.kwargs), given)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _number(x: Any) -> Any:
    """The number that an argument is; None for a tensor that is none."""
    if not isinstance(x, Node):
        return x
    return x.args[CONSTANTS[x.target]] if x.target in CONSTANTS else None


def _ours(node: Node) -> bool:
    return getattr(node.target, "namespace", "") == "fp8compile"


def _name(node: Node) -> str:
    """An operator of ATen or of ours by its name, without the overload."""
    return getattr(node.target, "_opname", str(node.target))
