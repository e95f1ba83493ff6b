import triton
import triton.language as tl


@triton.jit
def fp8_relu_cast_transpose_amax_840e46d6(x0, s0, y0, y1, amax0, n0, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    # x0: bfloat16 [n0, 512]
    # y0: copy float8_e4m3fn
    # y1: transposed float8_e4m3fn
    pid = tl.program_id(0).to(tl.int64)
    tiles = (512 + BLOCK_C - 1) // BLOCK_C
    block = pid // tiles
    start = pid % tiles * BLOCK_C
    s0_value = tl.load(s0)
    col = start + tl.arange(0, BLOCK_C)[None, :].to(tl.int64)
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    row_inside = row < n0
    v1 = tl.load(x0 + row * 512 + col, mask=row_inside, other=0.0).to(tl.float32)
    v2 = (tl.where(v1 <= 0, 0.0, v1)).to(tl.bfloat16).to(tl.float32)
    row_t = block * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    col_t = start + tl.arange(0, BLOCK_C)[:, None].to(tl.int64)
    q3 = tl.fma(v2, 0.0, v2 * s0_value)
    q3 = (tl.where(row_inside, q3, 0.0)).to(tl.float8e4nv)
    tl.store(y0 + row * 512 + col, q3, mask=row_inside)
    tl.store(y1 + col_t * (16 * ((15 + n0) // 16)) + row_t, tl.trans(q3), mask=(row_t < (16 * ((15 + n0) // 16))))
    largest0 = tl.where(row_inside, tl.abs(v2).to(tl.int32, bitcast=True), 0)
    tl.atomic_max(amax0, tl.max(largest0), sem="relaxed")
