"""How long a matmul takes in bf16 and in FP8, and what casting its operands costs: arithmetic on sizes only.

docs/cost-model.md describes the arithmetic, and has the sources of the constants. "fp8_precise" is FP8
without fast accumulation.

If the producer's kernel does the cast, the cast reads for free. If nothing else reads the tensor in high
precision, the kernel does not write that copy. This is a gain over bf16, so the net cost of casts can be
negative.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from .catalog import Device

# rows and columns of an output tile, and the part of the sustained rate that it reaches: a smaller tile
# reuses less loaded data
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.92), (64, 128, 0.7), (128, 64, 0.7), (64, 64, 0.5))
SPLITS = (1, 2, 4, 8, 16)  # parts of k that are computed in parallel and added up in float32
FP8 = ("fp8", "fp8_precise")  # with and without fast accumulation
RAMP = dict.fromkeys(FP8, 512)  # filling its pipeline takes a kernel as long as so many columns of k
RAMP_OTHERS = 256
FP8_START_S = 2e-6  # an FP8 matmul of 256 x 256 x 256 takes 6 us on an H100, one in bf16 3.7
STRIDED = 1 / 0.58  # slowdown along columns of memory: Inductor's transposes reach 58% of the bandwidth
ITEMSIZE = {"fp8": 1, "fp8_precise": 1, "bf16": 2, "fp16": 2, "fp32": 4}
LARGEST = 1 << 20


@dataclass(frozen=True)
class ScalingCost:
    """The cost of a recipe; `config.recipe` lists one for each recipe.

    `walks`: how often a tensor is read, for its amax and its casts. `for_each_layout`: each copy needs these
    walks of its own. `amax_apart`: a scattered tensor (`CastInput.scattered`) needs one more walk for its
    amax. `once`: further launches per graph, forward and backward together. `copy_bytes`: bytes per element
    of a copy, scales included. `gemm_rate`: the rate of its matmuls, as a part of the rate with one scale per
    operand and fast accumulation. `promotes`: its matmuls leave no choice of the accumulation; `gemm_rate`
    includes what theirs costs.
    """

    walks: int = 1
    for_each_layout: bool = False
    amax_apart: bool = False
    once: int = 0
    copy_bytes: float = 1
    gemm_rate: float = 1.0
    promotes: bool = False


@functools.lru_cache(maxsize=1 << 16)
def gemm(
    device: Device,
    m: int,
    n: int,
    k: int,
    dtype: str = "bf16",
    out_bytes: int = 2,
    instead: str = "bf16",
    groups: int = 1,
) -> float:
    """Seconds of out[m, n] = a[m, k] @ b[k, n] with operands of `dtype` ("fp8", "fp8_precise", "bf16",
    "fp16", "fp32"); of `groups` such matmuls in one kernel, if there are several.

    `out_bytes` is the itemsize of the output. For FP8, `instead` is the dtype that the matmul would have
    without FP8. FP8 is never credited with more than it saves over `instead` at full efficiency: the part of
    a wave that bf16 wastes is too uncertain to count as FP8's gain. ValueError if the device has no FP8.
    """
    if dtype in FP8 and not device.has_fp8:
        raise ValueError(f"{device.name} has no FP8")
    seconds = _waves(device, m, n, k, dtype, out_bytes, groups)
    if dtype not in FP8:
        return seconds
    full, fp8 = (groups * _roofline(device, m, n, k, name, out_bytes) for name in (instead, dtype))
    return max(seconds, _waves(device, m, n, k, instead, out_bytes, groups) - (full - fp8))


def block_gemm(
    device: Device,
    m: int,
    n: int,
    k: int,
    scaling: ScalingCost,
    out_bytes: int = 2,
    instead: str = "bf16",
    emulated: bool = False,
    groups: int = 1,
    fast: bool = True,
) -> float:
    """Seconds of an FP8 matmul under the scaling of its operands. `emulated`: the device does not support it,
    so the FP8 copies are converted to bf16 and multiplied in bf16. `fast`: with fast accumulation."""
    if emulated:
        widened = 3 * groups * (m * k + n * k) / device.bandwidth + 2 * device.launch
        return gemm(device, m, n, k, "bf16", out_bytes, groups=groups) + widened
    dtype = "fp8" if fast or scaling.promotes else "fp8_precise"
    return gemm(device, m, n, k, dtype, out_bytes, instead, groups) / scaling.gemm_rate


def _roofline(device: Device, m: int, n: int, k: int, dtype: str, out_bytes: int) -> float:
    return max(2 * m * n * k / device.flops.of(dtype), _moved(m, n, k, dtype, out_bytes) / device.bandwidth)


def _moved(m: int, n: int, k: int, dtype: str, out_bytes: int) -> int:
    return ITEMSIZE[dtype] * (m * k + k * n) + out_bytes * m * n


def _waves(device: Device, m: int, n: int, k: int, dtype: str, out_bytes: int, groups: int = 1) -> float:
    moved = groups * _moved(m, n, k, dtype, out_bytes) / device.bandwidth
    return max(compute(device, m, n, k, dtype, groups), moved) + start(device, dtype)


def start(device: Device, dtype: str) -> float:
    """Seconds before a matmul with operands of `dtype` computes."""
    return device.launch + (FP8_START_S if dtype in FP8 else 0)


@functools.lru_cache(maxsize=1 << 16)
def compute(device: Device, m: int, n: int, k: int, dtype: str, groups: int = 1) -> float:
    """Seconds that the tensor cores take for `groups` matmuls [m, k] @ [k, n] in one kernel: whole waves of
    the best tiles and split of k, with the traffic of partial sums, without start and moves of operands."""
    unit_rate = device.flops.of(dtype) / device.sms
    ramp = RAMP.get(dtype, RAMP_OTHERS)
    ways = []
    for rows, columns, part in TILES:
        tiles = groups * _ceil_div(m, rows) * _ceil_div(n, columns)
        for split in SPLITS if groups == 1 else (1,):  # no kernel of groups splits the contraction
            waves = _ceil_div(tiles * split, device.sms)
            seconds = 2 * rows * columns * (waves * k / split + ramp) / (part * unit_rate)
            # partial sums in float32 are written and read again
            ways.append(seconds + (8 * split * m * n / device.bandwidth + device.launch if split > 1 else 0))
    return min(ways)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class CastInput:
    """A tensor that matmuls read and that would be cast to FP8.

    `itemsize`: bytes per element of the tensor in memory. `scattered`: the tensor is a concatenation, which
    no kernel fuses with casts; its amax and each of its copies are separate walks. `fused`: the kernel that
    computes the tensor also does the casts. That kernel reads `producer_bytes`, and a second walk reads them
    again. If the tensor is not fused, or is written in high precision as well, the casts read it from memory.
    `high_bytes`: the itemsize in which other nodes (matmuls in high precision and others) read the tensor; 0:
    no other node reads it. A fused producer has to write such a copy; a tensor in memory with another
    itemsize (float32 under autocast) is converted.
    """

    elements: int
    itemsize: int = 2
    fused: bool = False
    producer_bytes: int = 0
    scattered: bool = False
    high_bytes: int = 0


def casts(
    device: Device, tensor: CastInput, scaling: ScalingCost, layouts: int = 2, again: bool = False
) -> float:
    """Seconds for the FP8 copies of one tensor, shared by all its readers, and for its `high_copy`.

    `layouts` is the number of FP8 copies that are read, 1 or 2 (row-major, transposed). `again`: a separate
    walk in backward writes the second copy (a weight that is cast again).
    """
    if scaling.for_each_layout:
        return _each_layout(device, tensor, scaling, layouts) + high_copy(device, tensor)
    if tensor.fused and not tensor.high_bytes:
        moved: float = (scaling.walks - 1) * tensor.producer_bytes
        kernels = scaling.walks - 1
    else:
        # a fused tensor that is also written in high precision is read again: such casts may not be fused
        read = tensor.elements * (tensor.high_bytes if tensor.fused else tensor.itemsize)
        parts = layouts if tensor.scattered or again else 1
        kernels = scaling.walks - 1 + parts + (tensor.scattered and scaling.amax_apart)
        moved = kernels * read
    moved += layouts * tensor.elements * scaling.copy_bytes
    return moved / device.bandwidth + kernels * device.launch + high_copy(device, tensor)


def transposed(device: Device, elements: int) -> float:
    """Seconds for the transposed copy of a tensor in memory in FP8: a weight that FSDP2 has gathered so."""
    return 2 * elements / device.bandwidth + device.launch


def high_copy(device: Device, tensor: CastInput) -> float:
    """Seconds for a tensor's high precision copy: its fused producer's write, or a conversion; 0: neither."""
    if tensor.fused:
        return tensor.high_bytes * tensor.elements / device.bandwidth
    if tensor.high_bytes in (0, tensor.itemsize):
        return 0.0
    return (tensor.itemsize + tensor.high_bytes) * tensor.elements / device.bandwidth + device.launch


def _each_layout(device: Device, tensor: CastInput, scaling: ScalingCost, layouts: int) -> float:
    """`casts` for recipes with `for_each_layout`, such as one scale per row. A cast waits for the amax of its
    row, so each copy takes two walks (the producer's kernel may be the first one). Those of the transposed
    copy go along columns of memory."""
    read, written = tensor.elements * tensor.itemsize, tensor.elements * scaling.copy_bytes
    walks = scaling.walks - tensor.fused
    seconds = (walks * read + written) / device.bandwidth + walks * device.launch
    if layouts > 1:
        walked = scaling.walks * STRIDED * read + written
        seconds += walked / device.bandwidth + scaling.walks * device.launch
    return seconds


def break_even(gain: Callable[[int], float]) -> int | None:
    """The smallest number of tokens (a multiple of 16) from which `gain(tokens)`, in seconds, stays positive.

    Tries powers of two and 1.5 times each of them, then bisects between the last size that loses and the next
    one. It can miss a dip between two sizes (a last wave with few tiles). None if `LARGEST` still loses.
    """
    powers = range(4, LARGEST.bit_length())
    sizes = sorted({size for power in powers for size in (1 << power, 3 << power >> 1) if size <= LARGEST})
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
