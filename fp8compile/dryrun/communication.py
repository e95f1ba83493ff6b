"""What the GPUs of a mesh send each other in a training step, in bytes and seconds: arithmetic on sizes of the model.

Data parallel (the inputs of an estimate are those of one data-parallel rank):

    fsdp    FSDP2, `fully_shard` on each block and on the root. An all-gather of every weight in forward, and again in backward
            for the blocks, which are resharded in between; a reduce-scatter of every gradient
    ddp     an all-reduce of every gradient

Tensor parallel, as in Megatron-LM (arXiv:1909.08053): for each `Pair`, an all-reduce of the output of its row-parallel linear
in forward, and one of the gradient of the input of its column-parallel linears in backward. With sequence parallelism each of
them is a reduce-scatter and an all-gather, of the same bytes (arXiv:2205.05198).

A ring over n GPUs sends from each of them (n-1)/n of the tensor in an all-gather or a reduce-scatter, and twice that in an
all-reduce. No algorithm sends less without help of a switch (nccl-tests, doc/PERFORMANCE.md, from which also the word "bus
bandwidth" is). The time is these bytes divided by the sustained bus bandwidth of the group's links; latency is left out.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..reporting.columns import aligned
from ..reporting.layers import alike
from .mesh import Mesh, Pair, fp8_weights, weight_of

if TYPE_CHECKING:
    from torch import nn

    from ..devices.catalog import Device
    from ..devices.links import Links
    from ..ir.records import GraphReport
    from .estimate_result import Cost

# bytes an element of the recipes whose FP8 copy serves forward and backward; "delayed" with current scaling of weights
GATHERED_IN_FP8 = {"delayed": 1.0, "tensorwise": 1.0, "blockwise": 1 + 4 / 128**2}
_BUCKET = 25 << 20  # bytes; DDP's default
_OF_A_BLOCK = re.compile(r"((?:.*?\.)?\d+)\.")


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind, all of a step. Bytes are those that one GPU sends; `rate` is the bus bandwidth in bytes/s."""

    name: str
    axis: str
    ranks: int
    calls: int
    bf16_bytes: float
    fp8_bytes: float
    rate: float

    @property
    def bf16_seconds(self) -> float:
        return self.bf16_bytes / self.rate

    @property
    def fp8_seconds(self) -> float:
        return self.fp8_bytes / self.rate

    def to_dict(self) -> dict[str, Any]:
        names = ("name", "axis", "ranks", "calls", "bf16_bytes", "fp8_bytes", "rate", "bf16_seconds", "fp8_seconds")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Bounds:
    """Seconds of a step on one GPU: its kernels alone, with all collectives hidden behind them, and with none hidden."""

    name: str
    kernels: float
    hidden: float
    exposed: float


@dataclass(frozen=True)
class Communication:
    """The collectives of a step on a mesh. `bf16_kernels` and `fp8_kernels` are seconds of the kernels of one GPU.

    `with_fp8_all_gather` are the collectives that `fp8compile.distributed.fp8_all_gather` would have in the place of those of
    the same name. The totals in FP8 do not count on it, because it has to be asked for.
    """

    mesh: Mesh
    dp: str
    network: str
    collectives: tuple[Collective, ...]
    with_fp8_all_gather: tuple[Collective, ...]
    bf16_kernels: float
    fp8_kernels: float
    notes: tuple[str, ...]

    @property
    def bounds(self) -> tuple[Bounds, ...]:
        """In bf16, in FP8, and in FP8 with the all-gather in FP8 if it sends less."""
        replaced = {each.name: each for each in self.with_fp8_all_gather}
        better = [replaced.get(each.name, each) for each in self.collectives]
        made = [
            self._bounds("bf16", self.bf16_kernels, [(c.axis, c.bf16_seconds) for c in self.collectives]),
            self._bounds("FP8", self.fp8_kernels, [(c.axis, c.fp8_seconds) for c in self.collectives]),
        ]
        if replaced:
            times = [(c.axis, c.fp8_seconds) for c in better]
            made.append(self._bounds("FP8, with fp8_all_gather", self.fp8_kernels, times))
        return tuple(made)

    @staticmethod
    def _bounds(name: str, kernels: float, times: list[tuple[str, float]]) -> Bounds:
        by_axis: dict[str, float] = {}
        for axis, seconds in times:
            by_axis[axis] = by_axis.get(axis, 0.0) + seconds
        return Bounds(name, kernels, max([kernels, *by_axis.values()]), kernels + sum(by_axis.values()))

    # --- for people and programs ---

    def tables(self) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """The collectives and the bounds, each with a header as first row."""
        head = ("collective", "among", "calls", "MB bf16", "MB FP8", "GB/s", "ms bf16", "ms FP8")
        rows = [head, *map(_row, self.collectives)]
        sums = [sum(getattr(c, name) for c in self.collectives) for name in ("bf16_bytes", "fp8_bytes")]
        times = [sum(getattr(c, name) for c in self.collectives) for name in ("bf16_seconds", "fp8_seconds")]
        rows.append(("all", "", "", *(f"{x / 1e6:.4g}" for x in sums), "", *(f"{1e3 * x:.4g}" for x in times)))
        rows += [_row(c, ", with fp8_all_gather") for c in self.with_fp8_all_gather]
        bf16 = self.bounds[0]
        steps: list[tuple[str, ...]] = [("a step of one GPU", "kernels, ms", "all hidden, ms", "none hidden, ms", "gain")]
        for each in self.bounds:
            gains = (bf16.exposed / each.exposed, bf16.hidden / each.hidden) if each.exposed and each.hidden else (1.0, 1.0)
            span = "" if each.name == "bf16" else " to ".join(f"{gain:.2f}x" for gain in sorted(gains))
            steps.append((each.name, *(f"{1e3 * x:.4g}" for x in (each.kernels, each.hidden, each.exposed)), span))
        return rows, steps

    @property
    def title(self) -> str:
        return f"mesh {self.mesh} ({self.dp}): {self.network}"

    def __str__(self) -> str:
        lines = [self.title]
        for rows in self.tables():
            left = 2 if "among" in rows[0] else 1
            lines += ["", aligned(rows[0], rows[1:], "<" * left + ">" * (len(rows[0]) - left))]
        return "\n".join([*lines, "", *(line for note in self.notes for line in textwrap.wrap(note, 128))])

    def to_dict(self) -> dict[str, Any]:
        return {
            "dp": self.mesh.dp,
            "tp": self.mesh.tp,
            "data_parallel": self.dp,
            "network": self.network,
            "collectives": [each.to_dict() for each in self.collectives],
            "with_fp8_all_gather": [each.to_dict() for each in self.with_fp8_all_gather],
            "bounds": [{"name": b.name, "kernels": b.kernels, "hidden": b.hidden, "exposed": b.exposed} for b in self.bounds],
            "notes": list(self.notes),
        }


def _row(each: Collective, note: str = "") -> tuple[str, ...]:
    megabytes = (f"{sent / 1e6:.4g}" for sent in (each.bf16_bytes, each.fp8_bytes))
    times = (f"{1e3 * seconds:.4g}" for seconds in (each.bf16_seconds, each.fp8_seconds))
    return (each.name + note, f"{each.axis} {each.ranks}", str(each.calls), *megabytes, f"{each.rate / 1e9:.4g}", *times)


# --- how much is sent -----------------------------------------------------------------------------


@dataclass
class _Weights:
    """Elements of parameters on one GPU if nothing were sharded. `gathered` and `reduced` are bytes on the wire in bf16."""

    gathered: float = 0.0
    gathered_fp8: float = 0.0  # with fp8_all_gather
    reduced: float = 0.0


def communication(
    modules: Iterable[nn.Module],
    graphs: Iterable[GraphReport],
    divided: Iterable[Pair],
    mesh: Mesh,
    device: Device,
    links: Links,
    dp: str,
    kernels: tuple[float, float],
    activation_bytes: int,
) -> Communication:
    """The collectives of a step. `divided` are the linears that tensor parallelism divides (none without it), `kernels` the
    seconds of one GPU's kernels in bf16 and in FP8."""
    graphs, divided = list(graphs), list(divided)
    collectives, better = [], []
    notes = ["No latency is counted: collectives of less than some MB are slower. Other traffic is not counted, either."]
    if mesh.dp > 1:
        rate = links.rate(*mesh.group("dp", links))
        blocks, root, count = _weights(modules, graphs, divided, mesh)
        share = (mesh.dp - 1) / mesh.dp
        reduced = share * (blocks.reduced + root.reduced)
        if dp == "ddp":
            calls = math.ceil((blocks.reduced + root.reduced) / _BUCKET)
            collectives.append(Collective("all-reduce of gradients", "dp", mesh.dp, calls, 2 * reduced, 2 * reduced, rate))
            notes.append("DDP: gradients have the dtype of their parameters.")
        else:
            ways = (("forward", [blocks, root]), ("backward", [blocks]))
            for direction, parts in ways:
                calls = count + (direction == "forward")
                if not calls:
                    continue
                high, fp8 = (share * sum(getattr(part, name) for part in parts) for name in ("gathered", "gathered_fp8"))
                name = f"all-gather of weights, {direction}"
                collectives.append(Collective(name, "dp", mesh.dp, calls, high, high, rate))
                if fp8 < high:
                    better.append(Collective(name, "dp", mesh.dp, calls, high, fp8, rate))
            collectives.append(Collective("reduce-scatter of gradients", "dp", mesh.dp, count + 1, reduced, reduced, rate))
            notes.append(
                f"FSDP2 on {count} blocks and the root; blocks are gathered again in backward. Weights travel in bf16 "
                "(MixedPrecisionPolicy(param_dtype=torch.bfloat16) if they are float32), gradients in the parameters' dtype."
            )
    if mesh.tp > 1:
        rate = links.rate(*mesh.group("tp", links))
        share = 2 * (mesh.tp - 1) / mesh.tp * activation_bytes
        backward = [pair for pair in divided if pair.backward]
        outputs = share * sum(pair.row.batch * pair.row.m * pair.row.n for pair in divided)
        inputs = share * sum(pair.columns[0].batch * pair.columns[0].m * pair.columns[0].k for pair in backward)
        for name, calls, sent in (("outputs, forward", len(divided), outputs), ("gradients, backward", len(backward), inputs)):
            collectives.append(Collective(f"all-reduce of {name}", "tp", mesh.tp, calls, sent, sent, rate))
        notes.append(_divided_note(divided, mesh.tp))
    if better:
        notes.append(
            "FP8 sends the bytes of bf16, since nothing sends FP8 unless it is asked to; fp8_all_gather would send FP8 weights "
            "as one byte an element. The kernels' times count casts of whole weights, where each GPU would cast its part. "
            "Recipe delayed needs current_scaling of weights for it."
        )
    else:
        notes.append("FP8 sends the bytes of bf16.")
    return Communication(mesh, dp, _network(mesh, device, links), tuple(collectives), tuple(better), *kernels, tuple(notes))


def _weights(
    modules: Iterable[nn.Module], graphs: list[GraphReport], divided: list[Pair], mesh: Mesh
) -> tuple[_Weights, _Weights, int]:
    """Those of the blocks, those of the rest of the model, and the number of blocks."""
    parts = {weight_of(record): 1 / mesh.tp for pair in divided for record in pair.linears}
    recipes = {name: record.recipe for name, record in fp8_weights(graphs).items() if name not in parts}
    blocks, root, names, seen = _Weights(), _Weights(), set(), set()
    for module in modules:
        for name, parameter in module.named_parameters():
            if id(parameter) in seen or not parameter.is_floating_point():
                continue
            seen.add(id(parameter))
            found = _OF_A_BLOCK.match(name)
            if found:
                names.add(found[1])
            part = blocks if found else root
            elements = parameter.numel() * parts.get(name, 1.0)
            part.gathered += min(2, parameter.itemsize) * elements
            part.gathered_fp8 += _gathered_in_fp8(recipes.get(name), parameter, mesh.dp) * elements
            if parameter.requires_grad:
                part.reduced += parameter.itemsize * elements
    return blocks, root, len(names)


def _gathered_in_fp8(recipe: str | None, parameter: nn.Parameter, ranks: int) -> float:
    """Bytes an element with fp8_all_gather. `recipe`: None if the weight is not FP8, or divided by tensor parallelism, too."""
    high = min(2, parameter.itemsize)
    if recipe == "blockwise" and parameter.shape[0] % (128 * ranks):  # shards without whole blocks
        return high
    return GATHERED_IN_FP8.get(recipe or "", high)


def divided_kernels(costs: Mapping[str, Cost], divided: Iterable[Pair], tp: int) -> float:
    """The seconds of `costs` (by module) if the matmuls of `divided` and the attention between them took 1/tp of their time."""
    pairs = list(divided)
    linears = {record.fqn for pair in pairs for record in pair.linears}
    around = {pair.module for pair in pairs if pair.module}
    saved = sum(cost.matmul_seconds for name, cost in costs.items() if name in linears)
    for name, cost in costs.items():
        if any(name == module or name.startswith(f"{module}.") for module in around):
            saved += cost.attention_seconds
    return sum(cost.seconds for cost in costs.values()) - (1 - 1 / tp) * saved


def _divided_note(divided: list[Pair], tp: int) -> str:
    def names(linears: Iterable[str]) -> str:
        return ", ".join(name for name, _ in alike(dict.fromkeys(linears), str, lambda _: None))

    if not divided:
        return "tp divides nothing: no linear's output reaches another one as in an MLP or around attention."
    columns = names(record.fqn for pair in divided for record in pair.columns)
    rows = names(pair.row.fqn for pair in divided)
    return (
        f"tp divides column-parallel {columns} and row-parallel {rows}, with the attention between them; all else is whole on "
        f"every GPU. Their time is divided by {tp}, and decisions are those of the whole sizes: smaller matmuls gain less."
    )


def _network(mesh: Mesh, device: Device, links: Links) -> str:
    used = [links.inside] if links.between is None or mesh.gpus <= links.gpus else [links.inside, links.between]
    rates = ", ".join(f"{link.name} {link.sustained / 1e9:.4g} GB/s" for link in used)
    nodes = mesh.nodes(links)
    where = "1 node" if nodes == 1 else f"{nodes} nodes"
    return f"{mesh.gpus} {device.name} on {where}; a GPU sends over {rates} (sustained, in one direction)"
