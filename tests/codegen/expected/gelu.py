import triton
import triton.language as tl


@triton.jit
def fp8_gelu_cast_transpose_amax_d948fa9d(x0, s0, y0, y1, amax0, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    # x0: bfloat16 [16384, 3072]
    # y0: copy float8_e4m3fn
    # y1: transposed float8_e4m3fn
    pid = tl.program_id(0).to(tl.int64)
    tiles = (3072 + BLOCK_C - 1) // BLOCK_C
    block = pid // tiles
    start = pid % tiles * BLOCK_C
    s0_value = tl.load(s0)
    col = start + tl.arange(0, BLOCK_C)[None, :].to(tl.int64)
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    v1 = tl.load(x0 + row * 3072 + col).to(tl.float32)
    v2 = v1 * 0.5
    v3 = v1 * 0.7071067811865476
    v4_abs = tl.abs(v3)
    v4_2 = v3 * v3
    v4_small = tl.fma(v3, tl.fma(v4_2, tl.fma(v4_2, tl.fma(v4_2, tl.fma(v4_2, tl.fma(v4_2, -0.00056601542, 0.00492478925), -0.0267177072), 0.112804116), -0.376123557), 0.128379129), v3)
    v4_large = 1 - tl.exp2(tl.fma(v4_abs, tl.fma(v4_abs, tl.fma(v4_abs, tl.fma(v4_abs, tl.fma(v4_abs, -0.00165970404, 0.0213202889), -0.127871992), -0.944228089), -1.61212287), -0.00385447704))
    v4 = tl.where(v4_abs < 1, v4_small, tl.where(v3 < 0, -v4_large, v4_large))
    v5 = v4 + 1
    v6 = v2 * v5
    v7 = v6.to(tl.bfloat16).to(tl.float32)
    row_t = block * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    col_t = start + tl.arange(0, BLOCK_C)[:, None].to(tl.int64)
    q8 = tl.fma(v7, 0.0, v7 * s0_value)
    q8 = q8.to(tl.float8e4nv)
    tl.store(y0 + row * 3072 + col, q8)
    tl.store(y1 + col_t * 16384 + row_t, tl.trans(q8))
    largest0 = tl.abs(v7).to(tl.int32, bitcast=True)
    tl.atomic_max(amax0, tl.max(largest0), sem="relaxed")
