"""The kernels that are written by hand: the matmul with block scales, and the reductions of partial results:
column sums, and amaxes of rows.

`block_gemm` and `launch` launch them, and only then import this module: it needs Triton.

Sizes that are known when a graph is compiled are `tl.constexpr`. Inductor copies a kernel into its code
together with the `tl.constexpr` globals that the kernel names, and with nothing else of this module.
"""

import triton
import triton.language as tl

STEP = tl.constexpr(128)  # elements of K that share a scale
GROUP = tl.constexpr(8)  # rows of tiles that programs walk together


@triton.jit
def fp8_gemm(
    a,
    b,
    a_inv,
    b_inv,
    bias,
    y,
    m,
    n,
    k16,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A_SQUARE: tl.constexpr,
    B_SQUARE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # a: FP8 [rows, inner]; b: FP8 [columns, inner]; y: [rows, columns], bias: [columns] or None, of any float
    # Sizes that are known are in M, N and K. Where only a run knows a size, its constant is None, and it is
    # in m, n or k16 (otherwise None), with K = 16 * k16: the compiler has to know that K is a multiple of 16
    # to read 16 bytes at a time. a_inv: [rows / 128, inner / 128] of 128 x 128 blocks (A_SQUARE), or
    # [inner / 128, rows] of 1 x 128 blocks; b_inv likewise
    rows = m if M is None else M
    columns = n if N is None else N
    inner = k16 * 16 if K is None else K
    steps = (inner + STEP - 1) // STEP
    tall = (rows + BLOCK_R - 1) // BLOCK_R
    wide = (columns + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0)
    first = program // (GROUP * wide) * GROUP
    height = tl.minimum(tall - first, GROUP)
    block_r = first + program % (GROUP * wide) % height
    block_c = program % (GROUP * wide) // height
    row = block_r * BLOCK_R + tl.arange(0, BLOCK_R)
    col = block_c * BLOCK_C + tl.arange(0, BLOCK_C)
    # rows outside of the matrix read its first row instead, so that the loop needs no mask for them
    from_row = tl.where(row < rows, row, 0).to(tl.int64)
    from_col = tl.where(col < columns, col, 0).to(tl.int64)
    k = tl.arange(0, STEP)
    a_at = a + from_row[:, None] * inner + k[None, :]
    b_at = b + from_col[:, None] * inner + k[None, :]
    if A_SQUARE:  # one number a step
        a_scale = a_inv + block_r * BLOCK_R // STEP * steps
        a_next = 1
    else:
        a_scale = a_inv + from_row
        a_next = rows
    if B_SQUARE:
        b_scale = b_inv + block_c * BLOCK_C // STEP * steps
        b_next = 1
    else:
        b_scale = b_inv + from_col
        b_next = columns
    acc = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for step in range(0, steps):
        if K is not None and K // STEP * STEP == K:
            x = tl.load(a_at)
            w = tl.load(b_at)
        else:
            inside = (k < inner - step * STEP)[None, :]
            x = tl.load(a_at, mask=inside, other=0.0)
            w = tl.load(b_at, mask=inside, other=0.0)
        x_inv = tl.load(a_scale)
        w_inv = tl.load(b_scale)
        part = tl.dot(x, tl.trans(w))
        if A_SQUARE and B_SQUARE:
            acc += part * (x_inv * w_inv)
        elif A_SQUARE:
            acc += part * (x_inv * w_inv)[None, :]
        elif B_SQUARE:
            acc += part * (x_inv * w_inv)[:, None]
        else:
            acc += part * x_inv[:, None] * w_inv[None, :]
        a_at += STEP
        b_at += STEP
        a_scale += a_next
        b_scale += b_next
    if bias is not None:
        acc += tl.load(bias + from_col).to(tl.float32)[None, :]
    to = row.to(tl.int64)[:, None] * columns + col[None, :]
    tl.store(y + to, acc.to(y.dtype.element_ty), mask=(row[:, None] < rows) & (col[None, :] < columns))


@triton.jit
def fp8_raise(
    rows0,
    rows1,
    rows2,
    rows3,
    amax0,
    amax1,
    amax2,
    amax3,
    n,
    COUNT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # rows0..3: amaxes of rows, float32 [COUNT], or [n] where COUNT is None; amax0..3: int32 [1], the bits of
    # the largest one. The bits of NaN are above those of infinity. Pairs after the first may be None
    i = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = i < (n if COUNT is None else COUNT)
    bits = tl.load(rows0 + i, mask=inside, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(amax0, tl.max(bits, 0), sem="relaxed")
    if rows1 is not None:
        bits = tl.load(rows1 + i, mask=inside, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        tl.atomic_max(amax1, tl.max(bits, 0), sem="relaxed")
    if rows2 is not None:
        bits = tl.load(rows2 + i, mask=inside, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        tl.atomic_max(amax2, tl.max(bits, 0), sem="relaxed")
    if rows3 is not None:
        bits = tl.load(rows3 + i, mask=inside, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        tl.atomic_max(amax3, tl.max(bits, 0), sem="relaxed")


@triton.jit
def fp8_column_sums(
    partial, total, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    # partial: float32 [ROWS, COLUMNS]; total: [COLUMNS] of any float
    col = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.arange(0, BLOCK_R).to(tl.int64)
    sums = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in range(0, ROWS, BLOCK_R):
        inside = (start + row < ROWS)[:, None] & (col < COLUMNS)[None, :]
        sums += tl.load(partial + (start + row)[:, None] * COLUMNS + col[None, :], mask=inside, other=0.0)
    tl.store(total + col, tl.sum(sums, 0).to(total.dtype.element_ty), mask=col < COLUMNS)


@triton.jit
def fp8_transpose(
    x,
    y,
    rows,
    padded,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # x: FP8 [ROWS, COLUMNS], rows FROM elements apart; y: FP8 [COLUMNS, PADDED], rows TO elements apart, zero
    # from column ROWS on. Where only a run knows the sizes, they are in rows and padded, and TO is padded
    height = rows if ROWS is None else ROWS
    width = padded if PADDED is None else PADDED
    apart = width if TO is None else TO
    tiles: tl.constexpr = (COLUMNS + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles * BLOCK_R + tl.arange(0, BLOCK_R)
    col = program % tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    at = x + row[:, None] * FROM + col[None, :]
    to = y + col[:, None] * apart + row[None, :]
    if ROWS is not None and ROWS // BLOCK_R * BLOCK_R == ROWS and COLUMNS // BLOCK_C * BLOCK_C == COLUMNS:
        tl.store(to, tl.trans(tl.load(at)))
    else:
        inside = (row < height)[:, None] & (col < COLUMNS)[None, :]
        values = tl.load(at, mask=inside, other=0.0)
        tl.store(to, tl.trans(values), mask=(col < COLUMNS)[:, None] & (row < width)[None, :])
