"""`served_weights`: the tensors of an export, one at a time; the bytes that the next forward multiplies."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8compile
from fp8compile import ExportError, served_weights
from fp8compile.distributed import fp8_all_gather
from tests.distributed.ranks import build, gathered
from tests.features.export.small import FP8, Small, bits, tokens, trained
from tests.support import hooks
from tests.support.harness import noise
from tests.support.processes import on_ranks
from tests.support.served import alike, config_of, same, tensors_of

pytest.importorskip("safetensors")
pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]

SCALES = ("weight_scale", "weight_scale_inv")
E4M3 = torch.float8_e4m3fn
LIMIT = 120.0  # seconds, of each test with several processes


def multiplied(call: Callable[[], Any]) -> list[tuple[Tensor, Tensor]]:
    """The weights of the FP8 matmuls of a forward, and their scales."""
    with hooks.multiplied() as found:
        call()
    return found


def agree(served: dict[str, Tensor], names: list[str], found: list[tuple[Tensor, Tensor]]) -> None:
    """What was multiplied is what was served, in the order of the model."""
    assert len(found) == len(names)
    for name, (values, scale_inv) in zip(names, found, strict=True):
        key = next(f"{name}.{last}" for last in SCALES if f"{name}.{last}" in served)
        assert same(served[f"{name}.weight"], values), name
        scale = served[key]
        if scale.dtype == torch.uint8:
            scale = torch.exp2(scale.double() - 127.0).float()
        assert torch.equal(scale.reshape(-1), scale_inv.reshape(-1)), name


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_they_are_the_export_and_what_the_next_forward_multiplies(recipe: str, tmp_path: Path) -> None:
    model = Small()
    compiled = trained(model, 3, recipe)
    served = dict(served_weights(compiled))
    made = fp8compile.export(model, tmp_path / "out")
    assert [name for name in served if name in model.state_dict()] == list(model.state_dict())
    assert alike(tensors_of(made.directory), served)
    agree(served, list(FP8), multiplied(lambda: compiled(tokens(7))))


@pytest.mark.feature("delayed")
def test_the_scale_is_that_of_the_next_call_wherever_training_is() -> None:
    """After a step, and after each micro-batch; also of a weight that has left its history."""
    model = Small()
    compiled = trained(model, 3)
    with torch.no_grad():
        model.up.weight.mul_(1.5)
    scales = []
    for seed in range(4):
        served = dict(served_weights(model))
        scales.append(served["up.weight_scale"].item())
        with hooks.multiplied() as found:
            y = compiled(tokens(seed))
        agree(served, list(FP8), found)
        y.sum().backward()
    assert len(set(scales)) > 1  # the state has moved between them


@pytest.mark.feature("weight_cache")
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_cached_copies_are_what_is_served(recipe: str) -> None:
    model = Small()
    compiled = trained(model, 2, recipe, cache_weights=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        with hooks.weight_casts() as casts:
            for micro in range(2):
                served = dict(served_weights(model))
                with hooks.multiplied() as found:
                    y = compiled(tokens(10 * seed + micro))
                agree(served, list(FP8), found)
                y.logsumexp(-1).mean().backward()
        optimizer.step()
    assert len(casts) == 1  # the second micro-batch has read the copies of the first


@pytest.mark.feature("merge")
def test_merged_weights() -> None:
    from tests.support.models import SwiGlu

    model = nn.Sequential(nn.Embedding(96, 128), SwiGlu(), nn.Linear(128, 96))
    with torch.no_grad():
        model[1].up.weight.mul_(4.0)  # type: ignore[union-attr]
    compiled = trained(model, 2, "tensorwise", merge_matmuls=True)
    served = dict(served_weights(model))
    (merged, scale), (down, _) = multiplied(lambda: compiled(tokens(3)))
    ours = torch.cat([bits(served[f"1.{name}.weight"]) for name in ("gate", "up")])
    assert torch.equal(ours, bits(merged)) and torch.equal(bits(served["1.down.weight"]), bits(down))
    assert all(served[f"1.{name}.weight_scale"].item() == scale.unique().item() for name in ("gate", "up"))


def test_one_layer_at_a_time_on_the_device_of_the_parameter() -> None:
    """Nothing is cast or copied before it is asked for, or kept after it."""
    model = Small()
    trained(model, 1, "tensorwise")
    model.head.weight = model.embed.weight
    with hooks.export_casts() as casts:
        taken = served_weights(model)
        assert not casts
        alive = []
        for name, tensor in taken:
            assert not tensor.requires_grad
            alive.append(weakref.ref(tensor))
            assert sum(x() is not None and x().dtype in (E4M3, torch.float32) for x in alive) <= 2
            if name == "embed.weight":
                assert tensor.data_ptr() == model.embed.weight.data_ptr()
            if name.endswith("up.weight"):
                assert casts == ["up"]
    names = [name for name, _ in served_weights(model)]
    assert len(casts) == 2 and "head.weight" not in names
    with torch.no_grad():
        model.down.weight[0, 0] = float("nan")
    taken = served_weights(model)
    with pytest.raises(ExportError, match="down.weight has NaN or infinite values"):
        list(taken)


@pytest.mark.feature("load")
def test_what_is_held_in_fp8_is_served_as_it_came(tmp_path: Path) -> None:
    """Scales in the dtype of the file, also where the policy names another recipe."""
    from safetensors.torch import save_file

    author = Small()
    trained(author, 1, "blockwise")
    released = {name: tensor.clone() for name, tensor in served_weights(author)}
    scales = {name: x.bfloat16() for name, x in released.items() if name.endswith("_inv")}
    save_file(released | scales, tmp_path / "released.safetensors")
    model = Small()
    fp8compile.load_fp8(model, tmp_path / "released.safetensors")
    trained(model, 2, "tensorwise")
    served = dict(served_weights(model))
    assert list(served) == list(released) and not torch.equal(served["head.bias"], released["head.bias"])
    came = released | scales
    held = [name for name in served if name.rpartition(".")[0] in FP8 and "weight" in name]
    assert len(held) == 4 and all(same(served[name], came[name]) for name in held)


def test_what_cannot_be_served() -> None:
    with pytest.raises(ExportError, match="no layer of this Small is known to be FP8: compile it"):
        served_weights(Small())  # at once, not when tensors are asked for
    model = Small()
    trained(model, 1, "rowwise")
    with pytest.raises(ExportError, match="format must be one of"):
        served_weights(model, "vllm")
    with pytest.raises(TypeError, match="expected a torch.nn.Module, not dict"):
        served_weights({})  # type: ignore[arg-type]


# -- several processes --


def _sharded(rank: int, recipe: str, gather: bool, mixed: bool, folder: str) -> list[Any]:
    """A replica and a sharded model with the same batches: what each serves and, of the sharded one, what its
    next forward multiplies."""
    made: list[Any] = []
    for shards in (False, True):
        torch._dynamo.reset()
        model: Any = build("square")
        if mixed and not shards:
            model.to(torch.bfloat16)
        kind: Any = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if mixed else {}
        for block in model.blocks:
            block.compile(backend="fp8", fullgraph=True, options={"recipe": recipe})
            if shards:
                fully_shard(block, **kind)
        if shards:
            fully_shard(model, **kind)
            if gather:
                fp8_all_gather(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if mixed else 0.1)
        for step in range(4):
            x = noise(32, 256, seed=step, dtype=torch.bfloat16 if mixed else torch.float32)
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        made.append({name: tensor.clone() for name, tensor in served_weights(model)})
        fp8compile.export(model, Path(folder, "shards" if shards else str(rank)))
    model.blocks[0].unshard()  # as a forward without gradients may leave it
    assert alike(dict(served_weights(model)), made[1])
    return [*made, multiplied(lambda: model(x)), gathered(model)]


@pytest.mark.feature("fsdp_gather")
@pytest.mark.cases(test=1, slow=2)
@pytest.mark.parametrize(
    ("recipe", "gather", "mixed"),
    [
        ("delayed", False, False),
        ("tensorwise", True, False),
        ("blockwise", True, True),
        ("tensorwise", True, True),
        ("rowwise", False, True),
    ],
)
def test_shards_are_served_as_a_replica_is_exported(
    recipe: str, gather: bool, mixed: bool, tmp_path: Path
) -> None:
    layers = [f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")]
    said = on_ranks(2, _sharded, recipe, gather, mixed, str(tmp_path), limit=LIMIT)
    for rank, (replica, served, found, arrived) in enumerate(said):
        for tensors, folder in ((replica, tmp_path / str(rank)), (served, tmp_path / "shards")):
            assert alike(tensors_of(folder), tensors)
        assert config_of(tmp_path / "shards") == config_of(tmp_path / str(rank))
        agree(served, layers, found)
        assert all(arrived[f"{name}.weight"] == ("e4m3", "") for name in layers if gather)
        if mixed:  # what is not cast has the dtype of the shards
            keep = [name for name in replica if name.rpartition(".")[0] in layers and "weight" in name]
            replica, served = ({name: x[name] for name in keep} for x in (replica, served))
        assert alike(replica, served) and list(replica) == list(served)


def _tensor_parallel(rank: int, recipe: str, group: bool, folder: str = "") -> Any:
    """Up is divided by rows, down by columns."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    options: Any = {"recipe": recipe, **({"amax_group": "tp"} if group else {})}
    model: Any = build("square").blocks[0]
    plain = build("square").blocks[0]
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    found = []
    for one in (plain, model):
        torch._dynamo.reset()
        compiled = torch.compile(one, backend="fp8", options=options if one is model else {"recipe": recipe})
        compiled(noise(32, 256)).sum().backward()
        try:
            found.append({name: tensor.clone() for name, tensor in served_weights(one)})
        except ExportError as error:
            return str(error)
    fp8compile.export(model, folder)
    return [*found, multiplied(lambda: compiled(noise(32, 256)))]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "group"), [("tensorwise", True), ("blockwise", False)])
def test_tensor_parallel_weights(recipe: str, group: bool, tmp_path: Path) -> None:
    """What is served and exported is the whole, of which each rank multiplies a part."""
    for rank, (plain, served, ((up, _), (down, _))) in enumerate(
        on_ranks(2, _tensor_parallel, recipe, group, str(tmp_path / "out"), limit=LIMIT)
    ):
        assert alike(plain, served) and alike(plain, tensors_of(tmp_path / "out"))
        assert list(plain) == list(served)
        assert torch.equal(bits(served["up.weight"]).chunk(2)[rank], bits(up))
        assert torch.equal(bits(served["down.weight"]).chunk(2, 1)[rank], bits(down))


@pytest.mark.slow
def test_parts_that_each_rank_scales_for_itself_are_refused() -> None:
    for said in on_ranks(2, _tensor_parallel, "tensorwise", False, limit=LIMIT):
        assert said.startswith("up: each rank has a part of its weight and scales it") and "\n" not in said
