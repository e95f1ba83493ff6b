"""env: the facts about a machine that a bug report needs."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
from typing import Any

import click

from ..errors import Fp8CompileError, did_you_mean, near, one_line
from ..logs import VARIABLES

OTHERS = ("TORCH_LOGS", "TORCH_TRACE", "TORCH_COMPILE_DEBUG", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
PREFIXES = ("FP8COMPILE_", "TORCHINDUCTOR_", "TORCHDYNAMO_")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def env(as_json: bool) -> None:
    """Versions, GPUs, settings: paste the output into a bug report. The path of the home folder is shown as
    ~."""
    found: dict[str, Any]
    found = {"versions": versions(), "gpus": gpus(), "policy": policy(), "environment": environment()}
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    rows = [(name, version or "-") for name, version in found["versions"].items()]
    for i, gpu in enumerate(found["gpus"]):
        rows += [(f"GPU {i}", line) for line in _lines(gpu)]
    if not found["gpus"]:
        rows.append(("GPU", "none that torch sees; decisions are made without times, FP8 is emulated"))
    rows.append(("policy", found["policy"]))
    for name, value in found["environment"].items():
        if name.startswith("FP8COMPILE_") and name not in VARIABLES:
            value += f" (fp8compile reads no such variable.{did_you_mean(near(name, VARIABLES))})"
        rows.append((name, value))
    width = max(len(name) for name, _ in rows)
    click.echo("\n".join(f"{name:{width}}  {value}".rstrip() for name, value in rows))


def versions() -> dict[str, str | None]:
    """The versions of fp8compile and of the software below it; None for software that is not installed."""
    import torch

    from .. import __version__

    try:
        triton = importlib.import_module("triton").__version__
    except ImportError:
        triton = None
    return {
        "fp8compile": __version__,
        "torch": torch.__version__,
        "triton": triton,
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "Python": platform.python_version(),
        "platform": platform.platform(),
    }


def gpus() -> list[dict[str, Any]]:
    """The GPUs that torch sees, each with its native recipes and the description that decisions use."""
    import torch

    return [_gpu(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]


def _gpu(device: Any) -> dict[str, Any]:
    from ..config.recipe import BUILT_IN
    from ..devices import catalog
    from ..devices.gpu import gpu_of

    try:
        gpu = gpu_of(device)
    except RuntimeError as error:  # an incompatible driver, a GPU in use
        return {"error": one_line(error)}
    assert gpu is not None, device
    described = catalog.of(device)
    assert described is not None, device
    native = [name for name, made in BUILT_IN.items() if made.native(gpu)]
    return {
        "name": gpu.name,
        "capability": gpu.gfx or "{}.{}".format(*gpu.capability),
        "memory": gpu.total_memory,
        "native": native if gpu.architecture.fp8 else [],
        "described_as": described.key,
        "origin": described.origin,
    }


def _lines(gpu: dict[str, Any]) -> list[str]:
    from ..config.recipe import RECIPES

    if "error" in gpu:
        return [gpu["error"]]
    what = "architecture" if gpu["capability"].startswith("gfx") else "compute capability"
    emulated = "".join(f"; {name} is emulated in bf16" for name in RECIPES if name not in gpu["native"])
    native = f"FP8: {', '.join(gpu['native'])}{emulated}"
    return [
        f"{gpu['name']}, {what} {gpu['capability']}, {gpu['memory'] / 2**30:.0f} GiB",
        native if gpu["native"] else "no FP8: models are compiled in high precision",
        f"decisions are made for {gpu['described_as']!r}, {gpu['origin']}",
    ]


def policy() -> str:
    """The policy that decides if no option names one: its name or file, or the reason why it is not valid."""
    from ..config.policy import load

    try:
        found = load()
    except Fp8CompileError as error:
        return _without_home(f"not valid: {error}")
    return _without_home(found.source) + (f", for the device {found.device!r}" if found.device else "")


def environment() -> dict[str, str]:
    """The environment variables that are set and that affect compilation."""
    names = sorted(name for name in os.environ if name in OTHERS or name.startswith(PREFIXES))
    return {name: _without_home(os.environ[name]) for name in names}


def _without_home(text: str) -> str:
    home = os.path.expanduser("~").rstrip(os.sep)
    return re.sub(re.escape(home) + r"(?![\w.-])", "~", text) if home not in ("", "~") else text
