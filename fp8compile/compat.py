"""Everything that leans on private parts of torch, in one file; read in 2.11, 2.13 and 2.15.

What moves between versions is handled here and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import linecache
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._functorch.partitioners as partitioners
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch.fx import Graph, GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy

MUST_SAVE, MUST_RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE


# -- compiling ---------------------------------------------------------------------------------------------------------


def compile_fx(gm: GraphModule, inputs: Sequence[Any], inner_compile: Callable | None, patches: dict[str, Any]) -> Any:
    """Inductor on a Dynamo graph, our `inner_compile` in the place of its own. AOTAutogradCache is off: a hit would skip
    the joint pass, and with it the state and the report (FxGraphCache stays on)."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    with functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(gm, inputs, inner_compile=inner_compile or compile_fx_inner, config_patches=patches)


def compile_inner(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable:
    from torch._inductor.compile_fx import compile_fx_inner

    with _accesses_known():
        return compile_fx_inner(gm, inputs, **kwargs)


@contextlib.contextmanager
def _accesses_known() -> Iterator[None]:
    """Inside, which arguments a Triton kernel writes is found once a kernel. Inductor compiles it to Triton's IR for that,
    twice a launch; the layers of a model launch the same ones."""
    from torch._higher_order_ops import triton_kernel_wrap as module

    name = next(x for x in ("identify_accessed_tensors", "identify_mutated_tensors") if hasattr(module, x))  # up to 2.11
    find = getattr(module, name)
    known: dict[Any, Any] = {}

    def identify(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        function = kernel
        while hasattr(function, "fn"):  # an autotuner has a JIT function has a Python function
            function = function.fn
        if function not in _generated:
            return find(kernel, *args, **kwargs)
        if function not in known:
            known[function] = find(kernel, *args, **kwargs)
        return known[function]

    setattr(module, name, identify)
    try:
        yield
    finally:
        setattr(module, name, find)


@functools.cache
def sources_hash() -> str:
    """A hash of the package's sources: part of the cache key of whatever our passes made."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class JointPass(CustomGraphPass):
    """`run` as Inductor's `joint_custom_pre_pass`; `key` tells apart passes that do different things. `users` is a pass of
    the user's own: it goes first."""

    def __init__(self, run: Callable[[Graph], None], key: str, users: Any = None):
        self.run, self.key, self.users = run, key, users

    def __call__(self, graph: Graph) -> None:
        if self.users is not None:
            self.users(graph)
        self.run(graph)

    def uuid(self) -> Any:
        theirs = self.users.uuid() if hasattr(self.users, "uuid") else None
        return None if self.users is not None and theirs is None else f"fp8compile-joint-{sources_hash()}-{self.key}-{theirs}"


class Partitioner(CustomPartitionerFn):
    """The min-cut partitioner, told that `recomputable` operators fuse like pointwise ones and may run again in backward.

    To the stock partitioner a custom operator is opaque, and it would save FP8 copies of whole weights (pytorch#141881).
    """

    def __init__(self, recomputable: Sequence[str]):
        self.recomputable = tuple(recomputable)  # names: this object is part of a cache key, and pickled for it

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any):
        with self._extended():
            return partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    @contextlib.contextmanager
    def _extended(self) -> Iterator[None]:
        stock = partitioners.get_default_op_list
        packets = [getattr(getattr(torch.ops, space), op) for space, op in (name.split("::") for name in self.recomputable)]

        def op_list() -> Any:
            types = stock()
            types.fusible_ops.update(packets)
            types.recomputable_ops.update(packets)
            return types

        partitioners.get_default_op_list = op_list
        try:
            yield
        finally:
            partitioners.get_default_op_list = stock

    def uuid(self) -> Any:
        return f"fp8compile-partition-{sources_hash()}"


def random_prims() -> dict[Any, str]:
    """Inductor's seeded random operators, whose eager forms ignore their seed: operator -> torch function name."""
    prims = importlib.import_module("torch._inductor.inductor_prims")
    return {prims.random: "random", prims.randint: "randint"}


# -- what Dynamo knows about a graph -----------------------------------------------------------------------------------


def source_name(placeholder: Node) -> str:
    """The expression of a Dynamo placeholder in the user's frame, `L['self']._modules['up']._parameters['weight']`; or ''."""
    return _name(getattr(placeholder, "_dynamo_source", None))


def _name(source: Any) -> str:
    name = getattr(source, "name", "") or ""
    return name() if callable(name) else name  # a method up to 2.11, a property since


def add_input(gm: GraphModule, name: str, example: torch.Tensor) -> torch.Tensor:
    """Give a Dynamo graph one more tensor input, at the end, and return what stands for it at compile time. The caller
    passes a tensor of the same sizes at each call, from a stable address (CUDA graphs need not copy it)."""
    from torch._dynamo.source import ConstantSource
    from torch._guards import detect_fake_mode

    placeholders = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(placeholders[-1]) if placeholders else gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        node = gm.graph.placeholder(name)
    node._dynamo_source = ConstantSource(source_name=name)
    mode = detect_fake_mode()
    if mode is not None:  # or AOTAutograd would take its sizes for dynamic ones
        example = mode.from_tensor(example, static_shapes=True)
    node.meta["example_value"] = example
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    return example


def input_index(placeholder: Node) -> int | None:
    """Which input of the Dynamo graph a joint-graph placeholder is (or is part of, for a tensor subclass); None for a
    tangent or what AOTAutograd added."""
    desc = placeholder.meta.get("desc")
    for _ in range(8):
        if desc is None:
            return None
        if hasattr(desc, "idx") and "Tangent" not in type(desc).__name__:
            return int(desc.idx)
        desc = getattr(desc, "base", None)
    return None


def is_joint_graph(graph: Graph) -> bool:
    """False for a nested graph (an attention's score function, a branch), whose inputs AOTAutograd does not describe."""
    return any(input_index(node) is not None for node in graph.find_nodes(op="placeholder"))


def copy_graph(gm: GraphModule) -> GraphModule:
    """A copy of a graph, with what AOTAutograd reads from one of Dynamo's (compilers take ownership of what they are given)."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for node, copy in copies.items():
        if hasattr(node, "_dynamo_source"):
            copy._dynamo_source = node._dynamo_source
    made = GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        made._param_name_to_source = gm._param_name_to_source
    return made


def shown(error: Exception) -> Exception:
    """`error` as an exception that Dynamo passes on to the user as it is, of the same class, instead of wrapping it."""
    from torch._dynamo.exc import ShortenTraceback

    kind = type(type(error).__name__, (type(error), ShortenTraceback), {"__module__": type(error).__module__})
    made = kind.__new__(kind, *error.args)
    ShortenTraceback.__init__(made, *error.args, first_useful_frame=None)
    made.__dict__.update(error.__dict__)
    return made


def is_backward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def tag_backward(graph: Graph) -> set[Node]:
    """The nodes that depend on a tangent, each tagged as backward: autograd leaves those of a custom Function untagged."""
    behind: set[Node] = set()
    for node in graph.nodes:
        if "Tangent" in type(node.meta.get("desc")).__name__ or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
            if node.op == "call_function" and not node.meta.get("partitioner_tag"):
                node.meta["partitioner_tag"] = "is_backward"
    return behind


def root_modules(gm: GraphModule) -> dict[int, tuple[nn.Module, Any]]:
    """For each input of a Dynamo graph that is a parameter or buffer, by position: the module through which the compiled
    frame reaches it, and that module's Dynamo source."""
    scopes = _scopes()
    modules: dict[str, nn.Module] = {}
    found: dict[int, tuple[nn.Module, Any]] = {}
    for position, placeholder in enumerate(gm.graph.find_nodes(op="placeholder") if scopes else ()):
        source, root = getattr(placeholder, "_dynamo_source", None), None
        if "._parameters[" not in _name(source) and "._buffers[" not in _name(source):
            continue
        prefix = _name(source).split("._modules[")[0].split("._parameters[")[0].split("._buffers[")[0]
        while source is not None and root is None:
            root = source if _name(source) == prefix else None
            source = getattr(source, "base", None)
        if root is None:
            continue
        if prefix not in modules:
            try:
                module = eval(prefix, {"__builtins__": {}}, scopes)  # Dynamo's own expression, as its guards evaluate it
            except Exception:
                continue
            modules[prefix] = module
        if isinstance(modules[prefix], nn.Module):
            found[position] = modules[prefix], root
    return found


def _scopes() -> dict[str, Any]:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output = InstructionTranslator.current_tx().output
        return {"L": output.local_scope, "G": output.global_scope}
    except AttributeError:  # not called from within Dynamo
        return {}


def guard_training(source: Any) -> None:
    """Compile again when `training` of the module at `source` changes."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is not None:
        context.guards_context.dynamo_guards.add(AttrSource(source, "training").make_guard(GuardBuilder.CONSTANT_MATCH))


# -- while running -----------------------------------------------------------------------------------------------------


class TensorMarks:
    """A set of tensors by their memory: a saved tensor comes back from autograd as another object. Keeps none alive."""

    def __init__(self) -> None:
        self.marks: dict[int, StorageWeakRef] = {}

    def add(self, tensor: torch.Tensor) -> None:
        self.marks = {address: ref for address, ref in self.marks.items() if not ref.expired()}
        self.marks[tensor.data_ptr()] = StorageWeakRef(tensor.untyped_storage())

    def __contains__(self, tensor: torch.Tensor) -> bool:
        ref = self.marks.get(tensor.data_ptr())
        return ref is not None and not ref.expired()


class _Kept:
    """A saved tensor that no hook has touched."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


@contextlib.contextmanager
def saved_as_they_are(ours: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Inside, tensors that are `ours` are saved for backward past the user's saved-tensor hooks (offloading, compression),
    which hand back copies: what is known by its address has to come back as itself."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        yield
        return
    pack, unpack = hooks
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: _Kept(x) if ours(x) else pack(x), lambda x: x.tensor if isinstance(x, _Kept) else unpack(x)
    ):
        yield


def in_backward() -> bool:
    """Is autograd's engine running a backward on this thread (so that a forward now is a recomputation)?"""
    return torch._C._current_graph_task_id() != -1


# -- generated kernels -------------------------------------------------------------------------------------------------


class PostGradPass(CustomGraphPass):
    """`run` as Inductor's `post_grad_custom_post_pass`: over a partitioned graph, behind all passes that expect a functional
    one. `users` is a pass of the user's own: it goes first."""

    def __init__(self, run: Callable[[Graph], None], key: str, users: Any = None):
        self.run, self.key, self.users = run, key, users

    def __call__(self, graph: Graph) -> None:
        if self.users is not None:
            self.users(graph)
        self.run(graph)

    def uuid(self) -> Any:
        theirs = self.users.uuid() if hasattr(self.users, "uuid") else None
        return None if self.users is not None and theirs is None else f"fp8compile-post-{sources_hash()}-{self.key}-{theirs}"


_generated: set[Any] = set()  # the Python functions of our kernels


def reorders() -> bool:
    """Will Inductor reorder a graph behind our pass by its data dependencies? A launch has none: it writes its arguments."""
    from torch._inductor import config

    overlap = getattr(getattr(config, "aten_distributed_optimizations", None), "enable_overlap_scheduling", False)
    buckets = ("bucket_all_gathers_fx", "bucket_reduce_scatters_fx", "bucket_all_reduces_fx")
    return bool(overlap) or any(getattr(config, name, "none") not in ("none", None, False) for name in buckets)


def max_autotune() -> bool:
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_pointwise)


def load_kernel(name: str, source: str) -> Any:
    """The JIT function `name` of `source`, from a file in Inductor's cache (Triton reads its functions' sources from files)."""
    from torch._inductor.codecache import PyCodeCache

    kernel = getattr(PyCodeCache.load(source), name)
    # that cache may be thrown away while this process keeps the function, and Inductor reads its source again
    file = kernel.fn.__code__.co_filename
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    _generated.add(kernel.fn)
    return kernel


def launch(emit: Any, function: Any, grids: list[tuple], arguments: dict[str, Any]) -> Node:
    """Launch a Triton function, one grid a configuration. Its arguments are tensors, or nodes of numbers."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation

    with emit.graph.inserting_before(emit.anchor):
        node = emit.graph.call_function(
            triton_kernel_wrapper_mutation,
            kwargs={
                "kernel_idx": kernel_side_table.add_kernel(function),
                "constant_args_idx": kernel_side_table.add_constant_args({}),
                "grid": grids,
                "tma_descriptor_metadata": {},
                "kwargs": arguments,
            },
        )
    node.meta.update(emit.meta, val=None)
    # the strides that the kernel was written for, exactly: Inductor pads others
    node.meta["eager_input_vals"] = torch.fx.map_arg(((), dict(node.kwargs)), lambda n: n.meta["val"])
    return node


def eliminate_dead_code(graph: Graph) -> None:
    """Without the launches: to torch.fx they look pure."""
    kept = set(launches(graph))
    graph.eliminate_dead_code(is_impure_node=lambda node: node in kept or node.is_impure())


def launches(graph: Graph) -> list[Node]:
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    return graph.find_nodes(op="call_function", target=triton_kernel_wrapper_mutation)


def launched(node: Node) -> tuple[Any, dict[str, Any]]:
    """The Triton function of a launch and its arguments."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kwargs: Any = node.kwargs
    arguments = {**kernel_side_table.get_constant_args(kwargs["constant_args_idx"]), **kwargs["kwargs"]}
    return kernel_side_table.get_kernel(kwargs["kernel_idx"]), arguments


def size_node(emit: Any, expr: Any, symbol: Callable[[Any, Any], Node]) -> Any:
    """Nodes that compute an integer expression of sizes."""
    import operator

    names = {"Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv, "Mod": operator.mod}
    names |= {"PythonMod": operator.mod, "Max": torch.sym_max, "Min": torch.sym_min}

    def join(op: Any, a: Any, b: Any) -> Any:
        return op(a, b) if isinstance(a, int) and isinstance(b, int) else emit(op, a, b)

    def build(e: Any) -> Any:
        if e.is_Integer:
            return int(e)
        if e.is_Symbol:
            return symbol(emit, e)
        if e.is_Pow and e.exp.is_Integer and e.exp > 0:
            return functools.reduce(lambda a, b: join(operator.mul, a, b), [build(e.base)] * int(e.exp))
        op = names.get(type(e).__name__)
        if op is None:
            raise NotImplementedError(f"a size that cannot be computed: {e}")
        return functools.reduce(lambda a, b: join(op, a, b), map(build, e.args))

    return build(expr)


def stable_sort(graph: Graph) -> None:
    """Put a graph in topological order, changing as little as possible."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)
