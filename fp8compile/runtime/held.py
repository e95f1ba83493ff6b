"""Parameters of modules that are kept in FP8 only (`ir.frozen`): plain tensors, or DTensors
of such, in `state_dict()`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from .. import compat
from ..ir import frozen_shard
from ..ir.frozen import FrozenWeight
from .parameters import adopt


class StackPart(NamedTuple):
    """A tensor of a checkpoint that is a part of a stack of matrices: `rows` rows of one ``[out, in]``, from
    `row` on. `transposed`: the stack is ``[E, in, out]``."""

    name: str
    matrix: int
    row: int
    rows: int
    transposed: bool

    def of(self, stack: Tensor, side: int = 1) -> Tensor:
        """This part of a stack, a view. `side`: how many rows share one of the stack."""
        stack = stack.transpose(1, 2) if self.transposed else stack
        return stack[self.matrix, self.row // side : (self.row + self.rows) // side]


# modules whose `state_dict()` has our hook -> the names of their parameters that are, or were, kept so, each
# with its parts in the checkpoint if it has not one name there
_held: WeakKeyDictionary[nn.Module, dict[str, tuple[StackPart, ...]]] = WeakKeyDictionary()
_OWN = frozenset({"data_", "inv_", "read", "block", "margin", "power_of_2", "stored", "_is_param"})


def held_in(parameter: Any) -> FrozenWeight | None:
    """What this rank has of a parameter that is kept in FP8 only: the weight, or a shard of it; else None."""
    part = compat.fsdp.local(parameter)
    return part if isinstance(part, FrozenWeight) else None


def whole(parameter: Any) -> FrozenWeight:
    """A parameter that is kept in FP8 only; if it is sharded, of all ranks: a collective."""
    return parameter if isinstance(parameter, FrozenWeight) else frozen_shard.gathered(parameter)


def replace(module: nn.Module, name: str, made: nn.Parameter) -> None:
    """Put a parameter in the place of another one, whose attributes and record it gets."""
    parameter: Any = module._parameters[name]
    made.__dict__.update({key: value for key, value in parameter.__dict__.items() if key not in _OWN})
    adopt(parameter, made)
    module._parameters[name] = made


def hold(
    module: nn.Module,
    name: str,
    weight: FrozenWeight,
    for_a_try: bool = False,
    parts: tuple[StackPart, ...] = (),
) -> None:
    """Keep a parameter in FP8 only, from now on. `for_a_try`: nothing of it is remembered. `parts`: what it
    is made of in the checkpoint that it comes from."""
    replace(module, name, nn.Parameter(weight, requires_grad=False))
    if for_a_try:
        return
    if module not in _held:
        module.register_state_dict_post_hook(_plain_entries)
    _held.setdefault(module, {})[name] = parts


def all_held() -> Iterator[tuple[nn.Module, str]]:
    """The parameters of this process that are, or were, kept in FP8 only."""
    for module, names in list(_held.items()):
        yield from ((module, name) for name in sorted(names))


def parts_of(module: nn.Module, name: str) -> tuple[StackPart, ...]:
    """What a parameter that is kept so is made of in its checkpoint; () if it has one name there."""
    return _held.get(module, {}).get(name, ())


def release(module: nn.Module, name: str, plain: nn.Parameter) -> None:
    """Give a module a plain parameter again."""
    replace(module, name, plain)
    _held.get(module, {}).pop(name, None)


def _plain_entries(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook of `state_dict()`: plain tensors, unless `keep_vars` asks for the parameters themselves."""
    for name, parameter in module._parameters.items():
        entry = state.get(f"{prefix}{name}")
        held = held_in(entry)
        if held is not None and entry is not parameter:
            plain = held.dequantized()
            state[f"{prefix}{name}"] = plain if held is entry else compat.fsdp.with_local(entry, plain)
