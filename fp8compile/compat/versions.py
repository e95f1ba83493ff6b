"""The versions of torch with which this package was tested."""

from __future__ import annotations

import re
import warnings

OLDEST, NEWEST = (2, 11), (2, 15)


def check(version: str) -> None:
    """ImportError for a torch that is too old; a warning for one that is newer than all that we have tested."""
    found = re.match(r"(\d+)\.(\d+)", version)
    have = (int(found[1]), int(found[2])) if found else OLDEST
    oldest, newest = (".".join(map(str, number)) for number in (OLDEST, NEWEST))
    fix = f"pip install 'torch>={oldest},<{NEWEST[0]}.{NEWEST[1] + 1}'"
    if have < OLDEST:
        raise ImportError(f"fp8compile needs torch {oldest} or later, and this is {version}: {fix}")
    if have > NEWEST:
        told = f"fp8compile was tested with torch {oldest} to {newest}, and this is {version}"
        warnings.warn(f"{told}: private parts may have moved. If compiling fails: {fix}", RuntimeWarning, stacklevel=3)
