"""How much memory a load takes, by the kernel's own count, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

STATUS = Path("/proc/self/status")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not STATUS.exists(), reason="needs Linux")]
LAYERS, WIDE, HIGH = 12, 2048, 4096

LOAD = f"""
import sys
import threading
import time
import torch
from torch import nn
import fp8compile

largest = 0

def now():  # without pages of files, which the kernel takes back when it needs them
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def watch():
    global largest
    while True:
        largest = max(largest, now())
        time.sleep(0.0002)

def model(layers):
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear({WIDE}, {HIGH}, bias=False) for _ in range(layers)))

fp8compile.load_fp8(model(1), sys.argv[1] + "/one.safetensors")
before, made = now(), model({LAYERS})
threading.Thread(target=watch, daemon=True).start()
fp8compile.load_fp8(made, sys.argv[1])
largest = max(largest, now())
print(sum(p.nbytes for p in made.parameters()), sum(p.numel() for p in made.parameters()), largest - before)
"""


def test_the_peak_of_a_load(tmp_path: Path) -> None:
    """At most 1.05 bytes a parameter are held; the peak is 1.1 of that and one tensor."""
    tensors = {}
    for i in range(LAYERS):
        drawn = torch.randint(0, 100, (HIGH, WIDE), dtype=torch.uint8)
        tensors[f"{i}.weight"] = drawn.view(torch.float8_e4m3fn)
        tensors[f"{i}.weight_scale_inv"] = torch.ones(HIGH // 128, WIDE // 128)
    save_file(tensors, tmp_path / "model.safetensors")
    save_file({x: tensors[x] for x in ("0.weight", "0.weight_scale_inv")}, tmp_path / "one.safetensors")
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    held, parameters, peak = map(int, done.stdout.split()[-3:])
    assert parameters == LAYERS * WIDE * HIGH and held <= 1.05 * parameters
    assert 0.8 * held < peak <= 1.1 * held + WIDE * HIGH, (held, peak)
