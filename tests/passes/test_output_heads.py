"""Output heads are recognised by their place in the model, whatever their name. Other matmuls at the end of a graph are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from tests.support.harness import interpreted, noise
from tests.support.models import Attention, Block, Mlp, SwiGlu

LAST = "output head: the last matmul of the model, nothing follows it"
WIDTH, CLASSES = 128, 160


class Net(nn.Module):
    """A model from a function `forward(self, x)` and named modules."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def linear(out: int = CLASSES, into: int = WIDTH) -> nn.Linear:
    return nn.Linear(into, out)


def embedding() -> nn.Embedding:
    return nn.Embedding(64, WIDTH)


def norm() -> nn.Module:
    return nn.LayerNorm(WIDTH)


def kept(model: nn.Module, x: Tensor, **options: Any) -> dict[str, str]:
    """The modules in high precision, with the reasons."""
    report = fp8compile.explain(model, x, options=options)
    return {record.fqn: record.reason for record in report.matmuls if record.gemm == "fprop" and record.decision != "fp8"}


TOKENS, FEATURES, PIXELS = torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, WIDTH), torch.zeros(2, 3, 32, 32)


def trunk(m: Any, x: Tensor) -> Tensor:
    return m.norm(m.block(m.embed(x)))


def text(forward: Callable[[Any, Tensor], Any], **parts: nn.Module) -> Net:
    return Net(forward, embed=embedding(), block=Block(), norm=norm(), **parts)


def gated_residual(m: Any, x: Tensor) -> Tensor:
    x, g = m.embed(x), m.gate
    y = m.mlp(m.norm(x))
    return x * (1 - g(x).sigmoid()) + y * g(x).sigmoid()


def into_some_rows(m: Any, x: Tensor) -> Tensor:
    """Adds a branch to some rows only, as DINOv2 does for stochastic depth."""
    x = m.block(m.embed(x))
    rows = torch.arange(1)
    return torch.index_add(x.flatten(1), 0, rows, m.mlp(x[rows]).flatten(1)).view_as(x)


HEADS: dict[str, tuple[Net, Tensor, set[str]]] = {
    "behind a norm": (text(lambda m, x: m.fc(trunk(m, x)), fc=linear()), TOKENS, {"fc"}),
    "of the stream itself": (text(lambda m, x: m.fc(m.block(m.embed(x))), fc=linear()), TOKENS, {"fc"}),
    "of a class token": (text(lambda m, x: m.fc(trunk(m, x)[:, 0]), fc=linear()), TOKENS, {"fc"}),
    "pooled, with dropout": (text(lambda m, x: m.fc(F.dropout(trunk(m, x).mean(1))), fc=linear()), TOKENS, {"fc"}),
    "softcap": (text(lambda m, x: 30 * torch.tanh(m.fc(trunk(m, x)) / 30), fc=linear(WIDTH)), TOKENS, {"fc"}),
    "pad and slice": (text(lambda m, x: F.pad(m.fc(trunk(m, x)), (0, 3))[:, :-1, 1:], fc=linear()), TOKENS, {"fc"}),
    "hidden states as well": (text(lambda m, x: (m.fc(h := trunk(m, x)), h), fc=linear()), TOKENS, {"fc"}),
    "class and box": (text(lambda m, x: (m.a(h := trunk(m, x)), m.b(h).sigmoid()), a=linear(), b=linear()), TOKENS, {"a", "b"}),
    "a sum of two": (text(lambda m, x: m.a(h := trunk(m, x)) + m.b(h * 2), a=linear(), b=linear()), TOKENS, {"a", "b"}),
    "an MLP": (text(lambda m, x: m.b(m.a(trunk(m, x)[:, 0]).tanh()), a=linear(WIDTH), b=linear()), TOKENS, {"b"}),
    "with an adapter": (
        text(lambda m, x: m.a(h := trunk(m, x)) + 2 * m.up(m.down(h)), a=linear(), down=linear(), up=linear(CLASSES, CLASSES)),
        TOKENS,
        {"a", "up"},
    ),
    "a similarity of two": (
        text(lambda m, x: m.a(h := trunk(m, x)[:, 0]) @ m.b(h * 2).t(), a=linear(), b=linear()),
        TOKENS,
        {"a", "b"},
    ),
    "a loss in the graph": (text(lambda m, x: F.mse_loss(m.fc(trunk(m, x)), torch.ones(())), fc=linear()), TOKENS, {"fc"}),
    "convolutions before": (
        Net(lambda m, x: m.fc(m.conv(x).relu().mean((2, 3))), conv=nn.Conv2d(3, WIDTH, 4), fc=linear()),
        PIXELS,
        {"fc"},
    ),
    "of features, behind a norm": (
        Net(lambda m, x: m.fc(m.norm(F.gelu(m.body(x)))), body=linear(WIDTH), norm=norm(), fc=linear()),
        FEATURES,
        {"fc"},
    ),
    "back to the width of the input": (Net(lambda m, x: m.fc(m.block(x)), block=Block(), fc=linear(WIDTH)), FEATURES, {"fc"}),
}
NONE: dict[str, tuple[nn.Module, Tensor]] = {
    "a linear": (linear(), FEATURES),
    "a norm and a linear": (nn.Sequential(norm(), linear(3 * WIDTH)), FEATURES),
    "an MLP": (Mlp(), FEATURES),
    "a SwiGLU": (SwiGlu(), FEATURES),
    "an attention": (Attention(), FEATURES),
    "an MLP with its norm": (nn.Sequential(norm(), Mlp()), FEATURES),
    "an MLP with a norm inside": (nn.Sequential(linear(WIDTH), nn.GELU(), norm(), linear(WIDTH)), FEATURES),
    "a projector": (nn.Sequential(linear(256), nn.GELU(), linear(256, 256)), FEATURES),
    "a block": (Block(gated=True), FEATURES),
    "a trunk": (text(trunk), TOKENS),
    "a trunk with a pooler": (text(lambda m, x: m.pooler(trunk(m, x)[:, 0]).tanh(), pooler=linear(WIDTH)), TOKENS),
    "post-norm": (Net(lambda m, x: m.norm((h := m.embed(x)) + m.mlp(h)), embed=embedding(), mlp=Mlp(), norm=norm()), TOKENS),
    "norm of the branch": (
        Net(lambda m, x: (h := m.embed(x)) + m.norm(m.mlp(h)), embed=embedding(), mlp=Mlp(), norm=norm()),
        TOKENS,
    ),
    "a parallel block": (
        Net(
            lambda m, x: m.a(h := m.norm(e := m.embed(x))) + m.b(h) + e, embed=embedding(), norm=norm(), a=Mlp(), b=Attention()
        ),
        TOKENS,
    ),
    "a gated residual": (Net(gated_residual, embed=embedding(), norm=norm(), mlp=Mlp(), gate=linear(WIDTH)), TOKENS),
    "added to some rows": (Net(into_some_rows, embed=embedding(), block=Block(), mlp=Mlp()), TOKENS),
    "a convolution behind": (
        Net(lambda m, x: m.conv(m.fc(trunk(m, x)).mT), embed=embedding(), block=Block(), norm=norm(), fc=linear(),
            conv=nn.Conv1d(CLASSES, 4, 1)),
        TOKENS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADS)
def test_heads(case: str) -> None:
    model, x, heads = HEADS[case]
    assert kept(model, x) == dict.fromkeys(heads, LAST)


@pytest.mark.parametrize("case", NONE)
def test_what_is_no_head(case: str) -> None:
    assert kept(*NONE[case]) == {}


@pytest.mark.parametrize("name", ["fc", "to_logits", "output", "mlp_head", "decoder"])
def test_a_head_that_begins_small_does_not_turn_gradients_around(name: str) -> None:
    """The gradients of a softmax sum to zero. Weights that begin near zero are almost equal after one step of Adam. So the
    gradient of the trunk is a small difference of large sums."""
    torch.manual_seed(0)
    reference = Net(
        lambda m, x: getattr(m, name)(m.norm(F.gelu(m.body(x)))), body=linear(WIDTH), norm=norm(), **{name: linear()}
    )
    nn.init.trunc_normal_(getattr(reference, name).weight, std=2e-5)
    nn.init.zeros_(getattr(reference, name).bias)
    model = copy.deepcopy(reference)
    run = torch.compile(model, backend="fp8", options={"recipe": "tensorwise"})
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    with interpreted():
        for step in range(4):
            with torch.no_grad():
                for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                    mine.copy_(theirs)
            x, y = noise(4, WIDTH, seed=step), torch.arange(4) * 7
            for one in (reference, model):
                one.zero_grad()
                F.cross_entropy((run if one is model else one)(x), y).backward()
            gradients = [one.body.weight.grad.flatten() for one in (reference, model)]
            assert torch.cosine_similarity(*gradients, dim=0) > 0.95, step
            optimizer.step()


def test_a_rule_of_the_user_wins() -> None:
    model, x, _ = HEADS["behind a norm"]
    for rule in ({"module": "fc", "fp8": "on"}, {"kind": "output head", "fp8": "on"}, {"module": "fc", "margin": 1}):
        assert kept(model, x, policy={"rules": [rule]}) == {}
    assert kept(model, x, policy={"extends": "none"}) == {}


def reasons(model: nn.Module) -> dict[str, str]:
    return {record.fqn: record.reason for record in fp8compile.report(model).matmuls if record.gemm == "fprop"}


def compiled_parts() -> tuple[nn.Module, nn.Module]:
    """Two parts that would each end in a head as a model of their own. The first takes tokens, the second features."""
    tower = text(lambda m, x: m.project(trunk(m, x)), project=linear(WIDTH))
    return tower, Net(lambda m, x: m.out(m.block(x)), block=Block(), out=linear())


@pytest.mark.parametrize("wrapped", [False, True])
def test_parts_that_are_compiled_by_themselves(wrapped: bool) -> None:
    """If an eager module calls the parts, the backend knows which modules follow a part."""
    tower, decoder = compiled_parts()
    assert kept(tower, TOKENS) == {"project": LAST} and kept(decoder, FEATURES) == {"out": LAST}
    model = Net(lambda m, x: m.decoder(m.tower(x)), tower=tower, decoder=decoder)
    outer = Net(lambda m, x: m.module(x), module=model) if wrapped else model
    for part in (tower, decoder):
        part.compile(backend="fp8")
    with interpreted():
        outer(TOKENS).sum().backward()
    assert reasons(tower)["project"] == "" and reasons(decoder)["out"] == LAST


def test_a_model_whose_graph_breaks() -> None:
    """The last matmul of a graph is no head if other matrices of the model follow; the last one of the model is a head."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.embed(x)
        queries = m.q(m.norm(x + m.mlp(x)))
        torch._dynamo.graph_break()
        x = x + m.o(queries)
        torch._dynamo.graph_break()
        return m.fc(m.norm(x))

    parts = dict(embed=embedding(), norm=norm(), mlp=Mlp(), q=linear(256), o=linear(WIDTH, 256), fc=linear())
    assert kept(Net(forward, **parts), TOKENS) == {"fc": LAST}


TRANSFORMERS = {
    "RobertaForSequenceClassification": ("RobertaConfig", {"num_labels": 144}, {"classifier.out_proj"}),
    "BertForMaskedLM": ("BertConfig", {"tie_word_embeddings": False}, {"cls.predictions.decoder"}),
    "BertModel": ("BertConfig", {}, set()),
    "LlamaModel": ("LlamaConfig", {"use_cache": False}, set()),
    "CLIPTextModelWithProjection": ("CLIPTextConfig", {"projection_dim": WIDTH}, {"text_projection"}),
    "MusicgenForCausalLM": ("MusicgenDecoderConfig", {"num_codebooks": 2, "ffn_dim": 256}, {"lm_heads.0", "lm_heads.1"}),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config, settings, heads = TRANSFORMERS[name]
    sizes = dict(hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, vocab_size=512)
    sizes |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes, **settings))
    assert kept(model, torch.full((4, 8), 3)) == dict.fromkeys(heads, LAST)


@pytest.mark.parametrize("dim, kept", [(1, True), (-1, False)])
def test_a_maximum_over_tokens_is_a_choice(interpreted: None, dim: int, kept: bool) -> None:
    """The projection in front of the maximum stays in high precision: rounding may change the winner, which gets all the
    gradient. A maximum over features is no choice between tokens."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return x.amax(dim, keepdim=True) + m.up(x).unflatten(1, (8, -1)).max(dim + (dim > 0)).values.mean()

    model = Net(lambda m, x: forward(m, m.first(x)), first=linear(WIDTH), up=linear(256))
    torch.compile(model, backend="fp8")(noise(2, 32, WIDTH)).sum().backward()
    reasons = {r.reason for r in fp8compile.report(model).matmuls if r.fqn == "up"}
    assert ("router gate: a maximum chooses between its tokens" in reasons) == kept, reasons
