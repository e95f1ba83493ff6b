"""Everything that leans on private parts of torch, in one place; read in 2.11, 2.13 and 2.15.

    dynamo      what Dynamo and AOTAutograd know about a graph
    inductor    compiling it with our passes
    launches    generated kernels in it
    running     while it runs
    split       the graph that DDP has cut

What moves between versions is handled here, in `described` (which stands in for a device) and nowhere else.
"""

from .dynamo import (
    add_input,
    copy_graph,
    guard_training,
    input_index,
    is_backward,
    is_joint_graph,
    is_of_backend,
    is_part,
    outermost,
    root_modules,
    shown,
    source_name,
    tag_backward,
)
from .inductor import (
    MUST_RECOMPUTE,
    MUST_SAVE,
    GraphPass,
    Partitioner,
    compile_fx,
    compile_inner,
    random_prims,
    sources_hash,
)
from .launches import (
    eliminate_dead_code,
    launch,
    launched,
    launches,
    load_kernel,
    max_autotune,
    reorders,
    size_node,
    stable_sort,
)
from .running import TensorMarks, in_backward, is_compiled, is_ddp, recomputing, saved_as_they_are, share_memory
from .split import forward_of, uncut

__all__ = [
    "GraphPass",
    "MUST_RECOMPUTE",
    "MUST_SAVE",
    "Partitioner",
    "TensorMarks",
    "add_input",
    "compile_fx",
    "compile_inner",
    "copy_graph",
    "eliminate_dead_code",
    "forward_of",
    "guard_training",
    "in_backward",
    "input_index",
    "is_backward",
    "is_compiled",
    "is_ddp",
    "is_joint_graph",
    "is_of_backend",
    "is_part",
    "launch",
    "launched",
    "launches",
    "load_kernel",
    "max_autotune",
    "outermost",
    "random_prims",
    "recomputing",
    "reorders",
    "root_modules",
    "saved_as_they_are",
    "share_memory",
    "shown",
    "size_node",
    "source_name",
    "sources_hash",
    "stable_sort",
    "tag_backward",
    "uncut",
]
