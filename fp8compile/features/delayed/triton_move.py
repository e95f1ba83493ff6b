"""The kernel that moves scaling state, with Triton. `arena` launches it."""

import triton
import triton.language as tl

from ...ir import ops, scale
from . import state_page

SCALE = tl.constexpr(state_page.SCALE)
SCALE_INV = tl.constexpr(state_page.SCALE_INV)
AGE = tl.constexpr(state_page.AGE)
REACH = tl.constexpr(state_page.REACH)
WINDOW = tl.constexpr(state_page.WINDOW)
INTERVAL = tl.constexpr(state_page.INTERVAL)
LIMIT = tl.constexpr(state_page.LIMIT)
FLOOR = tl.constexpr(state_page.FLOOR)
ODD = tl.constexpr(state_page.ODD)
LOST = tl.constexpr(state_page.LOST)
OVERFLOWS = tl.constexpr(state_page.OVERFLOWS)
UNDERFLOWS = tl.constexpr(state_page.UNDERFLOWS)
NOT_FINITE = tl.constexpr(state_page.NOT_FINITE)
HISTORY = tl.constexpr(state_page.HISTORY)
READ = tl.constexpr(state_page.READ)
APART = tl.constexpr(ops.APART)
UNSEEN = tl.constexpr(ops.UNSEEN)
LARGEST = tl.constexpr(scale.LARGEST)
SMALLEST = tl.constexpr(scale.SMALLEST)


# The same rule in plain torch is `state_page.next_page`: change both.
# `test_the_kernel_is_next_page` in tests/features/delayed/test_arena.py compares them bitwise.
@triton.jit
def fp8_move(
    page,
    scales,
    amaxes,
    parts,
    LENGTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # page: float32 [slots, HISTORY + LENGTH], written in place; scales: float32 [slots, READ, APART], the
    # first columns of the page after the move; amaxes: int32 [slots, APART], UNSEEN after it; parts: int32
    # [programs, 2]: the first row of a part, and how many it has
    first = tl.load(parts + 2 * tl.program_id(0)).to(tl.int64)
    count = tl.load(parts + 2 * tl.program_id(0) + 1)
    page += first * (HISTORY + LENGTH)
    scales += first * (READ * APART)
    amaxes += first * APART
    finite = tl.full([BLOCK_R], 1, tl.int32)
    for start in range(0, count, BLOCK_R):
        slot = start + tl.arange(0, BLOCK_R)
        bits = tl.load(amaxes + slot * APART, mask=slot < count, other=UNSEEN)
        amax = tl.where(bits > UNSEEN, bits, 0).to(tl.float32, bitcast=True)
        finite = tl.minimum(finite, (tl.abs(amax) < float("inf")).to(tl.int32))
    moves = tl.min(finite) == 1
    for start in range(0, count, BLOCK_R):
        slot = start + tl.arange(0, BLOCK_R)
        inside = slot < count
        row = page + slot * (HISTORY + LENGTH)
        number = scales + slot * (READ * APART)
        bits = tl.load(amaxes + slot * APART, mask=inside, other=UNSEEN)
        ran = bits > UNSEEN
        amax = tl.where(ran, bits, 0).to(tl.float32, bitcast=True)
        scale = tl.load(row + SCALE, mask=inside, other=1.0)
        inverse = tl.load(row + SCALE_INV, mask=inside, other=1.0)
        age = tl.load(row + AGE, mask=inside, other=0.0)
        column = tl.arange(0, BLOCK_C)
        recent_inside = ran[:, None] & (column[None, :] < LENGTH - 1)
        recent = tl.load(row[:, None] + HISTORY + column[None, :], mask=recent_inside, other=0.0)
        reach = tl.load(row + REACH, mask=inside, other=1.0)
        interval = tl.load(row + INTERVAL, mask=inside, other=1.0)
        limit = tl.load(row + LIMIT, mask=inside, other=float("inf"))
        floor = tl.load(row + FLOOR, mask=inside, other=0.0)
        odd = tl.load(row + ODD, mask=inside, other=0.0) > 0
        newest = tl.load(row + HISTORY, mask=inside, other=0.0)
        if LENGTH == 1:
            window = interval
        else:
            window = tl.load(row + WINDOW, mask=inside, other=1.0)
        overflows = tl.load(row + OVERFLOWS, mask=inside, other=0.0)
        underflows = tl.load(row + UNDERFLOWS, mask=inside, other=0.0)
        losses = tl.load(row + NOT_FINITE, mask=inside, other=0.0)
        tl.debug_barrier()  # all threads read rows and amaxes before they are written
        if moves:
            waits = (age < 0) | odd
            overflow = ~waits & (amax * scale > limit)
            below = (amax > 0) & (amax * scale < floor)
            underflow = ~waits & below
            recent = tl.where((odd & below & (newest > 0))[:, None], 0.0, recent)
            if LENGTH == 1:
                peak = amax
            else:
                counts = column[None, :] + 1 < window[:, None]
                peak = tl.maximum(amax, tl.max(tl.where(counts, recent, 0.0), 1))
            due = tl.where(waits, amax > 0, age + 1 >= interval)
            fresh = ran & (due | overflow) & (peak > 0)
            wide = reach.to(tl.float64) / tl.where(fresh, peak, 1.0).to(tl.float64)
            wide = tl.where(wide > LARGEST, LARGEST, tl.where(wide < SMALLEST, SMALLEST, wide))
            scale = tl.where(fresh, wide.to(tl.float32), scale)
            inverse = tl.where(fresh, (1.0 / scale.to(tl.float64)).to(tl.float32), inverse)
            age = tl.where(ran, tl.where(due, 0.0, tl.where(waits, age, age + 1)), age)
            odd = overflow | underflow | (odd & ~due)
            tl.store(row + SCALE, scale, mask=ran)
            tl.store(row + SCALE_INV, inverse, mask=ran)
            tl.store(row + AGE, age, mask=ran)
            tl.store(row + ODD, odd.to(tl.float32), mask=ran)
            tl.store(row + LOST, tl.zeros([BLOCK_R], tl.float32), mask=ran)
            tl.store(row + OVERFLOWS, overflows + overflow.to(tl.float32), mask=ran)
            tl.store(row + UNDERFLOWS, underflows + underflow.to(tl.float32), mask=ran)
            tl.store(row + HISTORY, amax, mask=ran)
            tl.store(row[:, None] + HISTORY + 1 + column[None, :], recent, mask=recent_inside)
        else:
            lost = ~(tl.abs(amax) < float("inf"))
            tl.store(row + LOST, lost.to(tl.float32), mask=ran)
            tl.store(row + NOT_FINITE, losses + lost.to(tl.float32), mask=ran)
        tl.store(number + SCALE * APART, scale, mask=inside)
        tl.store(number + SCALE_INV * APART, inverse, mask=inside)
        tl.store(number + AGE * APART, age, mask=inside)
        tl.store(amaxes + slot * APART, tl.full([BLOCK_R], UNSEEN, tl.int32), mask=inside)
