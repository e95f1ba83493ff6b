"""`mismatch`: the KL and differences of two policies, by formulas of others; a server that computes the same;
which weight differs; bad input. And `digest`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributions import Categorical, kl_divergence

import fp8compile
from fp8compile.errors import MismatchError
from tests.features.export.small import Small, next_forward, tokens, trained
from tests.support.hooks import slots_of
from tests.support.processes import on_ranks

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


class Table(nn.Module):
    """Logits that do not depend on the input, in train mode."""

    def __init__(self, logits: Tensor, wrap: Callable[[Tensor], Any] = lambda x: x):
        super().__init__()
        self.logits, self.wrap = logits, wrap

    def forward(self, ids: Tensor) -> Any:
        return self.wrap(self.logits)


def policies(batch: int = 3, length: int = 50, words: int = 11) -> tuple[Tensor, Tensor]:
    """Logits of a trainer and of a server, whose two KL differ."""
    generator = torch.Generator().manual_seed(0)
    server = torch.randn(batch, length, words, generator=generator)
    return 0.4 * server + 0.3 * torch.randn(server.shape, generator=generator), server


def test_kl_and_k3_are_those_of_server_to_trainer() -> None:
    """torch.distributions has the exact KL; k3 of many samples comes near it, and is not the other KL."""
    trainer, server = policies(length=4000)
    q, p = Categorical(logits=server.double()), Categorical(logits=trainer.double())
    torch.manual_seed(0)
    taken = q.sample()
    found = fp8compile.mismatch(Table(trainer), taken, server.log_softmax(-1), taken)
    there, back = kl_divergence(q, p).mean().item(), kl_divergence(p, q).mean().item()
    assert found.kl == pytest.approx(there, rel=1e-5) and abs(there - back) > 0.05 * there
    sampled = fp8compile.mismatch(Table(trainer), taken, q.log_prob(taken), taken)
    assert sampled.kl is None and sampled.k3 == pytest.approx(found.k3, rel=1e-5)
    assert sampled.k3 == pytest.approx(there, rel=0.03)
    wrong = fp8compile.mismatch(Table(server), taken, p.log_prob(taken), taken)  # samples of the other policy
    assert wrong.k3 != pytest.approx(there, rel=0.1)


def test_differences() -> None:
    trainer, server = policies()
    taken = server.argmax(-1)
    taken[1, 7:] = -100
    own = Categorical(logits=server).log_prob(taken.clamp(min=0))
    theirs = Categorical(logits=trainer).log_prob(taken.clamp(min=0))
    own[0, 3] -= 2.0
    found = fp8compile.mismatch(Table(trainer), [taken], own, taken)
    sizes = (theirs - own).double().abs()[taken >= 0].numpy()
    assert found.tokens == 107 and found.at == (0, 3)
    assert found.largest == pytest.approx(sizes.max(), rel=1e-6)
    for share, value in found.quantiles.items():
        assert value == pytest.approx(np.quantile(sizes, share, method="inverted_cdf"), rel=1e-6)
    text = str(found)
    assert text.startswith("107 tokens: KL ") and "\n" not in text
    assert "(k3)" in text and "(exact)" not in text


def test_what_a_server_never_samples() -> None:
    trainer, server = policies()
    server[..., 4] = -torch.inf
    q, p = server.log_softmax(-1), trainer.log_softmax(-1)
    expected = torch.where(q.isinf(), 0.0, q.exp() * (q - p)).sum(-1).mean().item()
    found = fp8compile.mismatch(Table(trainer), None, q)
    assert found.kl == pytest.approx(expected, rel=1e-5) and found.k3 is None


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_the_forward_is_that_of_training(recipe: str) -> None:
    """Log-probabilities of the next training call have no mismatch at all, and the model is as before."""
    model = Small()
    compiled = trained(model, 3, recipe)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {name: (slot.scale(), slot.history()) for name, slot in slots_of(model).items()}
    ids = tokens(5)
    found = [fp8compile.mismatch(compiled, ids, torch.full((2, 16), -4.0), ids) for _ in range(2)]
    assert found[0] == found[1]
    assert state == {name: (slot.scale(), slot.history()) for name, slot in slots_of(model).items()}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    logprobs = next_forward(compiled, ids).log_softmax(-1)
    full = fp8compile.mismatch(compiled, {"tokens": ids}, logprobs, ids)
    assert full.kl == full.k3 == full.largest == 0.0
    model.eval()
    with torch.no_grad():
        high = model(ids).log_softmax(-1)
    model.train()
    assert fp8compile.mismatch(compiled, ids, high, ids).kl > 1e-6


def test_the_first_weight_that_differs() -> None:
    model = Small()
    compiled = trained(model, 2, "tensorwise")
    ids = tokens(5)

    def first(weights: Any) -> str | None:
        given = torch.full((2, 16), -4.0)
        return fp8compile.mismatch(compiled, ids, given, ids, weights).first_difference

    tensors = dict(fp8compile.served_weights(model))
    digests = {name: fp8compile.digest(tensor) for name, tensor in tensors.items()}
    assert first(fp8compile.served_weights(model)) is None and first(digests) is None
    turned = dict(reversed([*digests.items()]))
    for name in ("head.bias", "down.weight_scale", "up.weight"):  # the order is the model's
        turned[name] = digests["norm.bias"]
        assert first(turned) == name
    other = tensors["up.weight"].clone()
    other.view(torch.uint8)[3, 5] ^= 1
    assert first({**tensors, "up.weight": other}) == "up.weight"
    for weights, wrong in (
        ({**digests, "up.w": ""}, "the model serves no up.w"),
        ({name: x for name, x in digests.items() if name != "head.bias"}, "weights have no head.bias"),
    ):
        with pytest.raises(MismatchError, match=wrong):
            first(weights)


def test_bad_input() -> None:
    trainer, server = policies()
    taken, own = server.argmax(-1), server.log_softmax(-1)
    some = own.amax(-1)

    def refused(match: str, logprobs: Tensor, ids: Tensor | None, model: Any = None) -> None:
        with pytest.raises(MismatchError, match=match) as error:
            fp8compile.mismatch(model or Table(trainer), taken, logprobs, ids)
        assert "\n" not in str(error.value) and isinstance(error.value, ValueError)

    refused("logprobs are torch.int64", taken, taken)
    refused(r"logprobs are torch.float32 \[50\]", some[0], taken[0])
    refused("sampled tokens: give tokens", some, None)
    refused(r"tokens are torch.int64 \[3, 49\]: give int64 \[3, 50\]", some, taken[:, 1:])
    refused("tokens are torch.float32", some, some)
    refused("no token is to be compared", some, torch.full_like(taken, -100))
    refused(
        "logprobs have nan for a sampled token",
        some.clone().index_fill_(1, torch.tensor([4]), torch.nan),
        taken,
    )
    refused("logprobs have -inf", some.clone().index_fill_(1, torch.tensor([4]), -torch.inf), taken)
    refused("logprobs have 0.5", -some.clamp(-0.5, -0.5), taken)
    refused("add up to a probability of", server - 9.0, taken)
    refused(r"logits are \[3, 50, 11\], and logprobs \[3, 49\]", some[:, 1:], taken[:, 1:])
    refused(r"logprobs \[3, 50, 10\]", own[..., 1:], None)
    refused("tokens have 11, and the logits 11 columns", some, torch.full_like(taken, 11))
    refused("logits have NaN", some, taken, Table(trainer * torch.nan))
    refused("the model returns str", some, taken, Table(trainer, lambda x: "loss"))
    refused(r"in eval mode.*model.train\(\)", some, taken, Table(trainer).eval())
    with pytest.raises(TypeError, match="expected a torch.nn.Module"):
        fp8compile.mismatch(lambda x: x, taken, some, taken)  # type: ignore[arg-type]
    for wrap in (lambda x: {"logits": x}, lambda x: type("Output", (), {"logits": x})()):
        assert fp8compile.mismatch(Table(server, wrap), taken, own).kl == pytest.approx(0.0, abs=1e-9)


# -- digests --


def test_a_digest_can_be_computed_elsewhere(tmp_path: Path) -> None:
    """By numpy and hashlib, of the bytes in a file of safetensors."""
    data = np.arange(12, dtype="<f4").reshape(3, 4)
    expected = hashlib.sha256(b"float32 [3, 4]\n" + data.tobytes()).hexdigest()
    tensor = torch.from_numpy(data.copy())
    assert fp8compile.digest(tensor) == expected
    assert fp8compile.digest(tensor.t().contiguous().t()) == expected
    assert fp8compile.digest(nn.Parameter(tensor)) == expected
    others = [tensor.view(4, 3), tensor.t(), tensor.view(torch.int32), tensor + 0.0 * tensor.flip(0) - 1e-7]
    others += [tensor.to(torch.float8_e4m3fn), tensor.bool(), tensor[:0], torch.tensor(3.0), torch.tensor(3)]
    found = {fp8compile.digest(x) for x in others} | {expected}
    assert len(found) == len(others) + 1


def test_a_digest_of_a_shard_is_refused(one_process: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    shard = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match=r"give tensor.full_tensor\(\)"):
        fp8compile.digest(shard)


# -- several processes --


def _shards(rank: int) -> list[Any]:
    """Two trainings of a sharded model, one with a comparison after each step: their ends; what was found."""
    ends, found = [], []
    for compares in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = Small()
        model.compile(backend="fp8", options={"recipe": "delayed", "eval": "fp8"})
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(tokens(step)).logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if compares:
                weights = {name: fp8compile.digest(x) for name, x in fp8compile.served_weights(model)}
                logprobs = next_forward(model, tokens(9)).log_softmax(-1)
                found.append(fp8compile.mismatch(model, tokens(9), logprobs, tokens(9), weights))
        ends.append({name: x.full_tensor() for name, x in model.state_dict().items()})
    return [all(torch.equal(x, ends[1][name]) for name, x in ends[0].items()), found]


@pytest.mark.slow
def test_shards_are_compared_and_train_on() -> None:
    for same, found in on_ranks(2, _shards, limit=120.0):
        assert same and len(found) == 3
        assert all((one.kl, one.largest, one.first_difference) == (0.0, 0.0, None) for one in found)
