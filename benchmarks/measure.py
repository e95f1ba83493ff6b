"""Runs and times training steps of one task, by the package's own `dryrun.measure`."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile.dryrun import kernel_classes, measure

from . import timeline
from .cases.base import Task


class Runner(measure.Runner):
    """Trains `task`. The arm has already prepared its model (`Module.compile`)."""

    def __init__(self, task: Task):
        self.task, self.point, self.device = task, task.point, task.device
        self.parameters = list(task.model.parameters())
        self.horizon = 0  # how many steps there will be; 0: not known
        super().__init__(task.device, self.next, self.finish, None, self.point.accumulate, self.point.tokens)

    def next(self) -> Tensor:
        batch = next(self.task.batches)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.point.autocast):
            return self.task.model(*batch)

    def finish(self) -> None:
        """Clipping, learning rate, optimizer; gradients are dropped."""
        optimizer = self.task.optimizer
        if optimizer is not None:
            if self.point.clip is not None:
                nn.utils.clip_grad_norm_(self.parameters, self.point.clip)
            if self.point.schedule is not None:
                for group in optimizer.param_groups:
                    group["lr"] = self.point.schedule(self.steps, self.horizon)
            optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None

    def turn(self, steps: int, lead: int = 1) -> dict[str, Any]:
        result = super().turn(steps, lead)
        if self.point.validate is not None:
            result["validation"] = [self.steps, self.point.validate(self.task.model, self.device)]
            result |= self.idle()
        return result

    def profiles(self, casts: Collection[str], steps: int = 3, lead: int = 5) -> dict[str, Any]:
        """ "kernels" by class, the "timeline" of a step, and the "wall" time of both; {} on a CPU. `lead`:
        untimed steps before, after which the clocks are those of a turn."""
        if not self.cuda:
            return {}
        start = time.time()
        seen = kernel_classes.launches(self.profiled(steps, lead))
        sized = timeline.sized_matmuls(self.profiled(steps, shapes=True))
        return {
            "kernels": kernel_classes.summarise(seen, casts, steps),
            "timeline": timeline.summarise(seen, steps, sized),
            "wall": [start, time.time()],
        }
