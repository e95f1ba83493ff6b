"""Does training survive faults in a long run? FSDP2 x TP on 4 processes, with planted faults and without.

    python -m benchmarks.soak                                 # both arms, 300 steps, 4 processes on a CPU
    python -m benchmarks.soak --show --update notes/soak.md --plot notes/soak.png

A small Llama trains on 2 x 2 ranks: the MLPs are tensor parallel ("tp"), everything is sharded by FSDP2
("dp"), each block is compiled with backend="fp8". The ranks talk by gloo; graphs are interpreted. The loop
does what a trainer does: it clips gradients, skips a step whose loss or gradient norm over all ranks is not
finite, and saves a checkpoint every few steps, with `ScalingState`. The faults:

nan        the batch of one dp rank is NaN: the step is skipped, and no slot's history moves on the ranks that
           had it
loss       the loss of one dp rank is 1e6 times too large in one step: all gradients of its two ranks overflow
kill       one process gets SIGKILL; the launcher ends the others and starts all of them again from the last
           checkpoint
weight     one rank's shard of a norm's weight is 4096 times too large in one step: what the norm gives
           overflows on that rank and on the one that shares the shard, but not on their tensor-parallel
           neighbours

Results: one line of JSON a run. A step that ran twice, before the kill and after it, has to have the same
loss bitwise. `apart`: how far the copies that tensor-parallel neighbours have of one parameter are apart at
the end, `drift`: at checkpoints. The last fault drives them apart, since it hits one copy of a norm's weight.
DCP keeps one of the copies, so a run that resumed after it could not go on bitwise.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8compile
from fp8compile.distributed import fp8_all_gather
from fp8compile.ir import state_page

from . import machine
from .interpreted import interpreted
from .models import LLAMA_TINY, Llama, materialise
from .results import RESULTS
from .show import table
from .tables import update

sys.path.append(str(machine.ROOT / "examples"))
import train_gpt  # noqa: E402

PATH = RESULTS / "soak.jsonl"  # not a .json: those are results of `benchmarks.train`
RANKS = 4
ARMS: dict[str, tuple[dict[str, Any], bool]] = {  # options, and whether weights are gathered in FP8
    "delayed": ({"recipe": "delayed"}, False),
    "delayed, fp8 all-gather": ({"recipe": "delayed", "current_scaling": (False, True, False)}, True),
}
SHAPE = replace(LLAMA_TINY, kv_heads=2)  # with one, k and v are too narrow for FP8
STYLES = {"gate": ColwiseParallel, "up": ColwiseParallel, "down": RowwiseParallel}
LATE = 1 / 6  # of the run, whose mean is its late loss

Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """Steps (from 0) of the faults; None: it does not happen. `length` and `batch`: of one dp rank."""

    steps: int = 300
    nan: int | None = 70
    loss: int | None = 110
    kill: int | None = 145
    weight: int | None = 200
    save: int = 20  # steps between checkpoints
    length: int = 64
    batch: int = 4
    lr: float = 1e-3
    limit: float = 3600.0  # seconds for one run, after which it hangs

    @property
    def clean(self) -> Study:
        return replace(self, nan=None, weight=None, loss=None, kill=None)


# -- one process --


class Trainer:
    """A rank's part of the model, and one step of training."""

    def __init__(self, arm: str, study: Study):
        options, gathers = ARMS[arm]
        self.study, self.rank = study, dist.get_rank()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.dp, self.tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
        self.tp_group = mesh.get_group("tp")
        text = train_gpt.load_text()
        self.text, _ = train_gpt.split_text(text, study.length)
        self.model = materialise(lambda: Llama(SHAPE, study.length), "cpu", torch.float32)
        for layer in self.model.layers:
            parallelize_module(layer, mesh["tp"], {name: style() for name, style in STYLES.items()})
            layer.compile(backend="fp8", fullgraph=True, options=options, dynamic=False)
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(self.model, mesh=mesh["dp"])
        if gathers:
            fp8_all_gather(self.model)
        self.factor = 1.0  # of what the embedding gives
        self.model.tokens.register_forward_hook(lambda module, args, out: out * self.factor)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=study.lr, betas=(0.9, 0.95), foreach=False
        )

    def checkpoint(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaling": fp8compile.ScalingState(self.model)}

    def save(self, folder: Path, step: int) -> None:
        dcp.save(self.checkpoint(), checkpoint_id=folder / f"{step:06}")

    def load(self, folder: Path) -> int:
        """The step to begin with. A checkpoint counts once its metadata is there, which DCP writes last."""
        found = sorted(folder.glob("*/.metadata"))
        if not found:
            return 0
        state = self.checkpoint()
        dcp.load(state, checkpoint_id=found[-1].parent)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        return int(found[-1].parent.name)

    def step(self, number: int) -> Row:
        """One step, the same numbers on all ranks; `ranks` has what each rank has seen."""
        study = self.study
        generator = torch.Generator().manual_seed(2 * number + self.dp)
        starts = torch.randint(len(self.text) - study.length - 1, (study.batch,), generator=generator)
        tokens, targets = train_gpt.windows(self.text, starts, study.length, "cpu")
        met, before, undo = self.overflows(), self.histories(), self.plant(number)
        loss = self.model(tokens, targets)
        (loss * (1e6 if number == study.loss and self.dp == 0 else 1.0)).backward()
        undo()
        after = self.histories()
        whole, norm = self.over_all_ranks(loss.detach())
        finite = bool(torch.isfinite(whole) & torch.isfinite(norm))
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = train_gpt.learning_rate(number, study.steps, study.lr)
            for parameter in self.model.parameters():
                parameter.grad.mul_((1.0 / norm).clamp(max=1.0))
            self.optimizer.step()
        self.optimizer.zero_grad()
        mine = {
            "bad": sum(not torch.isfinite(row).all().item() for row in after.values()),
            "moved": sum(
                name not in before or not torch.equal(before[name], row) for name, row in after.items()
            ),
            "slots": len(after),
            "overflows": [name for name, count in self.overflows().items() if count > met.get(name, 0.0)],
        }
        ranks: list[Any] = [None] * RANKS
        dist.all_gather_object(ranks, mine)
        return {
            "step": number,
            "loss": whole.item(),
            "norm": norm.item(),
            "skipped": not finite,
            "ranks": ranks,
        }

    def plant(self, number: int) -> Callable[[], None]:
        """The faults of this step that happen before it. Returns what takes them back."""
        study, kept = self.study, None
        self.factor = float("nan") if number == study.nan and self.dp == 1 else 1.0
        if number == study.weight and self.rank == 3:
            shard = self.model.layers[1].mlp_norm.weight.to_local()
            kept = shard.detach().clone()
            with torch.no_grad():
                shard.mul_(4096.0)

        def undo() -> None:
            if kept is not None:
                with torch.no_grad():
                    shard.copy_(kept)

        return undo

    def rows(self) -> dict[str, Tensor]:
        """The state of each slot."""
        scaling = fp8compile.ScalingState(self.model, all_ranks=False)
        state = scaling.state_dict() if fp8compile.report(self.model).graphs else {}
        return {name: row for name, row in state.items() if row.numel() > 1}

    def histories(self) -> dict[str, Tensor]:
        return {name: row[state_page.HISTORY : -1] for name, row in self.rows().items()}

    def overflows(self) -> dict[str, float]:
        """How many each slot has had."""
        return {name: float(row[state_page.OVERFLOWS]) for name, row in self.rows().items()}

    def over_all_ranks(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss, and the norm of the whole gradient. What is not tensor parallel is there twice."""
        squares = torch.zeros(())
        for parameter in self.model.parameters():
            square = parameter.grad.to_local().square().sum()
            squares += square if parameter.device_mesh.ndim == 2 else square / 2
        both = torch.stack((loss / RANKS, squares))
        dist.all_reduce(both)
        return both[0], both[1].sqrt()

    def apart(self) -> float:
        """How far the copies on tp ranks of what is not tensor parallel are apart: |difference| / |value|,
        the largest."""
        worst = 0.0
        for parameter in self.model.parameters():
            if parameter.device_mesh.ndim == 1:
                mine = parameter.to_local().detach()
                both = [torch.empty_like(mine) for _ in range(2)]
                dist.all_gather(both, mine.contiguous(), group=self.tp_group)
                worst = max(worst, float((both[0] - both[1]).norm() / both[0].norm()))
        every: list[Any] = [None] * RANKS
        dist.all_gather_object(every, worst)
        return max(every)


def _process(rank: int, arm: str, study: Study, attempt: int, folder: str) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=300)
    store = f"file://{folder}/store-{attempt}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=limit)
    with interpreted():
        trainer = Trainer(arm, study)
        saved = Path(folder) / "saved"
        for number in range(trainer.load(saved), study.steps):
            if number == study.kill and attempt == 0 and rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            row = {**trainer.step(number), "attempt": attempt}
            saves = (number + 1) % study.save == 0
            row["apart"] = trainer.apart() if saves else None
            if rank == 0:
                with open(Path(folder) / "steps", "a") as file:
                    file.write(json.dumps(row) + "\n")
            if saves:
                trainer.save(saved, number + 1)
        gathered = fp8compile.report(trainer.model).gathered
        end = {"apart": trainer.apart(), "gathered": sum(record.gathered == "fp8" for record in gathered)}
    if rank == 0:
        (Path(folder) / "end").write_text(json.dumps(end))
    dist.destroy_process_group()


# -- the launcher --


def run(arm: str, study: Study) -> Row:
    """Train, again from the last checkpoint if a process is killed. RuntimeError if one hangs or dies."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        for attempt in range(2 if study.kill is not None else 1):
            codes = _attempt(arm, study, attempt, folder, began + study.limit)
            if not any(codes):
                break
            if attempt or study.kill is None or -signal.SIGKILL not in codes:
                raise RuntimeError(f"soak: processes ended with {codes}")
        steps = [json.loads(line) for line in (Path(folder) / "steps").read_text().splitlines()]
        end = json.loads((Path(folder) / "end").read_text())
    return {
        "arm": arm,
        **asdict(study),
        **end,
        "seconds": round(time.monotonic() - began),
        **summary(steps, study),
    }


def _attempt(arm: str, study: Study, attempt: int, folder: str, deadline: float) -> list[int]:
    """The exit codes. As torchrun does, it ends all processes when one has died."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])  # torch is imported once
    processes = [
        server.Process(target=_process, args=(rank, arm, study, attempt, folder)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        while any(process.is_alive() for process in processes) and not any(
            process.exitcode for process in processes
        ):
            if time.monotonic() > deadline:
                raise RuntimeError(f"soak: {arm}: hangs")
            time.sleep(0.2)
        codes = [process.exitcode or 0 for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return codes


def summary(steps: Sequence[Row], study: Study) -> Row:
    """What is kept of the steps. `replayed`: steps before the kill that ran again, `alike` bitwise."""
    last = {row["step"]: row for row in steps}
    first = {row["step"]: row for row in steps if row["attempt"] == 0}
    replayed = [row for row in steps if row["attempt"] and row["step"] in first]
    losses = [last[number]["loss"] for number in range(study.steps)]
    late = losses[-max(1, round(study.steps * LATE)) :]
    faults = {
        name: last[step] for name in ("nan", "loss", "weight") if (step := getattr(study, name)) is not None
    }
    return {
        "late": statistics.fmean(late),
        "bad": sum(rank["bad"] for row in steps for rank in row["ranks"]),
        "skipped": [row["step"] for row in last.values() if row["skipped"]],
        "replayed": len(replayed),
        "alike": sum(row["loss"] == first[row["step"]]["loss"] for row in replayed),
        "faults": faults,
        "drift": [[row["step"], row["apart"]] for row in last.values() if row["apart"] is not None],
        "losses": [round(loss, 5) if loss == loss else None for loss in losses],
    }


# -- what is shown --


def read(path: Path = PATH) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tabled(rows: Sequence[Row]) -> str:
    clean = {row["arm"]: row["late"] for row in rows if row["nan"] is None}
    lines = []
    for row in rows:
        gap = (
            f"{row['late'] / clean[row['arm']] - 1:+.2%}"
            if row["arm"] in clean and row["nan"] is not None
            else ""
        )
        replayed = f"{row['alike']} of {row['replayed']}" if row["replayed"] else ""
        overflows = [
            "+".join(str(len(x["overflows"])) for x in fault["ranks"]) for fault in row["faults"].values()
        ]
        run = "clean" if row["nan"] is None else "faults"
        cells = [row["arm"], run, f"{row['late']:.4f}", gap, len(row["skipped"]), row["bad"], replayed]
        lines.append([*cells, ", ".join(overflows), f"{row['apart']:.1e}"])
    head = ["arm", "run", "late loss", "gap", "skipped", "bad slots", "replayed"]
    return table(lines, [*head, "overflows by rank", "apart"], markdown=True)


def plot(rows: Sequence[Row], path: Path) -> None:
    from .plot import pyplot

    plt = pyplot()
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    figure, axes = plt.subplots(1, len(arms), figsize=(5.0 * len(arms), 3.2), sharey=True, squeeze=False)
    for axis, arm in zip(axes[0], arms, strict=True):
        for row in (row for row in rows if row["arm"] == arm):
            losses = [float("nan") if loss is None else loss for loss in row["losses"]]
            clean = row["nan"] is None
            color, width, label = ("#b8bdc9", 2.0, "clean") if clean else ("#1b7f79", 1.0, "faults")
            axis.plot(losses, color=color, lw=width, label=label)
            for name in ("nan", "loss", "kill", "weight"):
                if row[name] is not None:
                    axis.axvline(row[name], color="#e08e45", lw=0.8)
                    axis.text(
                        row[name],
                        0.98,
                        name,
                        transform=axis.get_xaxis_transform(),
                        rotation=90,
                        va="top",
                        ha="right",
                    )
        axis.set(title=arm, xlabel="step", ylim=(1.8, 6.0))
        axis.legend(loc="lower left")
    axes[0][0].set_ylabel("training loss")
    figure.tight_layout()
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", action="append", choices=tuple(ARMS), help="default: all")
    parser.add_argument("--only", choices=("clean", "faults"), help="default: both")
    parser.add_argument(
        "--steps", type=int, default=Study.steps, help="default: %(default)s; the faults need 201"
    )
    parser.add_argument("--show", action="store_true", help="train nothing")
    parser.add_argument("--out", type=Path, default=PATH, help="one line of JSON a run")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table into this page")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    given = parser.parse_args(argv)
    rows = read(given.out)
    for arm in () if given.show else given.arm or ARMS:
        study = Study(steps=given.steps)
        for one in {"clean": (study.clean,), "faults": (study,)}.get(given.only, (study.clean, study)):
            made = {
                **run(arm, one),
                "date": machine.now(),
                **machine.commit(),
                "versions": machine.versions(),
            }
            rows = [row for row in rows if (row["arm"], row["nan"] is None) != (arm, one.nan is None)] + [
                made
            ]
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows.sort(key=lambda row: (row["arm"], row["nan"] is not None))
    body = tabled(rows)
    print(body)
    if given.update:
        update(given.update, "soak", body + "\n")
    if given.plot:
        plot(rows, given.plot)


if __name__ == "__main__":
    main()
