"""`fp8_all_gather`: FSDP2 gathers what FP8 matmuls read in FP8. To the bit, the training is the one without it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8compile
from fp8compile.distributed import fp8_all_gather
from fp8compile.errors import ShardingError, StrictError
from tests.support.models import ResidualMlp
from tests.support.processes import on_ranks

pytestmark = pytest.mark.slow

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
STEPS = 4


class Net(nn.Module):
    def __init__(self, hidden: int = 256) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualMlp(hidden=hidden) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(32, 128, generator=torch.Generator().manual_seed(10 * step + rank))


def sharded(gather: bool = True, hidden: int = 256, checkpoint: bool = False, bf16: bool = True, **how: Any) -> Net:
    """A model whose blocks are compiled. `how`: `compiled` has the options, all else goes to `fully_shard`."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(hidden)
    options = how.pop("compiled", {"recipe": "tensorwise"})
    if bf16:
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i, block in enumerate(model.blocks):
        block.compile(backend="fp8", fullgraph=True, options=options)
        if checkpoint:
            model.blocks[i] = checkpoint_wrapper(block)
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **{key: value for key, value in how.items() if key != "reshard_after_forward"})
    if gather:
        fp8_all_gather(model)
    return model


def gathered(model: nn.Module) -> dict[str, tuple[str, str]]:
    return {record.parameter: (record.dtype, record.reason) for record in fp8compile.report(model).gathered}


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes that this rank puts into each all-gather."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    sent: list[int] = []
    original = collectives.DefaultAllGather.__call__

    def call(self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(input_tensor.numel() * input_tensor.itemsize)
        return original(self, output_tensor, input_tensor, *args, **kwargs)

    collectives.DefaultAllGather.__call__ = call  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        collectives.DefaultAllGather.__call__ = original  # type: ignore[method-assign]


@contextmanager
def reductions() -> Iterator[list[int]]:
    """The sizes of all-reduces."""
    sizes: list[int] = []
    original = dist.all_reduce

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = call  # type: ignore[assignment]
    try:
        yield sizes
    finally:
        dist.all_reduce = original  # type: ignore[assignment]


# --- training ---------------------------------------------------------------------------------------

BLOCK = 2 * 128 * 256  # weights
CURRENT = {"recipe": "delayed", "current_scaling": (False, True, False)}
CASES: dict[str, dict[str, Any]] = {
    "bf16, foreach": {"adam": "foreach"},
    "fp32, fused, no reshard, delayed": {
        "adam": "fused",
        "bf16": False,
        "reshard_after_forward": False,
        "compiled": CURRENT,
        "evaluate": False,  # without resharding, what an evaluation has gathered stays for the next step, where it is the same
    },
    "accumulation, delayed": {"adam": "foreach", "compiled": CURRENT, "accumulate": 2},
    "checkpoint, powers of two": {
        "adam": "fused",
        "checkpoint": True,
        "compiled": {"recipe": "tensorwise", "power_of_2_scale": True, "margin": (0, 1, 0)},
    },
}


def _trained(rank: int, gather: bool, adam: str, accumulate: int = 1, evaluate: bool = True, **how: Any) -> dict[str, Any]:
    """Some steps, with an evaluation, a write into the weights by hand, and a loaded state in between."""
    model = sharded(gather, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **{adam: True})
    found: dict[str, Any] = {"gradients": {}, "sent": [], "evaluated": [], "alive": [], "reduced": []}
    for step in range(STEPS):
        with counted() as sent, reductions() as reduced:
            for part in range(accumulate):
                model.set_requires_gradient_sync(part == accumulate - 1)
                kept: list[torch.UntypedStorage] = []

                def pack(x: torch.Tensor, kept: list[torch.UntypedStorage] = kept) -> torch.Tensor:
                    if x.dtype in FP8 and x.numel() == 128 * 256:
                        kept.append(x.untyped_storage())
                    return x

                with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                    y = model(batch(step, rank + 2 * part))
                alive = {id(storage): storage.nbytes() for storage in kept}
                y.float().square().mean().backward()
        found["alive"].append(sum(alive.values()))
        found["sent"].append(sum(sent))
        found["reduced"].append(reduced)
        for name, p in model.named_parameters():
            found["gradients"][f"{step} {name}"] = p.grad.full_tensor().clone()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            for p in model.parameters():
                p.data.mul_(1.5)
        if step == 2:
            state = {name: value.detach().clone() * 3 for name, value in model.state_dict().items()}
            model.load_state_dict(state)
        if evaluate:
            with torch.no_grad():
                found["evaluated"].append(model.eval()(batch(7, rank)))
            model.train()
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    found["saved"] = saved.getvalue()
    found["report"] = gathered(model)
    found["text"] = str(fp8compile.report(model))
    found["graphs"] = len(fp8compile.report(model).graphs)
    return found


def _train(rank: int) -> dict[str, list[dict[str, Any]]]:
    return {name: [_trained(rank, gather, **case) for gather in (False, True)] for name, case in CASES.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> list[dict[str, list[dict[str, Any]]]]:
    return on_ranks(2, tmp_path_factory.mktemp("train"), _train)


def same_training(plain: dict[str, Any], ours: dict[str, Any], gradients: int) -> None:
    """So many gradients, evaluations and graphs of two runs are equal, to the bit."""
    assert len(ours["gradients"]) == gradients and ours["gradients"].keys() == plain["gradients"].keys()
    for name, gradient in plain["gradients"].items():
        assert torch.equal(ours["gradients"][name], gradient), name
    for expected, got in zip(plain["evaluated"], ours["evaluated"], strict=True):
        assert torch.equal(got, expected)
    assert ours["graphs"] == plain["graphs"]


@pytest.mark.parametrize("case", CASES)
def test_the_training_is_the_one_without_it(trained, case: str) -> None:
    """To the bit: gradients, evaluations, the bytes of the state dict."""
    for results in trained:
        plain, ours = results[case]
        same_training(plain, ours, STEPS * 12)
        assert ours["saved"] == plain["saved"]


@pytest.mark.parametrize("case", CASES)
def test_bytes_on_the_wire(trained, case: str) -> None:
    """From the second step on, weights of blocks take one byte an element; one all-reduce a step serves all of them."""
    bf16 = CASES[case].get("bf16", True)
    gathers = (1 if CASES[case].get("reshard_after_forward") is False else 2) * CASES[case].get("accumulate", 1)
    for results in trained:
        plain, ours = results[case]
        spared = gathers * 2 * BLOCK // 2 * (1 if bf16 else 3)  # two blocks, half of each on a rank
        assert ours["sent"] == [plain["sent"][0], *(sent - spared for sent in plain["sent"][1:])]
        assert [len(sizes) for sizes in ours["reduced"]] == [len(sizes) + 1 for sizes in plain["reduced"]]
        others = plain["sent"][1] - gathers * BLOCK * (2 if bf16 else 4)  # norm, out and the biases
        assert ours["sent"][1] - others <= 0.53 * gathers * BLOCK * 2
        if CASES[case].get("reshard_after_forward") is not False:
            assert ours["alive"][1:] == [0] * (STEPS - 1)


def test_what_is_reported(trained) -> None:
    for results in trained:
        _, ours = results["bf16, foreach"]
        said = ours["report"]
        assert len(said) == 12
        for name, (dtype, reason) in said.items():
            weight = name.startswith("blocks") and name.endswith("weight")
            assert (dtype == "e4m3" and not reason) if weight else (dtype == "bfloat16" and reason), name
        assert said["norm.bias"][1] == "not a matrix"
        assert said["out.weight"][1] == "no compiled training graph has multiplied it yet"
        assert "all-gather: 4 of 5 matrices in FP8" in ours["text"] and "blocks.0-1.up.weight (x2)" in ours["text"]
        assert "dequantize" not in ours["text"]


# --- what may come between ---------------------------------------------------------------------------


def step(model: nn.Module, number: int, rank: int, lr: float = 0.1) -> dict[str, torch.Tensor]:
    model(batch(number, rank)).float().square().mean().backward()
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.grad.full_tensor().clone()
        p.data.add_(p.grad, alpha=-lr)
        p.grad = None
    return found


def _assigned(model: Net) -> None:
    model.load_state_dict({name: value.detach().clone() * 2 for name, value in model.state_dict().items()}, assign=True)


def _moved(model: Net) -> None:
    """As `Module.to` does where it changes something."""
    for p in model.parameters():
        p._local_tensor = p._local_tensor.clone()
    for module in (model, *model.blocks):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.reset_sharded_param()


def _by_hand(model: Net) -> None:
    for p in model.parameters():
        p.data.mul_(4)
    fp8_all_gather(model)  # asks for new scales


def _unused(model: Net) -> None:
    """A forward without a backward: the blocks stay unsharded with reshard_after_forward=False."""
    model(batch(9, 0))


BETWEEN: dict[str, tuple[Callable[[Net], None], dict[str, Any]]] = {
    "load_state_dict(assign=True)": (_assigned, {}),
    "other tensors": (_moved, {}),
    "p.data": (_by_hand, {}),
    "a forward without a backward": (_unused, {"reshard_after_forward": False}),
}


def _between(rank: int) -> dict[str, Any]:
    found = {}
    for name, (change, how) in BETWEEN.items():
        runs = []
        for gather in (False, True):
            model = sharded(gather, **how)
            gradients = [step(model, 0, rank), step(model, 1, rank)]
            (change if gather or change is not _by_hand else lambda m: [p.data.mul_(4) for p in m.parameters()])(model)
            with torch.no_grad():
                outputs = model(batch(5, rank))
            y = model(batch(2, rank))
            with torch.no_grad():  # between a forward and its backward
                between = model(batch(5, rank))
            y.float().square().mean().backward()
            gradients.append({name: p.grad.full_tensor().clone() for name, p in model.named_parameters()})
            with counted() as sent:
                model(batch(3, rank))
            runs.append({"gradients": gradients, "outputs": [outputs, between], "sent": sum(sent)})
        found[name] = runs
    return found


def test_what_comes_between_steps(tmp_path) -> None:
    """New tensors for shards, evaluations between a forward and its backward, forwards without one."""
    for result in on_ranks(2, tmp_path, _between):
        for name, (plain, ours) in result.items():
            for expected, got in zip(plain["gradients"], ours["gradients"], strict=True):
                for key, gradient in expected.items():
                    assert torch.equal(got[key], gradient), (name, key)
            for expected, got in zip(plain["outputs"], ours["outputs"], strict=True):
                assert torch.equal(got, expected), name
            assert ours["sent"] < plain["sent"], name


# --- other numbers of ranks ---------------------------------------------------------------------------


def _steps(rank: int, how: dict[str, Any]) -> list[Any]:
    runs = []
    for gather in (False, True):
        model = sharded(gather, **how)
        runs.append([step(model, i, rank) for i in range(3)])
    return [*runs, gathered(model)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_one_rank_and_shards_of_different_sizes(tmp_path, ranks: int) -> None:
    """128 rows on three ranks are 43, 43 and 42: the last one is padded."""
    for plain, ours, said in on_ranks(ranks, tmp_path, _steps, {}):
        for expected, got in zip(plain, ours, strict=True):
            for name, gradient in expected.items():
                assert torch.equal(got[name], gradient), name
        assert said["blocks.0.up.weight"] == said["blocks.1.down.weight"] == ("e4m3", "")


# --- refusals -----------------------------------------------------------------------------------------


class Tied(ResidualMlp):
    """Reads a weight by something else than a matmul."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up.weight.square().mean()


def _refused(rank: int) -> dict[str, str]:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    said: dict[str, str] = {}

    def attempt(name: str, do: Callable[[], Any]) -> None:
        try:
            do()
            said[name] = "nothing"
        except (ShardingError, StrictError) as error:
            said[name] = str(error)

    attempt("plain", lambda: fp8_all_gather(Net()))
    attempt("offload", lambda: sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)))
    attempt("number", lambda: sharded(reshard_after_forward=2))
    extended = sharded(False)
    local = extended.blocks[1].up.weight._local_tensor
    local.fsdp_pre_all_gather = local.fsdp_post_all_gather = lambda *_: None
    attempt("extension", lambda: fp8_all_gather(extended))
    for recipe in ("rowwise", "delayed", "mxfp8"):
        attempt(recipe, lambda recipe=recipe: sharded(compiled={"recipe": recipe})(batch(0, rank)))

    for strict in (False, True):
        torch._dynamo.reset()
        model = fully_shard(Tied())
        model.compile(backend="fp8", options={"recipe": "tensorwise", "strict": strict})
        fp8_all_gather(model)

        def train(model: nn.Module = model) -> None:
            for i in range(3):
                step(model, i, rank)

        attempt(f"shared, strict={strict}", train)
        said[f"report, strict={strict}"] = str(gathered(model))

    for strict in (False, True):
        model = sharded(compiled={"recipe": "tensorwise", "strict": strict})

        def look(model: nn.Module = model) -> None:
            step(model, 0, rank), step(model, 1, rank)
            model.unshard()
            (model.blocks[0].unshard(), model.blocks[0].up.weight.square().sum(), model.blocks[0].reshard())
            step(model, 2, rank), step(model, 3, rank), step(model, 4, rank)

        attempt(f"eager, strict={strict}", look)
        said[f"eager report, strict={strict}"] = str(gathered(model)["blocks.0.up.weight"])
    return said


def _disagreeing(rank: int) -> dict[str, tuple[str, str]]:
    """The first rank keeps one weight of each block in high precision, and the others do not."""
    off = {"policy": {"rules": [{"module": "up", "fp8": "off"}]}} if rank == 0 else {}
    model = sharded(compiled={"recipe": "tensorwise", **off})
    for i in range(5):
        step(model, i, rank)
    return gathered(model)


def test_refusals_name_the_parameter_and_the_fix(tmp_path) -> None:
    for said in on_ranks(4, tmp_path, _refused):
        assert "nothing of this Net is sharded: call fully_shard(model) first" in said["plain"]
        assert "blocks.0.up.weight is offloaded to the CPU: fully_shard without CPUOffloadPolicy" in said["offload"]
        assert "blocks.0.up.weight is resharded to fewer ranks after forward: take reshard_after_forward=True" in said["number"]
        assert "blocks.1.up.weight has an all-gather extension already" in said["extension"]
        for recipe in ("rowwise", "delayed", "mxfp8"):
            assert "up.weight cannot be gathered in FP8: recipe" in said[recipe] and "current_scaling" in said[recipe]
        assert said["shared, strict=False"] == "nothing"
        assert "up.weight is gathered in high precision: beside FP8 matmuls, it is read by" in said["shared, strict=True"]
        assert "'up.weight': ('float32', 'read by aten.pow" in said["report, strict=False"]
        assert "'down.weight': ('e4m3', '')" in said["report, strict=False"]
        assert said["eager, strict=False"] == "nothing"
        assert "blocks.0.up.weight was gathered in FP8, and is read by aten.pow" in said["eager, strict=True"]
        assert "outside of compiled graphs" in said["eager report, strict=False"]


def test_ranks_that_decide_differently_gather_the_same(tmp_path) -> None:
    """In FP8 what all of them allow. None waits for another."""
    for rank, said in enumerate(on_ranks(2, tmp_path, _disagreeing)):
        dtype, reason = said["blocks.0.up.weight"]
        assert dtype == "bfloat16" and (reason.startswith("policy") if rank == 0 else reason == "other ranks keep it")
        assert said["blocks.0.down.weight"] == ("e4m3", "")
