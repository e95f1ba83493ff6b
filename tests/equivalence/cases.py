"""Which features, models, protocols and recipes meet in a case: few cases; each pair meets once or more."""

from __future__ import annotations

import functools
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from tests.equivalence.features import Feature
from tests.equivalence.protocols import PROTOCOLS
from tests.support.reference_settings import RECIPES

Pair = tuple[str, str]
TRIES = 30  # random cases, of which the one with the most new pairs is taken


@dataclass(frozen=True)
class Case:
    """Some features on one model with one recipe, and the training loops that use what is compiled."""

    features: tuple[Feature, ...]
    model: str
    recipe: str
    protocols: tuple[str, ...]

    def __str__(self) -> str:
        return f"{' + '.join(f.name for f in self.features)}; {self.model}, {self.recipe}".replace(" ", "_")

    def pairs(self) -> Iterator[Pair]:
        """What meets in this case, by names."""
        for feature in self.features:
            for other in (self.model, self.recipe, *self.protocols):
                yield feature.name, other
        for one, other in combinations(sorted(f.name for f in self.features), 2):
            yield one, other


def compatible(features: Collection[Feature]) -> bool:
    ways = [f.name for f in features if f.compiled is not None]
    return len(ways) < 2 and not any(other.name in one.refuses for one in features for other in features)


@functools.cache
def choices(features: tuple[Feature, ...]) -> tuple[list[str], list[str], list[str]]:
    """The models, protocols and recipes that all of these features take."""
    models = [name for name in features[0].models if all(name in f.models for f in features)]
    protocols = [name for name in PROTOCOLS if not any(name in f.refuses for f in features)]
    recipes = [name for name in RECIPES if all(name in f.recipes for f in features)]
    return models, protocols, recipes


def possible(features: Sequence[Feature]) -> set[Pair]:
    """All pairs that a case can have."""
    found: set[Pair] = set()
    for one in features:
        found |= {(one.name, other) for others in choices((one,)) for other in others}
    for one, other in combinations(features, 2):
        if compatible((one, other)) and all(choices((one, other))):
            found.add((min(one.name, other.name), max(one.name, other.name)))
    return found


def covering(features: Sequence[Feature], most: int = 4, protocols: int = 4, seed: int = 0) -> list[Case]:
    """Cases of at most so many features and protocols, in which every possible pair occurs. The same ones for
    the same arguments."""
    draw, left, cases = random.Random(seed), possible(features), list[Case]()
    while left:
        tried = [_random(draw, features, most, protocols, left) for _ in range(TRIES)]
        best = max(tried, key=lambda case: len(left & set(case.pairs())))
        left -= set(best.pairs())
        cases.append(best)
    return cases


def _random(
    draw: random.Random, features: Sequence[Feature], most: int, protocols: int, left: set[Pair]
) -> Case:
    """A case that has a pair which has not occurred yet."""
    names = {f.name: f for f in features}
    pair = draw.choice(sorted(left))
    chosen = [names[name] for name in pair if name in names]
    for feature in draw.sample(list(features), len(features)):
        more = (*chosen, feature)
        if len(chosen) < most and feature not in chosen and compatible(more) and all(choices(more)):
            if pair[1] in names or any(pair[1] in kind for kind in choices(more)):
                chosen.append(feature)
    models, loops, recipes = choices(tuple(chosen))
    model, recipe = (pair[1] if pair[1] in kind else draw.choice(kind) for kind in (models, recipes))
    new = [name for name in loops if any((f.name, name) in left for f in chosen)]
    picked = sorted(
        draw.sample(new, len(new)), key=lambda name: -sum((f.name, name) in left for f in chosen)
    )[:protocols]
    return Case(tuple(chosen), model, recipe, tuple(picked) or ("steps",))
