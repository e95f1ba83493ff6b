"""The command line: see the package."""

from __future__ import annotations

import argparse
import os
import sys
import time

from . import HERE, ROOT, Mutant, mutants, problems
from .table import read, summary, write

TABLE = HERE / "results.txt"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="Plant faults, and see which tests find them."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="is each place there, exactly once?")
    run = commands.add_parser("run", help="plant each mutant in a copy, and look for a test that finds it")
    run.add_argument("ids", nargs="*", metavar="ID", help="all, if none is given")
    far = "how far to look: last time's test, the named ones, the room, make test, and make slow (all)"
    run.add_argument("--to", choices=("killer", "named", "room", "tier", "all"), default="room", help=far)
    longest = "for one test; a longer one hangs"
    run.add_argument("--limit", type=float, default=900.0, metavar="SECONDS", help=longest)
    run.add_argument("--show", action="store_true", help="print what pytest printed")
    given = parser.parse_args()
    if given.command == "check":
        found = problems()
        print("\n".join(found) or f"{len(mutants())} mutants: each place is there once")
        return int(bool(found))
    try:
        chosen = mutants(*given.ids)
    except ValueError as error:
        parser.error(str(error))
    return plant(given, chosen)


def plant(given: argparse.Namespace, chosen: list[Mutant]) -> int:
    """The exit status is 1 if a mutant survives."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    from .search import Search
    from .tree import Tree

    tree = Tree(ROOT, given.limit, given.show)
    done = []
    try:
        search = Search(tree, given.to)
        for mutant in chosen:
            start, rows = time.monotonic(), read(TABLE)
            row = search(mutant, rows[mutant.id].test if mutant.id in rows else "")
            done.append(row)
            write(TABLE, {**read(TABLE), row.id: row}, mutants())
            took = time.monotonic() - start
            print(f"{row.id:3} {row.tier:5} {took:5.0f} s  {row.test or mutant.fault}", flush=True)
        for test in search.broken:
            print(f"fails without any fault, and was left out: {test}")
    finally:
        tree.close()
    print(summary(done))
    return int(any(row.tier == "none" for row in done))


if __name__ == "__main__":
    sys.exit(main())
