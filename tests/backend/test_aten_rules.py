"""Each FP8 matmul that Inductor calls in its plan for a GPU is one that ATen takes there
(`tests/support/aten.py`).

The plans of steps are executed on a CPU, without their kernels: shapes, strides, dtypes and addresses are
those of the plan, values are not. After them: each rule is broken once, and the call is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from tests.support import hooks
from tests.support.aten import RULES, Grouped, Library, Product, Refused
from tests.support.executed import Launched, Plan, executed, planning
from tests.support.harness import ALL_FP8, noise
from tests.support.models import Experts, LlamaLayer, Mlp, make
from tests.support.operands import B200, E4M3, H100, MI300X, RTX4090, RTX5090, ends
from tests.support.reference_settings import RECIPES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E5M2, E8M0 = torch.float8_e5m2, torch.float8_e8m0fnu
FNUZ, E5M2_FNUZ = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
GPUS = {"sm_89": RTX4090, "sm_90": H100, "sm_100": B200, "sm_120": RTX5090, "gfx942": MI300X}


@contextlib.contextmanager
def planned(gpu: Any, kernels: bool = False) -> Iterator[Plan]:
    """Inside, steps are compiled for this GPU. `kernels`: they run, too."""
    with contextlib.ExitStack() as stack:
        if gpu is MI300X:
            stack.enter_context(hooks.fnuz())
        if not kernels:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(Launched, "run", lambda self, *_, **__: None)
        yield stack.enter_context(executed(gpu=gpu))


def trained(model: nn.Module, recipe: str, rows: int, plan: Plan, dtype: torch.dtype) -> int:
    """FP8 matmuls by ATen in a warm step; a first one may be cold."""
    call = torch.compile(model, backend="fp8", options={"recipe": recipe, "policy": ALL_FP8})
    width = next(model.parameters()).shape[-1]
    for _ in range(2 if recipe == "delayed" else 1):
        call(noise(rows, width, dtype=dtype).requires_grad_()).sum().backward()
    assert [record.decision for record in fp8compile.report(model).matmuls].count("fp8") >= 4
    return plan.scaled


def expected(gpu: Any, recipe: str, whole: bool) -> int:
    """FP8 matmuls by ATen in a step of two layers. Others are ours, or in bf16."""
    if recipe == "mxfp8":
        return 6 if gpu in (B200, RTX5090) else 0
    # a weight's gradient has two operands of 1 x 128 blocks, whose K is the number of tokens
    if recipe == "blockwise":
        return 4 if gpu is H100 and whole else 0
    return 4 if recipe == "rowwise_with_gw_hp" else 6


@planning
@pytest.mark.compat
@pytest.mark.cases(test=2, slow=4)
@pytest.mark.parametrize(
    ("recipe", "dtype", "gpu", "rows", "width"),
    [
        pytest.param(recipe, dtype, gpu, rows, width, id=f"{recipe}-{str(dtype)[6:]}-{gpu}-{rows}x{width}")
        for recipe, dtype, gpu in itertools.product(RECIPES, (BF16, FP16, FP32), GPUS)
        for rows, width in ((33, 144), (64, 512))
    ],
)
def test_layers(recipe: str, dtype: torch.dtype, gpu: str, rows: int, width: int) -> None:
    """Layers with biases, an odd number of tokens, sizes that fit cuBLASLt's blocks and that do not."""
    with planned(GPUS[gpu]) as plan:
        found = trained(make(lambda: Mlp(width, width), dtype), recipe, rows, plan, dtype)
    assert found == expected(GPUS[gpu], recipe, rows == 64)


OPTIONS: dict[str, dict[str, Any]] = {
    "one token": {"rows": 1},
    "any number of tokens": {"dynamic": True},
    "fast accumulation": {"use_fast_accum": (True, True, True)},
    "e4m3": {"fp8_format": "e4m3"},
    "hybrid": {"fp8_format": "hybrid"},
    "merged": {"merge_matmuls": True},
}


@planning
@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    ("name", "recipe", "gpu"),
    [
        (name, recipe, gpu)
        for name, recipe, gpu in itertools.product(
            OPTIONS, ("tensorwise", "rowwise", "blockwise", "mxfp8"), GPUS
        )
        if recipe == "tensorwise" or "fp8_format" not in OPTIONS[name]  # the others have E4M3 throughout
    ],
)
def test_options(name: str, recipe: str, gpu: str) -> None:
    """A layer with attention, whose projections share an input, and a gated feed-forward."""
    given = dict(OPTIONS[name])
    rows, dynamic = given.pop("rows", 48), given.pop("dynamic", None)
    model = make(lambda: LlamaLayer(512, 4, 2, 512), BF16)
    options = {"recipe": recipe, "policy": ALL_FP8, **given}
    with planned(GPUS[gpu]) as plan:
        call = torch.compile(model, backend="fp8", dynamic=dynamic, options=options)
        for more in range(2 if dynamic else 1):
            call(noise(1, rows + more, 512, dtype=BF16).requires_grad_()).sum().backward()
    assert plan.scaled or not expected(GPUS[gpu], recipe, rows % 16 == 0 and not dynamic)


@planning
@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"])
def test_experts(recipe: str) -> None:
    """Experts without tokens, with one, with odd numbers. Only Hopper calls ATen."""
    model = make(lambda: Experts(128, 128, 4), BF16)
    call = torch.compile(model, backend="fp8", options={"recipe": recipe, "policy": ALL_FP8})
    with planned(H100, kernels=True) as plan:  # they compute where groups end
        for sizes in ([0, 1, 15, 65], [33, 0, 48, 0]):
            call(noise(96, 128, dtype=BF16).requires_grad_(), ends(sizes)).sum().backward()
    assert plan.scaled == (4 if recipe == "rowwise_with_gw_hp" else 6) * (1 if recipe == "delayed" else 2)


@planning
@pytest.mark.slow
def test_a_plan_is_refused() -> None:
    """Where the choice of a form is wrong."""
    with planned(B200), hooks.block_mm_by("blockwise"), pytest.raises(Refused) as refused:
        trained(make(lambda: Mlp(512, 512), BF16), "blockwise", 64, Plan(), BF16)
    assert refused.value.broken == ("block gpu",) and "sm_100" in str(refused.value)


# -- the rules --

LATEST = (2, 15), (13, 0)
OLD = (2, 11), (12, 6)


def fp8(rows: int, k: int, dtype: torch.dtype = E4M3, leading: int = 0, offset: int = 0) -> Tensor:
    """[rows, K]; rows begin `leading` bytes apart, and the first at this byte."""
    leading = leading or k
    memory = torch.zeros(rows * leading + offset, dtype=torch.uint8)
    return memory[offset:].view(rows, leading)[:, :k].view(dtype)


def product(
    kind: str, m: int = 64, n: int = 256, k: int = 512, dtype: torch.dtype = E4M3, **changes: Any
) -> Product:
    """A legal call, but for these arguments. `kind`: "square line": 128 x 128 blocks of a, 1 x 128 of b."""
    a_kind, b_kind = (kind.split() * 2)[:2]
    a, b = fp8(m, k, dtype), fp8(n, k, dtype).t()
    call = Product(a, b, scales(a_kind, m, k), scales(b_kind, n, k, mirrored=True))
    return call._replace(**changes)


def scales(kind: str, rows: int, k: int, mirrored: bool = False) -> Tensor:
    """`mirrored`: of b, which is [K, N]."""
    high, wide = -(-rows // 128), -(-k // 128)
    if kind == "mx":
        return torch.zeros(high * 128 * 4 * wide, dtype=torch.uint8).view(E8M0)
    made = {
        "tensor": lambda: torch.ones(1, 1),
        "row": lambda: torch.ones(rows, 1),
        "line": lambda: torch.ones(wide, rows).t(),
        "square": lambda: torch.ones(high, wide),
    }[kind]()
    return made.t() if mirrored else made


def grouped(rows: bool = True, n: int = 256, dtype: torch.dtype = E4M3, **changes: Any) -> Grouped:
    """A legal call with 4 groups of the rows of a, or of the columns, but for these arguments."""
    if rows:
        weights = torch.zeros(4, n, 128, dtype=torch.uint8).view(dtype).transpose(1, 2)
        call = Grouped(fp8(96, 128, dtype), weights, torch.ones(96), torch.ones(4, n), ends([16, 0, 33, 40]))
    else:
        operands = fp8(128, 96, dtype), fp8(n, 96, dtype).t()
        call = Grouped(*operands, torch.ones(4 * 128), torch.ones(4 * n), ends([16, 32, 0, 40]))
    return call._replace(**changes)


def shifted(x: Tensor) -> Tensor:
    """x one element after a multiple of 16 bytes."""
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:]
    return memory.as_strided(x.shape, x.stride(), memory.storage_offset())


def breaking() -> dict[str, list[tuple[Any, tuple, Product | Grouped]]]:
    """For each rule, calls that break it alone, one for each of its parts: (GPU, versions, call)."""
    odd, packed = fp8(64, 24, leading=32), fp8(256, 24, leading=32).t()
    turned, bias = fp8(512, 256), torch.zeros(256, dtype=BF16)
    one = {
        "gpu": (rdna(11), LATEST, product("tensor")),
        "sizes": (H100, LATEST, product("tensor", b=fp8(256, 256).t())),
        "k of 16": (H100, LATEST, product("tensor", a=odd, b=packed)),
        "n of 16": (H100, LATEST, product("tensor", n=24)),
        "two e5m2": (B200, LATEST, product("tensor", dtype=E5M2)),
        "bias of fp32": (H100, LATEST, product("tensor", bias=bias, out_dtype=FP32)),
        "bias dtype": (H100, LATEST, product("tensor", bias=torch.zeros(256, dtype=FP16))),
        "bias size": (H100, LATEST, product("tensor", bias=torch.zeros(512, dtype=BF16)[::2])),
        "pointers": (H100, LATEST, product("tensor", a=fp8(64, 512, offset=8))),
        "tensor scales": (H100, LATEST, product("tensor", a_scale=shifted(torch.ones(1, 1)))),
        "rowwise gpu": (rdna(12), LATEST, product("row")),
        "rowwise b": (RTX4090, LATEST, product("row", b=fp8(256, 512, E5M2).t())),
        "rowwise scales": (H100, LATEST, product("row", a_scale=shifted(torch.ones(64, 1)))),
        "rowwise packed": (RTX4090, LATEST, product("row", a=fp8(64, 512, leading=528))),
        "block rows": (H100, LATEST, product("line", m=66)),
        "block scales": (H100, LATEST, product("line", a_scale=shifted(scales("line", 64, 512)))),
        "block accumulation": (H100, LATEST, product("line", fast_accum=True)),
        "mx k": (B200, LATEST, product("mx", k=48)),
        "mx scales": (B200, LATEST, product("mx", a_scale=shifted(scales("mx", 64, 512)))),
        "groups gpu": (RTX4090, LATEST, grouped()),
        "groups align": (H100, LATEST, grouped(False, offs=ends([8, 40, 0, 40]))),
    }
    several = {
        "encoding": [(H100, LATEST, product("tensor", dtype=FNUZ)), (MI300X, LATEST, product("tensor"))],
        "scaling": [
            (H100, LATEST, product("square")),
            (H100, LATEST, product("row", a_scale=torch.ones(64, 2)[:, :1])),
            (H100, LATEST, product("line", a_scale=torch.ones(64, 4))),
            (H100, LATEST, product("tensor", a_scale=torch.ones(1, dtype=BF16))),
            (B200, LATEST, product("mx", a_scale=scales("mx", 129, 512))),
        ],
        "out": [
            (H100, LATEST, product("tensor", out=torch.zeros(256, 64, dtype=BF16).t())),
            (H100, LATEST, product("tensor", out_dtype=torch.float64)),
        ],
        "layout": [(H100, LATEST, product("tensor", b=turned)), (B200, LATEST, product("row", b=turned))],
        "leading": [
            (H100, LATEST, product("tensor", b=fp8(256, 512, leading=520).t())),
            (H100, LATEST, product("tensor", a=fp8(1, 512).expand(64, 512))),
        ],
        "rowwise out": [
            (H100, OLD, product("row", out_dtype=FP32)),
            (MI300X, LATEST, product("row", dtype=FNUZ, out_dtype=FP16)),
        ],
        "block gpu": [(H100, OLD, product("line")), (B200, LATEST, product("line square"))],
        "block k": [(H100, LATEST, product(kind, k=640)) for kind in ("line square", "square line")],
        "mx gpu": [(H100, LATEST, product("mx")), (B200, OLD, product("mx"))],
        "groups sizes": [(H100, LATEST, grouped(n=24)), (H100, LATEST, grouped(a=fp8(96, 144)))],
        "groups encoding": [(H100, LATEST, grouped(a=fp8(96, 128, E5M2))), (MI300X, LATEST, grouped())],
        "groups layout": [
            (H100, LATEST, grouped(a=fp8(96, 128, leading=136))),
            (H100, LATEST, grouped(False, a=fp8(96, 128).t())),
            (H100, LATEST, grouped(b=torch.zeros(4, 128, 256, dtype=torch.uint8).view(E4M3))),
        ],
        "groups ends": [
            (H100, LATEST, grouped(offs=ends([16, 0, 33, 40]).long())),
            (H100, LATEST, grouped(False, offs=torch.zeros(1024, dtype=torch.int32))),
        ],
        "groups scales": [
            (H100, LATEST, grouped(b_scale=torch.ones(256, 4).t())),
            (H100, LATEST, grouped(False, a_scale=torch.ones(128))),
        ],
        "groups out": [(H100, LATEST, grouped(out_dtype=FP32)), (H100, LATEST, grouped(bias=bias))],
        "groups order": [(H100, LATEST, grouped(offs=ends(x))) for x in ([16, -16, 33, 40], [97, 0, 0, 0])],
    }
    return {rule: [call] for rule, call in one.items()} | several


def rdna(generation: int) -> Any:
    return dataclasses.replace(MI300X, name="AMD Radeon", gcnArchName=f"gfx{generation}01")


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_enforced(rule: str) -> None:
    """By itself: calls that break it break no other."""
    calls = breaking()[rule]
    for gpu, versions, call in calls:
        with pytest.raises(Refused) as refused:
            Library(gpu, *versions).check(call)
        assert refused.value.broken == (rule,) and RULES[rule] in str(refused.value)
