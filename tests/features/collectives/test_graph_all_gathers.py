"""All-gathers inside of a compiled graph carry FP8: what the ranks agree on when one of them overflows or has
a bad batch. (test_equivalence_on_ranks.py trains with the pass and without.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.distributed.ranks import build, local, tensor_parallel
from tests.support import hooks
from tests.support.processes import on_ranks

pytestmark = pytest.mark.slow


LOADED = 11  # the step before which one rank loads weights


def batch(step: int) -> torch.Tensor:
    scale = (1.0, 2.0, 0.5, 1.5)[step % 4]
    return scale * torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(10 * step))


def _one_rank_is_different(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """On rank 1 alone: overflows, in step 4 in its part of a gathered tensor, in 7 in its shard of a weight;
    a NaN in 10; weights that are loaded before 11, so that this call is cold, and rank 0's is not."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model: Any = build("gated block")
    tensor_parallel(model, mesh, sequence=True)
    model.compile(backend="fp8", options={"recipe": "delayed", **options})
    outputs, states = [], []
    changed = {4: model.norm.weight, 7: model.mlp.gate.weight}
    with hooks.cold_calls() as cold:
        for step in range(13):
            model.zero_grad()
            x = batch(step)
            if step in changed and rank == 1:
                local(changed[step].data).mul_(100.0)
            if step == LOADED and rank == 1:
                model.mlp.load_state_dict(model.mlp.state_dict())
            if step == 10:  # the tokens of rank 1
                x[:, 8:] = float("nan")
            y = local(model(DTensor.from_local(x.chunk(2, 1)[rank], mesh, [Shard(1)])))
            y.square().sum().backward()
            outputs.append([y.detach().clone(), *(local(p.grad).clone() for p in model.mlp.parameters())])
            slots = hooks.slots_of(model).items()
            states.append({".".join(map(str, key)): [*slot.history(), slot.scale()] for key, slot in slots})
    return {"outputs": outputs, "states": states, "cold": cold}


FUSED = {"_micro_pipeline_tp": True}  # Inductor would fuse collectives, on NCCL


@pytest.mark.parametrize(("options", "alone"), [({}, [LOADED]), (FUSED, [])], ids=["", "fused"])
def test_one_rank_alone_is_cold(options: dict[str, Any], alone: list[int]) -> None:
    """Amaxes and scales of gathered tensors are the same on all ranks at each step, until one of them loads
    weights; and nothing hangs. Where Inductor may fuse collectives, no rank is cold alone."""
    ranks = on_ranks(2, _one_rank_is_different, options)
    cold = [found["cold"] for found in ranks]
    assert [step for step in range(13) if cold[0][step] and cold[1][step]] == [0]
    assert [step for step in range(13) if cold[0][step] != cold[1][step]] == alone
    for step in range(LOADED):
        one, two = (found["states"][step] for found in ranks)
        for key in ("mlp.gate.weight.input.0", "mlp.down.weight.gradient.0"):
            assert one[key] == two[key], (step, key)
    finite = [
        all(bool(x.isfinite().all()) for found in ranks for x in found["outputs"][step]) for step in range(13)
    ]
    assert finite == [step != 10 for step in range(13)]
