"""The commands that take a TARGET: explain, estimate, compare, bench, tune."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..errors import Fp8CompileError, StrictError, one_line
from .messages import Failed, torch_device, usage, user_traceback
from .model_options import DECIDES, STEP, TARGET, prepared, takes
from .target import Target, load

if TYPE_CHECKING:
    from ..config.policy import Policy
    from ..reporting.report import Report

HIDDEN_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


@click.command(
    help="Show which matmuls run in FP8, and why the others do not. Nothing is trained or run." + TARGET
)
@takes(DECIDES, *STEP, "html", "strict")
@click.option("--full", is_flag=True, help="A line for each layer, also of repeated blocks.")
def explain(
    target: str, inputs: Sequence[str], device: str | None, autocast: bool | None, as_json: bool,
    html: str | None, full: bool, **given: Any
) -> None:  # fmt: skip
    options = prepared(device, {"--html": html}, **given)
    report = explained(target, inputs, options, device, autocast)
    _finish(report, report.table(collapse=not full), as_json, html)
    if given["strict"]:
        _insist(report, options, target)


@click.command(help="Estimate a step in bf16 and in FP8, for any described GPU." + TARGET)
@takes(DECIDES, *STEP, "html", "strict")
@click.option(
    "--extrapolate", is_flag=True, help="Compile a few of the repeated blocks, and extrapolate to all."
)
def estimate(
    target: str, inputs: Sequence[str], device: str | None, autocast: bool | None, as_json: bool,
    html: str | None, extrapolate: bool, **given: Any
) -> None:  # fmt: skip
    hide_gpus("estimate")
    options = prepared(device, {"--html": html}, **given)
    with talk_on_stderr():
        loaded = load(target, inputs)
        from ..dryrun.estimate import estimate as run

        found = traced(
            loaded, run, device=device, options=options, extrapolate=extrapolate, autocast=autocast
        )
    _finish(found, str(found), as_json, html)
    if given["strict"]:
        _insist(found.report, options, target)


@click.command(help="Compare a step in FP8 with one in high precision, by layer." + TARGET)
@takes(DECIDES, *STEP, "loss")
@click.option("--strict", is_flag=True, help="Exit with status 1 if a row is out of range.")
@click.option(
    "--plot", "image", metavar="IMAGE", help="Draw a picture, too: .png, .svg, .pdf. Needs matplotlib."
)
@click.option("--full", is_flag=True, help="A line for each layer and parameter.")
def compare(
    target: str, inputs: Sequence[str], device: str | None, autocast: bool | None, as_json: bool,
    loss: str | None, image: str | None, full: bool, **given: Any
) -> None:  # fmt: skip
    options = prepared(device, {"--plot": image}, **given)
    with talk_on_stderr():
        loaded = load(target, inputs)
        function = loaded.function(loss)
        from ..dryrun.compare import compare as run

        with as_trained(loaded, autocast):
            found = traced(loaded, run, loss=function, options=options or None, device=device)
    if image is not None:
        found.plot(image)
        click.echo(f"wrote {image}", err=True)
    _finish(found, found.table(worst=None if full else 20), as_json)
    if given["strict"] and found.flagged:
        names = ", ".join(row["name"] for row in found.flagged)
        raise StrictError(f"strict: out of range in FP8: {names}")


@click.command(help="Time a training step on this machine's GPU, in bf16 and in FP8." + TARGET)
@takes("A device of this machine (default: cuda); cpu tries the command.", *STEP, "loss")
@click.option(
    "--torchao/--no-torchao",
    default=None,
    help="Also torchao's float8 linears (default: where it is installed).",
)
@click.option(
    "--optimizer/--no-optimizer",
    default=True,
    help="With AdamW (the default; its learning rate is 0), or without.",
)
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(2), help="Turns of each arm.")
@click.option("--steps", default=10, show_default=True, type=click.IntRange(1), help="Timed steps per turn.")
@click.option(
    "--warmup", default=10, show_default=True, type=click.IntRange(2), help="Untimed first steps, to compile."
)
def bench(
    target: str, device: str | None, policy: str | None, options: Sequence[str], inputs: Sequence[str],
    as_json: bool, loss: str | None, **settings: Any
) -> None:  # fmt: skip
    chosen, device = prepared(None, {}, policy, options), device or "cuda"
    import torch

    from ..devices.support import refusal
    from ..dryrun.bench import EMULATED

    place = torch_device(device)
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise Failed(
            f"bench times a GPU, and torch sees no {device} here. --device cpu tries the command: {EMULATED}"
        )
    if why := refusal([place]):
        raise Failed(f"FP8 cannot pay here: {why}")
    with talk_on_stderr():
        loaded = load(target, inputs)
        function = loaded.function(loss)
        from ..dryrun.bench import bench as run

        if device == "cpu":
            click.echo(f"note: {EMULATED}", err=True)
        found = traced(loaded, run, loss=function, device=device, options=chosen, progress=_say, **settings)
    _finish(found, str(found), as_json)
    if found.ratio is None:
        raise Failed(f"FP8 failed: {found.rows[-1]['error']}")


@click.command(
    help="Choose the fastest policy with accurate enough gradients. It has a recipe for each group of "
    "layers, from measured errors and estimated times, and extends --policy." + TARGET
)
@takes(
    "Device to estimate times for (default: the policy's; else h200).", "policy", "autocast", "json", "loss"
)
@click.option(
    "--max-error",
    type=float,
    default=0.05,
    show_default=True,
    help="Largest error of gradients that FP8 may add to bf16's.",
)
@click.option(
    "--like",
    metavar="TARGET",
    help="What times are estimated for: a model of the same module names, in real sizes.",
)
@click.option("--out", metavar="FILE", help="Write the policy into this file.")
def tune(
    target: str, device: str | None, policy: str | None, autocast: bool | None, as_json: bool,
    loss: str | None, max_error: float, like: str | None, out: str | None
) -> None:  # fmt: skip
    hide_gpus("tune")
    settings: dict[str, Any] = {"device": device, "max_error": max_error}
    settings["options"] = prepared(device, {"--out": out}, policy)
    with talk_on_stderr():
        loaded = load(target)
        settings["loss"] = loaded.function(loss)
        if like is not None:
            sizes = load(like)
            settings["like"] = (sizes.model, sizes.args, sizes.kwargs)
        from ..dryrun.tune import tune as run

        with as_trained(loaded, autocast):
            found = traced(loaded, run, progress=_say, **settings)
    if out is not None:
        found.write(out)
        click.echo(f"wrote {out}", err=True)
    _finish(found, str(found), as_json)


def explained(
    target: str,
    inputs: Sequence[str],
    options: Mapping[str, Any],
    device: str | None,
    autocast: bool | None = None,
) -> Report:
    """Load TARGET and explain it, with the backend's `options`, for `device`."""
    with talk_on_stderr():
        loaded = load(target, inputs)
        from ..dryrun.explain import explain as run

        return traced(loaded, run, options=options, device=device, autocast=autocast)


def idle(policy: Policy, report: Report, target: str) -> str:
    """Which of the user's own rules match no matmul of `target`, and why, if no name fits; "" if all do."""
    from ..config.policy import nameless

    deciding = {rule for x in report.matmuls for rule in (x.rule, *(other for other, _ in x.others))}
    modules, parameters = ({getattr(x, key): "" for x in report.matmuls} for key in ("fqn", "parameter"))
    own = list(zip(policy.labels, policy.rules, strict=True))[: policy.own]
    found = {label: rule for label, rule in own if rule.conditions and label not in deciding}
    whys = {label: nameless(rule, modules, parameters) for label, rule in found.items()}
    told = (f"{label!r}" + (f" ({why.rstrip('.')})" if why else "") for label, why in whys.items())
    return f"no matmul of {target} is matched by {', '.join(told)}" if found else ""


def hide_gpus(command: str) -> None:
    """Hide this machine's GPUs: a process that uses one cannot describe another."""
    if "torch" not in sys.modules:
        if any(os.path.exists(file) for file in GPU_FILES) and os.environ.get(HIDDEN_GPUS[0]) != "":
            note = f"{command} describes a GPU and uses none, so it hides this machine's GPUs from itself"
            click.echo(f"note: {note}", err=True)
        os.environ.update(dict.fromkeys(HIDDEN_GPUS, ""))


# -- the model's own code --


@contextlib.contextmanager
def talk_on_stderr() -> Iterator[None]:
    """Inside the context, what print, libraries and subprocesses write to stdout goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def as_trained(target: Target, asked: bool | None) -> Iterator[None]:
    """Inside the context, steps run under bf16 autocast as `asked`. A line on stderr if it is the default."""
    from ..dryrun.autocast import autocast
    from ..dryrun.sandbox import modules_of

    with autocast(modules_of((target.model, target.args, target.kwargs)), asked) as note:
        yield
        if note:
            click.echo(f"note: {note} (--no-autocast runs it without)", err=True)


def traced(target: Target, function: Callable[..., Any], **settings: Any) -> Any:
    """Call `function` with the user's model and its inputs. If the model raises, print the user's traceback
    and raise Failed (exit status 1)."""
    debug = click.get_current_context().find_root().params.get("traceback")
    if not debug:  # torch logs the traceback of an operator that refuses its inputs
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        return function(target.model, *target.args, **settings, **target.kwargs)
    except Fp8CompileError as error:
        if debug or error.__cause__ is None:
            raise
        details, message = user_traceback(error.__cause__), str(error)
    except Exception as error:
        if debug:
            raise
        details = user_traceback(error)
        message = f"{type(target.model).__name__} of {target.spec} could not be traced: {one_line(error)}"
        message += "" if details else " (fp8compile --traceback ... shows where)"
    if details:
        click.echo(details, err=True)
    raise Failed(message)


# -- output --


def _say(what: str) -> None:
    click.echo(what, err=True)


def _finish(result: Any, text: str, as_json: bool, html: str | None = None) -> None:
    if html is not None:
        try:
            result.to_html(html)
        except OSError as error:
            raise usage(f"--html {html}: {error.strerror}") from None
        click.echo(f"wrote {html}", err=True)
    click.echo(json.dumps(result.to_dict(), indent=2) if as_json else text)


def _insist(report: Report, options: Mapping[str, Any], target: str) -> None:
    """StrictError if no matmul is in FP8, or if a rule of the user's policy decided nothing."""
    from ..config.options import parse

    policy = parse(options).policy
    unused = idle(policy, report, target)
    if unused:
        raise StrictError(f"strict: {unused}")
    if not any(record.decision == "fp8" for record in report.matmuls):
        raise StrictError(f"strict: no matmul of {target} becomes FP8: {report.summary()}")
