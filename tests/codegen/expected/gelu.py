import triton
import triton.language as tl


@triton.jit
def fp8_gelu_cast_transpose_amax_8355d3cc(x0, s0, y0, y1, amax0, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
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
    v1_abs = tl.abs(v1)
    v1_tail = tl.exp2(tl.fma(v1_abs, tl.fma(v1_abs, tl.fma(v1_abs, tl.fma(v1_abs, tl.fma(v1_abs, tl.fma(v1_abs, tl.fma(v1_abs, tl.fma(v1_abs, -2.40628975e-06, 3.45851003e-05), -0.000165080645), -0.000183793539), 0.00711929903), -0.0525313782), -0.45919748), -1.15110648), -0.999999966))
    v1_phi = tl.where(v1 < 0, v1_tail, 1 - v1_tail)
    v2 = v1 * v1_phi
    v3 = v2.to(tl.bfloat16).to(tl.float32)
    row_t = block * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    col_t = start + tl.arange(0, BLOCK_C)[:, None].to(tl.int64)
    q4 = tl.fma(v3, 0.0, v3 * s0_value)
    q4 = q4.to(tl.float8e4nv)
    tl.store(y0 + row * 3072 + col, q4)
    tl.store(y1 + col_t * 16384 + row_t, tl.trans(q4))
    largest0 = tl.abs(v3).to(tl.int32, bitcast=True)
    tl.atomic_max(amax0, tl.max(largest0), sem="relaxed")
