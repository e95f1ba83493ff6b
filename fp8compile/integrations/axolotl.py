"""Axolotl, from its YAML file alone, as docs/hosts.md shows. The keys under `fp8compile` are the arguments of
`fp8compile.integrations.transformers.FP8Callback`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .requirement import host
from .transformers import FP8Callback

with host("axolotl", "0.19"):
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel, field_validator


class FP8Args(BaseModel):
    """The key that the plugin adds to Axolotl's configuration."""

    fp8compile: dict[str, Any] | None = None

    @field_validator("fp8compile")
    @classmethod
    def _check(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        _callback(given)  # a ValueError, which pydantic shows together with those of other keys
        return given


class FP8Plugin(BasePlugin):
    """Compiles the model in place when training begins. `FP8Callback` says what is logged."""

    def get_input_args(self) -> str:
        return f"{FP8Args.__module__}.{FP8Args.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        trainer.add_callback(_callback(cfg.fp8compile))
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop())  # before Axolotl's loggers, which then show our numbers


def _callback(given: Mapping[str, Any] | None) -> FP8Callback:
    """The callback with the arguments of the YAML file. OptionError for a wrong one."""
    return FP8Callback(**{name: value for name, value in (given or {}).items() if value is not None})
