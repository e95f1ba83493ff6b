"""Hugging Face Accelerate: `Accelerator(dynamo_plugin=FP8Plugin(options={"recipe": "tensorwise"}))`.

Accelerate has a list of backends, without "fp8". The plugin names one of the list, Inductor, which compiles FP8 graphs too, and
passes "fp8" on to torch.compile.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils import TorchDynamoPlugin

from ..config.options import parse
from ..errors import OptionError

BACKEND = "fp8"


class FP8Plugin(TorchDynamoPlugin):
    """A `TorchDynamoPlugin` that compiles with `backend="fp8"`, at the place where Accelerate compiles: after checkpointing,
    before FSDP2, after DDP.

    `options`: those of the backend and of Inductor (docs/options.md). They are checked here, before anything is prepared:
    raises OptionError. All other arguments are those of `TorchDynamoPlugin`; `use_regional_compilation=True` compiles block
    by block. Without `options`, the policy is the one that FP8COMPILE_POLICY names.
    """

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
