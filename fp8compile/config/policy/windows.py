"""Rules in time: which rules of a policy are active at a step, and the sets of rules to compile.

    during = "1000.."             from step 1000 on
    during = "1000..5000"         up to step 5000, without it
    during = ["..2%", "90%.."]    of [schedule] total_steps, rounded down
    during = "by hand"            off until `set_rule`

Steps are optimizer steps. A *set* is the positions of the rules that are active at a step, in order. It ends
at the first without conditions: none decides after that one.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ...errors import at_most, near
from .policy_errors import PolicyError, place_of
from .validation import several

if TYPE_CHECKING:
    from .policy_tables import Policy, Rule, Schedule

BY_HAND = "by hand"
SCHEDULE = "schedule"  # the name of the rule for which [schedule] stands
MOST_SETS = 16
_COUNTED = 256  # sets, until counting ends
_NEVER = sys.maxsize
_SHARE, _NUMBER = r"\d{1,3}(?:\.\d{1,6})?%", r"\d{1,12}"
_WINDOW = re.compile(rf"(?:{_SHARE}|{_NUMBER})?\.\.(?:{_SHARE}|{_NUMBER})?")
_FORMS = "a window, such as '1000..', '..200', '1000..5000' or '90%..', a list of them, or 'by hand'"
Set = tuple[int, ...]


def checked(key: str, given: Any) -> tuple[str, ...]:
    """One window or a list of them, as they are written."""
    texts = several(_checked)(key, given)
    if BY_HAND in texts and len(texts) > 1:
        raise PolicyError.of(key, given, f"{BY_HAND!r} alone, or windows")
    return texts


def _checked(key: str, given: Any) -> str:
    text = given if isinstance(given, str) else ""
    if text != BY_HAND and (text == ".." or not _WINDOW.fullmatch(text)):
        raise PolicyError.of(key, given, _FORMS, _meant(given))
    if any(Fraction(share[:-1]) > 100 for share in re.findall(_SHARE, text)):
        raise PolicyError.of(key, given, "a window of at most 100%")
    return text


def _meant(given: Any) -> list[str]:
    """The nearest window."""
    text = str(given)[:100] if isinstance(given, (str, int)) and not isinstance(given, bool) else ""
    numbers = re.findall(rf"{_SHARE}|{_NUMBER}", text.replace("_", ""))
    if not numbers:
        return near(text, [BY_HAND])
    if len(numbers) > 1:
        return [f"{numbers[0]}..{numbers[1]}"]
    last = re.match(r"\s*(\.|-|:|<|to|until|till|up|before|first)", text.lower())
    return [f"..{numbers[0]}" if last else f"{numbers[0]}.."]


class _Entry(NamedTuple):
    """A rule: windows as (first step, the one after the last), None where it is always active."""

    name: str | None
    windows: tuple[tuple[int, int], ...] | None
    free: bool  # the schedule's, or switched by hand: compiled for both states
    everything: bool  # has no conditions

    def on(self, step: int) -> bool:
        return self.windows is None or any(first <= step < end for first, end in self.windows)


class Timed:
    """What `Policy` does over time. A position is an index into `timed`."""

    rules: tuple[Rule, ...]
    schedule: Schedule | None
    labels: tuple[str, ...]
    own: int | None
    source: str

    @cached_property
    def timed(self) -> tuple[Rule, ...]:
        """The schedule's rule, if there is one, and then all others."""
        rule = self.schedule and self.schedule.rule
        return (rule, *self.rules) if rule else self.rules

    @cached_property
    def varies(self) -> bool:
        """Whether some rule is not always active."""
        return any(rule.during for rule in self.timed)

    def active(self, step: int, by_hand: Mapping[str, bool] = MappingProxyType({})) -> Set:
        """The set of a step. `by_hand`: name of a rule with `during` -> on or off, whatever its windows."""
        if by_hand and self.varies:
            return self._active(step, by_hand)
        return self.timeline[bisect.bisect_right(self.timeline, step, key=lambda one: one[0]) - 1][1]

    def during(self, active: Set) -> Policy:
        """The policy of these rules alone, without windows and schedule. In a phase of the schedule, nothing
        is kept in FP8."""
        if active not in self._policies:
            changes: dict[str, Any] = {"save": "auto"} if active and active[0] < self._before else {}
            self._policies[active] = dataclasses.replace(
                cast("Policy", self),
                rules=tuple(dataclasses.replace(self.timed[i], during=None) for i in active),
                labels=tuple(map(self._label, active)),
                own=None if self.own is None else sum(map(self._own, active)),
                schedule=None,
                guard=None,
                **changes,
            )
        return self._policies[active]

    @cached_property
    def timeline(self) -> tuple[tuple[int, Set], ...]:
        """(first step, set), from step 0 on. PolicyError for a share of `total_steps` without that."""
        if not self.varies:
            return ((0, tuple(range(len(self.timed)))),)
        found = [(step, self._active(step, {})) for step in self._steps]
        return tuple(each for i, each in enumerate(found) if i == 0 or each[1] != found[i - 1][1])

    @cached_property
    def sets(self) -> tuple[Set, ...]:
        """The distinct sets of the timeline, then those that switches by hand can add: of the schedule's rule
        and of rules with `during = "by hand"`. PolicyError if there are more than MOST_SETS."""
        found = dict.fromkeys(active for _, active in self.timeline)
        if self.varies:
            found |= dict.fromkeys(active for step in self._steps for active in self._switched(step))
        if len(found) > MOST_SETS:
            count = f"more than {_COUNTED}" if len(found) > _COUNTED else len(found)
            hands = [repr(rule.name) for rule in self.timed if rule.during == (BY_HAND,)]
            drop = f"rules that are switched by hand ({', '.join(at_most(5, hands))}), or " if hands else ""
            text = f"each graph would be compiled for {count} sets of rules, and {MOST_SETS} are allowed"
            raise PolicyError(f"'during': {text}: drop {drop}windows.", "during", count)
        return tuple(found)

    @property
    def names(self) -> tuple[str, ...]:
        """What reports call the rules of `timed`."""
        return tuple(map(self._label, range(len(self.timed))))

    def active_names(self, active: Set) -> list[str]:
        """What reports call the rules with windows in a set."""
        return [self._label(i) for i in active if self.timed[i].during]

    def window_text(self, position: int) -> str:
        """The windows of a rule as they are written: "..200, 5000.."; "" if it is always active."""
        return ", ".join(self.timed[position].during or ())

    def _check_windows(self) -> None:
        """PolicyError for windows that cannot be meant so, if it is known how many steps there are."""
        if self.varies and self._unknown is None:
            errors = [error for i in range(len(self.timed)) for error in self._wrong(i)]
            if errors := errors or list(self._clashes()):
                raise PolicyError.joined(errors)
            _ = self.sets

    # -- sets --

    @cached_property
    def _policies(self) -> dict[Set, Policy]:
        return {}

    @cached_property
    def _entries(self) -> tuple[_Entry, ...]:
        if (i := self._unknown) is not None:
            text = f"{self.window_text(i)!r} is a share of all steps: write total_steps under [schedule]"
            error = self._error(i, f"'during': {text}.")
            error.source = f"policy {self.source}"
            raise error
        return tuple(
            _Entry(
                rule.name,
                self._windows(rule) if rule.during else None,
                i < self._before or rule.during == (BY_HAND,),
                not rule.conditions,
            )
            for i, rule in enumerate(self.timed)
        )

    @property
    def _total(self) -> int | None:
        return self.schedule.total_steps if self.schedule is not None else None

    @cached_property
    def _unknown(self) -> int | None:
        """The first rule with a share of all steps, if nobody says how many these are."""
        shares = (i for i, rule in enumerate(self.timed) if "%" in "".join(rule.during or ()))
        return next(shares, None) if self._total is None else None

    def _windows(self, rule: Rule) -> tuple[tuple[int, int], ...]:
        ends = (window.split("..") for window in rule.during or () if window != BY_HAND)
        return tuple((self._step(first or "0"), self._step(end) if end else _NEVER) for first, end in ends)

    def _step(self, text: str) -> int:
        share = text.endswith("%")
        return int(Fraction(text[:-1]) * (self._total or 0) / 100) if share else int(text)

    @cached_property
    def _steps(self) -> tuple[int, ...]:
        """The first step, and those at which a window begins or ends."""
        ends = {end for entry in self._entries for window in entry.windows or () for end in window}
        return tuple(sorted({0, *ends} - {_NEVER}))

    def _active(self, step: int, by_hand: Mapping[Any, bool]) -> Set:
        found = []
        for i, entry in enumerate(self._entries):
            on = by_hand.get(entry.name) if entry.windows is not None else None
            if entry.on(step) if on is None else on:
                found.append(i)
                if entry.everything:
                    break
        return tuple(found)

    def _switched(self, step: int) -> list[Set]:
        """All sets that switches by hand can make at a step."""
        growing, complete = list[Set]([()]), list[Set]()
        for i, entry in enumerate(self._entries):
            if entry.free or entry.on(step):
                longer = [(*found, i) for found in growing]
                growing = growing if entry.free else []
                if entry.everything:
                    complete += longer
                else:
                    growing = growing + longer
                if len(growing) + len(complete) > _COUNTED:
                    break
        return complete + growing

    @cached_property
    def _before(self) -> int:
        """The number of rules in `timed` that are not in `rules`."""
        return len(self.timed) - len(self.rules)

    def _own(self, i: int) -> bool:
        return i >= self._before and (self.own is None or i - self._before < self.own)

    def _label(self, i: int) -> str:
        return SCHEDULE if i < self._before else self.labels[i - self._before]

    # -- errors --

    def _wrong(self, i: int) -> Iterator[PolicyError]:
        """About the windows of a rule alone."""
        written, steps = self.timed[i].during or (), self._entries[i].windows or ()
        total = f", of {self._total}" if self._total is not None else ""
        for text, (first, end) in zip(written, steps, strict=False):
            if end <= first:
                why = "is empty" if end == first else "is reversed"
                yield self._error(i, f"'during': {text!r} {why}: from step {first} to {end}{total}.")
            elif self._total is not None and first >= self._total:
                yield self._error(i, f"'during': {text!r} never begins: total_steps is {self._total}.")
        ordered = sorted(zip(steps, written, strict=False))
        for (one, text), (other, later) in itertools.pairwise(ordered):
            if other[0] < one[1]:
                yield self._error(i, f"'during': {text!r} and {later!r} overlap: write one window.")

    def _clashes(self) -> Iterator[PolicyError]:
        """About rules and those before them. The user's own may hide those of a policy that is extended."""
        names, alike = dict[str, int](), dict[str, list[int]]()
        deciding = {i for _, active in self.timeline for i in active}
        for i, rule in enumerate(self.timed):
            j = names.setdefault(rule.name, i) if rule.name is not None else i
            if j != i and (rule.during or self.timed[j].during):
                text = f"'name': {self._called(j)} is called {rule.name!r}, too; give this one another name."
                yield self._error(i, text, "name")
            if not (rule.during and self._own(i)):
                continue
            before = alike.setdefault(repr(rule.conditions), [])
            window = f"'during': {self.window_text(i)!r}"
            if (over := next((j for j in before if self._overlap(i, j)), None)) is not None:
                other = f"{self.window_text(over)!r} of {self._called(over)}, which has the same conditions"
                yield self._error(i, f"{window} overlaps {other} and decides first.")
            elif i not in deciding and rule.during != (BY_HAND,):
                why = "a rule without conditions is active before it"
                yield self._error(i, f"{window}: this rule never decides, because {why}.")
            before.append(i)

    def _overlap(self, i: int, j: int) -> bool:
        mine, theirs = (self._entries[k].windows or () for k in (i, j))
        return any(a < d and c < b for (a, b), (c, d) in itertools.product(mine, theirs))

    def _called(self, i: int) -> str:
        return f"rule {i + 1 - self._before}" if i >= self._before else "the rule of [schedule]"

    def _error(self, i: int, text: str, key: str = "during") -> PolicyError:
        value = getattr(self.timed[i], key)
        if not self._own(i):  # a file has no such rule: `text` has to name it
            return PolicyError(f"{self._label(i)}: {text}", key, value, ("extends",))
        error = PolicyError(text, key, value, ("rules", i - self._before, key))
        error.place = place_of(error.path, {"rules": [{"name": rule.name} for rule in self.rules]})
        return error
