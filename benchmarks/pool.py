"""Starts workers and talks to them. One that dies or takes too long raises `WorkerFailed` with a reason."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def environment(**more: str) -> dict[str, str]:
    """The variables of a process that imports this checkout."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}


class WorkerFailed(Exception):
    """A worker failed. The message is short enough for a table."""


def exit_on_sigterm() -> None:
    """Let SIGTERM end this process as an error does, so that what is begun is stored and ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))


class Remote:
    """One worker process. `cache`: its Inductor cache folder; `log`: where its output goes (appended)."""

    def __init__(self, name: str, cache: Path, log: Path, timeout: float, **start: Any):
        self.name, self.log, self.timeout = name, log, timeout
        ours, theirs = os.pipe()
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
                env=environment(TORCHINDUCTOR_CACHE_DIR=str(cache), PYTHONUNBUFFERED="1"),
                start_new_session=True,  # so that `kill` ends Inductor's compile workers, too
            )
        os.close(theirs)
        self.answers = os.fdopen(ours, "rb", buffering=0)
        self.rest = b""
        self.started = False
        self.send("start", **start)  # the first `ask` waits for the answer

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        if not self.started:
            self.answer("start")
            self.started = True
        self.send(do, **arguments)
        return self.answer(do)

    def send(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed(self._obituary()) from None

    def answer(self, do: str) -> dict[str, Any]:
        answer = json.loads(self._line(do))
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def _line(self, do: str) -> bytes:
        deadline = time.monotonic() + self.timeout
        while b"\n" not in self.rest:
            if not select.select([self.answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.kill()
                raise WorkerFailed(f"timed out: {do} took more than {self.timeout:.0f} s")
            chunk = self.answers.read(1 << 20)
            if not chunk:
                raise WorkerFailed(self._obituary())
            self.rest += chunk
        line, _, self.rest = self.rest.partition(b"\n")
        return line

    def _obituary(self) -> str:
        code = self.process.wait()
        cause = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"worker died ({cause}): {lines[-1][:200] if lines else 'no output'}"

    def close(self) -> None:
        """End the process; its memory is free when this returns."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(timeout=20)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        self.kill()

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self.process.wait()
        self.answers.close()
