import triton
import triton.language as tl


@triton.jit
def fp8_native_layer_norm_backward_cast_transpose_amax_sum_0f9fad17(x0, x1, x2, x3, x4, s0, y0, sums, amax0, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    # x0: float32 [16384, 1]
    # x1: bfloat16 [16384, 768]
    # x2: bfloat16 [768]
    # x3: bfloat16 [16384, 768]
    # x4: float32 [16384, 1]
    # y0: copy float8_e5m2
    pid = tl.program_id(0).to(tl.int64)
    strip = pid
    start = 0
    s0_value = tl.load(s0)
    col = start + tl.arange(0, BLOCK_C)[None, :].to(tl.int64)
    col_inside = col < 768
    v2 = tl.load(x2 + col, mask=col_inside, other=0.0).to(tl.float32)
    largest0 = tl.zeros([BLOCK_R, BLOCK_C], tl.int32)
    sum0 = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    sum1 = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for block in tl.range(strip * 32, tl.minimum((strip + 1) * 32, (16384 + BLOCK_R - 1) // BLOCK_R), num_stages=2):
        row = (block * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]).to(tl.int64)
        v1 = tl.load(x1 + row * 768 + col, mask=col_inside, other=0.0).to(tl.float32)
        v3 = v1 * v2
        r4 = tl.sum(tl.where(col_inside, v3, 0.0), 1, keep_dims=True)
        v5 = tl.load(x3 + row * 768 + col, mask=col_inside, other=0.0).to(tl.float32)
        v6 = tl.load(x4 + row).to(tl.float32)
        v7 = v5 - v6
        v8 = tl.load(x0 + row).to(tl.float32)
        v9 = v7 * v8
        v10 = v3 * v9
        r11 = tl.sum(tl.where(col_inside, v10, 0.0), 1, keep_dims=True)
        v12 = v8 / 768
        v13 = v3 * 768
        v14 = v13 - r4
        v15 = v9 * r11
        v16 = v14 - v15
        v17 = v12 * v16
        v18 = v17.to(tl.bfloat16).to(tl.float32)
        v20 = v1 * v9
        q19 = tl.fma(v18, 0.0, v18 * s0_value)
        q19 = (tl.where(col_inside, q19, 0.0)).to(tl.float8e5)
        tl.store(y0 + row * 768 + col, q19, mask=col_inside)
        largest0 = tl.maximum(largest0, tl.where(col_inside, tl.abs(v18).to(tl.int32, bitcast=True), 0))
        sum0 += tl.where(col_inside, v1, 0.0)
        sum1 += tl.where(col_inside, v20, 0.0)
    tl.atomic_max(amax0, tl.max(largest0), sem="relaxed")
    total = tl.sum(sum0, 0)[None, :]
    tl.store(sums + (strip * 2 + 0) * 768 + col, total, mask=col_inside)
    total = tl.sum(sum1, 0)[None, :]
    tl.store(sums + (strip * 2 + 1) * 768 + col, total, mask=col_inside)
