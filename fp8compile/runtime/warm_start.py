"""What a later process needs of a graph whose code is in AOTAutograd's cache, and when it may have it.

A hit in that cache skips our passes. What they would have found (the report, the layout of the scaling state,
the graph that cold calls run) is in the same entry (`compat.aot_cache.Saved`). The entry's key has, beside
all that AOTAutograd knows of, a hash of the `facts` that our passes read elsewhere: names and classes of
modules, the description of the device. A graph about which not all facts are known for certain does not use
the cache.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from .. import compat
from ..errors import Unpicklable, Unusable
from ..frontend.inputs import Inputs
from ..logs import dump_dir, get_logger
from ..passes import pipeline
from ..passes.joint import Rewritten
from . import probe
from .inner import Inner
from .interpreter import boxed
from .pickled_graph import PickledNode, pickled, unpickled

logger = get_logger(__name__)


class Unknown(Exception):
    """A fact that has no certain spelling. Its text is the reason why a graph does not use the cache."""


@dataclass(frozen=True)
class Half:
    """One half of a graph whose calls may run eagerly, without its compiled code.

    `device`: the kind of device on which it runs. `inputs`: their names. `marker`: which output of a forward
    marks a call (`calls.marks`), and the name of that tensor."""

    device: str
    inputs: tuple[str, ...]
    marker: tuple[int, str] | None
    casts: Mapping[tuple[int, probe.Name], probe.CastKind]


@dataclass(frozen=True)
class Content:
    """What is kept of a half. `half`: None if it runs compiled only. `whole`: what the passes found in the
    graph of both halves; with the forward only."""

    half: Half | None
    steps: tuple[PickledNode, ...]
    whole: Rewritten | None


def packed(half: Half | None, graph: GraphModule | None, whole: Rewritten | None) -> bytes | None:
    """A half as bytes. None if it cannot be written."""
    try:
        return pickle.dumps(Content(half, pickled(graph.graph) if graph is not None else (), whole))
    except (Unpicklable, pickle.PicklingError, TypeError, AttributeError) as error:
        logger.debug(
            "fp8: the next process compiles this graph again, which cannot be written to a file: %s", error
        )
        return None


def unpacked(content: bytes | None) -> Content:
    """Raises Unusable if it is no half."""
    try:
        found = pickle.loads(content or b"")
    except Exception as error:
        raise Unusable(f"{type(error).__name__}: {error}") from error
    if not isinstance(found, Content):
        raise Unusable(f"a {type(found).__name__}")
    return found


def later(steps: tuple[PickledNode, ...], inner: Inner) -> Callable[..., Any]:
    """The interpreter of a pickled graph, which is made when a call first runs eagerly."""
    made = functools.cache(lambda: boxed(inner.eager(unpickled(steps))))
    return lambda args, mode: made()(args, mode)


def facts(
    gm: GraphModule, example_inputs: Sequence[Any], inputs: Inputs, others: Sequence[Any]
) -> str | None:
    """A hash of what our passes read of a Dynamo graph, its inputs and this process, beside the policy, but
    is not in AOTAutograd's key for certain. `others`: more of it. None: the graph must not use the cache."""
    if not compat.aot_cache.cache_is_on():
        return None
    try:
        if dump_dir() is not None or get_logger(pipeline.__name__).isEnabledFor(logging.DEBUG):
            raise Unknown("somebody wants to see the passes")
        if compat.process_groups.has_groups():
            raise Unknown("there are process groups")
        if inputs.inlined or inputs.resharded or inputs.groups:
            raise Unknown("compiled autograd or FSDP2 owns its inputs")
        _no_constants(gm)
        _no_symbols(gm)
        theirs = [compat.aot_cache.modules_of_nodes(gm), compat.aot_cache.modes()]
        known = [*theirs, _tensors(example_inputs), inputs, *others]
        return hashlib.sha256(_spelled(known).encode()).hexdigest()
    except Unknown as reason:
        logger.debug("fp8: %s does not use AOTAutograd's cache: %s", inputs.root, reason)
        return None


def _no_constants(gm: GraphModule) -> None:
    """AOTAutograd's key has no values of tensors that a graph holds."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            held = operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else None
            if node.op == "call_module" or (node.op == "get_attr" and not isinstance(held, GraphModule)):
                raise Unknown(f"the graph holds {node.target}")


def _no_symbols(gm: GraphModule) -> None:
    """Symbolic sizes have guards, which an entry would bring along."""
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (None,)
        if not all(type(size) is int for size in sizes):
            raise Unknown(f"the input {node.name} is no tensor, or a size of it is symbolic")


def _tensors(values: Sequence[Any]) -> list[Any]:
    """What is known of the inputs of a graph, and which of them share memory."""
    found: list[Any] = []
    memory: dict[int, int] = {}
    for x in values:
        if type(x) not in (torch.Tensor, torch.nn.Parameter, compat.FakeTensor) or x.layout != torch.strided:
            raise Unknown(f"an input is a {type(x).__name__}")
        sizes = (*x.shape, *x.stride(), x.storage_offset())
        place = memory.setdefault(compat.autograd.storage_of(x), len(memory))
        hooks = compat.aot_cache.has_hooks(x)
        facts = [sizes, x.dtype, x.device, x.requires_grad, x.is_leaf]
        found.append([*facts, isinstance(x, torch.nn.Parameter), place, hooks])
    return found


def _spelled(value: Any) -> str:
    """The same text for the same value in each process. Unknown for a value of which this is not certain."""
    if value is None or type(value) in (bool, int, float, str, torch.dtype, torch.device):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_spelled, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_spelled, value)))}}}"
    if isinstance(value, Mapping):
        return f"[{', '.join(f'{_spelled(key)}: {_spelled(x)}' for key, x in value.items())}]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        every = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return f"{type(value).__qualname__}{_spelled(every)}"
    raise Unknown(f"a {type(value).__name__} has no certain spelling")
