"""The kernels of a training step on an H200, read from the code that Inductor generates for it
(`dryrun.fake_gpu`)."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter

import pytest
import torch
import torch.nn as nn

import fp8compile.backend
from fp8compile.devices import catalog
from fp8compile.dryrun.fake_gpu import MatmulLaunch, Step, trace
from fp8compile.ir import ops
from tests.support.executed import planning
from tests.support.gpu_steps import compile_mlp, unallocated
from tests.support.harness import ALL_FP8
from tests.support.models import LlamaLayer

pytestmark = planning
RECIPES = pytest.mark.parametrize("recipe", ["delayed", pytest.param("tensorwise", marks=pytest.mark.slow)])

BF16 = torch.bfloat16
DIM, KV, HIDDEN, TOKENS = 4096, 1024, 14336, 8192  # Llama-3-8B


def sizes(matmuls: list[MatmulLaunch]) -> Counter[tuple[int, int, int]]:
    return Counter((*m.out.shape, m.a.shape[-1]) for m in matmuls)


def check_matmuls(step: Step) -> None:
    """Every matmul is FP8, with the layout and padding that Hopper needs; none of our operators is left."""
    assert step.matmuls and {m.op for m in step.matmuls} == {"_scaled_mm"}
    for m in step.matmuls:
        assert m.a.stride[-1] == m.b.stride[-2] == 1, m
        assert m.a.shape[-1] % 16 == 0 and m.b.shape[-1] % 16 == 0, m
    assert [g.backward for g in step.graphs] == [False, True]
    assert f"ops.{ops.NAMESPACE}" not in step.code
    assert not [target for g in step.graphs for target in g.targets if "fp8compile" in target]


def layer_step(**how) -> Step:
    """One step of the layer on 1 x 8192 tokens."""
    layer = torch.compile(unallocated(LlamaLayer, BF16), **how)
    x = torch.empty(1, TOKENS, DIM, dtype=BF16, requires_grad=True)
    return trace(lambda: layer(x).sum().backward())


@functools.cache
def llama(recipe: str = "") -> Step:
    """By bf16 Inductor, or in FP8."""
    if not recipe:
        return layer_step()
    return layer_step(backend="fp8", options={"recipe": recipe, "policy": ALL_FP8})


@pytest.mark.slow
@RECIPES
def test_all_21_matmuls_of_a_llama_layer_are_fp8(recipe):
    """As 12, because q, k and v are merged, and gate and up."""
    step = llama(recipe)
    check_matmuls(step)
    linears = [(DIM, DIM + 2 * KV), (DIM, DIM), (DIM, 2 * HIDDEN), (HIDDEN, DIM)]  # in, out
    expected = Counter()
    for k, n in linears:
        expected.update([(TOKENS, n, k), (TOKENS, k, n), (n, k, TOKENS)])  # fprop, dgrad, wgrad
    assert sizes(step.matmuls) == expected and expected.total() == 12
    assert step.flops == {"fp8": llama().flops["bfloat16"]}


@pytest.mark.weekly
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_matmuls_of_a_llama_layer_share_their_operands(recipe):
    """Not merged, q, k and v read one FP8 copy of their input, gate and up another. Their wgrads share copies
    in the same way."""
    step = layer_step(backend="fp8", options={"recipe": recipe, "policy": ALL_FP8, "merge_matmuls": False})
    forward, backward = ([k.matmul for k in g.kernels if k.matmul] for g in step.graphs)
    assert len(forward) == 7 and len({m.a.buffer for m in forward}) == 4
    wgrads = [m for m in backward if m.a.shape[-1] == TOKENS]
    assert len(wgrads) == 7 and len({m.b.buffer for m in wgrads}) == 4


@pytest.mark.slow
@RECIPES
def test_bytes_outside_matmuls_of_a_llama_layer(recipe):
    """Weights are cast again in backward. torchao's tensorwise recipe, with every tensor read twice: 2.04."""
    ratio = llama(recipe).bytes_outside_matmuls / llama().bytes_outside_matmuls
    assert ratio <= {"delayed": 1.4, "tensorwise": 1.9}[recipe]


@pytest.mark.slow
@RECIPES
def test_bytes_kept_for_backward(recipe):
    """FP8 copies replace the bf16 activations. With both, the bytes would be 1.29 times as many."""
    assert llama(recipe).kept_for_backward <= 0.75 * llama().kept_for_backward


@pytest.mark.feature("delayed")
def test_scales_are_read_from_where_they_are():
    """Four tensors, four slots: each matmul of the forward reads the inverses of its own slots. (In torch
    2.11, `as_strided` without an offset becomes the first number of the scales: pytorch#175325.)"""
    lines = compile_mlp(64).graphs[0].code.splitlines()
    calls = [line for line in lines if "extern_kernels._scaled_mm(" in line]
    offsets = [int(offset) for line in calls for offset in re.findall(r"\(1, 1\), \(1, 1\), (\d+)\)", line)]
    assert len(calls) == 2 and len(set(offsets)) == len(offsets) == 4
    assert {offset % ops.APART for offset in offsets} == {0}  # 16-byte aligned
    assert {offset // ops.APART % 3 for offset in offsets} == {1}, "the inverse of three numbers a slot"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", pytest.param("blockwise", marks=pytest.mark.slow)])
def test_a_weight_is_cast_where_it_is_read(recipe):
    """Casting all weights at the beginning would keep all FP8 copies of a model in memory at once. (cuBLASLt
    does not support blocks with 100 tokens.)"""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))).to(BF16)
    compiled = torch.compile(model, backend="fp8", options={"policy": ALL_FP8, "recipe": recipe})
    x = torch.randn(100, 512, dtype=BF16, requires_grad=True)
    forward = trace(lambda: compiled(x).sum().backward()).graphs[0]
    what = ""
    for line in forward.code.splitlines():
        if re.search(r"fp8_cast\w*\.run\(", line):
            what += "w" if ".run(primals" in line else "x"
        elif re.search(r"fp8_gemm\w*\.run\(|_scaled_mm\(", line):
            what += "m"
    # casts of the weights and, at first, the input
    assert what.count("m") == 4 and what.count("w") == 5, what
    assert "ww" not in what[1:], what


@pytest.mark.slow
def test_copies_that_inductor_writes_have_no_gaps():
    """Inductor would pad rows of 1040 bytes to 1152, and ATen's row-wise kernel for sm_89 ignores strides.
    Inductor writes the copies in graphs whose nodes it reorders to bucket collectives: such graphs get no
    generated kernels."""
    model = unallocated(lambda: nn.Linear(1040, 1168, bias=False), BF16)
    compiled = torch.compile(model, backend="fp8", options={"policy": ALL_FP8, "recipe": "rowwise"})
    x = torch.randn(2000, 1040, dtype=BF16, requires_grad=True)
    with torch._inductor.config.patch(bucket_all_gathers_fx="all"):
        step = trace(lambda: compiled(x).sum().backward())
    assert {m.op for m in step.matmuls} == {"_scaled_mm"} and len(step.matmuls) == 3
    for m in step.matmuls:
        assert m.a.stride == (m.a.shape[1], 1) and m.b.stride == (1, m.b.shape[0]), m


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_rows_that_are_no_multiple_of_16(rows):
    """wgrad contracts over the rows: its FP8 operands are padded with zeros to the next multiple of 16."""
    step = compile_mlp(rows)
    check_matmuls(step)
    padded = -(-rows // 16) * 16
    wgrads = [(512, 256, padded), (256, 512, padded)]
    assert sizes(step.matmuls) == Counter([(rows, 512, 256), (rows, 256, 512)] * 2 + wgrads)


def test_a_gpu_without_fp8_gets_high_precision(monkeypatch):
    """On an A100 nothing becomes FP8. (The inputs are on the CPU here; the test tells the backend that they
    are on the GPU.)"""

    def capture(*args):
        return dataclasses.replace(inputs_of(*args), devices=frozenset({torch.device("cuda", 0)}))

    inputs_of = fp8compile.backend.capture
    monkeypatch.setattr(fp8compile.backend, "capture", capture)
    a100 = catalog.find("a100").gpu
    step = compile_mlp(64, gpu=a100)
    assert step.flops == {"bfloat16": 6 * 2 * 64 * 256 * 512}
    with pytest.raises(Exception, match="NVIDIA A100-SXM4-80GB has compute capability 8.0"):
        compile_mlp(64, gpu=a100, strict=True)
