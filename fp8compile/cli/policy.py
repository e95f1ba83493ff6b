"""policy check, policy show and policy schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import Fp8CompileError, did_you_mean, near
from .messages import Failed, usage
from .model_commands import explained, idle
from .model_options import check_device

if TYPE_CHECKING:
    from ..config.policy import Policy
    from ..ir.records import MatmulRecord


@click.group()
def policy() -> None:
    """Policy files: which matmuls run in FP8, and with which recipe."""


@policy.command()
@click.argument("file")
@click.option("--model", "target", metavar="TARGET", help="Also count what each rule decides in this model.")
@click.option(
    "--input", "inputs", multiple=True, metavar="SHAPE[:DTYPE]", help="Input of the model, as in explain."
)
@click.option("--device", metavar="NAME", help="The described device to decide for, as in explain.")
def check(file: str, target: str | None, inputs: tuple[str, ...], device: str | None) -> None:
    """Validate a policy; with --model, report what each rule matches. Exit status 1 if something is wrong.
    Of rules with windows, the steps at which they begin and end are printed.

    FILE is a TOML file, or the name of a shipped policy. With --model, a matmul counts for the rule that
    decides about it, the first that matches; a rule without any is an error.
    """
    from ..config.policy import BUILTIN, load

    if file not in BUILTIN and not Path(file).exists():
        raise usage(f"{file} does not exist, and is none of {', '.join(sorted(BUILTIN))}")
    try:
        found = load(file)
        _ = found.timeline
    except Fp8CompileError as error:
        raise Failed(str(error)) from None
    own = len(found.rules) if found.own is None or file in BUILTIN else found.own
    extended = f" and {len(found.rules) - own} of what it extends" if len(found.rules) > own else ""
    click.echo(f"{file}: valid, {own} rule{'' if own == 1 else 's'}{extended}")
    if found.varies:
        click.echo(_timeline(found))
    if target is None:
        return
    check_device(device)
    report = explained(target, inputs, {"policy": file}, device)
    click.echo(_rules_table(found.labels, report.matmuls))
    # rules of a shipped policy may be unused: it is for many models
    if unused := idle(found, report, target):
        raise Failed(f"{file}: {unused}")


@policy.command()
@click.argument("name", required=False)
def show(name: str | None) -> None:
    """Print a shipped policy, as a start for one's own. Without NAME, list them."""
    from ..config.policy.policy_files import BUILTIN, shipped

    if name is None:
        from ..reporting.columns import aligned

        rows = [(known, shipped(known).splitlines()[0].removeprefix("# ")) for known in sorted(BUILTIN)]
        return click.echo(aligned(("policy", "what for"), rows))
    if name not in BUILTIN:
        names = ", ".join(sorted(BUILTIN))
        raise usage(f"there is no shipped policy {name!r}: {names}.{did_you_mean(near(name, BUILTIN))}")
    click.echo(shipped(name), nl=False)


@policy.command()
def schema() -> None:
    """Print the JSON Schema of policy files, for editors."""
    from ..config.policy import schema as json_schema

    click.echo(json.dumps(json_schema(), indent=2))


def _timeline(policy: Policy) -> str:
    """When rules with windows are active, and how often graphs are compiled for them."""
    from ..config.policy.windows import BY_HAND
    from ..reporting.columns import aligned

    rows = []
    for step, active in policy.timeline:
        texts = [(policy.names[i], policy.window_text(i)) for i in active]
        rows.append((step, ", ".join(f"{name} ({text})" for name, text in texts if text) or "none"))
    by_hand = [f"{rule.name!r}" for rule in policy.timed if rule.during == (BY_HAND,)]
    switched = [f"switched by hand: {', '.join(by_hand)}"] if by_hand else []
    sets = len(policy.sets)
    many = f"{sets} sets of rules: each graph of the model is compiled {sets} times"
    return "\n".join([aligned(("from step", "active rules with windows"), rows), *switched, many])


def _rules_table(labels: Sequence[str], matmuls: Sequence[MatmulRecord]) -> str:
    from ..reporting.columns import aligned

    total = sum(record.flops for record in matmuls) or 1
    rows = []
    for label in [*dict.fromkeys(labels), ""]:
        mine = [record for record in matmuls if record.rule == label]
        in_fp8 = sum(record.decision == "fp8" for record in mine)
        share = 100 * sum(record.flops for record in mine) / total
        modules = len({record.fqn for record in mine})
        rows.append((label or "(no rule)", len(mine), modules, in_fp8, f"{share:.1f}%"))
    return aligned(("rule", "matmuls", "modules", "in FP8", "FLOPs"), rows, "<>>>>")
