"""The scaling state of a model on this rank, as plain tensors. `ScalingState` is the public name.

A slot is saved as the float32 vector "<parameter>.<role>.<use>": its row of a page (see `state_page`),
followed by its patience, the number of calls that may still be cold because of this slot.
"fp8compile.version" is an int64 vector of one element. All are copies on the CPU. Each has its own memory, as
safetensors requires. Parameters have the names that they have in the bare module, on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from ... import process
from ...config.recipe import ROLES
from ...errors import StateError
from ...logs import get_logger
from ...runtime.named_weights import named_weights, unwrapped
from . import state_page
from .arena import Arenas
from .state import Loading, Page, Slot, differing, slots_of
from .state_page import Rows
from .weight_state import state_of

logger = get_logger(__name__)

Key = tuple[str, str, int]  # parameter, role, use
VERSION_KEY, VERSION = "fp8compile.version", 2
# numbers of a slot in a file of each version: a row without its history, an amax or more, and its patience
SHORTEST = {1: 12, VERSION: state_page.HISTORY + 2}


def scaling_state(model: nn.Module) -> dict[str, Tensor]:
    """A model's delayed scaling state: {"layers.0.up.weight.input.0": float32 vector, ...}, and a version,
    which is all that other recipes have."""
    copies: dict[Page, Tensor] = {}
    state = {VERSION_KEY: torch.tensor([VERSION])}
    for (name, role, use), slot in slots_of(model).items():
        page = slot.page
        if page not in copies:
            copies[page] = page.now().detach().to("cpu", copy=True)
        patience = torch.tensor([float(page.patience)])
        state[f"{name}.{role}.{use}"] = torch.cat((copies[page][slot.row], patience))
    return state


def prepare_load(
    model: nn.Module, state: Mapping[str, Tensor] | None, strict: bool, quiet: bool = False
) -> Callable[[], None]:
    """Load a state that `scaling_state` returned, in two: the check, which raises, and the change, which is
    returned. None and {} are a cold start. `quiet`: what does not fit is not mentioned."""
    model = unwrapped(model)
    weights = named_weights(model)
    if state is not None and not isinstance(state, Mapping):
        wanted = "the dict that ScalingState(model).state_dict() returns, or None"
        raise StateError(f"a scaling state is {wanted}; this is {_kind(state)}")
    given = dict(state or {})
    rows = _parsed(given)
    known = slots_of(model)
    live = {key: slot for key, slot in known.items() if not slot.page.name}
    waiting = {key for key, slot in known.items() if slot.page.waits}
    loading = Loading(strict, quiet)
    differences = _differences(rows, weights, live, waiting) if given else []
    if strict:
        loading.differs(differences)

    def change() -> None:
        loading.differs(differences)
        process.of(Arenas).clear()
        for key, slot in live.items():
            if key not in rows:  # only where `state` is None or {}, or not `strict`
                _start_cold(slot)
        for name, weight in weights.items():  # drop slots that were loaded before and no graph has taken
            own = state_of(weight)
            own.slots = {key: slot for key, slot in own.slots.items() if not slot.page.name}
            own.loaded = name if given else None
        for key, row in rows.items():
            if key[0] in weights:
                _take(key, weights[key[0]], row, live.get(key), loading)

    return change


def _parsed(state: Mapping[str, Any]) -> dict[Key, Tensor]:
    """The slots of a state by name, on the CPU."""
    if not state:
        return {}
    version = state.get(VERSION_KEY)
    if not isinstance(version, Tensor) or version.numel() != 1 or int(version) not in SHORTEST:
        known = f"version {' or '.join(map(str, SHORTEST))}, under {VERSION_KEY!r}"
        raise StateError(
            f"this is no scaling state that can be read here: it should have {known}; it has {version!r}"
        )
    rows = {}
    for key, row in state.items():
        if key == VERSION_KEY:
            continue
        name, role, use = (str(key).rsplit(".", 2) + ["", ""])[:3]
        if role not in ROLES or not use.isdecimal():
            raise StateError(
                f"{key!r} is no name of a scaling state: they end in a role and a number, as in "
                "up.weight.input.0"
            )
        vector = isinstance(row, Tensor) and row.dim() == 1 and row.dtype == torch.float32
        shortest = SHORTEST[int(version)]
        if not vector or row.numel() < shortest:
            wanted = f"a float32 vector of {shortest} numbers or more"
            raise StateError(f"{key!r} of this scaling state should be {wanted}; it is {_kind(row)}")
        values, patience = row.detach().cpu().split([row.numel() - 1, 1])
        if int(version) == 1:
            values = state_page.of_version_1(values)
        rows[name, role, int(use)] = torch.cat((values, patience))
    return rows


def _kind(x: Any) -> str:
    return f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _differences(
    rows: Mapping[Key, Tensor], weights: Mapping[str, Tensor], live: Mapping[Key, Slot], waiting: Set[Key]
) -> list[str]:
    """What does not fit. `live`: slots of compiled graphs. `waiting`: loaded ones that none has taken yet."""
    found = []
    for key, row in rows.items():
        name, role, use = key
        full = f"{name}.{role}.{use}"
        if name not in weights:
            found.append(f"unexpected: {full} (the model has no {name})")
        elif key in live:
            saved, slot = Rows(row[:-1]), live[key]
            here = slot.page.settings[slot.row]
            found += differing(full, saved.settings(), saved.length, here, slot.numbers.length)
        elif live and key not in waiting:
            found.append(f"unexpected: {full}")
    missing = [key for key in live if key not in rows]
    return found + [f"missing: {name}.{role}.{use}" for name, role, use in missing]


def _take(key: Key, weight: Tensor, row: Tensor, slot: Slot | None, loading: Loading) -> None:
    """Put a loaded row into the page of `slot`; None: into its own, from which the first graph takes it."""
    name, role, use = key
    values, patience = row[:-1].clone(), int(row[-1])
    homes, settings = [(weakref.ref(weight), (role, use))], (Rows(values).settings(),)
    state_of(weight).said[role, use] = Rows(values).counts()  # the run that saved it has said these
    page = Page(values.unsqueeze(0), homes, settings, patience=patience, loaded=True)
    if slot is None:
        page.name, page.loading = f"{name}.{role}.{use}", loading
        state_of(weight).slots[role, use] = Slot(page, 0)
        return
    slot.page.take(slot.row, page)
    slot.page.patience, slot.page.loaded, slot.page.restarted = patience, True, False


def _start_cold(slot: Slot) -> None:
    page = slot.page
    cold = state_page.new_page(1, slot.numbers.length, page.tensor.device, [page.settings[slot.row]])
    page.write(slot.row, cold[0])
    page.patience, page.loaded = max(page.patience, type(page).patience), True
