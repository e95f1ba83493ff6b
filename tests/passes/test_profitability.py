"""`weigh`: the matmuls that become FP8 on a described device. The tests rewrite the graphs of models and
never run them."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fp8compile
from fp8compile.devices import catalog
from fp8compile.ir.records import FP8, MatmulRecord
from fp8compile.passes import gemm_costs, profitability
from fp8compile.passes.tensor_traffic import source
from tests.support import hooks
from tests.support.gpu_steps import unallocated

BF16 = torch.bfloat16
H200 = catalog.find("h200")
Records = dict[tuple[str, str], MatmulRecord]


class Attention(nn.Module):
    """Llama's attention: q, k and v read one norm's output; k and v are `narrow` times as wide as q."""

    def __init__(self, width: int, narrow: float = 0.25):
        super().__init__()
        kv = int(width * narrow)
        self.norm = nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, kv, bias=False), nn.Linear(width, kv, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (p(h).unflatten(-1, (-1, 64)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


class One(nn.Module):
    """A linear between two pointwise operators."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(F.silu(x)))


class Mlp(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Fused(nn.Module):
    """One projection for q, k and v: the gradient of its output is concatenated from three."""

    def __init__(self, width: int):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, x.shape[-1] // 64, 64)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Step(NamedTuple):
    """Matmuls with weights of a training step by (name, gemm): their records; those weighed, with the
    decisions before."""

    records: Records
    weighed: dict[tuple[str, str], tuple[Any, str]]


def step(
    build: Callable[[], nn.Module], *shape: int, autocast: bool = False, dynamic: bool = False, **options: Any
) -> Step:
    model = unallocated(build, torch.float32 if autocast else BF16)
    x = torch.empty(shape, dtype=BF16).requires_grad_()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    model.compile(backend="fp8", dynamic=None if dynamic else False, options={"device": "h200", **options})
    with hooks.traced(), hooks.weighed() as weighed:
        with torch.autocast("cpu", BF16, enabled=autocast):
            y = model(x)
        y.backward(torch.empty_like(y))
    return Step({(r.fqn, r.gemm): r for r in fp8compile.report(model).matmuls if r.gemm != "matmul"}, weighed)


MODELS = {"attention": Attention, "mlp": Mlp, "fused": Fused}


@functools.cache
def made(name: str, tokens: int, width: int, **options: Any) -> Step:
    return step(lambda: MODELS[name](width), 1, tokens, width, **options)


def records(name: str, tokens: int, width: int, **options: Any) -> Records:
    return made(name, tokens, width, **options).records


# -- decisions --


@pytest.mark.slow
def test_copies_of_weights_that_are_kept_cost_nothing_and_one_kept_copy_costs_its_transposition() -> None:
    """With few tokens, casts of weights are most of what FP8 costs. A transposition, of the weight with
    dgrad, costs less than a cast and more than nothing."""
    cast, kept = records("mlp", 256, 4096), records("mlp", 256, 4096, cache_weights=True)
    turned = records("mlp", 256, 4096, cache_weights=True, recast_weights=True)
    assert all(kept[key].cast_us < record.cast_us for key, record in cast.items() if key[1] != "wgrad")
    few, many = (sum(x.decision == FP8 for x in found.values()) for found in (cast, kept))
    assert few < many
    differ = [key for key in cast if kept[key].cast_us < turned[key].cast_us]
    assert differ and all(turned[key].cast_us < cast[key].cast_us for key in differ)
    assert all(turned[key].cast_us == kept[key].cast_us for key in cast if key not in differ)


class Five(nn.Module):
    """Equal layers."""

    def __init__(self, width: int):
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(width, width) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.e(F.gelu(self.d(F.gelu(self.c(F.gelu(self.b(F.gelu(self.a(F.gelu(x))))))))))


@pytest.mark.slow
def test_equal_layers_whose_casts_cost_otherwise_begin_to_pay_elsewhere() -> None:
    rules = [
        {"module": "b", "cache_weights": True},
        {"module": "c", "cache_weights": True, "recast_weights": True},
    ]
    options = {"recipe": "tensorwise", "recast_weights": False, "policy": {"rules": rules}}
    found = step(lambda: Five(4096), 1, 512, 4096, **options).records
    starts = {name: found[name, "fprop"].break_even_m for name in "bcd"}
    assert starts["b"] < starts["c"] < starts["d"]


@pytest.mark.slow
def test_a_small_layer_stays_in_bf16_and_says_from_when_it_gains() -> None:
    found = records("mlp", 512, 1024)
    assert len(found) == 6 and all(record.decision != FP8 for record in found.values())
    for record in found.values():
        stated = re.fullmatch(r"slower in FP8: (0\.\d\d|1\.00)x at m 512; gains from m (\d+)", record.reason)
        assert stated, record.reason
        assert int(stated[2]) == record.break_even_m > 512
        assert record.bf16_us > 0 and record.fp8_us > 0 and record.cast_us is not None


@pytest.mark.slow
def test_a_large_layer_becomes_fp8() -> None:
    found = records("mlp", 16384, 4096)
    assert all(record.decision == FP8 and record.reason == "" for record in found.values())
    bf16 = sum(record.bf16_us for record in found.values())
    fp8 = sum(record.fp8_us + record.cast_us for record in found.values())
    assert 1.4 < bf16 / fp8 < 1.85
    assert all(record.break_even_m < 16384 for record in found.values())
    # us for 2 * 16384 * 16384 * 4096 FLOP at the sustained rates, and a little for waves and launches
    assert found["up", "fprop"].bf16_us == pytest.approx(2783, rel=0.1)
    assert found["up", "fprop"].fp8_us < 0.7 * 2783


@pytest.mark.slow
def test_the_stated_break_even_is_where_the_decision_turns_and_later_with_tensorwise() -> None:
    """One pair of layers, so large that the costs once a graph are small."""
    starts = [16]
    for options in ({}, {"recipe": "tensorwise"}):
        start = records("mlp", 16384, 4096, **options)["up", "fprop"].break_even_m
        for tokens, pays in ((start // 2, False), (2 * start, True)):
            decision = records("mlp", tokens, 4096, **options)["up", "fprop"].decision
            assert (decision == FP8) is pays, (options, tokens)
        assert starts[-1] < start < 32768
        starts.append(start)


@pytest.mark.feature("delayed")
def test_a_graph_that_saves_less_than_its_scales_cost() -> None:
    """One linear that gains less than the update of the scaling state costs. Two pay for it together."""

    class Beside(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.parts = nn.ModuleList(One(2048) for _ in range(count))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([part(y) for part, y in zip(self.parts, x, strict=True)])

    found, both = (step(functools.partial(Beside, n), n, 1024, 2048).records for n in (1, 2))
    assert len(both) == 6 and all(record.decision == FP8 for record in both.values())
    assert len(found) == 3 and all(record.decision != FP8 for record in found.values())
    said = {record.reason for record in found.values()}
    why = r"slower in FP8: all of the graph would save ([\d.]+) us, and scaling costs it 6\.9 us"
    stated = re.fullmatch(why, said.pop())
    assert stated and not said and 0 < float(stated[1]) <= 6.9


def test_projections_that_share_their_input_are_decided_together() -> None:
    """k and v alone are too narrow to pay for the cast of h; with q, the cast is already paid for."""
    together = records("attention", 1024, 4096, recipe="tensorwise")
    assert all(together[name, "fprop"].decision == FP8 for name in "qkv")
    off = {"rules": [{"module": ["q", "o"], "fp8": "off"}]}
    alone = step(lambda: Attention(4096), 1, 1024, 4096, recipe="tensorwise", policy=off).records
    assert all(alone[name, "fprop"].decision != FP8 for name in "kv")
    assert alone["k", "fprop"].break_even_m >= together["k", "fprop"].break_even_m


def test_what_the_policy_insists_on_stays_and_pays_for_others() -> None:
    found = {}
    for choice in ("auto", "on"):
        rules = {"rules": [{"module": "q", "fp8": choice}]}
        found[choice] = step(lambda: Attention(4096), 1, 768, 4096, recipe="tensorwise", policy=rules).records
    assert all(record.decision != FP8 for record in found["auto"].values())
    assert all(found["on"]["q", gemm].decision == FP8 for gemm in ("fprop", "dgrad", "wgrad"))
    assert found["on"]["q", "fprop"].bf16_us > 0  # every matmul has estimates
    said = [found[choice]["k", "fprop"].reason for choice in ("auto", "on")]
    alone, beside = (float(re.search(r"(\d\.\d\d)x", reason)[1]) for reason in said)
    assert alone < beside  # another matmul already pays for the cast of h


def test_a_device_without_fp8() -> None:
    found = records("mlp", 8192, 4096, device="a100")
    assert {record.reason for record in found.values()} == {"no FP8 on this device: NVIDIA A100-SXM4-80GB"}


@pytest.mark.slow
def test_dynamic_sizes_are_not_specialised() -> None:
    """`mark_dynamic` raises if a guard specialises the number of tokens."""
    found = step(lambda: Mlp(4096), 8192, 4096, dynamic=True).records
    assert all(record.decision == FP8 and record.bf16_us > 0 for record in found.values())
    assert any(record.dynamic for record in found.values())


# -- the choice is a good one --

SIZES = [(16, 256), (512, 1024), (4096, 768), (2048, 4096), (16384, 4096)]  # tokens, width
CHOICES = [("attention", "delayed", 1), ("mlp", "delayed", 1), ("fused", "delayed", 1)]
CHOICES += [("mlp", "tensorwise", 0), ("attention", "tensorwise", 3), ("fused", "tensorwise", 2)]
CHOICES += [("mlp", "delayed", 4)]
SLOW = [("attention", "delayed", 0), ("fused", "tensorwise", 0), ("attention", "delayed", 2)]
SLOW += [("mlp", "tensorwise", 2), ("mlp", "delayed", 3), ("fused", "delayed", 3)]
SLOW += [("attention", "tensorwise", 4), ("fused", "tensorwise", 4)]


@pytest.mark.cases(test=3, slow=4)
@pytest.mark.parametrize(
    ("name", "recipe", "size"), [*CHOICES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_no_choice_within_a_component_is_better(name: str, recipe: str, size: int) -> None:
    """Compares with all 2**n choices, by the cost model's own estimate."""
    weighed = made(name, *SIZES[size], **({} if recipe == "delayed" else {"recipe": recipe})).weighed
    matmuls = [matmul for matmul, _ in weighed.values()]
    for matmul, decision in weighed.values():
        matmul.decision = decision
    components = profitability._components(gemm_costs.gemms_of([m for m in matmuls if m.fp8]))
    parts = [profitability._Component(H200, part, {}) for part in components]
    assert sum(len(part.gemms) for part in parts) == sum(m.fp8 for m in matmuls) >= 6
    for part in parts:
        part.improve()
        ours = part.seconds(part.chosen)
        assert ours <= (1 + 1e-12) * min(part.seconds(set()), part.seconds(part.everything))
        sizes = range(len(part.gemms) + 1)
        subsets = itertools.chain(*(itertools.combinations(part.gemms, n) for n in sizes))
        assert ours <= 1.01 * min(part.seconds(set(subset)) for subset in subsets)
        # the shares of the gemms add up to the time of the component
        part.chosen = part.everything
        told = sum(gemm.seconds(H200, True) + part.share(gemm, part.everything) for gemm in part.gemms)
        spent = part.seconds(part.everything) - sum(base.seconds(H200, set()) for base in part.bases)
        assert told == pytest.approx(spent)


# -- the producer and the readers of a tensor --


def of(step: Step, name: str, gemm: str, role: str) -> Any:
    matmul = step.weighed[name, gemm][0]
    return source(next(matrix for matrix, given in matmul.roles if given == role))


def test_traffic_of_an_mlp() -> None:
    found, elements = made("mlp", 512, 1024), 512 * 1024
    norm, gelu = of(found, "up", "fprop", "input"), of(found, "down", "fprop", "input")
    assert (norm.elements, gelu.elements) == (elements, 4 * elements)
    assert norm.fused and not norm.shared and len(norm.readers) == 2  # fprop and wgrad
    assert gelu.fused and gelu.producer_bytes == 4 * elements * 2  # the output of `up`
    dy, dh = of(found, "down", "dgrad", "gradient"), of(found, "up", "dgrad", "gradient")
    assert not dy.fused and dy.shared  # the output gradient of the model, which the residual reads, too
    # GELU's input and the gradient of its output
    assert dh.fused and dh.producer_bytes == 2 * 4 * elements * 2
    weight = of(found, "up", "fprop", "weight")
    assert not weight.fused and not weight.shared and weight.itemsize == 2 and len(weight.readers) == 2


def test_traffic_of_attention() -> None:
    found = made("attention", 512, 1024)
    h = of(found, "q", "fprop", "input")
    assert h.fused and not h.shared and len(h.readers) == 6  # q, k, v: fprop and wgrad
    y = of(found, "o", "fprop", "input")
    assert not y.fused and not y.scattered and not y.shared


def test_traffic_of_a_gradient_that_is_put_together() -> None:
    found = made("fused", 512, 1024)
    dy = of(found, "qkv", "dgrad", "gradient")
    assert dy.scattered and not dy.fused
    assert not of(found, "qkv", "fprop", "input").fused  # it is an input of the graph


def test_float32_weights_under_autocast() -> None:
    full, half = made("mlp", 512, 1024, autocast=True), made("mlp", 512, 1024)
    assert of(full, "up", "fprop", "weight").itemsize == 4
    # with autocast, bf16 also pays for a cast
    assert full.records["up", "fprop"].cast_us < half.records["up", "fprop"].cast_us


def test_a_float32_residual_is_written_beside_the_copy_for_bf16() -> None:
    """Under autocast, the gradient that a residual passes on is float32, and the matmuls read a bf16 copy
    of it. In FP8 they do not, so the write of that copy is saved, and the float32 tensor is written either
    way."""
    dy = of(made("mlp", 512, 1024, autocast=True), "down", "dgrad", "gradient")
    base = replace(dy, fused=True, shared=True, itemsize=4)
    gemm = mock.Mock(dtype=torch.bfloat16)
    cost = gemm_costs.Base(base, weight=False, outside=False)
    readers = [(gemm, ("", False)), (gemm, ("", True))]
    cost.casts.append(gemm_costs.CastCost(cost, "delayed", False, readers=readers))
    high, fp8 = (1e6 * cost.seconds(H200, chosen) for chosen in (set(), {gemm}))
    byte = 1e6 * base.elements / H200.bandwidth
    assert high == pytest.approx((4 + 2) * byte)
    assert fp8 == pytest.approx((4 + 4 + 2) * byte + 1e6 * H200.launch)
