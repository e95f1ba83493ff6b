"""Exports of `mxfp8`, with scales of 1 x 32 and 32 x 32 elements of a weight: files, against other casts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.config.recipe import BUILT_IN
from fp8compile.features.export.checkpoint_formats import WEIGHTS
from tests.features.export.small import Small, decompressed, evaluated, exported, tokens
from tests.support.harness import sqnr
from tests.support.reference_casts import OCP, Quantized, quantize
from tests.support.served import config_of, same, serve, tensors_of

pytest.importorskip("safetensors")
pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]

E4M3 = OCP[0]
ROW_OF_32, TILE = (1, 32), (32, 32)


def uneven(path: Path, block: tuple[int, int], hidden: int = 256, **options: Any) -> tuple[Any, Any, Any]:
    """A trained model with very uneven weights, its compiled wrapper, and the export."""
    model = Small(hidden)
    with torch.no_grad():  # blocks of uniform numbers have equal scales
        for layer in (model.up, model.down):
            layer.weight.mul_(torch.exp2(2.0 * torch.randn_like(layer.weight)))
    return exported(path, "mxfp8", model, 2, weight_tiles=block == TILE, **options)


def expected(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Values, and the bytes of their scales, by the oracle's cast: 2**(byte - 127) multiplies the values."""
    made = quantize(weight, E4M3, block, rounded=True)
    fraction, exponent = torch.frexp(made.scale_inv.double())
    assert (fraction == 0.5).all()  # powers of two
    scales = (exponent - 1 + 127).repeat_interleave(block[0], 0)[: len(weight)]
    return made.values, scales.to(torch.uint8)


def assert_as_expected(directory: Path, name: str, weight: Tensor, block: tuple[int, int]) -> None:
    tensors, (values, scales) = tensors_of(directory), expected(weight, block)
    assert same(tensors[f"{name}.weight"], values) and same(tensors[f"{name}.weight_scale"], scales)


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize(("block", "margin"), [(ROW_OF_32, 12), (TILE, 0)])
def test_the_ends_of_the_range(block: tuple[int, int], margin: int, tmp_path: Path) -> None:
    """Blocks of zeros, the least and the largest numbers, and of 448 times a power of two, which is exact."""
    model, _, made = uneven(tmp_path, block, **({"margin": (0, margin, 0)} if margin else {}))
    numbers = [0.0, 1e-45, 2.0**-127, 2.0**-118, 1.75 * 2.0**-110, 1e-12, 0.875, 448.0, 449.0, 1e30, 3.4e38]
    with torch.no_grad():
        for i, number in enumerate(numbers):
            ramp = torch.linspace(-1.0, 1.0, 32).expand(32, 32)
            model.up.weight[(i % 8) * 32 :][:32, (i // 8) * 32 :][:, :32] = ramp * number
    made = fp8compile.export(model, tmp_path / "again")
    quantized = quantize(model.up.weight, E4M3, block, margin, rounded=True)
    tensors = tensors_of(made.directory)
    values, scales = tensors["up.weight"], tensors["up.weight_scale"]
    assert same(values, quantized.values)
    decoded = values.double() * torch.exp2(scales.double() - 127.0).repeat_interleave(32, 1)
    assert torch.equal(decoded, quantized.exact())
    assert scales[0, 0] == 127 and not values[:32, :32].float().any()  # zeros have the scale 1
    assert scales.min() == 0 and scales.max() == (253 if margin else 247)
    assert torch.equal(scales.view(torch.float8_e8m0fnu).double(), torch.exp2(scales.double() - 127.0))


@pytest.mark.parametrize(
    "block", [TILE, pytest.param(ROW_OF_32, marks=pytest.mark.slow)], ids=["tiles", "rows"]
)
def test_a_layer_whose_rows_are_no_multiple_of_32(block: tuple[int, int], tmp_path: Path) -> None:
    """What has 144 outputs is exported, with a last tile of 16 rows. What has 144 inputs is left."""
    model, _, made = uneven(tmp_path, block, 144)
    assert set(made.layers) == {"up"}
    assert made.left == {"down": "128 x 144: the second size is no multiple of 32"}
    assert "down" in made.ignored
    assert_as_expected(made.directory, "up", model.up.weight, block)
    assert torch.equal(tensors_of(made.directory)["down.weight"], model.down.weight)


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize("block", [ROW_OF_32, TILE], ids=["rows", "tiles"])
def test_compressed_tensors_reads_the_files(block: tuple[int, int], tmp_path: Path) -> None:
    """The configuration is that of its own preset, the compressor that it picks is the one we name, and
    decompressed weights are ours bitwise. It decompresses to bf16, which holds FP8 values times powers of
    two."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    model, _, made = uneven(tmp_path, block)
    config = QuantizationConfig.model_validate(config_of(made.directory))
    (scheme,) = config.config_groups.values()
    preset: Any = preset_name_to_scheme("MXFP8", ["Linear"])
    for what in ("weights", "input_activations"):
        mine, theirs = (getattr(x, what).model_dump(exclude={"zp_dtype"}) for x in (scheme, preset))
        assert mine == theirs
    assert config.format == scheme.format == infer_module_format(nn.Linear, scheme).value == "mxfp8-quantized"
    for name, found in decompressed(made.directory, made.layers).items():
        exact = quantize(model.get_submodule(name).weight, E4M3, block, rounded=True).exact()
        assert found.dtype == torch.bfloat16 and torch.equal(found.double(), exact), name


def test_recipes_that_are_mixed(tmp_path: Path) -> None:
    """Each group has its format, and servers read it from there. mxfp8 comes last: transformers'
    `dequantize=True`, which reads all layers by the first group, then fails. Else it would give wrong weights
    silently."""
    rules = {"rules": [{"module": "down", "recipe": "rowwise"}]}
    model, compiled, made = uneven(tmp_path, ROW_OF_32, policy=rules)
    config, tensors = config_of(made.directory), tensors_of(made.directory)
    groups = [(group["targets"], group["format"]) for group in config["config_groups"].values()]
    assert groups == [(["down"], "float-quantized"), (["up"], "mxfp8-quantized")]
    assert config["format"] == "mixed-precision"
    assert tensors["down.weight_scale"].dtype == torch.float32
    assert_as_expected(made.directory, "up", model.up.weight, ROW_OF_32)
    row = Quantized(tensors["down.weight"], tensors["down.weight_scale"], (1, 0))
    assert torch.equal(row.exact(), quantize(model.down.weight, E4M3, (1, 0)).exact())
    assert sqnr(evaluated(compiled, tokens(9)), serve(Small(), made.directory)(tokens(9))) > 60.0
    wrong = "128 x 128 elements only, and up was trained with 'mxfp8'"
    with pytest.raises(fp8compile.ExportError, match=wrong):
        fp8compile.export(model, tmp_path / "other", format="fp8")


def test_every_recipe_has_a_layout() -> None:
    blocks = {block for made in BUILT_IN.values() for block in (made.weight_block, made.tile)}
    assert blocks - {None} == set(WEIGHTS)
