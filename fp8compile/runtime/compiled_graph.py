"""The callable that Dynamo gets for one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .. import compat, process
from ..config.options import Options
from ..config.policy import Site
from ..extension import GraphFeature
from ..frontend.owner import place_at_call
from ..ir import state_page
from ..ir.fx_utils import fake_mode_of
from . import loads, open_rules, probe
from .calls import DRY, Call, Calls, Interface
from .ledger import Ledger
from .owners import Owners
from .parameters import record_of, share_records
from .state import check_unwanted


def new_state(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and amaxes of so many rows."""
    return state_page.new_scales(rows, device), state_page.new_amaxes(rows, device)


class CompiledGraph:
    """Passes the state inputs to the graph, and records which parameters it is called with.

    `function` is what Inductor made; `record` is the graph's index in the ledger; `converts`: some matmul of
    it became FP8. `parts`: those that features have in it. `options`: what it was compiled with. `sites`: its
    gemms, if it is of a part of a model.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        interface: Interface,
        calls: Calls,
        owners: Owners,
        record: int | None,
        converts: bool,
        parts: Sequence[GraphFeature] = (),
        options: Options | None = None,
        sites: Sequence[Site] = (),
    ):
        self.function = compat.dynamo.undisabled(function)  # Dynamo disables itself around the whole call
        self.interface, self.calls, self.owners = interface, calls, owners
        self.record, self.converts, self.parts = record, converts, parts
        calls.record = record
        self.options, self.sites = options, sites
        self.giving = [part for part in parts if part.inputs]  # those that give the graph inputs of its own
        self.unread: torch.Tensor | None = None  # for inputs of features that the graph does not read
        # stand-ins for state inputs that the graph does not read
        self.idle: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, *args: Any) -> Any:
        interface = self.interface
        if not interface.weights:
            return self.function(*args)
        first = args[interface.weights[0]]
        if isinstance(first, compat.FakeTensor):  # DDPOptimizer asks for the shapes of the outputs
            with fake_mode_of(first):
                book = self.calls.book
                rows = state_page.rows_for(len(book.keys)) if book is not None else 1
                pages = new_state(rows, first.device) if interface.stateful else ()
                fakes = [part.stand_ins(first.device) for part in self.giving]
                return self.function(*args, *pages, *self._filled(fakes, torch.empty(1, device=first.device)))
        # the parameters that the user holds
        known = compat.flat.owners(args, interface.packed) if interface.packed else args
        if isinstance(known[interface.weights[0]], nn.Parameter):
            key = self.owners.key(known)
            if key not in self.owners.met:
                self._meet(key, known)
        looked_at = bool(process.of(probe.Active) or self.calls.looking.open)
        look = self._looks(known) if looked_at else None
        if look is not None:
            for part in self.parts:
                part.measure(known, look)
        given = self._given(args, first.device, look) if self.giving else ()
        if self.calls.book is not None:
            call, scales, amaxes = self.calls.open(known, first.device, look)
            return self.calls.run(self.function, (*args, scales, amaxes, *given), call)
        if self.calls.groups and not self.calls.agreed and interface.trains:
            if not (DRY.get() or compat.process_groups.inferring_shapes()):
                self.calls.agree()
        if interface.stateful:  # the graph does not read its state inputs
            if self.idle is None:  # of the sizes that were traced: Inductor of 2.11 compares them
                self.idle = new_state(1, first.device)
            args = (*args, *self.idle)
        args = (*args, *given)
        if not looked_at:
            return self.function(*args)
        return self.calls.run(self.function, args, Call(None, look))

    def forget(self) -> None:
        """Forget every call and its state: the next call is the first one."""
        self.owners.met.clear()
        self.calls.looking.open.clear()
        if self.calls.book is not None:
            self.calls.book.forget()

    def _given(
        self, args: Sequence[Any], device: torch.device, look: probe.Look | None
    ) -> list[torch.Tensor]:
        """What features give the graph, and something for those of their inputs that it does not read."""
        if self.unread is None:
            self.unread = torch.empty(1, device=device)
        with compat.autograd.unseen():
            return self._filled([part.arguments(args, look) for part in self.giving], self.unread)

    def _filled(self, made: Sequence[Sequence[torch.Tensor]], unread: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self.giving, made, strict=True)
        return [x for part, found in pairs for x in (*found, *[unread] * (part.inputs - len(found)))]

    def _meet(self, key: tuple[int, ...], args: Sequence[Any]) -> None:
        """The first call with these parameters."""
        weights = [args[i] for i in self.interface.weights]
        share_records(weights)
        if self.calls.book is not None:
            loads.listen_to_callers()
        if self.interface.trains:
            for weight in weights:
                record_of(weight).options = self.options
            book = self.calls.book
            check_unwanted(weights, [args[i] for i in book.inputs] if book else [])
        owners = self.owners.meet(key, args)
        prefix = self._named(weights)
        if self.record is not None:
            process.of(Ledger).attach(self.record, weights, prefix)
        for part in self.parts:
            part.meet(args, owners, self.record)

    def _named(self, weights: Sequence[Any]) -> str:
        """Name the weights as in their model; returns what the names begin with."""
        interface, place = self.interface, place_at_call(self.interface.kind)
        prefix = f"{place.name}." if place is not None and place.name else ""
        for i, weight in zip(interface.weights, weights, strict=True):
            record_of(weight).name = prefix + interface.names[i].removeprefix(interface.prefix)
        if place is not None and self.sites and self.options is not None and self.record is not None:
            open_rules.add(place.model, self.options, self.record, self.sites)
        return prefix

    def _looks(self, args: Sequence[Any]) -> probe.Look | None:
        """The `Look` of a call that is measured, or runs beside one that is; None for any other call."""
        interface = self.interface
        scaled = interface.trains and self.converts and not interface.observes
        if not scaled or compat.autograd.compiled_autograd():
            return None
        may_begin = not (
            compat.autograd.in_backward() or DRY.get() or compat.process_groups.inferring_shapes()
        )
        return self.calls.looking.at(args, interface.weights, compat.autograd.in_backward(), may_begin)
