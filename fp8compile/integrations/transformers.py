"""Hugging Face Trainer and TRL: `Trainer(model, args, callbacks=[FP8Callback(policy="fast")], ...)`; and
released FP8 checkpoints: `load_fp8("Qwen3-8B-FP8")`, a folder.

Importing it makes `TrainingArguments(torch_compile_backend="fp8")` work, with FP8COMPILE_POLICY's policy.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ..errors import LoadError, OptionError, one_line
from . import accelerate as accelerate  # Trainer needs Accelerate, which learns the name "fp8" here
from .requirement import host
from .training import Training

with host("transformers", "5.16"):
    import transformers
    from transformers import AutoConfig, GenerationConfig, PreTrainedModel, TrainerCallback
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter


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


def load_fp8(
    path: str | os.PathLike[str],
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **config: Any,
) -> PreTrainedModel:
    """The vanilla model of a released FP8 checkpoint, with its FP8 weights held as they are: see
    `fp8compile.load_fp8`. transformers itself refuses to train such a checkpoint.

    `path`: a folder, with `config.json`. `device`: of the model (None: the CPU). `dtype`: what everything but
    FP8 matmuls sees of the weights, and the least of other parameters: wider ones stay as in the files.
    `config`: changes of the model's configuration, such as `use_cache=False`. The model is in evaluation
    mode, as from `from_pretrained`.

    Experts come from a tensor for each, as transformers' own map of names says.

    Raises LoadError (a ValueError) for a checkpoint that cannot be read, or whose model transformers has not,
    or names otherwise."""
    from accelerate import init_empty_weights

    from ..features.load import load

    folder = Path(path)
    if not (folder / "config.json").is_file():
        fix = "huggingface_hub.snapshot_download makes such a folder"
        raise LoadError(f"{folder}: there is no config.json: {fix}")
    try:  # code that the folder may have is not run
        settings = AutoConfig.from_pretrained(folder, trust_remote_code=False, **config)
    except (OSError, ValueError) as error:
        raise LoadError(f"{folder / 'config.json'}: {one_line(error)}") from None
    settings.__dict__.pop("quantization_config", None)  # else a model would be built for it
    name = next(iter(settings.architectures or ()), "")
    kind = getattr(transformers, name, None)
    if kind is None:
        what = name or "architecture that config.json would name"
        raise LoadError(f"{folder}: transformers {transformers.__version__} has no {what}")
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with init_empty_weights(include_buffers=False):
            model = kind(settings)
    finally:
        torch.set_default_dtype(before)
    model.tie_weights()
    where = torch.device(device or "cpu")
    unread = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    load.load_fp8(model, folder, where, _stacks(model), unread)
    for parameter in model.parameters():
        narrow = parameter.dtype != dtype and parameter.dtype.itemsize <= dtype.itemsize
        if narrow and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        module._buffers.update({key: x.to(where) for key, x in module._buffers.items() if x is not None})
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _stacks(model: PreTrainedModel) -> dict[str, Any]:
    """Where the experts of a model are in a checkpoint, by name: of the kinds that transformers puts together
    without a change, a list of experts whose rows stand below each other."""
    from ..features.load.contents import Stack

    found: dict[str, Stack] = {}
    for rule in get_model_conversion_mapping(model):
        steps = [(type(x), x.dim) for x in rule.operations] if isinstance(rule, WeightConverter) else []
        if not steps or steps != [(MergeModulelist, 0), (Concatenate, 1)][: len(steps)]:
            continue
        (target,), sources = rule.target_patterns, rule.source_patterns
        for name, parameter in model.named_parameters():
            prefix = name.removesuffix(target)
            if parameter.dim() == 3 and prefix != name and prefix[-1:] in ("", "."):
                each = [[prefix + x.replace("*", str(e)) for x in sources] for e in range(len(parameter))]
                found[name] = Stack(each)
    return found
