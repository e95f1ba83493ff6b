"""Kernels for groups of rows, written by hand: their order, and their matmul. `grouped_gemm` launches them,
and imports this module only then, because it needs Triton.

Sizes known when a graph is compiled are `tl.constexpr`. See `triton_kernels` for what Inductor copies.
"""

import triton
import triton.language as tl

STEP = tl.constexpr(128)  # elements of the contraction that a step takes
MX_STEP = tl.constexpr(32)  # elements that share an E8M0 scale
MX_SCALES = tl.constexpr(4)  # of a row in a step

# what has its own scale: operand, matrix of a stack, row, 1 x 128 elements, 128 x 128, 1 x 32, 32 x 32
WHOLE = tl.constexpr(0)
MATRIX = tl.constexpr(1)
ROW = tl.constexpr(2)
LINE = tl.constexpr(3)
SQUARE = tl.constexpr(4)
MX = tl.constexpr(5)
LINE_OF_ROW = tl.constexpr(6)  # 1 x 128, but all of a row together in memory
MX_TILE = tl.constexpr(7)


# The same in plain torch is `ir.grouped.order_of_groups`.
@triton.jit
def fp8_group_order(
    offs,
    rows,
    ends,
    groups,
    m,
    M: tl.constexpr,
    E: tl.constexpr,
    LANES: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # offs: int32 [E]; rows: [P]; ends: [E]; groups: [P / ALIGN]. LANES: more than E, a power of two; lane E
    # has what belongs to no group. BLOCK_R: places of a program, a multiple of ALIGN
    size = m if M is None else M
    places = (size + ALIGN - 1) // ALIGN * ALIGN + E * ALIGN
    lane = tl.arange(0, LANES)
    last = tl.load(offs + lane, mask=lane < E, other=0)
    last = tl.where(lane < E, last, size)
    first = tl.load(offs + lane - 1, mask=(lane > 0) & (lane <= E), other=0)
    first = tl.where(lane > E, size, first)
    padded = (last - first + ALIGN - 1) // ALIGN * ALIGN
    padded = tl.where(lane < E, tl.maximum(padded, ALIGN), padded)
    behind = tl.cumsum(padded, 0)
    if tl.program_id(0) == 0:
        tl.store(ends + lane, behind, mask=lane < E)
    place = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    group = tl.sum((place[:, None] >= behind[None, :]).to(tl.int32), 1)
    own = lane[None, :] == group[:, None]
    row = place + tl.sum(tl.where(own, (first - behind + padded)[None, :], 0), 1)
    inside = row < tl.sum(tl.where(own, last[None, :], 0), 1)
    inside = inside & (row >= 0) & (row < size)  # ends that make no sense lead nowhere outside
    tl.store(rows + place, tl.where(inside, tl.where(group < E, row, -2 - row), -1), mask=place < places)
    tl.store(groups + place // ALIGN, tl.minimum(group, E), mask=(place < places) & (place % ALIGN == 0))


@triton.jit
def fp8_grouped(
    a,
    b,
    a_inv,
    b_inv,
    offs,
    y,
    m,
    k16,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    LANES: tl.constexpr,
    OF_ROWS: tl.constexpr,
    B_MATRIX: tl.constexpr,
    B_ROW: tl.constexpr,
    B_COLUMN: tl.constexpr,
    A_KIND: tl.constexpr,
    B_KIND: tl.constexpr,
    NATIVE_MX: tl.constexpr,
    FAST: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # OF_ROWS: y [M, N], a [M, K], b [E, N, K] with strides B_MATRIX, B_ROW, B_COLUMN; group e has the rows
    #          from offs[e - 1] to offs[e]
    # else:    y [E, M, N], a [M, K], b [N, K]; group e has the columns from offs[e - 1] to offs[e] of a and
    #          b, multiples of 16
    # A size that only a run knows has None in M or K, and is in m, or in k16 divided by 16. LANES: E as a
    # power of two. Inverses: WHOLE [1]; MATRIX [E]; ROW [M], [E, N] or, of groups of columns, [E, M];
    # LINE [K / 128, M], LINE_OF_ROW [M, K / 128]; SQUARE [E, N / 128, K / 128]; MX [M, K / 32],
    # [E, N, K / 32]; MX_TILE [E, N / 32, K / 32]. EVEN: no step ends beyond its group.
    rows = m if M is None else M
    inner = k16 * 16 if K is None else K
    wide: tl.constexpr = (N + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0)
    lane = tl.arange(0, LANES)
    if OF_ROWS:
        # tiles of a group are neighbours, as many as its rows need: only the ends tell which group this is
        tile = program // wide
        block_c = program % wide
        ends = tl.load(offs + lane, mask=lane < E, other=0)
        starts = tl.load(offs + lane - 1, mask=(lane > 0) & (lane < E), other=0)
        tiles = tl.where(lane < E, (ends - starts + BLOCK_R - 1) // BLOCK_R, 0)
        behind = tl.cumsum(tiles, 0)
        group = tl.sum((behind <= tile).to(tl.int32), 0)
        first = tl.sum(tl.where(lane == group, behind - tiles, 0), 0)
        block_r = tile - first
    else:
        tall = (rows + BLOCK_R - 1) // BLOCK_R
        group = program // (tall * wide)
        block_r = program % (tall * wide) // wide
        block_c = program % wide
    if group < E:
        start = tl.maximum(tl.load(offs + group - 1, mask=group > 0, other=0), 0)
        end = tl.load(offs + group)
        col = block_c * BLOCK_C + tl.arange(0, BLOCK_C)
        # rows and columns outside of the matrix read its first ones instead, so the loop needs no mask
        from_col = tl.where(col < N, col, 0).to(tl.int64)
        if OF_ROWS:
            row = start + tl.maximum(block_r, 0) * BLOCK_R + tl.arange(0, BLOCK_R)
            last = tl.minimum(end, rows)
            from_row = tl.where(row < last, row, 0).to(tl.int64)
            if B_COLUMN != 1:  # sides are multiples of 32: of 16 neighbours all are inside, or none is stored
                from_col = tl.max_contiguous(tl.multiple_of(from_col, 16), 16)
            b_at = b + group.to(tl.int64) * B_MATRIX + from_col * B_ROW
            low = 0
            high = inner
            a_of = from_row
            b_of = group.to(tl.int64) * N + from_col
        else:
            row = block_r * BLOCK_R + tl.arange(0, BLOCK_R)
            last = rows
            from_row = tl.where(row < rows, row, 0).to(tl.int64)
            b_at = b + from_col * inner
            low = tl.multiple_of(start, 16)
            high = tl.multiple_of(tl.minimum(end, inner), 16)
            a_of = group.to(tl.int64) * rows + from_row if A_KIND == ROW else from_row
            b_of = group.to(tl.int64) * N + from_col if B_KIND == ROW else from_col
        k = tl.arange(0, STEP)
        a_at = a + from_row[:, None] * inner + low + k[None, :]
        b_at = b_at[:, None] + (low + k[None, :]) * B_COLUMN
        scale = tl.arange(0, MX_SCALES)

        if A_KIND == LINE:
            a_scale = a_inv + low // STEP * rows + a_of
            a_next = rows
        elif A_KIND == LINE_OF_ROW:
            a_scale = a_inv + a_of * ((inner + STEP - 1) // STEP) + low // STEP
            a_next = 1
        elif A_KIND == MX:
            a_scale = a_inv + a_of[:, None] * (inner // MX_STEP) + low // MX_STEP + scale[None, :]
            a_next = MX_SCALES
        elif A_KIND == ROW:
            a_scale = a_inv + a_of
        else:
            a_scale = a_inv
        if B_KIND == SQUARE:  # one number a step: a tile has at most 128 columns
            b_scale = b_inv + (group * ((N + STEP - 1) // STEP) + block_c * BLOCK_C // STEP) * (
                (inner + STEP - 1) // STEP
            )
            b_next = 1
        elif B_KIND == LINE:
            b_scale = b_inv + low // STEP * N + b_of
            b_next = N
        elif B_KIND == LINE_OF_ROW:
            b_scale = b_inv + b_of * ((inner + STEP - 1) // STEP) + low // STEP
            b_next = 1
        elif B_KIND == MX:
            b_scale = b_inv + b_of[:, None] * (inner // MX_STEP) + low // MX_STEP + scale[None, :]
            b_next = MX_SCALES
        elif B_KIND == MX_TILE:
            b_scale = (
                b_inv + (b_of // MX_STEP)[:, None] * (inner // MX_STEP) + low // MX_STEP + scale[None, :]
            )
            b_next = MX_SCALES
        elif B_KIND == ROW:
            b_scale = b_inv + b_of
        elif B_KIND == MATRIX:
            b_scale = b_inv + group
        else:
            b_scale = b_inv

        acc = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        for at in range(low, high, STEP):
            if EVEN:
                x = tl.load(a_at)
                w = tl.load(b_at)
            else:
                inside = (k < high - at)[None, :]
                x = tl.load(a_at, mask=inside, other=0.0)
                w = tl.load(b_at, mask=inside, other=0.0)
            if A_KIND == MX:
                if EVEN:
                    x_inv = tl.load(a_scale)
                    w_inv = tl.load(b_scale)
                else:
                    begun = (scale * MX_STEP < high - at)[None, :]
                    x_inv = tl.load(a_scale, mask=begun, other=1.0)
                    w_inv = tl.load(b_scale, mask=begun, other=1.0)
                if NATIVE_MX:
                    x_e8 = (x_inv.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
                    w_e8 = (w_inv.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
                    acc = tl.dot_scaled(x, x_e8, "e4m3", tl.trans(w), w_e8, "e4m3", acc)
                else:  # an FP8 number times a power of two is exact in bf16
                    wide_x = tl.reshape(x.to(tl.float32), [BLOCK_R, MX_SCALES, MX_STEP]) * x_inv[:, :, None]
                    wide_w = tl.reshape(w.to(tl.float32), [BLOCK_C, MX_SCALES, MX_STEP]) * w_inv[:, :, None]
                    short_x = tl.reshape(wide_x, [BLOCK_R, STEP]).to(tl.bfloat16)
                    short_w = tl.reshape(wide_w, [BLOCK_C, STEP]).to(tl.bfloat16)
                    acc = tl.dot(short_x, tl.trans(short_w), acc)
            elif A_KIND == LINE or A_KIND == LINE_OF_ROW:
                x_inv = tl.load(a_scale)
                w_inv = tl.load(b_scale)
                part = tl.dot(x, tl.trans(w))
                if B_KIND == SQUARE:
                    acc += part * (x_inv * w_inv)[:, None]
                else:
                    acc += part * x_inv[:, None] * w_inv[None, :]
            elif FAST:
                acc = tl.dot(x, tl.trans(w), acc)
            else:
                acc += tl.dot(x, tl.trans(w))
            a_at += STEP
            b_at += STEP * B_COLUMN
            if A_KIND == MX or A_KIND == LINE or A_KIND == LINE_OF_ROW:
                a_scale += a_next
                b_scale += b_next
        if A_KIND == ROW:
            acc *= tl.load(a_scale)[:, None]
        elif A_KIND == WHOLE:
            acc *= tl.load(a_scale)
        if A_KIND == ROW or A_KIND == WHOLE:
            if B_KIND == ROW:
                acc *= tl.load(b_scale)[None, :]
            else:
                acc *= tl.load(b_scale)
        if OF_ROWS:
            to = row.to(tl.int64)[:, None] * N + col[None, :]
        else:
            to = (group.to(tl.int64) * rows + row)[:, None] * N + col[None, :]
        tl.store(y + to, acc.to(y.dtype.element_ty), mask=(row[:, None] < last) & (col[None, :] < N))
