"""The command line: `fp8compile explain | estimate | compare | bench | tune | policy | plot | calibrate |
devices | env`, or `python -m fp8compile`.

docs/cli.md says what goes to stdout and to stderr, and which exit status a command has.

torch takes seconds to import. So each function imports what it needs beyond click, and help, `devices` and
`policy` answer at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence

try:
    import click
except ModuleNotFoundError:
    sys.exit("fp8compile: error: the command line needs click, which is not installed: pip install click")

from .. import __version__
from ..errors import Fp8CompileError, StrictError, TuneError, one_line
from .env import env
from .messages import complain
from .model_commands import bench, compare, estimate, explain, tune
from .policy import policy
from .target import TargetError
from .tools import calibrate, devices, plot


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    color = False if os.environ.get("NO_COLOR") else None  # None: colours only in a terminal
    debug = "--traceback" in arguments
    warnings.filterwarnings("ignore", module=r"triton\.")  # they advise authors of kernels
    try:
        status = cli.main(arguments, prog_name="fp8compile", standalone_mode=False, color=color)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "fp8compile"
        return complain(error.format_message(), error.exit_code, where, color)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:
        # `fp8compile ... | head`: nobody reads the rest; send what is left in the buffer to devnull
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except TargetError as error:
        if error.details:
            click.echo(error.details, err=True)
        return complain(str(error), 2, color=color)
    except Fp8CompileError as error:
        return complain(str(error), 1 if isinstance(error, (StrictError, TuneError)) else 2, color=color)
    except Exception as error:
        if debug:
            raise
        return complain(f"{one_line(error)} (fp8compile --traceback ... shows where)", 1, color=color)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="fp8compile", message="%(prog)s %(version)s")
@click.option("--traceback", is_flag=True, help="Show fp8compile's own traceback of an error.")
def cli(traceback: bool) -> None:
    """What torch.compile(model, backend="fp8") does with a model's matmuls, and what that is worth."""


for _command in (explain, estimate, compare, bench, tune, policy, plot, devices, calibrate, env):
    cli.add_command(_command)
