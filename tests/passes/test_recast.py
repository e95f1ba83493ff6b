"""Which copies forward keeps for backward: of weights (`passes.recast`), and of attention's output
(`passes.layouts`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.devices import catalog
from fp8compile.dryrun import fake_gpu
from fp8compile.passes.recast import CHEAP, FULL, LITTLE
from tests.support import hooks
from tests.support.gpu_steps import unallocated
from tests.support.harness import ALL_FP8, noise
from tests.support.models import LlamaLayer
from tests.support.stepped import stepped

pytestmark = pytest.mark.skipif(fake_gpu.unavailable() is not None, reason=fake_gpu.unavailable() or "")
H200 = catalog.find("h200")
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


class Deep(nn.Module):
    """Two linears whose inputs backward needs, a matmul's output each."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def step(build: Any, tokens: int, width: int, backend: str = "fp8", **options: Any) -> fake_gpu.Step:
    torch._dynamo.reset()
    model = unallocated(build, BF16)
    given = {"options": {"policy": ALL_FP8, **options}} if backend == "fp8" else {}
    compiled = torch.compile(model, backend=backend, **given)
    x = torch.empty((1, tokens, width), dtype=BF16, requires_grad=True)
    return fake_gpu.trace(lambda: compiled(x).sum().backward(), H200.gpu)


def kept(made: fake_gpu.Step, shape: tuple[int, ...]) -> int:
    """How many FP8 tensors of this shape a backward gets from its forward."""
    graph = next(graph for graph in made.graphs if graph.backward)
    given = [x for name, x in graph.inputs.items() if not name.startswith("primals")]
    return sum(x.dtype == FP8 and x.shape == shape for x in given)


@pytest.mark.slow
def test_many_tokens_cast_again_and_few_keep() -> None:
    """At as many tokens as the rule says, reading a weight takes 1.5% of the time of its matmuls."""
    seconds = 2 / H200.flops.fp8 + 4 / H200.flops.fp8_precise  # of the matmuls, a parameter and token
    assert 8050 < 2 / H200.bandwidth / (CHEAP * seconds) < 8150
    assert kept(step(lambda: Deep(1024), 8192, 1024), (1024, 1024)) == 0
    assert fp8compile.report().graphs[0].remarks == (f"all FP8 layers: recast_weights=True: {LITTLE}",)
    assert kept(step(lambda: Deep(1024), 6144, 1024), (1024, 1024)) == 2


def test_fp8_keeps_no_more_than_bf16() -> None:
    """With few tokens a weight's copy is larger than what FP8 saves on inputs, however dear a cast is."""
    few = 1536
    found = step(lambda: Deep(2048), few, 2048)
    # two inputs of 1536 x 2048 save more than one copy takes, and less than two
    assert kept(found, (2048, 2048)) == 1
    (remark,) = fp8compile.report().graphs[0].remarks
    assert remark == f"1 FP8 layer: recast_weights=True: {FULL}"
    bf16 = step(lambda: Deep(2048), few, 2048, "inductor").kept_for_backward
    assert found.kept_for_backward <= bf16 + 100  # scales
    # casting again would take a fifth of the matmuls' time
    assert kept(step(lambda: Deep(2048), 512, 2048), (2048, 2048)) == 2


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("given", "count"), [(True, 0), (False, 2)])
def test_who_says_so_is_obeyed(given: bool, count: int) -> None:
    """Where "auto" would do the other thing."""
    tokens = 256 if given else 16384
    assert kept(step(lambda: Deep(1024), tokens, 1024, recast_weights=given), (1024, 1024)) == count


@pytest.mark.slow
def test_attention_reads_its_output_anyway() -> None:
    """The transposed copy for wgrad is written in backward, and the step computes the same as on a device
    that is unknown."""
    torch._dynamo.reset()
    results = []
    for device in ("h200", None):
        torch.manual_seed(0)
        model = LlamaLayer(256, 4, 2, 512).to(BF16)
        options = {"policy": ALL_FP8, "merge_matmuls": False, **({"device": device} if device else {})}
        compiled = torch.compile(model, backend="fp8", options=options)
        with hooks.interpreted():
            results.append(stepped(compiled, model, [noise(1, 64, 256, dtype=BF16)], torch.ones_like))
        assert {record.decision for record in fp8compile.report(model).matmuls} == {"fp8"}
    assert all(map(torch.equal, *(tensors.values() for tensors in results)))
