"""explain, estimate and compare: which matmuls of a model become FP8, how much time that saves, and what it costs in
accuracy."""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import Fp8CompileError, StrictError, one_line
from .messages import Failed, usage, user_traceback
from .target import Target, beside, load

if TYPE_CHECKING:
    from ..reporting.report import Report

_HIDDEN_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
TARGET_HELP = """

    TARGET is path.py:function or package.module:function. The function takes no arguments and returns a torch.nn.Module,
    (model, args), (model, args, kwargs) or dict(model=, args=, kwargs=).
    """


autocast_option = click.option(
    "--autocast/--no-autocast",
    default=None,
    help="Take the step under bf16 autocast, or as the model is (default: under autocast if a parameter is float32).",
)


def _model_options(function: Callable[..., Any] | None = None, html: bool = True) -> Callable[..., Any]:
    """The arguments that explain, estimate and compare share. `html`: with --html."""
    if function is None:
        return lambda function: _model_options(function, html)
    device_help = "Device whose description decides what pays (default: the policy's; else the model's, or h200 to estimate)."
    decorators = [
        click.argument("target"),
        click.option("--device", metavar="NAME", help=device_help),
        click.option("--policy", metavar="FILE|NAME", help="Policy file, or the name of a shipped policy."),
        click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help="Option of the backend; repeatable."),
        click.option(
            "--input",
            "inputs",
            multiple=True,
            metavar="SHAPE[:DTYPE]",
            help="Input of the model, as 8x1024:int64 or name=8x1024:int64; repeatable. Replaces those that TARGET returns.",
        ),
        autocast_option,
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table."),
        *([click.option("--html", metavar="FILE", help="Write an HTML page, too.")] if html else []),
        click.option(
            "--strict",
            is_flag=True,
            help="Fail where nothing can run in FP8, or a rule matches nothing." if html else "Fail if a row leaves its band.",
        ),
    ]

    for decorator in reversed(decorators):
        function = decorator(function)
    return function


@click.command(help="Show which matmuls run in FP8, and why the others do not. Nothing is trained or run." + TARGET_HELP)
@_model_options
@click.option("--full", is_flag=True, help="A line for each layer, also of repeated blocks.")
def explain(target: str, device: str | None, as_json: bool, html: str | None, full: bool, **given: Any) -> None:
    options = prepared(device, html, given)
    report = explained(target, given["inputs"], options, device, given["autocast"])
    _finish(report, report.table(collapse=not full), as_json, html)
    if given["strict"]:
        _insist(report, options, target)


@click.command(help="Estimate the time of a training step in bf16 and in FP8, for a GPU that you need not have." + TARGET_HELP)
@_model_options
@click.option("--extrapolate", is_flag=True, help="Compile one and two of the repeated blocks, and extrapolate to all.")
def estimate(
    target: str,
    device: str | None,
    as_json: bool,
    html: str | None,
    extrapolate: bool,
    **given: Any,
) -> None:
    hide_gpus("estimate")
    options = prepared(device, html, given)
    with talk_on_stderr():
        loaded = load(target, given["inputs"])
        from ..dryrun.estimate import estimate as run

        settings: dict[str, Any] = {"device": device, "options": options, "extrapolate": extrapolate}
        settings["autocast"] = given["autocast"]
        found = traced(loaded, lambda: run(loaded.model, *loaded.args, **settings, **loaded.kwargs))
    _finish(found, str(found), as_json, html)
    if given["strict"]:
        _insist(found.report, options, target)


@click.command(
    help="One training step in FP8 beside the same step in high precision: errors of outputs and gradients." + TARGET_HELP
)
@_model_options(html=False)
@click.option("--loss", metavar="NAME", help="A function beside TARGET that makes the loss of what the model returns.")
@click.option("--plot", "image", metavar="IMAGE", help="Draw a picture, too: .png, .svg, .pdf.")
@click.option("--full", is_flag=True, help="A line for each layer and parameter.")
def compare(
    target: str, device: str | None, as_json: bool, loss: str | None, image: str | None, full: bool, **given: Any
) -> None:
    options = prepared(device, None, given)
    if image is not None and not Path(image).parent.is_dir():
        raise usage(f"--plot {image}: there is no folder {Path(image).parent}")
    with talk_on_stderr():
        loaded = load(target, given["inputs"])
        function = None if loss is None else beside(target, loss)
        from ..dryrun.compare import compare as run

        settings: dict[str, Any] = {"loss": function, "options": options or None, "device": device}
        with as_trained(loaded, given["autocast"]):
            found = traced(loaded, lambda: run(loaded.model, *loaded.args, **settings, **loaded.kwargs))
    if image is not None:
        found.plot(image)
        click.echo(f"wrote {image}", err=True)
    _finish(found, found.table(worst=None if full else 20), as_json, None)
    if given["strict"] and found.flagged:
        names = ", ".join(row["name"] for row in found.flagged)
        raise StrictError(f"strict: out of their band in FP8: {names}")


def explained(
    target: str, inputs: Sequence[str], options: Mapping[str, Any], device: str | None, autocast: bool | None = None
) -> Report:
    """Load TARGET and explain it, with the backend's `options`, for `device`."""
    with talk_on_stderr():
        loaded = load(target, inputs)
        from ..dryrun.explain import explain as run

        settings: dict[str, Any] = {"options": options, "device": device, "autocast": autocast}
        return traced(loaded, lambda: run(loaded.model, *loaded.args, **settings, **loaded.kwargs))


def idle(labels: Sequence[str], report: Report, target: str) -> str:
    """A sentence that names the rules of `labels` that decided about no matmul of `target`; "" if each decided about some."""
    deciding = {record.rule for record in report.matmuls}
    names = [repr(label) for label in labels if label not in deciding]
    verb = "decides" if len(names) == 1 else "decide"
    return f"{', '.join(names)} {verb} about no matmul of {target}" if names else ""


# --- options --------------------------------------------------------------------------------------


def prepared(device: str | None, html: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The backend's options. Refuses wrong arguments here, before torch and the model are loaded."""
    options = dict(map(parse_option, given["options"]))
    if given["policy"] is not None:
        options["policy"] = given["policy"]
    if given["strict"]:
        options["strict"] = True
    if html is not None and not Path(html).parent.is_dir():
        raise usage(f"--html {html}: there is no folder {Path(html).parent}")
    if html is not None and Path(html).is_dir():
        raise usage(f"--html {html} is a folder")
    check_device(device)
    if options:
        from ..config.options import parse

        parse(options)
    return options


def check_device(name: str | None) -> None:
    """Refuse a device that is not described, before torch and the model are loaded."""
    if name is not None:
        from ..devices import catalog

        catalog.find(name)


def parse_option(text: str) -> tuple[str, Any]:
    """ "margin=1" -> ("margin", 1). The value is read as JSON, else as a Python literal, else it is the text itself."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise usage(f"--option {text!r} is not KEY=VALUE, as in recipe=tensorwise")
    for read in (json.loads, ast.literal_eval):
        try:
            return key.strip(), read(value.strip())
        except (ValueError, SyntaxError):
            continue
    return key.strip(), value.strip()


def hide_gpus(command: str) -> None:
    """Hide this machine's GPUs: a process that uses one cannot describe another."""
    if "torch" not in sys.modules:
        if any(os.path.exists(file) for file in _GPU_FILES) and os.environ.get(_HIDDEN_GPUS[0]) != "":
            click.echo(f"note: {command} describes a GPU and uses none, so it hides this machine's GPUs from itself", err=True)
        os.environ.update(dict.fromkeys(_HIDDEN_GPUS, ""))


# --- the model's own code -------------------------------------------------------------------------


@contextlib.contextmanager
def talk_on_stderr() -> Iterator[None]:
    """Inside the context, everything that writes to stdout writes to stderr: Python's print, libraries and subprocesses."""
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
    """Inside the context, steps run under bf16 autocast if `asked` (--autocast) says so. A line on stderr where it is the
    default."""
    from ..dryrun.autocast import autocast
    from ..dryrun.sandbox import modules_of

    with autocast(modules_of((target.model, target.args, target.kwargs)), asked) as note:
        yield
        if note:
            click.echo(f"note: {note} (--no-autocast takes the step without)", err=True)


def traced(target: Target, function: Callable[[], Any]) -> Any:
    """Run `function`, which traces the user's model. If the model raises, print the user's traceback and raise Failed (exit
    status 1)."""
    debug = click.get_current_context().find_root().params.get("traceback")
    if not debug:  # torch logs the traceback of an operator that refuses its inputs
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        return function()
    except KeyboardInterrupt:
        raise
    except Fp8CompileError as error:
        if debug or error.__cause__ is None:
            raise
        details = user_traceback(error.__cause__)
        if details:
            click.echo(details, err=True)
        raise Failed(str(error)) from None
    except Exception as error:
        if debug:
            raise
        details = user_traceback(error)
        if details:
            click.echo(details, err=True)
        message = f"{type(target.model).__name__} of {target.name} could not be traced: {one_line(error)}"
        raise Failed(message + ("" if details else " (fp8compile --traceback ... shows where)")) from None


# --- output ---------------------------------------------------------------------------------------


def _finish(result: Any, text: str, as_json: bool, html: str | None) -> None:
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
    unused = idle(policy.labels[: policy.own], report, target)
    if unused:
        raise StrictError(f"strict: {unused}")
    if not any(record.decision == "fp8" for record in report.matmuls):
        raise StrictError(f"strict: no matmul of {target} becomes FP8: {report.summary()}")
