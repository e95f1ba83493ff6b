"""Which tests a run takes: `make test` those without a mark, `make slow` those marked `slow`, `make weekly`
those marked `weekly`.

A test with many parameters can have cases in each: `@pytest.mark.cases(test=2, slow=4)` leaves 2 of them to
`make test`, 4 others to `make slow`, and the rest to `make weekly`. They are spread evenly over its
parameters.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

Items = list[pytest.Item]
# what `make` gives to `-m`
MARKS = {"test": "not slow and not weekly", "slow": "slow and not weekly", "weekly": "weekly"}


def spread(items: Items, number: int) -> Items:
    """So many of the items, at equal distances; all of them, if there are fewer."""
    number = min(number, len(items))
    return [items[i * len(items) // number] for i in range(number)]


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items: Items) -> None:
    tests: dict[str, Items] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("cases"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        wanted = dict(cases[0].get_closest_marker("cases").kwargs)  # type: ignore[union-attr]
        test = spread([case for case in cases if not case.get_closest_marker("slow")], wanted.pop("test", 0))
        slow = spread([case for case in cases if case not in test], wanted.pop("slow", 0))
        assert not wanted, (
            f"{cases[0].nodeid}: pytest.mark.cases takes test and slow, not {', '.join(wanted)}"
        )
        for case in cases:
            if case not in test:
                case.add_marker("slow" if case in slow else "weekly")
