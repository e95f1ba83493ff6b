import triton
import triton.language as tl


@triton.jit
def fp8_unsqueeze_mul_slice_neg_cast_transpose_amax_95a5ef3b(x0, x1, x2, s0, y0, y1, amax0, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    # x0: bfloat16 [8192, 32, 128]
    # x1: bfloat16 [8192, 128]
    # x2: bfloat16 [8192, 128]
    # y0: copy float8_e5m2
    # y1: transposed float8_e5m2
    pid = tl.program_id(0).to(tl.int64)
    tiles = (4096 + BLOCK_C - 1) // BLOCK_C
    block = pid // tiles
    start = pid % tiles * BLOCK_C
    s0_value = tl.load(s0)
    col = start + tl.arange(0, BLOCK_C)[None, :].to(tl.int64)
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    v1 = tl.load(x0 + row * 4096 + col).to(tl.float32)
    v2 = tl.load(x1 + row * 128 + col % 128).to(tl.float32)
    v3 = (v1 * v2).to(tl.bfloat16).to(tl.float32)
    v4 = tl.load(x0 + row * 4096 + col + 64 - col // 64 % 2 * 128).to(tl.float32)
    v5 = tl.load(x2 + row * 128 + col % 128 + 64 - col // 64 % 2 * 128).to(tl.float32)
    v6 = (v4 * v5).to(tl.bfloat16).to(tl.float32)
    v7 = (v6 * -1.0).to(tl.bfloat16).to(tl.float32)
    v8 = tl.where(col % 128 < 64, v6, v7)
    v9 = (v3 + v8).to(tl.bfloat16).to(tl.float32)
    row_t = block * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    col_t = start + tl.arange(0, BLOCK_C)[:, None].to(tl.int64)
    q10 = tl.fma(v9, 0.0, v9 * s0_value)
    q10 = q10.to(tl.float8e5)
    tl.store(y0 + row * 4096 + col, q10)
    tl.store(y1 + col_t * 8192 + row_t, tl.trans(q10))
    largest0 = tl.abs(v9).to(tl.int32, bitcast=True)
    tl.atomic_max(amax0, tl.max(largest0), sem="relaxed")
