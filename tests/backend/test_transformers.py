"""Small random models from transformers: they train, reports list all matmuls, checkpoints are unchanged."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8compile
from fp8compile.reporting.report import Report
from tests.support.harness import noise

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("interpreted")

STEPS = 6
WORDS, LENGTH = 512, 32


def tokens(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def gpt2(attention: str, layers: int = 1) -> nn.Module:
    sizes = dict(
        vocab_size=WORDS, n_positions=64, n_embd=128, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0
    )
    off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config = transformers.GPT2Config(**sizes, **off, use_cache=False, attn_implementation=attention)
    return transformers.GPT2LMHeadModel(config)


def llama(attention: str, layers: int = 1) -> nn.Module:
    sizes = dict(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        max_position_embeddings=64,
    )
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    config = transformers.LlamaConfig(**sizes, **heads, use_cache=False, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config)


def bert(attention: str, layers: int = 1) -> nn.Module:
    sizes = dict(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        max_position_embeddings=64,
    )
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = transformers.BertConfig(**sizes, **off, num_attention_heads=4, attn_implementation=attention)
    return transformers.BertForMaskedLM(config)


def vit(attention: str, layers: int = 1) -> nn.Module:
    sizes = dict(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        image_size=32,
        patch_size=8,
        num_labels=16,
    )
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    # else the model finds and sets it in the first call
    off |= dict(problem_type="single_label_classification")
    config = transformers.ViTConfig(**sizes, **off, num_attention_heads=4, attn_implementation=attention)
    return transformers.ViTForImageClassification(config)


def linears(model: nn.Module, *skip: str) -> list[str]:
    """The names of a model's linears (and GPT-2's Conv1D), except names that contain one of `skip`."""
    kinds = (nn.Linear, transformers.pytorch_utils.Conv1D)
    return [
        name for name, m in model.named_modules() if isinstance(m, kinds) and not any(s in name for s in skip)
    ]


def key(batch: int, *sizes: int) -> tuple[int, ...]:
    """The key of a matmul in counts: its sizes in ascending order: m, n and k depend on the spelling."""
    return batch, *sorted(sizes)


class CountMatmuls(TorchDispatchMode):
    """Counts mm, addmm, bmm and baddbmm of an eager step by their sizes."""

    OPS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}
    OPS |= {torch.ops.aten.bmm.default: 0, torch.ops.aten.baddbmm.default: 1}

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.OPS:
            a, b = args[self.OPS[func] : self.OPS[func] + 2]
            self.sizes[key(a.shape[0] if a.dim() == 3 else 1, *a.shape[-2:], b.shape[-1])] += 1
        return func(*args, **(kwargs or {}))


def counted(model: nn.Module, batch: dict[str, torch.Tensor]) -> Counter[tuple[int, ...]]:
    """{(batch, sizes in ascending order): number of matmuls} of a vanilla training step in eager mode."""
    with CountMatmuls() as count:
        model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)
    return count.sizes


def reported(report: Report) -> Counter[tuple[int, ...]]:
    return Counter(key(r.batch, r.m, r.n, r.k) for r in report.matmuls)


CASES = {
    "gpt2": (gpt2, tokens, "lm_head"),
    "llama": (llama, tokens, "lm_head"),
    "bert": (bert, tokens, "cls.predictions.decoder"),
    "vit": (vit, lambda: {"pixel_values": noise(8, 3, 32, 32), "labels": torch.arange(8)}, "classifier"),
}


def train(name: str, attention: str, layers: int = 1, *, evaluate: bool) -> None:
    """AdamW steps; then checks the loss, the report and the checkpoint."""
    build, make_batch, head = CASES[name]
    torch.manual_seed(0)
    model, batch = build(attention, layers).train(), make_batch()
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
    assert losses[-1] < 0.9 * losses[0] and all(
        b < a + 0.02 * losses[0] for a, b in zip(losses, losses[1:], strict=False)
    ), losses

    report = fp8compile.report(model)
    assert reported(report) == matmuls, (
        f"{(reported(report) - matmuls, matmuls - reported(report))}\n{report}"
    )
    assert all(r.reason for r in report.matmuls if r.decision != "fp8")
    in_fp8 = Counter((r.fqn, r.gemm) for r in report.matmuls if r.decision == "fp8")
    assert in_fp8 == Counter(
        (fqn, gemm) for fqn in linears(model, head) for gemm in ("fprop", "dgrad", "wgrad")
    ), str(report)
    kept = {r.fqn: r.reason for r in report.matmuls if r.gemm == "fprop" and r.decision != "fp8"}
    assert len(kept) == 1 and next(iter(kept.values())).startswith("output head"), kept
    assert any("attention" in r.op for r in report.opaque) == (attention == "sdpa")
    assert any("conv" in r.op for r in report.opaque) == (name == "vit")

    state, expected = model.state_dict(), vanilla.state_dict()
    assert [(k, v.shape, v.dtype) for k, v in state.items()] == [
        (k, v.shape, v.dtype) for k, v in expected.items()
    ]
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
