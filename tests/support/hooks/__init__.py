"""What tests reach inside of fp8compile, all in this folder.

Tests enter by `torch.compile(model, backend="fp8")`, by public names, or by graphs as text. Where that does
not show enough, they ask this folder: a change of the inside changes it, and no test. Nothing here is
imported before it is used, so that tests of options and reports need no compiler.

Three ways to run a graph without Inductor's code generation, which takes seconds a graph:

interpreted    as our joint passes leave it, on the reference implementations of our operators: decisions,
               state, numerics
lowered        after our passes over each half, too: as Inductor would get it for a GPU, eagerly
traced         no half is run: what the passes decide and report
"""

from __future__ import annotations

from .base import *  # noqa: F403
from .caches import *  # noqa: F403
from .graphs import *  # noqa: F403
from .kernels import *  # noqa: F403
from .state import *  # noqa: F403
from .studies import *  # noqa: F403
from .waits import *  # noqa: F403
