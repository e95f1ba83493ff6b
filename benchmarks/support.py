"""Which GPU runs which recipe with which torch: `python -m benchmarks.support` writes docs/support.md.

A cell is what is known of a GPU and a recipe. Nobody writes it by hand:

    ran         a result of `benchmarks.train` in benchmarks/results (of a GPU that is described) has steps
                with this recipe on this GPU, in which the profiler saw FP8 matmuls
    compiled    a test compiles its kernels to machine code for this architecture
    emulated    the GPU has no such matmul (`config.recipe.BUILT_IN`): bf16 matmuls of the FP8 values
    refused     the GPU has no FP8 matmuls (`devices.architectures`)
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8compile.config.recipe import BUILT_IN, RECIPES
from fp8compile.devices import catalog
from fp8compile.devices.gpu import Gpu

from . import results
from .arms import ARMS
from .pool import ROOT
from .show import table

PAGE = ROOT / "docs" / "support.md"
RAN, COMPILED, EMULATED, REFUSED, UNKNOWN = "*ran*", "compiled", "emulated", "refused", "not compiled yet"
Ran = Mapping[tuple[str, str], set[str]]  # versions of torch, by the GPU's name and the recipe
TEMPLATE = Path(__file__).with_name("support.template.md")  # its fields are those of `page`


# -- what was compiled --


def targets(test: Callable[..., Any]) -> set[str]:
    """The values of a test's parameter `target`."""
    for mark in test.pytestmark:  # type: ignore[attr-defined]
        names = mark.args[0] if mark.name == "parametrize" else ()
        names = names.split(",") if isinstance(names, str) else names
        if "target" in names:
            cases = [getattr(case, "values", case) for case in mark.args[1]]
            return {case if isinstance(case, str) else case[names.index("target")] for case in cases}
    raise ValueError(f"{test.__name__} has no parameter 'target'")


def compiled() -> dict[str, dict[str, set[str]]]:
    """Recipe -> tests that compile its kernels -> for which architectures."""
    from tests.codegen import test_block_gemm, test_machine_code, test_small_kernels

    def found(*tests: Callable[..., Any]) -> dict[str, set[str]]:
        return {f"{test.__module__.rpartition('.')[2]}.py::{test.__name__}": targets(test) for test in tests}

    small = found(test_small_kernels.test_they_compile_to_machine_code)
    plain = found(test_machine_code.test_every_kernel_compiles_to_machine_code) | small
    finer = found(test_machine_code.test_kernels_of_the_finer_recipes_compile_to_machine_code)
    # whose only target is the other one
    spills = test_machine_code.test_kernels_of_the_finer_recipes_do_not_spill.__name__
    finer = {f"{test}`, `{spills}": {*names, "sm_90"} for test, names in finer.items()} | small
    made = dict.fromkeys(test_machine_code.RECIPES, plain)
    made |= {name.split()[0]: finer for name in test_machine_code.FINER["ffn"]}
    made["blockwise"] = {**finer, **found(test_block_gemm.test_machine_code)}
    made["rowwise_with_gw_hp"] = {**made["rowwise"], **made["tensorwise"]}  # it has the kernels of both
    missing = set(RECIPES) - made.keys()
    assert not missing, f"benchmarks/support.py: say which tests compile the kernels of {missing}"
    return made


def versions() -> list[str]:
    """The versions of torch with which CI runs all tests."""
    found = re.findall(r"^ +torch: \[(.*)\]$", (ROOT / ".github" / "workflows" / "ci.yml").read_text(), re.M)
    return re.findall(r"[\d.]+", max(found, key=len))


# -- what ran --


def records(folder: Path) -> Iterator[Any]:
    """What is in the JSON files of a folder, but for lines that were cut off."""
    for file in sorted(folder.rglob("*.json*")):
        for part in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            try:
                yield json.loads(part)
            except ValueError:
                continue


def ran(folder: Path) -> Ran:
    """Where the FP8 matmuls of which recipes ran."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for record in records(folder):
        if not (isinstance(record, dict) and record.get("rows") and record.get("static") is False):
            continue
        device, torch = record["device"], record["versions"]
        known = next((each for each in catalog.shipped().values() if each.matches(device["name"])), None)
        if known is None:
            continue
        for row in record["rows"]:
            how = ARMS[row["arm"]].how if row["arm"] in ARMS else None
            recipe = ((how or {}).get("options") or {}).get("recipe")
            if recipe is None or row.get("error") or not (row.get("fp8") or {}).get("gemm_kernels"):
                continue
            found[known.key, recipe].add(torch["torch"].partition("+")[0])
    return found


# -- the page --


def target_of(gpu: Gpu, known: set[str]) -> str:
    """The architecture that kernels were compiled for: the GPU's own, or another one of its family."""
    if gpu.target in known:
        return gpu.target
    for name in sorted(known):
        if name.startswith("sm_") and not gpu.gfx:
            if Gpu(major=int(name[3:-1]), minor=int(name[-1])).architecture is gpu.architecture:
                return name
    return gpu.target


def cell(gpu: Gpu, recipe: str, tests: Mapping[str, set[str]], seen: set[str], checked: list[str]) -> str:
    """The text of a cell. `seen`: the versions of torch with which it ran."""
    everywhere = set.intersection(*tests.values())
    state = COMPILED if target_of(gpu, everywhere) in everywhere else UNKNOWN
    state = state if BUILT_IN[recipe].native(gpu) else EMULATED
    state = state if gpu.architecture.fp8 else REFUSED
    rest = [version for version in checked if version not in seen]
    if not seen:
        return state
    return f"{RAN} ({', '.join(sorted(seen))})" + (f"; {state} ({', '.join(rest)})" if rest else "")


def quoted(names: Iterable[str], between: str = ", ") -> str:
    return between.join(f"`{name}`" for name in names)


def page(folder: Path = results.RESULTS) -> str:
    tests, checked, seen = compiled(), versions(), ran(folder)
    known = set.union(*(names for by_test in tests.values() for names in by_test.values()))
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    others: dict[str, None] = {}
    for device in catalog.shipped().values():
        gpu, cells = device.gpu, []
        for recipe in RECIPES:
            cells.append(cell(gpu, recipe, tests[recipe], seen.get((device.key, recipe), set()), checked))
        groups[(gpu.target, *cells)].append(device.key)
        if gpu.architecture.fp8 and (other := target_of(gpu, known)) != gpu.target:
            others[f" For {gpu.target}, kernels were compiled as for {other}."] = None
    rows = [[quoted(titles), *cells] for cells, titles in groups.items()]
    alike: dict[str, list[str]] = defaultdict(list)
    for recipe, by in tests.items():
        everywhere = ", ".join(sorted(set.intersection(*by.values())))
        alike[f"{quoted(by, '<br>')} | {everywhere}"].append(recipe)
    lines = [f"| {quoted(recipes)} | {rest} |\n" for rest, recipes in alike.items()]
    summary = "Nothing has run on a GPU yet."
    if seen:
        summary = f"Steps have run on {quoted(sorted({key for key, _ in seen}))}, and on no other GPU."
    return TEMPLATE.read_text().format(
        versions=f"{', '.join(checked[:-1])} and {checked[-1]}",
        table=table(rows, ["GPU", "architecture", *map("`{}`".format, RECIPES)], markdown=True) + "\n",
        tests="".join(lines),
        others="".join(others),
        summary=summary,
    )


if __name__ == "__main__":
    PAGE.write_text(page())
