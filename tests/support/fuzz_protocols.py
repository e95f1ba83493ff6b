"""The protocols of `fuzz_training`: a protocol is a training step, possibly after something that happens between two steps.

A protocol runs on both sides, in FP8 and eagerly. It draws the same random numbers on both, and returns the tensors to compare.
"""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from tests.support.fuzz_models import UNIT, permutation, ternary
from tests.support.harness import ALL_FP8

if TYPE_CHECKING:
    from tests.support.fuzz_training import Case

Results = dict[str, Tensor]


@dataclass
class Side:
    """One of the two sides of a comparison: `fp8` or eager. Protocols draw the same random numbers for both."""

    case: Case
    model: nn.Module
    fp8: bool
    run: Callable[..., Any] = None  # type: ignore[assignment]
    rng: random.Random = field(default_factory=random.Random)
    shape: tuple[int, ...] = ()
    forwards: int = 0  # number of training forwards
    even: bool = True  # every forward and every backward so far covered all slots once, so all histories have moved equally
    backwards: int = 0
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compile()

    def compile(self) -> None:
        options = {"recipe": self.case.recipe, "policy": ALL_FP8, **self.case.options}
        how: dict[str, Any] = {"backend": "fp8", "dynamic": self.case.dynamic, "options": options}
        model = self.model
        self.run = model
        self.forwards = self.backwards = 0
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

    # the steps of protocols

    def x(self, requires_grad: bool = True) -> Tensor:
        return ternary(self.rng, *self.shape).to(self.case.dtype).requires_grad_(requires_grad)

    def call(self, x: Tensor) -> list[Tensor]:
        outs = self.plain(x)
        self.forwards += any(y.requires_grad for y in outs)  # else all parameters are frozen, and this is an evaluation
        return outs

    def plain(self, x: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.autocast):
            out = self.run(x)
        return list(out) if isinstance(out, tuple) else [out]

    def gradients(self, outs: list[Tensor]) -> list[Tensor]:
        return [ternary(self.rng, *y.shape).to(y.dtype) * UNIT for y in outs]

    def backward(self, outs: list[Tensor], **kwargs: Any) -> None:
        pairs = [pair for pair in zip(outs, self.gradients(outs), strict=True) if pair[0].requires_grad]
        if pairs:
            self.backwards += 1
            torch.autograd.backward(*zip(*pairs, strict=True), **kwargs)

    def results(self, *xs: Tensor, outs: list[Tensor] = ()) -> Results:  # type: ignore[assignment]
        named = {f"x{i}": x.grad for i, x in enumerate(xs)} | {f"y{i}": y for i, y in enumerate(outs)}
        named |= {name: p.grad for name, p in self.model.named_parameters()}
        return {name: tensor.detach().clone() for name, tensor in named.items() if tensor is not None}


def plain(s: Side) -> Results:
    x = s.x()
    outs = s.call(x)
    s.backward(outs)
    return s.results(x, outs=outs)


def no_input_gradient(s: Side) -> Results:
    outs = s.call(s.x(False))
    s.backward(outs)
    return s.results(outs=outs)


def two_forwards(s: Side) -> Results:
    one, two = s.x(), s.x()
    first, second = s.call(one), s.call(two)
    pairs = [first, second]
    if s.rng.random() < 0.5:
        pairs.reverse()
    for outs in pairs:
        s.backward(outs)
    return s.results(one, two, outs=first + second)


def together(s: Side) -> Results:
    """Two forwards, then one backward through both."""
    one, two = s.x(), s.x()
    outs = [*s.call(one), *s.call(two)]
    s.backwards += 1
    s.backward(outs)
    return s.results(one, two, outs=outs)


def retained(s: Side) -> Results:
    s.even = False
    x = s.x()
    outs = s.call(x)
    s.backward(outs, retain_graph=True)
    s.backward(outs)
    return s.results(x, outs=outs)


def partial(s: Side) -> Results:
    s.even = False
    x = s.x()
    outs = s.call(x)
    some = [p for p in s.model.parameters() if p.requires_grad]
    some = s.rng.sample(some, s.rng.randint(0, min(2, len(some))))
    gradients = torch.autograd.grad(outs[0], [x, *some], s.gradients(outs[:1]), allow_unused=True)
    return {str(i): g.detach().clone() for i, g in enumerate(gradients) if g is not None} | s.results(outs=outs)


def one_output(s: Side) -> Results:
    """A backward through the last output only; the other output has no gradient."""
    s.even = False
    x = s.x()
    outs = s.call(x)
    s.backward(outs[-1:])
    return s.results(x, outs=outs)


def accumulated(s: Side) -> Results:
    for _ in range(s.rng.choice((2, 3))):
        s.backward(s.call(s.x()))
    return s.results()


def forsaken(s: Side) -> Results:
    """A forward whose backward never comes, or comes late."""
    s.even = False
    outs = s.call(s.x())
    if s.rng.random() < 0.5:
        s.kept.append(outs)
    return plain(s)


def evaluated(s: Side) -> Results:
    which = s.rng.choice(("eval", "no_grad", "both", "inference"))
    if which in ("eval", "both"):
        s.model.eval()
    modes = {"eval": contextlib.nullcontext, "inference": torch.inference_mode}
    with modes.get(which, torch.no_grad)():
        outs = s.plain(s.x(False))
    s.model.train()
    return {f"evaluated {name}": y for name, y in s.results(outs=outs).items()} | plain(s)


def dry(s: Side) -> Results:
    x = s.x()
    with fp8compile.dry_run():
        outs = s.plain(x)
    if s.rng.random() < 0.5:
        s.even = False
        s.backward(outs)
    return s.results(x, outs=outs) | {f"after {name}": y for name, y in plain(s).items()}


def hooked_parameters(s: Side) -> Results:
    handles = []
    for p in s.model.parameters():
        if p.requires_grad and p.dim() == 2:
            turn = permutation(s.rng, p.shape[0]).to(p.dtype)
            handles.append(p.register_hook(lambda g, turn=turn: None if g is None else turn @ g))
    results = plain(s)
    for handle in handles:
        handle.remove()
    return results


def hooked_output(s: Side) -> Results:
    x = s.x()
    outs = s.call(x)
    turn = permutation(s.rng, outs[-1].shape[-1]).to(outs[-1].dtype)
    # the last output: eagerly, a hook on an earlier one would also get the gradients that come from later ones
    outs[-1].register_hook(lambda g: g @ turn)
    seen = []
    x.register_hook(lambda g: seen.append(g.clone()))
    s.backward(outs)
    return s.results(x, outs=outs) | {f"seen {i}": g for i, g in enumerate(seen)}


def checkpointed(s: Side) -> Results:
    """The compiled model inside an eager checkpoint."""
    s.even = False
    x, reentrant = s.x(), s.rng.random() < 0.3
    results = checkpoint(lambda x: tuple(s.plain(x)), x, use_reentrant=reentrant)
    s.forwards += 1
    s.backward(list(results))
    return s.results(x, outs=list(results))


def offloaded(s: Side) -> Results:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(), t.dtype), lambda packed: packed[0].clone()):
        x = s.x()
        outs = s.call(x)
    s.backward(outs)
    return s.results(x, outs=outs)


def frozen(s: Side) -> Results:
    """Some parameters are frozen or unfrozen from here on."""
    s.even = False
    some = list(s.model.parameters())
    for p in s.rng.sample(some, s.rng.randint(1, len(some))):
        p.requires_grad_(not p.requires_grad)
    return plain(s)


def moved(s: Side) -> Results:
    """The weights change, as in a step of an optimizer."""
    with torch.no_grad():
        for name, p in s.model.named_parameters():
            if p.dim() > 1 and not name.endswith(("scale", "original0", "original1")) and not _fixed(s.model, name):
                values = p.roll(s.rng.randint(1, 9), s.rng.choice((0, 1)))
                if s.rng.random() < 0.3:
                    p.data = values
                else:
                    p.copy_(values)
    return plain(s)


def _fixed(model: nn.Module, name: str) -> bool:
    owner = model.get_submodule(name.rpartition(".")[0])
    return getattr(owner, "stored", "") in ("norm",)


def replaced(s: Side) -> Results:
    """New parameters, with the values of the old ones."""
    s.even = False
    for module in s.model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and name not in ("original0", "original1") and s.rng.random() < 0.5:
                setattr(module, name, nn.Parameter(p.detach().clone(), p.requires_grad))
    return plain(s)


def rescaled(s: Side) -> Results:
    """Weights and activations change by a large factor: delayed scales are right again some calls later."""
    s.even = False
    factor = s.rng.choice((0.25, 2.0, 4.0, 64.0))
    with torch.no_grad():
        for module in s.model.modules():
            if hasattr(module, "weight") and hasattr(module, "factor") and s.rng.random() < 0.7:
                w = module.weight
                if w.stored in ("plain", "turned", "strided", "half", "stack", "wide", "copied", "times", "masked", "frozen"):
                    w.w.mul_(factor)
                    w.size *= factor
                    module.factor /= factor
                    if module.bias is not None:
                        module.bias.mul_(factor)
    if s.case.recipe == "delayed":
        layers = sum(hasattr(module, "factor") for module in s.model.modules())
        for _ in range(4 + 4 * layers):  # layer after layer recovers, forward and backward, with a history of 2 calls
            plain(s)
        s.model.zero_grad()
    return plain(s)


def copied(s: Side) -> Results:
    s.model = copy.deepcopy(s.model)
    s.compile()
    return plain(s)


def threaded(s: Side) -> Results:
    """Two threads train one model."""
    s.even = False
    rngs = [random.Random(s.rng.random()) for _ in "12"]
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        try:
            twin = copy.copy(s)
            twin.rng = rngs[i]
            x = twin.x()
            with torch._dynamo.config.patch(specialize_float=True):  # Dynamo's settings are thread-local
                outs = twin.call(x)
            some = [x, *(p for p in s.model.parameters() if p.requires_grad)]
            found[i] = [*outs, *torch.autograd.grad(outs, some, twin.gradients(outs), allow_unused=True)]
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
        if s.case.seed % 2:
            thread.join()
    for thread in threads:
        thread.join()
    s.forwards += 2
    for value in found.values():
        if isinstance(value, BaseException):
            raise value
    return {f"thread {i} {n}": t.detach() for i, values in found.items() for n, t in enumerate(values) if t is not None}


def compiled_autograd(s: Side) -> Results:
    """Forward and backward in one compiled function, and again in a second call."""
    s.even = False
    x = s.x()
    with torch.autocast("cpu", torch.bfloat16, enabled=s.case.autocast), torch.no_grad():
        shapes = [y for y in _outs(s.model(x))]
    gradients = s.gradients(shapes)

    def step(x: Tensor, *gradients: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=s.case.autocast):
            outs = _outs(s.model(x))
        torch.autograd.backward(outs, gradients)

    if not s.fp8:
        step(x, *gradients)
        return s.results(x)
    options = {"recipe": s.case.recipe, "policy": ALL_FP8, **s.case.options}
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="fp8", options=options)(x, *gradients)
    torch._dynamo.reset()  # code compiled under compiled autograd cannot be called outside of it
    return s.results(x)


def _outs(out: Any) -> list[Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


PROTOCOLS: dict[str, Callable[[Side], Results]] = {
    "plain": plain,
    "plain again": plain,
    "no input gradient": no_input_gradient,
    "two forwards": two_forwards,
    "together": together,
    "retained": retained,
    "partial": partial,
    "one output": one_output,
    "accumulated": accumulated,
    "forsaken": forsaken,
    "evaluated": evaluated,
    "dry": dry,
    "hooked parameters": hooked_parameters,
    "hooked output": hooked_output,
    "checkpointed": checkpointed,
    "offloaded": offloaded,
    "frozen": frozen,
    "moved": moved,
    "replaced": replaced,
    "rescale": rescaled,
    "copied": copied,
    "threaded": threaded,
    "compiled autograd": compiled_autograd,
}
