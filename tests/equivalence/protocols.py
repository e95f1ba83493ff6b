"""Protocols: what a training loop does, as data.

A letter is an event, and a space means nothing:

    f   a forward of a new batch             b   the backward of the oldest forward that has none
    s   the optimizer steps                  r   the backward of the newest forward that has none
    z   gradients are dropped                e   an evaluation: eval(), no_grad()
    c   a forward inside an eager checkpoint o   a forward whose saved tensors hooks copy, as offloading does
    n   a batch with a NaN, both ways, and gradients are dropped: what loops with a GradScaler do
    j   a forward of a batch 50 times as large: with delayed scaling, an overflow
    d   a dry run, forward and backward      l   load_state_dict of smaller weights
    m   the next call is a measured one      k   training is resumed by another model, from this state
    1 2 3   the number of tokens of the next batches
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from tests.support import hooks
from tests.support.harness import grads_of, histories, load_scaling, noise, scaling_tensors

PROTOCOLS = {
    "steps": "fbs fbs fbs",
    "accumulation": "fbfbs fbfbs fb",
    "two forwards": "fbs ffbbs ffrrs",
    "evaluation between": "e fbs feb s e",
    "a bad batch": "fbs n fbs",
    "an overflow": "fbs fbs jbs fbs fbs",
    "other sizes": "fbs 2fbs 3fbs 1fbs",
    "checkpoints and hooks": "fbs cbs obs ccbbs cfrrs",
    "dry runs": "d fbs d fb s",
    "loaded weights": "fbs l fbs fbs",
    "resumed": "fbs fbs k fbs fbs",
    "measured": "fbs mfbs fbs",
}
SIZES = {"1": (2, 24), "2": (2, 40), "3": (1, 33)}  # batch and length


@dataclass
class Run:
    """One training by a protocol. `compiled(model)` is what is called instead of the model;
    `optimizer(model)` steps.

    `seen` is what the two sides of a comparison must have in common: outputs, gradients, and at the end
    weights and histories.
    """

    build: Callable[[], nn.Module]
    compiled: Callable[[nn.Module], Callable[..., Tensor]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    seen: dict[str, Tensor] = field(default_factory=dict)
    open: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # inputs and outputs without a backward
    size: tuple[int, int] = SIZES["1"]
    batches: int = 0
    casts: list[int] = field(default_factory=list)  # of weights, between calls
    noise = staticmethod(noise)

    def __post_init__(self) -> None:
        self.model = self.build()
        self.dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        self.start()

    def start(self) -> None:
        self.call, self.steps = self.compiled(self.model), self.optimizer(self.model)

    def __call__(self, protocol: str) -> Run:
        with hooks.weight_casts() as self.casts:
            self.events(protocol)
        self.keep("weight", {name: p for name, p in self.model.named_parameters() if p.requires_grad})
        for key, (history, scale) in histories(self.model).items():
            self.keep("state", {" ".join(map(str, key)): torch.tensor([*history, scale])})
        return self

    def events(self, protocol: str) -> None:
        events: dict[str, Callable[[], None]] = {
            "f": self.forward,
            "b": self.backward,
            "r": lambda: self.backward(-1),
            "s": self.step,
            "z": self.zero,
            "e": self.evaluate,
            "c": self.checkpointed,
            "o": self.offloaded,
            "n": self.bad,
            "j": lambda: self.forward(50.0),
            "d": self.dry,
            "l": self.load,
            "m": self.measure,
            "k": self.resume,
        }
        for event in protocol.replace(" ", ""):
            if event in SIZES:
                self.size = SIZES[event]
            else:
                events[event]()

    def keep(self, kind: str, tensors: dict[str, Tensor]) -> None:
        self.seen |= {f"{len(self.seen)} {kind} {name}": x.detach().clone() for name, x in tensors.items()}

    def batch(self, scale: float = 1.0) -> Tensor:
        self.batches += 1
        return self.noise(*self.size, 128, seed=self.batches, scale=scale, dtype=self.dtype).requires_grad_()

    def forward(self, scale: float = 1.0, call: Callable[..., Tensor] | None = None) -> None:
        x = self.batch(scale)
        y = (call or self.call)(x)
        self.keep("output", {"": y})
        self.open.append((x, y))

    def backward(self, which: int = 0) -> None:
        x, y = self.open.pop(which)
        y.backward(self.noise(*y.shape, seed=1000 + self.batches, dtype=y.dtype))
        self.keep("gradient", grads_of(self.model, [x]))

    def step(self) -> None:
        self.steps.step()
        self.zero()

    def zero(self) -> None:
        self.model.zero_grad()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.keep("evaluation", {"": self.call(self.batch())})
        self.model.train()

    def checkpointed(self) -> None:
        self.forward(call=lambda x: checkpoint(self.call, x, use_reentrant=False))

    def offloaded(self) -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            self.forward()

    def bad(self) -> None:
        x = self.batch()
        with torch.no_grad():
            x[0, 3, 5] = float("nan")
        y = self.call(x)
        assert y.isnan().any()
        y.backward(torch.ones_like(y))
        self.zero()

    def dry(self) -> None:
        with fp8compile.freeze_scaling_state():
            y = self.call(self.batch(1e4))
            y.sum().backward()
        self.zero()

    def load(self) -> None:
        """By no power of two, which hides a scale that is stale."""
        self.model.load_state_dict({name: x * 0.3 for name, x in self.model.state_dict().items()})

    def measure(self) -> None:
        fp8compile.stats(self.model, measure=True)

    def resume(self) -> None:
        weights, steps = copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.steps.state_dict())
        scaling = scaling_tensors(self.model) if histories(self.model) else None
        self.model = self.build()
        self.start()
        self.model.load_state_dict(weights)
        self.steps.load_state_dict(steps)
        if scaling is not None:
            load_scaling(self.model, scaling)
