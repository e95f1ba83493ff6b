"""Which kernel is what, by the names that a profiler shows."""

from __future__ import annotations

import pytest

from fp8compile.dryrun import kernel_classes

NAMES = {
    "fp8_gemm": [
        "nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT",
        "nvjet_sm100_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT",
        "nvjet_rqtst_128x160_128x6_2x1_v_bz_TNN",  # one operand is E5M2, whatever letter cuBLAS uses for it
        "nvjet_qrtst_128x160_128x6_2x1_v_bz_TNN",
        "sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x64_stage3_warpsize2x2x1_tensor16x8x32_kernel",
        "sm90_xmma_gemm_e5m2bf16_e4m3f32_f32_tn_n_tilesize64x128x128_execute_kernel__5x_cublas",
        "Cijk_Alik_Bljk_F8B8BS_BH_Bias_HA_S_SAB_SAV_UserArgs_MT256x256x128_MI16x16x1",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<"
        "cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int>, cutlass::float_e4m3_t>>>",
        "triton_tem_fused__scaled_mm_3",
        "fp8_gemm_0",  # fp8compile's own
    ],
    "bf16_gemm": [
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel__5x_cublas",
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>",
        "Cijk_Ailk_Bljk_BBS_BH_MT256x256x32_MI16x16x1",
        "triton_tem_fused_addmm_7",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
    ],
    "cast": [
        "triton_red_fused_abs_amax_0",
        "void at::native::float8_copy_kernel_cuda",
        "triton_poi_fused_mul_9",
        "fp8_gelu_cast_transpose_amax",
        # a generated kernel is an FP8 cast, whatever words its name contains
        "fp8_softmax_attention_gemm_cast",
        "fp8_amax",
        "fp8_update_0",
    ],
    "other": [
        "triton_poi_fused_add_mul_native_layer_norm_2",
        (
            "void at::native::(anonymous "
            "namespace)::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float>>"
        ),
        "Memcpy DtoD (Device -> Device)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<c10::BFloat16>>",
    ],
}


@pytest.mark.parametrize("kind", NAMES)
def test_kernel_class(kind):
    found = {name: kernel_classes.classify(name, casts={"triton_poi_fused_mul_9"}) for name in NAMES[kind]}
    assert found == dict.fromkeys(NAMES[kind], kind)


def test_kernel_times_are_per_step():
    times = (("nvjet_qqtst_1", 100.0), ("nvjet_qqtst_1", 300.0), *[("flash_fwd_kernel", 50.0)] * 2)
    found = kernel_classes.summarise([kernel_classes.MeasuredKernel(*time) for time in times], (), steps=2)
    assert found["classes"]["fp8_gemm"] == {"count": 1.0, "ms": 0.2}
    assert found["classes"]["attention"] == {"count": 1.0, "ms": 0.05}
    assert found["count"] == 2.0 and found["busy_ms"] == 0.25
    assert found["longest"][0]["name"] == "nvjet_qqtst_1"
