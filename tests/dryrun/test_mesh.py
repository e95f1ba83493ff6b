"""The communication of an estimate: what is sent, against torch's own collectives, and its time, against link rates."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8compile
from fp8compile.devices import catalog
from fp8compile.dryrun import fake_gpu
from fp8compile.dryrun.communication import Communication, communication, divided_kernels
from fp8compile.dryrun.estimate import estimate
from fp8compile.dryrun.estimate_result import Cost, Estimate
from fp8compile.dryrun.mesh import Mesh, Pair, check_divisible, links_for, pairs
from fp8compile.ir.records import GraphReport, MatmulRecord
from tests.support import models
from tests.support.models import ResidualMlp

WIDTH, HIDDEN, TOKENS, VOCABULARY = 256, 1024, 64, 384
H200 = catalog.find("h200")


class Net(nn.Module):
    """Two residual MLPs, a norm and a head, whose FSDP2 units are the MLPs and the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualMlp(WIDTH, HIDDEN) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float().square().mean()


def net(dtype: torch.dtype = torch.bfloat16) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)


@functools.cache
def explained(dtype: torch.dtype, recipe: str) -> tuple[GraphReport, ...]:
    return fp8compile.explain(net(dtype), batch(dtype), options={"recipe": recipe}).graphs


def sent(mesh: str, dp: str = "fsdp", dtype: torch.dtype = torch.bfloat16, recipe: str = "tensorwise") -> Communication:
    """The communication of a step of `net`, whose kernels take 1 s in bf16 and 0.8 s in FP8."""
    graphs, wanted = explained(dtype, recipe), Mesh.of(mesh)
    divided = list(pairs(graphs)) if wanted.tp > 1 else []
    return communication([net(dtype)], graphs, divided, wanted, H200, links_for(wanted, H200), dp, (1.0, 0.8), 2)


# -- against torch -----------------------------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """Calls and bytes of the tensors of collectives that run inside, by kind."""

    KINDS = {  # operator: (position of the whole tensor, kind)
        "_allgather_base_": (0, "all-gather"),
        "_reduce_scatter_base_": (1, "reduce-scatter"),
        "allreduce_": (0, "all-reduce"),
        "all_reduce": (0, "all-reduce"),
    }

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._opname
            if name in self.KINDS:
                position, kind = self.KINDS[name]
                whole = args[position]
                count = self.found.setdefault(kind, [0, 0])
                count[0] += 1
                count[1] += sum(t.nbytes for t in (whole if isinstance(whole, (list, tuple)) else [whole]))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """This process is rank 0 of 8, and collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def counted(step: Callable[[], torch.Tensor]) -> dict[str, list[int]]:
    with Counted() as mode:
        step().backward()
    return mode.found


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fsdp_sends_what_fsdp2_sends(eight_ranks, dtype) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    made = sent("dp=8", dtype=dtype)
    model, policy = net(dtype), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)
    for part in (*model.blocks, model):
        fully_shard(part, mp_policy=policy)
    found = counted(lambda: model(batch(dtype)))
    gathered = [each for each in made.collectives if each.name.startswith("all-gather")]
    (scattered,) = (each for each in made.collectives if each.name.startswith("reduce-scatter"))
    assert found["all-gather"][0] == sum(each.calls for each in gathered) == 5  # the root once, the blocks twice
    assert found["reduce-scatter"][0] == scattered.calls == 3
    assert sum(each.bf16_bytes for each in gathered) == found["all-gather"][1] * 7 / 8
    assert scattered.bf16_bytes == found["reduce-scatter"][1] * 7 / 8


def test_ddp_sends_what_ddp_sends(eight_ranks) -> None:
    (made,) = sent("dp=8", "ddp").collectives
    model, buckets = nn.parallel.DistributedDataParallel(net()), []

    def hook(_, bucket):
        buckets.append(bucket.buffer().nbytes)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)
    model(batch()).backward()
    assert made.bf16_bytes == 2 * 7 / 8 * sum(buckets) and made.calls == 1 and made.ranks == 8


def test_tp_sends_what_torch_sends(eight_ranks) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    made = sent("tp=8")
    model, mesh = net(), init_device_mesh("cpu", (8,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    found = counted(lambda: model(batch()))
    assert [each.name for each in made.collectives] == ["all-reduce of outputs, forward", "all-reduce of gradients, backward"]
    assert found["all-reduce"][0] == sum(each.calls for each in made.collectives) == 4
    assert sum(each.bf16_bytes for each in made.collectives) == found["all-reduce"][1] * 2 * 7 / 8


# -- which linears tensor parallelism divides --------------------------------------------------------------------------


@pytest.mark.slow
def test_pairs_of_a_llama() -> None:
    """Attention's and the MLP's linears of each layer, and not the head behind them."""
    model = nn.Sequential(*(models.LlamaLayer(256, 4, 2, 512) for _ in range(2)), nn.Linear(256, 512))
    found = list(pairs(fp8compile.explain(model, torch.randn(2, 16, 256)).graphs))
    assert [([r.fqn for r in pair.columns], pair.row.fqn, pair.backward) for pair in found] == [
        (["0.q", "0.k", "0.v"], "0.o", True), (["0.gate", "0.up"], "0.down", True),
        (["1.q", "1.k", "1.v"], "1.o", True), (["1.gate", "1.up"], "1.down", True),
    ]  # fmt: skip


def _record(fqn: str, gemm: str, m: int = 8, n: int = 16, k: int = 16) -> MatmulRecord:
    return MatmulRecord(fqn, gemm, m, n, k, "fp8", parameter=f"{fqn}.weight" if gemm != "matmul" else "")


def test_pairs_look_through_attention_and_stop_at_a_row() -> None:
    """q and k reach o through two matmuls without a weight; the head reads a row-parallel output and stays whole."""
    names = ("q", "k", "v", "qk", "pv", "o", "up", "down", "head")
    records = tuple(_record(name, "matmul" if name in ("qk", "pv") else "fprop") for name in names)
    edges = ((0, 3), (1, 3), (3, 4), (2, 4), (4, 5), (5, 6), (6, 7), (5, 8), (7, 8))
    found = list(pairs([GraphReport(0, "", (*records, _record("up", "dgrad")), edges=edges)]))
    assert [([r.fqn for r in pair.columns], pair.row.fqn, pair.backward) for pair in found] == [
        (["q", "k", "v"], "o", False), (["up"], "down", True),
    ]  # fmt: skip


def test_sizes_that_do_not_divide() -> None:
    pair = Pair((_record("blocks.0.up", "fprop", n=1000),), _record("blocks.0.down", "fprop", k=1000), True)
    check_divisible([pair], 8)
    with pytest.raises(fp8compile.OptionError, match="tp divides the 1000 features of blocks.0.up; got 'tp=16'"):
        check_divisible([pair], 16)


def test_kernels_of_one_gpu() -> None:
    """Matmuls of the divided linears and the attention between them take a half; all else what it took."""
    pair = Pair((_record("b.0.attn.qkv", "fprop"),), _record("b.0.attn.proj", "fprop"), True)
    costs = {
        "b.0.attn.qkv": Cost(seconds=5, matmul_seconds=4),
        "b.0.attn.proj": Cost(seconds=2, matmul_seconds=2),
        "b.0.attn": Cost(seconds=10, attention_seconds=8),
        "b.0.mlp": Cost(seconds=7, matmul_seconds=7),
        "other": Cost(seconds=3, attention_seconds=3),
    }
    assert divided_kernels(costs, [pair], 2) == 27 - (4 + 2 + 8) / 2
    assert divided_kernels(costs, [], 2) == 27


# -- time and FP8 ------------------------------------------------------------------------------------------------------


def test_time_is_bytes_over_the_links_of_the_group() -> None:
    """Inside a node, NVLink; over nodes, the adapters of those GPUs of a node that are in the group."""
    links = H200.links
    for mesh, rate in (("dp=8", 361e9), ("dp=16", 361e9), ("dp=8,tp=2", 4 * 47e9), ("dp=4,tp=8", 47e9), ("dp=4,tp=2", 361e9)):
        made = sent(mesh)
        assert made.collectives[0].rate == rate, mesh
        assert all(each.bf16_seconds == each.bf16_bytes / each.rate for each in made.collectives)
    assert [Mesh.of("dp=8,tp=2").nodes(links), Mesh.of("dp=4,tp=2").nodes(links)] == [2, 1]
    assert sent("dp=4,tp=8").collectives[-1].rate == 361e9  # a tensor-parallel group never leaves the node
    assert Mesh(2, 16).group("tp", links) == (8, True) and Mesh(2, 16).group("dp", links) == (1, True)


def test_bounds() -> None:
    made = sent("dp=8,tp=2")
    by_axis = {axis: sum(c.bf16_seconds for c in made.collectives if c.axis == axis) for axis in ("dp", "tp")}
    bf16, fp8 = made.bounds
    assert (bf16.kernels, fp8.kernels) == (1.0, 0.8)
    assert bf16.exposed == pytest.approx(1.0 + sum(by_axis.values())) and bf16.hidden == 1.0
    slow = Communication(made.mesh, made.dp, "", made.collectives, (), 1e-9, 1e-9, ())
    assert slow.bounds[0].hidden == pytest.approx(max(by_axis.values()))  # no step is shorter than its slowest network
    bf16, fp8, better = sent("dp=8").bounds
    assert better.exposed < fp8.exposed < bf16.exposed and len(slow.bounds) == 2


def test_weights_of_two_kinds_of_parallelism_are_not_gathered_in_fp8() -> None:
    """fp8_all_gather leaves tensor-parallel weights in high precision."""
    assert sent("dp=8").with_fp8_all_gather and not sent("dp=8,tp=2").with_fp8_all_gather


@pytest.mark.cases(test=2, slow=1)
@pytest.mark.parametrize("recipe, possible", [("tensorwise", 1), ("delayed", 1), ("blockwise", 1), ("rowwise", 0)])
def test_only_weights_in_fp8_are_gathered_in_fp8(recipe, possible) -> None:
    """One byte an element of the four linears of the blocks, and no other parameter. FP8's own column does not count on it.
    With blockwise, those two weights whose shards have whole blocks, with 4 bytes for each block."""
    made = sent("dp=8", recipe=recipe)
    elements = 4 * WIDTH * HIDDEN if recipe != "blockwise" else 2 * WIDTH * HIDDEN * (1 - 4 / 128**2)
    assert all(each.bf16_bytes == each.fp8_bytes for each in made.collectives)
    assert bool(made.with_fp8_all_gather) == possible == ("fp8_all_gather" in str(made))
    for plain, better in zip(made.collectives[:2], made.with_fp8_all_gather, strict=False):
        assert (better.name, better.calls, better.bf16_bytes) == (plain.name, plain.calls, plain.bf16_bytes)
        assert plain.bf16_bytes - better.fp8_bytes == pytest.approx(7 / 8 * elements)
    assert not sent("dp=8", "ddp", recipe=recipe).with_fp8_all_gather


# -- as a user sees it -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made() -> Estimate:
    if fake_gpu.unavailable() is not None:
        pytest.skip(fake_gpu.unavailable() or "")
    return estimate(net(), batch().detach(), mesh={"dp": 8, "tp": 2}, options={"policy": {"rules": [{"fp8": "on"}]}})


@pytest.mark.weekly
def test_text_json_and_page(made) -> None:
    text, page = str(made), made.to_html()
    for words in (
        "mesh dp 8 x tp 2 (fsdp): 16 NVIDIA H200 on 2 nodes", "NVLink 4 361 GB/s, InfiniBand NDR 47 GB/s", "in one direction",
        "all hidden, ms", "none hidden, ms", "all-gather of weights, backward", "with fp8_all_gather", "all else is whole",
    ):  # fmt: skip
        assert words in text and words in page, words
    given = json.loads(json.dumps(made.to_dict()))["mesh"]
    assert (given["dp"], given["tp"], given["data_parallel"]) == (8, 2, "fsdp")
    assert [bound["name"] for bound in given["bounds"]] == ["bf16", "FP8", "FP8, with fp8_all_gather"]
    assert given["bounds"][0]["kernels"] < made.bf16.seconds and given["bounds"][1]["kernels"] < made.fp8.seconds
    assert len(given["collectives"]) == 5


@pytest.mark.slow
def test_kernels_are_found_by_the_names_of_their_linears(made) -> None:
    """All matmuls but the head's are divided: three times two for each block."""
    kernels = made.communication.bf16_kernels
    divided = sum(layer.bf16.matmul_seconds for layer in made.layers if layer.name.startswith("blocks."))
    assert divided > 0 and kernels == pytest.approx(made.bf16.seconds - divided / 2)


@pytest.mark.parametrize(
    "mesh, says",
    [
        (8, "sizes of dp and tp"), ("", "sizes of dp and tp"), ("dp=2,dp=4", "sizes of dp and tp"), ({"dp": 0}, "sizes of dp"),
        ({"dp": True, "tp": 2}, "sizes of dp and tp"), ({"tpp": 2}, "no dimension 'tpp'.*Did you mean 'tp'"), ({}, "two GPUs"),
        ({"tp": 3}, "tp divides the 8 GPUs of a node"),
    ],
)  # fmt: skip
def test_a_wrong_mesh(mesh, says) -> None:
    with pytest.raises(fp8compile.OptionError, match=says):
        links_for(Mesh.of(mesh), H200)


def test_a_device_without_links() -> None:
    with pytest.raises(fp8compile.OptionError, match="RTX 4090 has no key 'links'.*With it: h200, "):
        estimate(net(), batch(), device="rtx4090", mesh="dp=2")
    with pytest.raises(fp8compile.OptionError, match="'dp' must be one of 'fsdp', 'ddp'"):
        estimate(net(), batch(), mesh="dp=2", dp="zero")
