"""The fake GPU itself, on plain Inductor graphs whose kernels and bytes are counted by hand."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from fp8compile.devices import catalog
from fp8compile.dryrun.fake_gpu import H200, trace, unavailable
from fp8compile.dryrun.fake_gpu.device import described_gpu
from tests.support.harness import ALL_FP8

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")

BF16 = torch.bfloat16


def test_triton_warns_of_nothing() -> None:
    """3.9 does where it is asked for its default of contraction, as torch does. The environment stays."""
    from triton import knobs

    if not hasattr(knobs.language, "fp_fusion_enabled"):
        pytest.skip("this Triton does not warn")
    from triton._utils import warn_once

    warn_once.cache_clear()
    before = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with described_gpu(H200):
            assert knobs.language.fp_fusion_enabled(None)
        assert dict(os.environ) == before
        with pytest.raises(UserWarning, match="TRITON_DEFAULT_FP_FUSION"):
            knobs.language.fp_fusion_enabled(None)


@pytest.mark.slow
def test_an_mlp_counted_by_hand():
    """x [64, 256] -> [64, 512] -> GELU -> [64, 256]; the second linear has a bias; bf16, with gradients."""
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.GELU(), nn.Linear(512, 256)).to(BF16)
    given = torch.randn(64, 256, dtype=BF16, requires_grad=True)
    compiled = torch.compile(model)
    mlp = trace(lambda: compiled(given).sum().backward())
    x, h, w = 64 * 256 * 2, 64 * 512 * 2, 256 * 512 * 2
    forward, backward = mlp.graphs
    assert (forward.backward, backward.backward) == (False, True)
    assert all("@triton" in g.code and "cuda" in g.code and "cpp_fused" not in g.code for g in mlp.graphs)
    assert mlp.flops == {"bfloat16": 6 * 2 * 64 * 256 * 512}
    assert len(forward.kernels) == 3  # mm, GELU, addmm
    assert sorted((*m.out.shape, m.a.shape[-1]) for m in mlp.matmuls) == sorted(
        [(64, 512, 256), (64, 256, 512)] * 2 + [(256, 512, 64), (512, 256, 64)]
    )
    # one has a bias
    assert sorted(k.bytes for k in mlp.kernels if k.matmul) == sorted([x + h + w] * 5 + [x + h + w + 256 * 2])
    assert [k.bytes for k in forward.kernels if not k.matmul] == [2 * h]  # GELU: reads h, writes h
    # The bias gradient reads dy and writes 256 numbers; dGELU reads h and its gradient, writes one.
    assert sorted(k.bytes for k in backward.kernels if not k.matmul) == sorted([x + 256 * 2, 3 * h])
    assert mlp.bytes_outside_matmuls == 5 * h + x + 256 * 2
    # GELU's input, and its output for wgrad; x and the weights exist anyway
    assert mlp.kept_for_backward == 2 * h


def test_operands_once():
    """A buffer that two kernels read counts once, and one between generated kernels not at all."""
    size = 256 * 256 * 2

    def f(a, w):
        x = (a + 1) @ w
        return (x.relu() @ w) + x, x.float().sum(0)

    compiled = torch.compile(f)
    step = trace(lambda: compiled(*(torch.randn(256, 256, dtype=BF16) for _ in range(2))))
    # read: a, and x for relu and the sum; written: a + 1, relu(x), the sum. The last sum is the matmul's
    assert step.graphs[0].operands_once() == 4 * size + 256 * 4
    assert step.bytes_outside_matmuls == 5 * size + 256 * 4 + 2 * 2 * 256 * 4


@pytest.mark.slow
def test_scaled_matmul_is_fp8_and_its_layout_is_seen():
    """A layout that the CPU accepts and Hopper does not fails here: a row-major second operand."""
    one = torch.ones(())
    compiled = torch.compile(lambda a, b: torch._scaled_mm(a, b.t(), one, one, out_dtype=BF16))
    a, b = torch.randn(64, 256).to(torch.float8_e4m3fn), torch.randn(128, 256).to(torch.float8_e4m3fn)
    step = trace(lambda: compiled(a, b))
    (m,) = step.matmuls
    assert step.flops == {"fp8": 2 * 64 * 256 * 128}
    assert m.a.stride[-1] == m.b.stride[-2] == 1 and m.out.dtype == BF16
    with pytest.raises(Exception, match="(?i)col"):
        trace(lambda: compiled(a, b.t().contiguous().t()))


def test_indexing_of_a_tensor_on_the_described_device():
    """A pass may index fake tensors, although torch would then ask the CUDA runtime for a device guard."""
    x = torch.arange(24).view(2, 3, 4)
    seen = []

    def look(graph):
        (node,) = graph.find_nodes(op="placeholder")
        fake = node.meta["val"]
        seen.extend(fake[index] for index in indices)

    indices = [0, (slice(None), 1), (..., 2), (None, ..., slice(1, 3)), (1, ..., None, 0)]
    indices.append((slice(0, 1), slice(None), -1))
    compiled = torch.compile(lambda x: x + 1, options={"joint_custom_pre_pass": look})
    trace(lambda: compiled(x))
    assert {t.device.type for t in seen} == {"cuda"}
    parts = [x[i] for i in indices]
    assert [(t.shape, t.stride()) for t in seen] == [(part.shape, part.stride()) for part in parts]


def test_symbolic_rows():
    model = nn.Linear(256, 128, bias=False).to(BF16)
    compiled = torch.compile(model, dynamic=True)
    step = trace(lambda: compiled(torch.randn(48, 256, dtype=BF16)).sum().backward())
    assert step.flops == {"bfloat16": 2 * 2 * 48 * 256 * 128}  # fprop and wgrad: the input has no gradient


class Named(nn.Module):
    """A layer whose kernels are distinguished by name: two linears, an activation, a norm, a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.slow
def test_kernels_know_their_modules():
    """(test_layers_add_up in test_estimate.py asks the same of Inductor alone.)"""
    model = nn.Sequential(Named(), Named()).to(BF16)
    compiled = torch.compile(model, backend="fp8", options={"policy": ALL_FP8})
    step = trace(lambda: compiled(torch.randn(64, 256, dtype=BF16)))
    assert [g.backward for g in step.graphs] == [False, True]
    matmuls = [(k.fqn, g.backward) for g in step.graphs for k in g.kernels if k.matmul]
    expected = [(f"{i}.{name}", False) for i in range(2) for name in ("up", "down")]
    expected += [(f"{i}.{name}", True) for i in range(2) for name in ("up", "down", "up", "down")]
    assert sorted(matmuls) == sorted(expected)
    assert {k.matmul.dtype for k in step.kernels if k.matmul} == {"fp8"}
    modules = {f"{i}{name}" for i in range(2) for name in ("", ".norm", ".up", ".down")}
    moved = {fqn: sum(k.bytes for k in step.kernels if k.fqn == fqn) for fqn in {k.fqn for k in step.kernels}}
    assert set(moved) <= modules | {""} and moved.get("", 0) < 0.02 * sum(moved.values())
    assert sum(step.kept.values()) == step.kept_for_backward and set(step.kept) <= modules


@pytest.mark.slow
def test_several_graphs():
    layers = [nn.Linear(128, 128, bias=False).to(BF16) for _ in range(3)]

    @torch.compile
    def f(x):
        x = layers[0](x)
        torch._dynamo.graph_break()
        x = layers[1](x)
        assert float(x.float().sum()) == 0  # values are zeros
        return layers[2](x)

    step = trace(lambda: f(torch.randn(64, 128, dtype=BF16)).sum().backward())
    assert [g.backward for g in step.graphs] == [False] * 3 + [True] * 3
    assert step.flops == {"bfloat16": (2 + 3 + 3) * 2 * 64 * 128 * 128}


def test_attention_is_seen():
    def f(x):
        return F.scaled_dot_product_attention(x, x[:, :2], x[:, 2:], is_causal=True, enable_gqa=True)

    compiled = torch.compile(f)
    step = trace(lambda: compiled(torch.randn(2, 4, 128, 64, dtype=BF16, requires_grad=True)))
    forward, backward = [k.attention for k in step.kernels if k.attention]
    assert forward.causal and backward.causal and backward.backward and not forward.backward
    assert forward.flops == 2 * 2 * 2 * 4 * 128 * 128 * 64 // 2 and backward.flops == forward.flops * 5 // 2
    assert step.flops == {}


def test_nothing_of_the_described_device_is_left():
    from torch._dynamo.device_interface import get_interface_for_device
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list as entries

    def f(x):
        return torch.relu(x) + 1

    before = get_interface_for_device("cuda")
    compiled, x = torch.compile(f), torch.randn(64)
    for name, capability in (("a100", 80), ("h200", 90)):
        step = trace(lambda: compiled(x), catalog.find(name).gpu)
        assert f"cc={capability}" in step.code
    assert not torch.cuda.is_available() and get_interface_for_device("cuda") is before
    assert not entries(f.__code__)  # a later call is compiled again, for the CPU
    assert torch.equal(torch.compile(f, backend="aot_eager")(x), torch.relu(x) + 1)

    def fail():
        raise KeyError("of the step")

    with pytest.raises(KeyError):
        trace(fail)
    assert not torch.cuda.is_available()


# -- bytes of buffers with more than 1e9 elements, where Inductor's own count ends --

ROWS, COLUMNS = 65536, 50304  # GPT-2's logits: 3.3e9


@pytest.mark.slow
def test_all_of_large_logits_counts():
    """A fused kernel, matmuls of the library, and the gather of cross-entropy: one element a row."""

    @torch.compile
    def f(x, w, targets):
        return F.cross_entropy((x @ w.t()).float(), targets)

    x, w = (torch.empty(size, 128, dtype=BF16, requires_grad=True) for size in (ROWS, COLUMNS))
    step = trace(lambda: f(x, w, torch.empty(ROWS, dtype=torch.long)).backward())
    logits, small = 2 * ROWS * COLUMNS, 2 * 128 * (ROWS + COLUMNS)
    assert [k.bytes for k in step.kernels if k.matmul] == [pytest.approx(logits + small, rel=1e-3)] * 3
    others = sorted(k.bytes for k in step.kernels if not k.matmul)
    # the sums of the softmax read the logits; its gradient reads and writes them
    assert others[-2:] == [pytest.approx(logits, rel=2e-3), pytest.approx(2 * logits, rel=2e-3)]
    assert sum(others[:-2]) < 1e7


def test_a_slice_counts_as_much_as_is_read():
    f = torch.compile(lambda x, index: (x[:, :64] * 2, x[:, :64].float().sin().sum(), x.view(-1)[index]))
    x, index = torch.randn(1024, 1024, dtype=BF16), torch.zeros(16, dtype=torch.long)
    moved = sum(k.bytes for k in trace(lambda: f(x, index)).kernels)
    assert 2 * 1024 * 64 * 2 <= moved < 3.1 * 1024 * 64 * 2  # all of x would be 16 such slices


# -- accumulation of FP8 matmuls --


SUMS = {"tensorwise": ["fast", "precise", "precise"], "blockwise": ["blocks"] * 3}


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize("recipe, sums", SUMS.items())
def test_how_matmuls_accumulate(recipe, sums):
    model = nn.Linear(512, 512, bias=False).bfloat16()
    policy = {"rules": [{"fp8": "on"}]}
    f = torch.compile(model, backend="fp8", options={"recipe": recipe, "device": "h200", "policy": policy})
    x = torch.randn(512, 512, dtype=BF16, requires_grad=True)
    step = trace(lambda: f(x).sum().backward())
    assert sorted(m.accumulation for m in step.matmuls) == sorted(sums)
    assert step.flops == {"fp8": 3 * 2 * 512**3}
