"""What the commands that take a TARGET have in common: their options, and the backend's options from them."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from .messages import usage

TARGET = """

    TARGET is path.py:function or package.module:function. The function takes no arguments and returns a
    torch.nn.Module, (model, args), (model, args, kwargs) or dict(model=, args=, kwargs=).
    """

OPTION = "An option of the backend, such as recipe=tensorwise or margin=[1,1,11]; repeatable."
OPTIONS = {
    "policy": click.option(
        "--policy", metavar="FILE|NAME", help="A policy file, or the name of a shipped policy."
    ),
    "option": click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help=OPTION),
    "input": click.option(
        "--input",
        "inputs",
        multiple=True,
        metavar="SHAPE[:DTYPE]",
        help="Input of the model, as 8x1024:int64 or name=8x1024:int64; repeatable. Replaces those that "
        "TARGET returns.",
    ),
    "loss": click.option(
        "--loss",
        metavar="NAME",
        help="A function in TARGET's file that computes the loss from the model's output.",
    ),
    "autocast": click.option(
        "--autocast/--no-autocast",
        default=None,
        help="Run the step under bf16 autocast, or as the model is (default: under autocast if a "
        "parameter is float32).",
    ),
    "json": click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table."),
    "html": click.option("--html", metavar="FILE", help="Write an HTML page, too."),
    "strict": click.option(
        "--strict",
        is_flag=True,
        help="Exit with status 1 if no matmul is in FP8, or a rule of the policy matches none.",
    ),
}


def takes(device: str, *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """TARGET, --device with this help, and those of `OPTIONS`."""
    first = (click.argument("target"), click.option("--device", metavar="NAME", help=device))

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed((*first, *map(OPTIONS.__getitem__, names))):
            function = decorator(function)
        return function

    return decorate


DECIDES = "The described device to decide for (default: the policy's; else the model's, or h200 to estimate)."
STEP = ("policy", "option", "input", "autocast", "json")


def prepared(
    device: str | None,
    written: Mapping[str, str | None],
    policy: str | None = None,
    options: Sequence[str] = (),
    strict: bool = False,
) -> dict[str, Any]:
    """The backend's options. Refuses wrong arguments here, before torch and the model are loaded. `written`:
    files to write, by the option that names them."""
    found = dict(map(parse_option, options))
    if policy is not None:
        found["policy"] = policy
    if strict:
        found["strict"] = True
    for name, file in written.items():
        if file is not None and not Path(file).parent.is_dir():
            raise usage(f"{name} {file}: there is no folder {Path(file).parent}")
        if file is not None and Path(file).is_dir():
            raise usage(f"{name} {file} is a folder")
    check_device(device)
    if found:
        from ..config.options import parse

        parse(found)
    return found


def check_device(name: str | None) -> None:
    """Refuse a device that is not described, before torch and the model are loaded."""
    if name is not None:
        from ..devices import catalog

        catalog.find(name)


def parse_option(text: str) -> tuple[str, Any]:
    """ "margin=1" -> ("margin", 1). The value is read as JSON, else as a Python literal, else as text."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise usage(f"--option {text!r} is not KEY=VALUE, as in recipe=tensorwise")
    for read in (json.loads, ast.literal_eval):
        try:
            return key.strip(), read(value.strip())
        except (ValueError, SyntaxError):
            continue
    return key.strip(), value.strip()
