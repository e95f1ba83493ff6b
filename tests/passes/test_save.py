"""`save="fp8"`: what forward keeps for backward in FP8 (`passes.save`). Outputs and state are those without it, to the bit, and
each gradient is as exact."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

import fp8compile
from benchmarks.interpreted import interpreted as interpreted_
from fp8compile.dryrun import fake_gpu
from fp8compile.ir.records import KeptRecord
from fp8compile.passes import save
from tests.support.executed import executed
from tests.support.gpu_steps import unallocated
from tests.support.harness import ALL_FP8, assert_close, compiled, grads_of, histories, leaf, noise
from tests.support.models import Block, Checkpointed, Ffn, GptLayer, LlamaLayer, Mlp, Stack, SwiGlu, make

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: Stack(*(LlamaLayer(128, 2, 2, 256) for _ in range(2))),
    "gpt": lambda: Stack(*(GptLayer(128, 4, causal=True) for _ in range(2))),
    "vit": lambda: Stack(*(GptLayer(128, 4, causal=False) for _ in range(2))),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of a test is large."""
    monkeypatch.setattr(save, "LEAST", 0)
    torch._dynamo.reset()


def aim(out: Tensor) -> Tensor:
    """The gradient of the tests' loss: it does not depend on the model."""
    return noise(*out.shape, seed=99).to(out.dtype)


class Twins:
    """A model compiled without and with `save`; both take the same steps."""

    def __init__(self, model: nn.Module, wrap: Callable[[nn.Module], Callable[..., Any]] = lambda model: model, **options: Any):
        self.models = [model, copy.deepcopy(model)]
        how = {"policy": ALL_FP8, **options}
        self.compiled = [compiled(wrap(x), save=kind, **how) for x, kind in zip(self.models, ("auto", "fp8"), strict=True)]

    def __call__(self, *inputs: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
        """(output, the inputs as leaves) of each; outputs are equal to the bit."""
        made = []
        for function in self.compiled:
            leaves = [leaf(x) for x in inputs]
            made.append((function(*leaves), leaves))
        assert torch.equal(made[0][0], made[1][0])
        return made

    def backward(self, *made: list[tuple[Tensor, list[Tensor]]]) -> None:
        """Run the backwards of such calls. Gradients are those of the other twin, but for roundings to FP8."""
        for calls in made:
            for out, _ in calls:
                (out * aim(out)).mean().backward()
        both = [grads_of(model, [x for calls in made for x in calls[i][1]]) for i, model in enumerate(self.models)]
        assert_close(*both, 18.0, "a gradient")

    def step(self, *inputs: Tensor) -> None:
        self.backward(self(*inputs))

    def merged(self) -> list[set[int]]:
        """For each twin: how many layers there are to a matmul, 0 where it is its own."""
        return [{len(x.merged) for x in fp8compile.report(model).matmuls} for model in self.models]

    def kept(self) -> list[KeptRecord]:
        return [record for graph in fp8compile.report(self.models[1]).graphs for record in graph.kept]

    def same_state(self) -> None:
        """What forward sees is the same; gradients differ a little."""
        one, other = map(histories, self.models)
        assert one.keys() == other.keys()
        for key, found in one.items():
            assert len(found[0]) == len(other[key][0])
            assert found == other[key] or key[1] == "gradient", key

    def zero(self) -> None:
        for model in self.models:
            model.zero_grad()


def exact(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Gradients in float64."""
    model, leaf_ = copy.deepcopy(model).double(), leaf(x.double())
    (model(leaf_) * aim(x).double()).mean().backward()
    return grads_of(model, [leaf_])


@pytest.mark.parametrize(
    ("name", "merge", "dtype"),
    [
        ("gpt", False, torch.float32),
        ("llama", True, BF16),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("vit", False, BF16), ("llama", False, torch.float32), ("llama", True, torch.float32))
        ),
    ],
)
def test_gradients_are_as_exact(interpreted, name: str, merge: bool, dtype: torch.dtype) -> None:
    """Within 1 dB, against high precision, over some steps."""
    model = make(MODELS[name], dtype)
    twins = Twins(model, merge_matmuls=merge)
    noises: dict[str, list[float]] = {}
    for number in range(6):
        x = noise(4, 128, 128, seed=number, dtype=dtype)
        expected = exact(model, x)
        made = twins(x)
        for i, (out, leaves) in enumerate(made):
            (out * aim(out)).mean().backward()
            if number:  # the first step is cold
                for key, grad in grads_of(twins.models[i], leaves).items():
                    error = (grad.double() - expected[key]).square().sum() / expected[key].square().sum()
                    noises.setdefault(key, [0.0, 0.0])[i] += float(error)
        twins.zero()
    assert len(twins.kept()) >= 4
    assert twins.merged() == 2 * ([{0, 2, 3}] if merge else [{0}])
    lost = {key: 10 * math.log10(with_ / without) for key, (without, with_) in noises.items()}
    assert max(lost.values()) <= (1.02 if merge else 1.0), lost
    twins.same_state()


CASES: dict[str, Callable[[], nn.Module]] = {
    **MODELS,
    "block": lambda: Block(gated=True),
    "ffn": lambda: Ffn(128),
    "twice": lambda: Twice(),
    "checkpointed": lambda: Checkpointed(Block(), Block(gated=True)),
    "half": lambda: Stack(Block(), Checkpointed(Mlp())),
    "tanh": lambda: Stack(*(Mlp(act=torch.tanh) for _ in range(2))),
}


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("block", "delayed"),
        ("tanh", "delayed, merged"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("half", "delayed, merged"),
                ("checkpointed", "delayed, merged"),
                ("block", "tensorwise, merged"),
                ("half", "tensorwise"),
                ("tanh", "rowwise"),
                ("checkpointed", "rowwise"),
                ("block", "blockwise"),
            )
        ),
    ],
)
def test_training_steps(interpreted, name: str, recipe: str) -> None:
    """Accumulation, an evaluation in between, two forwards before two backwards, and hooks that copy what is saved."""
    recipe, _, merge = recipe.partition(", ")
    twins = Twins(make(CASES[name]), recipe=recipe, merge_matmuls=bool(merge))
    for number in range(3):
        twins.zero()
        for part in range(2):
            twins.step(noise(2, 24, 128, seed=10 * number + part))
        with torch.no_grad():
            twins(noise(2, 24, 128, seed=5, scale=50.0))
    first, second = (twins(noise(2, 24, 128, seed=number)) for number in (50, 51))
    twins.zero()
    twins.backward(second, first)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        made = twins(noise(2, 24, 128, seed=60))
    twins.zero()
    twins.backward(made)
    twins.same_state()
    assert bool(twins.kept()) == (name != "checkpointed")
    if merge and name != "tanh":
        assert all(3 in sizes for sizes in twins.merged())


@pytest.mark.parametrize(
    ("name", "recipe", "dtype"),
    [
        ("llama, merged", "delayed", BF16),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("llama", "delayed", BF16),
                ("gpt", "delayed", torch.float32),
                ("block", "blockwise", BF16),
                ("ffn", "rowwise", BF16),
                ("tanh", "delayed", BF16),
                ("twice", "tensorwise", BF16),
                ("half", "tensorwise", torch.float32),
            )
        ),
    ],
)
@pytest.mark.skipif(fake_gpu.unavailable() is not None, reason=fake_gpu.unavailable() or "")
def test_the_plan_for_a_gpu(name: str, recipe: str, dtype: torch.dtype) -> None:
    """The kernels for an H200 compute what the operators do one by one."""
    name, _, merge = name.partition(", ")
    options = {"policy": ALL_FP8, "save": "fp8", "recipe": recipe, "merge_matmuls": bool(merge)}
    found = []
    for inside in (executed, without_inductor):
        model = make(CASES[name], dtype)
        made = {}
        with inside():
            run = torch.compile(model, backend="fp8", options=options)
            for number in range(3):
                x = leaf(noise(2, 32, 128, seed=number, dtype=dtype))
                model.zero_grad()
                out = run(x)
                (out * aim(out)).mean().backward()
                made |= {f"{key} {number}": tensor for key, tensor in {**grads_of(model, [x]), "out": out.detach()}.items()}
        found.append(made)
    assert_close(*found, 30.0 if dtype == torch.float32 else 24.0, "a gradient")


@contextlib.contextmanager
def without_inductor() -> Iterator[None]:
    torch._dynamo.reset()
    with interpreted_():
        yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_sizes_that_only_a_call_knows(interpreted) -> None:
    twins = Twins(make(lambda: Block(gated=True)), dynamic=True)
    for number, rows in enumerate((24, 33, 16, 2)):
        twins.step(noise(2, rows, 128, seed=number))
        twins.zero()
    assert twins.kept()
    twins.same_state()


class Unkept(nn.Module):
    """Kept tensors that have to stay as they are, each behind a linear."""

    def __init__(self, what: str, width: int = 128) -> None:
        super().__init__()
        self.what, self.linear = what, nn.Linear(128, width, bias=False)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        match self.what:
            case "softmax":
                return F.log_softmax(y.float(), -1)
            case "largest":
                return y.amax(-1)
            case "output":
                return y, y * y
            case "view of an output":
                return y.flatten(), y * y
            case "phase":
                return torch.sin(y)
            case "bounds":
                return F.hardtanh(y)
            case "matmul":
                return y @ y.transpose(-1, -2)
            case "attention":
                q = y.unflatten(-1, (2, -1)).transpose(1, 2)
                return F.scaled_dot_product_attention(q, q, q)
            case "router":
                return torch.softmax(y, -1)
            case "rotation":
                return (y * torch.cos(torch.arange(128.0) * x.shape[1]).expand(y.shape).contiguous()) + y * x.cos().detach()
            case "input":
                return x * x
        return y * y


UNKEPT = "softmax,largest,output,view of an output,phase,bounds,matmul,attention,input,router,rotation".split(",")


@pytest.mark.parametrize("what", [*UNKEPT, "a square"])
def test_what_stays_as_it_is(interpreted, what: str) -> None:
    model = make(lambda: Unkept(what))
    run = compiled(model, policy=ALL_FP8, save="fp8")
    found = run(leaf(noise(2, 32, 128)))
    sum(x.square().mean() for x in (found if isinstance(found, tuple) else (found,))).backward()
    (graph,) = fp8compile.report(model).graphs
    assert bool(graph.kept) == (what == "a square"), graph.kept


def test_96_features_and_small_tensors(interpreted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 96 features have no blocks of 128. A tensor below the limit is not worth a copy."""
    for width, least, kept in ((96, 0, 0), (256, 0, 1), (256, 64 * 256 * 4, 1), (256, 64 * 256 * 4 + 1, 0)):
        monkeypatch.setattr(save, "LEAST", least)
        torch._dynamo.reset()
        model = make(lambda width=width: Unkept("", width))
        compiled(model, policy=ALL_FP8, save="fp8")(leaf(noise(2, 32, 128))).mean().backward()
        assert len(fp8compile.report(model).graphs[0].kept) == kept


class Twice(nn.Module):
    """A tensor that a linear and the backward of a product read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 256, bias=False), nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) * y


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise"])
def test_a_copy_that_a_matmul_made_is_kept(interpreted, recipe: str) -> None:
    """With one scale for all, the copy of the second linear is kept; with a scale a row, one is made."""
    twins = Twins(make(Twice), recipe=recipe)
    for number in range(3):
        twins.zero()
        twins.step(noise(4, 32, 128, seed=number))
    ours, theirs = 128 * 256 + 4 * 128 * 2, 128 * 256 + 4
    assert sorted(record.bytes for record in twins.kept()) == sorted([ours, ours if recipe == "rowwise" else theirs])


def test_what_is_kept_and_reported(interpreted) -> None:
    """The tensors between forward and backward are those of the report."""
    model = make(lambda: SwiGlu(128, 256))
    run = compiled(model, policy=ALL_FP8, save="fp8")
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = run(leaf(noise(4, 48, 128)))
    out.mean().backward()
    report = fp8compile.report(model)
    kept = report.graphs[0].kept
    assert [(x.module, x.tensor, x.before, x.bytes) for x in kept] == [
        (name, "float32 [192 x 256]", 4 * 192 * 256, 192 * 256 + 4 * 192 * 2) for name in ("gate", "up")
    ]
    assert sum(x.dtype == FP8 and x.shape == (192, 256) for x in saved) == 2
    assert not any(x.dtype == torch.float32 and x.shape == (192, 256) for x in saved)
    assert "kept for backward in FP8" in str(report) and report.to_dict()["graphs"][0]["kept"][0]["module"] == "gate"
    assert "kept for backward in FP8" in report.to_html()


def test_a_schedule_saves_in_its_fp8_phases_only(interpreted) -> None:
    policy = {**ALL_FP8, "schedule": {"warmup_steps": 1}}
    model = make(lambda: SwiGlu(128, 256))
    run = compiled(model, policy=policy, save="fp8")
    optimizer, kinds = torch.optim.SGD(model.parameters(), 0.0), []
    for number in range(3):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):  # noqa: B023
            out = run(leaf(noise(4, 48, 128, seed=number)))
        out.mean().backward()
        optimizer.step()
        kinds.append(sum(x.dtype == FP8 and x.shape == (192, 256) for x in saved))
    assert kinds[0] == 0 and kinds[-1] == 2


def test_options(interpreted) -> None:
    with pytest.raises(ValueError, match="save"):
        compiled(nn.Linear(128, 128), save="fp4")
        torch.compile(nn.Linear(128, 128), backend="fp8", options={"save": "fp4"})(noise(8, 128))
    model = make(lambda: SwiGlu(128, 256))
    run = torch.compile(model, backend="fp8", options={"policy": {**ALL_FP8, "save": "fp8"}})
    run(leaf(noise(4, 32, 128))).mean().backward()
    assert fp8compile.report(model).graphs[0].kept


class Theirs(CustomPartitionerFn):
    """A partitioner of the user's own."""

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        return "theirs"


def test_a_partitioner_of_the_users_own(interpreted) -> None:
    model = make(lambda: SwiGlu(128, 256))
    run = compiled(model, policy=ALL_FP8, save="fp8", strict=True, custom_partitioner_fn=Theirs())
    with pytest.raises(fp8compile.StrictError, match="custom_partitioner_fn"):
        run(leaf(noise(4, 32, 128)))


def test_left_out_by_name(interpreted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8COMPILE_SKIP", "save")
    twins = Twins(make(lambda: SwiGlu(128, 256)))
    twins.step(noise(4, 32, 128))
    assert not twins.kept()


@pytest.mark.parametrize(("build", "most"), [(LlamaLayer, 0.62), (Ffn, 0.60)])
@pytest.mark.skipif(fake_gpu.unavailable() is not None, reason=fake_gpu.unavailable() or "")
def test_bytes_kept_by_a_layer(build: Callable[[], nn.Module], most: float) -> None:
    x = torch.empty(1, 8192, 4096, dtype=BF16, requires_grad=True)

    def step(**how: Any) -> fake_gpu.Step:
        torch._dynamo.reset()
        layer = torch.compile(unallocated(build, BF16), **how)
        return fake_gpu.trace(lambda: layer(x).sum().backward())

    bf16, auto, small = step(), *(step(backend="fp8", options={"policy": ALL_FP8, "save": kind}) for kind in ("auto", "fp8"))
    assert small.kept_for_backward <= most * bf16.kept_for_backward < bf16.kept_for_backward
    assert small.kept_for_backward < 0.85 * auto.kept_for_backward
    # casts and reads are parts of kernels that were there before
    assert len(small.kernels) <= len(auto.kernels) + 2
    assert small.bytes_outside_matmuls <= 1.05 * auto.bytes_outside_matmuls
