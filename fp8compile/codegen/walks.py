"""Second reads: the bytes that a kernel which walks over columns more than once reads from memory again.

    for start in range(0, 4096, BLOCK_C):     all programs that run at the same time begin at column 0:
        load x0                               between two loads of an element, each of them walks its rows
    for start in range(0, 4096, BLOCK_C):
        load x0                               from L2 if it holds the rows of all of them (`Gpu.keeps`)

The source says which inputs are loaded by how many loops, so a kernel without such loops reads once. The
programs that run at the same time are bounded by threads, and by registers at `REGISTERS` of a thread.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from ..devices.gpu import Gpu

REGISTERS = 64  # of a thread: norms have 64 to 103 on sm_90 (so fewer fit), casts of rows 39 to 48

_LOOP = re.compile(r"( *)for (?:start|done|strip) in range\(")
_LOAD = re.compile(r"tl\.load\((x\d+)\b")


def loops(source: str) -> Counter[str]:
    """By the name of an input: how many loops over columns load it."""
    found: Counter[str] = Counter()
    inside: set[str] = set()
    depth = -1  # the indentation of the loop at hand
    for line in source.splitlines():
        if len(line) - len(line.lstrip()) <= depth:
            found.update(inside)
            inside, depth = set(), -1
        if depth < 0 and (loop := _LOOP.match(line)):
            depth = len(loop[1])
        elif depth >= 0:
            inside.update(_LOAD.findall(line))
    found.update(inside)
    return found


def resident(gpu: Gpu, warps: int) -> int:
    """The most programs of so many warps that run at the same time."""
    threads = gpu.warp_size * warps
    registers, most = gpu.regs_per_multiprocessor // REGISTERS, gpu.max_threads_per_multi_processor
    return gpu.multi_processor_count * max(1, min(registers, most) // threads)


def kept(size: int, programs: int, warps: int, gpu: Gpu) -> bool:
    """True if L2 holds what the programs that run at the same time read. All read `size` bytes together."""
    return gpu.keeps(size * min(resident(gpu, warps), programs) // max(1, programs))


def read_again(source: str, inputs: Mapping[str, int], programs: int, warps: int, gpu: Gpu) -> int:
    """The bytes of second and later reads that come from memory. `inputs`: the bytes of those inputs that
    have the walked matrix's elements, by name. `programs`: of the launch."""
    found = {name: count for name, count in loops(source).items() if name in inputs}
    walked = sum(inputs[name] for name in found)
    if kept(walked, programs, warps, gpu):
        return 0
    return sum((count - 1) * inputs[name] for name, count in found.items())
