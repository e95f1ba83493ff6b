"""tune: the fastest policy whose gradients are exact enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from .messages import usage
from .model_commands import TARGET_HELP, as_trained, autocast_option, hide_gpus, prepared, talk_on_stderr, traced
from .target import beside, load


@click.command(
    help="The fastest policy whose gradients are exact enough: a recipe for each group of layers, from measured errors and "
    "estimated times." + TARGET_HELP
)
@click.argument("target")
@click.option("--device", metavar="NAME", help="Device to estimate times for (default: the policy's; else h200).")
@click.option("--max-error", type=float, default=0.05, show_default=True, help="Largest relative error of gradients.")
@click.option("--loss-budget", hidden=True)
@click.option("--like", metavar="TARGET", help="What times are estimated for: the same layers in real sizes.")
@click.option("--loss", metavar="NAME", help="A function beside TARGET that makes the loss of what the model returns.")
@click.option("--policy", metavar="FILE|NAME", help="Policy that the result extends.")
@autocast_option
@click.option("--out", metavar="FILE", help="Write the policy into this file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def tune(
    target: str,
    device: str | None,
    max_error: float,
    loss_budget: str | None,
    like: str | None,
    loss: str | None,
    policy: str | None,
    autocast: bool | None,
    out: str | None,
    as_json: bool,
) -> None:
    if loss_budget is not None:
        raise usage("--loss-budget is gone, since no study supports one; give --max-error, such as 0.05")
    hide_gpus("tune")
    options = prepared(device, None, {"options": (), "policy": policy, "strict": False})
    if out is not None and not Path(out).parent.is_dir():
        raise usage(f"--out {out}: there is no folder {Path(out).parent}")
    with talk_on_stderr():
        loaded = load(target)
        sizes = None if like is None else load(like)
        from ..dryrun.tune import tune as run

        settings: dict[str, Any] = {
            "loss": None if loss is None else beside(target, loss),
            "options": options or None,
            "device": device,
            "max_error": max_error,
            "like": None if sizes is None else (sizes.model, sizes.args, sizes.kwargs),
            "progress": lambda what: click.echo(what, err=True),
        }
        with as_trained(loaded, autocast):
            found = traced(loaded, lambda: run(loaded.model, *loaded.args, **settings, **loaded.kwargs))
    if out is not None:
        found.write(out)
        click.echo(f"wrote {out}", err=True)
    click.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
