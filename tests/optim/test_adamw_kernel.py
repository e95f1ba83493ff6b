"""The kernel of a step that casts, in Triton's interpreter, against the update in plain torch; and its
machine code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8compile.optim import triton_adamw, update
from fp8compile.optim.states import BLOCK, fresh, to_blocks
from tests.support import hooks
from tests.support.interpreter import OnCpu
from tests.support.machine_code import SHARED, TARGETS, compile_function, resources

E4M3 = torch.float8_e4m3fn
GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
NAMES = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")


class Case:
    """A parameter with its state, and the memory of its copies inside of larger ones."""

    def __init__(self, weight: Tensor, master: str | None, layouts: str):
        self.weight = weight.clone()
        height, width = weight.shape
        self.state = fresh(torch.nn.Parameter(self.weight), master)
        wide = [torch.full(size, 7.0).to(E4M3) for size in ((height + 32, width), (width, height + 48))]
        self.wide = wide
        rows = wide[0][16 : 16 + height] if "r" in layouts else None
        columns = wide[1][:, 32 : 32 + height] if "c" in layouts else None
        inverse = torch.tensor([2.0**-9])
        self.cast = hooks.cast_in_step(rows, columns, inverse)

    def step(self, gradient: Tensor, by: update.Factors, launched: bool) -> None:
        kept = self.state.get("remainder", self.state.get("master"))
        moments = [self.state[name] for name in NAMES]
        width = self.weight.shape[-1]
        given = (to_blocks(self.weight), to_blocks(gradient), *moments, kept, by)
        if launched:
            update.launch_update(given, self.cast, width)
        else:
            update.update(*given)
            update.cast_into(self.weight, self.cast)

    @property
    def bits(self) -> dict[str, Tensor]:
        kept = {name: x for name, x in self.state.items() if name != "step"}
        found = {
            **kept,
            "w": self.weight,
            "rows": self.wide[0],
            "columns": self.wide[1],
            "amax": self.cast.amax.view(torch.float32),
        }
        return {
            name: x.nan_to_num(3.0) if x.dtype.itemsize > 1 else x.view(torch.uint8)
            for name, x in found.items()
        }


@pytest.mark.cases(test=4, slow=9)
@pytest.mark.parametrize("odd", [None, math.inf, math.nan])
@pytest.mark.parametrize(
    ("dtype", "master", "layouts", "shape"),
    [
        (torch.bfloat16, "bf16+remainder", "rc", (48, 256)),
        (torch.bfloat16, None, "r", (64, 128)),
        (torch.float16, "float32", "rc", (32, 384)),
        (torch.float32, None, "c", (80, 128)),
    ],
)
def test_the_kernel_is_the_update(
    dtype: torch.dtype,
    master: str | None,
    layouts: str,
    shape: tuple[int, int],
    odd: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three steps, to the bit; nothing beside the copies is written. In the second one a weight is changed by
    hand, in the third one gradients are odd, or all zero in a row."""
    OnCpu(monkeypatch, triton_adamw, "fp8_adamw")
    # torch's on a CPU may be the neighbour of the nearest number
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: torch.sqrt(x.double()).float())
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    cases = [Case(weight, master, layouts) for _ in range(2)]
    for step in range(1, 4):
        gradient = (torch.randn(shape, generator=generator) * 10.0 ** (step - 2)).to(dtype)
        if step == 3:
            gradient[1] = 0.0
            if odd is not None:
                gradient[3, 5] = odd
        for launched, case in enumerate(cases):
            if step == 2:
                case.weight[0, :3] = torch.tensor([0.0, -5.0, 0.25])
            case.step(gradient, update.factors(GROUP, step), bool(launched))
        plain, kernel = (case.bits for case in cases)
        assert plain.keys() == kernel.keys()
        for name, x in plain.items():
            assert torch.equal(x, kernel[name]), (name, step)
    assert layouts == "c" or not cases[1].wide[0][16:-16].float().eq(7).all()
    for case in cases:
        outside = (case.wide[0][:16], case.wide[0][-16:], case.wide[1][:, :32], case.wide[1][:, -16:])
        assert all(x.float().eq(7).all() for x in outside)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("weight", "kept"), [("*bf16", None), ("*bf16", "*i16"), ("*fp16", "*fp32"), ("*fp32", None)]
)
def test_it_compiles_to_machine_code(target: str, weight: str, kept: str | None) -> None:
    """Nothing spills. Two programs fit into a multiprocessor; three on an H200 or B200, without float32."""
    amd = target.startswith("gfx")
    fp8 = "*fp8e4b8" if target == "gfx942" else "*fp8e4nv"
    types = dict.fromkeys(("weight", "gradient"), weight)
    types |= {"first": "*fp8e4nv", "second": "*fp16", "rows": fp8, "columns": fp8, "amax": "*i32"}
    types |= dict.fromkeys(("first_scale", "second_scale", "inverse"), "*fp32")
    types |= dict.fromkeys(update.Factors._fields, "fp32") | ({"kept": kept} if kept else {})
    constants: dict[str, Any] = {} if kept else {"kept": None}
    constants |= {"HEIGHT": 4096, "WIDTH": 4096, "APART": 6144, "HALF": 2.0**-8, "LEAST": 0.0}
    constants |= {"FP8_MAX": 240.0 if "b8" in fp8 else 448.0, "SATURATES": not amd}
    constants |= {"BY_PTX": target in ("sm_89", "sm_90"), "BLOCK_R": update.TILE[0], "BLOCK_C": BLOCK}
    made = compile_function(
        triton_adamw.fp8_adamw, types, constants, TARGETS[target], num_warps=update.TILE[1]
    )
    took = resources(made)
    assert not took.spills and took.shared <= SHARED[target] // 3, took
    three = target in ("sm_90", "sm_100") and "*fp32" not in (weight, kept)
    assert amd or took.registers <= (80 if three else 128), took


def test_steps_that_the_kernel_does_not_make() -> None:
    """Its root flushes subnormals, and a learning rate on the device would be waited for."""
    with FakeTensorMode():
        on_device = torch.empty((), device="cuda")
    assert update.launches(GROUP) and update.launches({**GROUP, "lr": torch.tensor(1e-2)})
    assert not update.launches({**GROUP, "lr": on_device}) and not update.launches({**GROUP, "eps": 1e-20})
