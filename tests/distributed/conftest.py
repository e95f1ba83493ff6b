"""Fixtures of tests that need a process group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[str]:
    """A default process group of this process alone; its name."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD.group_name  # type: ignore[union-attr]
    dist.destroy_process_group()
