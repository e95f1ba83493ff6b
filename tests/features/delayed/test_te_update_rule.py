"""The delayed update rule of TransformerEngine, written down from its description, against ours on the same
amaxes.

From transformer_engine/common/recipe/delayed_scaling.cu: the history of a tensor has `length` entries. A step
writes its amax into entry 0. The update reads the amax: the largest of all entries for "max" (by fmaxf, which
ignores NaN), or entry 0 for "most_recent". It shifts the history, so that entry 0 becomes 0 and the oldest
entry is dropped, and sets

    scale = fp8_max * 2^-margin / amax        if amax is finite and greater than 0, otherwise the old scale
    scale = FLT_MAX                           if the quotient is infinite
    scale_inv = 1 / scale

all in float32. Scales begin at 1. Ours have the same bits for every sequence of finite amaxes. We differ only
on purpose; the tests at the end show where. A trained model's scales follow this rule in test_agreement.py:
the oracle has it, too.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8compile.features.delayed import slot_ops, state_page
from fp8compile.ir import ops
from tests.support.harness import MOVING
from tests.support.reference_casts import FLT_MAX, float32

E4M3, E5M2 = 448.0, 57344.0
INF, NAN = math.inf, math.nan


def fmaxf(values: list[float]) -> float:
    return max((x for x in values if not math.isnan(x)), default=NAN)


def divided(a: float, b: float) -> float:
    """a / b of float32 numbers as float32, rounded once: float64 has more than twice the digits."""
    return float32(a / b)


def moved(page: Tensor, *calls: list[float] | Tensor, first: int = 0, parts: tuple[int, ...] = ()) -> Tensor:
    """The page after calls with these amaxes of rows from `first` on. `parts`: of rows; one by default."""
    amaxes = state_page.new_amaxes(page.shape[0], page.device)
    for seen in calls:
        amaxes = ops.raised_of(amaxes, [torch.as_tensor(seen)], [first])
    return state_page.next_page(page, amaxes, torch.tensor(parts or [0] * page.shape[0]))


class TransformerEngine:
    """One tensor's state: `history[0]` is the entry that a step writes to."""

    def __init__(self, length: int, algo: str, fp8_max: float = E4M3, margin: int = 0) -> None:
        self.history, self.algo = [0.0] * length, algo
        self.scaled_max = fp8_max * 2.0**-margin
        self.scale = self.scale_inv = 1.0

    def step(self, amax: float) -> float:
        """-> the scale that this step quantizes with."""
        used = self.scale
        self.history[0] = amax
        chosen = fmaxf(self.history) if self.algo == "max" else amax
        self.history = [0.0, *self.history[2:], amax] if len(self.history) > 1 else [0.0]
        if math.isfinite(chosen) and chosen > 0.0:
            self.scale = min(divided(self.scaled_max, chosen), FLT_MAX)
        self.scale_inv = divided(1.0, self.scale)
        return used


class Ours:
    """The same interface for a page of ours with one slot."""

    def __init__(
        self, length: int, algo: str, fp8_max: float = E4M3, margin: int = 0, limit: float = INF
    ) -> None:
        window = 1 if algo == "most_recent" else length
        slot = state_page.SlotSettings(fp8_max / 2.0**margin, window, 1, limit)
        self.page = state_page.new_page(1, length, torch.device("cpu"), [slot])
        self.fp8_max, self.margin = fp8_max, margin

    def step(self, amax: float) -> float:
        seen = torch.tensor([amax])
        scales = state_page.scales_of(self.page)
        used = slot_ops.delayed_scale(scales, seen, 0, self.fp8_max, self.margin).item()
        self.page = moved(self.page, seen)
        return used

    def column(self, index: int) -> float:
        return self.page[0, index].item()

    scale = property(lambda self: self.column(state_page.SCALE))
    scale_inv = property(lambda self: self.column(state_page.SCALE_INV))
    cold = property(lambda self: self.column(state_page.AGE) < 0.0)
    history = property(lambda self: self.page[0, state_page.HISTORY :].tolist())


def pair(*args, **kwargs) -> tuple[TransformerEngine, Ours]:
    return TransformerEngine(*args, **kwargs), Ours(*args, **kwargs)


def assert_equal(theirs: TransformerEngine, mine: Ours, where: object = "") -> None:
    assert (mine.scale, mine.scale_inv) == (theirs.scale, theirs.scale_inv), where
    kept = len(theirs.history) - 1  # one entry is reserved for the next step
    assert mine.history[:kept] == theirs.history[:0:-1], where


finite = st.one_of(st.just(0.0), st.floats(0.0, FLT_MAX, width=32), st.floats(2.0**-6, 1024.0, width=32))


TINY = [1e-45, 1e-40, 1.3e-36, 0.0, *[1e-45] * 5]
LARGEST = [FLT_MAX, 1.0, FLT_MAX, 1e30, 1e-30, 1e-38]
LONG = [float32(abs(math.sin(i * i)) * 10.0 ** (i % 7 - 3)) for i in range(100)]


@settings(max_examples=60, deadline=None)
@example(TINY, 4, "max", E4M3, 0)
@example(LARGEST, 2, "max", E4M3, 0)
@example(LONG, 1024, "max", E4M3, 0)
@given(
    st.lists(finite, max_size=24),
    st.integers(1, 9),
    st.sampled_from(["max", "most_recent"]),
    st.sampled_from([E4M3, E5M2]),
    st.integers(0, 6),
)
def test_equal_on_any_finite_amaxes(
    amaxes: list[float], length: int, algo: str, fp8_max: float, margin: int
) -> None:
    theirs, mine = pair(length, algo, fp8_max, margin)
    for amax in map(float32, amaxes):
        was_cold = mine.cold
        used = theirs.step(amax), mine.step(amax)
        assert was_cold or used[0] == used[1]
        assert_equal(theirs, mine, amaxes)


# -- where we differ --


def test_the_first_amax_is_used_at_once() -> None:
    """TransformerEngine's scale is 1 until an update after a non-zero amax; ours is used in that step."""
    theirs, mine = pair(4, "max")
    for amax in (0.0, 0.0):
        assert theirs.step(amax) == mine.step(amax) == 1.0
    assert (theirs.step(0.5), mine.step(0.5)) == (1.0, 896.0)
    assert theirs.step(0.5) == mine.step(0.5)  # equal from the second step on


def unmarked(page: Tensor) -> Tensor:
    """A page without what it says of amaxes that were not finite."""
    page = page.clone()
    page[:, [state_page.LOST, state_page.NOT_FINITE]] = 0.0
    return page


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_an_infinity_leaves_no_trace(algo: str) -> None:
    """TransformerEngine keeps an infinity in its history, so that "max" cannot change; ours continues."""
    theirs, mine = pair(4, algo)
    stuck = 0
    for amax, scale in ((1.0, 448.0), (INF, 448.0), *[(2.0, 224.0)] * 6):
        theirs.step(amax)
        mine.step(amax)
        assert mine.scale == scale and INF not in mine.history
        stuck += theirs.scale != scale
    assert stuck == (3 if algo == "max" else 0) and theirs.scale == 224.0


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_nan_leaves_no_trace(algo: str) -> None:
    """TransformerEngine shifts its history and ignores the NaN; ours does not count the step."""
    theirs, mine = pair(3, algo)
    for amax in (4.0, 1.0, NAN):
        before = mine.page
        theirs.step(amax)
        mine.step(amax)
        assert torch.equal(unmarked(mine.page), before) == math.isnan(amax)
        assert theirs.scale == mine.scale
    theirs.step(1.0)
    mine.step(1.0)
    assert theirs.scale == 448.0  # the 4 is no longer in TransformerEngine's window of three steps
    assert mine.scale == (112.0 if algo == "max" else 448.0)  # and still in ours of three counted steps


@pytest.mark.parametrize("bad", [INF, -INF, NAN, math.copysign(NAN, -1.0)])
def test_one_tensor_that_is_not_finite_stops_its_part(bad: float) -> None:
    """Slots of one direction of a graph move together: in a step with a bad tensor, no amax is reliable. The
    other direction, and other graphs, move."""
    parts = 3, 3, 0, 3, 2  # numbers mean nothing but which rows belong together
    slot = state_page.SlotSettings(E4M3, 4, 1)
    page = state_page.new_page(5, 4, torch.device("cpu"), [slot] * 5)
    page = moved(page, [1.0, 2.0, 4.0, 8.0, 16.0], parts=parts)
    assert state_page.Rows(page).scale.tolist() == [448.0, 224.0, 112.0, 56.0, 28.0]
    after = moved(page, [32.0, bad, 32.0, 32.0, 32.0], parts=parts)
    stopped, others = [0, 1, 3], [2, 4]
    assert torch.equal(unmarked(after)[stopped], page[stopped])
    assert torch.equal(after[others], moved(page, [32.0] * 5, parts=parts)[others])
    assert state_page.Rows(after).scale[others].tolist() == [14.0, 14.0]
    seen = state_page.Rows(after)
    assert seen.lost.tolist() == seen.not_finite.tolist() == [0, 1, 0, 0, 0]
    again = state_page.Rows(moved(after, [bad, 1.0, 1.0, 1.0, 1.0], parts=parts))
    assert again.lost.tolist() == [1, 0, 0, 0, 0] and again.not_finite.tolist() == [1, 1, 0, 0, 0]


def test_rows_that_no_call_has_raised_stay() -> None:
    """So do marks of amaxes that were not finite, also if the part moves or stops. Zero has been seen."""
    slot = state_page.SlotSettings(E4M3, 4, 1)
    page = state_page.new_page(5, 4, torch.device("cpu"), [slot] * 5)
    page = moved(page, [1.0, 2.0, 4.0, 8.0, 16.0])
    page = moved(page, [1.0, 2.0, 4.0, 8.0, INF])  # the last row is marked
    assert state_page.Rows(page).lost.tolist() == [0, 0, 0, 0, 1]
    assert torch.equal(moved(page), page)
    after = moved(page, [32.0, 0.0], first=1)
    assert torch.equal(after[[0, 3, 4]], page[[0, 3, 4]])
    assert state_page.Rows(after).scale[1:3].tolist() == [14.0, 112.0]
    assert state_page.Rows(after).history[1:3].tolist() == [[32.0, 2.0, 0.0, 0.0], [0.0, 4.0, 0.0, 0.0]]
    stopped = moved(page, [NAN, 32.0], first=1)
    assert torch.equal(stopped[[0, 3, 4]], page[[0, 3, 4]])
    assert torch.equal(unmarked(stopped)[:3], unmarked(page)[:3])
    assert state_page.Rows(stopped).not_finite.tolist() == [0, 1, 0, 0, 1]
    # a row of another part that was not raised does not care what its neighbours meet
    assert torch.equal(moved(page, [NAN], parts=(0, 1, 1, 1, 1))[1:], page[1:])


@pytest.mark.parametrize("odd", [0.0, NAN, INF])
def test_calls_between_two_moves_are_one_of_their_largest_amaxes(odd: float) -> None:
    """NaN is above infinity, and infinity above all numbers; a recomputation changes nothing."""
    slot = state_page.SlotSettings(E4M3, 4, 1)
    page = moved(state_page.new_page(3, 4, torch.device("cpu"), [slot] * 3), [1.0, 2.0, 4.0])
    one, other, largest = [3.0, 0.0, 5.0], [2.0, odd, 7.0], [3.0, odd, 7.0]
    expected = moved(page, largest)
    assert torch.equal(moved(page, one, other), expected) and torch.equal(moved(page, other, one), expected)
    assert torch.equal(moved(page, other, one, other), expected) and not torch.equal(expected, page)
    assert torch.equal(moved(page, [NAN], [INF]), moved(page, [NAN]))


def test_an_overflow_changes_nothing_where_scales_move_in_each_step() -> None:
    """It is counted, but for the one that follows another."""
    theirs, mine = pair(4, "max")[0], Ours(4, "max", limit=state_page.JUMP * E4M3)
    for amax, overflows in ((1.0, 0), (2.0, 0), (4.0, 0), (9.0, 1), (90.0, 1), (900.0, 2), *[(2.0, 2)] * 5):
        assert theirs.step(amax) == mine.step(amax) or amax == 1.0
        assert_equal(theirs, mine, amax)
        assert mine.column(state_page.OVERFLOWS) == overflows


def test_a_page_moves_every_slot_by_its_own_rule() -> None:
    rules = [(E4M3, 1, 0), (E4M3, 4, 0), (E5M2, 4, 2)]
    theirs = [
        TransformerEngine(4, "most_recent" if w == 1 else "max", fp8_max, margin)
        for fp8_max, w, margin in rules
    ]
    slots = [state_page.SlotSettings(fp8_max / 2.0**margin, window, 1) for fp8_max, window, margin in rules]
    page: Tensor = state_page.new_page(4, 4, torch.device("cpu"), slots)
    for step, factor in enumerate(MOVING):
        amaxes = [float32(factor * (step + 1 + i)) for i in range(3)]
        page = moved(page, amaxes)
        for rule, amax in zip(theirs, amaxes, strict=True):
            rule.step(amax)
        assert page[:3, state_page.SCALE].tolist() == [rule.scale for rule in theirs]
        assert page[:3, state_page.SCALE_INV].tolist() == [rule.scale_inv for rule in theirs]
