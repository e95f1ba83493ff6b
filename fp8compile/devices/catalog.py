"""Descriptions of GPUs: how fast each multiplies and copies. The compiler decides by them before a run.

    find("h200")                 a shipped description (devices.toml), by key or by torch's name of the device
    of(torch.device("cuda"))     the description of a device of this machine; None for a CPU

A description that `fp8compile calibrate` measured takes precedence over the shipped one. A GPU without a
description gets rates derived from its architecture, compute units and clock; this is logged once.

Rates are sustained ones, not peaks: decisions depend on the ratio of FP8 to bf16, and FP8 sustains a smaller
part of its peak than bf16 does. Measured descriptions are kept in `stored_path()`, one table per device, in
the format of devices.toml. A file that cannot be read is ignored with a warning.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OptionError, near
from ..logs import DEVICES_VARIABLE, get_logger, say_once
from . import architectures
from .gpu import Gpu, gfx_of
from .toml import tomllib

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

SHIPPED = Path(__file__).with_name("devices.toml")
RATES = ("fp8", "fp8_precise", "bf16", "fp16", "fp32")
LAUNCH_S = 2e-6
HOPPER_PRECISE = 1 / 1.1  # FP8's rate without fast accumulation, as a part of that with it (devices.toml)

# of peak, as in devices.toml
_SUSTAINED = {"fp8": 0.65, "bf16": 0.75, "fp16": 0.75, "fp32": 0.65, "bandwidth": 0.85}


@dataclass(frozen=True)
class Rates:
    """FLOP/s of dense matmuls by the dtype of their operands, and bytes/s of a copy (read + written).

    `fp8` is the rate with fast accumulation, 0 for a device without FP8. `fp8_precise` is the rate without
    it; where it is not given, it is that with it. `fp32` is the rate of float32 matmuls under "high"
    precision, TF32 where it exists.
    """

    bf16: float
    fp16: float
    fp32: float
    bandwidth: float
    fp8: float = 0.0
    fp8_precise: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "fp8_precise", self.fp8_precise or self.fp8)

    def of(self, dtype: str) -> float:
        """FLOP/s for "fp8", "fp8_precise", "bfloat16", "float16", "float32", a short name; else float32's."""
        short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype, dtype)
        return getattr(self, short if short in RATES else "fp32")


@dataclass(frozen=True)
class Device:
    """One GPU. Decisions use the `sustained` rates; `peak` rates are the published ones (None if unknown).

    `launch` is the least time of a kernel in seconds, `sms` the number of SMs or CUs; `l2` and `memory` are
    bytes, `l2` None if unknown. `clock_mhz` is the highest clock, 0 if unknown. `gfx` is AMD's architecture,
    "" for NVIDIA. `origin` says where the rates come from: "shipped", "calibrated" or "derived".
    """

    key: str
    name: str
    sustained: Rates
    sms: int
    capability: tuple[int, int]
    memory: int
    l2: int | None = None
    gfx: str = ""
    peak: Rates | None = None
    launch: float = LAUNCH_S
    clock_mhz: float = 0.0
    memory_bus: int = 0
    memory_clock_mhz: float = 0.0
    patterns: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    origin: str = "shipped"

    @property
    def flops(self) -> Rates:
        """The sustained rates, FLOP/s."""
        return self.sustained

    @property
    def bandwidth(self) -> float:
        """Sustained bytes/s; bytes read and bytes written both count."""
        return self.sustained.bandwidth

    @property
    def has_fp8(self) -> bool:
        return self.sustained.fp8 > 0

    @property
    def gpu(self) -> Gpu:
        """The device properties that Inductor reads, for `dryrun.fake_gpu.trace`."""
        architecture = architectures.of(self.capability, self.gfx)
        return Gpu(
            name=self.name,
            major=self.capability[0],
            minor=self.capability[1],
            multi_processor_count=self.sms,
            total_memory=self.memory,
            L2_cache_size=self.l2,
            warp_size=architecture.warp,
            max_threads_per_multi_processor=architecture.threads,
            shared_memory_per_block_optin=architecture.shared_of_block << 10,
            shared_memory_per_multiprocessor=architecture.shared << 10,
            memory_bus_width=self.memory_bus,
            memory_clock_rate=int(1000 * self.memory_clock_mhz),
            clock_rate=int(1000 * self.clock_mhz),
            gcnArchName=self.gfx,
        )

    def matches(self, name: str) -> bool:
        """Whether `name`, a device name of torch's, is a name of this device."""
        patterns = (self.name, *self.patterns)
        return any(fnmatch.fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)


def find(name: str) -> Device:
    """The description called `name`: a key ("h200"), in any case and spelling ("RTX 4090"), or a full name.

    Finds one measured on this machine by the full name of its device. OptionError lists the known keys.
    """
    if isinstance(name, str):
        wanted = _plain(name)
        known = [device for device in stored().values() if name.lower() == device.name.lower()]
        known += [x for x in shipped().values() if wanted in map(_plain, (x.key, *x.aliases))]
        known += [device for device in shipped().values() if device.matches(name)]
        if known:
            return known[0]
    raise OptionError.of(
        "device", name, f"one of {', '.join(shipped())}, or a device's full name", near(name, shipped())
    )


def of(device: torch.device) -> Device | None:
    """The description of a device of this machine; None if the device is not a GPU."""
    import torch

    if device.type != "cuda":
        return None
    return of_properties(torch.cuda.get_device_properties(device))


def of_properties(properties: Any) -> Device:
    """The description for `torch.cuda.get_device_properties`: measured, else shipped, else derived."""
    measured = stored()
    if properties.name in measured:
        return measured[properties.name]
    made = unmeasured(properties)
    if made.origin == "shipped":
        return made
    fp8 = f"{made.flops.fp8 / 1e12:.0f} in FP8" if made.has_fp8 else "no FP8"
    say_once(
        logger,
        logging.INFO,
        f"fp8: {properties.name} is not described; from its properties it is taken to sustain "
        f"{made.flops.bf16 / 1e12:.0f} TFLOP/s in bf16, {fp8}, {made.bandwidth / 1e12:.2f} TB/s"
        + ("" if made.l2 else ", and to keep nothing in L2, whose size is unknown")
        + ". `python -m fp8compile calibrate` measures it.",
    )
    return made


def unmeasured(properties: Any) -> Device:
    """As `of_properties`, without measured descriptions: shipped, under the device's name, else derived."""
    known = _shipped_for(properties)
    return derived(properties) if known is None else dataclasses.replace(known, name=properties.name)


def derived(properties: Any) -> Device:
    """A description from a device's properties: compute units x clock x its architecture's FLOP per clock."""
    gfx = gfx_of(properties)
    capability = (int(properties.major), int(properties.minor))
    architecture = architectures.of(capability, gfx)
    units = int(properties.multi_processor_count)
    clock = float(getattr(properties, "clock_rate", 0) or 1.5e6) * 1e3  # kHz
    geforce = "geforce" in properties.name.lower()
    bf16 = (architecture.geforce_flop if geforce else architecture.flop) * units * clock
    names = ("memory_bus_width", "memory_clock_rate")
    bus, memory_clock = (int(getattr(properties, name, 0) or 0) for name in names)
    # 250 FLOP per byte: about the ratio of all known GPUs
    bandwidth = bus / 8 * 2e3 * memory_clock or bf16 / 250
    fp8 = 2 * bf16 if architecture.fp8 else 0.0
    peak = Rates(bf16=bf16, fp16=bf16, fp32=bf16 / 2, fp8=fp8, bandwidth=bandwidth)
    rates = {name: part * getattr(peak, name) for name, part in _SUSTAINED.items()}
    if capability[0] == 9 and not gfx:
        rates["fp8_precise"] = HOPPER_PRECISE * rates["fp8"]
    sustained = Rates(**rates)
    return Device(
        key=_plain(properties.name),
        name=properties.name,
        sustained=sustained,
        sms=units,
        capability=capability,
        memory=int(properties.total_memory),
        l2=int(getattr(properties, "L2_cache_size", 0)) or None,
        gfx=gfx,
        peak=peak,
        clock_mhz=clock / 1e6,
        memory_bus=bus,
        memory_clock_mhz=memory_clock / 1e3,
        origin="derived",
    )


# -- files --


@functools.cache
def shipped() -> dict[str, Device]:
    """The descriptions of devices.toml, by key."""
    return {key: _device(key, table) for key, table in _tables(SHIPPED).items()}


def stored_path() -> Path:
    """Where measured descriptions are kept: FP8COMPILE_DEVICES, or fp8compile/devices.toml in the cache."""
    given = os.environ.get(DEVICES_VARIABLE)
    if given:
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fp8compile" / "devices.toml"


def stored() -> dict[str, Device]:
    """The descriptions that `fp8compile calibrate` has written on this machine, by the device's name."""
    try:
        path = stored_path()
        devices = [_device(key, table) for key, table in _tables(path).items()]
    except (FileNotFoundError, NotADirectoryError, RuntimeError):  # no file; no home
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        fix = "Remove it, or run `python -m fp8compile calibrate` again."
        say_once(logger, logging.WARNING, f"fp8: {path} is ignored: {error}. {fix}")
        return {}
    return {device.name: dataclasses.replace(device, origin="calibrated") for device in devices}


def store(device: Device) -> Path:
    """Add a description to the stored ones. A file that cannot be read is replaced. Returns the path."""
    path = stored_path()
    kept = {name: known for name, known in stored().items() if name != device.name}
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.{os.getpid()}")
    written.write_text("\n".join(map(to_toml, (*kept.values(), device))), encoding="utf-8")
    os.replace(written, path)
    return path


def to_toml(device: Device) -> str:
    """A description as a table of devices.toml."""
    text = json.dumps  # its strings are TOML's
    lines = [
        f"[{text(device.key)}]",
        f"name = {text(device.name)}",
        f"capability = {list(device.capability)}",
    ]
    if device.gfx:
        lines.append(f"gfx = {text(device.gfx)}")
    sizes = ("sms", "clock_mhz", "memory", "memory_bus", "memory_clock_mhz", "l2")
    lines += [f"{name} = {getattr(device, name)}" for name in sizes if getattr(device, name) is not None]
    lines.append(f"launch = {device.launch:g}")
    for name in ("peak", "sustained"):
        rates = getattr(device, name)
        if rates is not None:
            parts = (f"{key} = {value:.4g}" for key, value in dataclasses.asdict(rates).items())
            lines.append(f"{name} = {{ {', '.join(parts)} }}")
    return "\n".join(lines) + "\n"


def _tables(path: Path) -> dict[str, dict[str, Any]]:
    with open(path, "rb") as file:
        return tomllib.load(file)


def _device(key: str, table: dict[str, Any]) -> Device:
    """The description in a table of a TOML file. Raises TypeError for a key missing, or one too many."""
    given = dict(table)
    for rates in {"peak", "sustained"} & given.keys():
        bf16 = given[rates].get("bf16", 0.0)
        given[rates] = Rates(**{"fp16": bf16, "fp32": bf16 / 2, **given[rates]})
    for name in {"capability", "patterns", "aliases"} & given.keys():
        given[name] = tuple(given[name])
    return Device(key=key, **given)


# -- names --


def _shipped_for(properties: Any) -> Device | None:
    """By name; an AMD device with a vague name ("AMD Radeon Graphics") by architecture, units and memory."""
    gfx = gfx_of(properties)
    for device in shipped().values():
        if device.matches(properties.name):
            return device
    for device in shipped().values():
        alike = abs(device.memory / max(1, int(properties.total_memory)) - 1) < 0.1
        if gfx and device.gfx == gfx and device.sms == properties.multi_processor_count and alike:
            return device
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name.lower())
