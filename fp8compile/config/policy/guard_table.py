"""`[guard]`: when the guard measures, and where it moves what fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .policy_errors import PolicyError
from .validation import key, line, table, whole

LAST = "high_precision"  # the last rung of a ladder


def _rungs(name: str, given: Any) -> tuple[str, ...]:
    rungs = tuple(given) if isinstance(given, (list, tuple)) else ()
    known = [line("the name of a recipe")(name, rung) for rung in rungs]
    if not rungs or len({*known}) < len(known) or LAST in known[:-1]:
        raise PolicyError.of(name, given, f"a list of different recipes, of which {LAST!r} may be the last")
    return rungs


@table("[guard]")
@dataclass(frozen=True, kw_only=True)
class GuardTable:
    """`[guard]`: what `fp8compile.guard(model)` does. Steps are optimizer steps."""

    every: int = whole(
        "Measure a call each so many steps, and before the first of them at steps 2, 3, 4, 8, 16 and so on.",
        least=50,
        default=500,
    )
    patience: int = whole(
        "Move what is out of its band in so many measurements in a row.", least=2, default=3
    )
    ladder: tuple[str, ...] = key(
        f"Where gemms move: the first of these recipes that repairs them. After the last one: {LAST!r}.",
        _rungs,
        ("rowwise", "blockwise", LAST),
    )
    most: int = whole("Move at most so many layers at a time.", least=1, default=4)

    def measures(self, step: int) -> bool:
        """True if this step is measured. What fails from the beginning cannot wait for `every`."""
        early = 1 < step < self.every and (step == 3 or step.bit_count() == 1)
        return early or (step > 0 and step % self.every == 0)

    @property
    def rungs(self) -> tuple[str, ...]:
        """The recipes of the ladder."""
        return tuple(rung for rung in self.ladder if rung != LAST)
