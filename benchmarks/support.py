"""Which GPU runs which recipe with which torch: `python -m benchmarks.support` writes docs/support.md.

A cell is what is known of a GPU and a recipe. Nobody writes it by hand:

    ran         a result in benchmarks/results (a file of `benchmarks.train`, or an archive of
                `benchmarks/device.sh` as it is) has steps with this recipe on this GPU, in which the profiler
                saw FP8 matmuls
    compiled    a test compiles its kernels to machine code for this architecture
    emulated    the GPU has no such matmul (`config.recipe.BUILT_IN`): bf16 matmuls of the FP8 values
    refused     the GPU has no FP8 matmuls (`devices.architectures`)
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tarfile
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
TEXT = """# What runs where

What is known of each GPU and [recipe](recipes.md). \
A cell holds for torch {versions}, unless it names versions:
CI runs the tests below with each of them, once a week. \
`python -m benchmarks.support` writes this page, from the [descriptions
of GPUs](cli.md#plot-devices-calibrate), the tests that make machine code, and results of devices.

| a cell says | which means |
|---|---|
| *ran* | steps with this recipe ran on this GPU, and the profiler saw FP8 matmuls: \
a file in `benchmarks/results/` shows it |
| compiled | the recipe's kernels were compiled to machine code for this architecture. \
No step with it has run there |
| emulated | the GPU has no such matmul. \
FP8 values are multiplied in bf16, with the numerics of FP8 and no gain |
| refused | the GPU has no FP8 matmuls. \
The model is compiled in high precision, with a warning; with `strict`, an error |

{table}
**{summary}**

Names are those that `--device` takes.{others} What compiles may still be
refused by a library, or be slow. Generated kernels also run in Triton's interpreter, \
and Inductor's plans for GPUs are executed
on a CPU under the rules of ATen ([how](../CONTRIBUTING.md#tests)).

## CUDA graphs

`mode="reduce-overhead"`, or with other options `{{"triton.cudagraphs": True}}`. \
Two GPU tests use them; no step with them
was timed. What a graph reads (scaling state, copies of weights) keeps its address. \
[Cold calls](state.md#cold-calls), the first
ones, run without a graph, and [warm starts](options.md#warm-starts) are off. \
FSDP was not tried.

| with CUDA graphs | |
|---|---|
| `cache_weights`, `AdamW(.., fp8_weights=True)` | new copies are written over the old ones. \
A forward, a step, then the backward of that forward: not possible |
| `triton.cudagraph_trees=False` | a warning: Inductor records no graph that keeps a scaling state. \
Take `"recipe": "tensorwise"` |
| your own capture (`torch.cuda.graph`, `make_graphed_callables`) | an error while scales are not known: \
train some steps before. `cache_weights` has no effect, with a warning |
| gradient accumulation | as in torch: a replay overwrites what the one before returned, gradients too |

## What compiled rests on

| recipe | tests | for |
|---|---|---|
{tests}
The files are in `tests/codegen/`. \
Kernels are casts with their producers, the scaling state, and the matmul of 128-blocks.
Other FP8 matmuls are calls of cuBLASLt, CUTLASS or hipBLASLt, which others have compiled.

**How a cell becomes *ran***: run [device.sh](../benchmarks/README.md#on-a-rented-gpu) on the GPU, \
put the archive into
`benchmarks/results/`, and run the script. \
Its parts `layers` and `gpt2` train with `delayed` and `tensorwise`; `-- --arms
bf16,fp8-rowwise` adds others.
"""


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
    """What is in the JSON files of a folder, and in archives there, but for lines that were cut off."""
    texts = [(file.suffix, file.read_text()) for file in sorted(folder.rglob("*.json*"))]
    for archive in sorted(folder.rglob("*.tar.gz")):
        with tarfile.open(archive) as tar:
            inside = [member for member in tar.getmembers() if member.name.endswith(".jsonl")]
            texts += [
                (".jsonl", tar.extractfile(member).read().decode(errors="replace")) for member in inside
            ]
    for suffix, text in texts:
        for part in text.splitlines() if suffix == ".jsonl" else [text]:
            try:
                yield json.loads(part)
            except ValueError:
                continue


def ran(folder: Path) -> tuple[Ran, dict[str, Gpu]]:
    """Where the FP8 matmuls of which recipes ran; and GPUs among them that are not described."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    others: dict[str, Gpu] = {}
    for record in records(folder):
        if not (isinstance(record, dict) and record.get("rows") and record.get("static") is False):
            continue
        device, torch = record["device"], record["versions"]
        known = next((each for each in catalog.shipped().values() if each.matches(device["name"])), None)
        for row in record["rows"]:
            how = ARMS[row["arm"]].how if row["arm"] in ARMS else None
            recipe = ((how or {}).get("options") or {}).get("recipe")
            if recipe is None or row.get("error") or not (row.get("fp8") or {}).get("gemm_kernels"):
                continue
            if known is None and not torch["hip"]:
                major, minor = map(int, device["capability"].split("."))
                others[device["name"]] = Gpu(device["name"], major, minor)
            found[known.key if known else device["name"], recipe].add(torch["torch"].partition("+")[0])
    return found, others


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
    seen, others = ran(folder)
    known = set.union(*(names for by_test in tests.values() for names in by_test.values()))
    gpus = {f"`{device.key}`": (device.key, device.gpu) for device in catalog.shipped().values()}
    gpus |= {name: (name, gpu) for name, gpu in others.items()}
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for title, (key, gpu) in gpus.items():
        cells = [
            cell(gpu, recipe, tests[recipe], seen.get((key, recipe), set()), checked) for recipe in RECIPES
        ]
        groups[(gpu.target, *cells)].append(title)
    rows = [[", ".join(titles), *cells] for cells, titles in groups.items()]
    same = {gpu.target: target_of(gpu, known) for _, gpu in gpus.values() if gpu.architecture.fp8}
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
    ran_on = ", ".join(f"`{device}`" for device in devices)
    summary = (
        f"Steps have run on {ran_on}, and on no other GPU." if devices else "Nothing has run on a GPU yet."
    )
    parts = {
        "versions": f"{', '.join(checked[:-1])} and {checked[-1]}",
        "others": "".join(apart),
        "summary": summary,
    }
    made = table(rows, ["GPU", "architecture", *(f"`{recipe}`" for recipe in RECIPES)], markdown=True) + "\n"
    return TEXT.format(table=made, tests="\n".join(lines) + "\n", **parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.support", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=results.RESULTS, help="default: benchmarks/results"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="what to write (default: docs/support.md)")
    args = parser.parse_args(argv)
    args.page.write_text(page(args.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
