"""The model that a compiled module is a part of: rules, reports and statistics use the names in that model.

    for block in model.layers:
        block.compile(backend="fp8", options={"exclude": ["layers.0"]})    # its own names are "proj", ...

The model is the outermost module whose forward is under way, if it calls several compiled parts. Blocks are
such parts (`layers.0`), and so is what Dynamo compiles by itself where the graph of a compiled module breaks.
A compiled module that is called by a wrapper (for the loss, say) is the model itself. Where the loop over the
blocks is in a function, nothing is known of the model.

One graph serves all blocks that the rules treat alike. Dynamo tells the others apart by an attribute,
`PLACE`, which each module of the block's class gets here, and on which the graph has a guard. It is a plain
string: no parameter, buffer or submodule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from torch.fx import GraphModule

from .. import compat, process
from .inputs import Inputs, distinct, module_classes, names_of, plain, roots

PLACE = "_fp8compile_place"


class ModelPart(NamedTuple):
    """A module's model, and its name there: "" if it is the model."""

    model: nn.Module
    name: str


class _Seen(WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], str]]):
    """The places of modules when their models called them: an eager checkpoint calls them in backward."""


def place_of(module: nn.Module) -> ModelPart:
    """The place of a compiled module that is being called."""
    outer, seen = compat.dynamo.outermost(module), process.of(_Seen)
    if outer is module:
        reference, name = seen.get(module, (lambda: None, ""))
        model = reference()
        return ModelPart(model, name) if model is not None else ModelPart(module, "")
    found = _within(outer, module)
    seen[module] = weakref.ref(found.model), found.name
    return found


def _within(outer: nn.Module, module: nn.Module) -> ModelPart:
    path = next(name for name, part in outer.named_modules() if part is module).split(".")
    halves = [(".".join(path[:i]), plain(".".join(path[i:]))) for i in range(len(path))]
    around = [ModelPart(outer.get_submodule(before), after) for before, after in halves]
    inside = max((i + 1 for i, place in enumerate(around) if compat.autograd.is_ddp(place.model)), default=0)
    around = [place for place in around[inside:] if place.name]
    if not around:
        return ModelPart(module, "")  # the model itself, in a wrapper
    whole = next((place for place in around if compat.autograd.is_compiled_itself(place.model)), None)
    if whole is not None:
        return whole
    numbered = any(part.isdecimal() for part in around[0].name.split("."))
    return around[0] if numbered or _has_others(around[0].model, module) else ModelPart(module, "")


def _has_others(model: nn.Module, module: nn.Module) -> bool:
    """True if other parts of a model are compiled, too."""
    mine = set(module.modules())
    others = filter(compat.autograd.is_compiled_itself, model.modules())
    return any(other not in mine and module not in set(other.modules()) for other in others)


def in_model(gm: GraphModule, inputs: Inputs) -> Inputs:
    """`inputs` with the names and positions of the graph's only root in its model."""
    found = compat.dynamo.root_modules(gm, inputs.packed)
    modules = distinct(found)
    model, name = place_of(modules[0]) if len(modules) == 1 else (None, "")
    if model is None or not name:
        return inputs
    prefix = f"{name}."
    names = tuple(prefix + each if i in found else each for i, each in enumerate(inputs.names))
    around = _around(module_classes([model]), name)
    return replace(inputs, prefix=prefix, around=around, names=names, **names_of([model]))


def models_of(gm: GraphModule, inputs: Inputs) -> list[nn.Module]:
    """The models whose names `inputs` has."""
    modules = roots(gm, inputs.packed)
    return [place_of(module).model for module in modules] if inputs.prefix else modules


def tell_apart(gm: GraphModule, inputs: Inputs, treatment: Callable[[Inputs, list[str]], str]) -> None:
    """Compile again for modules of the root's class that the rules treat in another way. `treatment`: of a
    module, by the inputs that it would have, and the names of its modules and parameters in its model."""
    if not treatment(inputs, []):
        return
    found = compat.dynamo.root_modules(gm, inputs.packed)
    if len(distinct(found)) != 1:
        return
    *_, (module, source) = found.values()
    model = place_of(module).model if inputs.prefix else module
    classes = module_classes([model])
    for name, part in model.named_modules():
        if type(part) is type(module):
            own = [plain(each) for each, _ in (*part.named_modules(), *part.named_parameters())]
            prefix = f"{plain(name)}." if plain(name) else ""
            here = replace(inputs, prefix=prefix, around=_around(classes, plain(name)))
            vars(part)[PLACE] = treatment(here, [(prefix + each).rstrip(".") for each in own])
    compat.dynamo.guard_attribute(source, PLACE)


def _around(classes: Mapping[str, str], name: str) -> tuple[str, ...]:
    """The classes of the modules around one, which call it, from the inside out."""
    parts = name.split(".") if name else []
    found = (classes.get(".".join(parts[:i]), "") for i in reversed(range(len(parts))))
    return tuple(kind for kind in found if kind not in ("", "ModuleList", "ModuleDict"))


def place_at_call(kind: str) -> ModelPart | None:
    """The place of the innermost module of this class that is being called; None if there is none. What is
    compiled may be a wrapper of it, such as one for checkpointing. In torch 2.11 `kind` is the wrapper."""
    for module in compat.dynamo.called(compat.dynamo.CALLS) if kind else ():
        inner = _unwrapped(module)
        if kind in (compat.fsdp.class_name(type(inner)), compat.fsdp.class_name(type(module))):
            return place_of(inner)
    return None


def _unwrapped(module: nn.Module) -> nn.Module:
    inner = next((part for name, part in module._modules.items() if not plain(name)), None)
    return module if inner is None else _unwrapped(inner)
