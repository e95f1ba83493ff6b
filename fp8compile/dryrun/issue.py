"""The least time of a generated kernel by its instructions: what its busiest SM needs to issue them.

A scheduler issues an instruction of one warp in each clock, and an SM has four schedulers. Programs are spread evenly, so the
busiest scheduler issues those of

    warps = ceil(ceil(programs / SMs) * warps of a program / schedulers)
    clocks = warps * max(instructions of a thread, 8 * special ones)

Special instructions are exponentials, reciprocals and square roots (MUFU). An SM has 16 lanes for them, so that a warp of 32
takes one of four parts of an SM for 8 clocks. (16 a clock and SM on an H100: FlashAttention-3, arXiv:2407.08608, section 2.2.
Other GPUs of NVIDIA: assumed.) Other units that are narrower than the schedulers (integers, conversions, shared memory) are
left out, and so are dependencies, latencies and replays: a real kernel is slower. Clocks are at the described highest rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .fake_gpu import machine_code

if TYPE_CHECKING:
    from ..devices.catalog import Device
    from .fake_gpu import Launch
    from .fake_gpu.machine_code import Work

SPECIAL_LANES = 16  # of an SM


def unavailable(device: Device) -> str | None:
    """Why no instructions can be counted for a device, or None."""
    if device.gfx:
        return "only machine code of NVIDIA GPUs is counted"
    if not (device.clock_mhz and device.gpu.architecture.schedulers):
        return f"the description of {device.name} has no clock, or no number of schedulers"
    return machine_code.unavailable()


def seconds(launch: Launch, device: Device) -> float | None:
    """The least time to issue a launch's instructions, without the launch itself. None if they are not known."""
    work = None if launch.call is None else machine_code.work(launch.call, device.capability)
    return None if work is None else of(work, device)


def of(work: Work, device: Device) -> float:
    architecture = device.gpu.architecture
    programs = -(-work.programs // device.sms)
    warps = -(-programs * work.warps // architecture.schedulers)
    special = architecture.warp * architecture.schedulers // SPECIAL_LANES
    return warps * max(work.instructions, special * work.special) / (1e6 * device.clock_mhz)
