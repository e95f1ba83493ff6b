"""`python -m benchmarks.kernels` and `benchmarks.blocks`: families against eager operators, measurements."""

from __future__ import annotations

import pytest
import torch

from benchmarks import blocks, families, kernels, lines, results, tables
from fp8compile.dryrun import kernel_classes


@pytest.mark.slow
def test_families(tmp_path, capsys):
    """A family's kernel and Inductor's plan agree with the eager operators; a CPU gives no speeds."""
    path = tmp_path / "r.json"
    assert kernels.main(["--device", "cpu", "--shape", "33x40", "--json", str(path)]) == 0
    (result,) = results.read([path])
    for name in families.FAMILIES:
        fp8, inductor = (row for row in result["rows"] if row["family"] == name)
        assert (fp8["arm"], inductor["arm"]) == ("fp8", "inductor") and fp8["point"] == f"{name} 33x40"
        assert fp8["error"] is None and inductor["error"] is None and fp8["checked"] and inductor["checked"]
        assert fp8["generated"] and inductor["generated"] == [] and fp8["ms"] is None
    text = capsys.readouterr().out
    assert "GB/s" not in text and " ms" not in text and "this is no device" in text


def test_other_outputs_are_found():
    x = torch.randn(64, 64).bfloat16()
    cast = x.to(torch.float8_e4m3fn)
    kernels.compare([x, cast], [x.clone(), cast])
    wrong = x.clone()
    wrong[3, 5] = -2 * x[3, 5]
    for got in (wrong, x.t(), x.float(), x[:32], 1.05 * x, torch.full_like(x, float("nan"))):
        with pytest.raises(kernels.Wrong):
            kernels.compare([cast, x], [cast, got])


def test_speed_is_bytes_over_the_median_time(monkeypatch):
    """On a stand-in for a device, whose runs and copies take 2 ms."""
    memset = kernel_classes.MeasuredKernel("Memset (Device)", 9.0)
    amaxes = [kernel_classes.MeasuredKernel("fp8_amax", us) for us in (3.0, 5.0)]
    seen = iter([[memset], [memset, *amaxes]])
    monkeypatch.setattr(kernels.Device, "profiled", lambda self, call: next(seen))
    monkeypatch.setattr(kernels.Device, "milliseconds", lambda self, call: [2.0, 1.0, 9.0])
    found = kernels.Device(30, "cpu", 16).timed(lambda: None, size=10**7)
    assert found["ms"] == {"median": 2.0, "min": 1.0, "max": 9.0, "runs": 3}
    assert found["gb_per_s"] == pytest.approx(5.0) and found["share"] == pytest.approx(1.0)
    assert found["kernels"] == [{"name": "fp8_amax", "us": 4.0, "times": 2}]


@pytest.mark.slow
def test_counted_bytes_of_kernels(tmp_path):
    if kernels.fake_gpu.unavailable():
        pytest.skip(kernels.fake_gpu.unavailable())
    path = tmp_path / "r.json"
    given = ["--static", "--family", "gelu-backward", "--shape", "4096x1024", "--json", str(path)]
    assert kernels.main(given) == 0
    fp8, inductor = results.read([path])[0]["rows"]
    must = fp8["bytes"] / 1e9
    # Inductor reads both inputs twice
    assert must <= fp8["static"]["gb"] < 1.05 * must < 1.5 * must < inductor["static"]["gb"]
    assert "| gelu-backward 4096x1024 |" in tables.markdown(results.read([path]))
    given[2:5] = "layer-norm-backward", "--shape", "8192x14336"
    assert kernels.main(given) == 0
    fp8 = results.read([path])[0]["rows"][0]
    # rows that no register holds: of 10 bytes an element it reads 4 again, once
    assert fp8["static"]["gb"] == pytest.approx(1.4 * fp8["bytes"] / 1e9, rel=0.05)


@pytest.mark.weekly
def test_blocks(tmp_path) -> None:
    """Each block of some families, in two processes: kernels give what the eager operators give."""
    file, names = tmp_path / "blocks.jsonl", ["weight", "rms-norm", "gelu-backward"]
    assert blocks.main(["--device", "cpu", "--processes", "2", "--family", *names, "--json", str(file)]) == 0
    found = lines.read(file)
    assert sorted((row["family"], tuple(row["config"])) for row in found) == sorted(blocks.points(names))
    assert all(row["kernels"] for row in found)
