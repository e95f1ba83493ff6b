"""How far are a server's log-probabilities from a trainer's? KL by what the two have in common.

    python -m benchmarks.mismatch [--steps 100]

A small Llama is trained in FP8 on the text of Python's standard library. Then a server samples, and
`fp8compile.mismatch` compares. All servers run our operators, so that nothing differs but what the row says:

    two bf16 kernels          both in bf16; the server's matmuls round as another kernel might: the floor
    bf16 trainer, FP8 server  the server casts the weights that the trainer multiplies in bf16
    FP8, other rule           both multiply in FP8; the server casts the bf16 weights itself, by another rule
    FP8, served weights       the server has the bytes of `fp8compile.served_weights`
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8compile
from fp8compile import Mismatch
from fp8compile.dryrun.observe import dithered

from .cases import gpt2
from .interpreted import interpreted
from .models import LlamaBlock, LlamaShape, materialise

SHAPE = LlamaShape(layers=4, width=256, heads=4, kv_heads=4, hidden=512, vocabulary=256)
LENGTH, BATCH = 128, 8
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
FP8: dict[str, Any] = {"recipe": "blockwise", "eval": "fp8"}


class Policy(nn.Module):
    """tokens [B, T] -> logits [B, T, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(SHAPE.vocabulary, SHAPE.width)
        self.layers = nn.ModuleList(LlamaBlock(SHAPE, LENGTH) for _ in range(SHAPE.layers))
        self.norm = nn.RMSNorm(SHAPE.width, eps=1e-5)
        self.lm_head = nn.Linear(SHAPE.width, SHAPE.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class OtherKernel(TorchDispatchMode):
    """Matmuls round as another bf16 kernel might."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return dithered(made, self.generator) if func in PRODUCTS else made


def trained(steps: int) -> tuple[Policy, Any, Tensor]:
    """A policy, its compiled wrapper, and tokens that it has not seen."""
    policy: Any = materialise(Policy, "cpu", torch.bfloat16)
    compiled = torch.compile(policy, backend="fp8", options=FP8)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    train, held = gpt2.text()
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(train) - LENGTH, (BATCH,), generator=generator)
        tokens, targets = gpt2.example().windows(train, starts, LENGTH, "cpu")
        nn.functional.cross_entropy(compiled(tokens).float().flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return policy, compiled, held[: BATCH * LENGTH].view(BATCH, LENGTH).long()


def server(policy: Policy, options: Mapping[str, Any] | None = FP8, weights: Path | None = None) -> Any:
    """A model of its own with the policy's weights, or with those of a file; None: it runs in bf16."""
    own = materialise(Policy, "cpu", torch.bfloat16)
    if weights is None:
        own.load_state_dict(policy.state_dict())
    else:
        fp8compile.load_fp8(own, weights)
    own.eval()
    return own if options is None else torch.compile(own, backend="fp8", options=dict(options))


@torch.no_grad()
def logprobs(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return model(tokens).float().log_softmax(-1)


def rows(steps: int) -> dict[str, Mismatch]:
    """The mismatch of each pair of trainer and server."""
    from safetensors.torch import save_file

    policy, compiled, tokens = trained(steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "served.safetensors")
        save_file(dict(fp8compile.served_weights(policy)), path)
        whole = server(policy, weights=path)
    with OtherKernel():
        floor = logprobs(server(policy, None), tokens)
    pairs: dict[str, tuple[Any, Tensor]] = {
        "two bf16 kernels": (policy, floor),
        "bf16 trainer, FP8 server": (policy, logprobs(server(policy), tokens)),
    }
    rules: dict[str, dict[str, Any]] = {
        "one scale a tensor": {"recipe": "tensorwise"},
        "float32 scales": {"power_of_2_scale": False},
    }
    for rule, options in rules.items():
        theirs = logprobs(server(policy, {**FP8, **options}), tokens)
        pairs[f"FP8, other rule: {rule}"] = compiled, theirs
    pairs["FP8, served weights"] = compiled, logprobs(whole, tokens)
    found = {}
    for (name, (trainer, theirs)), seed in zip(pairs.items(), itertools.count()):
        torch.manual_seed(seed)
        taken = torch.distributions.Categorical(logits=theirs).sample()
        found[name] = fp8compile.mismatch(trainer, tokens, theirs, taken)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="of training, in FP8")
    arguments = parser.parse_args()
    with interpreted():
        found = rows(arguments.steps)
    print("| trainer and server | KL, nats a token | k3 | 50% | 99% | largest |")
    print("|---|---|---|---|---|---|")
    for name, one in found.items():
        numbers = (one.kl, one.k3, one.quantiles[0.5], one.quantiles[0.99], one.largest)
        print(f"| {name} | {' | '.join(f'{number:.1e}' if number else '0' for number in numbers)} |")


if __name__ == "__main__":
    main()
