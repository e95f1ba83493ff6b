"""All code that uses private parts of torch. They were read in torch 2.11, 2.13 and 2.15.

    process_groups  process groups, and what their ranks agree on
    dynamo      what Dynamo and AOTAutograd know about a graph
    callbacks   what Dynamo is to call
    fsdp        what FSDP2 manages
    flat        what FSDP1 manages
    inductor    compiling a graph with our passes
    aot_cache   callables of ours in AOTAutograd's cache
    triton      generated kernels in a graph
    autograd    while a graph runs
    split       the graph that DDP has cut
    regions     graphs that a graph calls
    versions    which versions of torch these are

Differences between versions are handled here and in `dryrun.fake_gpu` (which stands in for a device) only.
"""

import torch

from . import versions

versions.check(torch.__version__)  # first: the imports below use private parts

from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from . import (
    aot_cache,
    autograd,
    callbacks,
    dynamo,
    flat,
    fsdp,
    inductor,
    process_groups,
    regions,
    split,
    triton,
)
