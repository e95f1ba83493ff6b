"""The code of README and docs/ runs as it is written, page by page and in order, and prints what the pages
show.

* The Python blocks of a page share their names. A block with a title is the file of that name.
* A `bash` block runs in the folder of these files. Pages with such a block are slow: each command imports
  torch.
* A `text` block right after one of them is what it prints. Numbers with a point may differ by a fifth; a line
  "..." stands for any lines.
* A `toml` block with a title is a policy; in one without, each line is a condition of a rule.
* A block after the line "<!-- Not run by a test of this page: why -->" is not run.

The older pages have fragments: `given` has the names that they take for granted.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8compile
import fp8compile.distributed
from fp8compile.devices.toml import tomllib
from tests.support import hooks
from tests.support.models import LlamaLayer, ResidualMlp
from tests.support.policies import load

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NOT_RUN = re.compile(r"<!-- Not run by a test of this page: \w+")
COMPLETE = ("index.md", "tutorial.md", "how-to")  # pages whose code needs no names from here
COMPILED = ("README.md", "docs/index.md")  # also run as users run them, through Inductor
# each takes seconds to compile: slow
COSTLY = tuple(f"docs/{name}.md" for name in ("estimates", "export", "compare", "telemetry"))
HOW_TO = "accumulate bf16-first lora nan not-faster resume rl-with-fp8-server save-memory".split()
COSTLY += tuple(f"docs/how-to/{name}.md" for name in HOW_TO)


@dataclass(frozen=True)
class Block:
    """Code of a page; `line` is that of its fence."""

    page: Path
    line: int
    language: str
    title: str | None
    code: str
    shown: str | None
    before: str = ""  # the line in front of the fence

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}, line {self.line}"

    @property
    def runs(self) -> bool:
        return not NOT_RUN.match(self.before)


FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$(?:\n+^\1```text\n(.*?)^\1```$)?", re.M | re.S)


def blocks(page: Path) -> list[Block]:
    text, found = page.read_text(), []
    for fence in FENCE.finditer(text):
        title = re.search(r'title="(.+?)"', fence[3])
        shown = textwrap.dedent(fence[5]) if fence[5] is not None else None
        line = text.count("\n", 0, fence.start()) + 1
        before = text[: fence.start()].rstrip("\n").rpartition("\n")[2].strip()
        code, named = textwrap.dedent(fence[4]), title[1] if title else None
        found.append(Block(page, line, fence[2], named, code, shown, before))
    return found


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def is_slow(page: Path) -> bool:
    return name(page) in (*COSTLY, *COMPILED) or has_commands(page)


def has_commands(page: Path) -> bool:
    return any(block.language == "bash" and block.runs for block in blocks(page))


WITH_PYTHON = [page for page in PAGES if any(block.language in ("python", "bash") for block in blocks(page))]


class Sum(nn.Module):
    """A model that returns its loss, as README's does."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 256)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.up(x) - y).square().mean()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualMlp() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Llama(nn.Module):
    """Three layers of these sizes, with tied embeddings: tokens, targets -> loss."""

    def __init__(self, sizes: tuple[int, int, int, int], length: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(1024, sizes[0]), nn.Linear(sizes[0], 1024, bias=False)
        self.layers = nn.ModuleList(LlamaLayer(*sizes) for _ in range(3))
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def given(page: Path, folder: Path) -> dict[str, Any]:
    """The names that the fragments of a page take for granted."""
    if page.parent.name in COMPLETE or name(page) in ("docs/index.md", "docs/tutorial.md"):
        return {}
    if page.name == "README.md":
        return {"torch": torch, "build": Sum, "tokens": torch.randn(64, 128), "targets": torch.randn(64, 256)}
    if page.name in ("distributed.md", "fp8-communication.md"):
        names = {"fp8compile": fp8compile, "fully_shard": fully_shard, "dcp": dcp}
        return {**names, "model": Blocks(), "path": folder / "saved"}
    if page.name == "estimates.md":
        return {"torch": torch, "fp8compile": fp8compile, "Llama": Llama, "LLAMA_8B": (1024, 8, 8, 2048)}
    model, x = Blocks(), torch.randn(64, 128)
    torch.save(model.state_dict(), "model.pt")

    def train() -> None:
        model(x).backward()

    if page.name == "compare.md":
        names = {"fp8compile": fp8compile, "model": model, "x": x, "train": train}
        names |= {"body": ResidualMlp(), "criterion": nn.functional.mse_loss, "target": x}
        return {**names, "compiled": torch.compile(model, backend="fp8")}
    if page.name == "telemetry.md":
        model.compile(backend="fp8")
        train()
    return {"torch": torch, "nn": nn, "fp8compile": fp8compile, "model": model, "x": x, "train": train}


def run(page: Path, folder: Path) -> str:
    """Run the blocks of a page in a folder. Returns what the Python blocks print."""
    everything = io.StringIO()
    if has_commands(page):
        (folder / "examples").symlink_to(ROOT / "examples")
    for block in blocks(page):
        if block.title is not None:
            (folder / block.title).write_text(block.code)
            if block.language == "toml":
                load(folder / block.title)
        elif block.language == "toml":
            for line in block.code.splitlines():
                assert load({"rules": [tomllib.loads(line)]}).rules[0].conditions, block.where
    names = {"__name__": "page", **given(page, folder)}
    for block in blocks(page):
        if block.title is not None or not block.runs:
            continue
        if block.language == "python":
            printed = io.StringIO()
            code = compile("\n" * block.line + block.code, str(page), "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, names)
            agree(block, printed.getvalue())
            everything.write(printed.getvalue())
        elif block.language == "bash":
            agree(block, shell(block, folder))
    return everything.getvalue()


def shell(block: Block, folder: Path) -> str:
    """What the block prints on stdout. `python`, `fp8compile` and `torchrun` are those of the tests."""
    programs = {"python": [], "fp8compile": ["-m", "fp8compile"], "torchrun": ["-m", "torch.distributed.run"]}
    program, *arguments = block.code.split()
    command = [sys.executable, *programs[program], *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, f"{block.where}: {done.stderr}"
    return done.stdout


def agree(block: Block, printed: str) -> None:
    """The page shows what the block prints."""
    if block.shown is None:
        return
    lines, shown = printed.rstrip().splitlines(), block.shown.rstrip().splitlines()
    if shown[-1] == "...":
        shown = shown[:-1]
        lines = lines[: len(shown)]
    assert len(lines) == len(shown), f"{block.where} prints\n{printed}"
    for ours, theirs in zip(lines, shown, strict=True):
        assert is_like(ours, theirs), f"{block.where} prints\n{ours}\nand not\n{theirs}"


def is_like(printed: str, shown: str) -> bool:
    number = re.compile(r"\d+\.\d+")
    # they are counted in a process, and a page begins with a new one
    printed = re.sub(r"^graph \d+", "graph 0", printed)
    if number.sub("", printed).split() != number.sub("", shown).split():
        return False
    pairs = zip(number.findall(printed), number.findall(shown), strict=True)
    return all(abs(float(a) - float(b)) <= 0.2 * max(float(a), float(b)) for a, b in pairs)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder, from which modules can be imported. One process is a process group."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with hooks.phases_afresh():  # a page sets the step of all models
        yield tmp_path
    dist.destroy_process_group()
    fp8compile.set_precision(None)
    for module in set(sys.modules) - before:
        if str(getattr(sys.modules[module], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[module]


NOT_INTERPRETED = ("docs/estimates.md", *COMPILED)
INTERPRETED = [page for page in WITH_PYTHON if name(page) not in NOT_INTERPRETED and not has_commands(page)]
PARAMETERS = [pytest.param(page, marks=[pytest.mark.slow] * is_slow(page)) for page in INTERPRETED]


@pytest.mark.cases(test=9, slow=2)
@pytest.mark.parametrize("page", PARAMETERS, ids=name)
def test_the_code_of_a_page_runs(page: Path, folder: Path, interpreted: None) -> None:
    printed = [" ".join(line.split()) for line in run(page, folder).splitlines()]
    shown = "\n".join(block.code for block in blocks(page) if not block.language)
    heads = re.findall(r"^(\S.*)\n-{3}[ -]+$", shown, re.M)
    for head in heads:  # "...": any columns
        text = re.escape(" ".join(head.split())).replace(re.escape("..."), ".+")
        assert any(re.fullmatch(text, line) for line in printed), f"{name(page)} shows other columns: {head}"


@pytest.mark.weekly
@pytest.mark.compiled
@pytest.mark.timeout(1800)  # a loaded machine compiles the tutorial's model for minutes
@pytest.mark.parametrize("page", [page for page in WITH_PYTHON if page not in INTERPRETED], ids=name)
def test_the_code_of_a_page_runs_through_inductor(page: Path, folder: Path) -> None:
    run(page, folder)


class Called(Exception):
    """Ends a page at its first compiled call: (model, arguments, options)."""


ON_A_GPU = {  # matmuls in FP8, of all
    "README.md": (5, 5),
    "docs/index.md": (5, 5),
    "docs/report.md": (5, 8),
    "docs/how-to/lora.md": (3, 14),
    "docs/how-to/turn-off-a-layer.md": (2, 5),
    "docs/how-to/several-gpus.md": (11, 11),
}


@pytest.mark.cases(test=1, slow=5)
@pytest.mark.parametrize("page", ON_A_GPU)
def test_examples_have_sizes_that_gain_on_a_gpu(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 decides for the sizes that a page takes on a GPU as the page shows it for those of a CPU."""

    def compile(model: nn.Module, backend: str = "fp8", options: Any = None) -> Any:
        def call(*args: torch.Tensor) -> None:
            raise Called(model, args, options)

        return call

    code = next(block.code for block in blocks(ROOT / page) if "is_available()" in block.code)
    if page.endswith("several-gpus.md"):  # without processes: its blocks, at its sizes
        sizes, model = re.findall(r"^(?:model|tokens, ).*$", code, re.M)
        call = "torch.compile(model)(torch.empty(tokens, width, device=device))"
        code = "\n".join([code.split("cuda = ")[0], "cuda, device = True, 'meta'", sizes, model, call])
    code = code.replace('"cuda" if torch.cuda.is_available() else "cpu"', '"meta"')
    code = code.replace('device == "cuda"', "True")
    with monkeypatch.context() as patch, torch.device("meta"), pytest.raises(Called) as found:
        patch.setattr(torch, "compile", compile)
        exec(code, {})
    model, args, options = found.value.args
    matmuls = fp8compile.explain(model, *args, options=options, device="h100", autocast=False).matmuls
    assert (sum(matmul.decision == "fp8" for matmul in matmuls), len(matmuls)) == ON_A_GPU[page]


def test_new_pages_run_all_their_code() -> None:
    """On the tutorial and the how-to pages, no Python block is left out."""
    pages = [page for page in WITH_PYTHON if page.parent.name in COMPLETE or page.name in COMPLETE]
    python = [block for page in pages for block in blocks(page) if block.language == "python"]
    left_out = [block.where for block in python if not block.runs]
    assert len(pages) > 12 and not left_out, left_out


def test_a_block_that_prints_something_else_is_noticed() -> None:
    assert is_like("loss 2.31 at step 4", "loss 2.2 at step 4")
    assert not is_like("loss 2.31 at step 4", "loss 1.2 at step 4")
    assert not is_like("loss 2.31 at step 4", "loss 2.31 at step 5")
    with pytest.raises(AssertionError, match="line 3 prints"):
        agree(Block(ROOT / "README.md", 3, "python", None, "", "fp8\n"), "bf16\n")
