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


def numbers(depth: int) -> st.SearchStrategy[str]:
    leaf = st.one_of(
        st.sampled_from(["m", "n", "k"]),
        st.integers(0, 2**40).map(str),
        st.sampled_from(["128", "0"]),
    )
    if depth == 0:
        return leaf
    inner = numbers(depth - 1)
    return st.one_of(
        leaf,
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(lambda x: f"({x[0]} {x[1]} {x[2]})"),
        st.tuples(inner, st.integers(0, 4)).map(lambda x: f"({x[0]}) ** {x[1]}"),
        inner.map(lambda x: f"-({x})"),
        st.tuples(st.sampled_from(["min", "max"]), st.lists(inner, min_size=2, max_size=3)).map(
            lambda x: f"{x[0]}({', '.join(x[1])})"
        ),
    )


def conditions(depth: int) -> st.SearchStrategy[str]:
    comparison = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
    leaf = st.one_of(
        st.tuples(numbers(depth), comparison, numbers(depth)).map(" ".join),
        st.tuples(numbers(1), comparison, numbers(1), comparison, numbers(1)).map(" ".join),
    )
    if depth == 0:
        return leaf
    inner = conditions(depth - 1)
    return st.one_of(
        leaf,
        st.lists(inner, min_size=2, max_size=3).map(lambda x: " and ".join(f"({part})" for part in x)),
        st.lists(inner, min_size=2, max_size=3).map(" or ".join),
        inner.map(lambda x: f"not {x}"),
    )


def exact(text: str, m: int, n: int, k: int) -> bool:
    """The condition in exact arithmetic: every number except exponents becomes a Fraction."""
    fractions = re.sub(r"(\*\* )?\b(\d+)", lambda x: x[0] if x[1] else f"F({x[2]})", text)
    names = {"F": Fraction, "m": Fraction(m), "n": Fraction(n), "k": Fraction(k), "min": min, "max": max, "__builtins__": {}}
    try:
        return eval(fractions, names)
    except ZeroDivisionError:
        return False


@settings(max_examples=150, deadline=None)
@given(conditions(1), SIZES, SIZES, SIZES)
def test_whole_numbers_are_exact(text, m, n, k):
    assert condition.holds(condition.checked(text), m, n, k) is exact(text, m, n, k), text


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_a_condition_or_an_error(text):
    try:
        condition.holds(condition.checked(text), 3, 5, 7)
    except OptionError as error:
        assert error.key == "where" and str(error)


@pytest.mark.parametrize(
    "text, sizes, holds",
    [
        ("n < 128 or k < 128", (1, 127, 4096), True),
        ("n < 128 or k < 128", (1, 128, 128), False),
        ("256 <= n <= 8192", (1, 256, 1), True),
        ("256 <= n <= 8192", (1, 8193, 1), False),
        ("n / k == 0.3", (1, 3, 10), True),
        ("n / k <= 1e-3 or n / k > 2.5", (1, 5, 2), False),
        ("n // k == 3 and n % k == 1", (1, 10, 3), True),
        ("m * n * k >= 2**60", (2**20, 2**20, 2**20), True),
        ("m * n * k >= 2**60 + 1", (2**20, 2**20, 2**20), False),  # not in float64
        ("-n ** 2 == -9", (1, 3, 1), True),  # Python's precedence
        ("2 ** -1 == 0.5", (1, 1, 1), True),
        ("max(m, n, k) / min(m, n, k) > 8", (1, 4, 9), True),
        ("not n < 3 and k > 2", (1, 3, 3), True),
        ("n < 3\n  or k < 3", (1, 3, 2), True),
        ("- 7 // 2 == -4 and -7 % 3 == 2", (1, 1, 1), True),
    ],
)
def test_meaning(text, sizes, holds):
    assert condition.holds(condition.checked(text), *sizes) is holds


@pytest.mark.parametrize(
    "text, holds",
    [
        ("n / m > 3", False),
        ("not n / m > 3", False),  # the whole condition is false
        ("n // m > 3 or n == 4", False),
        ("n == 4 or n / m > 3", True),  # never reached
        ("m != 0 and n / m > 3", False),
        ("m ** -1 < 3", False),
        ("n % m == 0", False),
    ],
)
def test_a_division_by_zero_makes_it_false(text, holds):
    assert condition.holds(condition.checked(text), 0, 4, 5) is holds


@pytest.mark.parametrize(
    "text, says",
    [
        ("n", "is a number; a condition compares"),
        ("n and k", "needs a condition where it has 'n'"),
        ("(n < 3) < 4", "needs a number where it has 'n < 3'"),
        ("n = 3", "Write '==' for '='"),
        ("n < 3 && k < 3", "Write 'and' for '&&'"),
        ("n < 3 & k", "write 'and'"),
        ("n <", "not an expression"),
        ("M < 3", "Did you mean 'm'"),
        ("tokens < 3", "Did you mean 'm'"),
        ("out_features < 3", "Did you mean 'n'"),
        ("True", "not a number"),
        ("'n' < 'm'", "not a number"),
        ("n < 3j", "not a number"),
        ("n < 3 # narrow", "comment"),
        ("n ** k < 3", "exponent"),
        ("n ** 0.5 < 3", "exponent"),
        ("n ** 65 < 3", "exponent"),
        ("n ** -65 < 3", "exponent"),
        ("(n ** True) < 3", "exponent"),
        ("9**9**9 < n", "exponent"),
        ("abs(n) < 3", "calls something other"),
        ("n.real < 3", "Attribute"),
        ("(lambda: n)() < 3", "calls something other"),
        ("min.__self__.eval('1') < 3", "calls something other"),
        ("min < max", "names 'min'"),
        ("(n := 3) < 4", "NamedExpr"),
        ("f'{n}' < 'x'", "JoinedStr"),
        ("n[0] < 3", "Subscript"),
        ("await n < 3", "Await"),
        ("max(n, k, key=m) < 3", "something with a name"),
        ("max(n, *k) < 3", "Starred"),
        ("max(n < 3, k) < 3", "needs a number where it has 'n < 3'"),
        ("m @ n < 3", "MatMult"),
        ("~n < 3", "write 'not'"),
        ("__import__('os').system('true')", "calls something other"),
        ("[m for m in n]", "ListComp"),
        ("max(n) < 3", "fewer than two"),
        ("max(*n) < 3", "fewer than two"),
        ("n if m else k", "IfExp"),
        ("n is 3", "Is"),
        ("n < 3) or (k < 3", "unmatched"),
        ("", "a condition"),
        ("n\0 < 3", "not an expression"),
        (3, "a condition"),
    ],
)
def test_errors(text, says):
    with pytest.raises(OptionError) as caught:
        condition.checked(text)
    assert says in str(caught.value) and caught.value.key == "where" and len(str(caught.value)) < 1000


def test_a_fraction_that_is_too_large_makes_it_false():
    huge = "(n ** 64) * (k ** 64)"
    for text in (f"{huge} / 3 > 1", f"{huge} / 3 < 1"):
        assert not condition.holds(condition.checked(text), 1, 2**40, 2**40)
    assert condition.holds(condition.checked(f"{huge} // 3 > 1"), 1, 2**40, 2**40)  # whole numbers have no limit


def test_spaces_do_not_matter():
    assert condition.checked("n  <\n 128") == "n < 128"
