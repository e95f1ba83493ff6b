"""All code that uses private parts of torch. They were read in torch 2.11, 2.13 and 2.15.

    process_groups  process groups, and what their ranks agree on
    dynamo      what Dynamo and AOTAutograd know about a graph
    fsdp        what FSDP2 manages
    flat        what FSDP1 manages
    shards      which part of a tensor a rank has, and the groups of its mesh
    inductor    compiling a graph with our passes
    aot_cache   callables of ours in AOTAutograd's cache
    triton      generated kernels in a graph
    autograd    while a graph runs
    split       the graph that DDP has cut
    regions     graphs that a graph calls
    versions    which versions of torch these are

Differences between versions are handled here, in `dryrun.fake_gpu` (which stands in for a device), and nowhere else.
"""

import torch

from . import versions

versions.check(torch.__version__)  # first: the imports below use private parts

from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from .aot_cache import Saved, cache_is_on, has_hooks, modes, modules_of_nodes, options_by_thread, saved
from .autograd import (
    Checkpoint,
    TensorMarks,
    capturing,
    checkpoint,
    compiled_autograd,
    hooked,
    hooks_after_step,
    in_backward,
    in_compiled_autograd,
    is_compiled,
    is_compiled_itself,
    is_ddp,
    no_torch_function,
    recomputing,
    repeating,
    saved_as_they_are,
    share_memory,
    storage_of,
    unseen,
)
from .dynamo import (
    add_input,
    as_parameter,
    called,
    compiled_code_goes,
    compiling,
    copy_graph,
    differentiates,
    gradient_outputs,
    guard_attribute,
    input_index,
    is_backward,
    is_joint_graph,
    is_of_backend,
    is_part,
    is_tangent,
    is_whole,
    let_go,
    other_code,
    outermost,
    restart,
    root_modules,
    rows_vary,
    shown,
    source_name,
    symbolic_kernels,
    tag_backward,
    undisabled,
)
from .flat import freed, is_flattened, is_packed, on_refusal, owners, packed, shapes
from .fsdp import (
    Shard,
    ShardedParameter,
    class_name,
    is_fully_sharded,
    listen,
    no_versions,
    reduce_shards_by,
    resharded,
    shard_ranks,
    sharded_pairs,
    sharded_parameters,
)
from .inductor import (
    MUST_RECOMPUTE,
    MUST_SAVE,
    GraphPass,
    Partitioner,
    async_tensor_parallel,
    changes_collectives,
    chunks,
    compile_fx,
    compile_inner,
    cuda_graphs,
    decompositions,
    inductor_config,
    inductor_modes,
    inductor_type,
    is_checkpointed,
    keep_instead,
    keep_saved_tensors,
    no_version_check,
    random_prims,
)
from .process_groups import (
    ALL_GATHER,
    ALL_TO_ALL,
    WAIT,
    Alone,
    all_gather,
    different,
    group_name,
    has_groups,
    in_pipeline,
    inferring_shapes,
    is_default_group,
    largest,
    rank_in,
    ranks_of,
    reduce_scatter,
)
from .regions import inline_regions
from .shards import mesh_groups, parts
from .split import forward_of, uncut
from .triton import (
    converts_through_float16,
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
from .versions import rowwise_returns_float32
