"""What all GPUs of an architecture have in common: which FP8 matmuls they have, in which encodings, how much a unit does.

    of((9, 0))              Hopper; of a compute capability that is not listed, the newest listed one that is not newer
    of((9, 4), "gfx942")    AMD's go by their names; a name that is not listed, by the longest beginning that is

A new architecture is an entry of `ARCHITECTURES`. What torch's `_scaled_mm` supports where was read in
aten/src/ATen/native/cuda/{ScaledBlas.cpp, RowwiseScaledMM.cu} of 2.11 to 2.15.
"""

from __future__ import annotations

from dataclasses import dataclass

Version = tuple[int, int]


@dataclass(frozen=True)
class Architecture:
    """For devices that nobody has described (`catalog.derived`), and for the fake GPU:

    `flop`: dense bf16 FLOP a clock that one compute unit does, the published peak / (units * clock); `geforce_flop`: that of
    GeForce boards, some of which run float32 accumulation at half rate. FP8 is twice as fast in all of them. `shared` and
    `shared_of_block`: KiB of shared memory, the unit's and the most of one block. `threads`: of a unit. `warp`: threads of one.

    For FP8 matmuls; a version is that of the CUDA that torch was built with, whose cuBLAS comes along:

    `fp8`: there are some, with one scale an operand. `fnuz`: they are in AMD's first encodings. `row_dtypes`: those, by torch's
    names, in which one with a scale a row returns; None: those of CUTLASS's kernel. `slow_rows`: that kernel is slow unless it
    accumulates fast. `blocks_from`: the first version whose cuBLASLt scales rows and 128-blocks; None: no version does.
    `mx_from`: the first version that multiplies 1 x 32 blocks with E8M0 scales.
    """

    flop: int
    geforce_flop: int
    shared: int
    shared_of_block: int
    threads: int
    warp: int = 32
    fp8: bool = True
    fnuz: bool = False
    row_dtypes: tuple[str, ...] | None = None
    slow_rows: bool = False
    blocks_from: Version | None = None
    mx_from: Version | None = None


# NVIDIA's by compute capability, AMD's by the beginning of their names
ARCHITECTURES: dict[Version | str, Architecture] = {
    # A100
    (8, 0): Architecture(2048, 2048, 164, 163, 2048, fp8=False),
    # A40, RTX 3090
    (8, 6): Architecture(1024, 512, 100, 99, 1536, fp8=False),
    # L40S, RTX 4090
    (8, 9): Architecture(1024, 512, 100, 99, 1536),
    # H100. 128-blocks on Hopper alone: `_check_deepseek_support` in ScaledBlas.cpp
    (9, 0): Architecture(4096, 4096, 228, 227, 2048, slow_rows=True, blocks_from=(12, 9)),
    # B200
    (10, 0): Architecture(8192, 8192, 228, 227, 2048, mx_from=(12, 8)),
    # Thor
    (11, 0): Architecture(8192, 8192, 228, 227, 2048, mx_from=(12, 9)),
    # RTX PRO 6000, RTX 5090
    (12, 0): Architecture(1024, 512, 100, 99, 1536, mx_from=(12, 9)),
    # MI300X. hipBLASLt scales rows from here on ("only supports BFloat16 output")
    "gfx94": Architecture(2048, 2048, 64, 64, 2048, warp=64, fnuz=True, row_dtypes=("bfloat16",)),
    # MI355X. Its 1 x 32 blocks are not used: the layout of their scales differs between ROCm versions, and K has to be a
    # multiple of 128
    "gfx95": Architecture(4096, 4096, 160, 160, 2048, warp=64, row_dtypes=("bfloat16",)),
    # RX 9070
    "gfx12": Architecture(1024, 1024, 64, 64, 2048, row_dtypes=()),
    # others of AMD: without FP8, and otherwise as an MI300X
    "gfx9": Architecture(2048, 2048, 64, 64, 2048, warp=64, fp8=False, row_dtypes=()),
    "gfx": Architecture(2048, 2048, 64, 64, 2048, fp8=False, row_dtypes=()),
}
WITH_FP8 = tuple(key for key, architecture in ARCHITECTURES.items() if architecture.fp8)
OLDEST_NVIDIA = min(key for key in WITH_FP8 if isinstance(key, tuple))
AMD = tuple(key for key in WITH_FP8 if isinstance(key, str))


def of(capability: tuple[int, int], gfx: str = "") -> Architecture:
    """The architecture of a GPU: `gfx` is AMD's name, "" for NVIDIA's, which go by `capability`."""
    if gfx:
        known = [key for key in ARCHITECTURES if isinstance(key, str) and gfx.startswith(key)]
        return ARCHITECTURES[max(known, key=len, default="gfx")]
    listed = [key for key in ARCHITECTURES if isinstance(key, tuple)]
    return ARCHITECTURES[max((key for key in listed if key <= capability), default=min(listed))]
