"""How long a matmul takes in bf16 and in FP8, and what casting its operands costs: arithmetic on sizes, no graph, no tensors.

    gemm(device, m, n, k, "bf16")           seconds of out[m, n] = a[m, k] @ b[k, n]
    casts(device, CastInput(...), scaling)  seconds that the FP8 copies of one tensor cost
    break_even(gain)                        the number of tokens from which something gains

**Matmul**  ``max(compute, bytes / bandwidth) + launch``. Compute is counted in waves: the output is cut into tiles, each unit
(SM, CU) works on one at a time, and the last wave is as long as a full one. A tile takes ``2 bm bn (k + ramp)`` FLOP of its
unit's share of the sustained rate, where `ramp` is what filling the pipeline costs; tiles smaller than 128 x 256 run at a part
of the rate. Tiles and a split of k are chosen as the best, as a library does. FP8 steps through k twice as deep, so its ramp is
twice as long, and its kernels start later: small and odd sizes lose.

**Casts**  bytes read and written, and launches. A `ScalingCost` says how often a recipe walks over a tensor: `delayed`,
`blockwise` and `mxfp8` once, `tensorwise` for the amax and again for the cast, `rowwise` so for each layout. Where the
producer's kernel casts, its reads are free and, if nobody reads the tensor in high precision any more, not writing that is a
gain: costs can be negative.

The sources of the constants are in docs/cost-model.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from .catalog import Device

# tile of the output and the part of the sustained rate that it reaches: a smaller one reuses less of what it loads
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.92), (64, 128, 0.7), (128, 64, 0.7), (64, 64, 0.5))
SPLITS = (1, 2, 4, 8, 16)  # parts of k that are worked on side by side and added up in float32
RAMP = {"fp8": 512}
RAMP_OTHERS = 256
FP8_START_S = 2e-6  # an FP8 matmul of 256 x 256 x 256 takes 6 us on an H100, one in bf16 3.7
STRIDED = 1 / 0.58  # how much longer a walk along columns of memory takes: Inductor's transposes reach 58% of the bandwidth
ITEMSIZE = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
LARGEST = 1 << 20


@dataclass(frozen=True)
class ScalingCost:
    """What a way of scaling costs; `config.recipe` has that of each recipe.

    `walks` over a tensor, those of the amax and of the casts. `for_each_layout`: each copy has such walks of its own.
    `amax_apart`: where no kernel takes the tensor in, the amax is a walk more. `small_kernels`: those that a tensor adds
    besides (scale, inverse). `once`: those that a graph adds, both directions together. `copy_bytes`: an element of a copy,
    with its scales. `gemm_rate`: of its matmuls, as a part of the rate with one scale.
    """

    walks: int = 1
    for_each_layout: bool = False
    amax_apart: bool = False
    small_kernels: int = 0
    once: int = 0
    copy_bytes: float = 1
    gemm_rate: float = 1.0


@functools.lru_cache(maxsize=1 << 16)
def gemm(device: Device, m: int, n: int, k: int, dtype: str = "bf16", out_bytes: int = 2, instead: str = "bf16") -> float:
    """Seconds of out[m, n] = a[m, k] @ b[k, n] with operands of `dtype` ("fp8", "bf16", "fp16", "fp32").

    `out_bytes` is the itemsize of the output. For FP8, `instead` is what it would be without: it is not credited with more
    than it saves at full efficiency, since how much of a wave bf16 wastes is too uncertain to be FP8's gain.
    ValueError for FP8 on a device without.
    """
    if dtype == "fp8" and not device.has_fp8:
        raise ValueError(f"{device.name} has no FP8")
    seconds = _waves(device, m, n, k, dtype, out_bytes)
    if dtype != "fp8":
        return seconds
    full, fp8 = (_roofline(device, m, n, k, name, out_bytes) for name in (instead, dtype))
    return max(seconds, _waves(device, m, n, k, instead, out_bytes) - (full - fp8))


def block_gemm(
    device: Device,
    m: int,
    n: int,
    k: int,
    scaling: ScalingCost,
    out_bytes: int = 2,
    instead: str = "bf16",
    emulated: bool = False,
) -> float:
    """Seconds of an FP8 matmul under the scaling of its operands. `emulated`: the device has none for it, the copies are
    converted to bf16 and multiplied as such."""
    if emulated:
        widened = 3 * (m * k + n * k) / device.bandwidth + 2 * device.launch
        return gemm(device, m, n, k, "bf16", out_bytes) + widened
    return gemm(device, m, n, k, "fp8", out_bytes, instead) / scaling.gemm_rate


def _roofline(device: Device, m: int, n: int, k: int, dtype: str, out_bytes: int) -> float:
    return max(2 * m * n * k / device.flops.of(dtype), _moved(m, n, k, dtype, out_bytes) / device.bandwidth)


def _moved(m: int, n: int, k: int, dtype: str, out_bytes: int) -> int:
    return ITEMSIZE[dtype] * (m * k + k * n) + out_bytes * m * n


def _waves(device: Device, m: int, n: int, k: int, dtype: str, out_bytes: int) -> float:
    unit_rate = device.flops.of(dtype) / device.sms
    ramp = RAMP.get(dtype, RAMP_OTHERS)
    ways = []
    for rows, columns, part in TILES:
        tiles = _ceil_div(m, rows) * _ceil_div(n, columns)
        for split in SPLITS:
            waves = _ceil_div(tiles * split, device.sms)
            compute = waves * (2 * rows * columns * (k / split + ramp)) / (part * unit_rate)
            # partial sums are written and read once more
            ways.append(compute + (8 * split * m * n / device.bandwidth + device.launch if split > 1 else 0))
    start = device.launch + (FP8_START_S if dtype == "fp8" else 0)
    return max(min(ways), _moved(m, n, k, dtype, out_bytes) / device.bandwidth) + start


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class CastInput:
    """A tensor that matmuls read, and that is to be cast.

    `itemsize` is of the tensor in memory, bytes. `scattered`: concatenated from others, which no kernel takes in: the amax and
    each copy are walks of their own. `fused`: a kernel computes the tensor anyway, and its casts join that kernel; it reads
    `producer_bytes`, which a second walk reads again. Otherwise, and if it is written in high precision as well, the tensor is
    in memory and is read. `high_bytes` is the itemsize in which matmuls in high precision, or others, read it besides; 0:
    nobody. A fused producer has to write that; a tensor in memory of another itemsize (float32 under autocast) is converted.
    """

    elements: int
    itemsize: int = 2
    fused: bool = False
    producer_bytes: int = 0
    scattered: bool = False
    high_bytes: int = 0


def casts(device: Device, tensor: CastInput, scaling: ScalingCost, layouts: int = 2, again: bool = False) -> float:
    """Seconds for the FP8 copies of one tensor, shared by all its readers, and for its high precision copy (`high_copy`).

    `layouts` is how many FP8 copies are read, 1 or 2 (row-major, transposed); `again` says that the second is written by a walk
    of its own in backward (a weight that is cast again).
    """
    if scaling.for_each_layout:
        return _each_layout(device, tensor, scaling, layouts) + high_copy(device, tensor)
    if tensor.fused and not tensor.high_bytes:
        moved: float = (scaling.walks - 1) * tensor.producer_bytes
        kernels = scaling.walks - 1
    else:  # what is written in high precision is read again: casts with one more output are not always taken in
        read = tensor.elements * (tensor.high_bytes if tensor.fused else tensor.itemsize)
        parts = layouts if tensor.scattered or again else 1
        kernels = scaling.walks - 1 + parts + (tensor.scattered and scaling.amax_apart)
        moved = kernels * read
    moved += layouts * tensor.elements * scaling.copy_bytes
    kernels += scaling.small_kernels
    return moved / device.bandwidth + kernels * device.launch + high_copy(device, tensor)


def high_copy(device: Device, tensor: CastInput) -> float:
    """Seconds for what is read in high precision: a fused producer's write, or a conversion."""
    if tensor.fused:
        return tensor.high_bytes * tensor.elements / device.bandwidth
    if tensor.high_bytes in (0, tensor.itemsize):
        return 0.0
    return (tensor.itemsize + tensor.high_bytes) * tensor.elements / device.bandwidth + device.launch


def _each_layout(device: Device, tensor: CastInput, scaling: ScalingCost, layouts: int) -> float:
    """Say, one scale a row of each layout. A cast waits for its row's amax, so each copy takes two walks (the first may be the
    producer's); those of the transposed copy go along columns of memory."""
    read, written = tensor.elements * tensor.itemsize, tensor.elements * scaling.copy_bytes
    walks = scaling.walks - tensor.fused
    seconds = (walks * read + written) / device.bandwidth + walks * device.launch
    if layouts > 1:
        seconds += (scaling.walks * STRIDED * read + written) / device.bandwidth + scaling.walks * device.launch
    return seconds


def break_even(gain: Callable[[int], float], largest: int = LARGEST) -> int | None:
    """The smallest number of tokens (a multiple of 16) from which `gain(tokens)`, in seconds, stays positive.

    Looks at powers of two and at their one and a half, and bisects between the last that loses and the next, so a dip between
    two of them (a wave that is hardly begun) can be missed. None if it loses at `largest` still.
    """
    sizes = sorted({size for power in range(4, largest.bit_length()) for size in (1 << power, 3 << power >> 1)})
    sizes = [size for size in sizes if size <= largest]
    losing = [i for i, size in enumerate(sizes) if not gain(size) > 0]
    if not losing:
        return sizes[0]
    if losing[-1] == len(sizes) - 1:
        return None
    low, high = sizes[losing[-1]] // 16, sizes[losing[-1] + 1] // 16  # loses at low, gains at high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if gain(16 * middle) > 0 else (middle, high)
    return 16 * high
