"""How a kernel walks over its matrix: the blocks to choose from, and what follows from the first choice.

A block is (BLOCK_R, BLOCK_C, warps). A kernel with sums over rows whose block holds whole rows reads its
inputs once and keeps them in registers (`whole_rows`); with other blocks it loops over columns, and reads
them once more for each pass. Kernels with column sums or amaxes of columns collect these over several blocks
of rows, which a program takes one after the other (`walk`).
"""

from __future__ import annotations

import sympy

from .. import compat
from ..devices.gpu import gpu_of
from . import walks
from .group import Group, Output
from .indexing import Domain, quotient_up

Block = tuple[int, int, int]  # (BLOCK_R, BLOCK_C, warps)

# The default is the first. Partial sums are a row for each program, so the height of their blocks is fixed.
# Blocks are tall for column sums and column amaxes, as each costs a reduction over the rows of the block.
# Where programs walk over several, a thread takes 8 elements: sums stay in registers, and with more
# elements they would cost half of the warps of an SM (sm_90: 48 to 64 registers a thread, 94 with 16
# elements). Where blocks of elements share a scale, a tile holds whole blocks. With exp and the like a
# thread takes 16 elements instead of 32: with 32, registers would spill. A transposed copy is written in
# pieces of as many bytes as a block has rows; a sector of memory has 32. The first two of each were the
# fastest on an H200, or near it (benchmarks.blocks).
TILES: tuple[Block, ...] = (
    (64, 128, 8), (64, 64, 4), (32, 128, 4), (128, 64, 8), (128, 32, 4), (128, 128, 16), (128, 128, 8),
)  # fmt: skip
TALL_TILES: tuple[Block, ...] = ((128, 64, 8), (128, 32, 4), (128, 128, 16), (128, 128, 8))
HEAVY_TILES: tuple[Block, ...] = (
    (32, 64, 4), (32, 128, 8), (64, 64, 8), (64, 128, 16), (128, 64, 16), (128, 32, 8), (128, 16, 4),
    (128, 128, 32),
)  # fmt: skip
HEAVY_TALL_TILES: tuple[Block, ...] = (
    (128, 64, 16), (128, 32, 8), (128, 16, 4), (128, 128, 32), (32, 128, 8),
)  # fmt: skip
WALKED_TILES: tuple[Block, ...] = ((64, 32, 8), (64, 64, 16))
ROW_BLOCKS: tuple[Block, ...] = ((16, 256, 8), (32, 128, 8), (16, 128, 4), (32, 64, 4))
TALL_ROW_BLOCKS: tuple[Block, ...] = ((32, 64, 8), (32, 128, 8))
TRANSPOSED_ROW_BLOCKS: tuple[Block, ...] = ((32, 128, 8), (32, 128, 16), (16, 256, 8), (32, 64, 4))
MOST_ROWS = 32  # whole rows that a program takes
SPANS: tuple[Block, ...] = ((128, 32, 8), (128, 16, 8))

# Blocks of whole rows. Walking programs keep column sums in registers beside the row, so a thread takes fewer
# elements of it.
WHOLE = 4096  # elements of a block, if a row has no more
LONGEST, LONGEST_WALKED = 16384, 4096  # elements of a row that fit the registers
SHORTEST_PIECE = 16  # rows of a block that writes a transposed copy itself
WALKING_WARPS, MOST_PROGRAMS = 4096, 512  # over whole rows: 16 or 32 warps for each SM of large GPUs
ENOUGH_PROGRAMS = 2048  # that walk over tiles, a few waves
LONGEST_WALK = 8  # tiles
SHORTEST_WALK, WALK_OF_UNKNOWN = 16, 32  # rows; the latter where only a run knows how many there are


def apart(group: Group) -> bool:
    """True if `fuse` makes two kernels of this group, as its blocks need more rows than a program takes."""
    return bool(group.passes) and group.block[0] > MOST_ROWS


def configurations(group: Group) -> tuple[Block, ...]:
    """The blocks to choose from at the first launch of a group's kernel, the default first; two, or three
    with Inductor's `max_autotune`. All fit the source, which is written for the default."""
    choices = _fitting(whole_row_blocks(group), group) or _loops(group)
    if group.passes and _whole(group, choices[0]):
        # no loop over columns; masks if the default is wider than a row
        wide, columns = choices[0][1], int(group.domain.columns)
        choices = tuple(x for x in choices if x[1] == wide or wide > columns <= x[1])
    if group.sums:
        choices = tuple(x for x in choices if x[0] == choices[0][0])
    return choices[: 3 if compat.triton.max_autotune() else 2]


def _loops(group: Group) -> tuple[Block, ...]:
    """The blocks of a kernel that holds no whole rows on purpose."""
    return _fitting(_choices(group), group)


def _fitting(choices: tuple[Block, ...], group: Group) -> tuple[Block, ...]:
    """Those that hold whole blocks of scales, the best first."""
    rows, columns = group.block
    choices = tuple(x for x in choices if x[0] % rows == 0 and x[1] % columns == 0)
    # mxfp8 in both layouts: 48 instructions an element in a tile of 32 rows, else 75
    if group.block == (32, 32):
        choices = tuple(sorted(choices, key=lambda x: x[0] != 32))
    # loops with scales of parts of a row: 30 instructions an element with 128 columns, 81 with 256 (RMSNorm)
    if group.passes and group.block[1] > 1:
        choices = tuple(sorted(choices, key=lambda x: x[1] > 128))
    # scales take registers, too, and with 16 warps a thread has only 128
    if group.heavy and group.block != (1, 1):
        choices = tuple(x for x in choices if x[2] <= 8) or choices
    return choices


def _choices(group: Group) -> tuple[Block, ...]:
    tall = group.sums or group.column_amaxes
    if group.span:
        return SPANS
    if group.passes and tall:
        return TALL_ROW_BLOCKS
    if group.passes:
        return TRANSPOSED_ROW_BLOCKS if group.with_content("transposed") else ROW_BLOCKS
    if tall and group.block == (1, 1) and not group.grouped:
        return WALKED_TILES
    if group.heavy:
        return HEAVY_TALL_TILES if tall else HEAVY_TILES
    return TALL_TILES if tall else TILES


# -- whole rows --


def whole_row_blocks(group: Group) -> tuple[Block, ...]:
    """Blocks of whole rows, where they serve better than loops over columns: for column sums, which loops
    would reduce for each block of rows, and where the second read would come from memory (`evicted`). None
    for rows that are too long or of unknown length, and where finer scales need blocks of several rows, or
    have parts of a row beside column sums."""
    columns, collects = group.domain.columns, bool(group.sums or group.column_amaxes)
    fits = columns.is_Integer and 0 < columns <= (LONGEST_WALKED if collects else LONGEST)
    one_row = group.block == (1, 1) or (group.block[0] == 1 and not collects)
    if not (group.passes and fits and one_row and group.domain.order is None and not group.grouped):
        return ()
    if any(copy_of(output, group) is None for output in group.with_content("transposed")):
        return ()
    if not (collects or evicted(group)):
        return ()
    wide = max(1 << (int(columns) - 1).bit_length(), group.block[1])  # of a row shorter than a scale's part
    if collects:
        warps = max(1, wide // (128 if len(group.sums) + len(group.column_amaxes) == 1 else 256))
        return (1, wide, warps), (1, wide, max(1, warps // 2))
    rows, warps = max(1, min(MOST_ROWS, WHOLE // wide)), max(4, wide // 1024)
    return (rows, wide, warps), (rows, wide, min(2 * warps, 16))


def copy_of(output: Output, group: Group) -> Output | None:
    """The row-major copy with the same values as a transposed copy, one scale for all."""
    for copy in group.with_content("copy"):
        same = (copy.node, copy.scale, copy.dtype) == (output.node, output.scale, output.dtype)
        if same and output.scale is not None and output.scale.granularity == "one":
            return copy
    return None


def made_of(output: Output, group: Group) -> Output | None:
    """The copy that a transposed copy is made of, by a kernel of its own: where a block has too few rows to
    write whole sectors."""
    if output.content != "transposed" or not whole_rows(group):
        return None
    return None if configurations(group)[0][0] >= SHORTEST_PIECE else copy_of(output, group)


def whole_rows(group: Group) -> bool:
    """True if the kernel holds whole rows in registers, instead of looping over columns."""
    return bool(group.passes) and not apart(group) and _whole(group, configurations(group)[0])


def _whole(group: Group, block: Block) -> bool:
    """True if a block is as wide as the rows."""
    columns = group.domain.columns
    return bool(columns.is_Integer) and 0 < int(columns) <= block[1]


def evicted(group: Group) -> bool:
    """True if this kernel, when it loops over columns, reads its inputs from memory again (`walks`). False
    where the size of the cache, or that of a row, is unknown."""
    gpu, columns = gpu_of(group.outputs[0].node.meta["val"].device), group.domain.columns
    if gpu is None or gpu.L2_cache_size is None or not columns.is_Integer:
        return False
    block = _loops(group)[0]
    programs = quotient_up(group.domain.walked, block[0])
    count = int(programs) if programs.is_Integer else walks.resident(gpu, block[2])
    widths = [node.meta["val"].itemsize for node in group.inputs if group.domain.is_full(node)]
    return not walks.kept(count * block[0] * int(columns) * sum(widths), count, block[2], gpu)


# -- programs --


def walk(group: Group) -> int:
    """Blocks of rows that a program takes one after the other, and collects sums and amaxes of columns."""
    if not (group.sums or group.column_amaxes) or group.block != (1, 1) or group.grouped:
        return 1
    whole = whole_rows(group)
    if group.passes and not whole:
        return 1
    block = configurations(group)[0]
    high, wide = quotient_up(group.domain.walked, block[0]), quotient_up(group.domain.columns, block[1])
    if not (high.is_Integer and wide.is_Integer):
        return max(1, WALK_OF_UNKNOWN // block[0])
    if whole:
        programs = min(MOST_PROGRAMS, WALKING_WARPS // block[2])
        return max(-(-int(high) // programs), SHORTEST_WALK // block[0], 1)
    return max(2, min(LONGEST_WALK, int(high * wide) // ENOUGH_PROGRAMS))


def height(group: Group) -> int:
    """The rows that a program of the default configuration takes, from which it makes one partial sum."""
    return group.block[0] if apart(group) else configurations(group)[0][0] * walk(group)


def row_blocks(group: Group) -> sympy.Expr:
    """The number of rows of partial sums."""
    return quotient_up(group.domain.walked, height(group))


def grid(group: Group, block: Block) -> sympy.Expr:
    """The number of programs that cover the matrix and its padding."""
    rows = quotient_up(group.domain.walked, block[0] * walk(group))
    return rows if group.passes else rows * quotient_up(group.domain.columns, group.span or block[1])


def tiles(domain: Domain, block: Block) -> sympy.Expr:
    """The number of tiles that cover a matrix and its padding."""
    return quotient_up(domain.walked, block[0]) * quotient_up(domain.columns, block[1])
