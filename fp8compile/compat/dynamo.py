"""Facts about a graph that Dynamo and AOTAutograd hold, and facts that they have to be told."""

from __future__ import annotations

import contextlib
import sys
import traceback
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import config, convert_frame
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback, TensorifyScalarRestartAnalysis
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, ConstantSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._export.utils import _compiling_state_context
from torch._guards import TracingContext, detect_fake_mode
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

CALLS = ("forward", "__call__", "_call_impl")  # functions of a module that is being called


def frames(file: str = "") -> Iterator[types.FrameType]:
    """The frames on the stack whose code is in a file that ends so, from the inside out."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_filename.replace("\\", "/").endswith(file):
            yield frame


def source_name(placeholder: Node) -> str:
    """A Dynamo placeholder's expression in the user's frame, as `L['self']._parameters['weight']`; or ''."""
    return getattr(getattr(placeholder, "_dynamo_source", None), "name", "")


def add_input(gm: GraphModule, name: str, example: torch.Tensor, stable: bool = True) -> torch.Tensor:
    """Give a Dynamo graph one more tensor input, at the end, and return the tensor that stands for it at
    compile time. The caller passes a tensor of the same sizes at each call; if `stable`, at one address (so
    that CUDA graphs need not copy it)."""
    placeholders, first = gm.graph.find_nodes(op="placeholder"), next(iter(gm.graph.nodes))
    with gm.graph.inserting_after(placeholders[-1]) if placeholders else gm.graph.inserting_before(first):
        node = gm.graph.placeholder(name)
    node._dynamo_source = ConstantSource(source_name=name)
    mode = detect_fake_mode()
    if mode is not None:  # else AOTAutograd would take its sizes for dynamic ones
        example = mode.from_tensor(example, static_shapes=True)
    node.meta["example_value"] = example
    if stable:
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    return example


def rows_vary(*tensors: torch.Tensor) -> None:
    """Tell Dynamo that the first dimension of these tensors differs from call to call, and no other one."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def undisabled(function: Any) -> Any:
    """What Dynamo's `disable` has wrapped. Read in 2.11, 2.13 and 2.15."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def compiling() -> contextlib.AbstractContextManager[None]:
    """For a `make_fx` of ours: inside, `torch.compiler.is_compiling()` is true, as it is in Dynamo's part of
    a compilation from 2.13 on. Up to 2.13, one flag of the process says that fx is tracing, and a compiled
    function that another thread calls meanwhile would raise. (Dynamo's lock admits one thread at a time.)"""
    return _compiling_state_context()


def input_index(placeholder: Node) -> int | None:
    """The position of the Dynamo input that a joint-graph placeholder is (or is a part of, for a tensor
    subclass). None for a tangent, a number (a size of a tensor subclass) and what AOTAutograd added."""
    return _index(placeholder.meta.get("desc"))


def is_whole(placeholder: Node) -> bool:
    """True if this input is a whole Dynamo input, rather than a part of a tensor subclass."""
    desc = placeholder.meta.get("desc")
    return _whole(desc) is desc


def _index(desc: Any) -> int | None:
    whole = _whole(desc)
    # a size or stride of a tensor subclass is an input, too; the `idx` that describes it is a dimension
    number = whole is not desc and hasattr(desc, "idx")
    return int(whole.idx) if type(whole).__name__ == "PlainAOTInput" and not number else None


def _whole(desc: Any) -> Any:
    """AOTAutograd's description of an input; of the whole tensor, for a part of a tensor subclass."""
    while getattr(desc, "base", None) is not None:
        desc = desc.base
    return desc


def is_joint_graph(graph: Graph) -> bool:
    """False for a nested graph (a score function, a branch), whose inputs AOTAutograd does not describe."""
    return any(input_index(node) is not None for node in graph.find_nodes(op="placeholder"))


def copy_graph(gm: GraphModule) -> GraphModule:
    """A copy of a Dynamo graph, with the attributes that AOTAutograd reads. (Compilers own what they get.)"""
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
    """`error` as an exception of a derived class, which Dynamo passes on to the user without wrapping it.
    Its text stays: Dynamo adds to `args` where to report a bug of its own."""
    said = str(error)
    own = {"__module__": type(error).__module__, "__str__": lambda _: said}
    kind = type(type(error).__name__, (type(error), ShortenTraceback), own)
    made = kind.__new__(kind, *error.args)
    ShortenTraceback.__init__(made, *error.args, first_useful_frame=None)
    made.__dict__.update(error.__dict__)
    return made


def restart(why: str) -> Exception:
    """An exception for a backend to raise: Dynamo traces the frame again, with what the backend changed."""
    # the one that backends raise; all others are errors of theirs
    return TensorifyScalarRestartAnalysis(restart_reason=why)


def let_go(example_inputs: Any, inputs: Iterable[int]) -> None:
    """Have Dynamo hold these inputs no longer: their memory is free before a `restart`. `example_inputs`:
    what the backend got. Read in 2.11, 2.13 and 2.15: the list, and what side effects keep alive."""
    if isinstance(example_inputs, list):
        gone = {id(example_inputs[i]) for i in inputs}
        if (output := _output()) is not None:
            kept = output.side_effects.keepalive
            kept[:] = [x for x in kept if id(x) not in gone]
        for i in inputs:
            example_inputs[i] = None


def is_of_backend(error: Exception) -> bool:
    """True if a compiler raised this error, rather than the code that it compiles."""
    return isinstance(error, BackendCompilerFailed)


def is_backward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def differentiates(gm: GraphModule) -> bool:
    """True if a Dynamo graph itself computes gradients: torch.func or (from 2.15 on) torch.autograd.grad."""
    names = {getattr(node.target, "__name__", "") for node in gm.graph.nodes if node.op == "call_function"}
    return bool(names & {"_autograd_grad", "grad"})


def tag_backward(graph: Graph) -> set[Node]:
    """The nodes that depend on a tangent, each tagged as backward: autograd leaves the nodes of a custom
    Function untagged."""
    behind: set[Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
            if node.op == "call_function" and not node.meta.get("partitioner_tag"):
                node.meta["partitioner_tag"] = "is_backward"
    return behind


def real_tensors() -> contextlib.AbstractContextManager:
    """Inside, operators compute with numbers, also while torch traces (2.11 to 2.15)."""
    return _disable_current_modes()


def root_modules(gm: GraphModule, attributes: Collection[int] = ()) -> dict[int, tuple[nn.Module, Any]]:
    """For each input of a Dynamo graph that is a parameter or buffer, by position: the module through which
    the compiled frame reaches it, and its source. `attributes`: parameters that are plain attributes."""
    output = _output()
    scopes = {"L": output.local_scope, "G": output.global_scope} if output is not None else {}
    values: dict[Any, Any] = {}  # what sources stand for
    found: dict[int, tuple[nn.Module, Any]] = {}
    for position, placeholder in enumerate(gm.graph.find_nodes(op="placeholder") if scopes else ()):
        root = _root(getattr(placeholder, "_dynamo_source", None), position in attributes)
        try:
            module = root.get_value(scopes, {}, values) if root is not None else None
        except Exception:  # a source that no expression of the frame stands for
            continue
        if isinstance(module, nn.Module):
            found[position] = module, root
    return found


def _root(source: Any, is_attribute: bool) -> Any:
    """What the first step to a parameter or buffer starts from: `L['self']` is the source for
    `L['self']._modules['up']._parameters['weight']`. None if this is no source of one."""
    root, owned = None, is_attribute
    containers = "_modules", "_parameters", "_buffers"
    while source is not None:
        first = is_attribute and root is None  # `.weight` itself
        if isinstance(source, AttrSource) and (first or source.member in containers):
            root, owned = source.base, owned or source.member != "_modules"
        source = getattr(source, "base", None)
    return root if owned else None


def is_part(module: nn.Module) -> bool:
    """True if a graph of this module is compiled because a module around it is, whose own graph breaks. Ask
    within the backend: between it and the compiled module's call are the frames of modules being called."""
    compiling = False
    for frame in frames():
        file = frame.f_code.co_filename.replace("\\", "/")
        compiling = compiling or file.endswith("torch/_dynamo/convert_frame.py")
        if compiling and file.endswith("torch/_dynamo/eval_frame.py"):
            return False
        caller = frame.f_locals.get("self") if compiling else None
        around = isinstance(caller, nn.Module) and any(part is module for part in caller.modules())
        if around and caller is not module:
            return True
    return False


def outermost(module: nn.Module) -> nn.Module:
    """The outermost module around this one whose forward is under way, or the module itself. To be asked
    within the backend: eager modules around a compiled one are on the stack when it is compiled."""
    found = module
    for caller in called(CALLS):
        if caller is not found and any(part is found for part in caller.modules()):
            found = caller
    return found


def called(functions: Collection[str] = ("__call__", "_wrapped_call_impl")) -> Iterator[nn.Module]:
    """The modules that are being called, from the inside out. `functions`: those of a module that tell."""
    for frame in frames():
        caller = frame.f_locals.get("self") if frame.f_code.co_name in functions else None
        if isinstance(caller, nn.Module):
            yield caller


def _output() -> Any:
    """What Dynamo traces now; None outside of Dynamo."""
    try:
        return InstructionTranslator.current_tx().output
    except AttributeError:
        return None


def guard_attribute(source: Any, name: str) -> None:
    """Compile again where this attribute of the module at `source`, a bool or a string, is another one."""
    context = TracingContext.try_get()
    if context is not None:
        guard = AttrSource(source, name).make_guard(GuardBuilder.CONSTANT_MATCH)
        context.guards_context.dynamo_guards.add(guard)


def symbolic_kernels() -> contextlib.AbstractContextManager[None]:
    """Inside, operators take symbolic sizes. Torch sets this up itself, but not for a backward that
    AOTAutograd compiles at its first call (of a tensor subclass)."""
    return enable_python_dispatcher()


def gradient_outputs(graph: Graph) -> list[tuple[Node, int]] | None:
    """The outputs of a joint graph that are gradients, each with the position of the Dynamo input (for a
    tensor subclass, of which it is a part's gradient). None where AOTAutograd does not describe outputs."""
    output = next(iter(graph.find_nodes(op="output")))
    descs = output.meta.get("desc")
    if not isinstance(descs, (list, tuple)) or len(descs) != len(output.args[0]):  # type: ignore[arg-type]
        return None
    found = []
    for node, desc in zip(output.args[0], descs, strict=True):  # type: ignore[arg-type]
        index = _index(getattr(_whole(desc), "grad_of", None))
        if isinstance(node, Node) and index is not None:
            found.append((node, index))
    return found


def is_tangent(node: Node) -> bool:
    """True if this node is an input of the backward: the gradient of an output."""
    return "Tangent" in type(_whole(node.meta.get("desc"))).__name__


@contextlib.contextmanager
def other_code(functions: Iterable[types.FunctionType]) -> Iterator[None]:
    """Inside, each of these functions for which Dynamo has compiled code has a copy of its code object, so
    that Dynamo finds none and adds none. (Each holds a limited number, and Dynamo drops all or none.)"""
    before = [(f, f.__code__) for f in functions if _debug_get_cache_entry_list(f.__code__)]
    for function, code in before:
        function.__code__ = code.replace(co_name=code.co_name)
    try:
        yield
    finally:
        for function, code in before:
            function.__code__ = code


@contextlib.contextmanager
def compiled_code_goes(kept: Collection[types.CodeType] = ()) -> Iterator[None]:
    """On leaving, drop the code that Dynamo has compiled inside, also the code for the user's frames after a
    graph break. A frame that had compiled code before keeps all of it, because Dynamo drops all code of a
    frame or none. So do the frames of `kept`. Inside, Dynamo does not learn which sizes are dynamic."""
    ours: dict[int, types.CodeType] = {}
    theirs: set[int] = set()

    def note(code: types.CodeType, made: types.CodeType) -> None:
        if id(code) not in ours and id(code) not in theirs and not any(code is x for x in kept):
            theirs.add(id(code)) if _debug_get_cache_entry_list(code) else ours.update({id(code): code})

    limits = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}
    hook = convert_frame.register_bytecode_hook(note)  # type: ignore[arg-type]
    try:
        with hook, config.patch(automatic_dynamic_shapes=False, **limits):
            yield
    finally:
        for code in ours.values():
            torch._C._dynamo.eval_frame.reset_code(code)
