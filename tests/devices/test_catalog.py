"""Descriptions of GPUs: the shipped data, look-ups, the file that `calibrate` stores, and devices without a
description."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fp8compile.devices import calibrate, catalog, cost, support
from fp8compile.devices.gpu import H200, Gpu, gfx_of, gpu_of
from fp8compile.errors import OptionError
from fp8compile.logs import DEVICES_VARIABLE
from tests.support import hooks


@pytest.fixture(autouse=True)
def own_files(tmp_path, monkeypatch):
    """Redirects the stored file, so that no test reads or writes this machine's."""
    monkeypatch.setenv(DEVICES_VARIABLE, str(tmp_path / "devices.toml"))
    return tmp_path / "devices.toml"


def properties(name: str, **given):
    """The result of `torch.cuda.get_device_properties` for a device, by default of compute capability 9.0."""
    usual = dict(major=9, minor=0, multi_processor_count=132, total_memory=80 << 30)
    usual |= dict(L2_cache_size=50 << 20, clock_rate=1980000)
    usual |= dict(memory_bus_width=5120, memory_clock_rate=2619000)
    return SimpleNamespace(name=name, **{**usual, **given})


# -- the shipped descriptions --


@pytest.mark.parametrize("device", catalog.shipped().values(), ids=lambda device: device.key)
def test_shipped_figures_are_possible(device):
    peak = dataclasses.asdict(device.peak)
    for name, sustained in dataclasses.asdict(device.sustained).items():
        assert 0.35 * peak[name] <= sustained <= peak[name], f"{name} is not a part of its peak"
    if device.has_fp8:
        assert peak["fp8"] == pytest.approx(2 * peak["bf16"], rel=0.01)
        # published matmuls: 1.83 on an H200, 1.9 on an H200 NVL
        assert 1.4 < device.flops.fp8 / device.flops.bf16 < 2
        # without fast accumulation, published for Hopper: 1.1 to 1.2; measured on an H200: 1.05
        slower = device.flops.fp8 / device.flops.fp8_precise
        assert 1.05 < slower < 1.2 if device.capability[0] == 9 and not device.gfx else slower == 1
    # the width and the clock of the memory bus give the published bandwidth
    assert device.memory_bus / 8 * 2e6 * device.memory_clock_mhz == pytest.approx(peak["bandwidth"], rel=0.05)
    assert catalog.find(device.key) == catalog.find(device.name) == device
    assert device.key != "h200" or device.gpu == H200  # for which static estimates are made


# how much less their tensor cores do than their units and clocks say
SLOWED = {"h20": 4.2, "h20-3e": 4.2, "l20": 1.9}


@pytest.mark.parametrize(
    "device", [d for d in catalog.shipped().values() if d.has_fp8], ids=lambda device: device.key
)
def test_peaks_derived_from_properties_are_the_published_ones(device):
    """Checks the table of FLOP a clock and unit against the data. Not exact: published peaks are not at boost
    clocks."""
    major, minor = device.capability
    given = properties(device.name, gcnArchName=device.gfx, major=major, minor=minor)
    given.multi_processor_count, given.clock_rate = device.sms, 1000 * device.clock_mhz
    given.memory_bus_width, given.memory_clock_rate = device.memory_bus, 1000 * device.memory_clock_mhz
    made = catalog.derived(given)
    assert made.origin == "derived" and made.key not in catalog.shipped()
    for name in ("fp8", "bf16", "bandwidth"):
        slowed = SLOWED.get(device.key, 1.0) if name != "bandwidth" else 1.0
        assert getattr(made.peak, name) == pytest.approx(slowed * getattr(device.peak, name), rel=0.16), name


# -- finding --


@pytest.mark.parametrize(
    "name, key",
    [
        ("rtx 4090", "rtx4090"),
        ("RTX-5090", "rtx5090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("NVIDIA A100-PCIE-40GB", "a100"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H800 PCIe", "h100-pcie"),
        ("NVIDIA L20", "l20"),
        ("NVIDIA GeForce RTX 4090 D", "rtx4090d"),
        ("NVIDIA GeForce RTX 5090 D", "rtx5090"),
    ],
)
def test_find(name, key):
    assert catalog.find(name).key == key


# other chips, although a name of a described one is a part of theirs; or slower kinds of it, which have
# tables of their own
OTHERS = ("H20 NVL", "H200 MIG 1g.18gb", "H100 80GB HBM3 MIG 1g.10gb", "H800 NVL", "A800-SXM4-80GB")
OTHERS += ("L2", "L40S", "B30A", "GeForce RTX 4090 Laptop GPU", "GeForce RTX 5090 Laptop GPU")
OTHERS += ("GeForce RTX 5090 D v2", "GeForce RTX 5090 D V2")
OTHERS += ("RTX PRO 6000 Blackwell Workstation Edition", "RTX 4000 Ada Generation")


@pytest.mark.parametrize("name", OTHERS)
def test_other_chips_are_derived(name):
    assert catalog.unmeasured(properties(f"NVIDIA {name}")).origin == "derived"


def test_an_unknown_name_lists_what_there_is():
    for name in ("cpu", 3, "h202"):
        with pytest.raises(OptionError, match="'device' must be one of h200, .*mi300x") as error:
            catalog.find(name)
    assert "'h200'" in str(error.value).partition("Did you mean")[2]


def test_an_amd_device_without_a_telling_name():
    given = properties("AMD Radeon Graphics", gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304)
    given.total_memory = 192 << 30
    assert catalog.of_properties(given).key == "mi300x"
    # a partition of an MI300X is not an MI300X
    given.multi_processor_count, given.total_memory = 80, 64 << 30
    assert catalog.of_properties(given).origin == "derived"


def test_an_unknown_device_is_derived_and_said_once(caplog):
    l40s = properties("NVIDIA L40S", major=8, minor=9, multi_processor_count=142, clock_rate=2520000)
    with caplog.at_level(logging.INFO, logger="fp8compile"):
        made = catalog.of_properties(l40s)
        assert catalog.of_properties(l40s) == made
    assert made.origin == "derived" and made.peak.bf16 == pytest.approx(362e12, rel=0.03)  # as published
    (message,) = [said for said in caplog.messages if "NVIDIA L40S is not described" in said]
    assert "calibrate" in message


def test_an_unknown_size_of_l2(monkeypatch, caplog, own_files):
    """Nothing counts as kept in it, which the log says, and it is neither stored nor guessed."""
    given = properties("NVIDIA L40", L2_cache_size=0)
    with caplog.at_level(logging.INFO, logger="fp8compile"):
        made = catalog.of_properties(given)
    assert made.l2 is None and not made.gpu.keeps(1) and "keep nothing in L2" in caplog.text
    catalog.store(made)
    assert catalog.stored()["NVIDIA L40"].l2 is None and "l2" not in own_files.read_text()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: given)
    assert gpu_of(torch.device("cuda", 0)).L2_cache_size is None
    del given.L2_cache_size
    assert gpu_of(torch.device("cuda", 0)).L2_cache_size is None
    assert H200.keeps(30 << 20) and not H200.keeps((30 << 20) + 1)


def test_derived_extremes():
    assert not catalog.derived(properties("NVIDIA GeForce RTX 3090", major=8, minor=6)).has_fp8
    assert catalog.derived(properties("NVIDIA of the future", major=13, minor=0)).has_fp8
    mi250x = properties("AMD Instinct MI250X", gcnArchName="gfx90a:sramecc+:xnack-")
    assert not catalog.derived(mi250x).has_fp8
    bare = SimpleNamespace(name="bare", major=9, minor=0, multi_processor_count=10, total_memory=1 << 30)
    made = catalog.derived(bare)
    assert made.bandwidth > 0 and made.flops.bf16 > 0 and made.gpu.multi_processor_count == 10


# -- devices with FP8 --


def seen(monkeypatch, **given):
    """Makes this process see one GPU with these properties."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties("some GPU", **given))
    return torch.device("cuda", 0)


TOO_OLD = "some GPU has compute capability 8.6; FP8 matmuls need 8.9 (RTX 40, L4, H100 or later)"


@pytest.mark.parametrize(
    "given, refused",
    [
        (dict(major=8, minor=9), None),
        (dict(major=8, minor=6), TOO_OLD),
        (dict(major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-"), None),
        (dict(major=12, minor=0, gcnArchName="gfx1201"), None),
        (dict(gcnArchName="gfx90a:sramecc+"), "gfx90a has no FP8 matmuls (gfx94, gfx95 and gfx12 do)"),
    ],
)
def test_devices_that_are_refused(monkeypatch, given, refused):
    cpu = torch.device("cpu")
    assert support.refusal([cpu, seen(monkeypatch, **given)]) == refused
    assert support.refusal([cpu]) is None and catalog.of(cpu) is None and gpu_of(cpu) is None
    assert support.refusal([torch.device("mps")]) == "mps devices have no FP8 matmuls here"


def test_the_gpu_of_this_process(monkeypatch):
    """Properties that torch does not report are taken from an H200."""
    gpu = gpu_of(seen(monkeypatch, major=8, minor=6, gcnArchName="NVIDIA of some kind"))
    assert gpu == dataclasses.replace(gpu, name="some GPU", minor=6) and gpu.warp_size == 32 and gpu.gfx == ""
    assert Gpu(gcnArchName="gfx942:sramecc+:xnack-").gfx == "gfx942"
    assert gfx_of(properties("", gcnArchName="gfx942")) == "gfx942"


def test_encodings():
    """A CPU emulates both encodings; a GPU has one."""
    assert support.encodings([torch.device("cpu")]) == ("ocp", "fnuz")
    assert support.encodings([torch.device("cuda")]) == ("ocp",)
    with hooks.fnuz():
        assert support.encodings([torch.device("cuda"), torch.device("cpu")]) == ("fnuz",)


def test_blackwell_alone_multiplies_mx(monkeypatch):
    assert not support.has_mx(None)
    for cuda, having in (("12.6", []), ("12.8", ["b200"]), ("12.9", ["b200", "rtx5090"])):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        keys = ("b200", "rtx5090", "h200", "mi300x")
        assert [key for key in keys if support.has_mx(catalog.find(key).gpu)] == having


# -- the file that calibrate stores --


def test_stored_and_read_again(own_files):
    known = catalog.find("h100")
    rates = dataclasses.replace(known.sustained, fp8=1234e12)
    first = dataclasses.replace(known, sustained=rates, launch=3.5e-6, origin="calibrated")
    assert catalog.store(first) == own_files
    second = dataclasses.replace(catalog.find("mi300x"), origin="calibrated")
    catalog.store(second)
    found = catalog.stored()
    assert list(found) == [known.name, "AMD Instinct MI300X"]
    assert found[known.name].flops.fp8 == 1234e12 and found[known.name].launch == 3.5e-6
    assert found[known.name].origin == "calibrated" and found["AMD Instinct MI300X"].gfx == "gfx942"
    # a stored description comes before a shipped one
    assert catalog.of_properties(properties(known.name)).flops.fp8 == 1234e12
    assert catalog.find(known.name).flops.fp8 == 1234e12
    assert catalog.find("h100").flops.fp8 == known.flops.fp8  # a key always finds the shipped one
    catalog.store(dataclasses.replace(first, launch=1e-6))
    catalog.store(dataclasses.replace(first, key='a"b', name='The "fast" \\ one'))
    assert catalog.stored()[known.name].launch == 1e-6 and len(catalog.stored()) == 3


A_GPU = (
    '[a]\nname = "a"\nsms = 1\ncapability = [9, 0]\nl2 = 1\nmemory = 1\nsustained = { bf16 = '
    "1.0, bandwidth = 1.0 }\n"
)


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("not toml at all [", None),
        ("h100 = 3", None),
        ('["a"]\nname = "a"\nsms = 1\n', "'sustained'"),
        (A_GPU.replace(", bandwidth = 1.0", ""), "'bandwidth'"),
        (f"{A_GPU}speed = 1\n", "'speed'"),
        ("\xff\xfe", None),
    ],
)
def test_a_broken_file_is_a_warning_and_ignored(own_files, caplog, text, wrong):
    own_files.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING, logger="fp8compile"):
        assert catalog.of_properties(properties("NVIDIA H200")).key == "h200"
        assert catalog.stored() == {}
    assert len(caplog.records) == 1 and str(own_files) in caplog.text and "is ignored" in caplog.text
    assert wrong is None or wrong in caplog.text
    # the broken file can be replaced
    catalog.store(dataclasses.replace(catalog.find("h200"), origin="calibrated"))
    assert list(catalog.stored()) == ["NVIDIA H200"]


def test_where_it_is_stored(monkeypatch, tmp_path):
    monkeypatch.delenv(DEVICES_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert catalog.stored_path() == tmp_path / "fp8compile" / "devices.toml"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalog.stored_path() == tmp_path / ".cache" / "fp8compile" / "devices.toml"


# -- calibrate --


class Clock:
    """A timer of a device with 132 SMs, `RATES` and `LAUNCH` seconds for a launch, whose matmuls take whole
    waves. It runs the function, and computes the time from the sizes of the function's tensors. Each time has
    `EVENTS` seconds of its own."""

    BYTES, LAUNCH, EVENTS = 1e11, 1e-6, 4e-6
    RATES = catalog.Rates(bf16=2e14, fp16=2e14, fp32=2e14, fp8=4e14, fp8_precise=3e14, bandwidth=BYTES)

    def __init__(self):
        self.calls = []

    def seconds(self, function, ahead=1):
        result = function()
        contents = [cell.cell_contents for cell in function.__closure__]
        cells = dict(zip(function.__code__.co_freevars, contents, strict=True))
        self.calls.append(sorted(cells))
        if "source" in cells:
            return 2 * cells["source"].nbytes / self.BYTES
        if "number" in cells:
            assert ahead > cells["count"] / 4 or cells["count"] == 1  # the host has time to launch them
            return self.EVENTS + cells["count"] * self.LAUNCH
        (m, k), n = cells["a"].shape, cells["b"].shape[0]
        assert result.shape == (m, n)
        dtype = "fp8_precise" if cells["a"].dtype.itemsize == 1 else "bf16"
        if cells.get("how", {}).get("use_fast_accum"):
            dtype = "fp8"
        known = dataclasses.replace(catalog.find("h100"), sustained=self.RATES, launch=self.LAUNCH)
        return self.EVENTS + cost.compute(known, m, n, k, dtype) + cost.start(known, dtype)


def test_the_time_of_a_launch_is_a_slope():
    """4 us of events and 2 us a launch, with a disturbed time on either side, and a clock that stands
    still."""
    usual = 4e-6 + 64 * 2e-6, 4e-6 + 256 * 2e-6
    assert calibrate.slope([usual], 64) == pytest.approx(2e-6)
    disturbed = [(usual[0] + 1e-3, usual[1]), usual, (usual[0], usual[1] + 1e-3), usual, usual]
    assert calibrate.slope(disturbed, 64) == pytest.approx(2e-6)
    assert calibrate.slope([(5e-6, 5e-6)], 64) == 1e-7


def test_measured_with_a_clock_that_is_known():
    clock, cpu = Clock(), torch.device("cpu")
    sizes = (32, 64, 16), (64, 32, 48), (16, 16, 16)
    made = calibrate.measured(catalog.find("h100"), clock, cpu, sizes=sizes, copy_bytes=1 << 12)
    assert made.flops.bf16 == pytest.approx(2e14) and made.flops.fp8 == pytest.approx(4e14)
    assert made.flops.fp8_precise == pytest.approx(3e14)
    assert made.bandwidth == pytest.approx(1e11) and made.launch == pytest.approx(1e-6)
    assert made.origin == "calibrated"
    assert made.sms == 132 and made.peak == catalog.find("h100").peak
    assert len(clock.calls) == 1 + 5 * 3 + 1 + 2 * calibrate.PAIRS


def test_a_device_without_fp8_and_a_library_that_refuses_it(monkeypatch, caplog):
    a100, cpu = catalog.find("a100"), torch.device("cpu")
    made = calibrate.measured(a100, Clock(), cpu, sizes=((16, 16, 16),), copy_bytes=1 << 12)
    assert made.flops.fp8 == 0.0 and not made.has_fp8
    monkeypatch.setattr(torch, "_scaled_mm", mock.Mock(side_effect=RuntimeError("only supported on ...")))
    known, cpu = catalog.find("h100"), torch.device("cpu")
    assert calibrate.matmul_rate(Clock(), cpu, "fp8", ((16, 16, 16),), 0.0, known) == 0.0
    assert "no FP8 matmul here" in caplog.text


@pytest.mark.gpu
def test_calibrate_this_device(own_files, capsys):
    made = calibrate.calibrate()
    stored = catalog.of(torch.device("cuda"))  # with fewer digits
    assert own_files.is_file() and stored.origin == "calibrated"
    assert stored.flops.bf16 == pytest.approx(made.flops.bf16, rel=1e-3)
    assert made.flops.bf16 > 1e12 and made.bandwidth > 1e10 and "sustained" in capsys.readouterr().out
