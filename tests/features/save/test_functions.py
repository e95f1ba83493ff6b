"""`save="fp8"` on drawn functions of activations: gradients are those of "auto", but for roundings to FP8."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import hooks
from tests.support.harness import ALL_FP8, compiled, leaf, noise, sqnr
from tests.support.models import make

pytestmark = pytest.mark.usefixtures("interpreted")

# A rounding to E4M3 has 31 dB. Of that a bounded function loses a few, and terms of a gradient that cancel.
FLOOR_DB = 15.0
Unary = Callable[[Tensor], Tensor]


def log(x: Tensor) -> Tensor:
    return torch.log(x + 1e-6)


def off_diagonal(x: Tensor) -> Tensor:
    return x - torch.diag(x.diagonal())


SHIFTS: dict[str, Unary] = {
    "as it is": lambda x: x,
    "wide": lambda x: 8 * x,
    "narrow": lambda x: 0.1 * x,
    "around 3": lambda x: 0.05 * x + 3,
    "near 1": lambda x: 1 + 0.02 * x,
}
OF_TORCH = ("softplus", "mish", "elu", "selu", "celu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid")
OF_TORCH += ("relu6", "softsign", "softshrink", "logsigmoid")
ACTIVATIONS: dict[str, Unary] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "squared relu": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "steep sigmoid": lambda x: torch.sigmoid(8 * x),
    **{name: getattr(F, name) for name in OF_TORCH},
    "sine": torch.sin,
    "erf": torch.erf,
    "arctangent": torch.atan,
    "bounded exp": lambda x: torch.exp(x.clamp(max=3)),
    "gaussian": lambda x: torch.exp(-x.square()),
    "absolute": torch.abs,
    "square": torch.square,
    "cube": lambda x: x**3,
    "1 - x^2": lambda x: 1 - x.square(),
    "1 - x": lambda x: 1 - x,
    "root": lambda x: torch.sqrt(1 + x.square()),
    "signed root": lambda x: x.sign() * torch.sqrt(x.abs() + 1e-4),
    "inverse": lambda x: 1 / (x.square() + 0.1),
    "clamped log": lambda x: torch.log(x.clamp(min=1e-3)),
}
NORMS: dict[str, Unary] = {
    "none": lambda x: x,
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "group norm": lambda x: F.group_norm(x.transpose(1, 2), 4).transpose(1, 2),
    "batch norm": lambda x: F.batch_norm(x.flatten(0, 1), None, None, training=True).view(x.shape),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "by hand": lambda x: (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(),
    "by moments": lambda x: (
        (x - x.mean(-1, True)) * ((x * x).mean(-1, True) - x.mean(-1, True) ** 2 + 1e-3).rsqrt()
    ),
    "softmax": lambda x: torch.softmax(x, -1),
    "log softmax": lambda x: torch.log_softmax(x, -1),
    "by its sum": lambda x: x.exp() / x.exp().sum(-1, True),
    "by its largest": lambda x: x / (x.abs().amax(-1, True) + 1e-3),
    "centred": lambda x: x - x.mean(-1, True),
}
GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda a, b: a,
    "product": lambda a, b: a * b,
    "sum": lambda a, b: a + b,
    "sigmoid": lambda a, b: a * torch.sigmoid(b),
    "silu": lambda a, b: a * F.silu(b),
    "tanh": lambda a, b: a * torch.tanh(b),
    "convex": lambda a, b: torch.sigmoid(b) * a + (1 - torch.sigmoid(b)) * a.flip(-1),
    "larger": lambda a, b: torch.maximum(a, b),
    "choice": lambda a, b: torch.where(a > b, a, 0.5 * b),
    "positive": lambda a, b: torch.where(b > 0, a, 0.1 * a),
    "quotient": lambda a, b: a / (1 + b.abs()),
    "difference": lambda a, b: (a - b).square(),
    "absolute difference": lambda a, b: (a - b).abs(),
    "modulated": lambda a, b: a * (1 + b),
    "attention": lambda a, b: torch.softmax(a @ b.transpose(1, 2) / 16, -1) @ b,
    "glu": lambda a, b: F.glu(torch.cat([a, b], -1)),
    "angle": lambda a, b: torch.atan2(a, b.abs() + 1),
}
# Of an activation and a tensor of the same shape that depends on nothing. Without it some would be the same
# for all results of a norm, and their gradients nothing but rounding errors.
ENDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nothing": lambda a, t: a.new_zeros(()),
    "product": lambda a, t: a * t,
    "largest feature": lambda a, t: a.amax(-1),
    "largest token": lambda a, t: a.amax(1),
    "smallest": lambda a, t: a.amin(-1),
    "max": lambda a, t: a.max(1).values * t[:, 0],
    "logsumexp": lambda a, t: a.logsumexp(-1),
    "norm": lambda a, t: (a * t).norm(dim=-1),
    "norm 1": lambda a, t: (a * t).norm(1, dim=-1),
    "norm 3": lambda a, t: (a * t).norm(3, dim=-1),
    "norm inf": lambda a, t: a.norm(float("inf"), dim=-1),
    "variance": lambda a, t: (a * t).var(-1),
    "deviation": lambda a, t: a.std(1) * t[:, 0],
    "median": lambda a, t: a.median(-1).values,
    "topk": lambda a, t: a.topk(8, -1).values.square(),
    "sorted": lambda a, t: a.sort(-1).values * t.sort(-1).values,
    "squares": lambda a, t: (a.square() * t).sum(-1),
    "moment": lambda a, t: (a.pow(4) * t).mean(-1),
    "cumulative": lambda a, t: a.cumsum(1) * t,
    "product of few": lambda a, t: (1 + 0.1 * a[..., :4]).prod(-1),
    "squared error": lambda a, t: (a - t).square(),
    "near target": lambda a, t: (a - a.detach() - 0.01 * t).square() * 100,
    "absolute error": lambda a, t: (a - t).abs(),
    "huber": lambda a, t: F.huber_loss(a, t),
    "charbonnier": lambda a, t: ((a - t).square() + 1e-3).sqrt(),
    "log cosh": lambda a, t: torch.log(torch.cosh((a - t).clamp(-5, 5))),
    "hinge": lambda a, t: F.relu(1 - a * t.sign()),
    "cross entropy": lambda a, t: F.cross_entropy(a.flatten(0, 1), t.argmax(-1).flatten()),
    "cross entropy by hand": lambda a, t: a.logsumexp(-1) - (a * (t > 1)).mean(-1),
    "divergence": lambda a, t: F.kl_div(a.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    "binary by hand": lambda a, t: -torch.where(t > 0, log(a.sigmoid()), log(1 - a.sigmoid())),
    "binary": lambda a, t: F.binary_cross_entropy_with_logits(a, (t > 0).float()),
    "focal": lambda a, t: -((1 - a.sigmoid()) ** 2) * F.logsigmoid(a),
    "entropy": lambda a, t: -(a.softmax(-1) * a.log_softmax(-1)).sum(-1),
    "gate entropy": lambda a, t: -a.sigmoid() * log(a.sigmoid()) - (1 - a.sigmoid()) * log(1 - a.sigmoid()),
    "poisson": lambda a, t: torch.exp(a.clamp(max=4)) - t.abs() * a,
    "gaussian": lambda a, t: (a - t).square() / (F.softplus(a.flip(-1)) + 0.1) + F.softplus(a.flip(-1)).log(),
    "cosine": lambda a, t: F.cosine_similarity(a, t, dim=-1),
    "sine": lambda a, t: (1 - F.cosine_similarity(a, t, dim=-1).square()).clamp(min=1e-4).sqrt(),
    "contrastive": lambda a, t: F.cross_entropy(
        F.normalize(a[:, 0], dim=-1) @ F.normalize(a[:, 1], dim=-1).t() / 0.1, torch.arange(a.shape[0])
    ),
    "triplet": lambda a, t: F.relu((a - t).norm(dim=-1) - (a - t.flip(1)).norm(dim=-1) + 1),
    "distances": lambda a, t: (a[:, :8, None] - a[:, None, :8]).square().sum(-1).add(1e-3).sqrt(),
    "kernel": lambda a, t: torch.exp(-(a[:, :8, None] - a[:, None, :8]).square().mean(-1)),
    "decorrelation": lambda a, t: off_diagonal(torch.corrcoef(a.flatten(0, 1)[:, :32].t())).square(),
    "spread": lambda a, t: F.relu(1 - ((a * t).var(1) + 1e-4).sqrt()),
    "smoothness": lambda a, t: (a[:, 1:] - a[:, :-1]).square(),
    "total variation": lambda a, t: (a[:, 1:] - a[:, :-1]).abs(),
    "softmax pooling": lambda a, t: ((a * t).sum(-1, True).softmax(1) * a).sum(1),
    "sparsity": lambda a, t: torch.log1p(a.square()),
}


class Drawn(nn.Module):
    """Two linears, drawn functions of what they give, and a linear that may read these."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)

        def some(of: dict[str, Callable], often: float) -> str:
            return draw.choice([*of]) if draw.random() < often else next(iter(of))

        self.drawn = (some(SHIFTS, 0.5), some(ACTIVATIONS, 0.9), some(NORMS, 0.4), some(GATES, 0.4))
        self.drawn = (*self.drawn, some(ACTIVATIONS, 0.3), some(ENDS, 0.9))
        self.reads = draw.random() < 0.5 or self.drawn[-1] == "nothing"
        self.up, self.other = nn.Linear(128, 256), nn.Linear(128, 256)
        self.down = nn.Linear(256, 128)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        shift, activation, norm, gate, last, end = self.drawn
        a = NORMS[norm](ACTIVATIONS[activation](SHIFTS[shift](self.up(x))))
        a = ACTIVATIONS[last](GATES[gate](a, self.other(x)))
        loss = ENDS[end](a, target).mean()
        return loss + (self.down(a) * target[..., :128]).mean() if self.reads else loss


@pytest.fixture(autouse=True)
def tiny() -> Iterator[None]:
    with hooks.saving_small_tensors():
        yield


def compared(seed: int) -> tuple[Drawn, dict[str, float]]:
    """A drawn model, and for its gradients how near those with `save="fp8"` are to those without, in dB: of
    the input, and of the weights, where a sum of small terms that cancel is small itself."""
    model = make(lambda: Drawn(seed), seed=seed)
    found, models = [], [model, copy.deepcopy(model)]
    for one, save in zip(models, ("auto", "fp8"), strict=True):
        x = leaf(noise(4, 32, 128, seed=seed))
        loss = compiled(one, "tensorwise", policy=ALL_FP8, save=save)(x, noise(4, 32, 256, seed=seed + 1))
        loss.backward()
        made = {"x": x.grad, "up": one.up.weight.grad, "other": one.other.weight.grad}
        found.append((loss.detach(), {name: grad for name, grad in made.items() if grad is not None}))
    (loss, exact), (same, kept) = found
    assert torch.equal(loss, same) or loss.isnan()
    return models[1], {name: sqnr(exact[name], kept[name]) for name in exact if exact[name].isfinite().all()}


@pytest.mark.cases(test=4, slow=24)
@pytest.mark.parametrize("seed", range(400))
def test_gradients_are_those_of_auto(seed: int) -> None:
    model, ratios = compared(seed)
    low = {name: f"{ratio:.1f} dB" for name, ratio in ratios.items() if not ratio >= FLOOR_DB}
    assert not low, (model.drawn, model.reads, low)
