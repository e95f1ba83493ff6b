"""Features can be deleted: the core's tests pass without them. (`make features` runs all of these tests, for
each feature.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8compile
from tests import without_features
from tests.support import hooks
from tests.support.harness import noise
from tests.support.models import Mlp, make

WARMUP = {"schedule": {"warmup_steps": 1}}
WINDOW = {"rules": [{"module": "up", "during": "5..", "fp8": "off"}]}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache_weights": True}, "'cache_weights' must be False: features/weight_cache is not here"),
        ({"frozen": "fp8"}, "'frozen' must be 'high_precision': features/frozen is not here"),
        ({"save": "fp8"}, "'save' must be 'auto': features/save is not here"),
        ({"policy": WARMUP}, "'schedule' must be None: features/schedule is not here"),
        ({"policy": WINDOW}, "'during' must be None: features/schedule is not here; got '5..'"),
    ],
)
def test_a_setting_of_a_feature_that_is_not_here(options: dict[str, Any], said: str) -> None:
    run = torch.compile(make(Mlp), backend="fp8", options=options)
    with hooks.without_features(), pytest.raises(fp8compile.OptionError, match=said):
        run(noise(32, 128))


@pytest.mark.slow
def test_the_core_without_features() -> None:
    code, said = without_features.run(without_features.FEATURES, "0", ["passes/test_recipes.py"])
    assert code == 0, said


@pytest.mark.weekly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", without_features.FEATURES)
def test_the_core_without_one_feature(name: str) -> None:
    code, said = without_features.run([name], "2")
    assert code == 0, said
