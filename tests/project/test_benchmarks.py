"""The benchmarks' own code: every case, tiny, on a CPU and from the command line; and the computation of the figures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import arms, classify, families, kernels, matmuls, plot, results, tables, torchao_casts, train  # noqa: E402
from benchmarks.cases import CASES  # noqa: E402
from benchmarks.cases.base import Fit, parse_case  # noqa: E402
from fp8compile.devices import catalog, cost  # noqa: E402

FP8 = {"fp8": 6, "high_precision": 3, "fp8_flop_fraction": 0.9, "summary": ""}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`python -m benchmarks.train` with `arguments`."""
    command = [sys.executable, "-m", "benchmarks.train", *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


# -- the cases through the command line --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Every case once, tiny and interpreted, with the delayed recipe; results by name."""
    folder = tmp_path_factory.mktemp("results")
    variant = "llama-8b-layers:ckpt=1,accum=8"
    cases = [part for name in [*CASES, variant] for part in ("--case", name)]
    flags = "--arms fp8-delayed --rounds 2 --steps 1 --warmup 1 --device cpu --interpreted --no-warm-compile".split()
    done = run(*cases, *flags, "--json", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return {result["name"]: result for result in results.read([folder])}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_case(measured, name):
    result = measured[name]
    assert result["size"] == "tiny" and result["device"]["name"] == "cpu"
    (row,) = result["rows"]
    assert row["error"] is None
    assert row["tokens_per_s"]["median"] > 0 and len(row["tokens_per_s"]["rounds"]) == 2
    assert row["step_ms"]["total"] >= row["step_ms"]["forward"] > 0 and row["step_ms"]["backward"] > 0
    assert row["fp8"]["proof"].startswith("not applicable: emulated")
    assert row["fp8"]["decisions"]["fp8"] >= 3
    assert row["kernels"] is None and row["memory"] is None
    # a warm-up, and two rounds of one step with an untimed one before it, except at the start of `loss`; `linear` has no loss
    assert len(row["losses"]) == {"linear": 0, "loss": 4}.get(name, 5)


@pytest.mark.slow
def test_variant(measured):
    result = measured["llama-8b-layers:ckpt=1,accum=8"]
    assert result["variant"]["ckpt"] == 1 and result["rows"][0]["tokens"] == 128  # two micro-batches of 64 when tiny


@pytest.mark.slow
def test_training_goes_on_in_the_loss_case(measured):
    row = measured["loss"]["rows"][0]
    (first, before), (second, after) = row["validation"]
    assert (first, second) == (2, 4)  # steps since the start, warm-up and lead among them
    assert after < before


def test_two_arms_rebuilt_and_a_failure(tmp_path):
    """One arm runs at a time, and an arm whose package cannot be imported becomes a row with an error."""
    broken = tmp_path / "broken" / "torchao"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('no such torchao')\n")
    path = tmp_path / "r.json"
    done = run(
        *"--case ffn-half --arms eager-bf16,torchao-tensorwise --rounds 1 --steps 1 --warmup 1 --device cpu".split(),
        *("--rebuild", "--interpreted", "--torchao", broken.parent, "--json", path),
    )
    assert done.returncode == 0, done.stderr
    eager, torchao = json.loads(path.read_text())["rows"]
    assert eager["ratio"]["eager_bf16"] == 1.0 and eager["ratio"]["compiled_bf16"] is None
    assert torchao["error"] == "ImportError: no such torchao"
    assert "torchao-tensorwise: ImportError: no such torchao" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "gpt5"], "no case 'gpt5'"),
        (["--case", "dit", "--arms", "bf16,fp4"], "no arm 'fp4'"),
        (["--case", "dit:depth=3"], "case dit has no variant 'depth'"),
        (["--case", "dit:batch=many"], "dit:batch=many is not a whole number"),
        (["--case", "dit:compile=twice"], "one of whole, block"),
        (["--case", "dit:batch"], "a variant is written key=value"),
        (["--case", "dit", "--rounds", "0"], "not a whole number of at least 1"),
        (["--case", "dit", "--torchao", "nowhere"], "no such file or folder"),
        (["--case", "loss", "--rebuild"], "goes on training"),
        (["--case", "all", "--json", "one.json"], "several cases need a folder"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main([*arguments, "--device", "cpu"])
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


# -- cases and arms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_full_points(name):
    """Full sizes can be listed anywhere: nothing is allocated before a point is built."""
    case = CASES[name]
    points = case.points("full", case.variant({}), Fit(141 << 30, 7))
    assert points and all(point.tokens >= 8192 for point in points)


def test_as_many_layers_as_fit():
    case, variant, _ = parse_case("llama-8b-layers", CASES)

    def layers(gigabytes: int, arms: int) -> str:
        return case.points("full", variant, Fit(gigabytes << 30, arms))[0].note

    assert layers(141, 1) == "32 layers"
    assert layers(141, 7) == "9 layers"
    assert layers(80, 7) == "5 layers"


def test_never_slower_map_has_216_cells():
    case, variant, name = parse_case("linear:grid=6", CASES)
    points = case.points("full", variant, Fit(0, 1))
    assert name == "linear:grid=6" and len({p.label for p in points}) == 216
    halves = [case.points("full", {**variant, "part": part}, Fit(0, 1)) for part in (1, 2)]
    assert sorted(p.label for half in halves for p in half) == sorted(p.label for p in points)


def test_autotuning_with_accumulation_has_no_cuda_graphs():
    arm = arms.ARMS["bf16-max-autotune"]
    assert arms.settings(arm, 1, False) == {"mode": "max-autotune"}
    assert arms.settings(arm, 8, False) == {"mode": "max-autotune-no-cudagraphs"}
    assert arms.settings(arms.ARMS["eager-bf16"], 1, False) is None


def test_torchao_from_a_wheel(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "torchao-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torchao/__init__.py", "")
    folder = arms.torchao_folder(tmp_path, tmp_path / "unpacked")
    assert (folder / "torchao" / "__init__.py").is_file()
    assert arms.torchao_folder(folder, tmp_path) == folder
    with pytest.raises(ValueError, match="neither a torchao wheel"):
        arms.torchao_folder(tmp_path / "unpacked", tmp_path)


# -- kernels -----------------------------------------------------------------------------------------------------------

NAMES = {
    "fp8_gemm": [
        "nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT",
        "nvjet_qqhsh_128x256_128x4_2x1_v_bz_coopA_TNT",
        "nvjet_sm100_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT",
        "sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x64_stage3_warpsize2x2x1_tensor16x8x32_kernel",
        "sm90_xmma_gemm_e5m2bf16_e4m3f32_f32_tn_n_tilesize64x128x128_execute_kernel__5x_cublas",
        "Cijk_Alik_Bljk_F8B8BS_BH_Bias_HA_S_SAB_SAV_UserArgs_MT256x256x128_MI16x16x1",
        "Custom_Cijk_Alik_Bljk_F8BS_BH_MT256x256x128",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<"
        "cute::tuple<int, int, int>, cutlass::float_e4m3_t>>>",
        "triton_tem_fused__scaled_mm_3",
        "fp8_gemm_0",  # fp8compile's own
        "nvjet_sm90_qqtst_128x128_128x6_1x2_h_bz_ovscale_bias_TNT",
    ],
    "bf16_gemm": [
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
        "nvjet_sm100_tst_128x256_64x6_2x1_2cta_v_bz_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel__5x_cublas",
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>",
        "Cijk_Ailk_Bljk_BBS_BH_MT256x256x32_MI16x16x1",
        "triton_tem_fused_addmm_7",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
    ],
    "cast": [
        "triton_red_fused_abs_amax_0",
        "void at::native::float8_copy_kernel_cuda",
        "triton_poi_fused_mul_9",
        "fp8_gelu_cast_transpose_amax",
        "fp8_cast_transpose_amax_0",
        "fp8_softmax_attention_gemm_cast",  # a generated kernel is an FP8 cast, whatever words its name contains
        "fp8_softmax_attention_scale_0",
        "fp8_amax",
        "fp8_update_0",
    ],
    "other": [
        "triton_poi_fused_add_mul_native_layer_norm_2",
        "triton_red_fused_addmm_native_layer_norm_4",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float>>",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<c10::BFloat16>>",
    ],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_kernel_class(kind, name):
    assert classify.classify(name, casts={"triton_poi_fused_mul_9"}) == kind


@pytest.mark.parametrize("name", ["nvjet_rqtst_128x160_128x6_2x1_v_bz_TNN", "nvjet_qrtst_128x160_128x6_2x1_v_bz_TNN"])
def test_products_of_two_formats_have_one_e4m3_operand(name):
    """True whatever letter cuBLAS uses for E5M2."""
    assert classify.classify(name) == "fp8_gemm"


def test_casts_are_known_by_their_signature(tmp_path):
    source = """
triton_poi_fused_mul_0 = async_compile.triton('triton_poi_fused_mul_0', '''
@triton_heuristics.pointwise(triton_meta={'signature': {'in_ptr0': '*bf16', 'out_ptr0': '*fp8e4nv', 'xnumel': 'i32'}})
def triton_poi_fused_mul_0(in_ptr0, out_ptr0, xnumel, XBLOCK): pass
''', device_str='cuda')
triton_poi_fused_mul_1 = async_compile.triton('triton_poi_fused_mul_1', '''
@triton_heuristics.pointwise(triton_meta={'signature': {'in_ptr0': '*bf16', 'out_ptr0': '*bf16', 'xnumel': 'i32'}})
def triton_poi_fused_mul_1(in_ptr0, out_ptr0, xnumel, XBLOCK): pass
''', device_str='cuda')
"""
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "cab.py").write_text(source)
    assert classify.cast_kernels(tmp_path) == {"triton_poi_fused_mul_0"}


def test_kernel_times_are_per_step():
    events = [("nvjet_qqtst_1", 100.0), ("nvjet_qqtst_1", 300.0), ("flash_fwd_kernel", 50.0), ("flash_fwd_kernel", 50.0)]
    found = classify.summarise(events, (), steps=2)
    assert found["classes"]["fp8_gemm"] == {"count": 1.0, "ms": 0.2}
    assert found["classes"]["attention"] == {"count": 1.0, "ms": 0.05}
    assert found["count"] == 2.0 and found["busy_ms"] == 0.25
    assert found["longest"][0]["name"] == "nvjet_qqtst_1"


# -- the kernel benchmark ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted_kernels(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    """Every family once, on a CPU: the result and the output."""
    import contextlib
    import io

    path, printed = tmp_path_factory.mktemp("kernels") / "r.json", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert kernels.main(["--device", "cpu", "--shape", "33x40", "--json", str(path)]) == 0
    (result,) = results.read([path])
    return result, printed.getvalue()


@pytest.mark.parametrize("name", families.FAMILIES)
def test_family(interpreted_kernels, name):
    """The family's kernel and Inductor's plan agree with the eager operators; a CPU gives no speeds."""
    fp8, inductor = (row for row in interpreted_kernels[0]["rows"] if row["family"] == name)
    assert (fp8["arm"], inductor["arm"]) == ("fp8", "inductor") and fp8["point"] == f"{name} 33x40"
    assert fp8["error"] is None and inductor["error"] is None and fp8["checked"] and inductor["checked"]
    twice = ("tensorwise", "gelu-backward", "layer-norm-backward")  # an amax or a column sum is a kernel of its own
    assert len(fp8["generated"]) == (2 if name in twice else 1) and inductor["generated"] == []
    assert {classify.classify(kernel) for kernel in fp8["generated"]} == {"cast"}
    assert all(row[key] is None for row in (fp8, inductor) for key in ("ms", "gb_per_s", "copy_gb_per_s", "share"))


def test_a_cpu_prints_no_speed(interpreted_kernels):
    result, text = interpreted_kernels
    assert result["device"]["name"] == "cpu" and result["size"] == "tiny" and result["name"] == "kernels:part"
    assert "GB/s" not in text and " ms" not in text and "this is no device" in text


def test_bytes_that_must_move(interpreted_kernels):
    rows, columns, padded = 33, 40, 48
    casts = rows * columns + columns * padded + 4  # both layouts and the amax
    must = {row["family"]: row["bytes"] for row in interpreted_kernels[0]["rows"]}
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
    monkeypatch.setattr(kernels.Plan, "first", lambda self, *inputs: tuple(-x.float() for x in first(self, *inputs)))
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
    seen = iter([[("Memset (Device)", 9.0)], [("Memset (Device)", 9.0), ("fp8_amax", 3.0), ("fp8_amax", 5.0)]])
    monkeypatch.setattr(kernels.Device, "profiled", lambda self, call: next(seen))
    calls: list[int] = []
    found = kernels.Device(30, "cpu", 16).timed(lambda: calls.append(1), size=10**7)
    assert len(calls) == 35  # five of them untimed
    assert found["ms"] == {"median": 2.0, "min": 2.0, "max": 2.0, "runs": 30}
    assert found["gb_per_s"] == pytest.approx(5.0) and found["share"] == pytest.approx(1.0)
    assert found["kernels"] == [{"name": "fp8_amax", "us": 4.0, "times": 2}]


def test_torchao_casts(monkeypatch):
    """torchao's kernels give the results of ours. The interpreter runs them, with their first configuration."""
    if torchao_casts.missing():
        pytest.skip(f"torchao: {torchao_casts.missing()}")
    import importlib

    from triton.runtime.interpreter import InterpretedFunction

    from tests.support import interpreter

    class StandIn:
        def __init__(self, kernel):
            tuned = hasattr(kernel, "configs")
            self.block, self.function = kernel.configs[0].kwargs if tuned else {}, (kernel.fn if tuned else kernel).fn

        def __getitem__(self, grid):
            def run(*args, **kwargs):
                with interpreter.interpreting():
                    blocks = grid(self.block) if callable(grid) else grid
                    InterpretedFunction(self.function)[blocks](*args, **kwargs, **self.block)

            return run

    module = importlib.import_module(torchao_casts.MODULE)
    for name in ("_amax_atomic", "_scale_atomic", "_to_fp8_row_major_t_and_non_t"):
        monkeypatch.setattr(module, name, StandIn(getattr(module, name)))
    for name, peer in torchao_casts.CASTS.items():
        family = families.FAMILIES[name]
        inputs = family.inputs(families.Source(48, 64, "cpu"))
        got = peer.call(*inputs)
        assert sum(x is None for x in got) <= 1
        kernels.compare(family.function(*inputs), got)


def test_counted_bytes_of_kernels(tmp_path, capsys):
    if kernels.fake_gpu.unavailable():
        pytest.skip(kernels.fake_gpu.unavailable())
    path = tmp_path / "r.json"
    assert kernels.main(["--static", "--family", "gelu-backward", "--shape", "4096x1024", "--json", str(path)]) == 0
    fp8, inductor = results.read([path])[0]["rows"]
    assert fp8["generated"] and not inductor["generated"]
    must = fp8["bytes"] / 1e9
    assert must <= fp8["static"]["gb"] < 1.05 * must < 1.5 * must < inductor["static"]["gb"]  # Inductor reads both inputs twice
    assert "| gelu-backward 4096x1024 |" in tables.markdown(results.read([path]))
    assert "estimate" not in capsys.readouterr().out


def test_out_of_time():
    bench = kernels.Bench(kernels.parse(["--device", "cpu", "--family", "gelu", "swiglu", "--budget", "1"]))
    bench.deadline = 0.0
    result = bench.run(lambda so_far: None)
    assert result["rows"] == [] and "out of time: 4 points were not begun" in tables.text(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--family", "gelu", "softmax"], "no family 'softmax'"),
        (["--shape", "4096"], "written 32768x4096"),
        (["--shape", "0x16"], "written 32768x4096"),
        (["--runs", "29"], "at least 30"),
        (["--torchao", "nowhere"], "no such file or folder"),
    ],
)
def test_errors_of_the_kernel_benchmark_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        kernels.main(["--device", "cpu", *arguments])
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def kernel_row(plan: str, point: str, ms: float) -> dict:
    family, shape = point.split()
    found = {"arm": plan, "kind": "kernels", "point": point, "error": None, "family": family, "bytes": 10**9, "checked": True}
    found |= {"shape": [*map(int, shape.split("x"))], "generated": [], "what": "its_cast" if plan == "torchao" else ""}
    return {**found, "ms": {"median": ms}, "gb_per_s": 1e3 / ms, "copy_gb_per_s": 4000.0, "share": 0.25 / ms, "kernels": []}


def kernel_result() -> dict:
    rows = [kernel_row(plan, "gelu 8x8", ms) for plan, ms in (("fp8", 0.26), ("inductor", 0.52), ("torchao", 0.39))]
    rows += [kernel_row("fp8", "swiglu 8x8", 0.5), {**failed("bf16"), "arm": "inductor", "point": "swiglu 8x8"}]
    made = dict.fromkeys(results.TOP) | {"schema": 1, "case": "kernels", "name": "kernels", "size": "full", "static": False}
    made |= {"date": "2026-01-01T00:00:00", "device": {"name": "NVIDIA H200"}, "settings": {}, "variant": {}, "goal": 0.9}
    return {**made, "rows": rows}


def test_table_of_kernels():
    lines = tables.text(kernel_result()).splitlines()
    gelu, swiglu = (next(line.split() for line in lines if line.startswith(name)) for name in ("gelu", "swiglu"))
    assert gelu == "gelu 8x8 1,000 4,000 3,846 96% 1,923 2,564 2.00 1.50".split()
    assert swiglu == "swiglu 8x8 1,000 4,000 2,000 below: 50%".split()  # no numbers for missing plans
    assert "swiglu 8x8 inductor: OutOfMemoryError: too much" in lines
    assert any("torchao: its_cast" in line for line in lines)


TABLES = ("static", "ceilings", "measured", "kernels", "instructions")


def test_kernels_are_checked_and_have_a_place_of_their_own(tmp_path):
    made = kernel_result()
    del made["rows"][0]["share"]
    with pytest.raises(ValueError, match="row 'fp8' lacks share"):
        results.check(made)
    results.write(kernel_result(), tmp_path / "k.json")
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in TABLES))
    assert tables.main([str(tmp_path / "k.json"), "--update", str(page)]) == 0
    before, _, after = page.read_text().partition("<!-- table: kernels -->")
    assert "gelu" not in before and "| gelu 8x8" in after
    pytest.importorskip("matplotlib")
    assert plot.draw(results.read([tmp_path / "k.json"]), tmp_path / "out") == []


# -- results, tables and pictures --------------------------------------------------------------------------------------


def row(arm: str, rate: float, point: str = "", **more) -> dict:
    """A measured row of an arm with `rate` tokens/s."""
    classes = {kind: {"count": 1.0, "ms": 1000 / rate} for kind in classify.CLASSES}
    steps = {part: 1e3 / rate for part in ("total", "forward", "backward", "optimizer")}
    made = train.ArmRun(arms.ARMS[arm], how="inductor", warmups=[9.0, 4.0])
    made.profile = {"kernels": {"classes": classes, "count": 5.0, "busy_ms": 5000 / rate, "longest": []}, "decisions": FP8}
    memory = {"allocated": 10**9, "reserved": 2 * 10**9}
    turn = {"tokens": 100, "span_ms": 1e5 / rate, "steps": [steps], "memory": memory, "losses": [2.0, 1.0], "validation": None}
    made.turns = [turn, {**turn, "validation": [2, 1.5]}]
    case = CASES["ffn-half"]
    found = train.row_of(made, case.points("tiny", case.variant({}), Fit(0, 1))[0], warmup=1)
    return {**found, "point": point, **more}


def result(name: str, rows: list[dict], **more) -> dict:
    case, variant, name = parse_case(name, CASES)
    results.add_ratios(rows)
    made = dict.fromkeys(results.TOP) | {"schema": 1, "case": case.name, "name": name, "size": "full", "static": False}
    made |= {"date": "2026-01-01T00:00:00", "device": {"name": "NVIDIA H200"}, "variant": variant, "settings": {}, "rows": rows}
    return {**made, "title": case.title, "goal": case.goal(variant), **more}


def failed(arm: str) -> dict:
    return {"arm": arm, "kind": arms.ARMS[arm].kind, "point": "", "error": "OutOfMemoryError: too much"}


def test_ratios_are_over_the_faster_compiled_bf16():
    rows = [row("bf16", 100), row("bf16-max-autotune", 125), row("eager-bf16", 50), row("fp8-delayed", 150)]
    results.add_ratios(rows)
    assert [r["ratio"]["compiled_bf16"] for r in rows] == pytest.approx([0.8, 1.0, 0.4, 1.2])
    assert [r["ratio"]["eager_bf16"] for r in rows] == pytest.approx([2.0, 2.5, 1.0, 3.0])
    assert rows[3]["ratio"]["over"] == "bf16-max-autotune" and rows[3]["ratio"]["busy"] == pytest.approx(1.2)
    assert rows[3]["fp8"]["proof"] == "1 FP8 GEMM kernels a step seen by the profiler"
    assert rows[0]["compile_s"] == {"cold": pytest.approx(8.99), "warm": pytest.approx(3.99)}


def test_results_are_checked(tmp_path):
    good = result("dit", [row("bf16", 100), failed("torchao-rowwise")])
    results.write(good, tmp_path / "good.json")
    assert results.read([tmp_path]) == [json.loads(json.dumps(good))]
    with pytest.raises(ValueError, match="row 'bf16' lacks how, tokens_per_s"):
        results.check({**good, "rows": [{**failed("bf16"), "error": None}]})
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="bad.json: not a result"):
        results.read([tmp_path])


def test_tables(tmp_path):
    made = result("dit", [row("bf16", 100), row("fp8-delayed", 140), failed("torchao-rowwise")])
    text = tables.text(made)
    assert "goal 1.4" in text and "1.40" in text and "torchao-rowwise: OutOfMemoryError: too much" in text
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- table: measured -->\nold\n<!-- end -->\n<!-- table: static -->\n<!-- end -->\n"
        "<!-- table: kernels -->\n<!-- end -->\n<!-- table: ceilings -->\n<!-- end -->\n"
        "<!-- table: instructions -->\n<!-- end -->\nz\n"
    )
    results.write(made, tmp_path / "r.json")
    assert tables.main([str(tmp_path / "r.json"), "--update", str(page)]) == 0
    assert "| fp8-delayed |" in page.read_text() and "old" not in page.read_text() and page.read_text().endswith("z\n")


def test_table_of_instructions():
    """Estimates with instructions are apart from those without, and their ratios are to bf16 by the same rule."""

    def row(arm, ms, longer, sustained):
        counts = {f"count.{x}": 2.0 for x in ("generated", "counted", "issue_bound")}
        times = {"roofline_ms": ms, "longer_ms": longer, "longer_ms_sustained": sustained, "issue_ms": 3.0, "bytes_ms": 2.0}
        return {"arm": arm, "kind": arm.split("-")[0], "point": "", "error": None, "static": {**counts, **times}}

    made = {"name": "ffn", "rows": [row("bf16", 30.0, 0.0, 3.0), row("fp8-delayed", 20.0, 4.0, 10.0)]}
    *_, last = tables.instructions([made]).splitlines()
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells == ["ffn fp8-delayed", "2", "2", "2", "1.50", "20.00", "24.00", "30.00", "1.50", "1.25", "1.10"]

    def of(counted, date):
        same = {"name": "ffn", "case": "ffn-half", "size": "full", "static": True, "device": {"name": "x"}}
        return {**same, "date": date, "settings": {"instructions": counted}}

    found = [of(False, "1"), of(False, "2"), of(True, "3")]
    assert results.latest(found) == found[1:]


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    cells = [(m, n, k) for m in (1024, 4096) for n in (512, 2048) for k in (512, 2048)]
    grid = [
        row(arm, rate * (1 + n / 8192), f"{m}x{n}x{k}", meta={"m": m, "n": n, "k": k})
        for m, n, k in cells
        for arm, rate in (("eager-bf16", 100), ("fp8-delayed", 60 + m / 40))
    ]
    for made in (
        result("dit", [row("bf16", 100), row("fp8-delayed", 140), failed("torchao-rowwise")]),
        result("llama-8b-layers:seq=2048", [row("bf16", 100), row("torchao-rowwise", 110), row("fp8-tensorwise", 130)]),
        result("linear:grid=6", grid),
        result("loss", [row("bf16", 100), row("fp8-delayed", 140)]),
    ):
        results.write(made, tmp_path / f"{made['case']}.json")
    assert plot.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    names = {"speed-nvidia-h200", "memory-nvidia-h200", "never-slower-nvidia-h200-fp8-delayed", "loss-nvidia-h200"}
    assert {path.stem for path in (tmp_path / "out").iterdir()} == names
    assert all(path.stat().st_size > 10_000 for path in (tmp_path / "out").iterdir())


# -- the estimate ------------------------------------------------------------------------------------------------------


def test_extrapolation():
    from benchmarks import static

    one, two = {"kernels": 10, "tflop.fp8": 2.0}, {"kernels": 14, "tflop.fp8": 4.0, "count.cast": 1}
    assert static.extrapolated(one, two, 12) == {"kernels": 54, "tflop.fp8": 24.0, "count.cast": 11}


def test_estimate_of_a_linear():
    from benchmarks import static

    if static.fake_gpu.unavailable():
        pytest.skip(static.fake_gpu.unavailable())
    case, variant, _ = parse_case("linear", CASES)
    qkv = case.static(variant)[0]
    bf16, fp8 = (static.estimate(qkv, arms.ARMS[arm])["figures"] for arm in ("bf16", "fp8-delayed"))
    assert bf16["count.bf16_gemm"] == fp8["count.fp8_gemm"] == 3
    assert bf16["tflop.bfloat16"] == fp8["tflop.fp8"] == pytest.approx(3 * 2 * 15872 * 4096 * 12288 / 1e12)
    assert bf16["roofline_ms"] > fp8["roofline_ms"]
    assert bf16["ms.bf16_gemm"] == pytest.approx(bf16["roofline_ms"]) and bf16["optimizer_ms"] == 0  # a linear has no optimizer
    assert 0 < bf16["roofline_ms_without_waves"] < bf16["roofline_ms"]
    with pytest.raises(ValueError, match="eager kernels are not compiled"):
        static.estimate(qkv, arms.ARMS["eager-bf16"])


def test_bytes_of_the_optimizer():
    """The bytes are those of the tensors that the benchmark's optimizer has after a step."""
    from benchmarks import static

    for dtype, each in ((torch.bfloat16, 14), (torch.float32, 28)):
        model = torch.nn.Linear(48, 32, dtype=dtype)
        model(torch.zeros(1, 48, dtype=dtype)).sum().backward()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer.step()
        moments = [x for state in optimizer.state.values() for x in (state["exp_avg"], state["exp_avg_sq"])]
        changed = sum(x.nbytes for x in (*model.parameters(), *moments))
        assert static.optimizer_bytes(model) == 2 * changed + sum(p.grad.nbytes for p in model.parameters())
        assert static.optimizer_bytes(model) == each * (48 * 32 + 32)


def test_the_ceiling_of_free_casts():
    def row(arm, total, outside):
        static = {"roofline_ms": total, "roofline_ms_outside_matmuls": outside}
        static |= {"roofline_ms_without_waves": total, "kept_mb": 1}
        return {"arm": arm, "kind": arm.split("-")[0], "point": "", "error": None, "static": static}

    rows = [row("bf16", 30.0, 10.0), row("fp8-delayed", 24.0, 14.0), row("fp8-tensorwise", 19.0, 9.0)]
    results.add_ratios(rows)
    # 10 ms of matmuls, and the other kernels of bf16 or its own, whichever are faster
    assert [r["ratio"]["free_casts"] for r in rows] == [1.0, 30 / 20, 30 / 19]
    made = tables.ceilings([{"name": "ffn", "goal": 1.55, "rows": rows}])
    assert made.splitlines()[-1].split("|")[1].strip() == "ffn" and " 1.25 " in made and made.rstrip().endswith("1.50 |")


def test_device_script_usage():
    script = ROOT / "benchmarks" / "device.sh"
    done = subprocess.run(["bash", str(script), "everything"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and done.stderr.startswith("usage:") and done.stderr.count("\n") == 1


def test_device_script_measures_kernels_first(tmp_path):
    """Runs the script with a stand-in for Python that records its arguments."""
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(f'#!/usr/bin/env bash\necho "$*" >>{asked}\n')
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python), "DEVICE": "cpu", "OUT": str(tmp_path / "out")}
    command = ["bash", str(ROOT / "benchmarks" / "device.sh"), "kernels"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    _, _, first, *rest = [line for line in asked.read_text().splitlines() if line]
    assert first.startswith("-m benchmarks.kernels --json ") and first.endswith("--budget 150 --device cpu --size tiny")
    assert [line.split()[3] for line in rest if "benchmarks.train" in line] == ["linear", "linear:grid=6"]
    _, at_most, left = re.search(r"benchmarks\.kernels (.*)\(at most (\d+) s, (\d+) s left\)", done.stdout).groups()
    assert at_most == "200" and 400 < int(left) <= 470  # a slow machine takes seconds to start


def test_the_matmuls_that_the_cost_model_knows(tmp_path, capsys):
    """Every gemm in three ways, and what attention runs; nothing here is a measurement."""
    assert matmuls.main(["--device", "cpu", "--json", str(tmp_path / "out" / "matmuls.json")]) == 0
    found = json.loads((tmp_path / "out" / "matmuls.json").read_text())
    assert len(found["matmuls"]) == 18 and all(row[way] > 0 for row in found["matmuls"] for way in matmuls.WAYS)
    assert {(row["m"], row["n"], row["k"]) for row in found["matmuls"] if row["layer"] == "gate+up"} == {
        (64, 448, 64),
        (64, 64, 448),
        (448, 64, 64),
    }
    assert any("scaled_dot_product" in name for name in found["attention"]["kernels"])
    printed = capsys.readouterr().out
    assert "q+k+v" in printed and "attention: cuDNN" in printed


def test_times_of_the_model_stand_beside_the_measured_ones():
    class Fixed:
        def seconds(self, function):
            function()
            return 1e-3

    h200 = catalog.find("h200")
    row = matmuls.row(Fixed(), torch.device("cpu"), h200, (64, 64, 64))
    assert [row[way] for way in matmuls.WAYS] == pytest.approx([1000] * 3)
    assert row["model fp8"] == pytest.approx(1e6 * cost.gemm(h200, 64, 64, 64, "fp8"), rel=0.2)
    assert row["model fp8"] > row["model bf16"]  # so small a matmul only starts later
