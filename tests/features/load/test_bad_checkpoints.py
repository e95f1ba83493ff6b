"""Checkpoints, files and folders that `load_fp8` refuses: one line, and nothing has changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fp8compile
from fp8compile import LoadError
from tests.features.load.test_load import freeze, model, released
from tests.support.served import alike, same

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]
SCALE = "up.base.weight_scale_inv"


def change(name: str, new: Callable[[Tensor], Tensor] | None) -> Callable[[dict[str, Tensor]], None]:
    """Replace a tensor of a checkpoint, or add one; None: leave it out."""

    def act(tensors: dict[str, Tensor]) -> None:
        old = tensors.pop(name, torch.zeros(1))
        if new is not None:
            tensors[name] = new(old)

    return act


def nothing_in_fp8(tensors: dict[str, Tensor]) -> None:
    for name in [x for x in tensors if "base" in x]:
        del tensors[name]


def a_norm_in_fp8(tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.float8_e4m3fn)
    tensors["norm.weight_scale"] = torch.ones(1)


BAD: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "no scale": (change(SCALE, None), "up.base.weight is in FP8 without a scale"),
    "only a scale": (change("up.a.weight_scale", torch.ones_like), "a weight that is not in FP8"),
    "a scale a column": (change(SCALE, lambda _: torch.ones(1, 256)), "are .1, 256. for .320, 256.; one sc"),
    "a fused Linear": (
        change(SCALE, lambda _: torch.ones(3)),
        "scales of up.base.weight are .3. for .320, 2",
    ),
    "too few blocks": (change(SCALE, lambda x: x[:2].clone()), "scales of up.base.weight are .2, 2. for"),
    "integers": (change(SCALE, lambda x: x.int()), "the scale of up.base.weight is I32; F32, BF16"),
    "zero": (change(SCALE, torch.zeros_like), "a scale of up.base.weight is not above zero"),
    "no number": (change(SCALE, lambda x: x * float("nan")), "up.base.weight is not above zero, or not fin"),
    "E5M2": (change("up.base.weight", lambda x: x.to(torch.float8_e5m2)), "is F8_E5M2; F8_E4M3 can be held"),
    "a shape": (change("up.a.weight", lambda _: torch.ones(8, 256)), "is .8, 256., and .16, 256. in the mod"),
    "too much": (change("head.weight", torch.ones_like), "the model has no head.weight"),
    "missing": (change("norm.bias", None), "it does not have norm.bias"),
    "no FP8": (nothing_in_fp8, "no tensor is in FP8"),
    "a norm": (a_norm_in_fp8, "in the model that of a LayerNorm: only weights of Linears and sta"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_checkpoint_that_does_not_fit_changes_nothing(case: str, tmp_path: Path) -> None:
    edit, message = BAD[case]
    tensors = released(tmp_path)
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, message)


def refused(path: Path, message: str) -> None:
    """One line that names a file or a folder, and nothing has changed."""
    made = model()
    before = {name: x.clone() for name, x in made.state_dict().items()}
    with pytest.raises(LoadError, match=message) as caught:
        fp8compile.load_fp8(made, path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert alike(made.state_dict(), before)
    assert all(type(p) is nn.Parameter for p in made.parameters())


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    refused(tmp_path / "missing", "there is no model.safetensors, and no model.safetensors.index.json")
    released(tmp_path)
    file, index = (tmp_path / f"model.safetensors{last}" for last in ("", ".index.json"))
    whole = file.read_bytes()
    for content in (*(whole[:cut] for cut in (len(whole) - 64, 100, 4)), *beyond(whole)):
        file.write_bytes(content)
        refused(tmp_path, "SafetensorError")
    file.write_bytes(whole)
    for text, message in (
        ("{", "no index of safetensors files"),
        ('{"weight_map": {"up.base.weight": "../other.safetensors"}}', "outside of the directory"),
        ('{"weight_map": {"up.base.weight": "gone.safetensors"}}', "gone.safetensors"),
        ('{"weight_map": {"other": "model.safetensors"}}', "other is not there"),
    ):
        index.write_text(text)
        refused(tmp_path, message)


def beyond(whole: bytes) -> Iterator[bytes]:
    """Files whose header says more than there is: of itself, of a tensor's place, of its shape."""
    size = int.from_bytes(whole[:8], "little")
    yield (1 << 62).to_bytes(8, "little") + whole[8:]
    for key, value in {"data_offsets": [0, 1 << 50], "shape": [1 << 40, 1 << 20]}.items():
        header = json.loads(whole[8 : 8 + size])
        header["up.base.weight"][key] = value
        made = json.dumps(header).encode()
        yield len(made).to_bytes(8, "little") + made + whole[8 + size :]


def test_nothing_of_a_file_is_executed(tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    for name in ("model.safetensors", "model.safetensors.index.json"):
        torch.save({"up.base.weight": Touch()}, tmp_path / name)
        refused(tmp_path, "SafetensorError|no index of safetensors files")
    assert not (tmp_path / "executed").exists()
    torch.load(tmp_path / name, weights_only=False)
    assert (tmp_path / "executed").exists()  # it would be


def test_a_second_load_that_fails_changes_nothing(tmp_path: Path) -> None:
    tensors = released(tmp_path)
    made = freeze(model())
    fp8compile.load_fp8(made, tmp_path)
    before = {name: (x, x.detach().clone()) for name, x in made.named_parameters()}
    for case in ("no scale", "missing", "no number"):
        changed = {name: x.clone() for name, x in tensors.items()}
        changed["up.a.weight"] += 1
        edit, message = BAD[case]
        edit(changed)
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(LoadError, match=message):
            fp8compile.load_fp8(made, tmp_path)
    for name, (parameter, values) in before.items():
        assert made.get_parameter(name) is parameter and torch.equal(parameter, values)
    assert same(made.up.base.weight.data_, tensors["up.base.weight"])
