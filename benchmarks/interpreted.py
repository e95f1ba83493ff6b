"""FP8 graphs without Inductor, for figures in which time plays no part."""

from __future__ import annotations

import contextlib
from unittest import mock

from fp8compile.backend import fp8
from fp8compile.runtime.inner import INTERPRETER


def interpreted() -> contextlib.AbstractContextManager[None]:
    """Inside, what backend="fp8" compiles is rewritten and lowered as ever, and run by an FX interpreter."""
    return mock.patch.dict(fp8.__kwdefaults__, inner=INTERPRETER)
