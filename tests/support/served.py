"""A server in eager PyTorch: reads an exported checkpoint by its config.json alone, and computes as servers
of its format do.

Nothing here is imported from fp8compile: the casts are those of reference_casts.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support.reference_casts import OCP, Quantized, cast, quantize, scaled_mm, vllm_cast

WHOLE, ROW = (0, 0), (1, 0)


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, of one file or of several."""
    index = directory / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return {name: tensor for file in files for name, tensor in load_file(directory / file).items()}


def same(one: Tensor, other: Tensor) -> bool:
    """The same dtype, shape and bytes."""
    first, second = (x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (one, other))
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(first, second)


def alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """The same tensors under the same names."""
    return one.keys() == other.keys() and all(same(x, other[name]) for name, x in one.items())


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


class Served(nn.Module):
    """A Linear as a server runs it. `rounded`: dynamic scales are rounded to powers of two (servers do so on
    request, and where scales are E8M0). `vllm`: inputs are cast as by vLLM's kernel for blocks."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        blocks: tuple[int, int],
        inputs: tuple[int, int],
        rounded: bool,
        vllm: bool = False,
    ):
        super().__init__()
        scale_inv = tensors["weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"]
        if scale_inv.dtype == torch.uint8:
            scale_inv, rounded = torch.exp2(scale_inv.double() - 127.0).float(), True
        scale_inv = scale_inv.reshape(1, 1) if blocks == WHOLE else scale_inv
        self.weight = Quantized(tensors["weight"], scale_inv, blocks)
        self.bias, self.static = tensors.get("bias"), tensors.get("input_scale")
        self.inputs, self.rounded, self.vllm = inputs, rounded, vllm

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.static is not None:
            copy = Quantized(cast(rows, 1.0 / self.static, *OCP[0]), self.static.reshape(1, 1), WHOLE)
        elif self.vllm:
            copy = vllm_cast(rows, self.inputs, self.rounded)
        else:
            copy = quantize(rows, OCP[0], self.inputs, rounded=self.rounded)
        out = scaled_mm(copy, self.weight, x.dtype, self.bias)
        return out.reshape(*x.shape[:-1], out.shape[-1])


def serve(model: nn.Module, directory: Path, rounded: bool = False, vllm: bool = False) -> nn.Module:
    """`model`, with the weights of a checkpoint: Linears in FP8 where the configuration says so."""
    config, tensors = config_of(directory), tensors_of(directory)
    ignored = config.get("ignore", config.get("modules_to_not_convert"))
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or name in ignored:
            continue
        keys = [key for key in tensors if key.startswith(f"{name}.")]
        own = {key.removeprefix(f"{name}."): tensors.pop(key) for key in keys}
        model.set_submodule(name, Served(own, *_blocks(config, name), rounded, vllm))
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    return model.eval()


def _blocks(config: Mapping[str, Any], name: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """The blocks of the weight and of the input that share a scale."""
    if config["quant_method"] == "fp8":
        assert config["activation_scheme"] == "dynamic"
        return tuple(config["weight_block_size"]), (1, config["weight_block_size"][1])
    groups = [group for group in config["config_groups"].values() if {name, "Linear"} & set(group["targets"])]
    assert len(groups) == 1, name
    weights, inputs = groups[0]["weights"], groups[0]["input_activations"]
    return _block(weights), _block(inputs)


def _block(arguments: Mapping[str, Any]) -> tuple[int, int]:
    if arguments["strategy"] == "group":
        return 1, arguments["group_size"]
    known = {"tensor": WHOLE, "channel": ROW, "token": ROW}
    return known.get(arguments["strategy"]) or tuple(arguments["block_structure"])
