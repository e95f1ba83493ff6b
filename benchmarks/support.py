"""Which GPU runs which recipe with which torch: `python -m benchmarks.support` writes docs/support.md.

A cell is what is known of a GPU and a recipe. Nobody writes it by hand:

    ran         a result of `benchmarks.train` in benchmarks/results (of a GPU that is described) has steps
                with this recipe on this GPU, in which the profiler saw FP8 matmuls
    compiled    a test compiles its kernels to machine code for this architecture
    emulated    the GPU has no such matmul (`config.recipe.BUILT_IN`): bf16 matmuls of the FP8 values
    refused     the GPU has no FP8 matmuls (`devices.architectures`)
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8compile.config.recipe import BUILT_IN, RECIPES
from fp8compile.devices import catalog
from fp8compile.devices.gpu import Gpu

from . import results
from .arms import ARMS
from .machine import ROOT
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
    family = {
        name: Gpu(major=int(name[3:-1]), minor=int(name[-1]))
        for name in sorted(known)
        if name.startswith("sm_")
    }
    alike = [name for name, one in family.items() if one.architecture is gpu.architecture and not gpu.gfx]
    return alike[0] if alike else gpu.target


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


def page(folder: Path = results.RESULTS) -> str:
    tests, checked = compiled(), versions()
    seen = ran(folder)
    known = set.union(*(names for by_test in tests.values() for names in by_test.values()))
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for device in catalog.shipped().values():
        cells = [
            cell(device.gpu, recipe, tests[recipe], seen.get((device.key, recipe), set()), checked)
            for recipe in RECIPES
        ]
        groups[(device.gpu.target, *cells)].append(f"`{device.key}`")
    rows = [[", ".join(titles), *cells] for cells, titles in groups.items()]
    gpus = [device.gpu for device in catalog.shipped().values()]
    same = {gpu.target: target_of(gpu, known) for gpu in gpus if gpu.architecture.fp8}
    apart = [
        f" For {target}, kernels were compiled as for {other}."
        for target, other in same.items()
        if target != other
    ]
    alike: dict[str, list[str]] = defaultdict(list)
    for recipe, by in tests.items():
        alike[
            f"{'<br>'.join(f'`{test}`' for test in by)} | {', '.join(sorted(set.intersection(*by.values())))}"
        ].append(recipe)
    lines = [f"| {', '.join(f'`{recipe}`' for recipe in names)} | {rest} |" for rest, names in alike.items()]
    devices = sorted({key for key, _ in seen})
    ran_on = ", ".join(f"`{name}`" for name in devices)
    summary = (
        f"Steps have run on {ran_on}, and on no other GPU." if devices else "Nothing has run on a GPU yet."
    )
    parts = {
        "versions": f"{', '.join(checked[:-1])} and {checked[-1]}",
        "others": "".join(apart),
        "summary": summary,
    }
    made = table(rows, ["GPU", "architecture", *(f"`{recipe}`" for recipe in RECIPES)], markdown=True) + "\n"
    return TEMPLATE.read_text().format(table=made, tests="\n".join(lines) + "\n", **parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.support", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.parse_args(argv)
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
