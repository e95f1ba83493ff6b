"""A block that is compiled by itself has a place in its model, where rules may count blocks or layers.

    for block in model.blocks:
        block.compile(backend="fp8", options={"policy": "conservative"})  # rules for the first and last block

One graph serves all blocks that the rules treat alike. Dynamo tells the others apart by an attribute,
`PLACE`, which each module of the block's class gets here, and on which the graph has a guard. It is a plain
string: no parameter, buffer or submodule.

The owner is the outermost module whose forward is under way when the block is compiled. Where that is the
block itself (the loop over the blocks is in a function), nothing is known of other blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch.fx import GraphModule

from .. import compat
from .inputs import Inputs, Position, containers, matrices, module_classes, plain

PLACE = "_fp8compile_place"

# (positions of the blocks, positions of the layers) of a module -> what the rules make of them
Judge = Callable[[Sequence[Position | None], Sequence[Position]], str]


def in_owner(gm: GraphModule, inputs: Inputs, judge: Judge) -> Inputs:
    """`inputs` with the place of the graph's only root module in the model that owns it."""
    found = compat.dynamo.root_modules(gm, inputs.packed).values()
    roots = {id(module): (module, source) for module, source in found}
    if len(roots) != 1:
        return inputs
    ((root, source),) = roots.values()
    owner = compat.dynamo.outermost(root)
    if not any(plain(name) for name, module in owner.named_modules() if module is root):
        return inputs  # the model itself, perhaps in a wrapper
    names = matrices([owner])
    whole = replace(inputs, containers=containers(module_classes([owner])), matrices=names)
    place = inputs
    for name, module in owner.named_modules():
        if type(module) is not type(root):
            continue
        here = replace(whole, prefix=f"{plain(name)}.")
        mine = [(i, each) for i, each in enumerate(names) if each.startswith(here.prefix)]
        blocks = [here.block(each.removeprefix(here.prefix)) for _, each in mine]
        vars(module)[PLACE] = judge(blocks, [(i, len(names)) for i, _ in mine])
        place = here if module is root else place
    if place is not inputs:
        compat.dynamo.guard_attribute(source, PLACE)
    return place
