"""`try_matmuls`: a matmul that the GPU's libraries refuse takes another form before training begins."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

import fp8compile
from fp8compile.ir.grouped import grouped_mm
from fp8compile.passes import try_matmuls
from tests.support import hooks
from tests.support.executed import executed
from tests.support.gpu_steps import compile_mlp
from tests.support.harness import ALL_FP8, grads_of, noise, sqnr
from tests.support.models import Mlp
from tests.support.operands import B200, BF16, E4M3, H100, RTX5090, ends, operand

WHOLE = (0, 0)


@pytest.mark.parametrize("form", ["tensorwise", "rowwise after"])
def test_what_a_library_multiplies(form: str) -> None:
    assert hooks.refusal(form, operand(32, 48, WHOLE), operand(64, 48, WHOLE)) == ""


def test_what_a_library_refuses() -> None:
    operands = operand(32, 48, WHOLE), operand(64, 40, WHOLE)
    found = hooks.refusal("tensorwise", *operands)
    assert found and "\n" not in found
    assert hooks.refusal("tensorwise", *operands) is found  # asked once


@pytest.mark.parametrize("wgrad", [False, True])
def test_groups_are_tried_without_rows(wgrad: bool) -> None:
    """A library reads where groups end."""
    asked: list[Any] = []

    def multiply(*args: Any) -> torch.Tensor:
        asked.append(args)
        raise RuntimeError("not these")

    graph = torch.fx.Graph()
    a, b = ((128, 96), (256, 96)) if wgrad else ((96, 128), (4, 256, 128))
    given = [torch.empty(size, dtype=E4M3) for size in (a, b)]
    given += [torch.ones(1), torch.ones(1), ends([16, 0, 33, 40])]
    nodes = [graph.placeholder(f"x{i}") for i in range(len(given))]
    for node, x in zip(nodes, given, strict=True):
        node.meta["val"] = x
    matmul = graph.call_function(grouped_mm, (*nodes, BF16, False, WHOLE, WHOLE))
    matmul.meta["val"] = torch.empty(())
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_grouped_mm", multiply, "CPU")
        assert try_matmuls.refusal(matmul, "grouped") == "not these"
    ((x, y, x_scale, y_scale, offs, *_),) = asked
    assert (x.shape, y.mT.shape, offs.tolist()) == (given[0].shape, given[1].shape, [0, 0, 0, 0])
    assert (x_scale.numel(), y_scale.numel()) == ((4 * 128, 4 * 256) if wgrad else (96, 4 * 256))


CASES: list[Any] = [
    ("rowwise", H100, ("rowwise",), "no rowwise FP8 matmul of 64 x 512 x 256", "multiplied after"),
    ("rowwise", RTX5090, ("rowwise",), "no rowwise FP8 matmul of 64 x 512 x 256", "multiplied after"),
    ("rowwise", H100, ("rowwise", "rowwise after"), "no rowwise FP8 matmul of 64 x 512 x 256", "in bf16"),
    ("tensorwise", H100, ("tensorwise",), "no tensorwise FP8 matmul of 64 x 512 x 256", "in bf16"),
    ("blockwise", H100, ("blockwise",), "no blockwise FP8 matmul of 64 x 256 x 512", "a generated kernel"),
    ("mxfp8", B200, ("mx",), "no mx FP8 matmul of 64 x 512 x 256", "in bf16"),
]


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("recipe", "gpu", "forms", "what", "how"), CASES, ids=lambda x: getattr(x, "name", str(x))
)
def test_a_form_that_is_refused(
    recipe: str, gpu: Any, forms: tuple[str, ...], what: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The step is compiled with the next form, and executed: it gives what the reference gives."""
    torch.manual_seed(0)
    model = Mlp(256, 512).to(BF16)
    steps = []
    for refused in ((), forms):
        mine, x = copy.deepcopy(model), noise(64, 256, dtype=BF16).requires_grad_()
        with executed(gpu=gpu), hooks.refusing(*refused) as asked:
            with caplog.at_level(logging.WARNING, logger="fp8compile"):
                run = torch.compile(mine, backend="fp8", options={"policy": ALL_FP8, "recipe": recipe})
                for _ in range(2):
                    y = run(x)
                    y.sum().backward()
            notes = fp8compile.report().notes
            steps.append([y.detach(), x.grad, *grads_of(mine).values()])
            assert {*refused} <= {*asked}
    assert any(what in note and how in note for note in notes), notes
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in caplog.text
    assert min(sqnr(a, b) for a, b in zip(*steps, strict=True)) > 30


@pytest.mark.slow
def test_a_described_gpu_is_not_tried() -> None:
    tried = compile_mlp(64, recipe="rowwise")
    assert {*tried.flops} == {"fp8"} and not fp8compile.report().notes
    with hooks.refusing("rowwise", "rowwise after"):
        assert {*compile_mlp(64, recipe="rowwise").flops} == {"bfloat16"}
        assert len(fp8compile.report().notes) == 4  # of six matmuls, two pairs have the same sizes
