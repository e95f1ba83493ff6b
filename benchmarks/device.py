"""What `benchmarks/device.sh` runs: parts, each in a process with a limit, and an archive of all results.

benchmarks/README.md says what each part does. A part that fails, or reaches its limit, leaves what it has
written; the next one gets the time that others have left. The archive is written anew while parts run, so
that it is there whatever happens to this process. Compile caches stay in `out/caches`, so that the next call
compiles less. Nothing is imported here that may be missing.
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

from . import corpus, lines, machine, show
from .pool import ROOT, environment

CACHES = ROOT / "out" / "caches"
TRAIN = "benchmarks.train --keep {work} --caches {caches} {torchao} {common} --case"
LAYERS = f"{TRAIN} llama-8b-layers:layers=2"
FEW = "--arms fp8-delayed --rounds 2 --steps 1 --warmup 1"
SETTINGS = "kept fast-accum fast-dgrad swiglu-delayed no-fuse".split()


class Step(NamedTuple):
    """One command of a part. `seconds`: its share of the time. `cpu`: its flags on a CPU; None: GPU only."""

    seconds: int
    command: str
    cpu: str | None = ""


PARTS: dict[str, tuple[Step, ...]] = {
    "tests": (Step(120, "benchmarks.gpu_tests {common} {only}"),),
    "matmuls": (Step(45, "benchmarks.matmuls {common}"),),
    "kernels": (Step(90, "benchmarks.kernels {common}", "--family weight --shape 33x40"),),
    "layers": (Step(140, f"{LAYERS} --arms bf16,torchao-tensorwise,fp8-delayed", FEW),),
    "settings": (
        Step(
            140,
            f"{LAYERS} --arms fp8-delayed,{','.join(f'fp8-delayed-{name}' for name in SETTINGS)}",
            f"{FEW} --arms fp8-delayed-kept,fp8-delayed-no-fuse",
        ),
    ),
    "blocks": (
        Step(
            60,
            "benchmarks.blocks {common} --blocks 2 --processes 14 --family rms-norm rms-norm-parts "
            "rms-norm-backward-long layer-norm-backward-long gelu-backward swiglu-backward-merged",
            "--family rms-norm --processes 2",
        ),
    ),
    "short": (
        Step(85, f"{LAYERS},seq=2048 --arms bf16,torchao-tensorwise,fp8-delayed,fp8-delayed-kept", FEW),
    ),
    "update": (
        Step(
            75,
            f"{LAYERS},seq=2048 --arms bf16,bf16-packed,fp8-delayed-packed,fp8-delayed-update",
            f"{FEW} --arms fp8-delayed-update",
        ),
    ),
    "held": (
        Step(
            60,
            f"{TRAIN} qwen3-8b-lora --arms bf16,fp8-held-blocks,fp8-held-rows",
            "--arms fp8-held-blocks,fp8-held-rows --rounds 2 --steps 1 --warmup 1",
        ),
    ),
    "moe": tuple(
        Step(55, f"{TRAIN} {case} --arms bf16,torchao-experts,fp8-delayed,fp8-delayed-fast-accum", FEW)
        for case in ("moe", "moe:experts=mixtral")
    ),
    "gpt2": (
        Step(
            85, f"{TRAIN} gpt2-124m:compile=block,batch=16 --arms bf16,fp8-delayed,fp8-delayed-no-fuse", FEW
        ),
    ),
    "graphs": (
        Step(15, "benchmarks.gpu_tests {common} --only test_modes[reduce-overhead]", None),
        Step(
            45,
            f"{LAYERS},seq=2048 --arms bf16,bf16-graphs,fp8-delayed,fp8-delayed-graphs",
            f"{FEW} --arms fp8-delayed-graphs",
        ),
    ),
    "calibrate": (Step(30, "fp8compile calibrate", None),),
    "memory": tuple(
        Step(seconds, f"{TRAIN} {case} --arms bf16,fp8-delayed --rounds 1 --steps 3", None)
        for seconds, case in ((130, "llama-8b-layers:layers=4"), (220, "gpt2-124m"))
    ),
    # 240 s of timed steps for each arm; the rest are compilations and validations
    "curve": (
        Step(
            560,
            f"{TRAIN} loss:text=tokens,batch=32,compile=block --arms bf16,fp8-delayed --seconds 240 "
            "--steps 100 --budget {most}",
            "--arms eager-bf16,fp8-delayed --seconds 1 --steps 1 --warmup 1",
        ),
        Step(10, "benchmarks.plot {results}/curve.jsonl --out {results}"),
    ),
}
GROUPS = {
    "first": ("tests", "matmuls", "calibrate", "kernels", "layers"),
    "speed": ("tests", "layers", "settings", "blocks", "short"),
    "wider": ("moe", "gpt2", "graphs", "calibrate"),
}
NEEDED = "torch triton numpy sympy networkx jinja2 tabulate".split()
NEEDED_BY = {"tests": ["pytest"], "graphs": ["pytest"], "calibrate": ["click"]}
NEEDED_BY |= dict.fromkeys(("gpt2", "memory", "curve"), ["tqdm"])
SPARE = 20  # seconds for everything around the parts
# commands that FLAGs of a part do not go to, since they have others
NO_FLAGS = {"curve": ["benchmarks.plot"], "graphs": ["benchmarks.gpu_tests"]}
ONLY = 60  # seconds of tests that are named
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


def missing(parts: Sequence[str], device: str) -> list[str]:
    """What the parts need and is not there, by name."""
    packages = [*NEEDED, *(name for part in parts for name in NEEDED_BY.get(part, ()))]
    absent = [name for name in dict.fromkeys(packages) if importlib.util.find_spec(name) is None]
    found = [f"{name} (a Python package)" for name in absent]
    folders = [name for name in ("tests", "examples") if not (ROOT / name).is_dir()]
    found += [f"{name}/ (this is no checkout)" for name in folders]
    if "curve" in parts and device == "cuda" and not corpus.place().is_file():
        found.append(f"{corpus.place()}: python -m benchmarks.corpus makes it, on any machine")
    return found


class Run:
    """One run of parts: a scratch folder with their results, and the archive."""

    def __init__(self, args: argparse.Namespace, device: str, end: float, more: Sequence[str]):
        self.device, self.end, self.more = device, end, more
        self.only = shlex.join(["--only", *args.only]) if args.only else ""
        self.torchao = shlex.join(["--torchao", str(args.torchao)]) if args.torchao else ""
        self.scratch = Path(tempfile.mkdtemp(prefix="fp8compile-device-"))
        self.caches = CACHES if device == "cuda" else self.scratch / "caches"
        self.results, self.work = self.scratch / "results", self.scratch / "work"
        self.results.mkdir()
        self.work.mkdir()
        when = time.strftime("%Y%m%d-%H%M%S")
        self.archive = args.out / f"{'-'.join(args.parts)}-{device}-{when}.tar.gz"
        self.packed = time.monotonic()
        self.steps: list[dict[str, Any]] = []

    def all(self, steps: Sequence[tuple[str, Step]]) -> None:
        """Each step gets its share of the time that is left; on a CPU, where imports take the most of it,
        equal ones."""
        stopped: Stopped | None = None
        possible = [step.seconds if self.device == "cuda" else int(step.cpu is not None) for _, step in steps]
        for number, (part, step) in enumerate(steps):
            limit = (self.end - time.monotonic()) * possible[number] / max(1, sum(possible[number:]))
            said = {"part": part, "command": step.command, "limit": round(limit, 1)}
            said["status"] = "out of time: not begun"
            if not possible[number]:
                said["status"] = "needs a GPU: not begun"
            elif stopped is not None:
                said["status"] = f"stopped by {stopped}: not begun"
            try:
                if possible[number] and limit >= LEAST and stopped is None:
                    self.one(part, step, limit, said)
            except Stopped as why:
                stopped = why
            finally:
                self.steps.append(said)
                lines.add(self.results / "parts.jsonl", said)
                self.pack()
        if stopped is not None:
            raise stopped

    def command(self, part: str, step: Step, seconds: float) -> list[str]:
        """The arguments of `python -m`, for a step that should end by itself after `seconds`."""
        # without imports; `train` begins nothing after it, and ends after 1.25 of it
        budget = max(1, int(0.8 * seconds))
        common = f"--device {self.device} --budget {budget} --json {self.results}/{part}.jsonl"
        text = step.command.format(
            common=common,
            most=max(1, int(0.95 * seconds)),
            results=self.results,
            work=self.work,
            caches=self.caches,
            only=self.only,
            torchao=self.torchao,
        )
        if self.device == "cpu":
            text += " --interpreted " * text.startswith("benchmarks.train") + f" {step.cpu}"
        command = shlex.split(text)
        takes = command[0].startswith("benchmarks.") and command[0] not in NO_FLAGS.get(part, ())
        return [*command, *(self.more if takes else ())]

    def one(self, part: str, step: Step, limit: float, said: dict[str, Any]) -> None:
        """Run a step until it ends or its limit comes. Its output goes into a log, and to the screen."""
        began, grace = time.monotonic(), min(GRACE, 0.2 * limit)
        command = self.command(part, step, limit - grace)
        said["command"] = shlex.join(["python", "-m", *command])
        print(f"\n== {part}: {said['command']} (at most {limit:.0f} s)", flush=True)
        env = environment(PYTHONUNBUFFERED="1", TORCHINDUCTOR_CACHE_DIR=str(self.caches / part))
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
    at = given.index("--") if "--" in given else len(given)
    given, more = given[:at], given[at + 1 :]
    names, device = [*PARTS, *GROUPS], os.environ.get("DEVICE", "cuda")
    usage = "%(prog)s PART ... [--limit SECONDS] [--only TEST ...] [--torchao PATH] [--out FOLDER]"
    usage += " [-- FLAG ...]"
    parser = argparse.ArgumentParser(prog="benchmarks/device.sh", usage=usage, allow_abbrev=False)
    add, out = parser.add_argument, ROOT / "out" / "device"
    add("parts", nargs="+", metavar="PART", help=f"of {', '.join(names)}; FLAGs go to their commands")
    add("--limit", type=float, metavar="SECONDS", help="for everything (default: what the parts need)")
    add("--only", nargs="+", default=[], metavar="TEST", help="of the part `tests`")
    add("--torchao", type=Path, metavar="PATH", help="its wheel or folder, for its arms")
    add("--out", type=Path, default=out, help="folder of the archive (default: out/device)")
    args = parser.parse_args(given)
    for name, known in (*((part, names) for part in args.parts), (device, ("cuda", "cpu"))):
        if name not in known:
            parser.exit(2, f"benchmarks/device.sh: {name!r} is none of {', '.join(known)}\n")
    args.out.mkdir(parents=True, exist_ok=True)
    parts = list(dict.fromkeys(part for name in args.parts for part in GROUPS.get(name, (name,))))
    if lacks := missing(parts, device):
        print("\n".join(f"missing: {what}" for what in lacks), file=sys.stderr)
        return 2
    if subprocess.run([sys.executable, "-c", FACTS, device]).returncode:
        return 2
    commit = machine.commit()
    if commit["commit"] is None:
        print("missing: the git checkout (results do not say which commit this is)", flush=True)
    steps = [(part, step) for part in parts for step in PARTS[part]]
    if args.only:
        steps = [(part, step._replace(seconds=ONLY) if part == "tests" else step) for part, step in steps]
    limit = args.limit or SPARE + sum(step.seconds for _, step in steps)
    end = began + limit - min(5.0, 0.05 * limit)
    run = Run(args, device, end, more)
    lines.add(run.results / "parts.jsonl", commit)
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
