"""The generated source of representative groups equals the files of `expected/`: a changed generator shows as a diff."""

from __future__ import annotations

import difflib

import pytest

from tests.support.regenerate import COMMAND, EXPECTED, GROUPS, generate


@pytest.mark.parametrize("function", GROUPS, ids=lambda function: function.__name__)
def test_the_generated_source_is_the_expected_one(function):
    path = EXPECTED / f"{function.__name__}.py"
    expected = path.read_text() if path.exists() else ""
    made = generate(function)
    diff = difflib.unified_diff(
        expected.splitlines(keepends=True), made.splitlines(keepends=True), f"expected/{path.name}", "generated"
    )
    assert made == expected, f"the generator writes something else (if that is meant: `{COMMAND}`):\n" + "".join(diff)


def test_expected_files_are_of_groups_that_there_are():
    assert {path.stem for path in EXPECTED.glob("*.py")} == {function.__name__ for function in GROUPS}


@pytest.mark.slow
def test_a_source_does_not_depend_on_the_run():
    """Names of values, kernels and symbols depend only on the group: here the groups come in the opposite order."""
    for function in reversed(GROUPS):
        assert generate(function) == (EXPECTED / f"{function.__name__}.py").read_text()


def test_each_group_is_the_kernels_that_it_is_meant_to_be():
    """One kernel a group, two if the scale waits for the amax; each kernel includes the producer."""
    titles = {
        "weight_both_layouts": ["fp8_cast_transpose_amax"],
        "row_major_only": ["fp8_cast"],
        "gelu": ["fp8_gelu_cast_transpose_amax"],
        "swiglu": ["fp8_silu_mul_cast_transpose_amax"],
        "gelu_backward_bias": ["fp8_gelu_backward_cast_transpose_amax_sum"],
        "swiglu_backward": ["fp8_mul_sigmoid_rsub_add_cast_transpose_amax"],
        "rms_norm": ["fp8_pow_mean_add_rsqrt_cast_transpose_amax"],
        "layer_norm": ["fp8_native_layer_norm_cast_transpose_amax"],
        "layer_norm_backward": ["fp8_native_layer_norm_backward_cast_transpose_amax_sum"],
        "attention_output": ["fp8_cast_transpose_amax"],
        "tensorwise_gelu": ["fp8_gelu_amax", "fp8_gelu_cast_transpose"],
        "dynamic_rows": ["fp8_relu_cast_transpose_amax"],
        "mxfp8_swiglu": ["fp8_silu_mul_cast_transpose_scale"],
        "blockwise_weight": ["fp8_cast_transpose_scale"],
        "blockwise_gelu_backward_bias": ["fp8_gelu_backward_cast_transpose_scale_sum"],
        "rowwise_rms_norm": ["fp8_pow_mean_add_rsqrt_cast_columns", "fp8_mul_transpose"],
    }
    stores = {"row_major_only": 1, "swiglu_backward": 4, "rms_norm": 3, "gelu_backward_bias": 3, "layer_norm_backward": 4}
    stores["layer_norm"] = 4  # both layouts, mean and rstd
    stores |= {"mxfp8_swiglu": 4, "blockwise_weight": 3, "blockwise_gelu_backward_bias": 5}  # scales, and a sum
    stores["rowwise_rms_norm"] = 4  # both layouts, a scale a row, rstd
    for function in GROUPS:
        name = function.__name__
        source = (EXPECTED / f"{name}.py").read_text()
        made = [line.split("(")[0].removeprefix("def ").rpartition("_")[0] for line in source.splitlines() if "def " in line]
        assert made == titles[name]
        assert source.count("tl.store(") == stores.get(name, 2), name
