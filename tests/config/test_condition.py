"""The expression language of `where`: expressions mean the same as in Python, and others are refused."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8compile.config.policy import condition
from fp8compile.errors import OptionError

SIZES = st.integers(0, 2**20)
COMPARISONS = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])


def larger_numbers(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner),
        st.builds("({}) ** {}".format, inner, st.integers(0, 4)),
        st.builds("-({})".format, inner),
        st.builds("{}({}, {})".format, st.sampled_from(["min", "max"]), inner, inner),
    )


def larger_conditions(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    joined = st.builds("({}) {} ({})".format, inner, st.sampled_from(["and", "or"]), inner)
    return joined | st.builds("not {}".format, inner)


LEAVES = st.sampled_from(["m", "n", "k", "0", "128"]) | st.integers(0, 2**40).map(str)
NUMBERS = st.recursive(LEAVES, larger_numbers, max_leaves=4)
CONDITIONS = st.recursive(
    st.one_of(
        st.builds("{} {} {}".format, NUMBERS, COMPARISONS, NUMBERS),
        st.builds("{} {} {} {} {}".format, NUMBERS, COMPARISONS, NUMBERS, COMPARISONS, NUMBERS),
    ),
    larger_conditions,
    max_leaves=3,
)


def exact(text: str, m: int, n: int, k: int) -> bool:
    """The condition in exact arithmetic: every number except exponents becomes a Fraction."""
    fractions = re.sub(r"(\*\* )?\b(\d+)", lambda x: x[0] if x[1] else f"F({x[2]})", text)
    names = {"F": Fraction, "m": Fraction(m), "n": Fraction(n), "k": Fraction(k)}
    names |= {"min": min, "max": max, "__builtins__": {}}
    try:
        return eval(fractions, names)
    except ZeroDivisionError:
        return False


@settings(max_examples=150, deadline=None)
@given(CONDITIONS, SIZES, SIZES, SIZES)
def test_whole_numbers_are_exact(text, m, n, k):
    assert condition.holds(condition.checked(text), m, n, k) is exact(text, m, n, k), text


HUGE = "(n ** 64) * (k ** 64)"  # of 2**40 each, more than a float64 can hold


@pytest.mark.parametrize(
    "text, sizes, holds",
    [
        ("n < 128 or k < 128", (1, 127, 4096), True),
        ("256 <= n <= 8192", (1, 8193, 1), False),
        ("n / k == 0.3", (1, 3, 10), True),
        ("n / k <= 1e-3 or n / k > 2.5", (1, 5, 2), False),
        ("m * n * k >= 2**60 + 1", (2**20, 2**20, 2**20), False),  # not in float64
        ("-n ** 2 == -9", (1, 3, 1), True),  # Python's precedence
        ("2 ** -1 == 0.5", (1, 1, 1), True),
        ("not n < 3 and k > 2", (1, 3, 3), True),
        ("n < 3\n  or k  < 3", (1, 3, 2), True),
        ("- 7 // 2 == -4 and -7 % 3 == 2", (1, 1, 1), True),
        # a division by zero, and a fraction that is too large, make the whole condition false
        ("not n / m > 3", (0, 4, 5), False),
        ("n // m > 3 or n == 4", (0, 4, 5), False),
        ("n == 4 or n / m > 3", (0, 4, 5), True),  # never reached
        ("m ** -1 < 3", (0, 4, 5), False),
        (f"{HUGE} / 3 > 1", (1, 2**40, 2**40), False),
        (f"{HUGE} / 3 < 1", (1, 2**40, 2**40), False),
        (f"{HUGE} // 3 > 1", (1, 2**40, 2**40), True),  # whole numbers have no limit
    ],
)
def test_meaning(text, sizes, holds):
    assert condition.holds(condition.checked(text), *sizes) is holds


@pytest.mark.parametrize(
    "text, says",
    [
        ("n", "is a number; a condition compares"),
        ("n and k", "needs a condition where it has 'n'"),
        ("(n < 3) < 4", "needs a number where it has 'n < 3'"),
        ("max(n < 3, k) < 3", "needs a number where it has 'n < 3'"),
        ("n = 3", "Write '==' for '='"),
        ("n < 3 && k < 3", "Write 'and' for '&&'"),
        ("n < 3 & k", "write 'and'"),
        ("n <", "not an expression"),
        ("n < 3) or (k < 3", "unmatched"),
        ("n\0 < 3", "not an expression"),
        ("M < 3", "Did you mean 'm'"),
        ("tokens < 3", "Did you mean 'm'"),
        ("min < max", "names 'min'"),
        ("True", "not a number"),
        ("n < 3j", "not a number"),
        ("n < 3 # narrow", "comment"),
        ("n ** k < 3", "exponent"),
        ("n ** 0.5 < 3", "exponent"),
        ("n ** -65 < 3", "exponent"),
        ("(n ** True) < 3", "exponent"),
        ("9**9**9 < n", "exponent"),
        ("n > " + "+".join("1" * 3000), "has 6003 characters, and may have 500"),
        ("abs(n) < 3", "calls something other"),
        ("min.__self__.eval('1') < 3", "calls something other"),
        ("n.real < 3", "Attribute"),
        ("[m for m in n]", "ListComp"),
        ("n is 3", "Is"),
        ("max(n, k, key=m) < 3", "something with a name"),
        ("max(*n) < 3", "fewer than two"),
        ("max(n, *k) < 3", "Starred"),
        ("", "a condition"),
        (3, "a condition"),
    ],
)
def test_errors(text, says):
    with pytest.raises(OptionError) as caught:
        condition.checked(text)
    assert says in str(caught.value) and caught.value.key == "where" and len(str(caught.value)) < 1000
