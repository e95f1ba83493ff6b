"""Runs and times training steps of one task.

On a CUDA device, events time the parts of a step. They cost the device almost nothing, and the host waits for the device only
at the end of a turn. On a CPU, the clock times the parts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import classify
from .cases.base import Task


@dataclass
class Marks:
    """Points in time of one step: its start, (forward, backward, end) of each micro-batch, the optimizer, the end."""

    start: Any
    micro: list[tuple[Any, Any, Any]]
    optimizer: Any
    end: Any


class Runner:
    """Trains `task` step by step. The arm has already prepared its model (`Module.compile`). `around` makes a context for each
    forward."""

    def __init__(self, task: Task, around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext):
        self.task, self.point, self.device = task, task.point, task.device
        self.cuda, self.around = task.device == "cuda", around
        self.losses: list[Tensor] = []
        self.steps = 0
        self.parameters = list(task.model.parameters())

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

    def step(self) -> Marks:
        """One optimizer step after `accumulate` forwards and backwards."""
        start, micro, optimizer = self.mark(), [], self.task.optimizer
        for _ in range(self.point.accumulate):
            batch = next(self.task.batches)
            torch.compiler.cudagraph_mark_step_begin()
            forward = self.mark()
            autocast = torch.autocast(self.device, torch.bfloat16) if self.point.autocast else contextlib.nullcontext()
            with autocast, self.around():
                out = self.task.model(*batch)
            backward = self.mark()
            out.backward(self.task.grad)
            micro.append((forward, backward, self.mark()))
            if self.task.grad is None:
                self.losses.append(out.detach().clone())  # a CUDA graph's output is overwritten by its next replay
            del out
        before = self.mark()
        if optimizer is not None:
            if self.point.clip is not None:
                nn.utils.clip_grad_norm_(self.parameters, self.point.clip)
            if self.point.schedule is not None:
                for group in optimizer.param_groups:
                    group["lr"] = self.point.schedule(self.steps)
            optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.steps += 1
        return Marks(start, micro, before, self.mark())

    def turn(self, steps: int, lead: int = 1) -> dict[str, Any]:
        """`steps` timed steps after `lead` untimed ones. Times in ms, memory in bytes (None on a CPU), losses of all steps."""
        self.memory()
        began = time.perf_counter()
        for _ in range(lead):
            self.step()
        self.wait()
        lead_s = time.perf_counter() - began
        marks = [self.step() for _ in range(steps)]
        self.wait()
        span = self.milliseconds(marks[0].start, marks[-1].end) if marks else 0.0
        result = {
            "tokens": steps * self.point.accumulate * self.point.tokens,
            "span_ms": span,
            "lead_s": lead_s,
            "steps": [self.split(m) for m in marks],
            "losses": torch.stack(self.losses).float().tolist() if self.losses else [],
            "memory": self.memory(),
            "validation": None,
        }
        self.losses.clear()
        if self.point.validate is not None:
            with self.around():
                result["validation"] = [self.steps, self.point.validate(self.task.model, self.device)]
        if self.cuda:  # release memory that this arm does not hold, for the other arms
            torch.cuda.empty_cache()
            result["idle"] = torch.cuda.memory_reserved()
        return result

    def split(self, marks: Marks) -> dict[str, float]:
        between = self.milliseconds
        return {
            "total": between(marks.start, marks.end),
            "forward": sum(between(forward, backward) for forward, backward, _ in marks.micro),
            "backward": sum(between(backward, end) for _, backward, end in marks.micro),
            "optimizer": between(marks.optimizer, marks.end),
        }

    def memory(self) -> dict[str, int] | None:
        """The peaks since the last call; None on a CPU."""
        if not self.cuda:
            return None
        peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        torch.cuda.reset_peak_memory_stats()
        return peaks

    def profile(self, casts: set[str], steps: int = 2) -> dict[str, Any] | None:
        """Kernels per step by class; None on a CPU."""
        if not self.cuda:
            return None
        self.step()
        self.wait()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(steps):
                self.step()
            self.wait()
        self.losses.clear()
        return classify.summarise(classify.device_events(profile), casts, steps)
