"""Gradients that cross the wire in FP8: what `compress_gradients` asks of DDP and FSDP2, and statistics."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ... import compat
from ...extension import Feature
from ...ir.fx_utils import FLOATS
from ...logs import get_logger, say_once
from .wire import all_reduce as all_reduce_fp8
from .wire import dequantize, reduce_scatter, to_rows

logger = get_logger(__name__)


@dataclasses.dataclass
class Bucket:
    """Gradients that are reduced together. `measured`: sums of squares of the last measured call, of this
    rank's gradients and of their error on the wire; on the device, so that nothing waits for them."""

    elements: int
    parameters: int
    measured: tuple[Tensor, Tensor] | None = None
    calls: int = 0
    lost: Tensor | None = None  # [blocks, 128]: with error feedback, what the last call has rounded away


@dataclasses.dataclass(eq=False, repr=False)
class Compression:
    """What is compressed, and how: the state of the hooks. `group` is DDP's; None is the default one. Buckets
    are known by the ids of their parameters (DDP), or by that of FSDP2's group."""

    group: Any = None
    min_elements: int = 4096
    error_feedback: bool = False
    sqnr_every: int = 1000
    buckets: dict[Any, Bucket] = dataclasses.field(default_factory=dict)
    streams: dict[torch.device, Any] = dataclasses.field(default_factory=dict)

    def takes(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """True if a gradient of this shape and dtype is compressed. Those of norms, biases and small
        parameters are not."""
        return len(shape) > 1 and math.prod(shape) >= max(1, self.min_elements) and dtype in FLOATS

    def bucket(self, key: Any, elements: int, parameters: int) -> Bucket:
        """The bucket of these parameters, new if DDP has filled its buckets in another way."""
        found = self.buckets.get(key)
        if found is None or found.elements != elements:
            if isinstance(key, tuple):
                self.buckets = {k: bucket for k, bucket in self.buckets.items() if set(k).isdisjoint(key)}
            found = self.buckets[key] = Bucket(elements, parameters)
        return found

    def rows(self) -> Iterator[dict[str, Any]]:
        """For `stats`: a row for each bucket that was measured, with the error of what this rank has sent."""
        for index, bucket in enumerate(self.buckets.values()):
            if bucket.measured is None:
                continue
            name = f"bucket {index} ({bucket.parameters} parameters)"
            row = dict[str, Any](name=name, role="reduced", recipe="compressed", format="e4m3fn")
            signal, error = (x.item() for x in bucket.measured)
            if math.isfinite(signal + error):
                row["mse"] = error / max(1, bucket.elements)
                row["sqnr"] = 10 * math.log10(signal / error) if signal > 0 and error > 0 else None  # dB
            yield row

    # -- DDP --

    def reduce_bucket(self, bucket: Any) -> torch.futures.Future:
        """DDP's hook: the mean over all ranks, in place, in a future; on a GPU in a stream of its own."""
        buffer, gradients = bucket.buffer(), bucket.gradients()
        key = tuple(id(p) for p in bucket.parameters())
        if buffer.device.type == "cpu":
            self._mean(buffer, gradients, key)
            future: torch.futures.Future = torch.futures.Future()
            future.set_result(buffer)
            return future
        device = buffer.device
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        stream = self.streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        future = torch.futures.Future(devices=[device])
        with torch.cuda.stream(stream):
            self._mean(buffer, gradients, key)
            buffer.record_stream(stream)
            future.set_result(buffer)  # whoever waits for the future waits for this stream
        return future

    @torch.no_grad()
    def _mean(self, buffer: Tensor, gradients: Sequence[Tensor], key: Any) -> None:
        ranks = dist.get_world_size(self.group)
        large = [g for g in gradients if self.takes(g.shape, g.dtype)]
        small = [g for g in gradients if not self.takes(g.shape, g.dtype)]
        if small:
            flat = torch.cat([g.reshape(-1) for g in small]) / ranks
            dist.all_reduce(flat, group=self.group)
            for g, mean in zip(small, flat.split([g.numel() for g in small]), strict=True):
                g.copy_(mean.view_as(g))
        if not large:
            return
        parts = [to_rows(g.reshape(-1)) for g in large]
        rows = torch.cat(parts)
        mine = self.bucket(key, sum(g.numel() for g in large), len(large))
        if mine.lost is not None:
            rows = rows + mine.lost
        total, sent = all_reduce_fp8(rows, self.group)
        self._measure(mine, rows, sent)
        if self.error_feedback:
            lost = rows.float() - dequantize(sent)
            mine.lost = torch.where(lost.isfinite(), lost, 0.0).to(buffer.dtype)
        for g, mean in zip(large, (total / ranks).split([len(part) for part in parts]), strict=True):
            g.copy_(mean.view(-1)[: g.numel()].view_as(g))

    def _measure(self, bucket: Bucket, rows: Tensor, sent: Tensor) -> None:
        bucket.calls += 1
        if self.sqnr_every and (bucket.calls - 1) % self.sqnr_every == 0:
            values = rows.float()
            error = dequantize(sent).view_as(values) - values
            bucket.measured = values.square().sum(), error.square().sum()

    # -- FSDP2 --

    @torch.no_grad()
    def reduce_shards(
        self,
        out: Tensor,
        flat: Tensor,
        group: Any,
        factor: float,
        shards: Sequence[compat.fsdp.Shard],
        key: Any,
    ) -> None:
        """FSDP2's reduce-scatter. `flat` is [ranks, n], of which each row has the same `shards` one after
        another; `out` [n] becomes their sum over all ranks, times `factor`. One collective for large
        parameters, one for the rest."""
        chunks = flat.view(dist.get_world_size(group), -1)
        sizes = [s.elements for s in shards]
        parts = list(zip(chunks.split(sizes, 1), out.split(sizes), strict=True))
        takes = [self.takes(shard.shape, flat.dtype) for shard in shards]
        small = [part for part, taken in zip(parts, takes, strict=True) if not taken]
        large = [part for part, taken in zip(parts, takes, strict=True) if taken]
        if small:
            given = torch.cat([theirs for theirs, _ in small], 1)
            result = torch.empty(given.shape[1], dtype=out.dtype, device=out.device)
            compat.process_groups.reduce_scatter(result, given.view(-1), group)
            totals = (result * factor).split([mine.numel() for _, mine in small])
            for (_, mine), total in zip(small, totals, strict=True):
                mine.copy_(total)
        if large:
            blocks = [to_rows(theirs) for theirs, _ in large]
            rows = torch.cat(blocks, 1)
            sums, sent = reduce_scatter(rows, group)
            bucket = self.bucket(key, sum(theirs.numel() for theirs, _ in large), len(large))
            self._measure(bucket, rows, sent)
            totals = (sums * factor).split([x.shape[1] for x in blocks])
            for (_, mine), total in zip(large, totals, strict=True):
                mine.copy_(total.view(-1)[: mine.numel()])


_KNOWN: WeakKeyDictionary[nn.Module, Compression] = WeakKeyDictionary()


def compress(model: nn.Module, min_elements: int, error_feedback: bool, sqnr_every: int) -> None:
    """Register the hooks: see `distributed.compress_gradients`."""
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    sharded = [module for module in model.modules() if compat.fsdp.is_fully_sharded(module)]
    if not wrapped and not sharded:
        raise ValueError(
            "compress_gradients: the model is neither wrapped in DistributedDataParallel nor sharded by "
            "fully_shard; call it after them"
        )
    if error_feedback and sharded:
        raise ValueError(
            "compress_gradients: error_feedback keeps a buffer as large as all gradients on each rank, "
            "which is what fully_shard avoids; it is for DistributedDataParallel"
        )
    if wrapped:
        ranks = dist.get_world_size(wrapped[0].process_group)
    else:
        ranks = max(map(compat.fsdp.shard_ranks, sharded))
    if ranks == 1:
        why = "no gradients are exchanged by DistributedDataParallel, or scattered by fully_shard"
        say_once(logger, logging.WARNING, f"compress_gradients: {why}, so that none is compressed")
    for module in wrapped:
        state = Compression(module.process_group, min_elements, error_feedback, sqnr_every)
        module.register_comm_hook(state, hook)
        _KNOWN[module.module] = state
    for part in sharded:
        state = _KNOWN[part] = Compression(None, min_elements, False, sqnr_every)
        compat.fsdp.reduce_shards_by(part, state.reduce_shards)


_GROUPS: dict[Any, Compression] = {}  # for who registers the hook by hand


def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, and takes no strings
    """A DDP communication hook. `state` is a Compression, a process group, or None for the default group."""
    if not isinstance(state, Compression):
        state = _GROUPS.setdefault(state, Compression(state))
    return state.reduce_bucket(bucket)


class CompressedGradients(Feature):
    name = "compression"

    def statistics(self, model: nn.Module) -> Sequence[Mapping[str, Any]]:
        """Rows about reduced gradients of a model, DDP's or FSDP2's."""
        return [row for module in model.modules() if module in _KNOWN for row in _KNOWN[module].rows()]
