"""Callables of ours in AOTAutograd's cache: a second process skips tracing, our passes and the partitioner.

With `bundled_autograd_cache`, an entry of that cache holds what the inner compiler returned for each half of
a graph, pickled, as far as it is an `OutputCode`; a hit unpickles both and calls `post_compile` of each
(torch 2.11 to 2.15). So a `Saved` half carries `content`, bytes of ours, in the same file as all else that
belongs to the entry. It names the code that Inductor made by its key in FxGraphCache, as torch's own
unbundled entries do. A half whose code is not there any more is a miss.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._inductor.output_code import OutputCode
from torch.fx import GraphModule

from .triton import accesses_known

TAGS = ("recompute", "ac_graph_id", "partitioner_tag")  # metadata that the user's checkpointing leaves

# `hit`: the halves that this thread's compilation has got from the cache; None: it uses no cache
_local = threading.local()


class Saved(OutputCode):
    """Half of a graph: `run` calls Inductor's code (`compiled`). `content`: what remakes `run`."""

    def __init__(self, run: Callable[[list[Any]], Any], compiled: Any, content: bytes | None, backward: bool):
        super().__init__()
        self._boxed_call = True  # of the instance, because wrappers copy its attributes
        self.run, self.content, self.backward = run, content, backward
        self.compiled: Any = None  # only of a half that came from the cache, until `run` is known
        key = getattr(compiled, "_fx_graph_cache_key", None)
        lines = getattr(compiled, "_fx_graph_cache_debug_lines", None) or []
        self.code = (key, lines, getattr(compiled, "guards_expr", None)) if key is not None else None
        self.digest = hashlib.sha256(content).hexdigest() if content is not None else ""

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self.run(inputs)  # type: ignore[arg-type]

    def prepare_for_serialization(self) -> None:
        if self.content is None or self.code is None:
            from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

            raise BypassAOTAutogradCache("fp8compile: this graph cannot be made again from a file")
        self.run, self.compiled = _not_made, None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """Load the code. `run` is made later, when all halves have been found."""
        from torch._functorch._aot_autograd.autograd_cache import FXGraphCacheMiss

        hit = getattr(_local, "hit", None)
        intact = self.content is not None and hashlib.sha256(self.content).hexdigest() == self.digest
        if hit is None or not intact or self.code is None:
            raise FXGraphCacheMiss("fp8compile: an entry that cannot be used")
        key, lines, guards = self.code
        loader = _loader(self.backward)((key, lines), guards)
        with inner_options(), accesses_known():
            self.compiled = loader.post_compile(loader.load(example_inputs), graph_kwargs)
        self.compiled._fx_graph_cache_key, self.compiled._fx_graph_cache_debug_lines = key, lines
        hit.append(self)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Nothing to do: the code's own entry has it."""


def _not_made(inputs: list[Any]) -> Any:
    what = "a half of a graph from the cache was called before it was made"
    raise RuntimeError(f"fp8compile: {what}; please report this")


@functools.cache
def _loader(backward: bool) -> Any:
    from torch._functorch._aot_autograd.aot_autograd_result import FxGraphCacheLoadable

    return type("Loader", (FxGraphCacheLoadable,), {"_is_backward": lambda self: backward})


def cache_is_on() -> bool:
    """True if a compilation may use AOTAutograd's cache in the way above. Not if it is off, and not if
    somebody bundles entries. Nor where another thread might compile with our options."""
    bundles = functorch_config.bundled_autograd_cache or dynamo_config.caching_precompile
    off = inductor_config.force_disable_caches or bundles or functorch_config.strict_autograd_cache
    on = options_by_thread() and functorch_config.enable_autograd_cache and inductor_config.fx_graph_cache
    return bool(on and not off)


def options_by_thread() -> bool:
    """True if torch's options, while patched, are a thread's (2.13, 2.15). In 2.11 they are the process's."""
    entries: Any = functorch_config
    return isinstance(entries._config["enable_autograd_cache"].user_override, ContextVar)


@contextlib.contextmanager
def cached(on: bool) -> Iterator[list[Saved]]:
    """Inside, AOTAutograd's cache is used with `Saved` halves, or not at all. Yields a list of the halves
    that came from it, once the compilation is over. They have code then, and no `run`."""
    hit: list[Saved] = []
    options: dict[str, Any] = {"enable_autograd_cache": on}
    if on:  # an entry is saved when its backward has been compiled: in here, while the options are ours
        options |= {"bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True}
    noted = mock.patch.object(_local, "hit", hit if on else None, create=True)
    with noted, functorch_config.patch(options):
        yield hit


def saved(run: Callable[[list[Any]], Any], compiled: Any, content: bytes | None, backward: bool) -> Any:
    """`run`, as a callable that AOTAutograd's cache can keep. `content` None: it cannot."""
    hit = getattr(_local, "hit", None)
    if hit is None:
        return run
    hit.clear()  # a half that was found, before the other one was missed
    return Saved(run, compiled, content, backward)


@contextlib.contextmanager
def inner_options() -> Iterator[None]:
    """For the inner compiler: it uses FxGraphCache as ever, although AOTAutograd bundles."""
    used = getattr(_local, "hit", None) is not None
    bundled = functorch_config.patch(bundled_autograd_cache=False) if used else contextlib.nullcontext()
    with mock.patch.object(_local, "inner", True, create=True), bundled:
        yield


def in_inner() -> bool:
    """True if this thread runs the inner compiler."""
    return getattr(_local, "inner", False)


def modules_of_nodes(gm: GraphModule) -> list[Any]:
    """Of each node of a Dynamo graph, and of the graphs nested in it, the modules that it belongs to, and the
    user's tags. AOTAutograd's key has none of these."""

    def text(kind: Any) -> str:
        return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"

    found: list[Any] = []
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            modules = (node.meta.get("nn_module_stack") or {}).values()
            stack = [(str(path), text(kind)) for path, kind in modules]
            tags = [(name, str(node.meta[name])) for name in TAGS if name in node.meta]
            found.append([node.op, node.name, stack, tags])
    return found


def modes() -> list[Any]:
    """What a trace depends on and that torch 2.11 to 2.15 do not all have in AOTAutograd's key."""
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    flags = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    defaults = torch.get_default_dtype(), str(torch.get_default_device())
    return [*autocast, *flags, deterministic, *defaults]


def has_hooks(tensor: torch.Tensor) -> bool:
    """True if there are hooks on the gradient of this tensor."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))
