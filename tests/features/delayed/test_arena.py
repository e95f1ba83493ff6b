"""Moves of the scaling state: the kernel's, in Triton's interpreter, against those in plain torch."""

from __future__ import annotations

import math

import pytest
import torch

from fp8compile.features.delayed import arena, state_page, triton_move
from fp8compile.features.delayed.state_page import Rows, SlotSettings
from tests.support import hooks
from tests.support.interpreter import OnCpu

CPU = torch.device("cpu")
INF, NAN = math.inf, math.nan
KEPT = 7.0  # in memory that a move does not own


def bits(amaxes: torch.Tensor) -> torch.Tensor:
    """As calls raise them: of magnitudes."""
    return amaxes.view(torch.int32) & 0x7FFFFFFF


@pytest.mark.cases(test=2, slow=3)
@pytest.mark.parametrize(
    ("sizes", "history", "interval", "most_recent", "margin"),
    [
        ((33, 1, 15), 16, 1, False, 0),
        ((70,), 16, 1, False, 1),
        ((5, 3), 1, 2, False, 0),
        ((7, 0, 9), 3, 3, True, 0),
        ((130, 64, 65), 2, 1, False, 0),
    ],
)
def test_the_kernel_is_next_page(
    sizes: tuple[int, ...],
    history: int,
    interval: int,
    most_recent: bool,
    margin: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal bit by bit, over moves with zeros, NaN and infinities in one part or several, overflows and
    underflows; with rows that no call has raised, and rows of no part; more slots than a block."""
    watched = (
        (state_page.limit_of(448.0, margin, False), state_page.floor_of(448.0, 2.0**-9, margin)),
        (state_page.limit_of(57344.0, 11, True), state_page.floor_of(57344.0, 2.0**-16, 11)),
    )
    recipes = (  # which may share a page
        SlotSettings(448.0 / 2**margin, 1 if most_recent else history, interval, *watched[0]),
        SlotSettings(28.0, max(1, history - 1), 2, *watched[1]),
        SlotSettings(57344.0, 1, 1),
    )
    gap, first, table = 2, 1, []  # rows of no part: before the first one, and after each
    for size in sizes:
        table.append((first, size))
        first += size + gap
    slots = first
    by_row, inside = torch.arange(slots), torch.zeros(slots, dtype=torch.bool)
    for start, size in table:
        by_row[start : start + size], inside[start : start + size] = start, True
    parts, owned = torch.tensor(table, dtype=torch.int32), torch.nonzero(inside).flatten()
    on_cpu, generator = OnCpu(monkeypatch, triton_move, "fp8_move"), torch.Generator().manual_seed(0)
    page = state_page.new_page(slots, history, CPU, [recipes[i % 3] for i in range(slots)])
    expected, met = page.clone(), dict.fromkeys(("unseen", "stopped", "moved beside them", "forgot"), 0)
    # of the first part and the last one, which may be one part
    bad = {4: [(0, 4, NAN)], 6: [(-1, -1, INF)], 8: [(0, 0, INF), (0, 1, NAN), (-1, -1, NAN)]}
    for step in range(12):
        found = torch.rand(slots, generator=generator)
        found *= 10.0 ** torch.randint(-6, 6, (slots,), generator=generator)
        found[torch.rand(slots, generator=generator) < 0.2] = 0
        unseen = torch.rand(slots, generator=generator) < (0.0 if step < 2 else 0.3)
        for part, row, amax in bad.get(step, []):
            start, size = table[part]
            found[start + row % size], unseen[start + row % size] = amax, False
        amaxes = torch.full((slots, state_page.APART), int(KEPT), dtype=torch.int32)
        amaxes[:, 0] = torch.where(unseen, state_page.UNSEEN, bits(found))

        after = torch.where(inside[:, None], state_page.next_page(expected, amaxes, by_row), expected)
        scales = torch.full((slots, state_page.READ, state_page.APART), KEPT)
        new_scales, new_amaxes = scales.clone(), amaxes.clone()
        state_page.numbers_of(new_scales)[owned] = state_page.numbers_of(state_page.scales_of(after))[owned]
        new_amaxes[owned, 0] = state_page.UNSEEN
        stops = torch.isin(by_row, by_row[~found.isfinite() & inside])
        met["unseen"] += int((inside & unseen).sum())
        met["stopped"] += int((inside & ~unseen & stops & found.isfinite()).sum())
        met["moved beside them"] += int((inside & ~unseen & ~stops).sum()) if stops.any() else 0
        kept, older = Rows(expected).history[:, :-1], Rows(after).history[:, 1:]
        met["forgot"] += int(((kept > 0) & (older == 0))[~stops & ~unseen].sum())

        arena.launch_move(page, scales, amaxes, parts)
        assert torch.equal(page, after), step
        assert torch.equal(scales, new_scales), step
        assert torch.equal(amaxes, new_amaxes), step
        expected = after
    assert on_cpu.blocks == {arena.configuration(history)}
    seen = Rows(expected[owned])
    assert met["unseen"] and met["stopped"] and (met["moved beside them"] or len(sizes) == 1)
    assert met["forgot"] or history < 3
    assert seen.overflows.sum() and seen.underflows.sum() and seen.not_finite.sum() == 5


@pytest.mark.parametrize("bad", [0, 70, 129])
def test_a_part_that_stops_stops_alone_in_the_kernel(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever block of its slots the bad amax is in."""
    OnCpu(monkeypatch, triton_move, "fp8_move")
    page = state_page.new_page(260, 4, CPU, [SlotSettings(448.0, 4, 1)] * 260)
    parts = torch.tensor([(0, 130), (130, 130)], dtype=torch.int32)
    amaxes = state_page.new_amaxes(260, CPU)
    amaxes[:, 0] = bits(torch.ones(260))
    amaxes[bad, 0] = bits(torch.tensor([NAN]))
    arena.launch_move(page, torch.empty(260, 3, 4), amaxes, parts)
    assert Rows(page).cold.tolist() == [True] * 130 + [False] * 130
    assert Rows(page).not_finite.nonzero().flatten().tolist() == [bad]


def test_a_long_history_takes_fewer_slots_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [arena.configuration(history)[0] for history in (16, 1024, 4096)] == [64, 4, 1]
    on_cpu = OnCpu(monkeypatch, triton_move, "fp8_move")
    page = state_page.new_page(9, 1024, CPU, [SlotSettings(448.0, 1024, 1)] * 9)
    amaxes = state_page.new_amaxes(9, CPU)
    amaxes[:, 0] = bits(torch.arange(1.0, 10.0))
    expected = state_page.next_page(page, amaxes, torch.zeros(9, dtype=torch.int64))
    scales = torch.zeros(9, 3, 4)
    arena.launch_move(page, scales, amaxes, torch.tensor([(0, 9)], dtype=torch.int32))
    assert on_cpu.blocks == {(4, 1024)} and torch.equal(page, expected)
    assert torch.equal(scales, state_page.scales_of(page))
    assert [told["enable_fp_fusion"] for told in on_cpu.told] == [False], "nothing is contracted"


def test_gradients_that_were_zero_so_far_make_calls_cold() -> None:
    """Although all slots of the forward have a scale. The first gradient above zero gives the scale at once:
    a scale of 1 would flush it."""
    torch.manual_seed(0)
    linear, small = torch.nn.Linear(128, 128, bias=False), 2.0**-40
    x = torch.randn(32, 128, requires_grad=True)
    with hooks.interpreted(), hooks.cold_calls() as cold:
        run = torch.compile(linear, backend="fp8")
        for gradient in (0.0, 0.0, small, small):
            linear.weight.grad = x.grad = None
            y = run(x)
            y.backward(torch.full_like(y, gradient))
            expected = (linear.weight.sum(0) * gradient).expand_as(x)
            assert x.grad is not None and (x.grad - expected).abs().max() <= 0.05 * expected.abs().max()
    assert cold == [True, True, True, False]
