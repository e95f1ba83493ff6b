"""The callable that Dynamo gets for one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import compat, process
from ..config.options import Options
from ..extension import GraphFeature
from ..frontend.owner import place_at_call
from ..ir.fx_utils import fake_mode_of
from ..passes.joint import Rewritten
from . import open_rules, probe
from .calls import Call, Calls, Interface, is_dry
from .ledger import Ledger
from .owners import Owners
from .parameters import record_of, share_records


@dataclass(eq=False, repr=False)
class CompiledGraph:
    """Passes what features give to the graph, and records which parameters it is called with.

    `function` is what Inductor made; `record` is the graph's index in the ledger. `parts`: those that
    features have in it. `options`: what it was compiled with. `done`: what the passes did to it."""

    function: Callable[..., Any]
    interface: Interface
    calls: Calls
    owners: Owners
    record: int | None
    parts: Sequence[GraphFeature]
    options: Options
    done: Rewritten
    unread: torch.Tensor | None = None  # for inputs of features that the graph does not read

    def __post_init__(self) -> None:
        self.function = compat.dynamo.undisabled(self.function)  # Dynamo disables itself around all of it
        self.giving = [part for part in self.parts if part.inputs]  # those that give the graph inputs

    def __call__(self, *args: Any) -> Any:
        interface = self.interface
        if not interface.weights:
            return self.function(*args)
        first = args[interface.weights[0]]
        if isinstance(first, compat.FakeTensor):  # DDPOptimizer asks for the shapes of the outputs
            with fake_mode_of(first):
                fakes = [part.stand_ins(first.device) for part in self.giving]
                return self.function(*args, *self._filled(fakes, torch.empty(1, device=first.device)))
        # the parameters that the user holds
        known = compat.flat.owners(args, interface.packed) if interface.packed else args
        if isinstance(known[interface.weights[0]], nn.Parameter):
            key = self.owners.key(known)
            if key not in self.owners.known:
                self._first_call(key, known)
        looked_at = bool(process.of(probe.Active) or self.calls.measured_calls.pending)
        call = Call(self._measuring(known) if looked_at else None)
        if call.measuring is not None:
            for part in self.parts:
                part.measure(known, call.measuring)
        given = self._given(known, first.device, call) if self.giving else ()
        if self.calls.groups and not self.calls.agreed and interface.trains and not is_dry():
            self.calls.agree()
        if call.state is None and not looked_at:
            return self.function(*args, *given)
        return self.calls.run(self.function, (*args, *given), call)

    def rest(self) -> None:
        """Another graph has taken over the calls."""
        self.owners.rest()
        for part in self.parts:
            part.rest()

    def resume(self) -> None:
        """It has the calls again: its casts are those that statistics show."""
        self.owners.know(self.owners.casts)

    def forget(self) -> None:
        """Forget every call and its state: the next call is the first one."""
        self.owners.known.clear()
        self.calls.measured_calls.pending.clear()
        for part in self.parts:
            part.forget()

    def _given(self, args: Sequence[Any], device: torch.device, call: Call) -> list[torch.Tensor]:
        """What features give the graph, and something for those of their inputs that it does not read."""
        if self.unread is None:
            self.unread = torch.empty(1, device=device)
        return self._filled([part.arguments(args, call) for part in self.giving], self.unread)

    def _filled(self, made: Sequence[Sequence[torch.Tensor]], unread: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self.giving, made, strict=True)
        return [x for part, found in pairs for x in (*found, *[unread] * (part.inputs - len(found)))]

    def _first_call(self, key: tuple[int, ...], args: Sequence[Any]) -> None:
        """The first call with these parameters."""
        weights = [args[i] for i in self.interface.weights]
        share_records(weights)
        if self.interface.trains:
            for weight in weights:
                record_of(weight).options = self.options
        owners = self.owners.add(key, args)
        prefix = self._named(weights)
        if self.record is not None:
            process.of(Ledger).attach(self.record, weights, prefix)
        try:
            for part in self.parts:
                part.first_call(args, owners, self.record)
        except Exception:
            self.owners.known.pop(key, None)  # the next call is the first one again
            raise

    def _named(self, weights: Sequence[Any]) -> str:
        """Name the weights as in their model; returns what the names begin with."""
        interface, place = self.interface, place_at_call(self.interface.kind)
        prefix = f"{place.name}." if place is not None and place.name else ""
        for i, weight in zip(interface.weights, weights, strict=True):
            record_of(weight).name = prefix + interface.names[i].removeprefix(interface.prefix)
        if place is not None and self.done.sites and self.record is not None:
            open_rules.add(place.model, self.options, self.record, self.done.sites)
        return prefix

    def _measuring(self, args: Sequence[Any]) -> probe.MeasuredCall | None:
        """Set for a call that is measured, or runs beside one that is; None for any other call."""
        interface = self.interface
        if not (interface.trains and self.done.converts) or compat.autograd.compiled_autograd():
            return None
        inside = compat.autograd.in_backward()
        call = self.calls.measured_calls.at(args, interface.weights, inside, not (inside or is_dry()))
        for measurement in call.measurements if call is not None else ():
            measurement.gemms |= {(record_of(args[i]), gemm) for i, gemm in self.done.gemms}
        return call
