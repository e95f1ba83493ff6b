"""What FSDP2 (`fully_shard`) manages. The parameters of a module are the sharded ones. Its forward, and so a
compiled graph, reads the unsharded ones. These are other objects. They stay the same for the whole run; their
memory is freed in between."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .autograd import in_backward

MADE = re.compile(r"^(?:FSDP|Replicate|DDP)(?=.)")  # what torch puts before the name of the class
FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"
EVALUATES = "fp8compile_evaluates"  # of a group: it was gathered for a forward without gradients


def class_name(kind: type | str) -> str:
    """The name of a module's class, as the user wrote it; `fully_shard` and `replicate` make FSDPLinear,
    ReplicateLinear or DDPLinear of it (2.11 to 2.15). `kind`: a class, or its name with its package."""
    package, _, name = kind.rpartition(".") if isinstance(kind, str) else (kind.__module__, "", kind.__name__)
    return MADE.sub("", name) if package.startswith("torch.distributed.") else name


def resharded(inputs: Sequence[Any], to_fewer: bool = False) -> frozenset[int]:
    """Which of a graph's inputs FSDP2 frees after forward and gathers again in backward, by position;
    `to_fewer`: of those, which it shards over fewer ranks in between."""
    groups = [group for group in _groups() if group.post_forward_mesh_info is not None]
    groups = [group for group in groups if not to_fewer or group._use_post_forward_mesh]
    freed = {id(_unsharded(p)) for group in groups for p in group.fsdp_params}
    return frozenset(i for i, value in enumerate(inputs) if value is not None and id(value) in freed)


def sharded_pairs() -> Iterator[tuple[Any, Any]]:
    """Each parameter that FSDP2 has sharded, with the unsharded one that graphs read, once it exists."""
    for group in _groups():
        for parameter in group.fsdp_params:
            if (read := _unsharded(parameter)) is not None:
                yield parameter.sharded_param, read


def gathered_as() -> dict[int, tuple[Tensor, torch.dtype]]:
    """Each parameter that FSDP2 has sharded, and the dtype in which graphs read it; by its id."""
    found = [p for group in _groups() for p in group.fsdp_params]
    return {id(p.sharded_param): (p.sharded_param, _read_dtype(p)) for p in found}


def _read_dtype(parameter: Any) -> torch.dtype:
    policy = parameter.mp_policy.param_dtype  # before the first forward
    return getattr(parameter, "param_dtype", policy) or parameter.sharded_param.dtype


def local_shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """The shapes that this rank multiplies by, of the tensors that it has in parts. FSDP2's own shards are no
    parts: they are gathered."""
    gathered = {id(p.sharded_param): p._orig_size for group in _groups() for p in group.fsdp_params}
    found = {}
    for name, tensor in tensors.items():
        shape = gathered.get(id(tensor), local(tensor).shape)
        if shape != tensor.shape:
            found[name] = list(shape)
    return found


def sharding() -> str | None:
    """The parameter of which FSDP2 makes a shard, or pads one, right now ("Linear.weight"); None: of none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != FSDP_PARAM:
        frame = frame.f_back  # type: ignore[assignment]
    while frame is not None and "self" not in frame.f_locals:  # the frame of a helper
        frame = frame.f_back  # type: ignore[assignment]
    info = getattr(frame.f_locals["self"], "_module_info", None) if frame is not None else None
    return f"{class_name(type(info.module))}.{info.param_name}" if info is not None else None


def local(tensor: Tensor) -> Any:
    """What a rank has of a DTensor, itself, not a view of it; any other tensor is whole."""
    return getattr(tensor, "_local_tensor", tensor)


def with_local(tensor: Any, part: Tensor) -> Tensor:
    """A DTensor as this one, with other values on this rank."""
    sizes = {"shape": tensor.shape, "stride": tensor.stride()}
    return type(tensor).from_local(part, tensor.device_mesh, tensor.placements, run_check=False, **sizes)


def meshes(tensors: Iterable[Any]) -> list[Any]:
    """The meshes of those that are DTensors."""
    return [tensor.device_mesh for tensor in tensors if hasattr(tensor, "placements")]


def shard_group(tensor: Any) -> Any:
    """The ranks that have the shards of a DTensor of FSDP2 together; None: each has all of it."""
    dimension = next((i for i, placement in enumerate(tensor.placements) if placement.is_shard()), None)
    return tensor.device_mesh.get_group(dimension) if dimension is not None else None


def is_fully_sharded(module: nn.Module) -> bool:
    """True if `fully_shard` has taken this module."""
    states = sys.modules.get("torch.distributed.fsdp")
    return states is not None and isinstance(module, states.FSDPModule)


def _unsharded(parameter: Any) -> Any:
    return getattr(parameter, "_unsharded_param", None)  # None before the first forward


def _groups() -> Iterator[Any]:
    """The groups of parameters of all modules that were sharded in this process."""
    states = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if states is None:  # FSDP2 was not imported
        return
    from torch.distributed._composable_state import _module_state_mapping

    alive = [reference() for reference in list(_module_state_mapping.values())]
    for state in {id(state): state for state in alive}.values():
        if isinstance(state, states.FSDPState):
            yield from _of(state)


# -- what is gathered --


class ShardedParameter:
    """A parameter of `fully_shard`, and what its ranks gather for it. `prepare()` makes what this rank sends:
    a matrix, and maybe a second tensor. `finish(*gathered)` makes the weight of what arrives; a rank alone
    gets its matrix only. Both may be of several kinds (`use`): each has its own memory and its own unsharded
    parameter, of which FSDP2 fills and frees the one that is in use. Read in 2.11, 2.13 and 2.15."""

    def __init__(self, parameter: Any, group: Any, name: str):
        self._parameter, self.group, self.name = parameter, group, name
        self.module: nn.Module = parameter._module_info.module  # whose parameter it is
        self.tied = bool(parameter._module_info.shared_modules)
        self.is_tensor_parallel: bool = parameter.is_dtensor
        self.is_replicated = not hasattr(group.mesh_info, "shard_mesh_size")  # each rank has the whole
        self.on_cpu: bool = parameter.offload_to_cpu
        self.kind = ""  # in use
        self._others: dict[str, tuple[Any, Any]] = {}  # of other kinds: FSDP2's memory, unsharded parameter

    @property
    def sharded(self) -> nn.Parameter:
        """What the module and the optimizer have. Another object after `load_state_dict(assign=True)`."""
        return self._parameter.sharded_param

    @property
    def shard(self) -> Tensor:
        """The values on this rank, padded to the size that they have on the others."""
        return self._parameter._sharded_param_data.view(self._parameter.padded_sharded_param_size)

    @property
    def dtype(self) -> torch.dtype:
        """Of the unsharded parameter."""
        return self._parameter.param_dtype or self._parameter.orig_dtype

    @property
    def own_rows(self) -> int:
        """How many rows of `shard` are the parameter's."""
        return self._parameter.sharded_size[0]

    @property
    def by_rows(self) -> bool:
        """True if each rank has some rows, as many as all others."""
        parameter = self._parameter
        even = parameter.padded_sharded_param_size[0] * self.process_group.size() == parameter._orig_size[0]
        return parameter.fsdp_placement.dim == 0 and even

    @property
    def process_group(self) -> Any:
        return self.group._all_gather_process_group

    @property
    def extended(self) -> bool:
        """True if somebody else already says what is gathered."""
        return hasattr(self._local, "fsdp_pre_all_gather") and not self.installed

    @property
    def partly_resharded(self) -> bool:
        """True if it is resharded after forward to fewer ranks than it was sharded to."""
        return self.group._use_post_forward_mesh

    @property
    def evaluates(self) -> bool:
        """True if it is gathered for a forward without gradients."""
        return getattr(self.group, EVALUATES, False)

    @property
    def accumulates(self) -> bool:
        """True if the unsharded parameter has a gradient that was not reduced yet."""
        return getattr(_unsharded(self._parameter), "grad", None) is not None

    @property
    def _local(self) -> Any:
        return self._parameter._sharded_local_tensor

    @property
    def installed(self) -> bool:
        return getattr(self._local, "fp8_all_gather", None) is self

    def install(self, prepare: Callable[[], Sequence[Tensor]], finish: Callable[..., Tensor]) -> None:
        """Into the shard's tensor, where FSDP2 looks for it. `load_state_dict(assign=True)` makes another."""

        def pre(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
            return tuple(prepare()), None

        def post(outputs: Sequence[Tensor], metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
            if out is not None:
                return None  # made of the same memory, which has been filled
            size = self._parameter._orig_size
            return finish(outputs[0].reshape(-1)[: size.numel()].view(size), *outputs[1:]), ()

        local = self._local
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather, local.fp8_all_gather = pre, post, self
        self._parameter._init_extensions()

    def use(self, kind: str) -> None:
        """Within `prepare`: it makes this kind now."""
        parameter = self._parameter
        if self.kind and kind != self.kind:
            self._others[self.kind] = parameter.all_gather_outputs, _unsharded(parameter)
            parameter.all_gather_outputs, unsharded = self._others.pop(kind, ([], None))
            if unsharded is not None:
                parameter._unsharded_param = unsharded
            elif hasattr(parameter, "_unsharded_param"):
                del parameter._unsharded_param  # FSDP2 makes one
        self.kind = kind


def sharded_parameters(model: nn.Module) -> list[ShardedParameter]:
    """All that `fully_shard` manages in a model, in the order of the model."""
    groups = [group for state in _states(model) for group in _of(state)]
    found = {id(p.sharded_param): (p, group) for group in groups for p in group.fsdp_params}
    return [ShardedParameter(*found[id(p)], name) for name, p in model.named_parameters() if id(p) in found]


def listen(model: nn.Module, listener: Any) -> None:
    """Tell a listener what FSDP2 does: `begin(evaluates)`, a forward of the model begins; `end()`, a backward
    has ended; `reduces()`, a backward has begun whose gradients are reduced. It is asked `differs(group)`:
    are the parameters of a group of FSDP2 gathered in another way in training than in evaluation? Its
    attribute `evaluates` says whether the forward under way is one without gradients."""
    for state in _states(model):
        _hear_forward(state, listener)
        _hear_backward(state, listener)
        for group in _of(state):
            _hear_unshard(group, listener)


def _hear_forward(state: Any, listener: Any) -> None:
    original = state._root_pre_forward

    def root_pre_forward(*args: Any) -> Any:
        state._lazy_init()
        context = state._state_ctx
        if context.iter_forward_root is None:
            if context.post_optim_event is not None:  # the listener reads what another stream writes
                state._device_handle.current_stream().wait_event(context.post_optim_event)
                context.post_optim_event = None
            if in_backward():  # a checkpoint around a sharded module computes it again
                listener.evaluates = not torch.is_grad_enabled()
            else:
                listener.begin(not torch.is_grad_enabled())
        return original(*args)  # from here on, streams that gather wait for what the listener has written

    state._root_pre_forward = root_pre_forward


def _hear_backward(state: Any, listener: Any) -> None:
    original = state._root_post_backward_final_callback

    def root_post_backward_final_callback() -> None:
        original()
        listener.end()

    state._root_post_backward_final_callback = root_post_backward_final_callback


def _hear_unshard(group: Any, listener: Any) -> None:
    original = group.unshard

    def unshard(async_op: bool = False) -> None:
        backward = group._training_state.name == "PRE_BACKWARD"
        if backward and group.reduce_grads:
            listener.reduces()
        if group._all_gather_result is None:  # else it is under way
            evaluates = listener.evaluates and not backward
            changes = evaluates != getattr(group, EVALUATES, evaluates)
            if group.is_unsharded and changes and listener.differs(group):
                group._to_sharded()  # it was left unsharded, for the other purpose
            if not group.is_unsharded:
                setattr(group, EVALUATES, evaluates)
        original(async_op)

    group.unshard = unshard


def _states(model: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    yield from {id(state): state for state in states}.values()


def _of(state: Any) -> Sequence[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # up to 2.11


# -- how gradients are reduced --


class Shard(NamedTuple):
    """A parameter in FSDP2's buffer of gradients: the whole's shape, and a rank's elements with padding."""

    shape: tuple[int, ...]
    elements: int


def shard_ranks(module: Any) -> int:
    """Over how many ranks FSDP2 shards this module's own parameters; 1 for none, or if it replicates them."""
    meshes = [group.mesh_info for group in _of(module._get_fsdp_state())]
    return max((getattr(mesh, "shard_mesh_size", 1) for mesh in meshes), default=1)


def reduce_shards_by(module: Any, reduce: Callable[..., None]) -> None:
    """FSDP2 calls `reduce(out, flat, group, factor, shards, key)` instead of its reduce-scatter for the
    parameters of this module: `out` [n] becomes the sum over the group of `flat` [ranks, n], times factor.
    Its own is called where not all of them have gradients, because the buffer does not say which.

    ValueError if they lie on several meshes."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    groups = _of(module._get_fsdp_state())
    if not groups:  # a module without parameters of its own
        return

    class Reduced(DefaultReduceScatter):
        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> Any:
            ranks = torch.distributed.get_world_size(group)
            shards = [
                Shard(tuple(p._orig_size), p.padded_sharded_param_size.numel())
                for p in groups[0].fsdp_params
                if p.sharded_param.requires_grad
            ]
            if async_op or sum(shard.elements for shard in shards) * ranks != input_tensor.numel():
                return super().__call__(output_tensor, input_tensor, group, op, async_op)
            reduce(output_tensor, input_tensor, group, _factor(op, ranks), shards, id(groups[0]))
            return None

    module.set_custom_reduce_scatter(Reduced())


def _factor(op: Any, ranks: int) -> float:
    if op == torch.distributed.ReduceOp.AVG:
        return 1 / ranks
    return 1.0 if op == torch.distributed.ReduceOp.SUM else float(op.__getstate__()[1])  # PREMUL_SUM's factor


def no_versions(*tensors: Tensor) -> AbstractContextManager[None]:
    """Inside, writing into these does not tell autograd: what it has saved of them stays what it was."""
    return torch.autograd._unsafe_preserve_version_counter(tensors)
