"""The plugin in Axolotl's own plugin manager and configuration, with a real Trainer: two steps.

Axolotl pins versions of transformers, TRL and Accelerate, so it is installed without its requirements, and
its own training loop is not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.small import STATE, in_fp8, linears, llama, logged, saved, vanilla
from tests.hosts.test_trainer import trainer

pytest.importorskip("axolotl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("interpreted")]

PLUGIN = "fp8compile.integrations.axolotl.FP8Plugin"
REQUIRED = {"base_model": "tiny", "datasets": [{"path": "data", "type": "alpaca"}], "learning_rate": 1e-4}
REQUIRED |= {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "plugins": [PLUGIN]}


@pytest.fixture
def manager() -> Iterator[Any]:
    from axolotl.integrations.base import PluginManager

    found = PluginManager.get_instance()
    found.plugins.clear()
    found.register(PLUGIN)
    yield found
    found.plugins.clear()


def validated(config: dict[str, Any]) -> Any:
    """What Axolotl makes of a YAML file, by the classes that it merges with those of plugins."""
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.dict import DictDefault

    _, made = merge_input_args()
    return DictDefault(made(**REQUIRED, **config).model_dump(exclude_none=True))


def test_two_steps(manager: Any, tmp_path: Path) -> None:
    """The callback comes before Axolotl's loggers, so that these see the numbers."""
    from transformers import TrainerCallback

    class Logger(TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[dict[str, Any]] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            self.seen.append(dict(logs))

    config = validated(
        {"fp8compile": {"recipe": "tensorwise", "schedule": {"warmup_steps": 0}, "measure_every": 1}}
    )
    run = trainer(tmp_path / "run", logger := Logger())
    manager.post_trainer_create(config, run)
    run.train()
    assert in_fp8(run.model) == linears()
    assert logger.seen[0].keys() & STATE == STATE and logged(run)[1]["fp8/matmuls"] == 21
    assert saved(tmp_path / "run" / "checkpoint-2") == vanilla(llama(), tmp_path / "vanilla")


def test_without_a_section(manager: Any, tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=1)
    manager.post_trainer_create(validated({}), run)
    run.train()
    assert in_fp8(run.model) == linears()


def test_a_wrong_key_is_named_when_the_file_is_read(manager: Any) -> None:
    with pytest.raises(ValueError, match="unknown fp8 option 'polcy'.*Did you mean 'policy'"):
        validated({"fp8compile": {"polcy": "fast"}})
    with pytest.raises(ValueError, match="missing.toml"):
        validated({"fp8compile": {"policy": "missing.toml"}})
