"""Regions of Dynamo graphs, compiled once and called often (`torch.compiler.nested_compile_region`)."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .dynamo import source_name

OWNED = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


def inline_regions(gm: GraphModule) -> None:
    """Put each region without options of its own in place of its calls, in `gm` and graphs inside of it.

    All calls of a region share one graph, which was traced for the first of them, and has that one's module
    paths. In another call, nodes get the paths that its parameters tell, or none."""
    graphs = list(dict.fromkeys(module for module in gm.modules() if isinstance(module, GraphModule)))
    paths = _paths(gm, graphs)
    for module in reversed(graphs):  # the inner ones first
        first: dict[GraphModule, Sequence[Any]] = {}  # the arguments of its first call
        calls = module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
        for call in calls:
            region = _held(module, call.args[0])
            if "nested_region_config" not in {*region.meta, *(call.meta.get("custom") or ())}:
                _inline(module, call, region, _moved(first.setdefault(region, call.args), call.args, paths))
        if first:
            module.graph.eliminate_dead_code()
            module.recompile()


def _inline(gm: GraphModule, call: Node, region: GraphModule, moved: tuple[str, str] | None) -> None:
    """`moved`: how module paths change: what they begin with, and will."""
    copies: dict[Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
    inner = [node for node in region.graph.nodes if node not in copies and node.op != "output"]
    with gm.graph.inserting_before(call):
        outputs: Any = gm.graph.graph_copy(region.graph, copies)
    for copy in (copies[node] for node in inner):
        if copy.op == "get_attr":
            held, copy.target = _held(region, copy), f"{call.name}_{str(copy.target).replace('.', '_')}"
            setattr(gm, copy.target, held)
        elif moved is None:
            copy.meta.pop("nn_module_stack", None)
        elif "nn_module_stack" in copy.meta:
            stack = copy.meta["nn_module_stack"].items()
            copy.meta["nn_module_stack"] = {key: (_path(path, *moved), cls) for key, (path, cls) in stack}
    for user in list(call.users):
        user.replace_all_uses_with(outputs[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(call)


def _held(gm: GraphModule, node: Any) -> Any:
    return operator.attrgetter(str(node.target))(gm)


def _paths(gm: GraphModule, graphs: Sequence[GraphModule]) -> dict[Node, list[str]]:
    """The path of each parameter and buffer that is an input of one of these graphs, the outer ones first."""
    sources = [(node, source_name(node)) for node in gm.graph.find_nodes(op="placeholder")]
    paths = {node: OWNED.sub(r".\1", source).split(".") for node, source in sources if OWNED.search(source)}
    for module in graphs:
        for call in module.graph.find_nodes(op="get_attr"):
            held = _held(module, call)
            for user in call.users if isinstance(held, GraphModule) else ():
                inner = held.graph.find_nodes(op="placeholder")
                pairs = zip(reversed(inner), reversed(user.args), strict=False)  # before: what is called
                paths.update((a, paths[b]) for a, b in pairs if b in paths and a not in paths)
    return paths


def _moved(first: Sequence[Any], call: Sequence[Any], paths: dict[Node, list[str]]) -> tuple[str, str] | None:
    """What the paths of the parameters of two calls of a region begin with, up to the last part that differs.
    None if that is not one pair for all."""
    pairs = set()
    for a, b in ((paths[x], paths[y]) for x, y in zip(first, call, strict=True) if x in paths and y in paths):
        while a and b and a[-1] == b[-1]:
            a, b = a[:-1], b[:-1]
        pairs |= {(".".join(a), ".".join(b))} if a != b else set()
    return pairs.pop() if len(pairs) == 1 else None if pairs else ("", "")


def _path(path: str, before: str, after: str) -> str:
    return after + path.removeprefix(before) if f"{path}.".startswith(f"{before}.") else path
