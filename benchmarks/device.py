"""What `benchmarks/device.sh` runs: parts, each in a process with a limit, and an archive of all results.

    probe      packages, the device, one generated kernel, many FP8 matmuls             benchmarks.probe
    tests      the tests that need a GPU                                                benchmarks.gpu_tests
    matmuls    the matmuls that the cost model knows, attention, the device's rates     benchmarks.matmuls,
                                                                                        calibrate
    kernels    casts with their producers                                               benchmarks.kernels
    layers     Llama-3-8B layers, by class of kernel                                    benchmarks.train
    gpt2       GPT-2 124M
    memory     peak memory of step 1 and of warm steps, in bf16 and in FP8
    first      probe, tests, matmuls, kernels, layers

A part that fails, or reaches its limit, leaves what it has written; the next one gets the time that others
have left. The archive is written anew while parts run, so that it is there whatever happens to this process.
Nothing is imported here that may be missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import lines, show

ROOT = Path(__file__).resolve().parents[1]
TRAIN = "benchmarks.train --no-warm-compile --keep {work} --case"
FP8 = "--arms bf16,fp8-delayed"
FEW = "--arms fp8-delayed --steps 1 --warmup 1"


class Step(NamedTuple):
    """One command of a part. `seconds`: its share of the time. `cpu`: its flags on a CPU; None: GPU only."""

    seconds: int
    command: str
    cpu: str | None = ""


PARTS: dict[str, tuple[Step, ...]] = {
    "probe": (Step(60, "benchmarks.probe {common}"),),
    "tests": (Step(120, "benchmarks.gpu_tests {common} --junit {results}/tests.xml"),),
    "matmuls": (
        Step(45, "benchmarks.matmuls {common}"),
        Step(35, "fp8compile calibrate", None),
    ),
    "kernels": (Step(90, "benchmarks.kernels {common}", "--family weight --shape 33x40"),),
    "layers": (
        Step(
            170, f"{TRAIN} llama-8b-layers:layers=2 {FP8},fp8-tensorwise --rounds 2 --steps 5 {{common}}", FEW
        ),
    ),
    "gpt2": (Step(400, f"{TRAIN} gpt2-124m {FP8},fp8-delayed-all --rounds 3 --steps 5 {{common}}", FEW),),
    "memory": tuple(
        Step(seconds, f"{TRAIN} {case} {FP8} --rebuild --rounds 1 --steps 3 {{common}}", None)
        for seconds, case in ((130, "llama-8b-layers:layers=4"), (220, "gpt2-124m"))
    ),
}
GROUPS = {"first": ("probe", "tests", "matmuls", "kernels", "layers")}
NEEDED = "torch triton numpy sympy networkx jinja2".split()
NEEDED_BY = {"tests": ["pytest"], "matmuls": ["click"], "gpt2": ["tqdm"], "memory": ["tqdm"]}
SPARE = 20  # seconds for everything around the parts
LEAST = 3.0  # seconds in which no step can do anything
GRACE = 10.0  # seconds between SIGTERM and SIGKILL
PACK = 20.0  # seconds between two versions of the archive
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TAIL = 1 << 20  # bytes of a log that are kept
FACTS = """
import sys, torch, triton
print("python", sys.version.split()[0], "| torch", torch.__version__, "| triton", triton.__version__, end="")
if sys.argv[1] == "cuda":
    if not torch.cuda.is_available():
        sys.exit("\\nmissing: a GPU (torch sees no CUDA device); DEVICE=cpu runs tiny sizes")
    p = torch.cuda.get_device_properties(0)
    print(f" | {p.name}, capability {p.major}.{p.minor}, {p.total_memory / 1e9:.0f} GB", end="")
    if torch.version.hip is None and (p.major, p.minor) < (8, 9):
        sys.exit("\\nmissing: a GPU with FP8 matmuls (compute capability 8.9)")
print(flush=True)
"""


class Stopped(Exception):
    """Someone asked this process to stop."""


def stop(number: int, _frame: Any) -> None:
    for each in SIGNALS:  # once is enough
        signal.signal(each, signal.SIG_IGN)
    raise Stopped(signal.Signals(number).name)


def missing(parts: Sequence[str]) -> list[str]:
    """What the parts need and is not there, by name."""
    packages = [*NEEDED, *(name for part in parts for name in NEEDED_BY.get(part, ()))]
    found = [
        f"{name} (a Python package)"
        for name in dict.fromkeys(packages)
        if importlib.util.find_spec(name) is None
    ]
    return found + [
        f"{name}/ (this is no checkout)" for name in ("tests", "examples") if not (ROOT / name).is_dir()
    ]


class Run:
    """One run of parts: a scratch folder with their results, and the archive."""

    def __init__(self, name: str, out: Path, device: str, end: float, more: Sequence[str]):
        self.device, self.end, self.more = device, end, more
        self.scratch = Path(tempfile.mkdtemp(prefix="fp8compile-device-"))
        self.results, self.work = self.scratch / "results", self.scratch / "work"
        self.results.mkdir()
        self.archive = out / f"{name}-{device}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz"
        self.packed = time.monotonic()
        self.steps: list[dict[str, Any]] = []

    def all(self, steps: Sequence[tuple[str, Step]]) -> None:
        """Each step gets its share of the time that is left; on a CPU, where imports take the most of it,
        equal ones."""
        possible = [step.seconds if self.device == "cuda" else int(step.cpu is not None) for _, step in steps]
        for number, (part, step) in enumerate(steps):
            limit = (self.end - time.monotonic()) * possible[number] / max(1, sum(possible[number:]))
            said = {
                "part": part,
                "command": step.command,
                "status": "out of time: not begun",
                "limit": round(limit, 1),
            }
            if not possible[number]:
                said["status"] = "needs a GPU: not begun"
            try:
                if possible[number] and limit >= LEAST:
                    self.one(part, step, limit, said)
            finally:
                self.steps.append(said)
                lines.add(self.results / "parts.jsonl", said)
                self.pack()

    def command(self, part: str, step: Step, seconds: float) -> list[str]:
        """The arguments of `python -m`, for a step that should end by itself after `seconds`."""
        # without imports; `train` begins nothing after it, and ends after 1.25 of it
        budget = max(1, int(0.8 * seconds))
        common = f"--device {self.device} --budget {budget} --json {self.results}/{part}.jsonl"
        text = step.command.format(common=common, results=self.results, work=self.work)
        if self.device == "cpu":
            text += " --interpreted " * text.startswith("benchmarks.train") + f" {step.cpu}"
        return [*shlex.split(text), *(self.more if text.startswith("benchmarks.") else ())]

    def one(self, part: str, step: Step, limit: float, said: dict[str, Any]) -> None:
        """Run a step until it ends or its limit comes. Its output goes into a log, and to the screen."""
        began, grace = time.monotonic(), min(GRACE, 0.2 * limit)
        command = self.command(part, step, limit - grace)
        said["command"] = shlex.join(["python", "-m", *command])
        print(f"\n== {part}: {said['command']} (at most {limit:.0f} s)", flush=True)
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_CACHE_DIR": str(self.scratch / "cache")}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        if command[0] == "fp8compile":
            # what it writes, and no other part reads
            env["FP8COMPILE_DEVICES"] = str(self.results / "devices.toml")
        log = self.results / f"{part}.log"
        with log.open("ab") as file:
            shown = file.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env=env,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        asked = False
        try:
            while process.poll() is None and time.monotonic() < began + limit:
                time.sleep(0.2)
                shown = show_from(log, shown)
                if time.monotonic() > began + limit - grace and not asked:
                    process.terminate()
                    asked = True
                if time.monotonic() > self.packed + PACK:
                    self.pack()
        except Stopped as why:
            said["status"] = f"stopped by {why}"
            self.pack()  # at once: the end may be near
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(grace, 5.0))
            raise
        else:
            said["status"] = "stopped at its limit" if asked or process.poll() is None else process.returncode
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and those that it started
            process.wait()
            show_from(log, shown)
            last = log.read_text(errors="replace").strip().rpartition("\n")[2].strip()
            said |= {"seconds": round(time.monotonic() - began, 1), "last": last[:100]}
            if said["status"] not in (0, 1):
                print(f"== {part}: {said['status']}", flush=True)

    def pack(self) -> None:
        """Write the archive anew: results, and the ends of logs."""
        self.packed = time.monotonic()
        new = self.archive.with_name(f".{self.archive.name}")
        try:
            with tarfile.open(new, "w:gz") as tar:
                names = {file: file.name for file in self.results.iterdir()}
                names |= {file: f"logs/{file.parent.name}-{file.name}" for file in self.work.rglob("*.log")}
                for file, name in sorted(names.items()):
                    data = file.read_bytes()[-TAIL if file.suffix == ".log" else 0 :]
                    inside = tarfile.TarInfo(name)
                    inside.size, inside.mtime = len(data), int(file.stat().st_mtime)
                    tar.addfile(inside, io.BytesIO(data))
            new.replace(self.archive)
        finally:
            new.unlink(missing_ok=True)


def show_from(log: Path, position: int) -> int:
    """Print what stands in a log from a position on; the position after it."""
    with log.open("rb") as file:
        file.seek(position)
        data = file.read()
    sys.stdout.write(data.decode(errors="replace"))
    sys.stdout.flush()
    return position + len(data)


def main(argv: Sequence[str] | None = None) -> int:
    began, given = time.monotonic(), list(sys.argv[1:] if argv is None else argv)
    given, more = (
        (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    )
    names, device = [*PARTS, *GROUPS], os.environ.get("DEVICE", "cuda")
    usage = "%(prog)s PART ... [--limit SECONDS] [--out FOLDER] [-- FLAG ...]"
    parser = argparse.ArgumentParser(prog="benchmarks/device.sh", usage=usage, allow_abbrev=False)
    parser.add_argument(
        "parts",
        nargs="+",
        metavar="PART",
        help=f"{', '.join(names)}; FLAGs go to the commands of these parts",
    )
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="for everything (default: what the parts need)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "out" / "device",
        help="folder of the archive (default: out/device)",
    )
    args = parser.parse_args(given)
    for name, known in (*((part, names) for part in args.parts), (device, ("cuda", "cpu"))):
        if name not in known:
            parser.exit(2, f"benchmarks/device.sh: {name!r} is none of {', '.join(known)}\n")
    args.out.mkdir(parents=True, exist_ok=True)
    parts = list(dict.fromkeys(part for name in args.parts for part in GROUPS.get(name, (name,))))
    if lacks := missing(parts):
        print("\n".join(f"missing: {what}" for what in lacks), file=sys.stderr)
        return 2
    if subprocess.run([sys.executable, "-c", FACTS, device]).returncode:
        return 2
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        print("missing: the git checkout (results do not say which commit this is)", flush=True)
    steps = [(part, step) for part in parts for step in PARTS[part]]
    limit = args.limit or SPARE + sum(step.seconds for _, step in steps)
    run = Run("-".join(args.parts), args.out, device, began + limit - min(5.0, 0.05 * limit), more)
    status = 0
    for number in SIGNALS:
        signal.signal(number, stop)
    try:
        run.all(steps)
    except Stopped:
        status = 143
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        run.pack()
        shutil.rmtree(run.scratch, ignore_errors=True)
    rows = [[said["part"], said["status"], said.get("seconds"), said.get("last")] for said in run.steps]
    print("\n" + show.table(rows, ["part", "status", "seconds", "last line"]))
    print(f"{time.monotonic() - began:.0f} s; everything is in {run.archive}", flush=True)
    return status or int(any(said["status"] not in (0, "needs a GPU: not begun") for said in run.steps))


if __name__ == "__main__":
    sys.exit(main())
