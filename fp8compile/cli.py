"""The command line: `fp8compile explain | estimate | policy | plot | calibrate | devices`, or `python -m fp8compile`.

stdout carries the result and nothing else: a table, or JSON. Everything that is said on the way goes to stderr, also what the
user's own code prints while it is loaded. Errors are one line on stderr, after the user's traceback if it was the user's code
that raised; `fp8compile --traceback ...` shows ours as well. Exit status: 0; 1 where the answer is no (a policy that is not
valid, nothing in FP8 with --strict, a model that cannot be traced); 2 for wrong usage.

torch takes seconds to import. So everything but click is imported where it is used, and help, `devices` and `policy` answer at
once.
"""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import __version__
from .errors import Fp8CompileError, StrictError
from .target import Target, TargetError, load, one_line, user_traceback

if TYPE_CHECKING:
    from .reports import MatmulRecord, Report

_HIDDEN_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    color = False if os.environ.get("NO_COLOR") else None  # None: if it is a terminal
    debug = "--traceback" in arguments
    warnings.filterwarnings("ignore", module=r"triton\.")  # advice for who writes kernels
    try:
        status = cli.main(arguments, prog_name="fp8compile", standalone_mode=False, color=color)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        return _failed(error.format_message(), error.exit_code, color, context.command_path if context else "fp8compile")
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:  # `fp8compile ... | head`: nobody reads the rest, also not what is left in the buffer
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except TargetError as error:
        if error.details:
            click.echo(error.details, err=True)
        return _failed(str(error), 2, color)
    except StrictError as error:
        return _failed(str(error), 1, color)
    except Fp8CompileError as error:
        return _failed(str(error), 2, color)
    except Exception as error:
        if debug:
            raise
        return _failed(f"{one_line(error)} (fp8compile --traceback ... shows where)", 1, color)


class _Failed(click.ClickException):
    """Something that was asked for and cannot be done; exit status 1."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.ctx = click.get_current_context()


def _failed(message: str, status: int, color: bool | None, where: str = "fp8compile") -> int:
    click.echo(f"{where}: {click.style('error:', fg='red')} {message}", err=True, color=color)
    return status


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="fp8compile", message="%(prog)s %(version)s")
@click.option("--traceback", is_flag=True, help="Show fp8compile's own traceback of an error.")
def cli(traceback: bool) -> None:
    """What torch.compile(model, backend="fp8") does with a model's matmuls, and what that is worth."""


# --- explain and estimate -------------------------------------------------------------------------


def _model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments that explain and estimate share."""
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
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table."),
        click.option("--html", metavar="FILE", help="Write an HTML page, too."),
        click.option("--strict", is_flag=True, help="Fail where nothing can run in FP8, or a rule matches nothing."),
    ]

    for decorator in reversed(decorators):
        function = decorator(function)
    return function


_TARGET_HELP = """

    TARGET is path.py:function or package.module:function. The function takes no arguments and returns a torch.nn.Module,
    (model, args), (model, args, kwargs) or dict(model=, args=, kwargs=).
    """


@cli.command(help="Every matmul of a model: FP8, or why not. Nothing is trained, and nothing is run." + _TARGET_HELP)
@_model_options
@click.option("--full", is_flag=True, help="A line for each layer, also of repeated blocks.")
def explain(target: str, device: str | None, as_json: bool, html: str | None, full: bool, **given: Any) -> None:
    options = _prepared(device, html, given)
    with _talk_on_stderr():
        loaded = load(target, given["inputs"])
        from .explain import explain as run

        report = _traced(loaded, lambda: run(loaded.model, *loaded.args, options=options, device=device, **loaded.kwargs))
    _finish(report, report.table(collapse=not full), as_json, html)
    if given["strict"]:
        _insist(report, options, target)


@cli.command(help="The estimated time of a training step in bf16 and in FP8, on a GPU that need not be there." + _TARGET_HELP)
@_model_options
@click.option("--extrapolate", is_flag=True, help="Compile two of the repeated blocks, carry on from there.")
def estimate(target: str, device: str | None, as_json: bool, html: str | None, extrapolate: bool, **given: Any) -> None:
    if "torch" not in sys.modules:
        if any(os.path.exists(file) for file in _GPU_FILES) and os.environ.get(_HIDDEN_GPUS[0]) != "":
            click.echo("note: estimate describes a GPU and uses none; this process does not see this machine's", err=True)
        os.environ.update(dict.fromkeys(_HIDDEN_GPUS, ""))
    options = _prepared(device, html, given)
    with _talk_on_stderr():
        loaded = load(target, given["inputs"])
        from .estimate import estimate as run

        settings: dict[str, Any] = {"device": device, "options": options, "extrapolate": extrapolate}
        found = _traced(loaded, lambda: run(loaded.model, *loaded.args, **settings, **loaded.kwargs))
    _finish(found, str(found), as_json, html)
    if given["strict"]:
        _insist(found.report, options, target)


def _prepared(device: str | None, html: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The backend's options. What can be refused is refused here, before torch and the model are loaded."""
    options = dict(map(_option, given["options"]))
    if given["policy"] is not None:
        options["policy"] = given["policy"]
    if given["strict"]:
        options["strict"] = True
    if html is not None and not Path(html).parent.is_dir():
        raise _usage(f"--html {html}: there is no folder {Path(html).parent}")
    if html is not None and Path(html).is_dir():
        raise _usage(f"--html {html} is a folder")
    if device is not None:
        from . import devices

        devices.find(device)
    if options:
        from .options import parse

        parse(options)
    return options


def _insist(report: Report, options: Mapping[str, Any], target: str) -> None:
    """StrictError where nothing is in FP8, or a rule of the user's policy decided nothing."""
    from .options import parse

    policy = parse(options).policy
    idle = _idle(policy.labels[: policy.own], report)
    if idle:
        raise StrictError(f"strict: {_nothing(idle, target)}")
    if not any(record.decision == "fp8" for record in report.matmuls):
        raise StrictError(f"strict: no matmul of {target} becomes FP8: {report.summary()}")


def _option(text: str) -> tuple[str, Any]:
    """ "margin=1" -> ("margin", 1): JSON or a Python literal if it is one, else the text itself."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise _usage(f"--option {text!r} is not KEY=VALUE, as in recipe=tensorwise")
    for read in (json.loads, ast.literal_eval):
        try:
            return key.strip(), read(value.strip())
        except (ValueError, SyntaxError):
            continue
    return key.strip(), value.strip()


def _traced(target: Target, function: Callable[[], Any]) -> Any:
    """Run ours on the user's model. What the model raised is the user's, with its traceback; exit status 1."""
    debug = click.get_current_context().find_root().params.get("traceback")
    if not debug:  # torch logs the traceback of an operator that refuses its inputs
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        return function()
    except (Fp8CompileError, KeyboardInterrupt):
        raise
    except Exception as error:
        if debug:
            raise
        details = user_traceback(error)
        if details:
            click.echo(details, err=True)
        message = f"{type(target.model).__name__} of {target.name} could not be traced: {one_line(error)}"
        raise _Failed(message + ("" if details else " (fp8compile --traceback ... shows where)")) from None


def _finish(result: Any, text: str, as_json: bool, html: str | None) -> None:
    if html is not None:
        from .html import page

        try:
            page(result, html)
        except OSError as error:
            raise _usage(f"--html {html}: {error.strerror}") from None
        click.echo(f"wrote {html}", err=True)
    click.echo(json.dumps(result.to_dict(), indent=2) if as_json else text)


@contextlib.contextmanager
def _talk_on_stderr() -> Iterator[None]:
    """Whatever writes to stdout meanwhile writes to stderr, be it Python's print, a library or a subprocess."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


# --- policy ---------------------------------------------------------------------------------------


@cli.group()
def policy() -> None:
    """Policy files: which matmuls run in FP8, and with which recipe."""


@policy.command()
@click.argument("file")
@click.option("--model", "target", metavar="TARGET", help="Also count what each rule decides in this model.")
@click.option("--input", "inputs", multiple=True, metavar="SHAPE[:DTYPE]", help="Input of the model, as in explain.")
@click.option("--device", metavar="NAME", help="Device whose description decides what pays, as in explain.")
def check(file: str, target: str | None, inputs: tuple[str, ...], device: str | None) -> int:
    """Is a policy valid, and does each of its rules decide something? Exit status 1 if not.

    FILE is a TOML file, or the name of a shipped policy. With --model, a matmul counts for the rule that decides about it, the
    first that matches; a rule without any is an error.
    """
    from .policy import BUILTIN
    from .policy import load as load_policy

    if file not in BUILTIN and not Path(file).exists():
        raise _usage(f"{file} does not exist, and is none of {', '.join(sorted(BUILTIN))}")
    try:
        found = load_policy(file)
    except Fp8CompileError as error:
        return _no(str(error))
    own = len(found.rules) if found.own is None or file in BUILTIN else found.own
    extended = len(found.rules) - own
    click.echo(f"{file}: valid, {_count(own, 'rule')}" + (f" and {extended} of what it extends" if extended else ""))
    if target is None:
        return 0
    if device is not None:
        from . import devices

        devices.find(device)
    with _talk_on_stderr():
        loaded = load(target, inputs)
        from .explain import explain as run

        options = {"policy": file}
        report = _traced(loaded, lambda: run(loaded.model, *loaded.args, options=options, device=device, **loaded.kwargs))
    click.echo(_rules_table(found.labels, report.matmuls))
    idle = _idle(found.labels[: found.own], report)  # a shipped policy has none of its own: it is meant for many models
    return _no(f"{file}: {_nothing(idle, target)}") if idle else 0


def _idle(labels: Sequence[str], report: Report) -> list[str]:
    """The rules that decided about no matmul."""
    deciding = {record.rule for record in report.matmuls}
    return [label for label in labels if label not in deciding]


def _nothing(idle: Sequence[str], target: str) -> str:
    names = ", ".join(map(repr, idle))
    return f"{names} {'decides' if len(idle) == 1 else 'decide'} about no matmul of {target}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _rules_table(labels: Sequence[str], matmuls: Sequence[MatmulRecord]) -> str:
    from tabulate import tabulate

    total = sum(record.flops for record in matmuls) or 1
    rows = []
    for label in [*dict.fromkeys(labels), ""]:
        mine = [record for record in matmuls if record.rule == label]
        in_fp8 = sum(record.decision == "fp8" for record in mine)
        share = 100 * sum(record.flops for record in mine) / total
        modules = len({record.fqn for record in mine})
        rows.append((label or "(no rule)", len(mine), modules, in_fp8, f"{share:.1f}%"))
    return tabulate(rows, ("rule", "matmuls", "modules", "in FP8", "FLOPs"), colalign=("left", *["right"] * 4))


def _usage(message: str) -> click.UsageError:
    return click.UsageError(message, click.get_current_context())


def _no(message: str) -> int:
    """Say that the answer is no; the exit status that goes with it."""
    click.echo(f"{click.get_current_context().command_path}: {click.style('error:', fg='red')} {message}", err=True)
    return 1


@policy.command()
@click.argument("name", required=False)
def show(name: str | None) -> None:
    """Print a shipped policy, as a start for one's own. Without NAME: the names."""
    from .policy import BUILTIN

    if name is None:
        click.echo("\n".join(sorted(BUILTIN)))
        return
    if name not in BUILTIN:
        from .errors import did_you_mean
        from .target import near

        names = ", ".join(sorted(BUILTIN))
        message = f"there is no shipped policy {name!r}: {names}.{did_you_mean(near(name, BUILTIN))}"
        raise _usage(message)
    click.echo(Path(__file__).with_name("policies").joinpath(f"{name}.toml").read_text(encoding="utf-8"), nl=False)


@policy.command()
def schema() -> None:
    """Print the JSON Schema of policy files, for editors."""
    from .policy import schema as json_schema

    click.echo(json.dumps(json_schema(), indent=2))


# --- plot -----------------------------------------------------------------------------------------


@cli.command()
@click.argument("file")
@click.option("-o", "--output", metavar="IMAGE", help="Where to write it: .png, .svg, .pdf (default: FILE with .png).")
@click.option("--worst", default=8, show_default=True, metavar="N", type=click.IntRange(1), help="How many layers.")
def plot(file: str, output: str | None, worst: int) -> None:
    """Draw what fp8compile.monitor wrote: scales and overflows over time, worst layers first.

    FILE is a monitor's JSON lines. A layer is worse with more overflows, and with a lower SQNR where those are equal.
    """
    from .plots import plot as draw

    target = output or str(Path(file).with_suffix(".png"))
    shown = draw(file, target, worst)
    for layer in shown:
        sqnr = "" if layer.sqnr == float("inf") else f", SQNR from {layer.sqnr:.1f} dB"
        click.echo(f"{layer.name}: overflows up to {layer.overflows:.3g}%{sqnr}")
    click.echo(f"wrote {target}", err=True)


# --- devices --------------------------------------------------------------------------------------


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def devices(as_json: bool) -> None:
    """The GPUs that are described, with the rates that decisions are made with."""
    import dataclasses

    from tabulate import tabulate

    from .devices import shipped, stored

    known = [*stored().values(), *shipped().values()]
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(device) for device in known], indent=2))
        return
    rows = []
    for device in known:
        rates = device.sustained
        tflops = [f"{rate / 1e12:.0f}" if rate else "-" for rate in (rates.fp8, rates.bf16)]
        ratio = f"{rates.fp8 / rates.bf16:.2f}" if rates.fp8 else "-"
        memory = f"{device.memory / 2**30:.0f}"
        rows.append((device.key, device.name, *tflops, ratio, f"{rates.bandwidth / 1e12:.2f}", memory, device.origin))
    head = ("device", "name", "FP8 TFLOP/s", "bf16 TFLOP/s", "ratio", "TB/s", "GiB", "from")
    click.echo(tabulate(rows, head, colalign=("left", "left", *["right"] * 5, "left"), disable_numparse=True))
    click.echo(
        "Sustained rates of dense matmuls, and of a copy. `fp8compile calibrate` measures a GPU of this machine.", err=True
    )


@cli.command()
@click.option(
    "--device", default="cuda:0", show_default=True, metavar="DEVICE", help="A device of this machine, as torch names it."
)
@click.option("--no-write", is_flag=True, help="Print what was measured, and do not keep it.")
def calibrate(device: str, no_write: bool) -> None:
    """Measure a GPU of this machine, and keep the result for decisions that are made on it.

    It takes about half a minute, and wants the GPU for itself.
    """
    import torch

    from .calibrate import NoDevice
    from .calibrate import calibrate as run

    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise _usage(f"--device {device!r} is not a device as torch names it, such as cuda:0") from None
    try:
        run(chosen, write=not no_write)
    except NoDevice as error:
        raise _Failed(str(error)) from None
