"""Pieces of a kernel's source: integer expressions, names of dtypes, indentation."""

from __future__ import annotations

import functools

import sympy
import torch


def integer(expr: sympy.Expr) -> str:
    """An integer expression as text. Raises Unwritable if it has no form in a kernel."""
    if expr.is_Integer or expr.is_Symbol:
        return str(expr)
    if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
        return " * ".join([f"({integer(expr.base)})"] * int(expr.exp))
    if type(expr).__name__ in ("Max", "Min"):  # of one or more arguments: a number of blocks, say
        return functools.reduce(lambda a, b: f"tl.{type(expr).__name__.lower()}imum({a}, {b})", map(integer, expr.args))
    sign = {"Add": " + ", "Mul": " * ", "FloorDiv": " // ", "Mod": " % ", "PythonMod": " % "}.get(type(expr).__name__)
    if sign is None:
        raise Unwritable(f"the size {expr}")
    return sign.join(integer(x) if x.is_Atom else f"({integer(x)})" for x in expr.args)


class Unwritable(Exception):
    """A group that cannot be written as a kernel."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
