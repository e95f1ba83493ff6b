"""`python -m benchmarks.kernels`: which kernel is what, families against eager operators, measurements."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import types

import pytest
import torch

from benchmarks import blocks, families, kernels, lines, results, tables, worker
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


def test_casts_are_known_by_their_signature(tmp_path, monkeypatch):
    """Of the modules that this process has loaded: another run's may have the same names."""
    source = """
triton_poi_fused_mul_0 = async_compile.triton('triton_poi_fused_mul_0', '''
@triton_heuristics.pointwise(triton_meta=\
{'signature': {'in_ptr0': '*bf16', 'out_ptr0': '*fp8e4nv', 'xnumel': 'i32'}})
def triton_poi_fused_mul_0(in_ptr0, out_ptr0, xnumel, XBLOCK): pass
''', device_str='cuda')
triton_poi_fused_mul_1 = async_compile.triton('triton_poi_fused_mul_1', '''
@triton_heuristics.pointwise(triton_meta=\
{'signature': {'in_ptr0': '*bf16', 'out_ptr0': '*bf16', 'xnumel': 'i32'}})
def triton_poi_fused_mul_1(in_ptr0, out_ptr0, xnumel, XBLOCK): pass
''', device_str='cuda')
"""
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "cab.py").write_text(source)
    (tmp_path / "ab" / "old.py").write_text(source.replace("*bf16", "*fp8e4nv"))
    loaded = types.ModuleType("loaded")
    loaded.__file__ = str(tmp_path / "ab" / "cab.py")
    monkeypatch.setitem(sys.modules, "loaded", loaded)
    assert worker.cast_kernels(tmp_path) == {"triton_poi_fused_mul_0"}


def test_kernel_times_are_per_step():
    times = (("nvjet_qqtst_1", 100.0), ("nvjet_qqtst_1", 300.0), *[("flash_fwd_kernel", 50.0)] * 2)
    found = kernel_classes.summarise([kernel_classes.MeasuredKernel(*time) for time in times], (), steps=2)
    assert found["classes"]["fp8_gemm"] == {"count": 1.0, "ms": 0.2}
    assert found["classes"]["attention"] == {"count": 1.0, "ms": 0.05}
    assert found["count"] == 2.0 and found["busy_ms"] == 0.25
    assert found["longest"][0]["name"] == "nvjet_qqtst_1"


# -- the benchmark --

# an amax, a column sum, or the transposed copy of whole rows is a kernel of its own
SEVERAL = {"tensorwise": 2, "gelu-backward": 2, "layer-norm-backward": 3, "rms-norm-backward": 3}


@pytest.mark.slow
def test_families(tmp_path):
    """A family's kernel and Inductor's plan agree with the eager operators; a CPU gives no speeds."""
    path, printed = tmp_path / "r.json", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert kernels.main(["--device", "cpu", "--shape", "33x40", "--json", str(path)]) == 0
    (result,) = results.read([path])
    for name in families.FAMILIES:
        fp8, inductor = (row for row in result["rows"] if row["family"] == name)
        assert (fp8["arm"], inductor["arm"]) == ("fp8", "inductor") and fp8["point"] == f"{name} 33x40"
        assert fp8["error"] is None and inductor["error"] is None and fp8["checked"] and inductor["checked"]
        assert len(fp8["generated"]) == SEVERAL.get(name, 1) and inductor["generated"] == []
        assert {kernel_classes.classify(kernel) for kernel in fp8["generated"]} == {"cast"}
        assert all(
            row[key] is None
            for row in (fp8, inductor)
            for key in ("ms", "gb_per_s", "copy_gb_per_s", "share")
        )
    text = printed.getvalue()
    assert result["device"]["name"] == "cpu" and result["size"] == "tiny" and result["name"] == "kernels:part"
    assert "GB/s" not in text and " ms" not in text and "this is no device" in text


def test_bytes_that_must_move():
    rows, columns, padded = 33, 40, 48
    casts = rows * columns + columns * padded + 4  # both layouts and the amax
    must = {}
    for name in ("weight", "gelu", "swiglu", "gelu-backward", "rms-norm", "tensorwise"):
        family = families.FAMILIES[name]
        inputs = family.inputs(families.Source(rows, columns, "cpu"))
        must[name] = families.must_move(family, inputs, family.function(*inputs))
    matrix = 2 * rows * columns
    assert must["weight"] == must["gelu"] == matrix + 4 + casts
    assert must["swiglu"] == 2 * matrix + 4 + casts
    assert must["gelu-backward"] == 2 * matrix + 4 + casts + 2 * columns
    assert must["rms-norm"] == matrix + 2 * columns + 4 + 4 * rows + casts
    assert must["tensorwise"] == 2 * matrix + casts


def test_other_outputs_are_found():
    x = torch.randn(64, 64).bfloat16()
    cast = x.to(torch.float8_e4m3fn)
    kernels.compare([x, cast], [x.clone(), None])
    wrong = x.clone()
    wrong[3, 5] = -2 * x[3, 5]
    infinite = x.clone()
    infinite[0, 0] = float("inf")
    for got in (wrong, infinite, x.t(), x.float(), x[:32], 1.05 * x, torch.full_like(x, float("nan"))):
        with pytest.raises(kernels.Wrong):
            kernels.compare([cast, x], [cast, got])


def test_a_plan_that_is_wrong_is_not_timed(monkeypatch, tmp_path, capsys):
    first = kernels.Plan.first
    monkeypatch.setattr(
        kernels.Plan, "first", lambda self, *inputs: tuple(-x.float() for x in first(self, *inputs))
    )
    path = tmp_path / "r.json"
    assert kernels.main(["--device", "cpu", "--family", "gelu", "--shape", "16x16", "--json", str(path)]) == 1
    assert [row["error"][:17] for row in json.loads(path.read_text())["rows"]] == ["Wrong: output 0 i"] * 2
    assert "gelu 16x16 inductor: Wrong" in capsys.readouterr().out


def test_speed_is_bytes_over_the_median_time(monkeypatch):
    """On a stand-in for a device, whose runs, and copies, take 2, 3, .. ms."""
    clock = [1.0]

    class Event:
        def __init__(self, enable_timing):
            self.at = 0.0

        def record(self):
            self.at, clock[0] = clock[0], clock[0] * 2

        def elapsed_time(self, end):
            return 1.0 + len(str(int(end.at / self.at)))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    memset, *amaxes = map(
        kernel_classes.MeasuredKernel, ("Memset (Device)", "fp8_amax", "fp8_amax"), (9.0, 3.0, 5.0)
    )
    seen = iter([[memset], [memset, *amaxes]])
    monkeypatch.setattr(kernels.Device, "profiled", lambda self, call: next(seen))
    calls: list[int] = []
    found = kernels.Device(30, "cpu", 16).timed(lambda: calls.append(1), size=10**7)
    assert len(calls) == 35  # five of them untimed
    assert found["ms"] == {"median": 2.0, "min": 2.0, "max": 2.0, "runs": 30}
    assert found["gb_per_s"] == pytest.approx(5.0) and found["share"] == pytest.approx(1.0)
    assert found["kernels"] == [{"name": "fp8_amax", "us": 4.0, "times": 2}]


@pytest.mark.slow
def test_counted_bytes_of_kernels(tmp_path, capsys):
    if kernels.fake_gpu.unavailable():
        pytest.skip(kernels.fake_gpu.unavailable())
    path = tmp_path / "r.json"
    assert (
        kernels.main(["--static", "--family", "gelu-backward", "--shape", "4096x1024", "--json", str(path)])
        == 0
    )
    fp8, inductor = results.read([path])[0]["rows"]
    assert fp8["generated"] and not inductor["generated"]
    must = fp8["bytes"] / 1e9
    # Inductor reads both inputs twice
    assert must <= fp8["static"]["gb"] < 1.05 * must < 1.5 * must < inductor["static"]["gb"]
    assert "| gelu-backward 4096x1024 |" in tables.markdown(results.read([path]))
    assert "estimate" not in capsys.readouterr().out


def test_out_of_time():
    bench = kernels.Bench(kernels.parse(["--device", "cpu", "--family", "gelu", "swiglu", "--budget", "1"]))
    bench.deadline = 0.0
    result = bench.run(lambda so_far: None)
    assert result["rows"] == [] and "out of time: 4 points were not begun" in tables.text(result)


@pytest.mark.weekly
def test_blocks(tmp_path) -> None:
    """Each block and form of some families, in two processes: kernels give what the eager operators give."""
    file, families = tmp_path / "blocks.jsonl", ["weight", "rms-norm", "gelu-backward"]
    given = ["--device", "cpu", "--processes", "2", "--family", *families, "--form", "now", *blocks.FORMS]
    assert blocks.main([*given, "--json", str(file)]) == 0
    found = lines.read(file)
    wanted = blocks.points(families, ["now", *blocks.FORMS])
    assert sorted((row["family"], tuple(row["config"]), row["form"]) for row in found) == sorted(wanted)
    for row in found:
        assert row["kernels"]
        assert any(name.endswith("_stages") for name in row["kernels"]) == (row["form"] == "stages-3")
