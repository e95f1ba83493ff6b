"""All-to-alls that carry the FP8 values of experts' rows (`features.collectives.all_to_alls`)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fp8compile
from fp8compile.features.collectives.collectives import CollectiveRecord
from tests.distributed.test_expert_parallel import BF16, TOKENS, TOP, WIDTH, Moved, as_one_computes, steps
from tests.support import hooks
from tests.support.harness import ALL_FP8, scaling_tensors
from tests.support.processes import on_ranks

pytestmark = pytest.mark.usefixtures("one_graph")
BYTES = TOKENS * TOP * WIDTH
WGRAD_OFF = {"rules": [{"gemm": "wgrad", "fp8": "off"}, *ALL_FP8["rules"]]}


@pytest.fixture
def one_graph() -> Any:
    with mock.patch.object(torch._dynamo.config, "capture_scalar_outputs", True):  # as torchtitan sets it
        yield


class Padded(Moved):
    """A row of zeros after the rows that came, for places that no token takes, as in torchtitan."""

    def sorted(self, rows: Tensor, by_expert: Tensor) -> Tensor:
        return torch.vstack((rows, rows.new_zeros(1, rows.shape[-1])))[by_expert]


class AlsoRead(Moved):
    def sorted(self, rows: Tensor, by_expert: Tensor) -> Tensor:
        return rows[by_expert] * 1.5


def records(layer: Any) -> list[CollectiveRecord]:
    return [record for graph in fp8compile.report(layer).graphs for record in graph.collectives]


def train(layer: Any, rank: int = 0, **options: Any) -> list[dict[str, Tensor]]:
    torch._dynamo.reset()
    call = torch.compile(layer, backend="fp8", options={"policy": ALL_FP8, **options}, fullgraph=True)
    return steps(layer, call, rank)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("cls", "recipe"), [(Moved, "delayed"), (Padded, "tensorwise")])
def test_the_same_bits_on_one_process(cls: type[Moved], recipe: str, one_process: str) -> None:
    """There the scale of what is sent is that of what comes. A byte a feature travels, both ways."""
    found = []
    for on in (False, True):
        layer = cls().to(BF16)
        with hooks.sent("all_to_all_single") as tensors:
            found.append(train(layer, recipe=recipe, fp8_all_to_all=on))
        rows = [dtype for dtype, size in tensors if size > 1000]
        wide = {torch.bfloat16, torch.float32}
        assert [dtype in wide for dtype in rows] == [not on, True] * 6
        expected = [(f"experts.{name}", BYTES if on else 2 * BYTES, "" if on else "fp8_all_to_all is off")
                    for name in ("gate_up_proj (input)", "down_proj (gradient)")]  # fmt: skip
        assert [(r.tensor, r.bytes, r.reason) for r in records(layer)] == expected
        assert {(r.kind, r.before) for r in records(layer)} == {("all-to-all", 2 * BYTES)}
        state = scaling_tensors(layer) if recipe == "delayed" else {}
        found[-1].append({key: row for key, row in state.items() if isinstance(row, Tensor)})
    assert recipe == "tensorwise" or len(found[0][-1]) == 7  # and the version
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.cases(slow=2)
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("cls", "options", "reason"),
    [
        (Moved, {"recipe": "rowwise"}, "recipe 'rowwise' has more than one scale per tensor"),
        (Moved, {"policy": WGRAD_OFF}, "wgrad in high precision: policy"),
        (AlsoRead, {}, None),  # what came is no operand of a matmul
    ],
)
def test_why_not(cls: type[Moved], options: dict[str, Any], reason: str | None, one_process: str) -> None:
    layer = cls().to(BF16)
    train(layer, fp8_all_to_all=True, **options)
    found = {record.tensor: record.reason for record in records(layer)}
    if reason is None:
        assert found == {"experts.down_proj (gradient)": ""}
    else:
        assert len(found) == 2 and all(reason in one for one in found.values())


def _two(rank: int) -> dict[str, Any]:
    layer = Moved(rank, 2).to(BF16)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), hooks.sent("all_to_all_single") as tensors:
        found = train(layer, rank, recipe="tensorwise", fp8_all_to_all=True)
    reasons = [record.reason for record in records(layer)]
    return {"steps": found, "sent": [dtype for dtype, size in tensors if size > 1000], "reasons": reasons}


@pytest.mark.slow
def test_two_ranks() -> None:
    results = on_ranks(2, _two)
    for result in results:
        assert result["reasons"] == ["", ""] and result["sent"].count(torch.uint8) == 2 * 3
    as_one_computes([result["steps"] for result in results])
