r"""Does a model learn as well in FP8 as in bf16? Every recipe, several seeds, real text, on a CPU.

    python -m benchmarks.recipes      # the missing runs of 5 seeds, then the table; about an hour of one core
    python -m benchmarks.recipes --arms bf16,rowwise --seeds 10 --jobs 4
    python -m benchmarks.recipes --show --update docs/accuracy.md --plot docs/recipes.png
    python -m benchmarks.recipes --experts 8 --steps 600 --seeds 3 --arms bf16,delayed,rowwise
    python -m benchmarks.recipes --seeds 3 \
        --arms bf16,bf16-noise-0.03,bf16-noise-0.1,bf16-noise-0.3,bf16-noise-1.0
    python -m benchmarks.recipes --seeds 3 --arms bf16,delayed,tuned-0.1%,tuned-0.2%
    python -m benchmarks.recipes --steps 600 --seeds 3 \
        --arms delayed,delayed-optim,delayed-wire --baseline delayed

The model is the GPT of examples/train_gpt.py: 2 layers, 128 wide, context 64, with a tied output head that
stays in high precision, except in the arm `fast`. Every matmul of its blocks is FP8; the script checks this
in the report. A run has 1,500 steps of 512 bytes of text.
Weights are float32, the forward pass runs under bf16 autocast, and all arms, also `bf16`, end in Inductor.
Runs of one seed start from the same weights and see the same batches. So gaps are computed for each seed, and
the interval is that of their mean (Student's t). Welch's test compares the losses as if runs were not paired.
`float32` is the yardstick: it shows the gap between two precisions that are both trusted. An arm that ends in
`-optim` has `fp8compile.optim.AdamW`. One that ends in `-wire` trains on two processes under DDP, each with
half of the batch, and with `compress_gradients`. Both are not among the default arms. Nor are `bf16-noise-R`,
which add noise of R times the gradient's power to bf16's gradients, and `tuned-SHARE`, which have the
policies that `fp8compile.tune` chose for this much noise in gradients (0.2% of their power is a relative
error of 0.045) when it searched a frontier:

    fp8compile tune benchmarks.recipes:build --like examples/train_gpt.py:build --device h100 \
        --max-error 0.045

and `tuned-demo-0.2%` that of examples/train_gpt.py:build_small, for `--demo`.

The validation loss is the mean over 1,024 windows that are the same for all runs, evaluated in high
precision. `late` is its mean over the last five evaluations, one every 50 steps. Each arm is one process with
one thread, which trains all seeds, so that they share compiled code. Each run appends one line of JSON to
`--out`; a run that is there is not repeated.

FP8 on a CPU is emulated, with exact products and float32 sums. The study measures the effect of quantization,
not of the accumulators of tensor cores.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fp8compile.distributed import compress_gradients
from fp8compile.features.save import save
from fp8compile.optim import AdamW

from . import machine
from .results import RESULTS
from .show import table
from .tables import update

sys.path.append(str(machine.ROOT / "examples"))
import train_gpt  # noqa: E402

PATH = RESULTS / "recipes.jsonl"  # not a .json: those are results of `benchmarks.train`
BASELINE = "bf16"
# the options of torch.compile(backend="fp8"); None: backend="inductor"
ARMS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "float32": None,
    "delayed": {"recipe": "delayed"},
    "fast": {"policy": "fast"},  # delayed, with the output head in FP8
    "delayed-margin-0": {"recipe": "delayed", "margin": 0},
    "delayed-save": {"recipe": "delayed", "save": "fp8"},
    "tensorwise": {"recipe": "tensorwise"},
    "rowwise": {"recipe": "rowwise"},
    "rowwise_with_gw_hp": {"recipe": "rowwise_with_gw_hp"},
    "blockwise": {"recipe": "blockwise"},
    "mxfp8": {"recipe": "mxfp8"},
    "mxfp8-tiles": {"recipe": "mxfp8", "weight_tiles": True},
    "delayed-fnuz": {"recipe": "delayed", "fp8_encoding": "fnuz"},
}
STUDIED = list(ARMS)  # by default
OPTIM, WIRE = "-optim", "-wire"
ARMS.update(
    {f"{arm}{more}": ARMS[arm] for arm in ("bf16", "delayed") for more in (OPTIM, WIRE, OPTIM + WIRE)}
)
NOISE = {f"bf16-noise-{share}": share for share in (0.03, 0.1, 0.3, 1.0)}  # |noise|^2 / |gradient|^2
ARMS.update(dict.fromkeys(NOISE))
# by noise
TUNED = {f"tuned-{budget}": f"benchmarks/tuned-{budget}.toml" for budget in ("0.1%", "0.2%", "demo-0.2%")}
ARMS.update({arm: {"policy": path} for arm, path in TUNED.items()})
# in %; for all others, 0.5
GOALS = {"rowwise": 0.2, "blockwise": 0.2, **{arm: 0.2 for arm in ARMS if arm.endswith((OPTIM, WIRE))}}
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LATE = 5  # evaluations whose mean is the late loss
EVERY = 50  # steps between them
# only runs with equal fields are compared; runs without one of them have its default
FIELDS = ("steps", "layers", "width", "context", "batch_size", "lr", "experts", "top_k")

Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """The settings that all runs share. `steps` are the optimizer's; `windows` are for validation."""

    steps: int = 1500
    layers: int = 2
    width: int = 128
    context: int = 64
    batch_size: int = 8
    lr: float = 1e-3
    windows: int = 1024
    experts: int = 0
    top_k: int = 2

    @property
    def config(self) -> train_gpt.Config:
        shape = self.layers, self.width, self.width // 64, self.context, 256
        return train_gpt.Config(*shape, self.steps, self.batch_size, self.experts, self.top_k)

    @property
    def evaluations(self) -> list[int]:
        """Steps after which the model is evaluated: every tenth of the run, and the last `LATE` times every
        `EVERY` steps."""
        late = {self.steps - EVERY * i for i in range(LATE)}
        early = {self.steps * i // 10 for i in range(1, 10)}
        return sorted(step for step in late | {x for x in early if x < min(late)} if step > 0)


# examples/train_gpt.py as it is run
DEMO = Study(steps=200, layers=4, width=256, context=128, lr=5e-4, windows=128)


def build(study: Study = Study()) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The study's model as it begins to train, and its first batch, for `fp8compile tune
    benchmarks.recipes:build`."""
    torch.manual_seed(0)
    model = train_gpt.build_model(study.config)
    text, _ = train_gpt.split_text(train_gpt.load_text(), study.context)
    return model, next(train_gpt.batches(text, study.config, study.batch_size, 0, "cpu"))


# -- one run --


def train(arm: str, seed: int, study: Study, text: Tensor) -> Row:
    """Train one arm from one seed; returns its line of the results. Raises RuntimeError if a matmul of a
    block is not FP8."""
    options, config = ARMS[arm], study.config
    # "medium": FP8 values are exact in bf16, so products of them may take the CPU's bf16 instructions
    torch.set_float32_matmul_precision("highest" if arm == "float32" else "medium")
    train_text, val_text = train_gpt.split_text(text, config.context)
    if options and options.get("save"):
        save.LEAST = 0  # no tensor of so small a model is large
    torch.manual_seed(seed)
    model = train_gpt.build_model(config)
    model.compile(backend="fp8" if options else "inductor", options=options, dynamic=False)
    decayed, others = (
        [p for p in model.parameters() if (p.dim() >= 2) is matrix] for matrix in (True, False)
    )
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adamw: Any = AdamW if OPTIM in arm else functools.partial(torch.optim.AdamW, fused=True)
    optimizer = adamw(groups, lr=study.lr, betas=(0.9, 0.95))
    called: nn.Module = model
    if arm.endswith(WIRE):
        called = DistributedDataParallel(model)
        compress_gradients(called)
    source = train_gpt.batches(train_text, config, study.batch_size, seed, "cpu")
    losses, evaluated, seconds = [], [], 0.0
    for step in range(study.steps):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = train_gpt.learning_rate(step, study.steps, study.lr)
        inputs, targets = (share(part, arm) for part in next(source))
        with _autocast(arm):
            loss = called(inputs, targets)
        loss.backward()
        if arm in NOISE:
            add_noise(model, NOISE[arm], seed * study.steps + step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        seconds += time.perf_counter() - began if step >= 10 else 0.0  # the first steps include compilation
        if step + 1 in study.evaluations:
            evaluated.append((step + 1, evaluate(model, val_text, study, arm)))
    return {
        "arm": arm,
        "seed": seed,
        **{name: getattr(study, name) for name in FIELDS},
        "loss": evaluated[-1][1],
        "late": statistics.fmean(loss for _, loss in evaluated[-LATE:]),
        "evaluations": evaluated,
        "training": [round(statistics.fmean(losses[i : i + 25]), 5) for i in range(0, len(losses), 25)],
        "ms_per_step": 1e3 * seconds / max(1, study.steps - 10),
        "fp8_matmuls": converted(model, arm, study) if options else 0,
        "options": options,
        "date": machine.now(),
        **machine.commit(),
        "versions": machine.versions(),
    }


@torch.no_grad()
def add_noise(model: nn.Module, ratio: float, seed: int) -> None:
    """Add normal noise to each gradient: `ratio` times the power of each row, or of a vector."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.grad is not None:
            power = p.grad.square().mean(-1, keepdim=True)
            p.grad += (ratio * power).sqrt() * torch.randn(p.grad.shape, generator=generator)


def share(batch: Tensor, arm: str) -> Tensor:
    """This process's half of a batch [rows, context], or the whole."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()] if arm.endswith(WIRE) else batch


def _autocast(arm: str) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=arm != "float32")


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, study: Study, arm: str) -> float:
    """Mean loss over windows spread evenly over the text, in nats a byte."""
    model.eval()
    starts = torch.linspace(0, len(text) - study.context - 1, study.windows, dtype=torch.float64).long()
    losses = []
    for part in starts.split(64):
        inputs, targets = train_gpt.windows(text, part, study.context, "cpu")
        with _autocast(arm):
            losses.append(model(inputs, targets).item())
    model.train()
    return statistics.fmean(losses)


def converted(model: nn.Module, arm: str, study: Study) -> int:
    """The number of FP8 matmuls in the training graph. RuntimeError if a matmul of a block is not FP8 (except
    wgrad, if the recipe keeps it in high precision)."""
    import fp8compile

    report = fp8compile.report(model)  # of this model: tests train others in the same process
    graphs = [graph for graph in report.graphs if graph.name.endswith("training")]
    # DDP has cut the graph in parts
    last = {(record.fqn, record.gemm): record for graph in graphs for record in graph.matmuls}
    fp8 = [record for record in last.values() if record.decision == "fp8"]
    gemms = 2 if arm == "rowwise_with_gw_hp" else 3
    expected = 4 * gemms * study.layers + (3 if arm == "fast" else 0)  # with the head's
    if len(fp8) != expected and arm not in TUNED:
        raise RuntimeError(f"{arm}: {len(fp8)} matmuls in FP8, expected {expected}:\n{report}")
    return len(fp8)


# -- all runs --


def read(path: Path, study: Study) -> list[Row]:
    """The lines of a file that were made with these settings; the last line for each arm and seed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    same = [
        line
        for line in lines
        if all(line.get(name, getattr(Study, name)) == getattr(study, name) for name in FIELDS)
    ]
    return list({(line["arm"], line["seed"]): line for line in same}.values())


def run_missing(arms: Sequence[str], seeds: int, jobs: int, path: Path, study: Study) -> bool:
    """Train the missing runs, a process per arm. Whether all succeeded; failures are printed on stderr."""
    there = {(row["arm"], row["seed"]) for row in read(path, study)}
    missing = {arm: [seed for seed in range(seeds) if (arm, seed) not in there] for arm in arms}
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = threading.Lock()

    def one(arm: str) -> bool:
        settings = json.dumps({name: getattr(study, name) for name in (*FIELDS, "windows")})
        run = [*TWO, "-m"] if arm.endswith(WIRE) else ["-m"]
        command = [sys.executable, *run, "benchmarks.recipes", "--worker", arm]
        command += ["--settings", settings, "--of"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        process = subprocess.Popen(
            command + [str(seed) for seed in missing[arm]],
            cwd=machine.ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            row = json.loads(line)
            with lock:
                with path.open("a") as stream:
                    stream.write(line)
                print(
                    f"{arm}, seed {row['seed']}: {row['late']:.4f}, {row['ms_per_step']:.0f} ms a step",
                    flush=True,
                )
        if process.wait() != 0:
            print(f"{arm}: failed, see above", file=sys.stderr, flush=True)
        return process.returncode == 0

    with ThreadPoolExecutor(jobs) as pool:
        return all(list(pool.map(one, [arm for arm in arms if missing[arm]])))


def work(arm: str, seeds: Sequence[int], study: Study) -> None:
    """The process of an arm, or one of its two: prints one line of results per seed."""
    torch.set_num_threads(1)
    text = train_gpt.load_text()
    if arm.endswith(WIRE):
        dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    for seed in seeds:
        row = train(arm, seed, study, text)
        if not arm.endswith(WIRE) or dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    if arm.endswith(WIRE):
        dist.destroy_process_group()


# -- statistics --


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half the width of its 95% confidence interval (nan for a single value)."""
    from scipy import stats

    if len(values) < 2:
        return values[0], math.nan
    return statistics.fmean(values), float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def welch(a: Sequence[float], b: Sequence[float]) -> float:
    """The p value of Welch's two-sided test that two samples have the same mean; nan for a single value."""
    from scipy import stats

    return math.nan if min(len(a), len(b)) < 2 else float(stats.ttest_ind(a, b, equal_var=False).pvalue)


@dataclass(frozen=True)
class Summary:
    """An arm against the baseline, over the seeds that both have. Gaps are in % of the baseline's loss."""

    arm: str
    losses: list[float]  # late losses
    gaps: list[float]  # gaps of the late losses
    final: float  # mean gap of the last evaluation
    p: float

    @property
    def goal(self) -> float | None:
        return GOALS.get(self.arm, 0.5) if ARMS.get(self.arm) or self.arm in GOALS else None


def summarise(rows: Sequence[Row], baseline: str = BASELINE) -> list[Summary]:
    """A summary for each arm with runs, in the order of `ARMS`. ValueError without a baseline's run."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        found.setdefault(row["arm"], {})[row["seed"]] = row
    if baseline not in found:
        raise ValueError(f"no run of {baseline!r} with these settings: nothing to compare with")
    made = []
    for arm in (arm for arm in ARMS if arm in found):
        pairs = [
            (found[arm][seed], found[baseline][seed])
            for seed in sorted(found[arm].keys() & found[baseline].keys())
        ]
        if pairs:
            late = [[row["late"] for row in side] for side in zip(*pairs, strict=True)]
            gaps = [100 * (a["late"] / b["late"] - 1) for a, b in pairs]
            final = statistics.fmean(100 * (a["loss"] / b["loss"] - 1) for a, b in pairs)
            made.append(Summary(arm, late[0], gaps, final, welch(*late)))
    return made


def verdict(gap: float, half: float, goal: float) -> str:
    """Whether the goal is met by the whole interval ("met"), by the mean only, or not at all ("missed")."""
    if abs(gap) > goal:
        return "missed"
    return "met" if abs(gap) + half <= goal else "met by the mean"


def overview(summaries: Sequence[Summary], markdown: bool = False, baseline: str = BASELINE) -> str:
    """A table with one row per arm."""
    gap_to = f"gap to {baseline}"
    head = ["recipe", "seeds", "late loss", gap_to, "95% interval", "largest"]
    head += ["gap at the end", "Welch's p", "goal"]
    rows: list[tuple[Any, ...]] = []
    for x in summaries:
        loss, (gap, half) = f"{statistics.fmean(x.losses):.4f}", mean_interval(x.gaps)
        if x.arm == baseline:
            rows.append((x.arm, len(x.losses), loss, *[""] * 6))
            continue
        interval = "" if math.isnan(half) else f"{gap - half:+.3f} to {gap + half:+.3f}%"
        p = "" if math.isnan(x.p) else f"{x.p:.2f}"
        goal = "" if x.goal is None else f"{x.goal}%: {verdict(gap, half, x.goal)}"
        largest = f"{max(x.gaps, key=abs):+.3f}%"
        rows.append(
            (x.arm, len(x.losses), loss, f"{gap:+.3f}%", interval, largest, f"{x.final:+.3f}%", p, goal)
        )
    return table(rows, head, markdown)


# -- plot --


def plot(rows: Sequence[Row], path: Path, baseline: str = BASELINE) -> None:
    """Left: each arm's mean validation loss. Right: gaps to the baseline by seed, and the mean's interval."""
    from .plot import pyplot

    plt = pyplot()
    summaries = summarise(rows, baseline)
    colors = {x.arm: plt.get_cmap("tab20").colors[2 * i % 20 + i // 10 % 2] for i, x in enumerate(summaries)}
    colors |= {"float32": "#9aa0a6", baseline: "black"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), gridspec_kw={"width_ratios": (1, 1.15)})
    for x in summaries:
        curves = [row["evaluations"] for row in rows if row["arm"] == x.arm]
        steps = [step for step, _ in curves[0]]
        means = [statistics.fmean(curve[i][1] for curve in curves) for i in range(len(steps))]
        left.plot(steps, means, color=colors[x.arm], lw=2.5 if x.arm == baseline else 1.0, label=x.arm)
    left.set(xlabel="step", ylabel="validation loss (nats a byte)", title="Mean over the seeds")
    left.legend(frameon=False, fontsize=8)
    shown = [x for x in summaries if x.arm != baseline][::-1]
    for at, x in enumerate(shown):
        gap, half = mean_interval(x.gaps)
        if x.goal is not None:
            right.plot([-x.goal, x.goal], [at, at], color="#d9f0e3", lw=14, solid_capstyle="butt", zorder=0)
        right.plot(x.gaps, [at] * len(x.gaps), "o", ms=3.5, color=colors[x.arm], alpha=0.5)
        right.errorbar(
            [gap],
            [at],
            xerr=None if math.isnan(half) else [half],
            fmt="D",
            ms=5,
            color=colors[x.arm],
            capsize=4,
        )
    right.axvline(0.0, color="black", lw=0.8)
    right.set_yticks(range(len(shown)), [x.arm for x in shown])
    right.set(
        xlabel=f"gap of the late validation loss to {baseline}, %",
        title="Seeds, mean, 95% interval; shaded: the goal",
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# -- command line --


def names(value: str) -> list[str]:
    given = [part.strip() for part in value.split(",")]
    unknown = [part for part in given if part not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))}: not among {', '.join(ARMS)}")
    return given


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Callable[..., Any] = parser.add_argument
    default = f"the first {len(STUDIED)}"
    arms = ", ".join(ARMS).replace("%", "%%")
    add("--arms", type=names, default=STUDIED, help=f"comma-separated: {arms} (default: {default})")
    add(
        "--baseline", choices=list(ARMS), default=BASELINE, help="gaps are to this arm (default: %(default)s)"
    )
    add("--seeds", type=train_gpt.positive_int, default=5, help="seeds 0, 1, ... of each arm (default: 5)")
    add(
        "--steps", type=train_gpt.positive_int, default=Study.steps, help=f"of a run (default: {Study.steps})"
    )
    add(
        "--experts",
        type=int,
        default=Study.experts,
        help="instead of each MLP, two for each token (default: none)",
    )
    add("--demo", action="store_true", help="the demo's small GPT: 4 layers, 256 wide, 200 steps")
    add(
        "--jobs",
        type=train_gpt.positive_int,
        default=2,
        help="processes of one thread at a time (default: 2)",
    )
    add("--out", type=Path, default=PATH, help=f"results, continued if there are some (default: {PATH.name})")
    add("--show", action="store_true", help="train nothing: the table and plot of what is there")
    add("--plot", type=Path, metavar="PNG", help="draw curves and gaps")
    add("--update", type=Path, metavar="PAGE", help="write the table into this page")
    for internal in ("--worker", "--settings"):
        add(internal, help=argparse.SUPPRESS)
    add("--of", type=int, nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.worker:
        work(given.worker, given.of, Study(**json.loads(given.settings)))
        return
    study = DEMO if given.demo else Study(steps=given.steps, experts=given.experts)
    complete = given.show or run_missing(given.arms, given.seeds, given.jobs, given.out.resolve(), study)
    rows = [row for row in read(given.out, study) if row["arm"] in (*given.arms, given.baseline)]
    try:
        summaries = summarise(rows, given.baseline)
        print(overview(summaries, baseline=given.baseline))
        if given.update:
            written = overview(summaries, markdown=True, baseline=given.baseline)
            update(given.update, "training", f"{written}\n")
    except ValueError as error:
        sys.exit(f"benchmarks.recipes: {error}")
    if given.plot:
        plot(rows, given.plot, given.baseline)
    sys.exit(0 if complete else 1)


if __name__ == "__main__":
    main()
