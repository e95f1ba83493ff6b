"""The protocols of `fuzz_training`, as data: what happens in a training step, and before it. A letter is an
event.

    f   a forward of a new batch                 n   one whose input needs no gradient
    c   one inside an eager checkpoint           o   one whose saved tensors hooks copy, as offloading does
    h   one with hooks on its output and input   d   one of a dry run; its backward comes in half of the cases
    b   the backward of the oldest open forward  r   of the newest
    t   one backward through all that are open   l   a backward through the last output only
    x   a forward whose backward never comes, or comes late
    e   an evaluation                            w   hooks on the parameters, in the rest of the protocol
    z   some parameters are frozen or unfrozen   m   weights change, as in a step of an optimizer
    s   weights and activations change by a large factor

A protocol runs on both sides, in FP8 and eagerly, with the same random numbers. `Side.train` returns what is
compared.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from tests.support.fuzz_models import UNIT, Layer, permutation, ternary
from tests.support.harness import ALL_FP8

if TYPE_CHECKING:
    from tests.support.fuzz_training import Case

Results = dict[str, Tensor]

PROTOCOLS = {
    "plain": "fb",
    "plain again": "fb",
    "no input gradient": "nb",
    "two forwards": "ffbb",
    "two forwards in reverse": "ffrr",
    "together": "fft",
    "one output": "fl",
    "accumulated": "fbfbfb",
    "forsaken": "xfb",
    "evaluated": "efb",
    "dry": "dfb",
    "hooked parameters": "wfb",
    "hooked output": "hb",
    "checkpointed": "cb",
    "offloaded": "ob",
    "frozen": "zfb",
    "moved": "mfb",
    "rescale": "sfb",
}
# weights of event s
RESCALED = ("plain", "turned", "strided", "half", "stack", "wide", "copied", "times", "masked", "frozen")
UNEVEN = set("lxcz")  # after these, some histories have moved more often than others


@dataclass
class Side:
    """One of the two sides of a comparison: `fp8` or eager. Both get the same random numbers."""

    case: Case
    model: nn.Module
    fp8: bool
    run: Callable[..., Any] = None  # type: ignore[assignment]
    rng: random.Random = field(default_factory=random.Random)
    shape: tuple[int, ...] = ()
    forwards: int = 0  # how often a training forward began while none waited
    backwards: int = 0  # how often such forwards had a backward
    waiting: int = 0
    fresh: bool = False  # no backward of these forwards has run
    # every forward and every backward so far covered all slots once, so all histories have moved equally
    even: bool = True
    kept: list[Any] = field(default_factory=list)
    calls: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)  # inputs and outputs of a protocol
    open: list[list[Tensor]] = field(default_factory=list)  # outputs that wait for their backward
    seen: Results = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.compile()

    def compile(self) -> None:
        options = {"recipe": self.case.recipe, "policy": ALL_FP8, **self.case.options}
        how: dict[str, Any] = {"backend": "fp8", "dynamic": self.case.dynamic, "options": options}
        model = self.run = self.model
        self.forwards = self.backwards = self.waiting = 0
        if not self.fp8:
            return
        if self.case.how == "whole":
            self.run = torch.compile(model, **how)
        elif self.case.how == "in place":
            model.compile(**how)
        elif self.case.how == "blocks":
            for block in model.blocks:
                block.compile(**how)
        else:
            self.run = torch.compile(lambda x: model(x), **how)

    def train(self, protocol: str) -> Results:
        self.calls, self.open, self.seen, handles = [], [], {}, []
        self.even = self.even and not UNEVEN & set(protocol)
        for event in protocol:
            if event == "w":
                handles = self.hook_parameters()
            else:
                EVENTS[event](self)
        for handle in handles:
            handle.remove()
        for i, (x, outs) in enumerate(self.calls):
            self.seen |= {f"x{i}": x.grad} | {f"y{i} {j}": y for j, y in enumerate(outs)}
        self.seen |= {name: p.grad for name, p in self.model.named_parameters()}
        return {name: tensor.detach().clone() for name, tensor in self.seen.items() if tensor is not None}

    # forwards

    def x(self, requires_grad: bool = True) -> Tensor:
        return ternary(self.rng, *self.shape).to(self.case.dtype).requires_grad_(requires_grad)

    def plain(self, x: Tensor, run: Callable[..., Any] | None = None) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.autocast):
            out = (run or self.run)(x)
        return list(out) if isinstance(out, tuple) else [out]

    def forward(
        self, requires_grad: bool = True, call: Callable[[Tensor], list[Tensor]] | None = None
    ) -> list[Tensor]:
        x = self.x(requires_grad)
        outs = (call or self.plain)(x)
        # else all parameters are frozen, and this is an evaluation
        if any(y.requires_grad for y in outs):
            self.forwards += self.waiting == 0
            self.fresh |= self.waiting == 0
            self.waiting += 1
        self.calls.append((x, outs))
        self.open.append(outs)
        return outs

    def checkpointed(self) -> None:
        reentrant = self.rng.random() < 0.3
        self.forward(
            call=lambda x: list(checkpoint(lambda x: tuple(self.plain(x)), x, use_reentrant=reentrant))
        )

    def offloaded(self) -> None:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (t.clone(), t.dtype), lambda packed: packed[0].clone()
        ):
            self.forward()

    def hooked(self) -> None:
        last = self.forward()[-1]
        turn = permutation(self.rng, last.shape[-1]).to(last.dtype)
        # the last output: eagerly, a hook on an earlier one would also get gradients from later ones
        last.register_hook(lambda g: g @ turn)
        self.calls[-1][0].register_hook(
            lambda g: self.seen.__setitem__(f"hooked {len(self.seen)}", g.clone())
        )

    def forsaken(self) -> None:
        outs = self.forward()
        if self.rng.random() < 0.5:
            self.kept.append(outs)
        self.open.pop()
        self.calls.pop()

    def dry(self) -> None:
        before = self.forwards, self.waiting, self.fresh  # a dry run moves no history
        with fp8compile.freeze_scaling_state():
            self.forward()
        (self.forwards, self.waiting, self.fresh), outs = before, self.open.pop()
        if self.rng.random() < 0.5:
            self.even = False
            self.backward(outs)

    def evaluated(self) -> None:
        which = self.rng.choice(("eval", "no_grad", "both", "inference"))
        if which in ("eval", "both"):
            self.model.eval()
        modes = {"eval": contextlib.nullcontext, "inference": torch.inference_mode}
        with modes.get(which, torch.no_grad)():
            outs = self.plain(self.x(False))
        self.model.train()
        self.seen |= {f"evaluated {i}": y.detach().clone() for i, y in enumerate(outs)}

    # backwards

    def backward(self, outs: list[Tensor], times: int = 1) -> None:
        gradients = [ternary(self.rng, *y.shape).to(y.dtype) * UNIT for y in outs]
        pairs = [pair for pair in zip(outs, gradients, strict=True) if pair[0].requires_grad]
        if pairs:
            self.backwards += self.fresh
            self.fresh, self.waiting = False, max(0, self.waiting - times)
            torch.autograd.backward(*zip(*pairs, strict=True))

    def together(self) -> None:
        self.backward([y for outs in self.open for y in outs], len(self.open))

    # between steps

    def hook_parameters(self) -> list[Any]:
        handles = []
        for p in self.model.parameters():
            if p.requires_grad and p.dim() == 2:
                turn = permutation(self.rng, p.shape[0]).to(p.dtype)
                handles.append(p.register_hook(lambda g, turn=turn: None if g is None else turn @ g))
        return handles

    def freeze(self) -> None:
        some = list(self.model.parameters())
        for p in self.rng.sample(some, self.rng.randint(1, len(some))):
            p.requires_grad_(not p.requires_grad)

    def move(self) -> None:
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                normed = getattr(self.model.get_submodule(name.rpartition(".")[0]), "stored", "") == "norm"
                if p.dim() > 1 and not name.endswith("scale") and not normed:
                    values = p.roll(self.rng.randint(1, 9), self.rng.choice((0, 1)))
                    if self.rng.random() < 0.3:
                        p.data = values
                    else:
                        p.copy_(values)

    def rescale(self) -> None:
        """Delayed scales are right again some calls later: these are part of the event."""
        factor = self.rng.choice((0.25, 2.0, 4.0, 64.0))
        layers = [module for module in self.model.modules() if isinstance(module, Layer)]
        with torch.no_grad():
            for layer in layers:
                w = layer.weight
                if w.stored in RESCALED and self.rng.random() < 0.7:
                    w.w.mul_(factor)
                    w.size *= factor
                    layer.factor /= factor
                    if layer.bias is not None:
                        layer.bias.mul_(factor)
        if self.case.recipe == "delayed":
            # layer after layer recovers, forward and backward, with a history of 2 calls
            for _ in range(4 + 4 * len(layers)):
                self.backward(self.forward())
            self.calls, self.open = [], []
            self.model.zero_grad()


EVENTS: dict[str, Callable[[Side], Any]] = {
    "f": Side.forward,
    "n": lambda s: s.forward(False),
    "c": Side.checkpointed,
    "o": Side.offloaded,
    "h": Side.hooked,
    "d": Side.dry,
    "b": lambda s: s.backward(s.open.pop(0)),
    "r": lambda s: s.backward(s.open.pop()),
    "t": Side.together,
    "l": lambda s: s.backward(s.open.pop()[-1:]),
    "x": Side.forsaken,
    "e": Side.evaluated,
    "z": Side.freeze,
    "m": Side.move,
    "s": Side.rescale,
}
