"""FP8 graphs without Inductor, for measurements that do not depend on time."""

from __future__ import annotations

import contextlib
from unittest import mock

from fp8compile.backend import fp8
from fp8compile.runtime.inner import INTERPRETER


def interpreted() -> contextlib.AbstractContextManager[None]:
    """Inside, backend="fp8" rewrites and lowers graphs as usual, and an FX interpreter runs them."""
    return mock.patch.dict(fp8.__kwdefaults__, inner=INTERPRETER)
