"""Failures of FP8 that are planted on purpose: what each costs, and what measured calls tell of it.

    python -m benchmarks.guard                        # the missing runs of 5 seeds, then the tables
    python -m benchmarks.guard --only tokens,channel --arms bf16,rowwise --seeds 2
    python -m benchmarks.guard --show --update notes/accuracy.md

A GPT with SwiGLUs, 2 layers, 128 wide, learns the source code of Python's standard library on a CPU, byte by
byte, 512 tokens a step, under bf16 autocast. `CASES` says what is planted, and what a guard must make of it:
`FOUND` (FP8 fails, so that a gemm has to move), `STILL` (nothing may move, since FP8 loses nothing), `TRIED`
(reported either way), or `HEALTHY` (nothing is planted). Outlier channels do not change the function that the
model computes; outlier tokens hardly do, nor do they change it for other tokens.

An arm of `ARMS` is a policy; a case may add settings and rules to it. All arms, also `bf16`, run graphs in
fp8compile's interpreter: 240 steps with the compilation take a third of Inductor's time. Runs of one seed
begin with the same weights and see the same batches, so gaps to `bf16` are computed seed by seed, and the
interval is that of their mean (Student's t). The loss is that of 24 held-out batches, in high precision and
with nothing planted in tokens or jumps, the mean of the last `LATE` evaluations.

A run appends one line of JSON to `--out`; a run that is there is not repeated. In runs of seed 0 a call is
measured every `EVERY` steps (which changes no bit of a run); the line has the numbers of each operand.
"""

from __future__ import annotations

import argparse
import logging
import re
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile

from . import lines, machine, tables
from .interpreted import interpreted
from .options import Parser, count
from .results import RESULTS
from .show import table

PATH = RESULTS / "guard.jsonl"
WIDTH, HIDDEN, LAYERS, HEADS, CONTEXT, BATCH, VOCABULARY = 128, 384, 2, 4, 64, 8, 256
STEPS, LONG = 240, 1500
LR, WARMUP = 2e-3, 50
HELD_OUT = 24  # batches of an evaluation
EVERY, LATE = 20, 3  # steps between evaluations, and between measured calls; the last evaluations
SHARE = 0.02  # of the tokens are outliers
FOUND, STILL, TRIED, HEALTHY = "must move", "must not move", "report", "healthy"
NUMBERS = ("row_error", "column_error", "underflows%", "overflows%")

ARMS: dict[str, dict[str, Any]] = {
    "bf16": {"rules": [{"fp8": "off"}]},
    "delayed": {"defaults": {"recipe": "delayed"}},
    "tensorwise": {"defaults": {"recipe": "tensorwise"}},
    "rowwise": {"defaults": {"recipe": "rowwise"}},
    "blockwise": {"defaults": {"recipe": "blockwise"}},
    "guarded": {"defaults": {"recipe": "delayed"}, "guard": {"every": 50, "patience": 2}},
}
BASELINE, DEFAULT = "bf16", "bf16,delayed"

Row = dict[str, Any]


def same(step: int, steps: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Case:
    """What is planted. Functions get a step and the number of steps."""

    kind: str
    what: str
    steps: int = STEPS
    tokens: Callable[[int, int], float] = same  # so much larger are 2% of the tokens before each SwiGLU
    jump: Callable[[int, int], float] = same  # so much larger is the input of the last down projection
    loss_scale: Callable[[int, int], float] = same
    channel: float = 1.0  # so much larger is one channel of the product in a SwiGLU, undone in the weight
    channel_in: tuple[int, ...] = (0, 1)  # of these layers
    offset: float = 0.0  # added to the inputs of all layers
    residual: float = 0.0  # added to one channel of the residual stream
    weights: float = 0.0  # the loss of a token weighs 2 to the power of 0 to this, at random
    head: float = 0.02  # standard deviation of the head at the start
    settings: Mapping[str, Any] = field(default_factory=dict)
    rules: Sequence[Mapping[str, Any]] = ()


CASES = {
    "tokens": Case(FOUND, "outlier tokens of 2^18", tokens=lambda step, steps: 2.0**9),
    "growing": Case(
        FOUND, "outlier tokens, from 2^8 to 2^18", tokens=lambda step, steps: 2.0 ** (4 + 5 * step / steps)
    ),
    "channel": Case(FOUND, "an outlier channel of 2^18", channel=2.0**18),
    "tokens-long": Case(
        FOUND, "outlier tokens of 2^18, longer", steps=3 * STEPS, tokens=lambda step, steps: 2.0**9
    ),
    "head": Case(
        TRIED, "a head with std 1e-6, in FP8", head=1e-6, rules=[{"module": "lm_head", "fp8": "on"}]
    ),
    "weights": Case(
        TRIED, "E4M3 gradients, tokens weigh 1 to 2^18", weights=18.0, settings={"fp8_format": "e4m3"}
    ),
    "saturate": Case(
        TRIED,
        'on_overflow="saturate", jumps of 2^10 every 20 steps',
        jump=lambda step, steps: 2.0**10 if step >= steps // 3 and step % 20 == 7 else 1.0,
        settings={"on_overflow": "saturate"},
    ),
    "loss-scale": Case(
        STILL,
        "the loss scale falls by 2^16",
        loss_scale=lambda step, steps: 2.0**16 if step < steps // 3 else 1.0,
    ),
    "jump": Case(
        STILL,
        "inputs jump by 2^10 for a step",
        jump=lambda step, steps: 2.0**10 if step == steps // 3 else 1.0,
    ),
    "channel-14": Case(STILL, "an outlier channel of 2^14", channel=2.0**14, channel_in=(1,)),
    "offset": Case(STILL, "an offset of 16 on inputs", offset=16.0),
    "residual": Case(STILL, "1,000 added to a residual channel", residual=1000.0),
    "healthy": Case(HEALTHY, "nothing", steps=LONG),
}


# -- the model --


class Block(nn.Module):
    def __init__(self, case: Case, layer: int) -> None:
        super().__init__()
        self.offset = case.offset
        self.channel = case.channel if layer in case.channel_in else 1.0
        self.last = layer == LAYERS - 1
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, tokens: Tensor, jump: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x) + self.offset).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x) * tokens + self.offset
        product = F.silu(self.gate(h)) * self.up(h)
        if self.last:
            product = product * jump
        if self.channel == 1.0:
            y = self.down(product)
        else:
            factor = torch.where(torch.arange(HIDDEN) == 7, self.channel, 1.0)
            y = F.linear(product * factor, self.down.weight / factor)
        return x + y / tokens**2


class Model(nn.Module):
    """Of this step, float32: the factors tokens `[BATCH, CONTEXT, 1]` and jump `[]`, and the weights of the
    loss `[BATCH, CONTEXT]`."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.residual = case.residual
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(case, layer) for layer in range(LAYERS))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        nn.init.normal_(self.lm_head.weight, std=case.head)

    def forward(
        self, inputs: Tensor, targets: Tensor, tokens: Tensor, jump: Tensor, weights: Tensor
    ) -> Tensor:
        x = self.embedding(inputs) + self.position(torch.arange(CONTEXT))
        if self.residual:
            x = torch.cat((x[..., :1] + self.residual, x[..., 1:]), -1)
        for block in self.blocks:
            x = block(x, tokens, jump)
        logits = self.lm_head(self.norm(x)).float().flatten(0, 1)
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
        return (losses * weights.flatten()).sum() / weights.sum()


def load_text() -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's sources, int64: to train, and held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    read = bytearray(b"".join(file.read_bytes() for file in files))
    text = torch.frombuffer(read, dtype=torch.uint8).long()
    cut = int(0.95 * len(text))
    return text[:cut], text[cut:]


def batch(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=generator)
    at = starts + torch.arange(CONTEXT)
    return text[at], text[at + 1]


def inputs_of(case: Case, text: Tensor, seed: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
    """What the model is called with at each step, with what is planted."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for step in range(steps):
        pair = batch(text, generator)
        outliers = torch.rand(BATCH, CONTEXT, 1, generator=generator) < SHARE
        tokens = torch.where(outliers, case.tokens(step, steps), 1.0)
        weights = torch.exp2(case.weights * torch.rand(BATCH, CONTEXT, generator=generator))
        yield *pair, tokens, torch.tensor(case.jump(step, steps)), weights


# -- one run --


def policy(arm: Mapping[str, Any], case: Case) -> dict[str, Any]:
    """The policy of an arm, with what a case adds: settings, and rules if the arm has none of its own."""
    return {"rules": [*case.rules], **arm, "defaults": {**case.settings, **arm.get("defaults", {})}}


def train(name: str, arm: str, seed: int, steps: int = 0) -> Row:
    """Train one case by one arm from one seed; its line of the results. `steps`: fewer than the case's, for
    tests. RuntimeError if a matmul of the blocks is not in FP8, or is so in the baseline."""
    case, began = CASES[name], time.process_time()
    steps = steps or case.steps
    text, held_out = load_text()
    torch.manual_seed(seed)
    model = Model(case)
    options: dict[str, Any] = {"policy": policy(ARMS[arm], case)}
    run: Any = torch.compile(model, backend="fp8", options=options, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    drawn = torch.Generator().manual_seed(7)
    evaluated = [batch(held_out, drawn) for _ in range(HELD_OUT)]
    measured: list[Row] = []
    losses, evaluations, monitor, guard = [], [], None, None
    fp8compile.set_step(0, model)  # else it is taken to be at the step of the models before it
    if "guard" in ARMS[arm]:
        guard = fp8compile.guard(run)
    elif seed == 0 and arm != BASELINE:
        monitor = fp8compile.monitor(run, every=EVERY, to=measured.extend)
    for step, given in enumerate(inputs_of(case, text, seed, steps)):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP) * (0.1 + 0.9 * (1 - step / steps))
        scale = case.loss_scale(step, steps)
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(*given)
        (loss * scale).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scale
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % EVERY == 0:
            evaluations.append((step + 1, round(evaluate(model, evaluated), 5)))
    if monitor is not None:
        monitor.close()
    if guard is not None:
        guard.close()
    return {
        "case": name,
        "arm": arm,
        "seed": seed,
        "steps": steps,
        "late": statistics.fmean(loss for _, loss in evaluations[-LATE:]),
        "training": statistics.fmean(losses[-50:]),
        "evaluations": evaluations,
        "measured": numbers(measured),
        "moves": [] if guard is None else [str(move) for move in guard.moved],
        "fp8_matmuls": converted(model, arm, case),
        "policy": options["policy"],
        "cpu_seconds": round(time.process_time() - began, 1),
        "date": machine.now(),
        **machine.commit(),
        "versions": machine.versions(),
    }


def converted(model: nn.Module, arm: str, case: Case) -> int:
    """The number of FP8 matmuls. RuntimeError if it is not that of all linears of the blocks, and of the head
    if the case says so."""
    report = fp8compile.report(model)
    fp8 = sum(record.decision == "fp8" for record in report.matmuls)
    expected = 0 if arm == BASELINE else 3 * (5 * LAYERS + len(case.rules))
    if fp8 != expected:
        raise RuntimeError(f"{arm}: {fp8} matmuls in FP8, expected {expected}:\n{report}")
    return fp8


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The mean loss, in nats a byte, with no outlier tokens and no jump."""
    model.eval()
    ones = torch.ones(BATCH, CONTEXT)
    with torch.autocast("cpu", torch.bfloat16):
        found = [model(*pair, ones.unsqueeze(-1), torch.ones(()), ones).item() for pair in batches]
    model.train()
    return statistics.fmean(found)


def numbers(rows: Sequence[Row]) -> dict[str, list[list[float | None]]]:
    """{"blocks.0.down.weight input": [[step, *NUMBERS], ...]} from a monitor's rows."""
    found: dict[str, list[list[float | None]]] = {}
    for row in rows:
        tensor = " ".join(filter(None, (row["name"], row["role"], row["layout"])))
        short = [None if row[key] is None else float(f"{row[key]:.3g}") for key in NUMBERS]
        found.setdefault(tensor, []).append([row["step"], *short])
    return found


# -- tables --


def gaps(rows: Sequence[Row], case: str, arm: str) -> list[float]:
    """The gaps of the late losses to the baseline's in %, by seed."""
    late = {(row["arm"], row["seed"]): row["late"] for row in rows if row["case"] == case}
    seeds = [seed for name, seed in late if name == arm and (BASELINE, seed) in late]
    return [100 * (late[arm, seed] / late[BASELINE, seed] - 1) for seed in sorted(seeds)]


def interval(values: Sequence[float]) -> str:
    """The 95% interval of the mean; "" for a single value."""
    from scipy import stats  # type: ignore[import-untyped]

    if len(values) < 2:
        return ""
    mean, half = statistics.fmean(values), stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{mean - half:+.2f} to {mean + half:+.2f}%"


def overview(rows: Sequence[Row], markdown: bool = False) -> str:
    """What each case costs, by arm."""
    cells = []
    for name, case in CASES.items():
        base = [row["late"] for row in rows if (row["case"], row["arm"]) == (name, BASELINE)]
        for arm in ARMS:
            found = gaps(rows, name, arm) if arm != BASELINE else []
            if found:
                largest = f"{max(found, key=abs):+.2f}%"
                gap = f"{statistics.fmean(found):+.2f}%"
                loss = f"{statistics.fmean(base):.4f}"
                cells.append((case.what, case.kind, loss, arm, len(found), gap, interval(found), largest))
    head = ("planted", "a guard", "bf16", "arm", "seeds", "gap", "95% interval", "largest")
    return table(cells, head, markdown)


def moved(rows: Sequence[Row], markdown: bool = False) -> str:
    """What a guard moved in each case: in how many runs, at which steps, and where."""
    cells = []
    for name, case in CASES.items():
        runs = [row["moves"] for row in rows if (row["case"], row["arm"]) == (name, "guarded")]
        if runs:
            found = [re.match(r"(.*)\.weight (\w+) moves to (\w+) at step (\d+)", x) for x in sum(runs, [])]
            layers, gemms, rungs, steps = (
                dict.fromkeys(match[i] for match in found if match is not None) for i in range(1, 5)
            )
            at = ", ".join(sorted(steps, key=int))
            what = " and ".join(x.removeprefix("blocks.") for x in sorted(layers))
            first = case.what, case.kind, len(runs), sum(map(bool, runs))
            cells.append((*first, at, what, ", ".join(gemms), ", ".join(rungs)))
    head = ("planted", "a guard", "runs", "with a move", "at step", "layers", "gemms", "to")
    return table(cells, head, markdown)


def looks(rows: Sequence[Row], markdown: bool = False) -> str:
    """What measured calls told: for each case, arm and role, and each number, the operand with the largest
    median over the run, and its median."""
    cells = []
    for row in rows:
        for role in ("input", "weight", "gradient") if row["measured"] else ():
            tensors = {tensor: seen for tensor, seen in row["measured"].items() if tensor.split()[1] == role}
            worst = []
            for i in range(1, 1 + len(NUMBERS)):
                medians = {x: statistics.median(line[i] or 0.0 for line in tensors[x]) for x in tensors}
                most = max(medians, key=lambda x: medians[x])
                where = most.split(".weight")[0].removeprefix("blocks.")
                worst.append(f"{medians[most]:.3g} ({where})" if medians[most] else "0")
            cells.append((CASES[row["case"]].what, row["arm"], role, *worst))
    return table(cells, ("planted", "arm", "role", *NUMBERS), markdown)


# -- command line --


def names(known: Mapping[str, Any]) -> Callable[[str], list[str]]:
    def parse(value: str) -> list[str]:
        found = value.split(",")
        wrong = [name for name in found if name not in known]
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(known)}")
        return found

    return parse


def read(path: Path) -> list[Row]:
    """The runs of whole cases: the last one of each case, arm and seed."""
    found = lines.read(path) if path.exists() else []
    runs = {(row["case"], row["arm"], row["seed"]): row for row in found}
    return [row for row in runs.values() if row["steps"] == CASES[row["case"]].steps]


def run_missing(cases: Sequence[str], arms: Sequence[str], seeds: int, path: Path) -> None:
    """Train what is not in the file. Seeds of a case and an arm share compiled code."""
    there = {(row["case"], row["arm"], row["seed"]) for row in read(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for case in cases:
        for arm in arms:
            torch._dynamo.reset()
            for seed in range(seeds):
                if (case, arm, seed) not in there:
                    row = train(case, arm, seed)
                    lines.add(path, row)
                    took = f"{row['cpu_seconds']} s of CPU"
                    print(f"{case}, {arm}, seed {seed}: {row['late']:.4f}, {took}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="benchmarks.guard", description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--only", type=names(CASES), default=[*CASES], metavar="CASE,...", help=", ".join(CASES))
    add("--arms", type=names(ARMS), default=DEFAULT, help=f"{', '.join(ARMS)} (default: {DEFAULT})")
    add("--seeds", type=count(1), default=5, help="how many (default: 5)")
    add("--out", type=Path, default=PATH, help="file of results, read and continued")
    add("--show", action="store_true", help="only print the tables")
    add("--update", type=Path, metavar="PAGE", help="write the tables into this page")
    args = parser.parse_args(argv)
    logging.getLogger("fp8compile").setLevel(logging.ERROR)
    if not args.show:
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("medium")  # FP8 values are exact in bf16: faster products
        with interpreted():
            run_missing(args.only, args.arms, args.seeds, args.out)
    rows = [row for row in read(args.out) if row["case"] in args.only]
    made = {"guard": overview, "moved": moved, "measured": looks}
    for name, make in made.items():
        if args.update:
            tables.update(args.update, name, make(rows, True) + "\n")
        else:
            print(make(rows), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
