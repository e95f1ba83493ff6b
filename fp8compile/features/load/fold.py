"""fold: dgrad reads the bytes of a weight whose rows have scales.

    dx = dy @ (bytes * s)  [M, N] @ [N, K], s [N, 1]   ->   dx = (dy * s^T) @ bytes

dgrad contracts over these rows, so that no FP8 matmul could apply their scales afterwards. The product with
them is float32: dy is rounded once, by its cast, with which it is fused. The copy that forward reads serves
dgrad, too, with one scale that is 1.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...config.recipe import ROW
from ...ir import ops
from ...ir.fx_utils import CASTS, Emitter, arg, as_matrix, aten, value
from ...ir.matmul import Matmul
from ...passes.gathered import block_held
from ...passes.joint import Joint


def fold(joint: Joint) -> int:
    """Change the operands of FP8 dgrads whose weights are held with scales of rows; returns how many."""
    found = [x for x in joint.matmuls if x.fp8 and x.gemm == "dgrad" and block_held(x.weight) == ROW]
    for matmul in found:
        _fold(joint, matmul)
    return len(found)


def _fold(joint: Joint, matmul: Matmul) -> None:
    weight, gradient = matmul.weight_operand, matmul.other_operand
    assert weight is not None and matmul.weight is not None
    emit = Emitter(joint.graph, matmul.node, matmul.node)
    data, scales = arg(matmul.weight, 0), arg(matmul.weight, 1)
    one = emit(aten.full.default, [1], 1.0, dtype=torch.float32, device=value(data).device)
    bare = emit(ops.dequantize, data, one, value(matmul.weight).dtype)
    along_columns = gradient.transposed is not (gradient is matmul.a)
    wide = emit(CASTS[1], as_matrix(emit, gradient.base, gradient.shape), torch.float32)
    scaled = emit(
        aten.mul.Tensor, wide, emit(aten.view.default, scales, [1, -1] if along_columns else [-1, 1])
    )
    made = {id(weight): replace(weight, base=bare), id(gradient): replace(gradient, base=scaled)}
    matmul.a, matmul.b = (made[id(x)] for x in (matmul.a, matmul.b))
    matmul.weight_operand = made[id(weight)]
