"""tune: the fastest policy whose predicted loss is within a budget."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .errors import Failed, usage
from .model import TARGET_HELP, as_trained, autocast_option, hide_gpus, prepared, talk_on_stderr, traced
from .target import beside, load

if TYPE_CHECKING:
    from ..dryrun.tune import Progress

EVERY = 15.0  # seconds between lines of progress where there is no terminal


@click.command(
    help="The fastest policy within a loss budget: recipe and format for each group of layers, from measured errors and "
    "estimated times." + TARGET_HELP
)
@click.argument("target")
@click.option("--device", metavar="NAME", help="Device to estimate times for (default: the policy's; else h200).")
@click.option("--loss-budget", metavar="SHARE", default="0.2%", show_default=True, help="How much of the loss FP8 may cost.")
@click.option("--like", metavar="TARGET", help="What times are estimated for: the same layers in real sizes.")
@click.option("--loss", metavar="NAME", help="A function beside TARGET that makes the loss of what the model returns.")
@click.option("--policy", metavar="FILE|NAME", help="Policy that the result extends.")
@autocast_option
@click.option("--out", metavar="FILE", help="Write the policy into this file.")
@click.option("--plot", "image", metavar="IMAGE", help="Draw time against predicted loss: .png, .svg, .pdf.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def tune(
    target: str,
    device: str | None,
    loss_budget: str,
    like: str | None,
    loss: str | None,
    policy: str | None,
    autocast: bool | None,
    out: str | None,
    image: str | None,
    as_json: bool,
) -> None:
    hide_gpus("tune")
    options = prepared(device, None, {"options": (), "policy": policy, "strict": False})
    for name, file in (("--out", out), ("--plot", image)):
        if file is not None and not Path(file).parent.is_dir():
            raise usage(f"{name} {file}: there is no folder {Path(file).parent}")
    with talk_on_stderr():
        loaded = load(target)
        function = None if loss is None else beside(target, loss)
        sizes = None if like is None else load(like)
        from ..dryrun.tune import Unmet
        from ..dryrun.tune import tune as run

        settings: dict[str, Any] = {
            "loss": function,
            "options": options or None,
            "device": device,
            "loss_budget": loss_budget,
            "like": None if sizes is None else (sizes.model, sizes.args, sizes.kwargs),
        }
        with as_trained(loaded, autocast), _progress() as progress:
            try:
                found = traced(loaded, lambda: run(loaded.model, *loaded.args, progress=progress, **settings, **loaded.kwargs))
            except Unmet as error:
                raise Failed(str(error)) from None
    if out is not None:
        found.write(out)
        click.echo(f"wrote {out}", err=True)
    if image is not None:
        found.plot(image)
        click.echo(f"wrote {image}", err=True)
    click.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))


@contextmanager
def _progress() -> Iterator[Progress]:
    """Shows progress on stderr: a bar in a terminal, else a line every `EVERY` seconds."""
    if sys.stderr.isatty():
        with click.progressbar(length=1, show_pos=True, item_show_func=lambda what: what, file=sys.stderr) as bar:

            def move(done: int, total: int, what: str) -> None:
                bar.length, bar.current_item = total, what  # it may grow
                bar.make_step(done - bar.pos)
                bar.render_progress()  # `update` waits for the first step to end

            yield move
        return
    began = time.monotonic()
    said = began - EVERY

    def say(done: int, total: int, what: str) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= EVERY or done == total:
            said = now
            click.echo(f"{done}/{total}, {now - began:.0f} s: {what}", err=True)

    yield say
