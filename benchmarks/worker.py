"""The process of one arm. It reads commands from stdin, one JSON line each, and answers on a separate pipe.

    load      make the point, compile it for the arm, run the warm-up
    turn      timed steps
    profile   kernels by class, one by one, and the compiler's decisions
    unload    free everything but the process
    static    estimate a point without a device
    probe     describe the device

stdout and stderr go to the arm's log, because compilers print to them. A failure is an answer {"error": ...}.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from . import arms, machine
from .cases import CASES
from .cases.base import Task, parse_case
from .measure import Runner

TRITON_SOURCE = re.compile(r"async_compile\.triton\(\s*'(\w+)',\s*'''(.*?)'''", re.DOTALL)
_FP8_POINTER = re.compile(r"\*fp8e\w+")


class Worker:
    def __init__(self, device: str, interpreted: bool, torchao: str | None):
        self.device, self.interpreted = device, interpreted
        self.runner: Runner | None = None
        arms.prepare_process(interpreted, torchao)

    def probe(self) -> dict[str, Any]:
        return machine.describe_device(self.device)

    def load(self, case: str, size: str, arm: str, warmup: int) -> dict[str, Any]:
        """Make the point and run `warmup` steps. Returns `warmup_s`, the seconds of these steps, which
        compile, and their peak memory. What they have only cached is freed, for the next arm."""
        chosen, variant, _ = parse_case(case, CASES)
        os.environ.update(arms.ARMS[arm].env)
        point = chosen.point(size, variant)
        task = Task(point, self.device)
        how = arms.settings(arms.ARMS[arm], point.accumulate, self.interpreted)
        arms.apply(arms.ARMS[arm], task.model, how, point.compile == "block")
        task.start(arms.ARMS[arm].packed)
        self.runner = Runner(task)
        made = self.runner.warm_up(warmup)
        return {**made, "how": arms.describe(how), **self.runner.idle()}

    def turn(self, steps: int, lead: int, horizon: int) -> dict[str, Any]:
        assert self.runner is not None
        self.runner.horizon = horizon
        return self.runner.turn(steps, lead)

    def profile(self) -> dict[str, Any]:
        assert self.runner is not None
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        casts = cast_kernels(Path(cache)) if cache and self.device == "cuda" else set()
        return {**self.runner.profiles(casts), "decisions": decisions(self.runner.task.model)}

    def unload(self) -> dict[str, Any]:
        self.runner = None
        torch._dynamo.reset()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return {}

    def static(self, case: str, arm: str) -> dict[str, Any]:
        from . import static

        chosen, variant, _ = parse_case(case, CASES)
        described = chosen.static(variant)
        if described is None:
            raise ValueError("no estimate: see the case's description")
        return static.estimate(described, arms.ARMS[arm])


def cast_kernels(cache: Path) -> set[str]:
    """Names of the Triton kernels that have an FP8 pointer, of the modules that this process has loaded from
    an Inductor cache folder. (It may have others, of an earlier run, with the same names.)"""
    files = {Path(file) for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))}
    names = set()
    for path in files:
        if path.suffix != ".py" or cache not in path.parents:
            continue
        for name, source in TRITON_SOURCE.findall(path.read_text(errors="ignore")):
            if _FP8_POINTER.search(source) and not name.startswith("triton_tem"):
                names.add(name)
    return names


def decisions(model: torch.nn.Module) -> dict[str, Any] | None:
    """The decisions of fp8compile about the model's matmuls; None for an arm that it did not compile."""
    if "fp8compile.backend" not in sys.modules:
        return None
    import fp8compile

    report = fp8compile.report(model)
    training = [graph for graph in report.graphs if not graph.note] or report.graphs
    matmuls = [record for graph in training for record in graph.matmuls]
    fp8 = sum(record.decision == "fp8" for record in matmuls)
    return {
        "fp8": fp8,
        "high_precision": len(matmuls) - fp8,
        "fp8_flop_fraction": report.fp8_flop_fraction,
        "summary": report.summary() if matmuls else "",
    }


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return f"{type(error).__name__}: {text}"[:300]


def main() -> None:
    pipe = os.fdopen(int(sys.argv[1]), "w")
    worker: Worker | None = None
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        try:
            if name == "start":
                worker = Worker(**command)
                answer: dict[str, Any] = {}
            else:
                answer = getattr(worker, name)(**command)
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            answer = {"error": one_line(error)}
        print(json.dumps(answer), file=pipe, flush=True)


if __name__ == "__main__":
    main()
