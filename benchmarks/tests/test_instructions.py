"""Instructions of generated kernels: how they are counted in machine code, and which kernels they limit."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest
import torch
import torch.nn as nn

from benchmarks import instructions, sass, static
from benchmarks.instructions import Call, Work
from fp8compile.devices import catalog
from fp8compile.dryrun.fake_gpu import Launch, trace, unavailable

H200 = catalog.find("h200")
BF16 = torch.bfloat16
missing = unavailable() or instructions.unavailable(H200)
compiles = pytest.mark.skipif(missing is not None, reason=missing or "")

# -- machine code as text --


def listing(*lines: str) -> str:
    """Machine code as nvdisasm prints it; a line that ends in a colon is a label."""
    return "\n".join(x if x.endswith(":") else f"        /*0000*/  {x} ;" for x in lines)


def counted(*lines: str) -> dict[str, int] | None:
    found = sass.executed(listing(*lines))
    return None if found is None else dict(found)


LOOP = (
    "MOV R2, 0x0",
    ".L_x_0:",
    "FADD R4, R4, R5",
    "IADD3 R2, R2, 0x10, RZ",
    "ISETP.GE.AND P0, PT, R2, 0x40, PT",
)


STARTS = {
    "HFMA2.MMA R2, -RZ, RZ, 0, 0": 4,
    "IMAD.MOV.U32 R2, RZ, RZ, -0x10": 5,
    "CS2R R2, SRZ": 4,
    "MOV R2, RZ": 4,
}
BACK = ("@!P0 BRA `(.L_x_0)", "EXIT")
INNER = (
    "MOV R3, RZ",
    ".L_x_1:",
    "FMUL R4, R4, R5",
    "IADD3 R3, R3, 0x1, RZ",
    "ISETP.NE.AND P1, PT, R3, 0x3, PT",
)
WIDE = (  # the lower half begins below zero, and its carry brings the upper half to zero
    *("MOV R2, 0xfffffff0", "MOV R3, 0xffffffff", ".L_x_0:", "FADD R4, R4, R5", "IADD3 R2, P0, R2, 0x10, RZ"),
    *(
        "IADD3.X R3, RZ, R3, RZ, P0, !PT",
        "ISETP.GE.U32.AND P0, PT, R2, 0x20, PT",
        "ISETP.GE.U32.AND.EX P0, PT, R3, RZ, PT, P0",
    ),
)
WIDE_AND_NEW = (
    *(
        "UMOV.64 UR4, 0xfffffffffffffff0",
        ".L_x_0:",
        "FADD R4, R4, R5",
        "UIADD3.64 UR4, UPT, UPT, UR4, 0x10, URZ",
    ),
    *("UISETP.GE.U64.AND UP0, UPT, UR4, 0x20, UPT", "BRA.U !UP0, `(.L_x_0)", "EXIT"),
)


@pytest.mark.parametrize(
    ("lines", "trips"),
    [
        ((*LOOP, *BACK), {"MOV": 1, "FADD": 4, "IADD3": 4, "ISETP": 4, "BRA": 4, "EXIT": 1}),
        ((LOOP[0], ".L_x_0:", *INNER, "@P1 BRA `(.L_x_1)", *LOOP[2:], *BACK), {"FMUL": 12, "FADD": 4}),
        *(((start, *LOOP[1:], *BACK), {"FADD": trips}) for start, trips in STARTS.items()),
        ((*WIDE, *BACK), {"FADD": 3}),
        (WIDE_AND_NEW, {"FADD": 3}),
    ],
)
def test_a_loop_counts_as_often_as_it_runs(lines, trips):
    made = counted(*lines)
    assert made is not None and {name: made[name] for name in trips} == trips


@pytest.mark.parametrize(
    "overwritten", ["LDG.E.64 R2, desc[UR4][R8.64]", "LDG.E.128 R0, desc[UR4][R8.64]", "SHFL.UP PT, R2, R2"]
)
def test_a_loop_of_unknown_length_is_not_counted(overwritten):
    assert counted(*LOOP[:3], overwritten, *LOOP[3:], *BACK) is None
    assert counted("LDC R2, c[0x0][0x210]", *LOOP[1:], *BACK) is None


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        (  # a slow path does not count
            (
                "@P0 BRA `(.L_x_0)",
                "MOV R4, 0x10",
                "CALL.REL.NOINC `($div)",
                ".L_x_0:",
                "FMUL R1, R1, R2",
                "EXIT",
            ),
            {"BRA": 1, "FMUL": 1, "EXIT": 1},
        ),
        (("@P0 BRA `(.L_x_0)", "FADD R4, R4, R5", ".L_x_0:", "EXIT"), {"BRA": 1, "FADD": 1, "EXIT": 1}),
        (  # what is issued counts, also if its predicate is false; a NOP is not code
            (
                "ISETP.GE.AND P0, PT, RZ, 0x1, PT",
                "@P0 FADD R1, R1, R2",
                "@P0 EXIT",
                "NOP",
                "MUFU.EX2 R1, R1",
                "EXIT",
            ),
            {"ISETP": 1, "FADD": 1, "EXIT": 2, "MUFU": 1},
        ),
    ],
)
def test_what_counts_outside_of_loops(lines, count):
    assert counted(*lines) == count


# -- compiled kernels --


@pytest.fixture(scope="module")
def looping():
    """A kernel with two loops over a row of WIDTH numbers: the first reads, the second reads and writes."""
    import triton
    import triton.language as tl

    @triton.jit
    def looping(x, y, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for i in tl.range(0, WIDTH, BLOCK):
            total += tl.exp2(tl.load(x + row + i))
        for i in tl.range(0, WIDTH, BLOCK):
            tl.store(y + row + i, tl.load(x + row + i) * tl.sum(total))

    return looping


@pytest.mark.slow
@compiles
@pytest.mark.parametrize(("target", "trips"), [("sm_90", 2), ("sm_90", 64), ("sm_89", 19), ("sm_120", 19)])
def test_loops_that_ptxas_unrolls(looping, target, trips):
    """The instructions that move memory are those of the source, however the loops were unrolled: a thread
    moves four numbers at a time."""
    from tests.support.machine_code import TARGETS, compile_function

    types, constants = {"x": "*fp32", "y": "*fp32"}, {"WIDTH": 512 * trips, "BLOCK": 512}
    made = compile_function(looping, types, constants, TARGETS[target], num_warps=4)
    found = sass.executed(instructions.disassembled(made.asm["cubin"]))
    assert found is not None
    assert (found["LDG"], found["STG"], found["MUFU"]) == (2 * trips, trips, 4 * trips)


class Chain(nn.Module):
    """Two pointwise kernels of a matrix: one multiplies and adds `steps` times, the other adds once."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        y = wide
        for step in range(self.steps):
            y = y * wide + (0.5 + step)
        return y.to(BF16)


@functools.cache
def only_kernel(steps: int) -> tuple[Launch, Call]:
    x = torch.empty(4096, 4096, dtype=BF16)
    with torch.no_grad(), instructions.noted() as names:
        step = trace(lambda: torch.compile(Chain(steps))(x))
    (kernel,), (call,) = step.kernels, instructions.calls_of(step, names).values()
    return kernel, call


@pytest.mark.slow
@compiles
def test_a_kernel_of_many_instructions_is_limited_by_them_and_a_copy_is_not():
    (copy, copied), (long, chained) = only_kernel(1), only_kernel(80)
    assert copy.bytes == long.bytes == 4 * 4096**2
    by_bytes, took = copy.bytes / H200.bandwidth, instructions.seconds(chained, H200)
    assert (instructions.seconds(copied, H200) or 0.0) < by_bytes
    # at least an instruction for each step and number, and less than two
    least = 80 * 4096**2 / (132 * 4 * 32 * 1.98e9)
    assert took is not None and least < took < 2 * least and took > 1.5 * by_bytes
    made = static.by_instructions([copy, long], {id(copy): copied, id(long): chained})
    assert made["count.counted"] == 2 and made["count.issue_bound"] == 1
    assert made["longer_ms"] == pytest.approx(1e3 * (took - by_bytes))


@pytest.mark.slow
@compiles
def test_every_generated_kernel_gets_its_call():
    """Inductor's kernels and ours, forward and backward, in the order of the code."""
    from tests.support.gpu_steps import compile_mlp

    with instructions.noted() as names:
        step = compile_mlp(512)
    calls = instructions.calls_of(step, names)
    generated = {id(k): k.origin for k in step.kernels if k.origin in ("triton", "user")}
    assert len(generated) >= 6 and calls.keys() == generated.keys()
    begins = {"user": "fp8_", "triton": "triton_"}
    assert all(calls[i].name.startswith(begins[origin]) for i, origin in generated.items())
    first = {origin: calls[i] for i, origin in generated.items()}
    # one of each kind: a second a kernel
    assert all(instructions.seconds(call, H200) for call in first.values())


LIMITS = {  # generated kernel: its tile, and at most so many instructions and loads of an element on sm_90
    "gelu": ((32, 64, 4), 31.5, 0.2),
    "gelu_backward": ((64, 32, 8), 45.0, 0.4),
    "rope_backward": ((64, 128, 8), 20.0, 0.6),  # the gradient and one table at one place, and at another
}


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("name", LIMITS)
def test_kernels_need_few_instructions(name):
    from tests.support import machine_code, regenerate

    (rows, columns, warps), most, most_loads = LIMITS[name]
    source = regenerate.generate(getattr(regenerate, name))
    target = machine_code.TARGETS["sm_90"]
    made = machine_code.compile_source(source, (rows, columns, warps), target)
    found = sass.executed(instructions.disassembled(made.asm["cubin"]))
    assert found is not None
    walk = re.search(r"range\(strip \* (\d+)", source)  # blocks that a program takes
    each = 32 * warps / (rows * columns * int(walk[1] if walk else 1))
    assert most - 5 < found.total() * each <= most and found["LDG"] * each <= most_loads


# -- times --


def test_the_time_of_a_launch_is_that_of_its_busiest_sm():
    for work, clocks in (
        (Work(132, 4, 1000, 0), 1000),
        (Work(1, 4, 1000, 0), 1000),  # the other SMs do not help
        (Work(133, 4, 1000, 0), 2000),
        (Work(132, 8, 1000, 0), 2000),
        (Work(132, 1, 1000, 0), 1000),  # a warp cannot use four schedulers
        (Work(132, 4, 1000, 200), 1600),
    ):
        assert instructions.time_of(work, H200) == pytest.approx(clocks / 1.98e9)


def test_no_bound_for_devices_that_are_not_described():
    assert "NVIDIA" in (instructions.unavailable(catalog.find("mi300x")) or "")
    assert "no clock" in (instructions.unavailable(dataclasses.replace(H200, clock_mhz=0.0)) or "")
