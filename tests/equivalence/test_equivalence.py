"""Training with a feature equals training without it: every feature on every model, by every protocol and recipe that it
takes, and beside every other feature. `features.py` has the promises, `protocols.py` the training loops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.equivalence.cases import Case, covering
from tests.equivalence.features import FEATURES, MODELS, Feature
from tests.equivalence.protocols import PROTOCOLS, Run
from tests.support import hooks
from tests.support.harness import ALL_FP8, sqnr

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


def sgd(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


@pytest.fixture(autouse=True)
def small_tensors() -> Iterator[None]:
    """The models are small, and so are the tensors that `save` keeps."""
    with hooks.saving_small_tensors():
        yield


def trainings(case: Case, on: Sequence[Feature]) -> dict[str, Run]:
    """The trainings of a case, by protocol, with these of its features."""
    options: dict[str, Any] = {"policy": ALL_FP8, "recipe": case.recipe, "merge_matmuls": False, "recast_weights": False}
    for feature in case.features:
        options |= feature.both.get(case.recipe, {})
    for feature in on:
        options |= feature.options
    how = {"backend": "fp8", "dynamic": options.pop("dynamic", False), "options": options}

    def compiled(model: nn.Module) -> Callable[..., Tensor]:
        call: Any = next((f.compiled for f in on if f.compiled is not None), lambda m, how: torch.compile(m, **how))(model, how)
        for feature in on:
            call = feature.called(model, call) if feature.called is not None else call
        return call

    chosen = next((f for f in case.features if f.optimizer is not None), None)
    # where gradients may differ, weights stay as they are: else forwards differ, too
    lr = 1e-2 if any(f.bitwise for f in case.features) else 0.0
    optimizer = (lambda m: chosen.optimizer(m, chosen in on)) if chosen is not None else partial(sgd, lr=lr)
    apart = any(f.around is not contextlib.nullcontext for f in on)  # Dynamo does not know what differs
    if apart:
        torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        for feature in on:
            stack.enter_context(feature.around())
        runs = {name: Run(MODELS[case.model], compiled, optimizer)(PROTOCOLS[name]) for name in case.protocols}
        ignored = [f.name for f in on if not any(map(f.acted, runs.values()))]
    if apart:
        torch._dynamo.reset()
    assert not ignored, f"{ignored} did nothing"
    return runs


def difference(case: Case, on: Sequence[Feature]) -> str:
    """"" if the training with these features keeps their promises. Promises of bits are kept beside features of another
    promise: these are on, on both sides."""
    bitwise = [f for f in on if f.bitwise]
    others = tuple(f for f in on if not f.bitwise)
    ours, theirs = trainings(case, on), trainings(case, others if bitwise else ())
    wrong = [compared(ours[name].seen, theirs[name].seen, () if bitwise else others) for name in case.protocols]
    return "; ".join(f"{name}: {found}" for name, found in zip(case.protocols, wrong, strict=True) if found)


def compared(got: dict[str, Tensor], expected: dict[str, Tensor], promises: Sequence[Feature]) -> str:
    """"" if all is the same, or as near as `promises` say."""
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
    *(pytest.param(case, marks=pytest.mark.slow) for case in covering(FEATURES, seed=1) if any(f.dear for f in case.features)),
]


@pytest.mark.cases(test=4, slow=10)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_with_a_feature_is_training_without_it(case: Case) -> None:
    wrong = difference(case, case.features)
    if wrong and len(case.features) > 1:  # which of them is it?
        alone = {f.name: difference(case, (f,)) for f in case.features}
        wrong += f"\nalone: {alone}"
    assert not wrong, wrong
