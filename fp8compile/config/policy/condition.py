"""The expression language of `where`: a condition on the sizes m, n and k of a matmul.

``n < 128 or k < 128``, ``m * n * k >= 2**30``, ``256 <= n <= 8192 and k % 64 == 0``,
``max(n, k) / min(n, k) > 8``

It is a part of Python's expressions (docs/policy.md#where). The text may come from somebody else. So its tree
is checked node by node before it is compiled: other names, calls and attributes are errors.
"""

from __future__ import annotations

import ast
import re
import warnings
from functools import lru_cache
from types import CodeType
from typing import Any

from ...errors import did_you_mean, near
from .policy_errors import PolicyError

SIZES, FUNCTIONS = ("m", "n", "k"), {"min": min, "max": max}
LARGEST_EXPONENT = 64
LONGEST = 500  # characters

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
_SPELLED = {
    "BitAnd": "; write 'and'",
    "BitOr": "; write 'or'",
    "BitXor": "; a power is '**'",
    "Invert": "; write 'not'",
}
_MEANT = {"tokens": "m", "rows": "m", "out_features": "n", "in_features": "k", "features": "n"}
_LANGUAGE = "the sizes m, n, k, numbers, + - * / // % **, comparisons, and, or, not, parentheses, min and max"


def checked(text: Any) -> str:
    """The text of a condition, with single spaces. PolicyError for anything else."""
    if not isinstance(text, str) or not text.strip():
        raise PolicyError.of("where", text, "a condition on m, n and k, such as 'n < 128 or k < 128'")
    text = " ".join(text.split())
    if len(text) > LONGEST:
        raise _error(f"{text[:40]} ...", f"has {len(text)} characters, and may have {LONGEST}")
    _compiled(text)
    return text


def holds(text: str, m: int, n: int, k: int) -> bool:
    """For out[m, n] = a[m, k] @ b[k, n]. False where it divides by zero, or a fraction becomes too large."""
    try:
        return bool(eval(_compiled(text), {"__builtins__": {}, **FUNCTIONS, "m": m, "n": n, "k": k}))
    except (ZeroDivisionError, OverflowError):
        return False


@lru_cache(1024)
def _compiled(text: str) -> CodeType:
    """The code of a condition. PolicyError if `text` is anything else."""
    if "#" in text:
        raise _error(text, "has a comment; it belongs outside of the quotes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError) as error:
        detail = getattr(error, "msg", error)
        offset = getattr(error, "offset", None)
        at = f" (character {min(offset, len(text))})" if offset else ""
        bare = re.sub("[!<>=]=", "", text)
        written = (("&&", "and"), ("||", "or"), ("!", "not"), ("=", "=="))
        hint = "".join(f" Write {write!r} for {wrong!r}." for wrong, write in written if wrong in bare)
        raise _error(text, f"is not an expression: {detail}{at}", hint) from None
    _check(tree.body, text, condition=True)
    return compile(tree, "<where>", "eval")


def _check(node: ast.expr, text: str, condition: bool, outermost: bool = True) -> None:
    """PolicyError unless `node` is a condition (or, without `condition`, a number)."""
    parts: list[ast.expr] = []
    match node:
        case ast.Name(id=name):
            if name not in SIZES:
                meant = [_MEANT[name]] if name in _MEANT else near(name, (*SIZES, *FUNCTIONS))
                why = f"names {name!r}, which is none of the sizes m, n and k"
                raise _error(text, why, did_you_mean(meant))
        case ast.Constant(value=value):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise _error(text, f"has {value!r}, which is not a number; allowed are {_LANGUAGE}")
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            number = ast.unparse(exponent).lstrip("+-")
            if not number.isdecimal() or int(number) > LARGEST_EXPONENT:
                range_ = f"from -{LARGEST_EXPONENT} to {LARGEST_EXPONENT}"
                raise _error(text, f"has an exponent that is not a whole number {range_}")
            parts = [base]
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OPERATORS):
            parts = [left, right]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not(), operand=operand):
            parts = [operand]
        case ast.BoolOp(values=parts):
            pass
        case ast.Compare(left=left, ops=ops, comparators=others) if {*map(type, ops)} <= {*_COMPARISONS}:
            parts = [left, *others]
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=named) if name in FUNCTIONS:
            if named or len(parts) < 2:
                raise _error(text, f"has {name} of fewer than two numbers, or of something with a name")
        case ast.Call():
            raise _error(text, "calls something other than min or max")
        case _:
            kind = type(node.ops[0] if isinstance(node, ast.Compare) else getattr(node, "op", node)).__name__
            raise _error(text, f"uses {kind}{_SPELLED.get(kind, '')}; allowed are {_LANGUAGE}")
    logical = isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))
    if condition is not (logical or isinstance(node, ast.Compare)):
        if outermost:
            raise _error(text, f"is a number; a condition compares, as in '{text} < 128'")
        wanted = "condition" if condition else "number"
        raise _error(text, f"needs a {wanted} where it has {ast.unparse(node)!r}")
    for part in parts:
        _check(part, text, logical, outermost=False)


def _error(text: str, why: str, hint: str = "") -> PolicyError:
    return PolicyError(f"'where': {text!r} {why}.{hint}", "where", text)
