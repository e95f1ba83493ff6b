"""GPU architectures: which FP8 matmuls each one has, in which encodings, and the FLOP of a unit per clock.

    of((9, 0))              Hopper; an unlisted compute capability takes the newest older one that is listed
    of((9, 4), "gfx942")    an AMD GPU, found by its name: the longest listed prefix of the name

To add an architecture, add an entry to `ARCHITECTURES`. The support of torch's `_scaled_mm` was read in
aten/src/ATen/native/cuda/{ScaledBlas.cpp, RowwiseScaledMM.cu} of torch 2.11 to 2.15.
"""

from __future__ import annotations

from dataclasses import dataclass

Version = tuple[int, int]


@dataclass(frozen=True)
class Architecture:
    """The properties that all GPUs of an architecture share.

    These fields describe devices without a description (`catalog.derived`) and the fake GPU:

    `flop`: dense bf16 FLOP per clock of one compute unit: the published peak / (units * clock).
    `geforce_flop`: the same for GeForce boards, some of which run float32 accumulation at half rate. FP8 is
    twice as fast as bf16 on all of them. `shared`: KiB of shared memory of a unit. `shared_of_block`: the
    most KiB that one block may use. `threads`: threads of a unit. `warp`: threads of a warp.

    These fields describe FP8 matmuls. A version is the CUDA version that torch was built with; cuBLAS has the
    same version:

    `fp8`: the architecture multiplies FP8 with one scale per operand. `fnuz`: its FP8 encodings are AMD's
    first ones, "fnuz". `row_dtypes`: the output dtypes, by torch's names, of a matmul with one scale per row;
    None: the output dtypes of CUTLASS's kernel. `slow_rows`: CUTLASS's rowwise kernel is slow without fast
    accumulation. `blocks_from`: the first version whose cuBLASLt scales rows and 128-blocks; None: no version
    does. `mx_from`: the first version that multiplies 1 x 32 blocks with E8M0 scales; None: no version does.
    `either_major`: its tensor cores read 8-bit operands along either dimension from shared memory (tcgen05;
    others need the contracted one to be contiguous). `grouped`: `aten._scaled_grouped_mm` scales rows
    (Blackwell's refuses them or traps: pytorch#161780, #187095).
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
    either_major: bool = False
    grouped: bool = False


# keys: the compute capability of NVIDIA's, a prefix of the name of AMD's
ARCHITECTURES: dict[Version | str, Architecture] = {
    (8, 0): Architecture(2048, 2048, 164, 163, 2048, fp8=False),  # A100
    (8, 6): Architecture(1024, 512, 100, 99, 1536, fp8=False),  # A40, RTX 3090
    (8, 9): Architecture(1024, 512, 100, 99, 1536),  # L40S, RTX 4090
    # H100. Only Hopper scales 128-blocks: `_check_deepseek_support` in ScaledBlas.cpp
    (9, 0): Architecture(4096, 4096, 228, 227, 2048, slow_rows=True, blocks_from=(12, 9), grouped=True),
    (10, 0): Architecture(8192, 8192, 228, 227, 2048, mx_from=(12, 8), either_major=True),  # B200
    (11, 0): Architecture(8192, 8192, 228, 227, 2048, mx_from=(12, 9), either_major=True),  # Thor
    (12, 0): Architecture(1024, 512, 100, 99, 1536, mx_from=(12, 9)),  # RTX PRO 6000, RTX 5090
    # MI300X, the first one whose hipBLASLt scales rows ("only supports BFloat16 output")
    "gfx94": Architecture(2048, 2048, 64, 64, 2048, warp=64, fnuz=True, row_dtypes=("bfloat16",)),
    # MI355X. We do not use its matmuls of 1 x 32 blocks: the layout of their scales differs between ROCm
    # versions, and K has to be a multiple of 128
    "gfx95": Architecture(4096, 4096, 160, 160, 2048, warp=64, row_dtypes=("bfloat16",)),
    "gfx12": Architecture(1024, 1024, 64, 64, 2048, row_dtypes=()),  # RX 9070
    # other AMD GPUs: no FP8; the other numbers are an MI300X's
    "gfx9": Architecture(2048, 2048, 64, 64, 2048, warp=64, fp8=False, row_dtypes=()),
    "gfx": Architecture(2048, 2048, 64, 64, 2048, fp8=False, row_dtypes=()),
}
WITH_FP8 = tuple(key for key, architecture in ARCHITECTURES.items() if architecture.fp8)
OLDEST_NVIDIA = min(key for key in WITH_FP8 if isinstance(key, tuple))
AMD = tuple(key for key in WITH_FP8 if isinstance(key, str))


def of(capability: tuple[int, int], gfx: str = "") -> Architecture:
    """The architecture of an NVIDIA GPU by its `capability`, or of an AMD GPU by AMD's name of it, `gfx`."""
    if gfx:
        known = [key for key in ARCHITECTURES if isinstance(key, str) and gfx.startswith(key)]
        return ARCHITECTURES[max(known, key=len, default="gfx")]
    listed = [key for key in ARCHITECTURES if isinstance(key, tuple)]
    return ARCHITECTURES[max((key for key in listed if key <= capability), default=min(listed))]
