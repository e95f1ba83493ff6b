"""The facts that a rule can test, whether it matches, and messages about rules that never match.

A `Site` is one gemm of a graph. Its sizes are those of the forward matmul, for dgrad and wgrad, too: so a
rule decides alike about fprop, dgrad and wgrad of a weight, unless it names one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import near
from . import condition, patterns

if TYPE_CHECKING:
    from ..recipe import Recipe
    from .policy_tables import Policy, Rule

Position = tuple[int, int]  # (position, number of them)
SPAN = re.compile(r"(first|last) ([1-9][0-9]{0,4})")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a component of a name that is a number


@dataclass(frozen=True)
class Site:
    """One gemm. m, n, k: of the forward matmul out[m, n] = a[m, k] @ b[k, n]; hints for symbolic sizes."""

    module: str  # "layers.0.mlp.up_proj"
    parameter: str  # "layers.0.mlp.up_proj.weight"
    classes: tuple[str, ...]  # of the modules around it, innermost first: ("Linear", "LlamaMLP", ...)
    op: str  # one of `operators.MATMULS`
    gemm: str  # "fprop", "dgrad", "wgrad"
    m: int
    n: int
    k: int
    block: Position | None  # (position, number) in the outermost repeated container; None outside
    layer: Position | None  # (position, number) among the multiplied weights, in the order of forward
    kind: str  # "", or "output head: by its name": the kind, and how it was recognised


@dataclass(frozen=True)
class Choice:
    """What a policy says of a gemm. `rule`, `label`: the deciding rule's index and name, or None and ""."""

    fp8: str  # "on", "off", "auto"
    recipe: Recipe
    rule: int | None
    label: str


def _within(spans: Iterable[str], position: Position | None) -> bool:
    """Whether (position, number) is in one of `spans` ("first 2", "last 1")."""
    if position is None:
        return False
    i, number = position
    for span in spans:
        side, count = span.split()
        if i < int(count) if side == "first" else i >= number - int(count):
            return True
    return False


# condition of a rule -> whether it holds; called only for conditions that the rule gives
CONDITIONS: dict[str, Callable[[Any, Site], bool]] = {
    "module": lambda rule, site: patterns.fits(rule.module, site.module),
    "parameter": lambda rule, site: patterns.fits(rule.parameter, site.parameter),
    "module_class": lambda rule, site: any(patterns.fits(rule.module_class, name) for name in site.classes),
    "op": lambda rule, site: site.op in rule.op,
    "kind": lambda rule, site: site.kind.partition(":")[0] in rule.kind,
    "where": lambda rule, site: condition.holds(rule.where, site.m, site.n, site.k),
    "blocks": lambda rule, site: _within(rule.blocks, site.block),
    "layers": lambda rule, site: _within(rule.layers, site.layer),
    "gemm": lambda rule, site: site.gemm in rule.gemm,
}
PLACES = {"module", "parameter", "module_class", "blocks", "layers"}  # conditions about a place in the model


def treatment(policy: Policy, prefix: str, sites: Sequence[Site]) -> str:
    """What the rules that go by place make of a part of a model: the same text for parts that they treat
    alike, "" if there are no such rules. `sites`: one for each name in it, which begins with `prefix`."""
    told = []
    for i, rule in enumerate(policy.rules):
        for key in PLACES & rule.conditions.keys():
            fit = [f"{site.module}.".removeprefix(prefix) for site in sites if CONDITIONS[key](rule, site)]
            told.append(f"{i + 1} {key}: {'all' if len(fit) == len(sites) else ' '.join(fit)}")
    return "; ".join(sorted(told))


def unmatched(
    policy: Policy,
    sites: Sequence[Site],
    modules: Mapping[str, str],
    parameters: Collection[str],
    whole: bool,
) -> list[str]:
    """A message for each of the user's own rules that decides about none of `sites`, the gemms of one graph,
    in any of the policy's sets.

    `modules`: the names of the model's modules, with their classes; `parameters`: the names of its
    parameters. With `whole` the graph has the whole model. Otherwise other graphs have the rest, and a rule
    gets a message only if one of its patterns fits no name of the model.
    """
    own = len(policy.rules) if policy.own is None else policy.own
    before = len(policy.timed) - len(policy.rules)
    decided = [
        (site, next((i - before for i in active if policy.timed[i].matches(site)), len(policy.rules)))
        for active in policy.sets
        for site in sites
    ]
    deciding = {i for _, i in decided}
    messages = []
    for i, rule in enumerate(policy.rules[:own]):
        if i in deciding or not rule.conditions:  # one without conditions is for whatever is left
            continue
        taken = sorted({other for site, other in decided if 0 <= other < i and rule.matches(site)})
        if taken:
            why = _taken(taken) if whole else None
        else:
            why = nameless(rule, modules, parameters, sites)
            if why is None and whole and sites:
                why = _failing(rule, sites, modules)
        if why is not None:
            called = f"rule {i + 1}" + (f" ({rule.name!r})" if rule.name else "")
            messages.append(f"{called} of policy {policy.source} matches no matmul: {why}")
    return messages


def _taken(rules: Sequence[int]) -> str:
    numbers = ", ".join(str(i + 1) for i in rules)
    which = f"rule {numbers} decides" if len(rules) == 1 else f"rules {numbers} decide"
    return f"it matches only what {which} about before it"


def nameless(
    rule: Rule, modules: Mapping[str, str], parameters: Collection[str], sites: Sequence[Site] = ()
) -> str | None:
    """Says which pattern fits no name of the model; None if each fits one."""
    classes = {*modules.values(), *(name for site in sites for name in site.classes)}
    known = {
        "module": ("module", modules),
        "parameter": ("parameter", parameters),
        "module_class": ("class", classes),
    }
    for key, (noun, names) in known.items():
        given = getattr(rule, key)
        if given is not None and names and not any(patterns.fits(given, name) for name in names):
            close = [name for pattern in given for name in _alike(pattern, names)]
            hint = f" Near: {', '.join(map(repr, dict.fromkeys(close)))}." if close else ""
            return f"no {noun} of the model has a name like {_list(given)}.{hint}"
    return None


def _failing(rule: Rule, sites: Sequence[Site], modules: Collection[str]) -> str:
    """Names the first condition that holds for none of the gemms that the conditions before it leave."""
    left = list(sites)
    for key, holds in CONDITIONS.items():
        given = getattr(rule, key)
        if given is None:
            continue
        kept = [site for site in left if holds(rule, site)]
        if not kept:
            none = f"{key} = {_list(given)} holds for none of the"
            if len(left) < len(sites):
                return f"{none} {len(left)} gemms that its other conditions leave"
            inside = sorted(
                name for name in modules if key == "module" and name and patterns.fits(given, name)
            )
            within = [name for name in inside if any(site.module.startswith(f"{name}.") for site in sites)]
            hint = ""
            if within:
                hint = f". {within[0]!r} has its matmuls in modules inside of it: write {within[0] + '.*'!r}"
            return f"{none} {len(sites)} gemms{hint}"
        left = kept
    return "nothing matches it"


def _alike(pattern: str, names: Collection[str]) -> list[str]:
    """Globs that match some of `names` and look like `pattern`: numbers become "*", a leading "*." stays."""
    if pattern.startswith(patterns.PREFIX):
        return []
    globs = dict.fromkeys(_NUMBER.sub("*", name) for name in sorted(names) if name)
    if pattern.startswith("*"):
        depth = pattern.lstrip("*.").count(".") + 1
        start = "*." if pattern.lstrip("*").startswith(".") else "*"
        globs = dict.fromkeys(start + ".".join(name.split(".")[-depth:]) for name in globs)
    close = near(_NUMBER.sub("*", pattern), globs)
    return [glob for glob in close if any(patterns.fits((glob,), name) for name in names)]


def _list(values: Any) -> str:
    return repr(values) if isinstance(values, str) else " or ".join(map(repr, values))
