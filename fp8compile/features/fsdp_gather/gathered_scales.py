"""Scales of the weights that FSDP2 gathers in FP8, and what the ranks agree on, in one all-reduce (maximum)
for all weights:

    [amax of each weight, code of each weight, -code of each weight]        code: 0 bf16, else how it is cast

A weight with one scale is scaled by the amax of all shards. A weight with scales of square blocks needs no
amax of other ranks: its shards have whole blocks. Its scales travel after its bytes. Amaxes are reduced as
the bits of float32, in which NaN is the largest: gloo's maximum of numbers may lose one.

Nothing here waits for the device. What the ranks agreed on is copied to the host, and read one step later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import compat
from ...config.recipe import WHOLE, Block, recipe_of
from ...devices.formats import Format, pick
from ...ir import ops
from ...ir.gathered_weight import GatheredWeight
from ...ir.records import Gatherable
from ...ir.scale import inverse_of, scale_of, scale_to, to_power_of_2
from ...runtime import probe

if TYPE_CHECKING:
    from .all_gather import Gathered

COLUMNS = 4  # the first is a scale's inverse: each is aligned to 16 bytes, as Inductor expects of inputs
MARGINS = 65  # 0 to 64
IN_HIGH_PRECISION = 0  # the code of a weight that is gathered in its own dtype


def code_of(form: Gatherable) -> int:
    """One number for how a weight is cast, which travels with the amaxes."""
    return 1 + form.fnuz + 2 * form.power_of_2 + 4 * (form.margin + MARGINS * form.block.rows)


def form_of(code: int) -> Gatherable:
    """How a weight is cast, of a code that is not IN_HIGH_PRECISION."""
    rest, bits = divmod(code - 1, 4)
    side, margin = divmod(rest, MARGINS)
    block = Block(side, side)
    return Gatherable(fnuz=bool(bits & 1), power_of_2=bool(bits & 2), margin=margin, block=block)


def format_of(form: Gatherable) -> Format:
    return pick(False, form.fnuz)


def misfit(entry: Gathered, form: Gatherable) -> str:
    """Why a weight cannot be gathered so, the same on all ranks; "" if it can."""
    parameter, side = entry.parameter, form.block.rows
    if not side or parameter.process_group.size() == 1:
        return ""
    recipe, rows = recipe_of(False, form.block), parameter.shard.shape[0]
    if not parameter.by_rows:
        return f"{recipe}: shards are of different sizes, or by columns"
    return f"{recipe}: shards of {rows} rows are no multiple of {side}" if rows % side else ""


class Scales:
    """Of the weights that one group of ranks gathers, by their position in `entries`."""

    def __init__(self, entries: list[Gathered]):
        self.entries = entries
        for i, entry in enumerate(entries):
            entry.scales, entry.position = self, i
        self.amax: Tensor | None = None  # [n], of whole weights; 0 for those that need none
        self.scale: Tensor | None = None  # [n]
        self.inverse: Tensor | None = None  # [n, COLUMNS]; graphs read it, so it stays where it is
        self.blocks: dict[int, Tensor] = {}  # own blocks' inverses: they travel nowhere, and stay in place
        self.pending: tuple[Tensor, Any] | None = None  # agreed codes on their way to the host; their event
        # on the device, and made anew only when codes change: a copy to the device could wait for it
        self.sent: tuple[Any, Tensor] | None = None  # own codes, and [2, n] that is sent of them
        # codes; the FP8 numbers of amaxes; whose scales are powers of 2
        self.reach: tuple[Any, Tensor, Tensor] | None = None
        self.nothing: Tensor | None = None  # a zero

    @property
    def device(self) -> torch.device:
        return self.entries[0].parameter.shard.device

    def refresh(self, at_once: bool, free: bool) -> None:
        """Scales of current amaxes, and which weights are gathered in FP8: the same on all ranks. `at_once`:
        this agreement holds from now on; else it holds from the next one on, and the device is not waited
        for. `free`: no backward needs what was gathered for its forward."""
        self.settle(free)
        codes = tuple(entry.own_code for entry in self.entries)
        both = [(entry.code, own) for entry, own in zip(self.entries, codes, strict=True)]
        wanted = [i for i, pair in enumerate(both) if any(c and form_of(c).block == WHOLE for c in pair)]
        vector = torch.cat((self.amaxes(wanted).abs().view(torch.int32).unsqueeze(0), self.signed(codes)))
        dist.all_reduce(vector, dist.ReduceOp.MAX, self.entries[0].parameter.process_group)
        on_gpu = self.device.type == "cuda"
        host = torch.empty(2, len(codes), dtype=torch.int32, pin_memory=on_gpu)
        host.copy_(vector[1:], non_blocking=True)
        event = torch.cuda.Event() if on_gpu else None
        if event is not None:
            event.record()
        self.pending = host, event
        if at_once:
            self.settle(free)
        self.write(vector[0].view(torch.float32))

    def amaxes(self, wanted: Sequence[int]) -> Tensor:
        """[n] float32, of this rank's shards; 0 for weights that are not `wanted`."""
        if self.nothing is None:
            self.nothing = torch.zeros((), dtype=torch.float32, device=self.device)
        parameters = [entry.parameter for entry in self.entries]
        norms: dict[tuple[torch.dtype, torch.dtype], dict[int, Tensor]] = defaultdict(dict)
        if wanted:
            found = torch._foreach_norm([parameters[i].shard.detach() for i in wanted], float("inf"))
            for i, norm in zip(wanted, found, strict=True):
                norms[norm.dtype, parameters[i].dtype][i] = norm
        known: dict[int, Tensor] = {}
        for (_, dtype), group in norms.items():
            # rounding keeps the order: the amax of the cast weight is the cast amax
            rounded = torch.stack([*group.values()]).to(dtype).float()
            known.update(zip(group, rounded.unbind(), strict=True))
        return torch.stack([known.get(i, self.nothing) for i in range(len(parameters))])

    def signed(self, codes: tuple[int, ...]) -> Tensor:
        if self.sent is None or self.sent[0] != codes:
            self.sent = codes, self._upload([codes, [-code for code in codes]], torch.int32)
        return self.sent[1]

    def _upload(self, data: Any, dtype: torch.dtype) -> Tensor:
        made = torch.tensor(data, dtype=dtype, pin_memory=self.device.type == "cuda")
        return made.to(self.device, non_blocking=True)

    def settle(self, free: bool) -> None:
        """What the ranks have agreed on holds from here on."""
        if self.pending is None or not free or any(entry.parameter.accumulates for entry in self.entries):
            return  # a backward, or a gradient that is not reduced yet, needs the parameter that is in use
        (highest, lowest), event = self.pending
        if event is not None:
            event.synchronize()  # of the step before
        for entry, high, low in zip(self.entries, highest.tolist(), lowest.tolist(), strict=True):
            entry.code = high if high == -low else IN_HIGH_PRECISION
        self.pending = None

    def write(self, amaxes: Tensor) -> None:
        """The scales of all weights."""
        codes = tuple(entry.code for entry in self.entries)
        if self.reach is None or self.reach[0] != codes:
            forms = [form_of(max(code, 1)) for code in codes]
            reach = [format_of(form).max / 2.0**form.margin for form in forms]
            powers = [form.power_of_2 for form in forms]
            self.reach = codes, self._upload(reach, torch.float64), self._upload(powers, torch.bool)
        _, reaches, powers_of_2 = self.reach
        scale = scale_to(amaxes, reaches)
        scale = torch.where(powers_of_2, to_power_of_2(scale), scale)
        if self.scale is None or self.inverse is None:
            self.scale, self.inverse = torch.empty_like(scale), scale.new_empty(len(scale), COLUMNS)
        with torch.no_grad(), compat.fsdp.no_versions(self.scale, self.inverse):
            self.scale.copy_(scale)
            self.inverse.copy_(inverse_of(scale).unsqueeze(1).expand(-1, COLUMNS))
        self.amax = amaxes

    # -- one gather --

    def prepare(self, i: int) -> Sequence[Tensor]:
        """What this rank sends of weight i: values [rows, K] or, in FP8, bytes and block scales' inverses."""
        entry, parameter = self.entries[i], self.entries[i].parameter
        code = IN_HIGH_PRECISION if parameter.evaluates else entry.code
        parameter.use(str(code))
        value = parameter.shard.detach().to(parameter.dtype)
        if not code:
            return (value,)
        data, scale = self.cast(i, value, form_of(code))
        if scale.dim() == 1:
            return (data.view(torch.uint8),)
        inverse = inverse_of(scale)
        if parameter.process_group.size() == 1:  # FSDP2 takes the first tensor alone then
            kept = self.blocks.setdefault(i, torch.empty_like(inverse))
            with compat.fsdp.no_versions(kept):
                kept.copy_(inverse)
            return (data.view(torch.uint8),)
        return data.view(torch.uint8), inverse

    def cast(self, i: int, value: Tensor, form: Gatherable) -> tuple[Tensor, Tensor]:
        """(FP8 values, scale) of this rank's part of weight i, or of some of its rows."""
        fp8 = format_of(form)
        if form.block != WHOLE:
            scale = scale_of(ops.amax_blocks(value, False, form.block), fp8.max, form.margin, form.power_of_2)
        else:
            assert self.scale is not None
            scale = self.scale[i : i + 1]
        return ops.quantize(value, scale, fp8.dtype, fp8.max, False, form.block), scale

    def finish(self, i: int, gathered: Tensor, inverse: Tensor | None = None) -> Tensor:
        """The weight of what arrives, which is all in memory that FSDP2 frees and fills again."""
        entry, parameter = self.entries[i], self.entries[i].parameter
        if not parameter.kind or int(parameter.kind) == IN_HIGH_PRECISION:
            return gathered
        form = form_of(int(parameter.kind))
        data = gathered.view(format_of(form).dtype)
        if form.block != WHOLE:
            inverse = self.blocks[i] if inverse is None else inverse
        else:
            assert self.inverse is not None
            inverse = self.inverse[i, :1]
        return GatheredWeight(data, inverse, parameter.dtype, entry.read, form.block)

    # -- statistics --

    def measured(self, i: int) -> Tensor:
        """As `probe.measured`: amax and scale of the whole weight if it has one scale; else of own rows."""
        entry, parameter = self.entries[i], self.entries[i].parameter
        form = form_of(entry.code)
        value = parameter.shard.detach()[: parameter.own_rows].to(parameter.dtype)
        data, scale = self.cast(i, value, form)
        found = probe.measured(value, scale, data, format_of(form).max, False, form.block)
        if form.block == WHOLE and self.amax is not None:
            found[probe.COLUMNS.index("amax")] = self.amax[i]
        return found
