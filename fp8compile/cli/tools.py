"""plot, devices and calibrate."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .messages import Failed, torch_device


@click.command()
@click.argument("file")
@click.option(
    "-o", "--output", metavar="IMAGE", help="Where to write it: .png, .svg, .pdf (default: FILE with .png)."
)
@click.option(
    "--worst", default=8, show_default=True, metavar="N", type=click.IntRange(1), help="How many layers."
)
def plot(file: str, output: str | None, worst: int) -> None:
    """Draw scales and overflows over time, worst layers first.

    FILE is the JSON lines that fp8compile.monitor wrote. A layer is worse with more overflows, and with a
    lower SQNR where those are equal.
    """
    from ..reporting.plots import plot as draw

    target = output or str(Path(file).with_suffix(".png"))
    shown = draw(file, target, worst)
    for layer in shown:
        sqnr = "" if layer.sqnr == float("inf") else f", SQNR from {layer.sqnr:.1f} dB"
        click.echo(f"{layer.name}: overflows up to {layer.overflows:.3g}%{sqnr}")
    click.echo(f"wrote {target}", err=True)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def devices(as_json: bool) -> None:
    """List the described GPUs, and the rates that decisions use."""
    import dataclasses

    from ..devices.catalog import shipped, stored
    from ..reporting.columns import aligned

    known = [*stored().values(), *shipped().values()]
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(device) for device in known], indent=2))
        return
    rows = []
    for device in known:
        rates = device.sustained
        tflops = [f"{rate / 1e12:.0f}" if rate else "-" for rate in (rates.fp8, rates.bf16)]
        ratio = f"{rates.fp8 / rates.bf16:.2f}" if rates.fp8 else "-"
        sizes = (f"{rates.bandwidth / 1e12:.2f}", f"{device.memory / 2**30:.0f}")
        rows.append((device.key, device.name, *tflops, ratio, *sizes, device.origin))
    head = ("device", "name", "FP8 TFLOP/s", "bf16 TFLOP/s", "ratio", "TB/s", "GiB", "from")
    click.echo(aligned(head, rows, "<<>>>>><"))
    hint = "`fp8compile calibrate` measures a GPU of this machine."
    click.echo(f"Sustained rates of dense matmuls, and of a copy. {hint}", err=True)


@click.command()
@click.option(
    "--device",
    default="cuda:0",
    show_default=True,
    metavar="DEVICE",
    help="A device of this machine, as torch names it.",
)
@click.option("--no-write", is_flag=True, help="Print what was measured, and do not keep it.")
def calibrate(device: str, no_write: bool) -> None:
    """Measure a GPU of this machine, for decisions made on it.

    The result is kept. It takes about half a minute; nothing else should run on the GPU meanwhile.
    """
    from ..devices.calibrate import NoDevice
    from ..devices.calibrate import calibrate as run

    try:
        run(torch_device(device), write=not no_write)
    except NoDevice as error:
        raise Failed(str(error)) from None
