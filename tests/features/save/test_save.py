"""`save="fp8"`: what forward keeps for backward in FP8, each gradient is as exact. (tests/equivalence:
outputs and state are those without it, bitwise.)"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

import fp8compile
from fp8compile.dryrun import fake_gpu
from fp8compile.features.save.save import KeptRecord
from tests.support import hooks
from tests.support.executed import executed, planning
from tests.support.gpu_steps import unallocated
from tests.support.harness import ALL_FP8, assert_close, compiled, grads_of, histories, leaf, noise
from tests.support.models import Checkpointed, LlamaLayer, Mlp, Stack, SwiGlu, make

pytestmark = pytest.mark.usefixtures("interpreted")
for_a_gpu = pytest.mark.compiled  # nothing is interpreted
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


@pytest.fixture(autouse=True)
def tiny() -> Iterator[None]:
    """No tensor of a test is large."""
    with hooks.saving_small_tensors():
        yield


class Chunked(nn.Module):
    """SwiGLU with one linear for gate and up."""

    def __init__(self, width: int = 128, hidden: int = 256) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Squared(nn.Module):
    """A tensor that a linear and the backward of a product read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 256, bias=False), nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) * y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "half": lambda: Stack(SwiGlu(), Checkpointed(Mlp())),
    "gate and up": SwiGlu,
    "chunked": Chunked,
}


def aim(out: Tensor) -> Tensor:
    """The gradient of the tests' loss: it does not depend on the model."""
    return noise(*out.shape, seed=99).to(out.dtype)


def kept(model: nn.Module) -> list[KeptRecord]:
    return [record for graph in fp8compile.report(model).graphs for record in graph.kept]


def saving(saved: list[Tensor]) -> Any:
    """Inside, forward's tensors for backward are noted."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)


Made = tuple[Tensor, Tensor]  # an output, and the input as a leaf


class Twins:
    """A model compiled without and with `save`; both take the same steps."""

    def __init__(self, model: nn.Module, **options: Any):
        self.models = [model, copy.deepcopy(model)]
        pairs = zip(self.models, ("auto", "fp8"), strict=True)
        self.compiled = [compiled(x, save=kind, policy=ALL_FP8, **options) for x, kind in pairs]

    def __call__(self, x: Tensor) -> list[Made]:
        """What each has made; outputs are bitwise equal."""
        made = [(function(given), given) for function in self.compiled for given in [leaf(x)]]
        assert torch.equal(*(out for out, _ in made))
        return made

    def backward(self, *made: list[Made]) -> None:
        """Run the backwards of such calls. Gradients are those of the other twin, but for roundings to
        FP8."""
        both = []
        for model, calls in zip(self.models, zip(*made, strict=True), strict=True):
            for out, _ in calls:
                (out * aim(out)).mean().backward()
            both.append(grads_of(model, [x for _, x in calls]))
            model.zero_grad()
        assert_close(*both, 18.0, "a gradient")

    def merged(self) -> list[set[int]]:
        """For each twin: how many layers there are to a matmul, 0 where it is its own."""
        return [{len(x.merged) for x in fp8compile.report(model).matmuls} for model in self.models]

    def kept(self) -> list[KeptRecord]:
        return kept(self.models[1])

    def same_state(self) -> None:
        """What forward sees is the same; gradients differ a little."""
        one, other = map(histories, self.models)
        assert one.keys() == other.keys()
        for key, found in one.items():
            assert len(found[0]) == len(other[key][0])
            assert found == other[key] or key[1] == "gradient", key


def test_beside_a_checkpointed_layer_in_any_order() -> None:
    """What a checkpoint recomputes is not kept. Two forwards before two backwards; an evaluation between."""
    twins = Twins(make(MODELS["half"]), merge_matmuls=True)
    for number in range(2):
        twins.backward(twins(noise(2, 24, 128, seed=number)))
        with torch.no_grad():
            twins(noise(2, 24, 128, seed=5, scale=50.0))
    first, second = (twins(noise(2, 24, 128, seed=number)) for number in (50, 51))
    twins.backward(second, first)
    twins.same_state()
    assert twins.kept() and not any(record.module.startswith("inner.1") for record in twins.kept())
    assert all(2 in sizes for sizes in twins.merged())


@pytest.mark.slow
@for_a_gpu
@planning
def test_the_plan_for_a_gpu() -> None:
    """The kernels for an H200 compute what the operators do one by one."""
    found = []
    for inside in (executed, hooks.lowered):
        torch._dynamo.reset()
        model, made = make(lambda: LlamaLayer(128, 2, 2, 256), BF16), {}
        with inside():
            run = compiled(model, policy=ALL_FP8, save="fp8", merge_matmuls=True)
            for number in range(2):
                x = leaf(noise(2, 32, 128, seed=number, dtype=BF16))
                model.zero_grad()
                out = run(x)
                (out * aim(out)).mean().backward()
                found_now = {**grads_of(model, [x]), "out": out.detach()}
                made |= {f"{key} {number}": tensor for key, tensor in found_now.items()}
        found.append(made)
    assert_close(*found, 24.0, "a gradient")


class After(nn.Module):
    """A function of a linear's result and of its input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any], width: int = 128) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(128, width, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x), x)


def square(y: Tensor, _: Tensor) -> Tensor:
    return y * y


def attention(y: Tensor, _: Tensor) -> Tensor:
    q = y.unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q)


def rotation(y: Tensor, x: Tensor) -> Tensor:
    turn = torch.cos(torch.arange(128.0) * x.shape[1]).expand(y.shape).contiguous()
    return y * turn + y * x.cos().detach()


# what backward keeps of these has to stay as it is
UNKEPT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "softmax": lambda y, _: F.log_softmax(y.float(), -1),
    "largest": lambda y, _: y.amax(-1),
    "output": lambda y, _: (y, y * y),
    "view of an output": lambda y, _: (y.flatten(), y * y),
    "bounds": lambda y, _: F.hardtanh(y),
    "matmul": lambda y, _: y @ y.transpose(-1, -2),
    "attention": attention,
    "input": lambda _, x: x * x,
    "router": lambda y, _: torch.softmax(y, -1),
    "rotation": rotation,
}
INEXACT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "phase": lambda y, _: torch.sin(y),
    # backward looks for the largest value among those that it computes again
    "pooled": lambda y, _: F.gelu(y).amax(1),
    "sine": lambda y, _: (1 - y.square()).clamp(min=1e-6).sqrt(),
}


class Several(nn.ModuleDict):
    """Models side by side, in one graph."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = [part(x) for part in self.values()]
        flat = [x for out in outputs for x in (out if isinstance(out, tuple) else (out,))]
        return tuple(flat)


def reported(parts: dict[str, nn.Module]) -> fp8compile.Report:
    """The report of a model that has these parts."""
    model = make(lambda: Several(parts))
    found = compiled(model, policy=ALL_FP8, save="fp8")(leaf(noise(2, 32, 128)))
    sum(x.square().mean() for x in found).backward()
    return fp8compile.report(model)


def parts_of(records: Sequence[Any]) -> set[str]:
    return {record.module.split(".")[0] for record in records}


def test_what_stays_as_it_is_and_why() -> None:
    """The report says which tensors a copy would be too inexact for, and why."""
    functions = {**UNKEPT, **INEXACT, "square": square}
    report = reported({what: After(function) for what, function in functions.items()})
    (graph,) = report.graphs
    assert parts_of(graph.kept) == {"square"}
    reasons = {record.module.split(".")[0]: record.reason for record in graph.unkept}
    assert reasons.keys() == INEXACT.keys()
    assert reasons["phase"] == "backward takes its cos"
    assert reasons["pooled"] == "eq in backward magnifies its error"
    assert report.to_dict()["graphs"][0]["unkept"][0].keys() == {"module", "tensor", "bytes", "reason"}
    for text in (str(report), report.to_html()):
        assert "ot kept in FP8" in text and reasons["pooled"] in text


@pytest.mark.parametrize(("least", "found"), [(64 * 256 * 4, {"wide"}), (64 * 256 * 4 + 1, set())])
def test_96_features_and_small_tensors(least: int, found: set[str]) -> None:
    """Rows of 96 features have no blocks of 128. A tensor below the limit is not worth a copy."""
    with hooks.saving_small_tensors(least):
        (graph,) = reported({"narrow": After(square, 96), "wide": After(square, 256)}).graphs
    assert parts_of(graph.kept) == found and not graph.unkept


class Shifted(nn.Module):
    """A function of a residual stream that lies far from zero, before a linear."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.after = nn.Linear(128, 128), nn.Linear(128, 128), after
        nn.init.constant_(self.first.bias, 30.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.after(x + self.first(x)))


def test_the_tensor_that_backward_needs_is_kept_in_the_place_of_another() -> None:
    """A LayerNorm keeps what is left without the mean, tanh its derivative: copies of its input, or of its
    result, would have lost them."""
    for after in (lambda x: F.layer_norm(x, (128,)), lambda x: torch.tanh(0.1 * x - 1)):
        for dtype in (torch.float32, BF16):
            twins = Twins(make(functools.partial(Shifted, after), dtype))
            twins.backward(twins(noise(2, 48, 128, dtype=dtype)))
            assert len(twins.kept()) == 1, dtype


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_a_copy_that_a_matmul_made_is_kept(recipe: str) -> None:
    """With one scale for all, the copy of the second linear is kept; with a scale a row, one is made."""
    twins = Twins(make(Squared), recipe=recipe)
    for number in range(2):
        twins.backward(twins(noise(4, 32, 128, seed=number)))
    ours, theirs = 128 * 256 + 4 * 128 * 2, 128 * 256 + 4
    expected = [ours, ours if recipe == "rowwise" else theirs]
    assert sorted(record.bytes for record in twins.kept()) == sorted(expected)


def test_what_is_kept_and_reported() -> None:
    """The tensors between forward and backward are those of the report."""
    model = make(SwiGlu)
    run = torch.compile(model, backend="fp8", options={"policy": {**ALL_FP8, "save": "fp8"}})
    saved: list[Tensor] = []
    with saving(saved):
        out = run(leaf(noise(4, 48, 128)))
    out.mean().backward()
    report = fp8compile.report(model)
    sizes = "float32 [192 x 256]", 4 * 192 * 256, 192 * 256 + 4 * 192 * 2
    found = [(x.module, x.tensor, x.before, x.bytes) for x in report.graphs[0].kept]
    assert found == [("gate", *sizes), ("up", *sizes)]
    assert sum(x.dtype == FP8 and x.shape == (192, 256) for x in saved) == 2
    assert not any(x.dtype == torch.float32 and x.shape == (192, 256) for x in saved)
    assert "kept for backward in FP8" in str(report)
    assert report.to_dict()["graphs"][0]["kept"][0]["module"] == "gate"
    assert "kept for backward in FP8" in report.to_html()


@pytest.mark.slow
def test_a_schedule_saves_in_its_fp8_phases_only() -> None:
    model = make(SwiGlu)
    run = compiled(model, policy={**ALL_FP8, "schedule": {"warmup_steps": 1}}, save="fp8")
    optimizer, kinds = torch.optim.SGD(model.parameters(), 0.0), []
    for number in range(3):
        saved: list[Tensor] = []
        with saving(saved):
            out = run(leaf(noise(4, 48, 128, seed=number)))
        out.mean().backward()
        optimizer.step()
        kinds.append(sum(x.dtype == FP8 and x.shape == (192, 256) for x in saved))
    assert kinds[0] == 0 and kinds[-1] == 2


class Theirs(CustomPartitionerFn):
    """A partitioner of the user's own."""

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        return "theirs"


def test_refused_with_a_partitioner_of_the_users_own_and_as_another_format() -> None:
    run = compiled(make(SwiGlu), policy=ALL_FP8, save="fp8", strict=True, custom_partitioner_fn=Theirs())
    with pytest.raises(fp8compile.StrictError, match="custom_partitioner_fn"):
        run(leaf(noise(4, 32, 128)))
    with pytest.raises(ValueError, match="save"):
        compiled(nn.Linear(128, 128), save="fp4")(noise(8, 128))


# -- tensors of which backward reads parts: results of merged matmuls, and what a model splits --


@pytest.mark.parametrize(("name", "dtype"), [("gate and up", BF16), ("chunked", torch.float32)])
def test_each_part_gets_a_copy_and_the_whole_is_free(name: str, dtype: torch.dtype) -> None:
    """Nothing that is kept lives in the memory of a merged result."""
    twins = Twins(make(MODELS[name], dtype), merge_matmuls=True)
    for number in range(2):
        twins.backward(twins(noise(2, 48, 128, seed=number, dtype=dtype)))
    first, second = (twins(noise(2, 48, 128, seed=number, dtype=dtype)) for number in (5, 6))
    twins.backward(second, first)
    twins.same_state()
    assert len(twins.kept()) == 2
    assert all(max(sizes) == (0 if name == "chunked" else 2) for sizes in twins.merged())
    alive: list[Tensor] = []
    with saving(alive):
        twins.compiled[1](leaf(noise(2, 48, 128, dtype=dtype)))
    assert sum(x.dtype == FP8 and x._base is None and x.shape == (96, x.shape[-1]) for x in alive) >= 2
    # scales are small views of the memory of all states of the process
    large = [x for x in alive if x.dtype == dtype and x.numel() >= 96 * 128]
    sizes = [x.untyped_storage().nbytes() for x in large]
    assert max(sizes, default=0) < 2 * 96 * 128 * dtype.itemsize


def test_parts_that_128_does_not_divide() -> None:
    """They are kept as one copy, if 128 divides their whole."""
    model = make(lambda: Chunked(128, 192))
    compiled(model, policy=ALL_FP8, save="fp8")(leaf(noise(2, 48, 128))).sum().backward()
    assert [record.tensor for record in kept(model)] == ["float32 [96 x 384]"]


@pytest.mark.weekly
@for_a_gpu
@planning
def test_bytes_kept_on_a_gpu() -> None:
    """Casts and reads are parts of kernels that were there before, and merged matmuls keep no more."""
    x = torch.empty(1, 8192, 4096, dtype=BF16, requires_grad=True)

    def step(**how: Any) -> fake_gpu.Step:
        torch._dynamo.reset()
        layer = torch.compile(unallocated(LlamaLayer, BF16), **how)
        return fake_gpu.trace(lambda: layer(x).sum().backward())

    def ours(save: str, merge: bool) -> fake_gpu.Step:
        return step(backend="fp8", options={"policy": ALL_FP8, "save": save, "merge_matmuls": merge})

    bf16, auto, apart, together = step(), ours("auto", True), ours("fp8", False), ours("fp8", True)
    assert together.kept_for_backward <= 1.001 * apart.kept_for_backward
    assert apart.kept_for_backward <= 0.62 * bf16.kept_for_backward
    assert together.kept_for_backward < 0.85 * auto.kept_for_backward
    assert len(together.kernels) <= len(auto.kernels) + 2
    assert together.bytes_outside_matmuls <= 1.06 * auto.bytes_outside_matmuls
