"""Rules of what delayed scaling writes into graphs: see tests/passes/test_specification.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.fx import Node

from fp8compile.errors import Fp8CompileError
from fp8compile.features.delayed import slot_ops
from fp8compile.ir import ops
from fp8compile.ir.fx_utils import aten
from fp8compile.passes.specification import check
from tests.passes.test_specification import (
    BF16,
    WIDE,
    called,
    copied,
    first,
    given,
    of,
    refused_after,
    refused_alone,
    tagged,
    valued,
    written,
)


def reads(of: int, target: Any) -> Callable[[Node], None]:
    """Let one more operator read an argument of a node."""

    def mutate(node: Node) -> None:
        with node.graph.inserting_after(node):
            node.graph.call_function(target, (node.args[of],))

    return mutate


def twice(node: Node) -> None:
    """Write the same again."""
    write = next(iter(node.users))
    with node.graph.inserting_after(write):
        node.graph.node_copy(write)


ROWS = [
    ("stored scales are read of the input", slot_ops.delayed_scale, lambda x: x.update_arg(0, x.args[1])),
    ("stored scales are read of the input", slot_ops.delayed_inverse, valued(0, shape=(16, 4))),
    ("a slot is a row", slot_ops.delayed_scale, given(2, 16)),
    ("a slot is a row", slot_ops.delayed_inverse, given(2, -1)),
    ("a stored scale is one float32", slot_ops.delayed_scale, valued(shape=(2,))),
    ("a stored scale is one float32", slot_ops.delayed_inverse, valued(1, dtype=BF16)),
    ("in the input for them", ops.raised, lambda x: x.update_arg(0, x.args[1][0])),
    ("in the input for them", ops.raised, lambda x: x.update_arg(1, [x.args[0], *x.args[1][1:]])),
    ("each amax has its row", ops.raised, lambda x: x.update_arg(2, x.args[2][::-1])),
    ("each amax has its row", ops.raised, lambda x: x.update_arg(2, x.args[2][1:])),
    ("a copy onto the input", ops.raised, lambda x: x.graph.erase_node(next(iter(x.users)))),
    ("a copy onto the input", ops.raised, twice),
    ("a copy onto the input", ops.raised, lambda x: next(iter(x.users)).update_arg(0, x.args[1][0])),
    ("nothing reads amaxes", ops.raised, reads(0, aten.neg.default)),
    ("each half raises its own", ops.raised, tagged("partitioner_tag", "is_forward", of_reader=True)),
    ("reads the scales of forward", slot_ops.delayed_scale, tagged("recompute", None)),
    ("reads the scales of forward", slot_ops.delayed_inverse, tagged("recompute", None)),
]


@pytest.mark.parametrize(("says", "target", "mutate"), ROWS)
def test_a_joint_graph_that_breaks_a_rule(says: str, target: Any, mutate: Callable[[Node], None]) -> None:
    graph = copied(written("delayed"))
    refused_after(graph, first(graph, target), mutate, says)


SINGLE = [
    (slot_ops.votes, (of(WIDE, 16, 3, 4), [0, 3]), "a slot is a row", given(1, [16])),
    (slot_ops.agreed_scale, (of(WIDE, 3), of(WIDE, 1), 1, "g", 448.0, 0), "one of the votes", given(2, 2)),
]


@pytest.mark.parametrize(("target", "args", "says", "mutate"), SINGLE)
def test_an_operator_that_breaks_a_rule(
    target: Any, args: tuple, says: str, mutate: Callable[[Node], None]
) -> None:
    refused_alone(called(target, *args), mutate, says)


def test_stored_scales_are_gone_once_they_are_loaded() -> None:
    node = called(slot_ops.delayed_inverse, of(WIDE, 16, 3, 4), of(WIDE, 1), 0)
    check(node.graph, "partitioned", "save")
    with pytest.raises(Fp8CompileError, match=f"a graph of stage 'lower_scales' has no {node.target}"):
        check(node.graph, "lower_scales", "lower_scales")
