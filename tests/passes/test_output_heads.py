"""Output heads are recognised by their place in the model, whatever their name. Other matmuls at the end of a
graph are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from tests.support import hooks
from tests.support.exact import Model
from tests.support.harness import noise
from tests.support.models import Attention, Block, Mlp, ResidualMlp, SwiGlu

pytestmark = pytest.mark.usefixtures("interpreted")
LAST = "output head: the last matmul of the model, nothing follows it"
WIDTH, CLASSES = 128, 160


class Several(nn.ModuleDict):
    """Models side by side, in one graph."""

    def forward(self, x: Tensor) -> Any:
        return [part(x) for part in self.values()]


def linear(out: int = CLASSES, into: int = WIDTH) -> nn.Linear:
    return nn.Linear(into, out)


def embedding() -> nn.Embedding:
    return nn.Embedding(64, WIDTH)


def norm() -> nn.Module:
    return nn.LayerNorm(WIDTH)


def kept(model: nn.Module, x: Tensor, **options: Any) -> dict[str, str]:
    """The modules in high precision, with the reasons."""
    matmuls = fp8compile.explain(model, x, options=options).matmuls
    return {r.fqn: r.reason for r in matmuls if r.gemm == "fprop" and r.decision != "fp8"}


TOKENS = torch.zeros(2, 16, dtype=torch.long)
FEATURES, PIXELS = torch.zeros(2, 16, WIDTH), torch.zeros(2, 3, 32, 32)


def trunk(m: Any, x: Tensor) -> Tensor:
    return m.norm(m.block(m.embed(x)))


def text(forward: Callable[[Any, Tensor], Any], **parts: nn.Module) -> Model:
    return Model(forward, embed=embedding(), block=ResidualMlp(), norm=norm(), **parts)


def heads_of_a_trunk(m: Any, tokens: Tensor) -> Any:
    stream = m.block(m.embed(tokens))
    h = m.norm(stream)
    return (
        m.fc(h),
        m.of_the_stream(stream),
        m.of_a_class_token(h[:, 0]),
        m.pooled(F.dropout(h.mean(1))),
        30 * torch.tanh(m.softcap(h) / 30),
        F.pad(m.padded(h), (0, 3))[:, :-1, 1:],
        m.boxes(h).sigmoid(),
        m.one(h) + m.other(h * 2),
        m.mlp_head(m.in_an_mlp(h[:, 0]).tanh()),
        m.decoder(h) + 2 * m.lora_up(m.lora_down(h)),
        m.to_image(h[:, 0]) @ m.to_words(h[:, 0] * 2).t(),
        m.output(h).square().mean(),
    )


@pytest.mark.slow
def test_heads_of_a_trunk() -> None:
    """Of all that becomes of the trunk's output, only the linears before the last ones are no heads."""
    wide, square = (CLASSES, WIDTH), (WIDTH, WIDTH)
    names = "fc of_the_stream of_a_class_token pooled padded boxes one other mlp_head decoder to_image"
    sizes = dict.fromkeys(f"{names} to_words output lora_down".split(), wide)
    sizes |= {"softcap": square, "in_an_mlp": square, "lora_up": (CLASSES, CLASSES)}
    model = text(heads_of_a_trunk, **{name: linear(*size) for name, size in sizes.items()})
    assert kept(model, TOKENS) == dict.fromkeys(sizes.keys() - {"in_an_mlp", "lora_down"}, LAST)


HEADS: dict[str, tuple[Model, Tensor]] = {
    "hidden states as well": (text(lambda m, x: (m.fc(h := trunk(m, x)), h), fc=linear()), TOKENS),
    "convolutions before": (
        Model(lambda m, x: m.fc(m.conv(x).relu().mean((2, 3))), conv=nn.Conv2d(3, WIDTH, 4), fc=linear()),
        PIXELS,
    ),
    "of features, after a norm": (
        Model(lambda m, x: m.fc(m.norm(F.gelu(m.body(x)))), body=linear(WIDTH), norm=norm(), fc=linear()),
        FEATURES,
    ),
    "back to the width of the input": (
        Model(lambda m, x: m.fc(m.block(x)), block=ResidualMlp(), fc=linear(WIDTH)),
        FEATURES,
    ),
}


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("case", HEADS)
def test_heads(case: str) -> None:
    assert kept(*HEADS[case]) == {"fc": LAST}


def gated_residual(m: Any, x: Tensor) -> Tensor:
    x, g = m.embed(x), m.gate
    y = m.mlp(m.norm(x))
    return x * (1 - g(x).sigmoid()) + y * g(x).sigmoid()


def into_some_rows(m: Any, x: Tensor) -> Tensor:
    """Adds a branch to some rows only, as DINOv2 does for stochastic depth."""
    x = m.block(m.embed(x))
    rows = torch.arange(1)
    return torch.index_add(x.flatten(1), 0, rows, m.mlp(x[rows]).flatten(1)).view_as(x)


def parallel(m: Any, x: Tensor) -> Tensor:
    return m.a(h := m.norm(e := m.embed(x))) + m.b(h) + e


OF_TOKENS = {
    "a trunk": text(trunk),
    "a trunk with a pooler": text(lambda m, x: m.pooler(trunk(m, x)[:, 0]).tanh(), pooler=linear(WIDTH)),
    "post-norm": Model(
        lambda m, x: m.norm((h := m.embed(x)) + m.mlp(h)), embed=embedding(), mlp=Mlp(), norm=norm()
    ),
    "norm of the branch": Model(
        lambda m, x: (h := m.embed(x)) + m.norm(m.mlp(h)), embed=embedding(), mlp=Mlp(), norm=norm()
    ),
    "a parallel block": Model(parallel, embed=embedding(), norm=norm(), a=Mlp(), b=Attention()),
    "a gated residual": Model(gated_residual, embed=embedding(), norm=norm(), mlp=Mlp(), gate=linear(WIDTH)),
    "added to some rows": Model(into_some_rows, embed=embedding(), block=ResidualMlp(), mlp=Mlp()),
    "a convolution after": text(
        lambda m, x: m.conv(m.fc(trunk(m, x)).mT), fc=linear(), conv=nn.Conv1d(CLASSES, 4, 1)
    ),
}
OF_FEATURES = {
    "a linear": linear(),
    "a norm and a linear": nn.Sequential(norm(), linear(3 * WIDTH)),
    "an MLP": Mlp(),
    "a SwiGLU": SwiGlu(),
    "an attention": Attention(),
    "an MLP with its norm": nn.Sequential(norm(), Mlp()),
    "an MLP with a norm inside": nn.Sequential(linear(WIDTH), nn.GELU(), norm(), linear(WIDTH)),
    "a projector": nn.Sequential(linear(256), nn.GELU(), linear(256, 256)),
    "a block": Block(gated=True),
}


@pytest.mark.cases(test=0, slow=1)
@pytest.mark.parametrize(
    ("models", "x"), [(OF_TOKENS, TOKENS), (OF_FEATURES, FEATURES)], ids=["of tokens", "of features"]
)
def test_what_is_no_head(models: dict[str, nn.Module], x: Tensor) -> None:
    """Each of them ends in a matmul, and none of these is a head."""
    assert kept(Several(models), x) == {}


@pytest.mark.parametrize("wrapped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_parts_that_are_compiled_by_themselves(wrapped: bool) -> None:
    """Two parts that would each end in a head as a model of their own. The first takes tokens, the second
    features. If an eager module calls the parts, the backend knows which modules follow a part."""
    tower = text(lambda m, x: m.project(trunk(m, x)), project=linear(WIDTH))
    decoder = Model(lambda m, x: m.out(m.block(x)), block=ResidualMlp(), out=linear())
    model = Model(lambda m, x: m.decoder(m.tower(x)), tower=tower, decoder=decoder)
    outer = Model(lambda m, x: m.module(x), module=model) if wrapped else model
    for part in (tower, decoder):
        part.compile(backend="fp8")
    with hooks.traced():
        outer(TOKENS).sum().backward()
    reasons = {r.fqn: r.reason for r in fp8compile.report(outer).matmuls if r.gemm == "fprop"}
    name = "module." if wrapped else ""
    assert reasons[f"{name}tower.project"] == "" and reasons[f"{name}decoder.out"] == LAST


@pytest.mark.slow
def test_a_model_whose_graph_breaks() -> None:
    """A graph's last matmul is no head if other matrices of the model follow; the model's last one is."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.embed(x)
        queries = m.q(m.norm(x + m.mlp(x)))
        torch._dynamo.graph_break()
        x = x + m.o(queries)
        torch._dynamo.graph_break()
        return m.fc(m.norm(x))

    parts = dict(embed=embedding(), norm=norm(), mlp=Mlp(), q=linear(256), o=linear(WIDTH, 256), fc=linear())
    assert kept(Model(forward, **parts), TOKENS) == {"fc": LAST}


@pytest.mark.parametrize("dim, kept", [(1, True), (-1, False)])
def test_a_maximum_over_tokens_is_a_choice(dim: int, kept: bool) -> None:
    """The projection in front of the maximum stays in high precision: rounding may change the winner, which
    gets all the gradient. A maximum over features is no choice between tokens."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return x.amax(dim, keepdim=True) + m.up(x).unflatten(1, (8, -1)).max(dim + (dim > 0)).values.mean()

    model = Model(lambda m, x: forward(m, m.first(x)), first=linear(WIDTH), up=linear(256))
    torch.compile(model, backend="fp8")(noise(2, 32, WIDTH)).sum().backward()
    reasons = {r.reason for r in fp8compile.report(model).matmuls if r.fqn == "up"}
    assert ("router gate: a maximum chooses between its tokens" in reasons) == kept, reasons


def looked_up(m: Any, places: Tensor) -> Tensor:
    return F.one_hot(places, m.up.weight.shape[0]).to(m.up.weight) @ m.up.weight


def nearest(m: Any, x: Tensor) -> Tensor:
    keys = m.up.weight
    return looked_up(m, (x.square().sum(-1, True) + keys.square().sum(-1) - 2 * x @ keys.t()).argmin(-1))


CHOICES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "nearest": nearest,
    "largest": lambda m, x: looked_up(m, m.up(x).max(-1).indices),
    "with noise": lambda m, x: (m.up(x) + F.softplus(m.spread(x))).topk(4).values,
    "sorted": lambda m, x: looked_up(m, m.up(x).neg().argsort(-1)[..., 0]),
}


@pytest.mark.cases(test=2, slow=2)
@pytest.mark.parametrize("name", CHOICES)
def test_what_chooses_entries_is_in_high_precision(name: str) -> None:
    """Other rounding would choose another entry, key or expert. Matmuls before and after are FP8."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = x + CHOICES[name](m, m.first(x)).sum(-1, keepdim=True)
        return h + m.last(h)

    model = Model(forward, first=linear(WIDTH), up=linear(256), spread=linear(256), last=Mlp())
    chooses = {"up", "spread"} if name == "with noise" else {"up"}
    why = "router gate: its output decides which entries are chosen"
    assert kept(model, FEATURES) == dict.fromkeys(chooses, why)
