"""What Inductor expects of a forward that runs eagerly first."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch._inductor.config
from torch._inductor.cudagraph_utils import BoxedDeviceIndex
from torch.fx import Graph, GraphModule

from fp8compile import compat

pytestmark = pytest.mark.compat


@pytest.mark.parametrize(
    ("is_backward", "device", "recorded", "made"),
    [(True, 0, True, [0]), (True, None, True, []), (False, 0, True, []), (True, 0, False, [])],
)
def test_the_manager_of_cuda_graphs(
    is_backward: bool, device: int | None, recorded: bool, made: list[int]
) -> None:
    """An unrecorded backward asserts that there is one, which the forward's first warm call would make."""
    found: list[Any] = []
    gm = GraphModule(torch.nn.Module(), Graph())
    box = BoxedDeviceIndex(device)
    with (
        mock.patch("torch._inductor.cudagraph_trees.get_manager", found.append),
        mock.patch("torch._inductor.compile_fx.compile_fx_inner", lambda *_, **__: found.append("compiled")),
        torch._inductor.config.patch({"triton.cudagraphs": recorded}),
    ):
        compat.inductor.compile_inner(gm, [], is_backward=is_backward, boxed_forward_device_index=box)
    assert found == [*made, "compiled"]
