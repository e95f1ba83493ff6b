"""Where PyTorch is there and nothing else, as in an image for GPUs: models train, and what needs more says
its name, and how to install it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bare import bare

# the ways to give options, a training step, reports, pages and the scaling state
PROGRAM = """
import contextlib, io, sys
import torch
from torch import nn
import fp8compile
from fp8compile import Recipe, Rule
from tests.support import hooks

torch.manual_seed(0)
x = torch.randn(32, 128)

def trained(model, backend="fp8", **options):
    compiled = torch.compile(model, backend=backend, dynamic=False, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] < losses[0], losses
    return model

def model():
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))

tables = {"extends": "llama", "rules": [{"module": "2", "gemm": ["wgrad"], "where": "n < 129", "fp8": False}]}
options = {"policy": {**tables, "recipes": {"mine": {"margin": 1}}}, "eval": "fp8", "max_autotune": False}

with HOW:
    delayed = trained(model(), **options)
    rowwise = trained(model(), fp8compile.fp8, recipe="rowwise", policy=sys.argv[1])
    trained(model(), recipe=Recipe("mxfp8"), policy=lambda module, name: name != "2", exclude=["head"])
    assert "5 of 5" in fp8compile.explain(model(), x, options={"policy": "fast"}).summary()

    report = fp8compile.report(delayed)
    assert "4 of 5 matmuls" in report.summary() and "share  decision" in str(report)
    assert "</html>" in report.to_html()
    assert "of mine" in str(fp8compile.report(rowwise))
    assert "0.weight" in str(fp8compile.stats(delayed, measure=True))

    saved, loaded = io.BytesIO(), model()
    torch.save(fp8compile.ScalingState(delayed, all_ranks=False).state_dict(), saved)
    saved.seek(0)
    fp8compile.ScalingState(loaded, strict=True).load_state_dict(torch.load(saved))
    both = trained(loaded, **options), delayed
    one, other = (fp8compile.ScalingState(x, all_ranks=False).state_dict() for x in both)
    assert one.keys() == other.keys()

for statement in '''
Rule(modul="x")
import fp8compile.cli
fp8compile.monitor(delayed, 1, to="tensorboard:runs")
fp8compile.export(delayed, sys.argv[1] + ".out")
from fp8compile.reporting import plots; plots.plot_comparison([], "", "x.png", {}, 1)
import fp8compile.integrations.lightning
import fp8compile.integrations.transformers
'''.strip().splitlines():
    try:
        exec(statement)
    except (Exception, SystemExit) as error:
        print(error)
"""
SAYS = """
unknown key 'modul' (value 'x' (str)). Did you mean 'module'
the command line needs click, which is not installed: pip install click
needs tensorboard: pip install tensorboard
fp8compile.export needs safetensors, which is not installed: pip install safetensors
plot needs matplotlib: pip install matplotlib
fp8compile.integrations.lightning needs lightning, which is not installed: pip install 'lightning>=
fp8compile.integrations.accelerate needs accelerate, which is not installed: pip install 'accelerate>=
""".strip().splitlines()


def run(folder: Path, how: str, more: str = "") -> list[str]:
    """The lines that the program prints, and what it runs after it."""
    policy = folder / "mine.toml"
    policy.write_text('[[rules]]\nname = "of mine"\nmodule = "2"\nfp8 = "off"\n')
    done = bare(PROGRAM.replace("HOW", how) + more, str(policy))
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_model_trains_and_what_is_missing_is_named(tmp_path: Path) -> None:
    lines = run(tmp_path, "hooks.lowered()")
    assert len(lines) == len(SAYS)
    for line, says in zip(lines, SAYS, strict=True):
        assert says in line


# with torch 2.11 in each run of CI: what `device.sh first` does with the packages of an image
@pytest.mark.weekly
def test_inductor_and_the_kernels_for_a_gpu(tmp_path: Path) -> None:
    """Compiled for this CPU, and for a GPU that is described."""
    estimate = "print(fp8compile.estimate(model(), x, device='h100').summary())"
    *_, last = run(tmp_path, "contextlib.nullcontext()", estimate)
    assert "h100" in last.lower()
