"""`weigh`: the matmuls that become FP8 on a described device. The tests rewrite the graphs of models and never run them."""

from __future__ import annotations

import importlib
import itertools
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fp8compile
from fp8compile.backend import fp8
from fp8compile.devices import catalog
from fp8compile.dryrun import fake_gpu
from fp8compile.dryrun.placeholders import PLACEHOLDERS
from fp8compile.ir.records import FP8
from fp8compile.passes import profitability
from fp8compile.passes.tensor_traffic import source
from tests.support.gpu_steps import unallocated

BF16 = torch.bfloat16
H200 = catalog.find("h200")
SIZES = [(16, 256), (512, 1024), (4096, 768), (2048, 4096), (16384, 4096)]  # tokens, width


class Attention(nn.Module):
    """Llama's attention: q, k and v read one norm's output; k and v are `narrow` times as wide as q."""

    def __init__(self, width: int, narrow: float = 0.25):
        super().__init__()
        kv = int(width * narrow)
        self.norm = nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, kv, bias=False), nn.Linear(width, kv, bias=False)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (p(h).unflatten(-1, (-1, 64)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


class One(nn.Module):
    """A linear between two pointwise operators."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return F.gelu(self.linear(F.silu(x)))


class Mlp(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Fused(nn.Module):
    """One projection for q, k and v: the gradient of its output is concatenated from three."""

    def __init__(self, width: int):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, x.shape[-1] // 64, 64)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def compile_only(build, *shape, autocast=False, dynamic=False, **options):
    """The records of a training step's matmuls with weights, by (name, gemm)."""
    model = unallocated(build, torch.float32 if autocast else BF16)
    x = torch.empty(shape, dtype=BF16).requires_grad_()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    model.compile(backend="fp8", dynamic=None if dynamic else False, options={"device": "h200", **options})
    with mock.patch.dict(fp8.__kwdefaults__, inner=PLACEHOLDERS):
        with torch.autocast("cpu", BF16, enabled=autocast):
            y = model(x)
        y.backward(torch.empty_like(y))
    return {(r.fqn, r.gemm): r for r in fp8compile.report(model).matmuls if r.gemm != "matmul"}


@pytest.fixture
def seen(monkeypatch):
    """The matmuls passed to `weigh`, by (name, gemm), with their reasons before and after."""
    kept = {}

    def spy(matmuls, device, *more):
        before = {m: m.reason for m in matmuls}
        result = profitability.weigh(matmuls, device, *more)
        kept.clear()
        kept.update({(m.fqn, m.gemm): (m, before[m]) for m in matmuls if m.weight is not None})
        return result

    monkeypatch.setattr(importlib.import_module("fp8compile.passes.pipeline"), "weigh", spy)
    return kept


# -- decisions ---------------------------------------------------------------------------------------------------------


def test_casts_of_weights_that_are_kept_cost_nothing():
    """With few tokens, casts of weights are most of what FP8 costs."""
    apart, kept = (compile_only(lambda: Mlp(4096), 1, 256, 4096, cache_weights=cache) for cache in (False, True))
    assert all(kept[key].cast_us < record.cast_us for key, record in apart.items() if key[1] != "wgrad")
    assert sum(record.decision == "fp8" for record in apart.values()) < sum(x.decision == "fp8" for x in kept.values())


class Five(nn.Module):
    """Equal layers."""

    def __init__(self, width: int):
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(width, width) for _ in range(5))

    def forward(self, x):
        return self.e(F.gelu(self.d(F.gelu(self.c(F.gelu(self.b(F.gelu(self.a(F.gelu(x))))))))))


def test_equal_layers_whose_casts_cost_otherwise_begin_to_pay_elsewhere():
    rules = [{"module": "b", "cache_weights": True}, {"module": "c", "cache_weights": True, "recast_weights": True}]
    options = {"recipe": "tensorwise", "recast_weights": False, "policy": {"rules": rules}}
    found = compile_only(lambda: Five(4096), 1, 512, 4096, **options)
    starts = {name: found[name, "fprop"].break_even_m for name in "bcd"}
    assert starts["b"] < starts["c"] < starts["d"]


def test_one_kept_copy_costs_its_transposition():
    """Of the weight with dgrad: less than a cast, more than nothing."""
    how = ({}, {"cache_weights": True, "recast_weights": True}, {"cache_weights": True, "recast_weights": False})
    cast, turned, kept = (compile_only(lambda: Mlp(4096), 1, 256, 4096, **options) for options in how)
    differ = [key for key in cast if kept[key].cast_us < turned[key].cast_us]
    assert differ and all(turned[key].cast_us < cast[key].cast_us for key in differ)
    assert all(turned[key].cast_us == kept[key].cast_us for key in cast if key not in differ)



def test_a_small_layer_stays_in_bf16_and_says_from_when_it_gains():
    found = compile_only(lambda: Mlp(512), 1, 512, 512)
    assert len(found) == 6 and all(record.decision != FP8 for record in found.values())
    for record in found.values():
        stated = re.fullmatch(r"slower in FP8: (0\.\d\d|1\.00)x at m 512; gains from m (\d+)", record.reason)
        assert stated, record.reason
        assert int(stated[2]) == record.break_even_m > 512
        assert record.bf16_us > 0 and record.fp8_us > 0 and record.cast_us is not None


def test_a_large_layer_becomes_fp8():
    found = compile_only(lambda: Mlp(4096), 1, 16384, 4096)
    assert all(record.decision == FP8 and record.reason == "" for record in found.values())
    bf16 = sum(record.bf16_us for record in found.values())
    fp8 = sum(record.fp8_us + record.cast_us for record in found.values())
    assert 1.4 < bf16 / fp8 < 1.75
    assert all(record.break_even_m < 16384 for record in found.values())
    # us for 2 * 16384 * 16384 * 4096 FLOP at the sustained rates, and a little for waves and launches
    assert found["up", "fprop"].bf16_us == pytest.approx(2783, rel=0.1) and found["up", "fprop"].fp8_us < 0.7 * 2783


def test_tensorwise_starts_later_than_delayed():
    starts = {}
    for recipe in ("delayed", "tensorwise"):
        starts[recipe] = compile_only(lambda: Mlp(2048), 1, 1024, 2048, recipe=recipe)["up", "fprop"].break_even_m
        torch._dynamo.reset()
    assert 16 < starts["delayed"] < starts["tensorwise"] < 32768


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_the_stated_break_even_is_where_the_decision_turns(recipe):
    """One pair of layers, so large that the costs once a graph are small."""
    start = compile_only(lambda: Mlp(4096), 1, 16, 4096, recipe=recipe)["up", "fprop"].break_even_m
    turned = {}
    for tokens in (start // 2, 2 * start):
        torch._dynamo.reset()
        turned[tokens] = compile_only(lambda: Mlp(4096), 1, tokens, 4096, recipe=recipe)["up", "fprop"].decision == FP8
    assert list(turned.values()) == [False, True]


def test_a_graph_that_saves_less_than_its_scales_cost():
    """One linear that gains less than the update of the scaling state costs."""
    found = compile_only(lambda: One(2048), 1152, 2048)
    assert len(found) == 3 and all(record.decision != FP8 for record in found.values())
    said = {record.reason for record in found.values()}
    stated = re.fullmatch(r"slower in FP8: all of the graph would save ([\d.]+) us, and scaling costs it 8\.0 us", said.pop())
    assert stated and not said and 0 < float(stated[1]) <= 8


def test_projections_that_share_their_input_are_decided_together():
    """k and v alone are too narrow to pay for the cast of h; with q, the cast is already paid for."""
    together = compile_only(lambda: Attention(4096), 1, 2048, 4096, recipe="tensorwise")
    assert all(together[name, "fprop"].decision == FP8 for name in "qkv")
    torch._dynamo.reset()
    off = {"rules": [{"module": ["q", "o"], "fp8": "off"}]}
    alone = compile_only(lambda: Attention(4096), 1, 2048, 4096, recipe="tensorwise", policy=off)
    assert all(alone[name, "fprop"].decision != FP8 for name in "kv")
    assert alone["k", "fprop"].break_even_m >= together["k", "fprop"].break_even_m


def test_what_the_policy_insists_on_stays_and_pays_for_others():
    found = {}
    for choice in ("auto", "on"):
        torch._dynamo.reset()
        rules = {"rules": [{"module": "q", "fp8": choice}]}
        found[choice] = compile_only(lambda: Attention(4096), 1, 768, 4096, recipe="tensorwise", policy=rules)
    assert all(record.decision != FP8 for record in found["auto"].values())
    assert all(found["on"]["q", gemm].decision == FP8 for gemm in ("fprop", "dgrad", "wgrad"))
    assert found["on"]["q", "fprop"].bf16_us > 0  # every matmul has estimates
    ratios = [float(re.search(r"(\d\.\d\d)x", found[choice]["k", "fprop"].reason)[1]) for choice in ("auto", "on")]
    assert ratios[0] < ratios[1]  # another matmul already pays for the cast of h


def test_a_device_without_fp8():
    found = compile_only(lambda: Mlp(4096), 1, 8192, 4096, device="a100")
    assert {record.reason for record in found.values()} == {"slower in FP8: NVIDIA A100-SXM4-80GB has no FP8"}


def test_nothing_is_weighed_without_a_description():
    found = compile_only(lambda: Mlp(256), 1, 32, 256, device=None)
    assert all(record.decision == FP8 and record.bf16_us is None for record in found.values())


def test_dynamic_sizes_are_not_specialised():
    """`mark_dynamic` raises if a guard specialises the number of tokens."""
    found = compile_only(lambda: Mlp(4096), 8192, 4096, dynamic=True)
    assert all(record.decision == FP8 and record.bf16_us > 0 for record in found.values())
    assert any(record.dynamic for record in found.values())


# -- the choice is a good one ------------------------------------------------------------------------------------------

MODELS = {"attention": Attention, "mlp": Mlp, "fused": Fused}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens, width", SIZES)
def test_no_choice_within_a_component_is_better(seen, name, recipe, tokens, width):
    """Compares with all 2**n choices, by the cost model's own estimate."""
    compile_only(lambda: MODELS[name](width), 1, tokens, width, recipe=recipe)
    matmuls = [matmul for matmul, _ in seen.values()]
    for matmul, reason in seen.values():
        matmul.reason = reason
    components = profitability._components(profitability._model([m for m in matmuls if m.fp8]))
    parts = [profitability._Component(H200, part, {}) for part in components]
    assert sum(len(part.gemms) for part in parts) == sum(m.fp8 for m in matmuls) >= 6
    for part in parts:
        part.improve()
        ours = part.seconds(part.chosen)
        assert ours <= part.seconds(set()) * (1 + 1e-12) and ours <= part.seconds(part.everything) * (1 + 1e-12)
        subsets = itertools.chain.from_iterable(itertools.combinations(part.gemms, n) for n in range(len(part.gemms) + 1))
        best = min(part.seconds(set(subset)) for subset in subsets)
        assert ours <= best * 1.01
        # the shares of the gemms add up to the time of the component
        part.chosen = part.everything
        told = sum(gemm.seconds(H200, True) + part.share(gemm, part.everything) for gemm in part.gemms)
        spent = part.seconds(part.everything) - sum(base.seconds(H200, set()) for base in part.bases)
        assert told == pytest.approx(spent)


# -- the producer and the readers of a tensor ----------------------------------------------------------------------------------


def of(seen, name, gemm, role):
    matmul = seen[name, gemm][0]
    return source(next(matrix for matrix, given in matmul.roles if given == role))


def test_traffic_of_an_mlp(seen):
    compile_only(lambda: Mlp(256), 1, 512, 256)
    elements = 512 * 256
    norm, gelu = of(seen, "up", "fprop", "input"), of(seen, "down", "fprop", "input")
    assert (norm.elements, gelu.elements) == (elements, 4 * elements)
    assert norm.fused and not norm.shared and len(norm.readers) == 2  # fprop and wgrad
    assert gelu.fused and gelu.producer_bytes == 4 * elements * 2  # the output of `up`
    dy, dh = of(seen, "down", "dgrad", "gradient"), of(seen, "up", "dgrad", "gradient")
    assert not dy.fused and dy.shared  # the output gradient of the model, which the residual reads, too
    assert dh.fused and dh.producer_bytes == 2 * 4 * elements * 2  # GELU's input and the gradient of its output
    weight = of(seen, "up", "fprop", "weight")
    assert not weight.fused and not weight.shared and weight.itemsize == 2 and len(weight.readers) == 2


def test_traffic_of_attention(seen):
    compile_only(lambda: Attention(512), 1, 256, 512)
    h = of(seen, "q", "fprop", "input")
    assert h.fused and not h.shared and len(h.readers) == 6  # q, k, v: fprop and wgrad
    y = of(seen, "o", "fprop", "input")
    assert not y.fused and not y.scattered and not y.shared


def test_traffic_of_a_gradient_that_is_put_together(seen):
    compile_only(lambda: Fused(512), 1, 256, 512)
    dy = of(seen, "qkv", "dgrad", "gradient")
    assert dy.scattered and not dy.fused
    assert not of(seen, "qkv", "fprop", "input").fused  # it is an input of the graph


def test_a_gradient_that_is_put_together_is_read_once():
    """By one of our kernels; by Inductor's once for each copy and for the amax. Tensorwise scaling takes Inductor's."""

    def casts(recipe: str, apart: bool) -> float:
        torch._dynamo.reset()
        with torch._inductor.config.patch({"bucket_all_gathers_fx": "all"} if apart else {}):
            found = compile_only(lambda: Fused(4096), 2, 4096, 4096, recipe=recipe)
        return found["qkv", "dgrad"].cast_us + found["qkv", "wgrad"].cast_us

    elements = 2 * 4096 * 3 * 4096
    more = 1e6 * (2 * 2 * elements / 4.2e12) + 2 * 2
    assert casts("delayed", True) - casts("delayed", False) == pytest.approx(more, rel=1e-3)
    assert casts("tensorwise", True) == casts("tensorwise", False)


def test_a_float32_residual_is_written_beside_the_copy_for_bf16(seen):
    """Under autocast, the gradient that a residual passes on is float32, and the matmuls read a bf16 copy of it. In FP8 they do
    not, so the write of that copy is saved, and the float32 tensor is written either way."""
    compile_only(lambda: Mlp(1024), 1, 4096, 1024, autocast=True)
    base = replace(of(seen, "down", "dgrad", "gradient"), fused=True, shared=True, itemsize=4)
    device = catalog.find("h200")
    gemm = mock.Mock(itemsize=2)
    made = profitability.Base(base, weight=False, outside=False)
    made.casts.append(profitability.Cast(made, "delayed", False, readers=[(gemm, ("", False)), (gemm, ("", True))]))
    high, fp8 = (1e6 * made.seconds(device, chosen) for chosen in (set(), {gemm}))
    byte = 1e6 * base.elements / device.bandwidth
    assert high == pytest.approx((4 + 2) * byte) and fp8 == pytest.approx(4 * byte + (4 + 2) * byte + 2)


def test_float32_weights_under_autocast(seen):
    found = compile_only(lambda: Mlp(256), 1, 512, 256, autocast=True)
    assert of(seen, "up", "fprop", "weight").itemsize == 4
    full = compile_only(lambda: Mlp(1024), 1, 512, 1024, autocast=True)
    torch._dynamo.reset()
    half = compile_only(lambda: Mlp(1024), 1, 512, 1024)
    assert full["up", "fprop"].cast_us < half["up", "fprop"].cast_us  # with autocast, bf16 also pays for a cast
    assert found


# -- a sample of the study ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(fake_gpu.unavailable() is not None, reason=fake_gpu.unavailable() or "")
@pytest.mark.parametrize("seed", [1, 10, 15, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (20, 37))])
def test_never_slower(seed):
    """Five of the 200 models of benchmarks/never_slower.py. FP8 is never slower, by the roofline of Inductor's launches."""
    from benchmarks import never_slower

    row = never_slower.compare(never_slower.draw(seed))
    assert not never_slower.slower(row), row
