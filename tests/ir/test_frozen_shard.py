"""Shards of weights in FP8 as `fully_shard` makes them, rank by rank in one process: what they send makes the
weight again. (tests/features/load/test_shards.py trains with them.)"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8compile.config.recipe import ROW, WHOLE, Block
from fp8compile.ir.frozen import FrozenWeight
from fp8compile.ir.frozen_shard import FrozenShard

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
SQUARE, BF16 = Block(128, 128), torch.bfloat16
SCALES = {SQUARE: (3, 2), ROW: (320, 1), WHOLE: (1,)}


def weight(shape: tuple[int, ...], scales: tuple[int, ...], block: Block) -> FrozenWeight:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    return FrozenWeight(data, torch.rand(scales, generator=generator) + 0.5, BF16, block)


def shard(held: FrozenWeight, rank: int, ranks: int) -> Any:
    """The parameter that `fully_shard` leaves on a rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = nn.Module()
    module.weight = nn.Parameter(held, requires_grad=False)
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=ranks)
    try:
        fully_shard(module, mesh=init_device_mesh("cpu", (ranks,)))
    finally:
        dist.destroy_process_group()
    return module.weight


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("block", [SQUARE, ROW, WHOLE, "stack"])
def test_the_weight_again(block: Any, ranks: int) -> None:
    """Cuts inside of blocks, last ranks with fewer rows, and ranks without any (5 matrices on 7 ranks)."""
    stack = block == "stack"
    held = weight((5, 256, 130), (5, 2, 2), SQUARE) if stack else weight((320, 256), SCALES[block], block)
    values, shards = held.dequantized(), [shard(held, rank, ranks) for rank in range(ranks)]
    locals_ = [x._local_tensor for x in shards]
    assert all(type(x) is FrozenShard and x.dtype == BF16 for x in locals_)
    rows = -(-len(held) // ranks)
    assert [len(x.data_) for x in locals_] == [max(0, min(rows, len(held) - i * rows)) for i in range(ranks)]
    for i, x in enumerate(locals_):
        assert torch.equal(x * 1, values[i * rows : (i + 1) * rows])
    sent = [x.fsdp_pre_all_gather(None)[0] for x in locals_]
    assert len({tuple(x.shape for x in both) for both in sent}) == 1 and sent[0][0].dtype == torch.uint8
    data, scales = (torch.cat(parts) for parts in zip(*sent, strict=True))
    made, freed = locals_[-1].fsdp_post_all_gather((data, scales), None, BF16)
    assert type(made) is FrozenWeight and made.block == held.block
    assert same(made.data_, held.data_) and same(made.inv_, held.inv_)
    memory = made.data_.data_ptr(), made.inv_.data_ptr()
    for tensor in (data, scales, *freed):
        tensor.fill_(0)
    data.copy_(torch.cat([x for x, _ in sent])), scales.copy_(torch.cat([x for _, x in sent]))
    version = made.inv_._version
    locals_[0].fsdp_post_all_gather((data, scales), None, BF16, out=made)  # the next gather
    assert same(made.inv_, held.inv_) and memory == (made.data_.data_ptr(), made.inv_.data_ptr())
    assert not freed or made.inv_._version == version  # backward has saved it


def test_a_block_that_is_cut_has_its_scales_twice_and_no_other_one() -> None:
    held = weight((640, 256), (5, 2), SQUARE)
    first, second = (shard(held, rank, 2)._local_tensor for rank in range(2))
    assert same(first.inv_, held.inv_[:3]) and same(second.inv_, held.inv_[2:])
    even = [shard(held, rank, 5)._local_tensor.inv_ for rank in range(5)]
    assert same(torch.cat(even), held.inv_)


def test_a_compiled_reader_of_a_shard_gets_its_values() -> None:
    held = weight((320, 256), (3, 2), SQUARE)
    part = shard(held, 1, 2)._local_tensor
    read = torch.compile(lambda x: x * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(read(part), held.dequantized()[160:] * 2)


def test_others_than_fsdp_get_plain_parts() -> None:
    held = weight((320, 256), (3, 2), SQUARE)
    assert {type(x) for x in (*held.chunk(2), held.new_zeros(4, 256), held[:160])} == {Tensor}
