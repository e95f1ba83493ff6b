"""Hugging Face Accelerate: `Accelerator(dynamo_backend="fp8")`, once this module is imported.

Accelerate has a list of backends, without "fp8". Importing this module makes it accept all backends of torch,
also in what builds on it: `TrainingArguments(torch_compile_backend="fp8")`. `FP8Plugin` takes options, too.

A launcher is another process. This command launches with the backend, and the script needs no import:

    python -m fp8compile.integrations.accelerate launch --dynamo_backend fp8 train.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..config.options import parse
from ..errors import OptionError
from .recipe_names import recipe_options as recipe_options
from .requirement import host

with host("accelerate", "1.13"):
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

BACKEND = "fp8"
MODULE = "fp8compile.integrations.accelerate"


class FP8Plugin(TorchDynamoPlugin):
    """A `TorchDynamoPlugin` for "fp8". Accelerate compiles after checkpointing and DDP, before FSDP2.

    `options`: those of the backend and of Inductor (docs/options.md), checked before anything is prepared:
    raises OptionError. Without them, FP8COMPILE_POLICY names the policy. All other arguments are those of
    `TorchDynamoPlugin`; `use_regional_compilation=True` compiles block by block."""

    backend: Any  # for the type checker: this is no new field

    def __post_init__(self) -> None:
        if self.backend is not None and str(self.backend).lower() != BACKEND:
            theirs = f"{BACKEND!r}, or leave it out. For another backend take accelerate's TorchDynamoPlugin"
            raise OptionError.of("backend", str(self.backend), theirs)
        self.backend = "inductor"  # one of the list; also: not what ACCELERATE_DYNAMO_BACKEND says
        super().__post_init__()
        parse(self.options)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "backend": BACKEND}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of torch.compile."""
        return {**super().to_kwargs(), "backend": BACKEND}


# -- the list of backends --


def accept_registered_backends() -> None:
    """Make `DynamoBackend` accept all backends that torch knows; twice is once. Importing this does it."""
    earlier = DynamoBackend._missing_
    if getattr(earlier, "_of_fp8compile", False):
        return

    def missing(cls: Any, value: Any) -> Any:
        # Accelerate writes names in capitals, and passes them on to torch.compile in small letters
        known = torch.compiler.list_backends(exclude_tags=())
        if isinstance(value, str) and value.isupper() and value.lower() in known:
            member = str.__new__(cls, value)
            member._name_ = member._value_ = value
            return cls._value2member_map_.setdefault(value, member)  # one object: compared by identity
        return earlier(value)

    missing._of_fp8compile = True  # type: ignore[attr-defined]
    DynamoBackend._missing_ = classmethod(missing)


accept_registered_backends()


# -- python -m fp8compile.integrations.accelerate --

USAGE = f"""usage: python -m {MODULE} launch [FLAGS OF accelerate launch] SCRIPT [ARGUMENTS]

As `accelerate launch`, where --dynamo_backend, or dynamo_config.dynamo_backend of the config file, may be
"fp8" or any other backend that torch knows. FP8COMPILE_POLICY names the policy."""


def _main(arguments: Sequence[str]) -> None:
    """`launch ...` in the launcher; `run [-m] SCRIPT ...` in each process that it starts."""
    commands: dict[str, Callable[[list[str]], None]] = {"launch": _launch, "run": _run}
    if not arguments or arguments[0] not in commands:
        print(USAGE, file=sys.stdout if arguments[:1] in (["-h"], ["--help"]) else sys.stderr)
        raise SystemExit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    commands[arguments[0]](list(arguments[1:]))


def _launch(arguments: list[str]) -> None:
    from accelerate.commands import launch

    known = map(str.upper, torch.compiler.list_backends(exclude_tags=()))
    launch.DYNAMO_BACKENDS = [*launch.DYNAMO_BACKENDS, *known]
    parser = launch.launch_command_parser()
    args = parser.parse_args(arguments)
    if not args.no_python:  # a program that is not Python imports nothing
        how = ["-m"] if args.module else []
        args.training_script_args = ["run", *how, args.training_script, *args.training_script_args]
        args.training_script, args.module = MODULE, True
    launch.launch_command(args)


def _run(arguments: list[str]) -> None:
    """Run a script or a module as Python would, in a process in which Accelerate knows the backends."""
    import runpy
    from pathlib import Path

    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _main(sys.argv[1:])
