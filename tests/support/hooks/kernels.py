"""Generated kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from .base import Patched, noting


@contextlib.contextmanager
def launching(
    tuned: Callable[..., Any], choose: Callable[[Any], Any] | None = None, other: int = 0, **limits: int
) -> Iterator[None]:
    """Inside, graphs for a CPU get generated kernels: `tuned(function, configurations)` is launched, with the
    configuration that `choose(group)` names, or with the default one. `other`: the source is written for the
    default, and launched with that one, or with the last; the last of `configurations` is what is launched.
    `limits`: other values of constants of `codegen.blocks`."""
    from fp8compile import compat
    from fp8compile.codegen import blocks, launch

    configurations, launch_all = blocks.configurations, compat.triton.launch

    def chosen(group: Any) -> Any:
        if choose:
            return (choose(group),)
        found = configurations(group)
        return (found[0], *([found[min(other, len(found) - 1)]] if other else []))

    def launch_last(emit: Any, function: Any, grids: Any, *more: Any, **how: Any) -> Any:
        return launch_all(emit, function, grids[-1:], *more, **how)

    with (
        lowered_as_for_a_gpu(),
        mock.patch.object(compat.triton, "launch", launch_last),
        mock.patch.multiple(blocks, configurations=chosen, **limits),
        mock.patch.multiple(launch, DEVICES=("cpu", "cuda"), tuned=tuned),
    ):
        yield


def lowered_as_for_a_gpu() -> Patched:
    """Inside, operators become ATen on a CPU, too, but for those of groups, of whose casts one is split."""
    from fp8compile.ir import grouped, ops
    from fp8compile.passes import lower

    stays = lower.stays

    def of_groups(node: torch.fx.Node) -> bool:
        ordered = node.target is not ops.quantize_both and grouped.order_of(node) is not None
        return (node.target in grouped.ALL or ordered) and stays(node)

    return mock.patch.object(lower, "stays", of_groups)


@contextlib.contextmanager
def launched(see: Callable[..., Any], amd: bool = False) -> Iterator[None]:
    """`see(function, arguments, constants, contracts)` gets each launch that is written inside. `amd`: with
    an AMD GPU's conversions."""
    from fp8compile import compat

    def note(_: Any, emit: Any, function: Any, grids: Any, arguments: Any, constants=None, contracts=False):
        see(function, arguments, constants or {}, contracts)

    conversions = mock.patch("fp8compile.codegen.stores.saturates", lambda dtype: False)
    with noting(compat.triton, "launch", note), conversions if amd else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def written_for(gpu: Any, wrongly: bool | None = None) -> Iterator[None]:
    """Inside, kernels are written as for this GPU. `wrongly`: whether Triton's own conversions to FP8 are
    taken to be wrong there; None: whether they are."""
    conversions = mock.patch("fp8compile.compat.triton.converts_wrongly", lambda capability: wrongly)
    here = mock.patch("fp8compile.codegen.expressions.gpu_of", lambda device: gpu)
    with here, conversions if wrongly is not None else contextlib.nullcontext():
        yield


def uncontracted() -> Patched:
    """Inside, Triton contracts no kernel that does not say whether it may."""
    return mock.patch("triton.knobs.language.default_fp_fusion", False)


def count_generated(graph: torch.fx.Graph) -> int:
    """The launches in a graph of kernels that were generated."""
    from fp8compile import compat
    from fp8compile.codegen import triton_kernels

    names = [compat.triton.launched(node)[0].fn.fn.__name__ for node in compat.triton.launches(graph)]
    return len([name for name in names if not hasattr(triton_kernels, name)])


@contextlib.contextmanager
def refusing(*forms: str) -> Iterator[list[str]]:
    """Inside, a GPU's libraries refuse FP8 matmuls in these forms. Gives the forms that were asked for."""
    from fp8compile import process
    from fp8compile.passes import try_matmuls

    asked: list[str] = []

    def refusal(node: Any, form: str) -> str:
        asked.append(form)
        return "CUBLAS_STATUS_NOT_SUPPORTED" if form in forms else ""

    here = mock.patch.object(try_matmuls, "there", lambda device: True)
    answers = mock.patch.object(try_matmuls, "refusal", refusal)
    with here, answers, mock.patch.object(process.of(try_matmuls.Attempts), "replaced", {}):
        yield asked


def refusal(form: str, a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> str:
    """What ATen says on a CPU to this form of a matmul: a [M, K] and b [N, K] in FP8, with inverse scales."""
    from fp8compile.ir import ops
    from fp8compile.passes import try_matmuls

    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(4)]
    for node, x in zip(nodes, (a[0], b[0], a[1], b[1]), strict=True):
        node.meta["val"] = x
    matmul = graph.call_function(ops.scaled_mm, (*nodes, None, torch.bfloat16, False))
    matmul.meta["val"] = torch.empty(a[0].shape[0], b[0].shape[0], dtype=torch.bfloat16)
    return try_matmuls.refusal(matmul, form)


def cuda_version(*version: int) -> Patched:
    """Inside, torch was built with this CUDA."""
    return mock.patch("fp8compile.devices.support.cuda_version", lambda: version)


def fnuz() -> Patched:
    """Inside, the GPU has the fnuz encodings."""
    return mock.patch("fp8compile.devices.formats.fnuz", lambda: True)


@contextlib.contextmanager
def block_mm_by(way: str, tile: tuple[int, ...] = (64, 32, 4, 1)) -> Iterator[None]:
    """Inside, a matmul of blocks is lowered in this way, and our kernel has this tile."""
    tiles = mock.patch("fp8compile.codegen.block_gemm.configurations", lambda *_: (tile,))
    with mock.patch("fp8compile.codegen.scaled_mm_kind.how", lambda *_: way), tiles:
        yield


@contextlib.contextmanager
def matmuls_for(gpu: Any, tile: tuple[int, ...] = (64, 32, 4, 1)) -> Iterator[None]:
    """Inside, matmuls are lowered for this GPU; those of groups have this tile."""
    tiles = mock.patch("fp8compile.codegen.grouped_gemm.configurations", lambda *_: (tile,))
    groups = mock.patch("fp8compile.codegen.scaled_grouped.gpu_of", lambda _: gpu)
    with mock.patch("fp8compile.codegen.scaled_mm.gpu_of", lambda _: gpu), groups, tiles:
        yield


@contextlib.contextmanager
def scales_of_products() -> Iterator[list[torch.Tensor]]:
    """The scales that ATen's matmul gets inside; no matmul runs."""
    found: list[torch.Tensor] = []
    with mock.patch("fp8compile.codegen.scaled_mm.scaled", lambda _, *scales: found.extend(scales)):
        yield found


@contextlib.contextmanager
def traffic(answer: tuple[int, int] | None = None) -> Iterator[list[tuple[int, int]]]:
    """The bytes that a fused kernel and Inductor would move, for each group compared; or `answer` for all."""
    from fp8compile.passes import fuse

    found: list[tuple[int, int]] = []
    compare = fuse.compare

    def noted(*given: Any) -> tuple[int, int]:
        found.append(answer or compare(*given))
        return found[-1]

    with mock.patch.object(fuse, "compare", noted):
        yield found


def matmuls_unread() -> Patched:
    """Inside, a described step does not read Inductor's matmuls: NVIDIA falls back for fnuz operands."""
    return mock.patch("fp8compile.dryrun.fake_gpu.record._Reader.matmul", lambda *_: None)


def losing_updates() -> Patched:
    """Inside, graphs lose the writes of their scaling state before the check for them."""
    from fp8compile.features.delayed.graph import DelayedGraph

    check = DelayedGraph.half

    def without_writes(self: DelayedGraph, gm: Any) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            gm.graph.erase_node(node)
        check(self, gm)

    return mock.patch.object(DelayedGraph, "half", without_writes)


def ranks_agree() -> Patched:
    """Inside, the other ranks, which are not there, have said what this one says."""
    return mock.patch("fp8compile.compat.process_groups.different", return_value={})
