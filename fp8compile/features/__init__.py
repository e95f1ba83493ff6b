"""What the core works without (`make features`). A feature is a folder here and its line below.

Features stand on the core, and know nothing of each other. `extension` says what one may add. Where several
have passes at one place, they run in this order.
"""

from ..extension import register
from .async_tp import AsyncTensorParallel
from .chunked_logits import ChunkedLogits
from .collectives import FP8Collectives
from .compression import CompressedGradients
from .delayed import DelayedScaling
from .experts import Experts
from .export import Export
from .frozen import FrozenWeights
from .fsdp_gather import GatheredWeights
from .load import LoadedWeights
from .merge import MergedMatmuls
from .save import SavedTensors
from .schedule import RulesInTime
from .weight_cache import CachedWeights

FEATURES = (
    DelayedScaling(),
    Experts(),
    ChunkedLogits(),
    GatheredWeights(),
    FrozenWeights(),
    FP8Collectives(),
    LoadedWeights(),
    MergedMatmuls(),
    Export(),
    CachedWeights(),
    SavedTensors(),
    AsyncTensorParallel(),
    RulesInTime(),
    CompressedGradients(),
)
register(FEATURES)
