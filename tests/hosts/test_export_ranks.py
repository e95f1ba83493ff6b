"""`export` of a Llama with adapters of PEFT that FSDP2 shards over two ranks: what transformers and PEFT load
is what they load of the same model without shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import fp8compile
from tests.hosts import small
from tests.hosts.launched import on_two_ranks
from tests.support.served import alike, config_of, tensors_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def adapted() -> Any:
    torch.manual_seed(0)
    base = small.llama(layers=2)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"])
    made = peft.get_peft_model(base, lora)
    for name, p in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.02)
    return made


def called(model: Any, blocks: Any) -> Any:
    """After a forward and backward, by which graphs say how they multiply."""
    torch._dynamo.reset()
    for block in blocks:
        block.compile(backend="fp8", options={"recipe": "rowwise"})
    model(input_ids=small.tokens(), labels=small.tokens()).loss.backward()
    return model


def _export(rank: int, folder: str) -> tuple[str, fp8compile.Exported]:
    plain = adapted()
    called(plain, plain.get_base_model().model.layers)
    fp8compile.export(plain, Path(folder, f"plain{rank}"))
    model = adapted()
    blocks = model.get_base_model().model.layers
    for block in blocks:
        fully_shard(block)
    called(fully_shard(model), blocks)
    with pytest.raises(fp8compile.ExportError) as error:
        fp8compile.export(model, Path(folder, "merged"), merge="high_precision")
    return str(error.value), fp8compile.export(model, Path(folder, "shards"))


def logits(folder: Path) -> Tensor:
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return peft.PeftModel.from_pretrained(base, folder / "adapter").eval()(small.tokens()).logits


def test_transformers_and_peft_load_the_same(tmp_path: Path) -> None:
    folder, said = on_two_ranks(tmp_path, _export)
    (wrong, made), (also, other) = said
    assert made == other and len(made.files) == 4
    assert made.adapters == {"default": folder / "shards" / "adapter"}
    assert wrong == also and "has sharded parameters: leave merge out" in wrong
    plain, shards = folder / "plain0", folder / "shards"
    pairs = [(tensors_of(plain), tensors_of(shards))]
    pairs.append(tuple(peft.utils.load_peft_weights(str(x / "adapter")) for x in (plain, shards)))
    assert all(alike(one, two) for one, two in pairs)
    assert any("lm_head" in name for name in pairs[1][0]) and config_of(plain) == config_of(shards)
    assert torch.equal(logits(plain), logits(shards))
