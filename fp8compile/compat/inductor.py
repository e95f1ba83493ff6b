"""Inductor: compiling a graph with our passes in it, and its partitioner."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._functorch.partitioners as partitioners
from torch._guards import TracingContext
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from .aot_cache import Saved, cached, in_inner, inner_options
from .dynamo import input_index
from .triton import REORDERING, accesses_known, contraction_chosen, is_on

MUST_SAVE, MUST_RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE


def compile_fx(
    gm: GraphModule,
    inputs: Sequence[Any],
    inner_compile: Callable,
    patches: dict[str, Any],
    at_once: bool = False,
    restore: Callable[[Sequence[Saved]], None] | None = None,
) -> Any:
    """Compile a Dynamo graph with Inductor, with our `inner_compile` instead of its own. `at_once`: compile
    the backward with the forward, even where AOTAutograd would wait until it is called.

    A hit in AOTAutogradCache skips the joint pass, and with it the state and the report. So the cache is off
    (FxGraphCache stays on), unless `inner_compile` returns `saved` halves. `restore` gets those of a hit, and
    makes their `run`."""
    from torch._inductor.compile_fx import compile_fx

    eager = at_once or functorch_config.force_non_lazy_backward_lowering
    with functorch_config.patch(force_non_lazy_backward_lowering=eager), cached(restore is not None) as hit:
        function = compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=patches)
    if hit and restore is not None:
        restore(hit)
    return function


def keep_saved_tensors() -> None:
    """For a backward that is compiled now: if that is with the forward, its code leaves the saved tensors as
    they are. torch knows whether a graph is to be retained when its backward is called, and donates saved
    tensors' memory to a backward compiled then; one compiled before would refuse `retain_graph=True`."""
    context = TracingContext.try_get()
    donated = getattr(context.fw_metadata, "bw_donated_idxs", None) if context is not None else None
    if donated and functorch_config.force_non_lazy_backward_lowering:
        donated.clear()  # in place: torch has the list twice


def compile_inner(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable:
    from torch._inductor.compile_fx import compile_fx_inner

    _make_manager(**kwargs)
    with inner_options(), accesses_known(), contraction_chosen():
        return compile_fx_inner(gm, inputs, **kwargs)


def cpp_library(source: str) -> Any:
    """C++ compiled as Inductor compiles its own, from its cache if it is there: a `ctypes.CDLL`."""
    from torch._inductor.codecache import CppCodeCache

    return CppCodeCache.load(source)


def _make_manager(is_backward: bool = False, boxed_forward_device_index: Any = None, **_: Any) -> None:
    """Make CUDA graphs' manager before the backward of a recorded forward. A backward that is not recorded
    asserts that the forward's first call made it (`maybe_handle_backward_generation`); a cold one did not."""
    device = getattr(boxed_forward_device_index, "value", None)
    if is_backward and device is not None and config.triton.cudagraphs and config.triton.cudagraph_trees:
        from torch._inductor.cudagraph_trees import get_manager

        get_manager(device)


def inductor_modes() -> dict[str, dict[str, Any]]:
    """The modes of torch.compile, and the options that each stands for."""
    from torch._inductor import list_mode_options

    return list_mode_options()


def inductor_config() -> dict[str, Any]:
    """Inductor's options with their present values."""
    return config.get_config_copy()


def cuda_graphs(options: Mapping[str, Any]) -> bool:
    """True if Inductor records CUDA graphs. `options`: of this compilation."""
    return is_on("triton.cudagraphs", options)


def chunks() -> bool:
    """True if Inductor, in the compilation that runs, is to compute the output head by chunks of rows."""
    return is_on("auto_chunker.enable")


def async_tensor_parallel(options: Mapping[str, Any]) -> bool:
    """True if Inductor fuses collectives with matmuls. `options`: of this compilation."""
    return is_on("_micro_pipeline_tp", options)


def changes_collectives(options: Mapping[str, Any]) -> bool:
    """True if Inductor may fuse, merge or reorder the collectives of a graph. It keeps their order otherwise
    (`comms.py`, `decide_global_ordering_of_comms`). `options`: of this compilation."""
    flags = "_micro_pipeline_tp _fuse_ddp_communication reorder_for_compute_comm_overlap".split()
    later = "collective_bucketing enable_low_contention_collectives allow_comms_decompositions".split()
    names = [*flags, "dedup_reduce_scatters", *REORDERING]
    names += [f"aten_distributed_optimizations.{name}" for name in later]
    return any(is_on(name, options) for name in names)


def inductor_type(option: str) -> Any:
    return config.get_type(option)  # type: ignore[attr-defined]


def decompositions() -> Any:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


@functools.cache
def sources_hash() -> str:
    """A hash of the package's sources: part of the cache key of all code that went through our passes."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class OneObject:
    """Not copied with Inductor's config, which torch copies deeply where it traces a `scan`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class GraphPass(OneObject, CustomGraphPass):
    """`run` as one of Inductor's custom passes. `joint_custom_pre_pass` runs over forward and backward in one
    graph. `post_grad_custom_post_pass` runs over a partitioned graph, after all passes that expect a
    functional graph.

    `key` tells apart passes that do different things. `users` is a pass of the user's own, which runs first.
    `facts`: what `run` reads beside the joint graph, for AOTAutograd's cache. (FxGraphCache has the graph
    that `run` has made.)"""

    def __init__(self, run: Callable[[Graph], None], key: str, users: Any = None, facts: str = ""):
        self.run, self.key, self.users, self.facts = run, key, users, facts

    def __call__(self, graph: Graph) -> None:
        if self.users is not None:
            self.users(graph)
        self.run(graph)

    def uuid(self) -> Any:
        theirs = self.users.uuid() if hasattr(self.users, "uuid") else None
        facts = f"-{self.facts}" if self.facts and not in_inner() else ""
        if self.users is not None and theirs is None:
            return None
        return f"fp8compile-{sources_hash()}-{self.key}-{theirs}{facts}"


class Partitioner(OneObject, CustomPartitionerFn):
    """The min-cut partitioner, told that `recomputable` operators fuse like pointwise ones and may run again.

    To the stock partitioner a custom operator is opaque, so it would save FP8 copies of whole weights
    (pytorch#141881).

    `after` (forward, backward, number of outputs that the caller sees) may change what the forward keeps for
    the backward; the forward's other outputs are what it keeps. `key` tells apart partitioners that do
    different things. `free`: Dynamo inputs that cost no memory if they are kept, as parameters do, although
    they are none to AOTAutograd."""

    def __init__(
        self,
        recomputable: Sequence[str],
        after: Callable[[GraphModule, GraphModule, int], None] | None,
        key: str,
        free: Collection[int],
    ):
        self.recomputable = tuple(recomputable)  # names, because this object is pickled for a cache key
        self.after, self.free, self.key = after, frozenset(free), f"{key}-{sorted(free)}"

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any):
        placeholders = gm.graph.find_nodes(op="placeholder")
        free = {i: node for i, node in enumerate(placeholders) if input_index(node) in self.free}
        known = kwargs.get("static_lifetime_input_indices") or ()
        with self._extended():
            kwargs["static_lifetime_input_indices"] = [*known, *(free.keys() - known)]
            forward, backward = partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        for i in free.keys() - known:
            free[i].meta["is_static_input"] = False  # its address changes (read in 2.15)
        if self.after is not None:
            self.after(forward, backward, kwargs["num_fwd_outputs"])
        return forward, backward

    def __getstate__(self) -> dict[str, Any]:
        return {"recomputable": self.recomputable, "after": None, "key": self.key, "free": self.free}

    def _extended(self) -> contextlib.AbstractContextManager[Any]:
        stock = partitioners.get_default_op_list
        names = (name.split("::") for name in self.recomputable)
        packets = [getattr(getattr(torch.ops, space), op) for space, op in names]

        def op_list() -> Any:
            types = stock()
            types.fusible_ops.update(packets)
            types.recomputable_ops.update(packets)
            return types

        return mock.patch.object(partitioners, "get_default_op_list", op_list)

    def uuid(self) -> Any:
        return f"fp8compile-partition-{sources_hash()}{self.key}"


def keep_instead(forward: Graph, visible: int, instead: Mapping[Node, Sequence[Node]]) -> None:
    """Let a forward graph keep other tensors for its backward: `instead` of a node, these nodes. The first
    `visible` outputs, which the caller sees, stay. AOTAutograd describes each output (torch 2.11 to 2.15,
    `_extract_fwd_bwd_modules`): what is kept has a number."""
    (output,) = forward.find_nodes(op="output")
    old: Any = output.args[0]
    descs = output.meta["desc"]
    before = zip(old[visible:], descs[visible:], strict=True)
    kept = [(node, type(desc)) for given, desc in before for node in instead.get(given, (given,))]
    output.args = ((*old[:visible], *(node for node, _ in kept)),)
    output.meta["desc"] = [*descs[:visible], *(kind(i) for i, (_, kind) in enumerate(kept))]


def no_version_check(node: Node) -> bool:
    """True if AOTAutograd keeps this tensor without checking its version (2.11 to 2.15). Those come last."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check"))


def is_checkpointed(node: Node) -> bool:
    """True if the user's checkpointing computes this node again in backward."""
    again = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return node.meta.get("ac_graph_id") is not None and node.meta.get("recompute") in again


def random_prims() -> dict[Any, str]:
    """Inductor's seeded random operators (eager forms ignore the seed): operator -> torch function name."""
    prims = importlib.import_module("torch._inductor.inductor_prims")
    return {prims.random: "random", prims.randint: "randint"}
