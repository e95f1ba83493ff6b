"""Hugging Face Trainer and TRL: `Trainer(model, args, callbacks=[FP8Callback(policy="fast")], ...)`.

Importing it makes `TrainingArguments(torch_compile_backend="fp8")` work, with FP8COMPILE_POLICY's policy.
"""

from __future__ import annotations

from typing import Any

from ..errors import OptionError
from . import accelerate as accelerate  # Trainer needs Accelerate, which learns the name "fp8" here
from .requirement import host
from .training import Training

with host("transformers", "5.16"):
    from transformers import TrainerCallback


class FP8Callback(TrainerCallback):
    """Compiles the model in place at the beginning of training, and adds to what Trainer logs.

    `policy`, `schedule` (such as {"warmup_steps": 200}) and further keywords are the options of the backend;
    they are checked here: raises OptionError. Nothing of what Trainer saves changes. A run that resumes goes
    on at its step of the schedule. A model that is compiled already stays so.

    A log with a loss also has fp8/share, fp8/matmuls and fp8/ROLE/amax (`Training.numbers`).
    `measure_every=100` measures each 100th step, which is slower, and adds overflows, underflows and SQNR.

    If nothing is FP8 after the first step: one line, or a StrictError with `strict=True`.
    """

    def __init__(
        self, policy: Any = None, schedule: Any = None, *, measure_every: int | None = None, **options: Any
    ) -> None:
        self._training = Training(policy, schedule, measure_every, options)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if args.torch_compile:
            self._trainer_compiles(args.torch_compile_backend)
        else:
            self._training.compile([model])
        self._training.begin(model, state.global_step)

    def _trainer_compiles(self, backend: Any) -> None:
        """Trainer has compiled the model: nothing to do, if its options and ours say the same."""
        if backend != "fp8":
            allowed = "'fp8', or left out together with torch_compile: FP8Callback compiles the model itself"
            raise OptionError.of("torch_compile_backend", backend, allowed)
        if self._training.options:
            given = ", ".join(self._training.options)
            why = f"left out if FP8Callback has options ({given}): Trainer compiles without them"
            raise OptionError.of("torch_compile_backend", backend, why)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._training.stepped()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs is None or "loss" not in logs:  # an evaluation, or the summary of the run
            return
        numbers = self._training.numbers()
        logs.update(numbers)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(numbers)  # Trainer has put a copy there before it asks callbacks

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._training.end()
