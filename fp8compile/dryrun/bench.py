"""Whether FP8 pays for this model on this GPU: `bench` times a training step in bf16, in FP8 and by torchao.

    print(bench(model, tokens, labels=labels))

A step has a fused AdamW whose learning rate is 0: it moves what an AdamW moves, and changes nothing. The arms
share weights and optimizer: a model that trains on this GPU fits here, too. An arm's peak memory is that of
its warm-up, before the next arm is compiled; FP8 comes last, since only it may keep something
(`cache_weights`). docs/cli.md has the rest.

What single layers gain is not measured. It is the estimate by which the compiler decided about them.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from ..errors import Fp8CompileError, OptionError, one_line, one_line_where
from ..ir.frozen import FrozenWeight
from ..reporting.columns import aligned
from ..reporting.layer_rows import layers_of, microseconds, repeated, rows_of
from ..reporting.report import Report, report
from .measure import Runner, by_torchao, in_turn, summarise

EMULATED = "FP8 is emulated on a CPU: these times say nothing about a GPU"
THEIRS = ("rowwise", "rowwise_with_gw_hp")  # recipes that torchao has, too; for all others, its "tensorwise"
HEAD = (
    "arm", "ms a step", "spread", "speed", "forward", "backward", "optimizer", "peak GB", "in step 1",
    "FP8 matmuls",
)  # fmt: skip
NAMED = 5  # layers in the line that says which ones gain


@dataclass(frozen=True)
class Bench:
    """The first of `rows` is the arm in bf16, the last FP8. A row has `error`, or times, memory, kernels."""

    device: str
    rows: tuple[dict[str, Any], ...]
    report: Report
    emulated: bool = False
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        """How many times as fast as bf16 FP8 is; None if FP8 failed."""
        base, fp8 = self.rows[0], self.rows[-1]
        return None if fp8["error"] else fp8["tokens_per_s"]["median"] / base["tokens_per_s"]["median"]

    @property
    def layers(self) -> list[tuple[str, float]]:
        """Equal layers, and the microseconds of a step that FP8 is estimated to gain; the largest first."""
        matmuls = [record for graph in self.report.graphs if not graph.note for record in graph.matmuls]
        timed = [(row, row.times) for row in rows_of(layers_of(matmuls)) if row.times]
        gains = [
            (row.name + repeated(len(row.layers)), before - after - casts)
            for row, (before, after, casts) in timed
        ]
        return sorted(gains, key=lambda item: -item[1])

    @property
    def verdict(self) -> str:
        """Whether it pays, and which layers do."""
        base, fp8 = self.rows[0], self.rows[-1]
        if self.ratio is None:
            return f"no answer: FP8 failed: {fp8['error']}"
        if self.emulated:
            return f"no answer: {EMULATED}"
        if fp8["kernels"]["busy_ms"] and not fp8["kernels"]["classes"]["fp8_gemm"]["count"]:
            return f"FP8 does not pay: no FP8 matmul ran ({self.report.summary()})"
        rates, before = fp8["tokens_per_s"], base["tokens_per_s"]
        said = "no difference that these rounds can show"
        if rates["min"] > before["max"] or rates["max"] < before["min"]:
            said = "FP8 pays" if self.ratio > 1 else "FP8 does not pay"
        spread = max(rates["spread"], before["spread"])
        times = f"{self.ratio:.2f}x as fast as {base['arm']}"
        said += f": {times}; the rounds of an arm differ by up to {spread:.1%}"
        layers = self.layers
        gains = [f"{name} {microseconds(us)}" for name, us in layers if us > 0]
        more = f" and {len(gains) - NAMED} more" if gains[NAMED:] else ""
        which = "no estimate for this device says which layers gain"
        if layers:
            which = "by the estimate, no layer gains"
        if gains:
            which = f"estimated gain a step: {', '.join(gains[:NAMED])}{more}"
        return f"{said}\n{which}\n{self.report.summary()}"

    def to_dict(self) -> dict[str, Any]:
        """The result as plain dicts, lists, strings and numbers."""
        return {
            "device": self.device,
            "torch": torch.__version__,
            "emulated": self.emulated,
            "ratio": self.ratio,
            "verdict": self.verdict,
            "notes": list(self.notes),
            "rows": list(self.rows),
            "layers": [{"name": name, "estimated_gain_us": us} for name, us in self.layers],
            "report": self.report.to_dict(),
        }

    def __str__(self) -> str:
        base = self.rows[0]["tokens_per_s"]["median"]
        table = aligned(HEAD, [_cells(row, base) for row in self.rows], "<" + ">" * 9)
        failed = [f"{row['arm']}: {row['error']}" for row in self.rows if row["error"]]
        notes = [f"* {note}" for note in self.notes]
        where = f"{self.device}, torch {torch.__version__}"
        return "\n".join([where, *notes, "", table, *failed, "", self.verdict])


def _cells(row: Mapping[str, Any], base: float) -> tuple[str, ...]:
    if row["error"]:
        return (row["arm"], "failed", *[""] * 8)
    rates, seen = row["tokens_per_s"], row["kernels"]
    times = [f"{row['step_ms'][part]:.2f}" for part in ("forward", "backward", "optimizer")]
    memory = [f"{row[when]['allocated'] / 1e9:.2f}" if row[when] else "-" for when in ("peak", "first")]
    share = "-"
    if seen and seen["busy_ms"]:
        fp8 = seen["classes"]["fp8_gemm"]
        share = f"{fp8['count']:g}, {fp8['ms'] / seen['busy_ms']:.0%} of the time"
    speed = f"{1e3 / rates['median']:.2f}", f"{rates['spread']:.1%}", f"{rates['median'] / base:.2f}x"
    return (row["arm"], *speed, *times, *memory, share)


# -- measuring --


def bench(
    model: nn.Module,
    *args: Any,
    device: str | torch.device = "cuda",
    options: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    autocast: bool | None = None,
    torchao: bool | None = None,
    optimizer: bool = True,
    rounds: int = 5,
    steps: int = 10,
    warmup: int = 10,
    progress: Callable[[str], None] = lambda what: None,
    **kwargs: Any,
) -> Bench:
    """Time training steps of `model(*args, **kwargs)` on `device`. Model and inputs go there, to train.

    `options` are those of the backend; Inductor's among them hold for all arms. `loss` is that of `compare`,
    `autocast` that of `explain`. `torchao`: also its float8 linears; None: where it is installed.
    `optimizer`: whether a step has one.

    Fp8CompileError if the model refuses the batch in bf16; OptionError for bad options, and without a loss.
    """
    from ..backend import fp8
    from ..config.options import parse
    from ..passes.classify import HEADS
    from . import autocast as under
    from .compare import check_places, loss_of
    from .sandbox import entry, modules_of, unwrapped

    parsed, place = parse(options), torch.device(device)
    model = unwrapped(model)
    modules = modules_of((model, args, kwargs))
    check_places(dict(model.named_parameters()), "bench")
    model.to(place).train()
    for part in model.modules():
        part.__dict__["_compiled_call_impl"] = None  # undo module.compile(), whose backend may be FP8
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda x: x.detach().to(place).requires_grad_(x.requires_grad), (args, kwargs)
    )
    on = under.wanted(modules, autocast)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise OptionError("bench: no parameter of the model requires gradients, so there is no step to time")
    dtypes = {str(p.dtype).removeprefix("torch.") for p in trained}
    name = "bf16" if on or dtypes == {"bfloat16"} else " and ".join(sorted(dtypes))
    notes = [f"{under.NOTE} (--no-autocast times it without)"] if on and autocast is None else []
    given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    update = _update(trained if optimizer else [], [*trained, *given])

    def compiled(part: nn.Module, backend: Any, given: Mapping[str, Any] | None) -> Runner:
        step = torch.compile(entry(part), backend=backend, options=dict(given or {}) or None, dynamic=False)

        def forward() -> Tensor:
            with torch.autocast(place.type, torch.bfloat16, enabled=on):
                return loss_of(step(*args, **kwargs), loss, type(model).__name__, "bench")

        return Runner(place.type, forward, update)

    theirs = parsed.recipe.name if parsed.recipe.name in THEIRS else "tensorwise"

    def converted() -> Runner:
        part = _sharing(model)
        by_torchao(part, theirs, HEADS)
        return compiled(part, "inductor", parsed.inductor)

    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    ours = _sharing(model) if frozen else model  # with frozen="fp8", weights of the module are replaced
    arms: dict[str, Callable[[], Runner]] = {name: lambda: compiled(model, "inductor", parsed.inductor)}
    if torchao if torchao is not None else importlib.util.find_spec("torchao") is not None:
        arms[f"torchao-{theirs}"] = converted
    arms["fp8"] = lambda: compiled(ours, fp8, options)
    with torch.cuda.device(place) if place.type == "cuda" else contextlib.nullcontext():
        rows = _measured(arms, rounds, steps, warmup, progress)
        named = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
    if any(isinstance(parameter, FrozenWeight) for parameter in ours.parameters()):
        notes.append(
            "the other arms keep frozen weights in high precision here: peak memory in FP8 alone is smaller"
        )
    return Bench(named, tuple(rows), report(ours), place.type == "cpu", tuple(notes))


def _measured(
    arms: Mapping[str, Callable[[], Runner]],
    rounds: int,
    steps: int,
    warmup: int,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A row for each arm. An arm that fails, other than the first, has its error."""
    rows: dict[str, dict[str, Any]] = {}
    runners: dict[str, Runner] = {}
    for name, make in arms.items():
        progress(f"{name}: compiles, and warms up")
        row = rows[name] = {"arm": name, "error": None}
        try:
            runners[name] = make()
            row |= runners[name].warm_up(warmup)
        except OptionError:
            raise
        except Exception as error:
            full = isinstance(error, torch.OutOfMemoryError)
            fix = " (--no-optimizer leaves out AdamW's states)" if full else ""
            if len(rows) == 1:
                why = f"bench: the step fails in {name}: {one_line_where(error)}{fix}"
                raise Fp8CompileError(why) from error
            row["error"] = one_line(error) + fix
        if row["error"]:
            runners.pop(name, None)
            gc.collect()
            torch.cuda.empty_cache()
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in runners}
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for name in in_turn([*runners], number):
            turns[name].append(runners[name].turn(steps))
    for name, runner in runners.items():
        rows[name] |= summarise(turns[name]) | {"kernels": runner.profile(steps=1)}
    return [*rows.values()]


def _update(trained: Sequence[nn.Parameter], leaves: Sequence[Tensor]) -> Callable[[], None]:
    """What follows a backward: an AdamW of `trained` that changes nothing; `leaves` lose their gradients."""
    optimizer = torch.optim.AdamW(trained, lr=0.0, fused=True) if trained else None

    def update() -> None:
        if optimizer is not None:
            optimizer.step()
        for leaf in leaves:
            leaf.grad = None

    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    update()
    return update


def _sharing(model: nn.Module) -> nn.Module:
    """A copy of the modules, with the same parameters and buffers."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
