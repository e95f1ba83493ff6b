"""The expression language of `where`: a condition on the sizes m, n and k of a matmul.

``n < 128 or k < 128``, ``m * n * k >= 2**30``, ``256 <= n <= 8192 and k % 64 == 0``, ``max(n, k) / min(n, k) > 8``

Python's syntax and precedence, parsed with `ast`, of which a handful of nodes is taken: m, n, k, numbers, ``+ - * / // % **``
(a whole number as exponent), comparisons, also chained, ``and or not``, parentheses, `min` and `max`. Nothing is ever
evaluated as Python: each node becomes a small closure, or a sympy expression.

Arithmetic is exact, in integers and fractions: ``/`` is true division, 0.3 is 3/10. So that no text can hang or fill the
memory, its length, depth and numbers are limited, and so is the size of every intermediate result, which is known beforehand.

A division by zero (m may be 0) makes the whole condition false, unless `and`/`or` never reach it.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

from ...errors import did_you_mean, near
from .errors import PolicyError

NAMES = ("m", "n", "k")
LONGEST, DEEPEST = 500, 100  # characters; nested operations
LARGEST_EXPONENT = 64
LARGEST, SMALLEST = 2**63, 1e-30  # numbers that may be written
MOST_BITS = 1 << 16  # of an intermediate result's numerator and denominator, with sizes below 2**64

Sizes = tuple[int, int, int]

_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: Fraction(a) / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_COMPARISONS: dict[type, tuple[str, Callable[[Any, Any], bool]]] = {
    ast.Lt: ("Lt", lambda a, b: a < b),
    ast.LtE: ("Le", lambda a, b: a <= b),
    ast.Gt: ("Gt", lambda a, b: a > b),
    ast.GtE: ("Ge", lambda a, b: a >= b),
    ast.Eq: ("Eq", lambda a, b: a == b),
    ast.NotEq: ("Ne", lambda a, b: a != b),
}
_MEANT = {"tokens": "m", "rows": "m", "out_features": "n", "in_features": "k", "features": "n"}
_LANGUAGE = "the sizes m, n, k, numbers, + - * / // % **, comparisons, and, or, not, parentheses, min and max"


@dataclass(frozen=True)
class _Made:
    """A node: whether it is a condition, its value as a function of (m, n, k), the bits that it may need."""

    condition: bool
    value: Callable[[Sizes], Any]
    bits: int = 64


@dataclass(frozen=True)
class Where:
    """A condition. Equal, and hashed, by its text; PolicyError for a text that is none."""

    text: str
    _holds: Callable[[Sizes], bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", " ".join(self.text.split()) if isinstance(self.text, str) else self.text)
        object.__setattr__(self, "_holds", _Compiler(self.text).condition())

    def __reduce__(self) -> tuple[type[Where], tuple[str]]:
        return Where, (self.text,)

    def holds(self, m: int, n: int, k: int) -> bool:
        """For the matmul out[m, n] = a[m, k] @ b[k, n]. False where it divides by zero."""
        try:
            return self._holds((m, n, k))
        except ZeroDivisionError:
            return False

    @cached_property
    def expr(self) -> Any:
        """The same in sympy, over the symbols m, n, k (integers >= 0), not simplified. A division by zero is sympy's zoo."""
        return _sympy(_parse(self.text))


class _Compiler:
    """From a text to a closure."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = _parse(text)

    def condition(self) -> Callable[[Sizes], bool]:
        made = self.make(self.tree, 0)
        if not made.condition:
            raise self.error(f"is a number; a condition compares, as in '{self.text} < 128'")
        return made.value

    def error(self, why: str, hint: str = "") -> PolicyError:
        return PolicyError(f"'where': {self.text!r} {why}.{hint}", "where", self.text)

    def make(self, node: ast.expr, depth: int) -> _Made:
        if depth > DEEPEST:
            raise self.error(f"is nested more than {DEEPEST} deep")
        if isinstance(node, ast.Constant):
            return self.number(node)
        if isinstance(node, ast.Name):
            if node.id not in NAMES:
                meant = [_MEANT[node.id]] if node.id in _MEANT else near(node.id, (*NAMES, "min", "max"))
                raise self.error(f"names {node.id!r}, which is none of the sizes m, n and k", did_you_mean(meant))
            position = NAMES.index(node.id)
            return _Made(False, lambda sizes: sizes[position])
        if isinstance(node, ast.BinOp):
            return self.power(node, depth) if isinstance(node.op, ast.Pow) else self.arithmetic(node, depth)
        if isinstance(node, ast.UnaryOp):
            return self.unary(node, depth)
        if isinstance(node, ast.BoolOp):
            parts = [self.wanted(part, True, depth).value for part in node.values]
            if isinstance(node.op, ast.And):
                return _Made(True, lambda sizes: all(part(sizes) for part in parts))
            return _Made(True, lambda sizes: any(part(sizes) for part in parts))
        if isinstance(node, ast.Compare):
            return self.comparison(node, depth)
        if isinstance(node, ast.Call):
            return self.call(node, depth)
        raise self.error(f"uses {type(node).__name__}; allowed are {_LANGUAGE}")

    def wanted(self, node: ast.expr, condition: bool, depth: int) -> _Made:
        made = self.make(node, depth + 1)
        if made.condition is not condition:
            part = ast.unparse(node)
            raise self.error(f"needs a {'condition' if condition else 'number'} where it has {part!r}")
        return made

    def number(self, node: ast.Constant) -> _Made:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(f"has {value!r}, which is not a number; allowed are {_LANGUAGE}")
        if abs(value) > LARGEST or (value and abs(value) < SMALLEST):
            raise self.error(f"has a number that is out of bounds (at most 2**63, at least {SMALLEST:g})")
        exact = value if isinstance(value, int) else Fraction(repr(value))  # 0.3 is what was written, not the nearest double
        return _Made(False, lambda sizes: exact, 64 if isinstance(value, int) else 192)

    def arithmetic(self, node: ast.BinOp, depth: int) -> _Made:
        if type(node.op) not in _ARITHMETIC:
            meant = {ast.BitAnd: "; write 'and'", ast.BitOr: "; write 'or'", ast.BitXor: "; a power is '**'"}
            raise self.error(f"uses {type(node.op).__name__}{meant.get(type(node.op), '')}; allowed are {_LANGUAGE}")
        a, b = self.wanted(node.left, False, depth), self.wanted(node.right, False, depth)
        left, right, operator = a.value, b.value, _ARITHMETIC[type(node.op)]
        return self.bounded(lambda sizes: operator(left(sizes), right(sizes)), a.bits + b.bits + 1)

    def power(self, node: ast.BinOp, depth: int) -> _Made:
        base, exponent = self.wanted(node.left, False, depth), _exponent(node.right)
        if exponent is None:
            raise self.error(f"has an exponent that is not a whole number from -{LARGEST_EXPONENT} to {LARGEST_EXPONENT}")
        value, power = base.value, exponent
        bits = base.bits * max(1, abs(power))
        if power < 0:
            return self.bounded(lambda sizes: Fraction(value(sizes)) ** power, bits)
        return self.bounded(lambda sizes: value(sizes) ** power, bits)

    def bounded(self, value: Callable[[Sizes], Any], bits: int) -> _Made:
        if bits > MOST_BITS:
            raise self.error("has powers that grow out of bounds")
        return _Made(False, value, bits)

    def unary(self, node: ast.UnaryOp, depth: int) -> _Made:
        if isinstance(node.op, ast.Not):
            part = self.wanted(node.operand, True, depth).value
            return _Made(True, lambda sizes: not part(sizes))
        if isinstance(node.op, ast.Invert):
            raise self.error("uses ~; write 'not'")
        made = self.wanted(node.operand, False, depth)
        value = made.value
        return _Made(False, (lambda sizes: -value(sizes)) if isinstance(node.op, ast.USub) else value, made.bits)

    def comparison(self, node: ast.Compare, depth: int) -> _Made:
        for operator in node.ops:
            if type(operator) not in _COMPARISONS:
                raise self.error(f"uses {type(operator).__name__}; allowed are {_LANGUAGE}")
        first = self.wanted(node.left, False, depth).value
        rest = [
            (_COMPARISONS[type(operator)][1], self.wanted(part, False, depth).value)
            for operator, part in zip(node.ops, node.comparators, strict=True)
        ]

        def holds(sizes: Sizes) -> bool:
            left = first(sizes)
            for compare, part in rest:
                right = part(sizes)
                if not compare(left, right):
                    return False
                left = right
            return True

        return _Made(True, holds)

    def call(self, node: ast.Call, depth: int) -> _Made:
        name = node.func.id if isinstance(node.func, ast.Name) else "?"
        if name not in ("min", "max"):
            raise self.error("calls something else than min or max")
        if node.keywords or len(node.args) < 2:
            raise self.error(f"has {name} of fewer than two numbers, or of something with a name")
        made = [self.wanted(part, False, depth) for part in node.args]
        values, pick = [part.value for part in made], min if name == "min" else max
        return _Made(False, lambda sizes: pick([value(sizes) for value in values]), max(part.bits for part in made))


def _parse(text: Any) -> ast.expr:
    """The expression's tree. PolicyError if it is too long, or no expression."""
    if not isinstance(text, str) or not text:
        raise PolicyError.of("where", text, "a condition on m, n and k, such as 'n < 128 or k < 128'")
    if len(text) > LONGEST:
        raise PolicyError.of("where", text, f"an expression of {LONGEST} characters at most")
    if "#" in text:
        raise PolicyError(f"'where': {text!r} has a comment; it belongs outside of the quotes.", "where", text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        hint = "".join(
            f" Write {write!r} for {wrong!r}."
            for wrong, write in (("&&", "and"), ("||", "or"), ("!", "not"), ("=", "=="))
            if wrong in re.sub("[!<>=]=", "", text)
        )
        if isinstance(error, SyntaxError) and error.offset:
            detail = f"{error.msg} (character {min(error.offset, len(text))})"
        else:
            detail = str(error) or "it is nested too deep"
        raise PolicyError(f"'where': {text!r} is not an expression: {detail}.{hint}", "where", text) from None


def _exponent(node: ast.expr) -> int | None:
    """A literal whole number within bounds, None for anything else."""
    sign = 1
    while isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        sign, node = (-sign if isinstance(node.op, ast.USub) else sign), node.operand
    value = node.value if isinstance(node, ast.Constant) else None
    return sign * value if type(value) is int and value <= LARGEST_EXPONENT else None


def _sympy(node: Any) -> Any:
    """A tree that was compiled before, node by node, as it stands: simplifying could take forever."""
    import sympy

    def arithmetic(kind: type, a: Any, b: Any) -> Any:
        if kind is ast.Add or kind is ast.Sub:
            return sympy.Add(a, b if kind is ast.Add else negative(b), evaluate=False)
        if kind is ast.Mult:
            return sympy.Mul(a, b, evaluate=False)
        if kind is ast.Mod:
            return sympy.Mod(a, b, evaluate=False)
        ratio = sympy.Mul(a, sympy.Pow(b, sympy.Integer(-1), evaluate=False), evaluate=False)
        return ratio if kind is ast.Div else sympy.floor(ratio, evaluate=False)

    def negative(x: Any) -> Any:
        return -x if x.is_Number else sympy.Mul(sympy.Integer(-1), x, evaluate=False)

    if isinstance(node, ast.Constant):
        return sympy.Integer(node.value) if isinstance(node.value, int) else sympy.Rational(repr(node.value))
    if isinstance(node, ast.Name):
        return sympy.Symbol(node.id, integer=True, nonnegative=True)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return sympy.Pow(_sympy(node.left), sympy.Integer(_exponent(node.right)), evaluate=False)
    if isinstance(node, ast.BinOp):
        return arithmetic(type(node.op), _sympy(node.left), _sympy(node.right))
    if isinstance(node, ast.UnaryOp):
        x = _sympy(node.operand)
        if isinstance(node.op, ast.Not):
            return sympy.Not(x, evaluate=False)
        return negative(x) if isinstance(node.op, ast.USub) else x
    if isinstance(node, ast.BoolOp):
        kind = sympy.And if isinstance(node.op, ast.And) else sympy.Or
        return kind(*map(_sympy, node.values), evaluate=False)
    if isinstance(node, ast.Compare):
        sides = [_sympy(part) for part in (node.left, *node.comparators)]
        pairs = [
            getattr(sympy, _COMPARISONS[type(operator)][0])(a, b, evaluate=False)
            for operator, a, b in zip(node.ops, sides, sides[1:], strict=False)
        ]
        return pairs[0] if len(pairs) == 1 else sympy.And(*pairs, evaluate=False)
    kind = sympy.Min if node.func.id == "min" else sympy.Max
    return kind(*map(_sympy, node.args), evaluate=False)
