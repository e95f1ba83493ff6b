"""Checkpoints with FP8 weights, written by transformers' own quantizer, in vanilla models: their bytes are
held, multiplied, and written again as they are."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import fp8compile
from fp8compile import Fp8CompileError, LoadError, StrictError
from fp8compile.config.recipe import ROW, WHOLE, Block
from tests.support import hooks
from tests.support.harness import sqnr
from tests.support.reference_casts import OCP, Quantized, quantize, scaled_mm
from tests.support.reference_settings import RECIPES
from tests.support.served import alike, config_of, same, tensors_of

pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]
SQUARE = Block(128, 128)
KINDS = (SQUARE, ROW, WHOLE)
BF16, E8M0 = torch.bfloat16, torch.float8_e8m0fnu
POLICY = {"extends": "none", "rules": [{"where": "n >= 128 and k >= 128", "fp8": "on"}, {"fp8": "off"}]}


class Adapted(nn.Module):
    """A Linear, and a low-rank adapter beside it."""

    def __init__(self, wide: int, out: int):
        super().__init__()
        self.base = nn.Linear(wide, out, bias=False, dtype=BF16)
        self.a = nn.Linear(wide, 16, bias=False, dtype=BF16)
        self.b = nn.Linear(16, out, bias=False, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Mlp(nn.Module):
    """With a buffer that a checkpoint has, and sides that 128 does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Adapted(256, 320), Adapted(320, 256)
        self.norm = nn.LayerNorm(256, dtype=BF16)
        self.register_buffer("shift", torch.full((256,), 0.5, dtype=BF16))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(functional.gelu(self.up(x)))) + self.shift


def model(seed: int = 0) -> Mlp:
    torch.manual_seed(seed)
    return Mlp()


def batch(seed: int = 0, rows: int = 48) -> Tensor:
    return torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed)).to(BF16)


def in_fp8(weight: Tensor, block: Block = SQUARE, stored: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A weight and its scale by transformers, whose blocks have to fit: so padded, and cut again."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    rows, columns = weight.shape
    size = (block[0] or rows, block[1] or columns)
    padded = functional.pad(weight, (0, -columns % size[1], 0, -rows % size[0]))
    settings = SimpleNamespace(weight_block_size=size, scale_fmt="ue8m0" if stored == E8M0 else "float")
    made = Fp8Quantize(SimpleNamespace(quantization_config=settings)).convert({"x.weight": padded})
    scale = made["x.weight_scale_inv"].to(stored)
    last, scale = ("weight_scale_inv", scale) if block == SQUARE else ("weight_scale", scale)
    scale = scale.reshape(1) if block == WHOLE else scale
    return {"weight": made["x.weight"][:rows, :columns].contiguous(), last: scale}


def released(path: Path, block: Block = SQUARE, stored: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A checkpoint of the model, whose bases are in FP8; its tensors."""
    tensors = {name: x.clone() for name, x in model(1).state_dict().items()}
    for name in ("up.base", "down.base"):
        made = in_fp8(tensors.pop(f"{name}.weight"), block, stored)
        tensors |= {f"{name}.{last}": x for last, x in made.items()}
    save_file(tensors, path / "model.safetensors")
    return tensors


def scale_of(tensors: dict[str, Tensor], name: str) -> Tensor:
    return next(x for key, x in tensors.items() if key.startswith(f"{name}.weight_scale"))


def values(tensors: dict[str, Tensor], name: str) -> Tensor:
    """What a weight in FP8 stands for, in bf16."""
    data, scale = tensors[f"{name}.weight"].float(), scale_of(tensors, name).float()
    scale = scale.reshape(-1, scale.shape[-1])
    size = [-(-whole // count) for whole, count in zip(data.shape, scale.shape, strict=True)]
    if [-(-whole // 128) for whole in data.shape] == [*scale.shape]:
        size = [128, 128]
    scale = scale.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)
    return (data * scale[: data.shape[0], : data.shape[1]]).to(BF16)


def comes_out(made: nn.Module, path: Path, tensors: dict[str, Tensor], **how: Any) -> fp8compile.Exported:
    """An export of these tensors, to the byte."""
    said = fp8compile.export(made, path / "out", **how)
    assert alike(tensors_of(path / "out"), tensors)
    return said


def freeze(made: Mlp) -> Mlp:
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(".a." in name or ".b." in name)
    return made


@pytest.mark.parametrize("block", KINDS)
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_bytes_are_held_as_they_are(where: str, block: Block, tmp_path: Path) -> None:
    tensors = released(tmp_path, block)
    with torch.device(where):
        made = Mlp()
    said = fp8compile.load_fp8(made, tmp_path)
    form, scales = {SQUARE: ("128 x 128", 12), ROW: ("a row", 576), WHOLE: ("a tensor", 2)}[block]
    assert said.layers == {"up.base": form, "down.base": form} and said.others == 7 and not said.unread
    assert said.bytes == 2 * 256 * 320 + 4 * scales
    for name in said.layers:
        weight: Any = made.get_submodule(name).weight
        assert same(weight.data_, tensors[f"{name}.weight"]) and not weight.requires_grad
        assert same(weight.inv_.flatten(), scale_of(tensors, name).flatten())
    state = made.state_dict()
    assert {type(x) for x in state.values()} == {Tensor} and state.keys() == model().state_dict().keys()
    for name, tensor in state.items():
        stem = name.removesuffix(".weight")
        assert same(tensor, values(tensors, stem) if stem in said.layers else tensors[name]), name
    assert all(p.requires_grad for name, p in made.named_parameters() if "base" not in name)


def test_several_files_and_a_second_load(tmp_path: Path) -> None:
    tensors = released(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index: dict[str, str] = {}
    for i, part in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        index |= dict.fromkeys(part, f"part-{i}.safetensors")
        save_file({name: tensors[name] for name in part}, tmp_path / f"part-{i}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    made: Any = model()
    for _ in range(2):
        fp8compile.load_fp8(made, tmp_path)
        assert same(made.up.base.weight.data_, tensors["up.base.weight"])
        assert same(made.up.a.weight, tensors["up.a.weight"])


@pytest.mark.parametrize("block", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bytes_of_the_file_are_multiplied_under_every_recipe(
    recipe: str, block: Block, tmp_path: Path
) -> None:
    """The operands of both products are the input itself, and the results those of independent matmuls."""
    made = in_fp8(model(1).up.base.weight.detach(), block)
    save_file({f"0.{last}": x for last, x in made.items()}, tmp_path / "one.safetensors")
    layer = nn.Sequential(nn.Linear(256, 320, bias=False, dtype=BF16))
    fp8compile.load_fp8(layer, tmp_path / "one.safetensors")
    x, dy = batch().requires_grad_(), batch(1)[:, :1] * batch(2).repeat(1, 2)[:, :320]
    options = {"policy": POLICY, "recipe": recipe, "fp8_format": "e4m3", "current_scaling": (True,) * 3}
    options = options if recipe == "delayed" else {"policy": POLICY, "recipe": recipe}
    with hooks.joint_graphs(products) as graphs:
        y = torch.compile(layer, backend="fp8", options=options, fullgraph=True)(x)
    y.backward(dy)
    assert graphs[-1] == ["placeholder", "placeholder"]
    (how,) = {(m.recipe, m.decision) for m in fp8compile.report(layer).matmuls}
    scales = [*made.values()][1].reshape(-1, 1 if block != SQUARE else 2)
    if block == ROW:  # scales of the contracted dimension go into the gradient
        dy, transposed = dy.float() * scales.t(), Quantized(made["weight"].t(), torch.ones(1, 1), WHOLE)
    else:
        transposed = Quantized(made["weight"].t(), scales.t(), block)
    casts = {"b": (1, 128), "r": (1, 0)}.get(how[0][0], (0, 0))
    a, g = (quantize(tensor, OCP[0], casts, rounded=block == SQUARE) for tensor in (x, dy))
    assert sqnr(y, scaled_mm(a, Quantized(made["weight"], scales, block), BF16)) > 50
    assert how[1] == "fp8" and how[0] in OF[block]
    if how[0] != "tensorwise":  # whose gradients are E5M2
        assert sqnr(x.grad, scaled_mm(g, transposed, BF16)) > 50


OF = {SQUARE: ("blockwise",), ROW: ("rowwise_with_gw_hp",), WHOLE: ("delayed", "tensorwise", *RECIPES[2:4])}


def products(graph: torch.fx.Graph) -> list[str]:
    """What the FP8 products multiply that is no cast: looks through the copy that has the other layout."""
    found = []
    for node in graph.nodes:
        if str(node.target) in ("fp8compile.block_mm.default", "fp8compile.scaled_mm.default"):
            for operand in node.args[:2]:
                while operand.target in (torch.ops.aten.clone.default, torch.ops.aten.permute.default):
                    operand = operand.args[0]
                found += [operand.op] if str(operand.target) != "fp8compile.quantize.default" else []
    return found


@pytest.mark.parametrize("block", KINDS)
def test_products_are_exact_where_fp8_is(block: Block, tmp_path: Path) -> None:
    """Small integers times powers of two: no rounding anywhere, so the oracle is integer arithmetic."""
    generator = torch.Generator().manual_seed(0)
    made, x = (torch.randint(-8, 9, sizes, generator=generator).float() for sizes in ((320, 256), (48, 256)))
    x[:, ::128] = 8.0  # the amax of each 1 x 128 elements
    recipe, shape = {
        SQUARE: ("blockwise", (3, 2)),
        ROW: ("rowwise_with_gw_hp", (320, 1)),
        WHOLE: ("tensorwise", (1, 1)),
    }[block]
    scales = torch.randint(-3, 4, shape, generator=generator).float().exp2()
    last = "weight_scale_inv" if block == SQUARE else "weight_scale"
    save_file({"weight": made.to(torch.float8_e4m3fn), last: scales}, tmp_path / "one.safetensors")
    layer = nn.Linear(256, 320, bias=False, dtype=torch.float32)
    fp8compile.load_fp8(layer, tmp_path / "one.safetensors")
    x.requires_grad_()
    options = {"policy": POLICY, "recipe": recipe, "power_of_2_scale": True, "fp8_format": "e4m3"}
    y = torch.compile(layer, backend="fp8", options=options)(x)
    assert [m.decision for m in fp8compile.report(layer).matmuls] == ["fp8"] * 2
    spread = scales.repeat_interleave(-(-320 // shape[0]) if block != SQUARE else 128, 0)[:320]
    spread = spread.repeat_interleave(256 // shape[1], 1)
    assert torch.equal(y, x @ (made * spread).t())
    dy = torch.randint(-8, 9, (48, 320), generator=generator).float()
    dy[:, ::128] = 8.0
    y.backward(dy)
    assert torch.equal(x.grad, dy @ (made * spread))


def one_layer(path: Path, block: Block, dtype: torch.dtype = BF16) -> tuple[nn.Linear, Tensor]:
    """A layer that holds a weight, and the values of the weight in float32."""
    made = in_fp8(model(1).up.base.weight.detach() * torch.logspace(-2, 2, 320)[:, None].to(BF16), block)
    save_file(made, path / "one.safetensors")
    layer = nn.Linear(256, 320, bias=False, dtype=dtype)
    fp8compile.load_fp8(layer, path / "one.safetensors")
    return layer, values({f"x.{last}": x for last, x in made.items()}, "x").float()


@pytest.mark.parametrize("how", ["plain", "stacked", "autocast", "dynamic", "columns", "padded"])
def test_scales_of_rows_fold_into_gradients_of_all_shapes(how: str, tmp_path: Path) -> None:
    """The bytes are read in dgrad, too, and the gradient is no worse than a cast of its rows makes it."""
    layer, weight = one_layer(tmp_path, ROW, torch.float32 if how == "autocast" else BF16)
    x = batch(rows=44 if how == "padded" else 48).requires_grad_()
    given = x.view(2, 24, 256) if how == "stacked" else x
    policy = {"extends": "none", "rules": [{"fp8": "on"}]}

    def forward(x: Tensor) -> Tensor:
        return layer.weight @ x.t() if how == "columns" else layer(x)

    run = torch.compile(forward, backend="fp8", options={"policy": policy}, dynamic=how == "dynamic")
    with torch.autocast("cpu", BF16, enabled=how == "autocast"), hooks.joint_graphs(products) as graphs:
        y = run(given)
    y = y.t() if how == "columns" else y
    dy = batch(1, x.shape[0]).repeat(1, 2)[:, :320] * torch.linspace(-1, 1, 320).to(BF16)
    y.backward(dy.view(y.shape))
    assert graphs[-1] == ["placeholder", "placeholder"], graphs
    assert sqnr(y.reshape(-1, 320).float(), x.float() @ weight.t()) > 27
    assert sqnr(x.grad.float(), dy.float() @ weight) > 27


def test_a_part_of_a_held_weight_stays_in_high_precision(tmp_path: Path) -> None:
    """Its values are not cast anew."""
    layer, weight = one_layer(tmp_path, SQUARE)
    x = batch().requires_grad_()
    layer.forward = lambda x: functional.linear(x, layer.weight[:160])  # type: ignore[method-assign]
    policy = {"extends": "none", "rules": [{"fp8": "on"}]}
    y = torch.compile(layer, backend="fp8", options={"policy": policy})(x)
    assert sqnr(y.float(), x.float() @ weight[:160].t()) > 45
    reasons = {m.reason for m in fp8compile.report(layer).matmuls}
    assert reasons == {"a part of a weight that is held in FP8, or computed from one"}


@pytest.mark.parametrize("block", KINDS)
def test_adapters_train_and_the_rest_comes_out_as_it_went_in(block: Block, tmp_path: Path) -> None:
    """Gradients of adapters are those of training on dequantized weights, within FP8's noise."""
    tensors = released(tmp_path, block)
    held, plain = freeze(model()), freeze(model())
    fp8compile.load_fp8(held, tmp_path)
    state = {name: x for name, x in tensors.items() if "base" not in name}
    plain.load_state_dict(state | {f"{x}.base.weight": values(tensors, f"{x}.base") for x in ("up", "down")})
    run = torch.compile(held, backend="fp8", options={"policy": POLICY}, fullgraph=True)
    for step in range(2):
        for call in (run, plain):
            (call(batch(step)).float() * batch(step + 9).float()).sum().backward()
    wanted = dict(plain.named_parameters())
    ratios = {name: sqnr(p.grad, wanted[name].grad) for name, p in held.named_parameters() if p.requires_grad}
    assert len(ratios) == 4 and min(ratios.values()) > 24, ratios
    with torch.no_grad():
        held.up.a.weight.add_(1)
    made = fp8compile.export(held, tmp_path / "out")
    found = tensors_of(made.directory)
    assert made.format == ("fp8" if block == SQUARE else "compressed-tensors")
    assert made.layers.keys() == {"up.base", "down.base"} and {*made.layers.values()} <= {*OF[block]}
    assert found.keys() == tensors.keys()
    assert {name for name, x in found.items() if not same(x, tensors[name])} == {"up.a.weight"}


@pytest.mark.parametrize("stored", [BF16, E8M0])
def test_scales_go_out_in_the_dtype_that_they_came_in(stored: torch.dtype, tmp_path: Path) -> None:
    tensors = released(tmp_path, stored=stored)
    made: Any = freeze(model())
    fp8compile.load_fp8(made, tmp_path)
    assert made.up.base.weight.inv_.dtype == torch.float32
    torch.compile(made, backend="fp8", options={"policy": POLICY})(batch()).float().mean().backward()
    comes_out(made, tmp_path, tensors)
    assert config_of(tmp_path / "out").get("scale_fmt") == ("ue8m0" if stored == E8M0 else None)


def test_a_state_dict_brings_the_same_bytes_back(tmp_path: Path) -> None:
    """Whatever rule its scales follow: here powers of two, and in the second load one scale a weight."""
    tensors = released(tmp_path, stored=E8M0)
    made: Any = model()
    fp8compile.load_fp8(made, tmp_path)
    made.load_state_dict(made.state_dict())
    weight = made.up.base.weight
    assert same(weight.data_, tensors["up.base.weight"]) and weight.stored.dtype == E8M0
    changed = {name: 2 * x for name, x in made.state_dict().items()}
    made.load_state_dict(changed)
    assert sqnr(weight.dequantized(), changed["up.base.weight"]) > 28 and weight.stored is None


def test_a_layer_that_stays_in_high_precision_is_no_warning(tmp_path: Path) -> None:
    """Its values are those of the checkpoint: nothing was rounded here. It goes out as it came, too."""
    tensors = released(tmp_path)
    made = freeze(model())
    fp8compile.load_fp8(made, tmp_path)
    policy = {**POLICY, "rules": [{"module": "up.base", "fp8": "off"}, *POLICY["rules"]]}
    torch.compile(made, backend="fp8", options={"policy": policy, "strict": True})(batch()).sum().backward()
    assert {m.fqn for m in fp8compile.report(made).matmuls if m.decision == "fp8"} == {"down.base"}
    assert comes_out(made, tmp_path, tensors).layers.keys() == {"up.base", "down.base"}


def test_a_rule_that_names_another_recipe_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The bytes decide. With strict it is an error."""
    tensors = released(tmp_path)
    made: Any = freeze(model())
    fp8compile.load_fp8(made, tmp_path)
    rule = {"name": "mine", "module": "up.base", "fp8": "on", "recipe": "rowwise"}
    options = {"policy": {**POLICY, "rules": [rule, *POLICY["rules"]]}}
    wanted = "mine wants recipe 'rowwise' for up.base, whose weight is held in FP8, and its bytes decide"
    with pytest.raises(StrictError, match=wanted) as caught:
        torch.compile(made, backend="fp8", options={**options, "strict": True})(batch())
    assert "\n" not in str(caught.value)
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "fp8compile"):
        torch.compile(made, backend="fp8", options=options)(batch()).sum().backward()
    assert sum(wanted in record.getMessage() for record in caplog.records) == 1
    assert {m.recipe for m in fp8compile.report(made).matmuls if m.fqn == "up.base"} == {"blockwise"}
    assert same(made.up.base.weight.data_, tensors["up.base.weight"])


def test_a_weight_that_is_plain_in_the_next_checkpoint_is_plain_again(tmp_path: Path) -> None:
    tensors = released(tmp_path)
    made: Any = model()
    fp8compile.load_fp8(made, tmp_path)
    del tensors["up.base.weight_scale_inv"]
    tensors["up.base.weight"] = torch.randn(320, 256).to(BF16)
    save_file(tensors, tmp_path / "model.safetensors")
    assert fp8compile.load_fp8(made, tmp_path).layers.keys() == {"down.base"}
    assert type(made.up.base.weight) is nn.Parameter
    assert same(made.up.base.weight, tensors["up.base.weight"])


def test_a_file_that_is_overwritten_changes_nothing(tmp_path: Path) -> None:
    tensors = released(tmp_path)
    made = model()
    fp8compile.load_fp8(made, tmp_path)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as opened:  # in place
        opened.write(b"\0" * file.stat().st_size)
    assert same(made.up.base.weight.data_, tensors["up.base.weight"])


def test_what_is_held_does_not_train_and_is_not_written(tmp_path: Path) -> None:
    tensors = released(tmp_path)
    made: Any = model()
    fp8compile.load_fp8(made, tmp_path)
    with pytest.raises(Fp8CompileError, match="cannot train: call fp8compile.restore_frozen_weights"):
        made.requires_grad_()
    with pytest.raises(Fp8CompileError, match="would write to a weight that is kept in FP8 only"):
        made.up.base.weight.mul_(2)
    layer, weight = made.up.base, made.up.base.weight
    for change in (layer.half, layer.float, lambda: layer.to("meta"), lambda: layer.to_empty(device="meta")):
        with pytest.raises(Fp8CompileError, match="call fp8compile.restore_frozen_weights") as caught:
            change()
        assert "\n" not in str(caught.value) and layer.weight is weight
    assert same(weight.data_, tensors["up.base.weight"])
    fp8compile.restore_frozen_weights(made)
    assert all(type(p) is nn.Parameter for p in made.parameters())


def test_buffers_that_no_checkpoint_has(tmp_path: Path) -> None:
    released(tmp_path)
    with torch.device("meta"):
        made = Mlp()
        made.register_buffer("angles", torch.ones(4), persistent=False)
    with pytest.raises(LoadError, match="angles is on the meta device, and no part of a checkpoint"):
        fp8compile.load_fp8(made, tmp_path)


@pytest.mark.usefixtures("one_process")
def test_fully_shard_leaves_the_bytes(tmp_path: Path) -> None:
    """On one rank; test_shards.py has more."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    released(tmp_path)
    found = []
    for ignored in (True, False):
        made = freeze(model())
        fp8compile.load_fp8(made, tmp_path)
        options = {"ignored_params": fp8compile.fp8_parameters(made)} if ignored else {}
        for layer in (made.up, made.down, made):
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), **options)
        assert (type(made.up.base.weight).__name__ == "DTensor") is not ignored
        made.compile(backend="fp8", options={"policy": POLICY})
        y = made(batch())
        y.float().mean().backward()
        found.append([y.detach(), made.up.a.weight.grad.full_tensor(), made.down.b.weight.grad.full_tensor()])
        assert {m.recipe for m in fp8compile.report(made).matmuls if m.fqn.endswith("base")} == {"blockwise"}
        assert type(made.up.a.weight).__name__ == "DTensor" and len(fp8compile.fp8_parameters(made)) == 2
    assert all(map(torch.equal, *found))
