"""Stacks of experts in FP8: a tensor for each expert in the checkpoint, one parameter in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import fp8compile
from fp8compile import LoadError, Stack
from fp8compile.config.recipe import ROW
from tests.features.load.test_load import BF16, comes_out, in_fp8, values
from tests.support import hooks
from tests.support.harness import sqnr
from tests.support.models import Experts
from tests.support.operands import ends
from tests.support.reference_settings import RECIPES
from tests.support.served import alike, same

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]
WIDE, HIDDEN, COUNT = 256, 128, 3
POLICY = {"extends": "none", "rules": [{"fp8": "on"}]}
PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
SIZES = [20, 0, 70]


class Adapted(nn.Module):
    """Experts that do not train, after an adapter that does."""

    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(*sizes, bias=False, dtype=BF16) for sizes in ((WIDE, 16), (16, WIDE)))
        self.experts = Experts(WIDE, HIDDEN, COUNT, turned).to(BF16)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return self.experts(x + self.b(self.a(x)), offs)


def model(turned: bool = False, seed: int = 0) -> Adapted:
    torch.manual_seed(seed)
    made = Adapted(turned)
    made.experts.requires_grad_(False)
    return made


def stacks(turned: bool = False) -> dict[str, Stack]:
    return {
        f"experts.{name}": Stack([[f"{e}.{part}.weight" for part in parts] for e in range(COUNT)], turned)
        for name, parts in PARTS.items()
    }


def released(path: Path, **how: Any) -> dict[str, Tensor]:
    """A tensor for each part of each expert, and its scales, by transformers' quantizer."""
    source = model(seed=1)
    tensors = {name: x.clone() for name, x in source.state_dict().items() if "experts" not in name}
    for name, parts in PARTS.items():
        for e in range(COUNT):
            for part, rows in zip(parts, getattr(source.experts, name)[e].chunk(len(parts)), strict=True):
                tensors |= {f"{e}.{part}.{last}": x for last, x in in_fp8(rows.clone(), **how).items()}
    save_file(tensors, path / "model.safetensors")
    return tensors


def whole(tensors: dict[str, Tensor], name: str, turned: bool) -> Tensor:
    """What a stack stands for, in bf16."""
    made = torch.stack([torch.cat([values(tensors, f"{e}.{x}") for x in PARTS[name]]) for e in range(COUNT)])
    return made.transpose(1, 2).contiguous() if turned else made


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_stack_holds_the_bytes_of_its_experts(turned: bool, where: str, tmp_path: Path) -> None:
    tensors = released(tmp_path)
    with torch.device(where):
        made = Adapted(turned)
    said = fp8compile.load_fp8(made, tmp_path, stacks=stacks(turned))
    assert said.layers == dict.fromkeys(("experts.gate_up_proj", "experts.down_proj"), "128 x 128")
    assert said.others == 2 and said.bytes == COUNT * (3 * WIDE * HIDDEN + 4 * 6)
    state = made.state_dict()
    for name in PARTS:
        assert same(state[f"experts.{name}"], whole(tensors, name, turned))


@pytest.mark.parametrize("stored", [torch.float32, BF16])
@pytest.mark.parametrize("turned", [False, True])
def test_experts_go_out_as_they_came(turned: bool, stored: torch.dtype, tmp_path: Path) -> None:
    """A tensor for each part of each expert, and the names that were loaded; served, too."""
    tensors = released(tmp_path, stored=stored)
    made = model(turned)
    fp8compile.load_fp8(made, tmp_path, stacks=stacks(turned))
    said = comes_out(made, tmp_path, tensors)
    assert said.format == "fp8" and {*said.layers.values()} == {"blockwise"} and len(said.layers) == 9
    assert said.ignored == ("a", "b")
    assert alike(dict(fp8compile.served_weights(made)), tensors)
    again = model(turned)
    fp8compile.load_fp8(again, tmp_path / "out", stacks=stacks(turned))
    assert same(again.experts.down_proj.data_, made.experts.down_proj.data_)


def test_a_stack_under_its_own_name(tmp_path: Path) -> None:
    """One tensor `[E, out, in]`, with scales `[E, out / 128, in / 128]`."""
    tensors = released(tmp_path)
    for name, parts in PARTS.items():
        for last in ("weight", "weight_scale_inv"):
            each = [torch.cat([tensors.pop(f"{e}.{x}.{last}") for x in parts]) for e in range(COUNT)]
            tensors[f"experts.{name}{last.removeprefix('weight')}"] = torch.stack(each)
    save_file(tensors, tmp_path / "model.safetensors")
    made = model()
    fp8compile.load_fp8(made, tmp_path, stacks=stacks())  # which the file does not need
    comes_out(made, tmp_path, tensors)


@pytest.mark.parametrize(("recipe", "turned"), [(recipe, i % 2 == 1) for i, recipe in enumerate(RECIPES)])
def test_experts_multiply_by_the_bytes_under_every_recipe(recipe: str, turned: bool, tmp_path: Path) -> None:
    """Output and gradients are those of dequantized experts, within FP8's noise."""
    tensors = released(tmp_path)
    held, plain = model(turned), model(turned)
    fp8compile.load_fp8(held, tmp_path, stacks=stacks(turned))
    state = {f"experts.{name}": whole(tensors, name, turned) for name in PARTS}
    plain.load_state_dict(state | {name: tensors[name] for name in ("a.weight", "b.weight")})
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(sum(SIZES), WIDE, generator=generator).to(BF16) for _ in range(2))
    call = torch.compile(held, backend="fp8", options={"policy": POLICY, "recipe": recipe})
    with hooks.joint_graphs(products) as graphs:
        outputs = [each(x, ends(SIZES)) for each in (call, plain)]
    for y in outputs:
        y.backward(dy)
    assert graphs[-1] == ["placeholder"] * 4
    assert sqnr(*outputs) > 25
    for name, p in held.named_parameters():
        if p.requires_grad:
            assert sqnr(p.grad, plain.get_parameter(name).grad) > 20, name
    used = {m.recipe for m in fp8compile.report(held).matmuls if m.groups and m.decision == "fp8"}
    assert used == {"blockwise"}


def products(graph: torch.fx.Graph) -> list[str]:
    """What the weights of grouped products are: looks through views and the copy in the other layout."""
    found = []
    for node in graph.nodes:
        if str(node.target) == "fp8compile.grouped_mm.default":
            weight = node.args[1]
            while weight.op == "call_function" and weight.target in LAYOUTS:
                weight = weight.args[0]
            found.append(weight.op if weight.op == "placeholder" else str(weight.target))
    return found


LAYOUTS = [getattr(torch.ops.aten, name).default for name in ("clone", "permute", "view", "_unsafe_view")]


def test_experts_in_a_loop_read_the_values(tmp_path: Path) -> None:
    """What does not multiply groups sees a plain stack."""
    tensors = released(tmp_path)
    made = model()
    fp8compile.load_fp8(made, tmp_path, stacks=stacks())
    x = torch.randn(8, WIDE).to(BF16)
    one = functional.linear(x, made.experts.gate_up_proj[2])
    assert torch.equal(one, functional.linear(x, whole(tensors, "gate_up_proj", False)[2]))


BAD = {
    "no such stack": ({"experts.none": Stack([["0.gate.weight"]])}, {}, "stacks names experts.none, which"),
    "too few": (
        {"experts.down_proj": Stack([["0.down.weight"]])},
        {},
        "has 1 matrices for experts.down_proj",
    ),
    "a part is missing": (
        {"experts.down_proj": Stack([["9.down.weight"]] * COUNT)},
        {},
        "it does not have 9.down.weight, which is a part of experts.down_proj",
    ),
    "rows are missing": (
        {"experts.gate_up_proj": Stack([["0.gate.weight"]] * COUNT)},
        {},
        "the parts of experts.gate_up_proj have 128 rows for matrix 0, not 256",
    ),
    "columns": (
        {"experts.gate_up_proj": Stack([["0.down.weight", "0.down.weight"]] * COUNT)},
        {},
        "0.down.weight is .256, 128., and a part of experts.gate_up_proj, whose matrices are .256, 256.",
    ),
    "scales of rows": ({}, {"block": ROW}, "can be held with scales of 128 x 128 elements"),
}


@pytest.mark.parametrize("case", BAD)
def test_stacks_that_do_not_fit_change_nothing(case: str, tmp_path: Path) -> None:
    given, how, message = BAD[case]
    released(tmp_path, **how)
    made = model()
    before = {name: x.clone() for name, x in made.state_dict().items()}
    with pytest.raises(LoadError, match=message) as caught:
        fp8compile.load_fp8(made, tmp_path, stacks={**stacks(), **given})
    assert "\n" not in str(caught.value)
    assert alike(made.state_dict(), before)


def test_names_without_use_are_left(tmp_path: Path) -> None:
    tensors = released(tmp_path)
    tensors["mtp.weight"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match="the model has no mtp.weight"):
        fp8compile.load_fp8(model(), tmp_path, stacks=stacks())
    assert fp8compile.load_fp8(model(), tmp_path, stacks=stacks(), unread=["^mtp"]).unread == ("mtp.weight",)
