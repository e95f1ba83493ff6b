"""Facts that only a Dynamo graph holds, no joint graph: names of parameters, and whether a model trains."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from .. import compat
from ..config.policy.match import Position
from ..errors import OptionError

TEXT = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""  # a string, as Python writes it
KEY = rf"\[{TEXT}\]"
PART = re.compile(rf"\._(?:modules|parameters|buffers){KEY}")
OWNED = re.compile(rf"\._(?:parameters|buffers){KEY}$")
MODULES = re.compile(rf"\.(?:_modules|__dict__\['_modules'\]){KEY}")
ENTRY = re.compile(rf"^[LG]\['\w+'\].*{KEY}$")  # an entry of a dict
WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)(?:\.|$)")
ROOT = re.compile(rf"^[LG]{KEY}")
# of a decorated forward, whose wrapper takes *args: transformers has these
SELF = re.compile(r"^L\['args'\]\[0\](?=\.|$)")
GETATTR = re.compile(rf"getattr\(([^()]*), {TEXT}\)")
# a function's self, closure cells and defaults, and a `forward` that a host replaced: no part of a name
BOUND = re.compile(
    r"(?:\.forward)?(?:\.(?:func|__func__|__wrapped__))*"
    r"\.(?:__self__\b|__closure__\[\d+\]\.cell_contents|__(?:kw)?defaults__\[[^\]]*\])"
)
ITEM = re.compile(rf"{KEY}|\[(\d+)\]")


def readable(source: str) -> str:
    """`L['self']._modules['up']._parameters['weight']` -> `up.weight`; `L['w']` -> `w`; `L['ws'][0]` ->
    `ws.0`; `L['weights']['up.weight']` -> `up.weight`; any other source is returned unchanged."""
    parts = PART.findall(source)
    if parts:
        return plain(".".join(map(ast.literal_eval, parts)))
    found = ROOT.match(source)
    if found is None:
        return source
    keys = [ast.literal_eval(key) for key, _ in ITEM.findall(source) if key]
    if source.endswith("]") and "." in keys[-1]:  # in a dict of a model's parameters
        return plain(keys[-1])
    name = keys[0] + _dotted(source[found.end() :])
    return plain(name.removeprefix("self.")) if re.fullmatch(r"[\w.-]+", name) else source


def plain(name: str) -> str:
    """A module's or parameter's name without the wrappers of checkpointing, FSDP and torch.compile."""
    return WRAPPERS.sub("", name).rstrip(".")


def readable_module(path: str) -> str:
    """The name of a module in a `nn_module_stack` path; '' for the root.

    `L['self'].layers.0` -> `layers.0`; `L['self']._modules['up']` -> `up`;
    `getattr(G['model'].layers, '0')` -> `layers.0`; `G['models']['teacher'].up` -> `teacher.up`.
    """
    before = ""
    while path != before:  # from the inside out
        before, path = path, GETATTR.sub(lambda found: f"{found[1]}.{ast.literal_eval(found[2])}", path)
    return plain(_dotted(ROOT.sub("", SELF.sub("L['self']", path))).lstrip("."))


def _dotted(path: str) -> str:
    """The part of a path after the variable, with a dot before each step."""
    path = MODULES.sub(lambda found: f".{ast.literal_eval(found[1])}", BOUND.sub("", path))
    return ITEM.sub(lambda found: "." + (str(ast.literal_eval(found[1])) if found[1] else found[2]), path)


@dataclass(frozen=True)
class Inputs:
    """The inputs of one Dynamo graph, by position. Holds no tensor: it lives as long as the compiled code."""

    names: tuple[str, ...]
    weights: frozenset[int]  # positions of the inputs that may be weights: parameters, buffers, `leaves`
    devices: frozenset[torch.device]
    parameters: frozenset[int]  # those weights that are parameters
    leaves: frozenset[int]  # those weights that are plain tensors, from a dict that takes parameters' place
    evaluated: frozenset[int]  # those weights whose root module is in eval mode
    training: bool  # some root module is in training mode (True for a graph of a bare function)
    grad: bool  # grad mode is on, and something may require gradients
    root: str  # the graph's name in a report
    root_class: str  # the class of its root module, "" if it has none or several
    modules: dict[str, str]  # module name -> class name, for all modules of the roots
    containers: dict[str, tuple[int, ...]]  # repeated blocks: "layers." -> (0, 1) for layers.0, layers.1
    parameter_names: frozenset[str]  # all parameters of the roots
    matrices: tuple[str, ...]  # 2-D parameters that are no embedding tables, in the order of the roots
    last: frozenset[int]  # weights after all matrices of the model that this graph does not read
    rest: bool  # the model has matrices that this graph does not read
    whole: bool  # the graph reads every parameter of the roots
    part: bool  # the roots are inside of a compiled module whose own graph breaks
    differentiates: bool = False  # the graph computes gradients itself
    inlined: bool = False  # compiled autograd takes over the backward
    resharded: frozenset[int] = frozenset()  # parameters that FSDP frees after forward, and gathers again
    packed: frozenset[int] = frozenset()  # parameters that are views of a flat one of FSDP1
    # names of the parameters that FSDP2 is to gather in FP8, if it can
    gathered: Mapping[int, str] = field(default_factory=dict)
    frozen: frozenset[int] = frozenset()  # parameters that are, or may be, kept in FP8 only
    # process groups by dimension of the meshes that weights live on
    groups: Mapping[str, str] = field(default_factory=dict)
    # "layers.2." of a part of a larger model (see `owner`): names here are those in the model, described by
    # `modules`, `containers` and `matrices`; `around`: the classes of the modules that call the part
    prefix: str = ""
    around: tuple[str, ...] = ()
    # of each weight's matmuls, in the graph that DDP has cut into parts
    kinds: Mapping[str, tuple[str, ...]] | None = None

    def named(self, path: str) -> str:
        """The name in the model of a module that the graph knows by this one ("": the root)."""
        return (self.prefix + path).rstrip(".")

    def block(self, name: str) -> Position | None:
        """(position of the block that `name` is in, number of blocks); None outside of blocks. The blocks are
        the modules of the outermost container that has several, named by number as in `layers.0`, and that is
        a ModuleList or has modules of one class only."""
        parts = name.split(".")
        for i, part in enumerate(parts):
            if part.isdecimal():
                numbers = self.containers.get("".join(f"{x}." for x in parts[:i]), ())
                if int(part) in numbers:
                    return numbers.index(int(part)), len(numbers)
        return None


def containers(modules: dict[str, str]) -> dict[str, tuple[int, ...]]:
    """The `containers` of an `Inputs`. `modules`: module name -> class name, "" for the root."""
    children: dict[str, dict[int, str]] = {}
    for name, cls in modules.items():
        owner, dot, last = name.rpartition(".")
        if last.isdecimal():
            children.setdefault(owner + dot, {})[int(last)] = cls
    found = {}
    for owner, classes in children.items():
        alike = len({*classes.values()}) == 1 or modules.get(owner.rstrip(".")) == "ModuleList"
        if len(classes) > 1 and alike:
            found[owner] = tuple(sorted(classes))
    return found


def module_classes(modules: Iterable[nn.Module]) -> dict[str, str]:
    """Name -> class name of all modules inside of these, "" for the modules themselves."""
    named = [(name, part) for module in modules for name, part in module.named_modules()]
    return {plain(name): compat.fsdp.class_name(type(part)) for name, part in named}


def names_of(modules: Sequence[nn.Module]) -> dict[str, Any]:
    """The fields of an `Inputs` that describe whole models."""
    parts, matrices = module_classes(modules), _matrices(modules)
    owned = _owned(modules)
    return {
        "modules": {name: kind for name, kind in parts.items() if name},
        "parameter_names": frozenset(owned),
        "containers": containers(parts),
        "matrices": tuple(name for name, p in owned.items() if id(p) in matrices),
    }


def _owned(modules: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    return {plain(name): p for module in modules for name, p in module.named_parameters()}


def _matrices(modules: Sequence[nn.Module]) -> set[int]:
    """The ids of the 2-D parameters that are no embedding tables."""
    parts = [part for module in modules for part in module.modules()]
    tables = {id(part.weight) for part in parts if isinstance(part, nn.Embedding)}
    shapes = {key: shape for module in modules for key, shape in compat.flat.shapes(module).items()}
    parameters = [p for module in modules for p in module.parameters()]
    return {id(p) for p in parameters if len(shapes.get(id(p), p.shape)) == 2} - tables


def roots(gm: GraphModule, packed: Collection[int]) -> list[nn.Module]:
    """The modules through which a compiled frame reaches its weights."""
    return distinct(compat.dynamo.root_modules(gm, packed))


def distinct(found: Mapping[int, tuple[nn.Module, Any]]) -> list[nn.Module]:
    """Each of the modules once that `compat.dynamo.root_modules` has found."""
    return list({id(module): module for module, _ in found.values()}.values())


def unchosen(models: Iterable[nn.Module], choose: Callable[[nn.Module, str], Any]) -> list[str]:
    """The matrices of the modules of which `choose(module, name)` is false. OptionError if it raises."""
    found = []
    for root in models:
        shapes = compat.flat.shapes(root)
        for path, module in root.named_modules():
            name = plain(path)
            given = module.named_parameters(recurse=False)
            own = [key for key, p in given if len(shapes.get(id(p), p.shape)) > 1]
            try:
                kept = bool(own) and not choose(module, name)
            except Exception as error:
                what = f"the policy function raises {error!r} for {name!r}, a {type(module).__name__}"
                raise OptionError(what) from error
            found += [f"{name}.{key}".lstrip(".") for key in own if kept]
    return found


def capture(gm: GraphModule, inputs: Sequence[Any]) -> Inputs:
    """Read a Dynamo graph's inputs. Adds a guard on `training` of the modules in it."""
    names, weights, parameters, leaves = [], set(), set(), set()
    packed = compat.flat.packed(inputs)
    for i, (placeholder, real) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)):
        source = compat.dynamo.source_name(placeholder)
        source = re.sub(r"\.(\w+)$", r"._parameters['\1']", source) if i in packed else source
        names.append(readable(source) or placeholder.name)
        if isinstance(real, nn.Parameter) or (isinstance(real, torch.Tensor) and OWNED.search(source)):
            weights.add(i)
        if isinstance(real, nn.Parameter) or i in packed:
            parameters.add(i)
        elif isinstance(real, torch.Tensor) and real.requires_grad and real.is_leaf and ENTRY.match(source):
            leaves.add(i)
    leaves -= leaves if parameters else weights  # beside parameters, plain tensors are ordinary inputs
    weights |= leaves
    found = compat.dynamo.root_modules(gm, packed)
    for source in {id(module): source for module, source in found.values()}.values():
        compat.dynamo.guard_attribute(source, "training")
    modules = distinct(found)
    owned = _owned(modules)
    classes = list(dict.fromkeys(compat.fsdp.class_name(type(module)) for module in modules))
    last, rest = _last(found, names)
    return Inputs(
        names=tuple(names),
        weights=frozenset(weights),
        devices=frozenset(x.device for x in inputs if isinstance(x, torch.Tensor)),
        parameters=frozenset(parameters),
        leaves=frozenset(leaves),
        evaluated=frozenset(i for i, (module, _) in found.items() if not module.training),
        training=not modules or any(module.training for module in modules),
        grad=torch.is_grad_enabled(),
        root=", ".join(classes) or "function",
        root_class=classes[0] if len(classes) == 1 else "",
        **names_of(modules),
        last=frozenset(weights - {i for i in found if i not in last}),
        rest=rest,
        whole=bool(owned) and set(owned) <= set(names),
        part=any(map(compat.dynamo.is_part, modules)),
        differentiates=compat.dynamo.differentiates(gm),
        inlined=compat.autograd.compiled_autograd(),
        resharded=compat.fsdp.resharded(inputs) | compat.flat.freed(inputs),
        packed=packed,
        groups=compat.process_groups.mesh_groups(inputs[i] for i in weights),
    )


def _last(roots: Mapping[int, tuple[nn.Module, Any]], names: Sequence[str]) -> tuple[set[int], bool]:
    """The weights of `roots`, as inputs, that come after every matrix of the model that this graph does not
    read; and whether there are such matrices. The model: each root with the modules around it that are being
    called, in their order."""
    read: dict[int, list[int]] = {}  # by the identity of a parameter
    order: dict[int, int] = {}
    matrices: set[int] = set()
    for module in distinct(roots):
        whole = compat.dynamo.outermost(module)
        matrices |= _matrices([whole])
        for p in whole.parameters():
            order.setdefault(id(p), len(order))
        own = {plain(name): p for name, p in module.named_parameters(remove_duplicate=False)}
        for i in (i for i, (root, _) in roots.items() if root is module and names[i] in own):
            read.setdefault(id(own[names[i]]), []).append(i)
    unread = [order[p] for p in matrices if p not in read]
    end = max(unread, default=-1)
    return {i for p, found in read.items() for i in found if order.get(p, -1) > end}, bool(unread)
