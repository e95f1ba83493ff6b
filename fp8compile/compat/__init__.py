"""All code that uses private parts of torch. They were read in torch 2.11, 2.13 and 2.15. Differences between
versions are handled here and in `dryrun.fake_gpu` (which stands in for a device) only.
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
