"""bench: the model's own training step on this machine's GPU, in bf16 and in FP8."""

from __future__ import annotations

import json
from typing import Any

import click

from .messages import Failed, usage
from .model_commands import TARGET_HELP, autocast_option, prepared, talk_on_stderr, traced
from .target import beside, load


@click.command(
    help="Does FP8 pay here? The model's training step, timed on this machine's GPU, in bf16 and in FP8." + TARGET_HELP
)
@click.argument("target")
@click.option("--device", default="cuda", show_default=True, metavar="DEVICE", help="A device of this machine.")
@click.option("--policy", metavar="FILE|NAME", help="Policy file, or the name of a shipped policy.")
@click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help="Option of the backend; repeatable.")
@click.option("--input", "inputs", multiple=True, metavar="SHAPE[:DTYPE]", help="Input of the model; repeatable.")
@click.option("--loss", metavar="NAME", help="A function beside TARGET that makes the loss of what the model returns.")
@autocast_option
@click.option("--torchao/--no-torchao", default=None, help="Also torchao's float8 linears (default: where it is installed).")
@click.option("--optimizer/--no-optimizer", default=True, help="A step has a fused AdamW, or none (default: it has).")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(2), help="Turns of each arm.")
@click.option("--steps", default=10, show_default=True, type=click.IntRange(1), help="Timed steps a turn.")
@click.option("--warmup", default=10, show_default=True, type=click.IntRange(2), help="Untimed steps at first, which compile.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def bench(
    target: str, device: str, policy: str | None, options: tuple[str, ...], inputs: tuple[str, ...], as_json: bool, **given: Any
) -> None:
    chosen = prepared(None, None, {"options": options, "policy": policy, "strict": False})
    _check(device)
    with talk_on_stderr():
        loaded = load(target, inputs)
        given["loss"] = None if given["loss"] is None else beside(target, given["loss"])
        from ..dryrun.bench import EMULATED
        from ..dryrun.bench import bench as run

        if device == "cpu":
            click.echo(f"note: {EMULATED}", err=True)
        settings = {"device": device, "options": chosen, "progress": lambda what: click.echo(what, err=True), **given}
        found = traced(loaded, lambda: run(loaded.model, *loaded.args, **settings, **loaded.kwargs))
    click.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
    if found.ratio is None:
        raise Failed(f"FP8 failed: {found.rows[-1]['error']}")


def _check(name: str) -> None:
    """Refuse a device on which nothing can be timed, before the model is loaded."""
    import torch

    from ..devices.support import refusal
    from ..dryrun.bench import EMULATED

    try:
        device = torch.device(name)
    except RuntimeError:
        raise usage(f"--device {name!r} is not a device as torch names it, such as cuda:0") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Failed(f"bench times a GPU, and torch sees no {name} here. --device cpu tries the command: {EMULATED}")
    if why := refusal([device]):
        raise Failed(f"FP8 cannot pay here: {why}")
