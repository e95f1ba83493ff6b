"""The machine, the software and the time of a measurement. It imports nothing that may be missing."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from .pool import ROOT

CLOCKS = ["clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"]
CLOCKS += ["power.limit", "temperature.gpu", "driver_version"]


def output_of(*command: str, folder: Path = ROOT) -> str | None:
    """The stdout of a command; None if it cannot be run or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()
    except (subprocess.SubprocessError, OSError):
        return None


def clocks() -> dict[str, str] | None:
    """Clocks, power limit, temperature and driver as nvidia-smi reports them now; None without nvidia-smi."""
    answer = output_of("nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader")
    if not answer:
        return None
    return dict(zip(CLOCKS, (part.strip() for part in answer.splitlines()[0].split(",")), strict=False))


def versions() -> dict[str, str | None]:
    import torch

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": version("triton"),
        "torchao": version("torchao"),
    }


def commit(tree: Path = ROOT) -> dict[str, Any]:
    """The commit of a checkout, and whether package, benchmarks or examples differ; None without git."""
    name = output_of("git", "rev-parse", "HEAD", folder=tree)
    sources = ("fp8compile", "benchmarks", "examples")
    changed = output_of("git", "status", "--porcelain", "--", *sources, folder=tree)
    return {"commit": name, "changed": None if changed is None else bool(changed)}


def describe_device(device: str) -> dict[str, Any]:
    """Name, memory in bytes and capability of torch's device. It initialises CUDA: for workers only."""
    if device == "cpu":
        return {"name": "cpu", "memory": 0, "capability": None}
    import torch

    properties = torch.cuda.get_device_properties(0)
    capability = f"{properties.major}.{properties.minor}"
    return {"name": properties.name, "memory": properties.total_memory, "capability": capability}


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
