"""Parameters of modules that are kept in FP8 only (`ir.frozen`): plain tensors in `state_dict()`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..ir.frozen import FrozenWeight
from .parameters import adopt


@dataclass(frozen=True)
class Stack:
    """Where the matrices of a stack of weights ``[E, out, in]`` are in a checkpoint: for each of them the
    names of the tensors ``[.., in]`` whose rows stand below each other in it. `transposed`: the stack is
    ``[E, in, out]``."""

    names: Sequence[Sequence[str]]
    transposed: bool = False


# modules whose `state_dict()` has our hook -> the names of their parameters that are, or were, kept so, each
# with its place in the checkpoint if it has another name there
_held: WeakKeyDictionary[nn.Module, dict[str, Stack | None]] = WeakKeyDictionary()
_OWN = frozenset({"data_", "inv_", "read", "block", "margin", "power_of_2", "stored", "_is_param"})


def replace(module: nn.Module, name: str, made: nn.Parameter) -> None:
    """Put a parameter in the place of another one, whose attributes and record it gets."""
    parameter: Any = module._parameters[name]
    made.__dict__.update({key: value for key, value in parameter.__dict__.items() if key not in _OWN})
    adopt(parameter, made)
    module._parameters[name] = made


def hold(
    module: nn.Module, name: str, weight: FrozenWeight, for_a_try: bool = False, stack: Stack | None = None
) -> None:
    """Keep a parameter in FP8 only, from now on. `for_a_try`: nothing of it is remembered. `stack`: its place
    in the checkpoint that it comes from, if it has another name there."""
    replace(module, name, nn.Parameter(weight, requires_grad=False))
    if for_a_try:
        return
    if module not in _held:
        module.register_state_dict_post_hook(_plain_entries)
    _held.setdefault(module, {})[name] = stack


def all_held() -> Iterator[tuple[nn.Module, str]]:
    """The parameters of this process that are, or were, kept in FP8 only."""
    for module, names in list(_held.items()):
        yield from ((module, name) for name in sorted(names))


def stack_of(module: nn.Module, name: str) -> Stack | None:
    """Where a parameter that is kept so is in its checkpoint, if it has another name there."""
    return _held.get(module, {}).get(name)


def release(module: nn.Module, name: str, plain: nn.Parameter) -> None:
    """Give a module a plain parameter again."""
    replace(module, name, plain)
    _held.get(module, {}).pop(name, None)


def _plain_entries(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook of `state_dict()`: plain tensors, unless `keep_vars` asks for the parameters themselves."""
    for name, parameter in module._parameters.items():
        entry = state.get(f"{prefix}{name}")
        if isinstance(entry, FrozenWeight) and entry is not parameter:
            state[f"{prefix}{name}"] = entry.dequantized()
