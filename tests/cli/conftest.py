"""A file with targets, and commands in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8compile import cli

MODEL = """
from __future__ import annotations

import dataclasses
import os
import torch
from torch import nn

print("said while loading")

@dataclasses.dataclass
class Config:
    width: int = 256

class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self, width=256, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(MLP(width) for _ in range(blocks))
        self.head = nn.Linear(width, 128)

    def forward(self, x, scale=1.0):
        for block in self.blocks:
            x = block(x)
        return self.head(x * scale).float().logsumexp(-1).mean()

def build():
    print("said while building")
    return Net(Config().width), (torch.zeros(64, 256),)

def alone():
    return Net()

def mapping():
    return dict(model=Net(), args=[torch.zeros(32, 256)], kwargs={"scale": 2.0})

def three():
    return Net(), torch.zeros(32, 256), {"scale": 2.0}

def tokenized():
    return Net(), {"x": torch.zeros(32, 256)}

def needs(width, depth=2, *, heads):
    return Net()

def fails():
    return helper(0)

def helper(x):
    return 1 / x

def leaves():
    raise SystemExit(3)

def number():
    return 3

def pair():
    return Net(), Net(), Net(), Net()

def chained():
    try:
        helper(0)
    except ZeroDivisionError as error:
        raise ValueError("no width") from error

def unknown_key():
    return {"model": Net(), "inputs": ()}

def misshapen():
    return Net(), (torch.zeros(64, 255),)

class Mixed(torch.nn.Module):  # Dynamo shows the arguments of the operator in lines of their own
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(256, 256)

    def forward(self, x):
        q = self.qkv(x)[:, None]
        return torch.nn.functional.scaled_dot_product_attention(q.float(), q.float(), q).sum()

def mixed():
    return Mixed().bfloat16(), torch.zeros(2, 64, 256, dtype=torch.bfloat16)

class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient[:1]

class Backward(Mixed):
    def forward(self, x):
        return Wrong.apply(self.qkv(x)).sum()

def backward():
    return Backward(), torch.ones(64, 256)

def tiny():
    torch.manual_seed(0)
    return Net(128, 1), (torch.ones(64, 128),)

def in_place():
    return small, (torch.ones(64, 128),)

def half(loss):
    return loss / 2

def hidden():
    raise ValueError(repr([os.environ.get(x) for x in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")]))

net, small = Net(), Net(128, 1)
small.compile(backend="fp8")
limit = 5
"""


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    """A file with targets, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "my_model.py"
    file.write_text(MODEL)
    yield file
    sys.modules.pop("my_model", None)


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(capsys) -> Run:
    """Runs a command in this process: what it wrote to stdout and to stderr. `status`: that of its end."""

    def run(command: str, status: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        assert cli.main(command.split()) == status
        return capsys.readouterr()

    return run
