"""Small random models from transformers: they train, reports list all matmuls, checkpoints are unchanged."""

from __future__ import annotations

import copy
import itertools
from collections import Counter

import pytest
import torch
import torch.nn as nn

import fp8compile
from fp8compile.reporting.report import Report
from tests.support.harness import noise

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("interpreted")

STEPS = 6
WORDS, LENGTH = 512, 32


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": noise(8, 3, 32, 32), "labels": torch.arange(8)}


def linears(model: nn.Module, head: str) -> list[str]:
    """The names of a model's linears (and GPT-2's Conv1D), except those of its head."""
    kinds = (nn.Linear, transformers.pytorch_utils.Conv1D)
    return [name for name, m in model.named_modules() if isinstance(m, kinds) and head not in name]


def key(batch: int, *sizes: int) -> tuple[int, ...]:
    """The key of a matmul in counts: its sizes in ascending order: m, n and k depend on the spelling."""
    return batch, *sorted(sizes)


def counted(model: nn.Module, batch: dict[str, torch.Tensor]) -> Counter[tuple[int, ...]]:
    """{(batch, sizes in ascending order): number of matmuls} of a vanilla training step in eager mode."""
    with torch.profiler.profile(record_shapes=True) as profile:
        model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)
    matmuls = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
    sizes = [event.input_shapes for event in profile.events() if event.name in matmuls]
    operands = [[shape for shape in shapes if len(shape) > 1][-2:] for shapes in sizes]
    return Counter(key(a[0] if len(a) == 3 else 1, *a[-2:], b[-1]) for a, b in operands)


def reported(report: Report) -> Counter[tuple[int, ...]]:
    return Counter(key(r.batch, r.m, r.n, r.k) for r in report.matmuls)


# sizes of all models, and no dropout: what a configuration does not know it ignores
SMALL = {
    "vocab_size": WORDS, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2}
# without a type of problem, the model finds and sets it in the first call
IMAGES = {"image_size": 32, "patch_size": 8, "num_labels": 16, "problem_type": "single_label_classification"}
# the kind of model, its own sizes, a batch, the head
CASES = {
    "gpt2": (transformers.AutoModelForCausalLM, {}, tokens, "lm_head"),
    "llama": (transformers.AutoModelForCausalLM, WIDE, tokens, "lm_head"),
    "bert": (transformers.AutoModelForMaskedLM, {}, tokens, "cls.predictions.decoder"),
    "vit": (transformers.AutoModelForImageClassification, IMAGES, images, "classifier"),
}


def train(name: str, attention: str, layers: int = 1, *, evaluate: bool) -> None:
    """AdamW steps; then checks the loss, the report and the checkpoint."""
    kind, sizes, make_batch, head = CASES[name]
    torch.manual_seed(0)
    sizes = {**SMALL, **sizes, "num_hidden_layers": layers, "attn_implementation": attention}
    model, batch = kind.from_config(transformers.AutoConfig.for_model(name, **sizes)).train(), make_batch()
    vanilla = copy.deepcopy(model)
    matmuls = counted(vanilla, batch)
    compiled = torch.compile(model, backend="fp8", dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = compiled(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses
    assert all(b < a + 0.02 * losses[0] for a, b in itertools.pairwise(losses)), losses

    report = fp8compile.report(model)
    seen = reported(report)
    assert seen == matmuls, f"{(seen - matmuls, matmuls - seen)}\n{report}"
    assert all(r.reason for r in report.matmuls if r.decision != "fp8")
    in_fp8 = Counter((r.fqn, r.gemm) for r in report.matmuls if r.decision == "fp8")
    gemms = itertools.product(linears(model, head), ("fprop", "dgrad", "wgrad"))
    assert in_fp8 == Counter(gemms), str(report)
    kept = {r.fqn: r.reason for r in report.matmuls if r.gemm == "fprop" and r.decision != "fp8"}
    assert len(kept) == 1 and next(iter(kept.values())).startswith("output head"), kept
    assert any("attention" in r.op for r in report.opaque) == (attention == "sdpa")
    assert any("conv" in r.op for r in report.opaque) == (name == "vit")

    state, expected = model.state_dict(), vanilla.state_dict()
    kinds = [[(k, v.shape, v.dtype) for k, v in tensors.items()] for tensors in (state, expected)]
    assert kinds[0] == kinds[1]
    vanilla.load_state_dict(state, strict=True)
    model.eval()
    vanilla.eval()
    with torch.no_grad():
        loss = vanilla(**batch).loss
        assert loss < losses[0]
        if evaluate:
            # in high precision
            torch.testing.assert_close(compiled(**batch).loss, loss, rtol=1e-4, atol=1e-5)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("name", "attention", "layers"),
    [
        ("llama", "eager", 1),
        pytest.param("gpt2", "sdpa", 1, marks=pytest.mark.slow),
        pytest.param("bert", "eager", 2, marks=pytest.mark.slow),
        pytest.param("vit", "sdpa", 2, marks=pytest.mark.slow),
    ],
)
def test_steps(name: str, attention: str, layers: int) -> None:
    train(name, attention, layers, evaluate=True)


@pytest.mark.weekly
@pytest.mark.compiled
def test_steps_through_inductor() -> None:
    train("bert", "sdpa", evaluate=False)  # an evaluation would be one more graph to compile
