"""The command line: see the package."""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

from tests import conftest
from tests.equivalence.golden.cases import KINDS
from tests.equivalence.golden.text import EXPECTED, Sections, differences, read, write


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.equivalence.golden", description="Golden files: see the package."
    )
    parser.add_argument("command", choices=("write", "check"))
    parser.add_argument("--kind", action="append", choices=KINDS, help="what to make; all, if none is given")
    parser.add_argument("--only", default="", metavar="NAME", help="cases whose names begin so")
    parser.add_argument("--folder", type=Path, default=EXPECTED, help="where the files are")
    given = parser.parse_args()
    conftest.pytest_configure()
    made, wrong = defaultdict[str, Sections](dict), 0
    chosen = [
        (kind, name) for kind in given.kind or KINDS for name in KINDS[kind][1] if name.startswith(given.only)
    ]
    for kind, name in chosen:
        start, sections = time.monotonic(), KINDS[kind][0](name)
        print(f"{kind}: {name}, {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        found = differences(sections, given.folder) if given.command == "check" else []
        wrong += len(found)
        print("".join(f"{text}\n" for text in found), end="", flush=True)
        for file, lines in sections.items():
            made[file] |= lines
    for file, lines in made.items() if given.command == "write" else ():
        path = given.folder / f"{file}.txt"
        write(path, {**(read(path) if given.only else {}), **lines})
    print(f"{wrong} sections differ" if given.command == "check" else f"written to {given.folder}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
