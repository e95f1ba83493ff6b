"""`fp8_all_gather` with a schedule, and while backwards are due: to the bit the training without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8compile
from fp8compile.distributed import fp8_all_gather
from tests.distributed.test_all_gather import CURRENT, batch, counted, gathered, sharded
from tests.support.processes import on_ranks

pytestmark = pytest.mark.slow

SHORT = {"warmup_steps": 2, "cooldown_at": 5}
LONG = {"warmup_steps": 5}
BLOCK = 2 * 128 * 256  # weights
HIGH = "high_precision"
PHASE = "a phase of high precision"


def _scheduled(
    rank: int, gather: bool, steps: int, schedule: dict[str, int], by_hand: dict[int, Any], **options: Any
) -> dict[str, Any]:
    """`by_hand`: the phases that are set, by step."""
    model = sharded(gather, compiled={"policy": {"schedule": schedule}, "strict": True, **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, Any] = {"gradients": [], "sent": [], "said": []}
    for step in range(steps):
        if step in by_hand:
            fp8compile.set_phase(by_hand[step], model)
        with counted() as sent:
            model(batch(step, rank)).float().square().mean().backward()
        found["sent"].append(sum(sent))
        found["gradients"].append({name: p.grad.full_tensor().clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        found["said"].append(gathered(model).get("blocks.0.up.weight"))
    return {**found, "graphs": len(fp8compile.report(model).graphs)}


# steps, the schedule, phases that are set by hand without and with the all-gather, options; the steps that gather in FP8
CASES: dict[str, tuple[int, dict[str, int], tuple[dict[int, Any], dict[int, Any]], dict[str, Any], list[int]]] = {
    "delayed": (7, SHORT, ({}, {}), CURRENT, [2, 3, 4]),
    "long": (8, LONG, ({}, {}), {"recipe": "tensorwise"}, [6, 7]),
    "by hand": (8, {}, ({5: HIGH, 6: None}, {4: HIGH, 6: None}), {"recipe": "tensorwise"}, [1, 2, 3, 4, 7]),
}


def _phases(rank: int, case: str) -> list[dict[str, Any]]:
    steps, schedule, hands, options, _ = CASES[case]
    return [_scheduled(rank, gather, steps, schedule, hands[gather], **options) for gather in (False, True)]


@pytest.mark.parametrize("case", CASES)
def test_phases(tmp_path, case: str) -> None:
    """FP8 phases gather in FP8. Phases of high precision read weights in high precision. A phase that is set by hand begins a
    step later where weights have arrived in FP8: the run without the all-gather sets it a step later."""
    in_fp8 = CASES[case][-1]
    for plain, ours in on_ranks(2, tmp_path, _phases, case):
        spared = [all_bytes - sent for all_bytes, sent in zip(plain["sent"], ours["sent"], strict=True)]
        assert spared == [2 * BLOCK if step in in_fp8 else 0 for step in range(len(spared))]
        for step, (expected, got) in enumerate(zip(plain["gradients"], ours["gradients"], strict=True)):
            for key, gradient in expected.items():
                assert torch.equal(got[key], gradient), (step, key)
        for step, (dtype, reason) in enumerate(ours["said"]):
            assert (dtype, reason) == ("e4m3", "") if step in in_fp8 else dtype == "bfloat16" and reason, step
        assert ours["said"][0] == ("bfloat16", PHASE) or case == "by hand"
        assert ours["graphs"] == plain["graphs"]


# --- backwards that are due -------------------------------------------------------------------------------


def _overlapping(rank: int) -> list[Any]:
    """Each forward runs before the backward of the one before it. No optimizer says when a step ends."""
    runs = []
    for gather in (False, True):
        model = sharded(gather, compiled={"recipe": "tensorwise"})
        found: dict[str, Any] = {"gradients": [], "sent": [], "said": []}
        loss = None
        for number in range(9):
            with counted() as sent:
                new = model(batch(number, rank)).float().square().mean() if number != 5 else None
                if number > 5:  # one after the other
                    loss, new = new, None
                if loss is not None:
                    loss.backward()
                    found["gradients"].append({name: p.grad.full_tensor().clone() for name, p in model.named_parameters()})
                    for p in model.parameters():
                        p.grad = None
                loss = new
            found["sent"].append(sum(sent))
            found["said"].append(gathered(model).get("blocks.0.up.weight"))
        runs.append(found)
    return runs


def test_what_is_gathered_does_not_change_while_a_backward_is_due(tmp_path) -> None:
    """Its graph has saved the weight as its forward got it."""
    for plain, ours in on_ranks(2, tmp_path, _overlapping):
        for step, (expected, got) in enumerate(zip(plain["gradients"], ours["gradients"], strict=True)):
            for key, gradient in expected.items():
                assert torch.equal(got[key], gradient), (step, key)
        assert ours["sent"][:6] == plain["sent"][:6]
        assert "no backward has run" in ours["said"][4][1] and ours["said"][8] == ("e4m3", "")
        assert ours["sent"][8] == plain["sent"][8] - 2 * BLOCK


def _refused(rank: int) -> list[str]:
    """A schedule that never leaves high precision is no reason to complain; a policy without FP8 is one."""
    said = []
    for policy in ({"schedule": {"warmup_steps": 100}}, {"rules": [{"module": "blocks.*", "fp8": "off"}]}):
        model = sharded(compiled={"recipe": "tensorwise", "policy": policy, "strict": True})
        fp8_all_gather(model)
        try:
            for number in range(4):
                model(batch(number, rank)).float().square().mean().backward()
            said.append("nothing")
        except fp8compile.StrictError as error:
            said.append(str(error))
    return said


def test_only_what_stays_in_high_precision_is_told(tmp_path) -> None:
    for said in on_ranks(2, tmp_path, _refused):
        assert said[0] == "nothing"
        assert "no weight is gathered in FP8" in said[1] or "no matmul" in said[1]
