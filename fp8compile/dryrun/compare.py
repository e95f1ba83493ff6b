"""How far a training step in FP8 is from the same step in high precision: `compare` shows it by layer.

    print(fp8compile.compare(model, tokens, labels=labels))

The step (forward, loss, backward) runs eagerly, four times, with the same weights, batch and random numbers:

    in high precision       the reference: all matmuls as they are
    once more               whether the model is deterministic
    with noise              what bf16 costs: matmuls round as another kernel might (`observe.dithered`)
    in FP8                  with the options and the scaling state that the next training call would have

A model that trains in FP8 already is compared with its own scales: a copy of its scaling state is loaded into
the sandbox, as into a resumed run. A `Session` keeps its compiled graphs for the next comparison.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn

from .. import compat
from ..config.options import parse
from ..config.policy import Policy
from ..errors import Fp8CompileError, OptionError, one_line_where
from ..extension import active, features
from ..ir.records import FP8, HIGH_PRECISION
from ..logs import get_logger
from ..reporting.report import Report, report
from ..reporting.stats import table
from ..runtime.named_weights import named_weights, unwrapped
from ..runtime.parameters import find
from ..runtime.probe import Measurement
from .comparison import Comparison, assembled
from .observe import Tap, Watched, sums
from .sandbox import entry, inputs, modules_of, roots_of, taken, untouched

logger = get_logger(__name__)

Loss = Callable[[Any], Tensor]


def compare(
    model: Callable[..., Any],
    *args: Any,
    loss: Loss | None = None,
    options: Mapping[str, Any] | None = None,
    device: str | None = None,
    **kwargs: Any,
) -> Comparison:
    """Compare one training step of `model(*args, **kwargs)` in FP8 and in high precision. See `Comparison`.

    `model` is a module, a compiled module, or any function that calls modules; it has to be where it trains,
    not on the meta device. A model in eval mode is compared as in training. Call `compare` in the context of
    your step, such as autocast.

    `loss` takes what the model returns, and returns a scalar tensor. By default the model returns it itself:
    as a scalar tensor, as the attribute `loss`, as the key "loss", or as the only scalar in a tuple, a list
    or a dict. What `loss` itself changes is not restored.

    `options` are those of the backend (`strict` is ignored). By default they are those that the model was
    compiled with, if it has trained in FP8. Then FP8 has its scales, too; a model that has not is scaled by
    its current amaxes. `device` names the described device to decide for, e.g. "h100".

    Under DDP, a rank compares its own batch, whether or not the others call `compare`, too. `Comparison.rank`
    is that rank. Only a model that communicates itself (SyncBatchNorm) needs the call on all ranks.

    It takes four steps, run eagerly, the tracing of two graphs, and the memory of an eager step, of the
    results of all forward matmuls, and of all tensors that FP8 casts.

    Raises Fp8CompileError if the model refuses the batch, if its loss is not finite, or if no matmul becomes
    FP8; OptionError (a ValueError) for bad options, a loss that is none, parameters on the meta device,
    DTensors, and a model without a trained parameter; TypeError if `model` is no module and no function.
    """
    return Session(model, options, device).run(args, kwargs, loss)


@dataclass
class ComparedStep:
    """What one run of the step made. `gradients`: by parameter. `rows`: those of `stats`, of an FP8 run."""

    loss: float
    gradients: dict[str, Tensor]
    watched: Watched
    rows: list[dict[str, Any]]

    def error(self, test: ComparedStep, floor: Mapping[str, float] | None = None) -> float:
        """The error of the gradients of a test: the square root of the mean over all elements of |error|^2 /
        |gradient|^2, at most 1, where |.| is over one parameter, because Adam scales each parameter's update
        by its own gradient. `floor`: what is taken off these squares, by parameter."""
        total = elements = 0.0
        for name, gradient in self.gradients.items():
            count = int(torch.count_nonzero(gradient))  # not an embedding's rows that the batch lacks
            square = self.squared_error(test, name) - (floor or {}).get(name, 0.0)
            total += count * min(1.0, max(0.0, square))
            elements += count
        return math.sqrt(total / elements) if elements else 0.0

    def squared_error(self, test: ComparedStep, name: str) -> float:
        """|error|^2 / |gradient|^2 of a parameter; 1 where the gradient is not finite."""
        if name not in test.gradients:
            return 1.0
        signal, error, *_ = sums(self.gradients[name], test.gradients[name]).tolist()
        return 1.0 if not math.isfinite(error) else error / signal if signal > 0 else 0.0


class Session:
    """Compares steps of one model. Its graphs compile at the first step, and where Dynamo's guards ask."""

    def __init__(
        self,
        model: Callable[..., Any],
        options: Mapping[str, Any] | None = None,
        device: str | None = None,
        who: str = "compare",
    ):
        self.who = who  # begins the text of errors
        self.model = taken(model)
        if isinstance(self.model, nn.Module):
            self.model = unwrapped(self.model)  # of DDP, whose hooks would communicate
            self.name = compat.fsdp.class_name(type(self.model))
        else:
            self.name = getattr(self.model, "__name__", "model")
        self.given = (
            None if options is None else {name: value for name, value in options.items() if name != "strict"}
        )
        self.device = device
        self.tap = Tap()
        self.graphs: list[Any] = []
        self.report: Report | None = None
        self.steps: dict[str, Callable[..., Any]] = {}  # by precision, compiled
        self.codes: list[Any] = []
        self.compiled_with: dict[str, Any] | None = None
        self._options({})  # raises errors in the options here, without Dynamo's text around them

    def run(self, args: Any, kwargs: Any, loss: Loss | None = None, repeat: bool = True) -> Comparison:
        """Compare one step. `repeat`: take it once more to find out whether the model is deterministic."""
        step = self.taking(args, kwargs, loss)
        reference = step(HIGH_PRECISION, Watched())
        self.check_finite(reference)
        seen = reference.watched.kept
        again = step(HIGH_PRECISION, Watched(seen)) if repeat else None
        noisy = step(HIGH_PRECISION, Watched(seen, noise=True))
        fp8 = step(FP8, Watched(seen))
        assert self.report is not None
        if not fp8.watched.gemms:
            raise Fp8CompileError(
                f"compare: no matmul of {self.name} becomes FP8 ({self.report.summary()}), so there is "
                "nothing to compare; fp8compile.explain says why, and a policy can change it"
            )
        several = compat.process_groups.has_groups() and dist.get_world_size() > 1
        rank = dist.get_rank() if several else None
        return assembled(self.name, reference, again, noisy, fp8, rank)

    def taking(
        self, args: Any, kwargs: Any, loss: Loss | None = None
    ) -> Callable[[str, Watched | None], ComparedStep]:
        """A function that takes the step in one precision, with the options in `given`, as often as it is
        called. Without a `Watched` only loss and gradients are found."""
        modules = modules_of((self.model, args, kwargs))
        found = roots_of(modules)
        roots = {"" if len(found) == 1 else f"{i}.": root for i, root in enumerate(found)}  # by prefix
        weights: dict[str, Tensor] = {}
        for prefix, root in roots.items():
            weights |= {prefix + name: weight for name, weight in named_weights(root).items()}
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        if not trained:
            why = f"no parameter of {self.name} requires gradients"
            raise OptionError(f"{self.who}: {why}, so there is no step to {self.who}")
        check_places(weights, self.who)
        self._compile(self._options(weights))
        self.tap.names = {id(weight): name for name, weight in weights.items()}
        kept = [feature.keep(root) for root in roots.values() for feature in features()]
        bring_back = [again for again in kept if again is not None]

        def step(precision: str, watched: Watched | None) -> ComparedStep:
            seen, measurements = watched or Watched(), []
            with untouched(modules, self.codes), torch.enable_grad():
                for graph in self.graphs:
                    if hasattr(graph, "forget"):
                        graph.forget()
                for again in bring_back if precision == FP8 else ():
                    again()
                if precision == FP8 and watched is not None:
                    measurements = [
                        (prefix, root, Measurement(root).begin()) for prefix, root in roots.items()
                    ]
                self.tap.watched = watched
                try:
                    result = self.steps[precision](*inputs(args), **inputs(kwargs))
                    value = loss_of(result, loss, self.name, self.who)
                    gradients = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
                except Fp8CompileError:
                    raise
                except Exception as error:
                    why = f"{self.who}: {self.name} refuses this batch: {one_line_where(error)}"
                    raise Fp8CompileError(why) from error
                finally:
                    self.tap.watched = None
                if precision == FP8 and self.report is None:
                    self.report = report()
                named = [(prefix, row) for prefix, root, made in measurements for row in table(root, made)]
            pairs = zip(trained, gradients, strict=True)
            found = {name: grad.detach() for name, grad in pairs if grad is not None}
            seen.sources.clear()
            rows = [{**row, "name": prefix + row["name"]} for prefix, row in named]
            return ComparedStep(float(value.detach()), found, seen, rows)

        return step

    def check_finite(self, reference: ComparedStep) -> None:
        if not math.isfinite(reference.loss):
            raise Fp8CompileError(
                f"{self.who}: the loss of {self.name} is {reference.loss} in high precision on this batch, "
                "so there is nothing to compare FP8 with; use a batch with a finite loss"
            )

    def _options(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        options = dict(self.given or {})
        if self.given is None:
            records = [find(weight) for weight in weights.values()]
            every = [record.options for record in records if record.options is not None]
            if every:
                first = every[0]
                if any(one is not first and one.policy != first.policy for one in every):
                    text = "fp8: compare: parts of %s have other options; all are compared with the first"
                    logger.warning(text, self.name)
                options = {"policy": first.policy, **first.inductor}
        chosen = parse(options if self.device is None else {**options, "device": self.device})
        policy = chosen.policy
        if weights:  # of rules that decide at some steps only, those of the model's step
            policy = active(next(iter(weights.values())), policy, 0)
        return {"policy": _of_one_rank(policy), **chosen.inductor}

    def _compile(self, options: dict[str, Any]) -> None:
        if self.compiled_with == options:
            return
        self.compiled_with, self.graphs, self.report, self.steps, self.codes = options, [], None, {}, []
        from ..backend import fp8

        for precision in (HIGH_PRECISION, FP8):

            def backend(gm: Any, example_inputs: Any, precision: str = precision) -> Any:
                made = fp8(gm, example_inputs, options=options, inner=self.tap.inner(), only=precision)
                self.graphs.append(made)
                return made

            step = entry(self.model)
            self.codes.append(step.__code__)
            self.steps[precision] = torch.compile(step, backend=backend)


def _of_one_rank(policy: Policy) -> Policy:
    """The policy without `reduce_amax`, which waits for other ranks and changes no scale of this step."""

    def alone(settings: Any) -> Any:
        return dataclasses.replace(settings, reduce_amax=False) if settings.reduce_amax else settings

    recipes = {name: alone(recipe) for name, recipe in policy.recipes.items()}
    rules = tuple(map(alone, policy.rules))
    return dataclasses.replace(policy, defaults=alone(policy.defaults), rules=rules, recipes=recipes)


def check_places(tensors: Mapping[str, Tensor], who: str) -> None:
    """OptionError for parameters without values here."""
    for name, tensor in tensors.items():
        if tensor.device.type == "meta":
            raise OptionError(
                f"{who}: {name} is on the meta device, and a step needs values; explain works without them"
            )
        kind = "a DTensor (fully_shard, tensor parallelism)" if hasattr(tensor, "placements") else ""
        kind = "a part of a flat parameter (FSDP1)" if compat.flat.is_flattened(tensor) else kind
        if kind:
            raise OptionError(
                f"{who}: {name} is {kind}, whose step needs all ranks; {who} the model on one "
                "device, before it is sharded"
            )


def _is_loss(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() == 1 and x.requires_grad


def loss_of(result: Any, loss: Loss | None, name: str, who: str) -> Tensor:
    """The loss of what a model returned; OptionError if that is none."""
    found: Any
    if loss is not None:
        found, source = loss(result), "loss(output) returned"
    elif isinstance(result, Tensor):
        found, source = result, f"{name} returned"
    else:
        found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
        source = f"{name} returned"
        if found is None:
            found = result
        else:
            source += f" {type(result).__name__} whose loss is"
        scalars = [leaf for leaf in pytree.tree_leaves(found) if _is_loss(leaf)]
        found = scalars[0] if len(scalars) == 1 else found
    if _is_loss(found):
        return found.reshape(())
    what = type(found).__name__
    if isinstance(found, Tensor):
        what = f"a tensor {list(found.shape)}" + ("" if found.requires_grad else " without a gradient")
    wanted = "it has to return a scalar tensor"
    if loss is None:
        wanted = "give loss= (--loss), such as lambda out: out[1]"
    raise OptionError(f"{who} needs a scalar loss, but {source} {what}: {wanted}")
