"""Delete features from a copy of the project, and run the core's tests there: `make features`.

    python -m tests.without_features              each feature in turn, then all at once
    python -m tests.without_features merge save   these, in turn
    python -m tests.without_features --all        all at once

To delete a feature is to delete its folder, its import and its line in fp8compile/features/__init__.py, and
its tests.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FEATURES = sorted(path.parent.name for path in (ROOT / "fp8compile" / "features").glob("*/__init__.py"))
CORE = ("backend", "compat", "config", "devices", "frontend", "ir", "passes", "runtime")  # rooms of tests/
LEFT_OUT = (".git", ".venv*", "out", "build", ".hypothesis", ".*_cache", "*.egg-info", "__pycache__")
LIMIT = 1800  # seconds


def delete(folder: Path, names: Collection[str]) -> None:
    """Delete these features from a copy of the project."""
    listed = folder / "fp8compile" / "features" / "__init__.py"
    text = listed.read_text()
    for name in names:
        found = re.search(rf"^from \.{name} import (\w+)\n", text, re.MULTILINE)
        assert found is not None, name
        text = text.replace(found[0], "").replace(f"    {found[1]}(),\n", "")
        shutil.rmtree(folder / "fp8compile" / "features" / name)
        shutil.rmtree(folder / "tests" / "features" / name, ignore_errors=True)
    listed.write_text(text)


def run(names: Collection[str], jobs: str, tests: Collection[str] = CORE) -> tuple[int, str]:
    """pytest's exit code in a copy without these features, and its last words. `tests`: inside of tests/."""
    with tempfile.TemporaryDirectory(prefix="without-features-") as temporary:
        folder = Path(temporary) / "project"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
        delete(folder, names)
        command = [sys.executable, *"-m pytest -q --dist loadfile -p no:cacheprovider -n".split(), jobs]
        chosen = ["-m", "not slow and not weekly and not compiled", *[f"tests/{one}" for one in tests]]
        path = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, *chosen], cwd=folder, env=path, capture_output=True, text=True, timeout=LIMIT
        )
    return done.returncode, done.stderr[-2000:] + done.stdout[-6000:]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.without_features")
    parser.add_argument(
        "features", nargs="*", choices=[*FEATURES, []], help="these in turn; none: each, then all at once"
    )
    parser.add_argument("--all", action="store_true", help="all of them at once")
    parser.add_argument("--jobs", default="2", help="test processes")
    chosen = parser.parse_args()
    several = [FEATURES] if chosen.all else [[name] for name in chosen.features or FEATURES]
    several += [FEATURES] if not (chosen.all or chosen.features) else []
    bad = 0
    for names in several:
        begun = time.monotonic()
        code, said = run(names, chosen.jobs)
        last = said.strip().splitlines()[-1] if said.strip() else ""
        print(
            f"without {'any' if names == FEATURES else names[0]}: {last} ({time.monotonic() - begun:.0f} s)",
            flush=True,
        )
        if code:
            bad += 1
            print(said)
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
