"""With CUDA graphs: what they read keeps its address, and what does not work with them is said at once. (That
they are recorded and replayed is in test_gpu.py.)"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fp8compile
from tests.support import hooks
from tests.support.harness import ALL_FP8, compiled, noise
from tests.support.models import linear

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs, pytest.mark.compat]
NO_TREES = {"triton.cudagraphs": True, "triton.cudagraph_trees": False}


def x(seed: int = 0) -> Tensor:
    return noise(16, 128, seed=seed).requires_grad_()


@pytest.mark.feature("delayed")
def test_calls_that_leave_the_state_read_one_place() -> None:
    run = compiled(linear(), "delayed")
    with hooks.states_of_forwards() as states:
        for seed in range(3):
            run(x(seed)).sum().backward()
            with fp8compile.freeze_scaling_state():
                run(x(seed)).sum().backward()
    assert len({amaxes.data_ptr() for _, amaxes in states}) == 2


@pytest.mark.feature("delayed")
def test_a_capture_by_hand_of_a_graph_without_scales() -> None:
    """The message comes before anything that waits for the device. A warm call is captured."""
    run = compiled(linear(), "delayed")
    with hooks.capturing(), pytest.raises(fp8compile.Fp8CompileError, match=r"triton\.cudagraphs"):
        run(x())
    for _ in range(2):
        run(x()).sum().backward()
    with hooks.capturing():
        run(x()).sum().backward()


@pytest.mark.parametrize(("recipe", "said"), [("delayed", True), ("tensorwise", False)])
def test_without_trees_a_graph_with_a_scaling_state_is_not_recorded(
    recipe: str, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"policy": ALL_FP8, "recipe": recipe, **NO_TREES}
    with hooks.traced():
        torch.compile(linear(), backend="fp8", options=options)(x())
        assert ("'triton.cudagraph_trees'" in caplog.text) is said
        if said:
            with pytest.raises(fp8compile.StrictError, match="cudagraph_trees=False"):
                torch.compile(linear(), backend="fp8", options={**options, "strict": True})(x())
