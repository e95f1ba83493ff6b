"""Graphs that break a rule of `passes.specification`: each is an error that names the pass, the node and the
rule."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map

from fp8compile.errors import Fp8CompileError
from fp8compile.ir import grouped, merged, ops
from fp8compile.ir.fx_utils import fakes
from fp8compile.passes import specification
from fp8compile.passes.specification import RULES, STAGES, check
from tests.support import hooks
from tests.support.harness import noise
from tests.support.models import Mlp, SwiGlu, make

E4M3, E5M2, WIDE = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32
BF16, INT = torch.bfloat16, torch.int32


@functools.cache
def written(recipe: str) -> Graph:
    """The joint graph of a small model, as our passes leave it."""
    torch._dynamo.reset()
    with hooks.joint_graphs(lambda graph: copied(graph)) as graphs, hooks.traced():
        torch.compile(make(Mlp), backend="fp8", options={"recipe": recipe})(noise(128, 128)).sum().backward()
    return graphs[-1]


def copied(graph: Graph) -> Graph:
    made = Graph()
    made.output(made.graph_copy(graph, {}))
    return made


def first(graph: Graph, target: Any) -> Node:
    return graph.find_nodes(op="call_function", target=target)[0]


def valued(index: int | None = None, **change: Any) -> Callable[[Node], None]:
    """Let a node, or an input of the graph in the place of one of its arguments, have another value."""

    def mutate(node: Node) -> None:
        if index is not None:
            node.update_arg(index, placeholder(node.graph, node.args[index].meta["val"]))
        changed = node if index is None else node.args[index]
        value = changed.meta["val"]
        value = value.new_empty(change.get("shape", value.shape), dtype=change.get("dtype", value.dtype))
        changed.meta["val"] = value.as_strided(value.shape, change.get("stride", value.stride()))

    return mutate


def placeholder(graph: Graph, value: torch.Tensor) -> Node:
    with graph.inserting_before(next(iter(graph.nodes), None)):
        node = graph.placeholder("x")
    node.meta["val"] = value
    return node


def given(index: int, value: Any) -> Callable[[Node], None]:
    return lambda node: node.update_arg(index, value)


def tagged(key: str, value: Any, of_reader: bool = False) -> Callable[[Node], None]:
    return lambda node: (next(iter(node.users)) if of_reader else node).meta.update({key: value})


TENSORWISE = [
    ("amaxes are float32, of floats", ops.amax, valued(dtype=BF16)),
    ("amaxes are float32, of floats", ops.amax, valued(0, dtype=E4M3)),
    ("a float matrix is cast", ops.quantize_both, valued(0, dtype=E4M3)),
    ("a float matrix is cast", ops.quantize, valued(0, shape=(2, 64, 128))),
    ("a cast has one float32 scale", ops.quantize, valued(1, shape=(2,))),
    ("a cast has one float32 scale", ops.quantize_both, valued(1, dtype=BF16)),
    ("a cast saturates", ops.quantize, given(2, torch.int8)),
    ("a cast saturates", ops.quantize_both, given(3, 1e9)),
    ("a copy is", ops.quantize, valued(shape=(128, 144))),
    ("a copy is", ops.quantize, valued(dtype=torch.float8_e4m3fnuz)),
    ("a copy is", ops.quantize, valued(shape=(128, 128), stride=(1, 128))),
    ("operands are FP8", ops.scaled_mm, valued(0, dtype=BF16)),
    ("operands have one K", ops.scaled_mm, valued(1, shape=(256, 144))),
    ("operands are K-major", ops.scaled_mm, valued(1, stride=(1, 512))),
    ("floats of its dtype", ops.scaled_mm, valued(dtype=BF16)),
    ("floats of its dtype", ops.scaled_mm, given(5, E4M3)),
    ("a product is [M, N]", ops.scaled_mm, valued(shape=(128, 255))),
    ("a bias is [N]", ops.scaled_mm, valued(4, shape=(1, 256))),
    ("inverses are float32", ops.scaled_mm, valued(2, shape=(128, 1))),
]
BLOCKWISE = [
    ("amaxes are float32, of floats", ops.amax_blocks, valued(dtype=BF16)),
    ("scales are float32, one each", ops.current_scale, valued(shape=(1, 1))),
    ("scales are float32, one each", ops.inverse, valued(dtype=BF16)),
    ("a cast has one float32 scale", ops.quantize_both, valued(4, shape=(1, 1))),
    ("inverses are float32", ops.block_mm, valued(2, shape=(1, 128))),
    ("inverses are float32", ops.block_mm, given(8, [128, 64])),
    ("reads the scales of forward", ops.current_scale, tagged("recompute", None)),
    ("reads the scales of forward", ops.inverse, tagged("recompute", None)),
]
ROWS = [("tensorwise", *row) for row in TENSORWISE] + [("blockwise", *row) for row in BLOCKWISE]


@pytest.mark.parametrize(("recipe", "says", "target", "mutate"), ROWS)
def test_a_joint_graph_that_breaks_a_rule(
    recipe: str, says: str, target: Any, mutate: Callable[[Node], None]
) -> None:
    graph = copied(written(recipe))
    refused_after(graph, first(graph, target), mutate, says)


def refused_after(graph: Graph, node: Node, mutate: Callable[[Node], None], says: str) -> None:
    """A joint graph is refused once a node of it is changed, by a rule that says so."""
    check(graph, "reduce_current", "reduce_current")
    mutate(node)
    with pytest.raises(Fp8CompileError, match=f"pass 'layouts': .*{re.escape(says)}.*fp8compile.*report"):
        check(graph, "reduce_current", "layouts")


def called(target: Any, *given: Any) -> Node:
    """A graph with one of our operators; tensors among the arguments are inputs."""
    graph, args = Graph(), []
    for x in given:
        args.append(tree_map(lambda y: placeholder(graph, y) if isinstance(y, torch.Tensor) else y, x))
    node = graph.call_function(target, tuple(args))
    node.meta.update(val=fakes.get(target, target)(*given))
    graph.output(node)
    return node


def of(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype)


def parts(index: int, **change: Any) -> Callable[[Node], None]:
    return lambda node: valued(**change)(node.args[0][index])


ROUTED = of(BF16, 32, 8), of(INT, 2), of(INT, 64), of(INT, 4)
STACKED = of(E4M3, 32, 16), of(E4M3, 2, 8, 16), of(WIDE, 1), of(WIDE, 1), of(INT, 2)
SINGLE = [
    (ops.transposed, (of(E4M3, 24, 32),), "turned and padded", valued(shape=(32, 24))),
    (ops.transposed, (of(E4M3, 24, 32),), "turned and padded", valued(0, dtype=BF16)),
    (ops.dequantize, (of(E4M3, 8, 8), of(WIDE, 1), BF16), "FP8 becomes floats", valued(1, shape=(2,))),
    (ops.dequantize, (of(E4M3, 8, 8), of(WIDE, 1), BF16), "FP8 becomes floats", valued(0, dtype=BF16)),
    (ops.gather, ([of(WIDE, 1), of(WIDE, 1)],), "float32 vectors", parts(1, dtype=BF16)),
    (merged.largest, ([of(WIDE, 1), of(WIDE, 1)],), "float32 vectors", valued(shape=(1, 1))),
    (merged.least, ([of(WIDE, 1), of(WIDE, 1)],), "float32 vectors", parts(0, shape=())),
    (merged.side_by_side, ([of(E4M3, 8, 8), of(E4M3, 8, 8)], 0), "one FP8 format", parts(1, dtype=E5M2)),
    (merged.side_by_side, ([of(E4M3, 8, 8), of(E4M3, 8, 8)], 1), "one FP8 format", valued(dtype=BF16)),
    (merged.both_sides, ([of(E4M3, 8, 8)], [of(E4M3, 8, 8)]), "one FP8 format", parts(0, dtype=E5M2)),
    (grouped.group_order, (of(INT, 2), 32, 16), "int32", valued(0, dtype=torch.int64)),
    (grouped.group_amax, ROUTED, "amaxes are float32", valued(dtype=BF16)),
    (grouped.of_groups, (of(WIDE, 2, 8), of(INT, 4)), "float32", valued(0, dtype=BF16)),
    (
        grouped.grouped_mm,
        (*STACKED, BF16, True, [0, 0], [0, 0]),
        "ends of groups are int32",
        valued(4, dtype=torch.int64),
    ),
]


@pytest.mark.parametrize(("target", "args", "says", "mutate"), SINGLE)
def test_an_operator_that_breaks_a_rule(
    target: Any, args: tuple, says: str, mutate: Callable[[Node], None]
) -> None:
    refused_alone(called(target, *args), mutate, says)


def refused_alone(node: Node, mutate: Callable[[Node], None], says: str) -> None:
    """A partitioned graph of one operator is refused once that is changed."""
    check(node.graph, "partitioned", "save")
    mutate(node)
    with pytest.raises(Fp8CompileError, match=f"pass 'save': .*{says}"):
        check(node.graph, "partitioned", "save")


BOTH = of(BF16, 16, 16), of(WIDE, 1), E4M3, 448.0
ON_META = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in BOTH]


@pytest.mark.parametrize(
    ("stage", "target", "args"),
    [
        ("joint", ops.amax, BOTH[:1]),
        ("quantize", ops.quantize_both, BOTH),
        ("substitute", merged.least, ([of(WIDE, 1)],)),
        ("layouts", ops.gather, ([of(WIDE, 1)],)),
        ("split_casts", ops.quantize_both, ON_META),
        ("lower", ops.inverse, (of(WIDE, 1),)),
    ],
)
def test_an_operator_has_its_stages(stage: str, target: Any, args: Sequence[Any]) -> None:
    node = called(target, *args)
    check(node.graph, "partitioned", "save")
    with pytest.raises(Fp8CompileError, match=f"a graph of stage '{stage}' has no {target}"):
        check(node.graph, stage, stage)


def test_on_a_cpu_operators_of_tensors_stay() -> None:
    check(called(ops.quantize_both, *BOTH).graph, "lower", "lower")


def test_each_operator_has_rules_and_a_stage_in_which_it_may_stand() -> None:
    assert RULES.keys() == ops.OPERATORS.keys() == STAGES["partitioned"].anywhere


@pytest.mark.feature("save", "merge")
@pytest.mark.cases(test=2, slow=4)
@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "tensorwise", "mxfp8"])
def test_after_each_pass(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    """While debugging, each pass is checked."""
    with (
        caplog.at_level("DEBUG", "fp8compile.passes.pipeline"),
        hooks.noting(specification, "check", lambda _, graph, stage, after: (stage, after)) as checked,
        hooks.lowered(),
    ):
        options = {"recipe": recipe, "save": "fp8"}
        torch.compile(make(SwiGlu), backend="fp8", options=options)(noise(128, 128)).sum().backward()
    assert {stage for stage, _ in checked} >= STAGES.keys() - {"joint", "early_post_grad"}
    assert ("layouts", "write_merged") in checked or recipe != "delayed"
