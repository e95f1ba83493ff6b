"""Times training steps on a device: warm-up, turns, spread, peak memory, kernels; makes torchao's linears.
`bench` and the benchmarks of the repository share it. It imports no compiler.

On a CUDA device, events time the parts of a step. They cost the device almost nothing, and the host waits for
the device only at the end of a turn. On a CPU, the clock times the parts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from . import kernel_classes

T = TypeVar("T")
Mark = tuple[str, Any, Any]  # a part of a step, its start and its end


class Runner:
    """Trains step by step: `accumulate` forwards and backwards, then `update`, the optimizer and the rest.

    `forward` takes the next batch, of `tokens`. `grad`: the gradient of what it returns, None for a loss.
    """

    def __init__(
        self,
        device: str,
        forward: Callable[[], Tensor],
        update: Callable[[], None],
        grad: Tensor | None = None,
        accumulate: int = 1,
        tokens: int = 1,
    ):
        self.cuda, self.forward, self.update, self.grad = device == "cuda", forward, update, grad
        self.accumulate, self.tokens = accumulate, tokens
        self.losses: list[Tensor] = []
        self.steps = 0

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) if self.cuda else 1e3 * (end - start)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def step(self) -> list[Mark]:
        """Train a step. The first mark is that of the whole step."""
        start, marks = self.mark(), []
        for _ in range(self.accumulate):
            if self.cuda:
                torch.compiler.cudagraph_mark_step_begin()
            forward = self.mark()
            out = self.forward()
            backward = self.mark()
            out.backward(self.grad)
            marks += [("forward", forward, backward), ("backward", backward, self.mark())]
            if self.grad is None:
                self.losses.append(out.detach().clone())  # a CUDA graph's next replay overwrites it
            del out
        before = self.mark()
        self.update()
        self.steps += 1
        end = self.mark()
        return [("total", start, end), *marks, ("optimizer", before, end)]

    def warm_up(self, steps: int) -> dict[str, Any]:
        """The first steps, which compile: their seconds, the peak memory of the first, and of the others."""
        self.wait()
        self.memory()
        began, first = time.perf_counter(), None
        for number in range(steps):
            self.step()
            self.wait()
            first = first if number else self.memory()
        return {"warmup_s": time.perf_counter() - began, "first": first, "peak": self.memory()}

    def turn(self, steps: int, lead: int = 1) -> dict[str, Any]:
        """`steps` timed steps after `lead` untimed: ms, bytes (None on a CPU), losses of all steps. "wall" is
        when the timed ones began and ended, in seconds since the epoch."""
        self.memory()
        began = time.perf_counter()
        for _ in range(lead):
            self.step()
        self.wait()
        lead_s, start = time.perf_counter() - began, time.time()
        marks = [self.step() for _ in range(steps)]
        self.wait()
        result: dict[str, Any] = {
            "tokens": steps * self.accumulate * self.tokens,
            "span_ms": self.milliseconds(marks[0][0][1], marks[-1][0][2]) if marks else 0.0,
            "lead_s": lead_s,
            "wall": [start, time.time()],
            "steps": [self.split(m) for m in marks],
            "losses": torch.stack(self.losses).float().tolist() if self.losses else [],
            "memory": self.memory(),
            "validation": None,
        }
        self.losses.clear()
        return result | self.idle()

    def idle(self) -> dict[str, int]:
        """Release the memory that this arm does not hold, for the others; how much it holds. {} on a CPU."""
        if not self.cuda:
            return {}
        torch.cuda.empty_cache()
        return {"idle": torch.cuda.memory_reserved()}

    def split(self, marks: Sequence[Mark]) -> dict[str, float]:
        found: dict[str, float] = {}
        for part, start, end in marks:
            found[part] = found.get(part, 0.0) + self.milliseconds(start, end)
        return found

    def memory(self) -> dict[str, int] | None:
        """The peaks since the last call; None on a CPU."""
        if not self.cuda:
            return None
        peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        torch.cuda.reset_peak_memory_stats()
        return peaks

    def profile(self, casts: Collection[str] = (), steps: int = 2) -> dict[str, Any] | None:
        """Kernels per step by class; None on a CPU."""
        if not self.cuda:
            return None
        return kernel_classes.summarise(kernel_classes.launches(self.profiled(steps)), casts, steps)

    def profiled(self, steps: int, lead: int = 1, shapes: bool = False) -> torch.profiler.profile:
        """A profile of `steps` steps after `lead` others. `shapes`: of the host's operators, too, with the
        sizes of their inputs, which takes the host longer."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        if shapes:
            activities.append(torch.profiler.ProfilerActivity.CPU)
        for _ in range(lead):
            self.step()
        self.wait()
        with torch.profiler.profile(activities=activities, record_shapes=shapes) as profile:
            for _ in range(steps):
                self.step()
            self.wait()
        self.losses.clear()
        return profile


def in_turn(arms: Sequence[T], number: int) -> list[T]:
    """The arms in the order of a round: another one begins each."""
    first = number % len(arms)
    return [*arms[first:], *arms[:first]]


def summarise(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The turns of one arm -> tokens/s over rounds, medians of the step's parts, peak memory, all losses."""
    rates = [1e3 * turn["tokens"] / turn["span_ms"] for turn in turns]
    steps = [step for turn in turns for step in turn["steps"]]
    middle = statistics.median(rates)
    memory = [turn["memory"] for turn in turns if turn["memory"]]
    peaks: dict[str, int] | None = None
    if memory:
        peaks = {what: max(m[what] for m in memory) for what in ("allocated", "reserved")}
        peaks["idle"] = max(turn.get("idle", 0) for turn in turns)
    return {
        "tokens_per_s": {
            "median": middle,
            "min": min(rates),
            "max": max(rates),
            "spread": (max(rates) - min(rates)) / middle,
            "rounds": rates,
        },
        "step_ms": {part: statistics.median(step[part] for step in steps) for part in steps[0]},
        "memory": peaks,
        "losses": [loss for turn in turns for loss in turn["losses"]],
        "validation": [turn["validation"] for turn in turns if turn["validation"]],
    }


def by_torchao(model: nn.Module, recipe: str, heads: Sequence[str] = ("lm_head",)) -> None:
    """Replace linears by torchao's, but for those named in `heads`, as torchtitan and our own policy do."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def keep(module: nn.Module, name: str) -> bool:
        sizes = getattr(module, "in_features", 16), getattr(module, "out_features", 16)
        return name.rpartition(".")[2] not in heads and all(size % 16 == 0 for size in sizes)

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=config, module_filter_fn=keep)
