"""Training with a feature equals training without it: every feature on every model, by every protocol and
recipe that it takes, and beside every other feature. `features.py` has the promises, `protocols.py` the
training loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from tests.equivalence.cases import Case, covering
from tests.equivalence.features import FEATURES, Feature
from tests.equivalence.trainings import trainings
from tests.support import hooks
from tests.support.harness import sqnr

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


@pytest.fixture(autouse=True)
def small_tensors() -> Iterator[None]:
    """The models are small, and so are the tensors that `save` keeps."""
    with hooks.saving_small_tensors():
        yield


def difference(case: Case, on: Sequence[Feature]) -> str:
    """ "" if the training with these features keeps their promises. Promises of bits are kept beside features
    of another promise: these are on, on both sides."""
    bitwise = [f for f in on if f.bitwise]
    others = tuple(f for f in on if not f.bitwise)
    ours, theirs = trainings(case, on), trainings(case, others if bitwise else ())
    wrong = [
        compared(ours[name].seen, theirs[name].seen, () if bitwise else others) for name in case.protocols
    ]
    return "; ".join(f"{name}: {found}" for name, found in zip(case.protocols, wrong, strict=True) if found)


def compared(got: dict[str, Tensor], expected: dict[str, Tensor], promises: Sequence[Feature]) -> str:
    """ "" if all is the same, or as near as `promises` say."""
    if got.keys() != expected.keys():
        return f"on one side only: {sorted(got.keys() ^ expected.keys())}"
    low = []
    for name, tensor in expected.items():
        kind = name.split()[1]
        if not promises and not torch.equal(got[name], tensor):
            low.append(f"{name}: {sqnr(tensor, got[name]):.1f} dB, not the same bits")
        elif promises and kind in ("output", "evaluation", "gradient"):
            floor = min(f.backward if kind == "gradient" else f.forward for f in promises)
            ratio = sqnr(tensor, got[name])
            if not ratio >= floor:
                low.append(f"{name}: {ratio:.1f} dB, promised {floor:g}")
    return "; ".join(low[:4])


CASES = [
    *covering([f for f in FEATURES if not f.dear]),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in covering(FEATURES, seed=1)
        if any(f.dear for f in case.features)
    ),
]


@pytest.mark.cases(test=4, slow=6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_with_a_feature_is_training_without_it(case: Case) -> None:
    wrong = difference(case, case.features)
    if wrong and len(case.features) > 1:  # which of them is it?
        alone = {f.name: difference(case, (f,)) for f in case.features}
        wrong += f"\nalone: {alone}"
    assert not wrong, wrong
