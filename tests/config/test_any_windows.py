"""Random windows: sets and timeline are those of the definition, evaluated at every step."""

from __future__ import annotations

import dataclasses
import itertools
import json
from fractions import Fraction

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fp8compile.config.policy import Policy, PolicyError, Rule, Schedule

TOTAL = 40
STEPS = st.lists(st.integers(1, TOTAL - 1), unique=True, min_size=1, max_size=4).map(sorted)


@st.composite
def windows(draw) -> list[str]:
    """Some that do not overlap, in steps and in percent."""
    steps = [draw(st.sampled_from([f"{n}", f"{100 * n / TOTAL:g}%"])) for n in draw(STEPS)]
    ends = [""] * draw(st.booleans()) + steps
    ends += [""] * (len(ends) % 2)
    return [f"{first}..{end}" for first, end in zip(ends[::2], ends[1::2], strict=True)]


DURING = st.one_of(st.none(), st.just("by hand"), windows())
RULES = st.lists(st.tuples(st.sampled_from([True, True, True, False]), DURING), min_size=1, max_size=5)


def naive(policy: Policy, step: int, by_hand: dict[str, bool]) -> tuple[int, ...]:
    """By the definition."""

    def at(text: str, otherwise: float) -> float:
        share = Fraction(text[:-1]) * TOTAL // 100 if text.endswith("%") else None
        return otherwise if not text else int(text) if share is None else share

    def on(rule: Rule) -> bool:
        if rule.during is None:
            return True
        if rule.name in by_hand:
            return by_hand[rule.name]
        if rule.during == ("by hand",):
            return False
        ends = (window.split("..") for window in rule.during)
        return any(at(first, 0) <= step < at(end, float("inf")) for first, end in ends)

    found = [i for i, rule in enumerate(policy.timed) if on(rule)]
    last = next((n for n, i in enumerate(found) if not policy.timed[i].conditions), len(found))
    return tuple(found[: last + 1])


@settings(max_examples=100, deadline=None)
@given(RULES, st.sampled_from([{"warmup_steps": 7, "cooldown_at": 33}, {}]))
def test_the_sets_are_those_of_all_steps(drawn, schedule):
    rules = []
    for i, (some, during) in enumerate(drawn):
        rules.append(Rule(name=f"r{i}", module=f"m{i}" if some else None, during=during))
    try:
        policy = Policy(rules=rules, schedule=Schedule(**schedule, total_steps=TOTAL))
    except PolicyError as error:  # a rule that never decides, or too many sets
        assert all("'during'" in str(part) for part in error.parts or [error])
        assume(False)
    assume(policy.varies)
    switched = [rule.name for rule in policy.timed if rule.during == ("by hand",) or rule.name == "schedule"]
    states = itertools.product((True, False), repeat=len(switched))
    hands = [{}, *(dict(zip(switched, on, strict=True)) for on in states)]
    expected = [[naive(policy, step, by_hand) for by_hand in hands] for step in range(TOTAL + 3)]
    for step, sets in enumerate(expected):
        assert [policy.active(step, by_hand) for by_hand in hands] == sets
    assert set(policy.sets) == set(itertools.chain(*expected)) and len({*policy.sets}) == len(policy.sets)
    by_time = [sets[0] for sets in expected]
    changes = [step for step in range(1, TOTAL + 3) if by_time[step] != by_time[step - 1]]
    assert list(policy.timeline) == [(step, by_time[step]) for step in (0, *changes)]
    assert list(policy.sets[: len({*by_time})]) == list(dict.fromkeys(by_time))
    for active in policy.sets:
        made = policy.during(active)
        rules = [dataclasses.replace(policy.timed[i], during=None) for i in active]
        assert made == Policy(rules=rules) and made.key == Policy(rules=rules).key
        assert json.loads(made.key)[3] is None
