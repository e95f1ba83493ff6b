"""`frozen="fp8"`: weights that do not train are kept in FP8 only. Bitwise, it changes no training."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.devices import catalog
from fp8compile.dryrun import fake_gpu
from fp8compile.errors import Fp8CompileError, OptionError, StrictError
from tests.support import cached, hooks
from tests.support.cached import BF16, same
from tests.support.executed import planning
from tests.support.gpu_steps import unallocated
from tests.support.harness import ALL_FP8, load_scaling, noise, reloaded, scaling_tensors
from tests.support.models import Checkpointed, Lora, Stack, make

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


class Adapted(nn.Module):
    """A frozen linear layer plus a trained update of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.base = nn.LayerNorm(128), nn.Linear(128, 256).requires_grad_(False)
        self.a, self.b = nn.Linear(128, 16, bias=False), nn.Linear(16, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.base(h) + self.b(self.a(h))


def made(dtype: torch.dtype = BF16, model: Callable[[], nn.Module] = Adapted) -> nn.Module:
    return make(model, dtype)


def batch(step: int, dtype: torch.dtype = BF16) -> Tensor:
    return noise(48, 128, seed=step, dtype=dtype)


def compiled(
    model: nn.Module, recipe: str = "tensorwise", frozen: str = "fp8", **options: Any
) -> Callable[..., Tensor]:
    recipe, _, tiles = recipe.partition(", ")
    given = {"policy": ALL_FP8, "recipe": recipe, "weight_tiles": bool(tiles), "frozen": frozen, **options}
    return torch.compile(model, backend="fp8", options=given)


def trained(model: nn.Module, call: Callable[..., Tensor], steps: int = 3) -> list[dict[str, Tensor]]:
    """Outputs and gradients of each step, and the trained parameters after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # is given the frozen weights, too
    found = cached.trained(model, call, optimizer, steps, 1)
    return [*found, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}]


def bases(model: nn.Module) -> dict[str, Any]:
    ends = "base.weight", "up.weight", "down.weight"
    return {name: p for name, p in model.named_parameters() if name.endswith(ends)}


def stored(model: nn.Module) -> set[bool]:
    return {hooks.frozen(p) for p in bases(model).values()}


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    ("build", "recipe", "dtype"),
    [
        (lambda: Checkpointed(Lora()), "mxfp8, tiles", BF16),
        (lambda: Stack(*[Lora()] * 2), "blockwise", BF16),
        (Lora, "tensorwise", torch.float32),
    ],
)
@pytest.mark.compat
def test_the_training_is_the_one_without_it(
    build: Callable[[], nn.Module], recipe: str, dtype: torch.dtype
) -> None:
    """tests/equivalence has more training loops."""
    found = {}
    for frozen in ("high_precision", "fp8"):
        model = made(dtype, build)
        before = {name: p.detach().clone() for name, p in bases(model).items()}
        with torch.autocast("cpu", BF16, enabled=dtype == torch.float32):
            found[frozen] = trained(model, compiled(model, recipe, frozen))
        assert stored(model) == {frozen == "fp8"}
    assert same(found["high_precision"], found["fp8"])
    for name, p in bases(model).items():
        assert 1 < p.nbytes / p.numel() < 1.005  # with tiles, 4 of 1,024 bytes are the scale
        # E4M3 has 3 bits of mantissa
        assert (p.dequantized() - before[name]).abs().max() <= before[name].abs().max() / 16
    records = [(x.parameter, x.bytes, x.reason) for x in fp8compile.report(model).graphs[-1].frozen]
    assert records == [(name, p.nbytes, "") for name, p in bases(model).items()]


@pytest.mark.slow
def test_blocks_that_are_compiled_one_by_one() -> None:
    """What one block says holds for all that are compiled: more blocks than Dynamo compiles code for, and two
    pieces of code, as without the option (the first block's input needs no gradient). A block that stays
    eager keeps its weights."""
    found = {}
    for frozen in ("high_precision", "fp8"):
        torch._dynamo.reset()
        model = made(model=lambda: Stack(*(Lora() for _ in range(10))))
        for block in model.inner[:-1]:  # type: ignore[index, union-attr]
            block.compile(backend="fp8", fullgraph=True, options={"policy": ALL_FP8, "frozen": frozen})
        with torch._dynamo.config.patch(recompile_limit=8):
            found[frozen] = trained(model, model, 2)
        assert len(fp8compile.report(model).graphs) == 2
    assert same(found["high_precision"], found["fp8"])
    for _ in range(2):
        assert [hooks.frozen(p) for p in bases(model).values()] == [True] * 18 + [False] * 2
        fp8compile.restore_frozen_weights(model)
        trained(model, model, 1)
    assert len(fp8compile.report(model).graphs) == 2


BACK: dict[str, Callable[[nn.Module], None]] = {
    "restored": fp8compile.restore_frozen_weights,
    "assigned": lambda model: model.load_state_dict(model.state_dict(), assign=True) and None,
}


@pytest.mark.compat
@pytest.mark.parametrize("back", BACK)
def test_plain_weights_in_each_step_compile_nothing_again(back: str) -> None:
    """As GRPO does: merge adapters, evaluate, take them out, train. After the first round all is known."""
    model: Any = made()
    call, counts = compiled(model), []
    for _ in range(3):
        trained(model, call, 1)
        assert stored(model) == {True}
        BACK[back](model)
        with torch.no_grad():
            model.base.weight += model.b.weight @ model.a.weight
            merged, eager = call(batch(1)), model(batch(1))
            model.base.weight -= model.b.weight @ model.a.weight
        assert stored(model) == {False} and torch.equal(merged, eager)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] == counts[2]
    twin = copy.deepcopy(model)
    assert same(trained(twin, compiled(twin, frozen="high_precision"), 1), trained(model, call, 1))


@pytest.mark.slow
@pytest.mark.compat
def test_memory_is_free_before_the_next_weight_is_cast(caplog: pytest.LogCaptureFixture) -> None:
    """So the model never takes more than before. An optimizer with frozen weights holds them: a warning."""
    gc.disable()
    try:
        with hooks.weights_kept_in_fp8() as alive, caplog.at_level(logging.WARNING, "fp8compile"):
            for given in (False, True):
                model = made(model=Lora)
                optimizer = torch.optim.SGD([p for p in model.parameters() if given or p.requires_grad], 0.1)
                call = compiled(model, "delayed")
                for _ in range(1 if given else 2):
                    fp8compile.restore_frozen_weights(model)
                    call(batch(0)).float().mean().backward()
                optimizer.step()
                said = [x.getMessage() for x in caplog.records if "kept in FP8 only" in x.getMessage()]
                assert ("0.1311 MB are not freed: something still holds" in said[-1]) is given
    finally:
        gc.enable()
    assert alive == [0, 0, 0, 0, 1, 2]
    kept = [weakref.ref(p) for p in bases(model).values()]
    del model, optimizer, call
    gc.collect()
    assert not any(reference() is not None for reference in kept), "compiled code holds no weight"


# -- on a described GPU --


def static(frozen: str) -> tuple[fake_gpu.Step, nn.Module]:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)).requires_grad_(False)

    model = unallocated(build, BF16)
    call = compiled(model, "delayed", frozen)
    x = torch.empty(4096, 1024, dtype=BF16, requires_grad=True)
    return fake_gpu.trace(lambda: call(x).sum().backward(), catalog.find("h200").gpu), model


@pytest.mark.slow
@pytest.mark.compiled
@planning
def test_no_kernel_reads_a_frozen_weight_in_high_precision() -> None:
    """The step gets it in one byte an element, keeps no other copy of it, and moves 2 bytes an element for
    dgrad's layout."""
    before, _ = static("high_precision")
    step, model = static("fp8")
    assert {hooks.frozen(p) for p in model.parameters() if p.dim() == 2} == {True}
    sizes = [(2048, 1024), (1024, 2048)]
    for graph in step.graphs:
        found = [x.dtype for x in graph.inputs.values() if x.shape in sizes]
        assert found == [torch.float8_e4m3fn] * 2, "a weight, and no transposed copy of it"
        assert not any(x.dtype in (BF16, torch.float32) and x.shape in sizes for x in graph.inputs.values())
    elements = 2 * 1024 * 2048
    # of 4 or more: read, and written twice
    assert before.bytes_outside_matmuls - step.bytes_outside_matmuls >= 2 * elements
    assert step.kept_for_backward <= before.kept_for_backward - elements
    assert step.flops == before.flops and len(step.kernels) <= len(before.kernels)
    copies = [x for x in step.kernels if x.matmul is None and x.bytes == 2 * 1024 * 2048]
    assert len(copies) == 2 and {x.fqn for x in copies} == {"0", "2"}


# -- other readers --


def converted(recipe: str = "tensorwise", **options: Any) -> tuple[nn.Module, Callable[..., Tensor]]:
    model = made()
    call = compiled(model, recipe, **options)
    trained(model, call, 1)
    assert stored(model) == {True}
    return model, call


def test_checkpoints_are_vanilla(tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    plain = made()
    model, call = converted()
    state = model.state_dict()
    assert {type(x) for x in state.values()} == {Tensor}
    wanted = {name: (x.shape, x.dtype) for name, x in plain.state_dict().items()}
    assert {name: (x.shape, x.dtype) for name, x in state.items()} == wanted
    assert all(torch.equal(state[name], p.dequantized()) for name, p in bases(model).items())
    safetensors.save_file(state, tmp_path / "model.safetensors")
    plain.load_state_dict(reloaded(state))
    assert torch.equal(plain(batch(5)), model(batch(5)))  # both eager
    # what was saved is loaded bitwise, and other values are cast
    before = {name: (p.data_.clone(), p.inv_.clone()) for name, p in bases(model).items()}
    model.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    for name, p in bases(model).items():
        assert torch.equal(p.data_.view(torch.uint8), before[name][0].view(torch.uint8))
        assert torch.equal(p.inv_, before[name][1])
    fresh = made().state_dict()
    model.load_state_dict({name: 3 * x for name, x in fresh.items()})
    loaded = trained(model, call, 1)
    other = made()
    other.load_state_dict({name: 3 * x for name, x in fresh.items()})
    assert same(loaded, trained(other, compiled(other), 1))


def test_eager_copies_and_files() -> None:
    model, _ = converted()
    x = batch(7).requires_grad_()
    out = model(x)
    out.float().square().mean().backward()
    from_file = reloaded(model, weights_only=False)
    for twin in (copy.deepcopy(model), from_file):
        assert torch.equal(twin(batch(7)), out)
        x2 = batch(7).requires_grad_()
        twin(x2).float().square().mean().backward()
        assert torch.equal(x2.grad, x.grad)  # type: ignore[arg-type]
    assert stored(copy.deepcopy(model)) == {True} and stored(from_file) == {False}
    weight = next(iter(bases(model).values()))
    assert repr(weight).startswith("FrozenWeight((256, 128)") and weight.is_leaf
    assert isinstance(weight, nn.Parameter)
    assert type(weight.float()) is type(weight.to(BF16)) is type(weight.t()) is type(weight + 0) is Tensor
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for frozen in bases(twin).values():
            frozen.copy_(3 * frozen.dequantized())
    model.load_state_dict(twin.state_dict(keep_vars=True))  # from one that is kept in FP8 to another
    assert torch.equal(model(batch(7)), twin(batch(7))) and not torch.equal(model(batch(7)), out)


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda w: w.add_(1),
    "by .data": lambda w: w.data.mul_(2),
    "to .data": lambda w: setattr(w, "data", w.dequantized() + 1),
    "by foreach": lambda w: torch._foreach_add_([w], 1.0),
    "as out": lambda w: torch.add(torch.ones(2), 1.0, out=w),
    "train": lambda w: w.requires_grad_(),
    "train, by the attribute": lambda w: setattr(w, "requires_grad", True),
}


def linear() -> nn.Linear:
    """Its weight is kept in FP8 only."""
    layer = nn.Linear(128, 128).to(BF16)
    layer.weight.requires_grad_(False)
    compiled(layer)(batch(0)).float().mean().backward()
    assert hooks.frozen(layer.weight)
    return layer


@pytest.mark.compat
def test_writes_are_errors_that_say_what_to_do() -> None:
    weight: Any = linear().weight
    before = weight.dequantized()
    hint = r"frozen='fp8'.*call fp8compile.restore_frozen_weights\(model\) first"
    for name, write in WRITES.items():
        with torch.no_grad(), pytest.raises(Fp8CompileError, match=hint) as error:
            write(weight)
        assert ("as by an EMA, needs a rule frozen" in str(error.value)) is ("train" not in name)
        assert "\n" not in str(error.value), name
        assert torch.equal(weight.dequantized(), before) and not weight.requires_grad, name


@pytest.mark.compat
def test_conversions_of_the_model(tmp_path: Any) -> None:
    model = linear()
    weight, values = model.weight, model.weight.dequantized()  # type: ignore[operator]
    alive = weakref.ref(weight)  # compiled code has such references, with which torch swaps no tensors
    model.to("cpu").bfloat16().cpu()
    assert model.weight is weight is alive() and torch.equal(weight.dequantized(), values)  # type: ignore[operator]
    for change in (model.float, model.half, lambda: model.to(torch.float64)):
        with pytest.raises(Fp8CompileError, match="restore_frozen_weights"):
            change()
    safetensors = pytest.importorskip("safetensors.torch")
    with pytest.raises(RuntimeError):  # not a file of something else
        safetensors.save_file({"weight": weight}, tmp_path / "one.safetensors")


@pytest.mark.slow
def test_thawed_weights_train() -> None:
    model, _ = converted()
    wanted = {name: p.dequantized() for name, p in bases(model).items()}
    fp8compile.restore_frozen_weights(model)
    assert all(type(p) is nn.Parameter and torch.equal(p, wanted[name]) for name, p in bases(model).items())
    assert model.state_dict().keys() == made().state_dict().keys()
    for p in bases(model).values():
        p.requires_grad_()
    call = compiled(model)
    call(batch(0)).float().square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in bases(model).values())
    assert stored(model) == {False}
    assert not fp8compile.report(model).graphs[-1].frozen


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize("evaluate", ["high_precision", "fp8"])
def test_evaluation_reads_what_fp8_has_left(evaluate: str) -> None:
    model, call = converted(eval=evaluate)
    twin = copy.deepcopy(model)
    fp8compile.restore_frozen_weights(twin)
    model.eval()
    twin.eval()
    with torch.no_grad():
        out = call(batch(3))
        wanted = compiled(twin, eval=evaluate)(batch(3)) if evaluate == "fp8" else twin(batch(3))
    assert torch.equal(out, wanted)
    note = [graph.note for graph in fp8compile.report(model).graphs if graph.note]
    assert not note or "1 frozen weights have FP8-rounded values" in note[-1] or evaluate == "fp8"


# -- which weights --


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 128)
        self.plain, self.read, self.small = (nn.Linear(128, 128, bias=False) for _ in range(3))
        self.trains, self.off = (nn.Linear(128, 128, bias=False) for _ in range(2))
        self.head = nn.Linear(128, 128, bias=False)
        self.requires_grad_(False)
        self.trains.requires_grad_(True)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.trains(self.embed(tokens))
        x = self.plain(x) + self.read(x) * self.read.weight.sum() + self.small(x) + self.off(x)
        return self.head(x)


RULES = [{"module": "off", "fp8": "off"}, {"module": "small", "frozen": "high_precision"}, *ALL_FP8["rules"]]


def test_only_what_nothing_but_fp8_matmuls_read(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Odd()
    with caplog.at_level(logging.WARNING, "fp8compile"):
        call = compiled(model, policy={"rules": RULES})
        tokens = torch.arange(64) % 128
        call(tokens).square().mean().backward()
    assert [name for name, p in model.named_parameters() if hooks.frozen(p)] == ["plain.weight"]
    reasons = {x.parameter: x.reason for x in fp8compile.report(model).graphs[-1].frozen}
    assert reasons == {
        "embed.weight": "tied: embed.weight and head.weight",
        "plain.weight": "",
        "read.weight": "read by aten.sum",
        "off.weight": "policy: rule 1",
    }
    line = "frozen weights in FP8 only: 1 of 4, 0.01639 MB instead of 0.06554"
    assert line in str(fp8compile.report(model))
    said = [record.getMessage() for record in caplog.records if "kept in FP8 only" in record.getMessage()]
    assert len(said) == 1 and "1 frozen weights are kept" in said[0]
    alive = weakref.ref(model.read)
    del model, call
    gc.collect()
    assert alive() is None, "compiled code holds a module"


def test_the_weight_decides_its_recipe() -> None:
    """Another compilation, whose recipe has other scales, multiplies by the same bytes, and its report says
    so. A rule of the user's that names such a recipe for the layer is a warning; with strict, an error."""
    model, _ = converted()
    compiled(model, "blockwise", strict=True)(batch(0)).float().mean().backward()
    graph = fp8compile.report(model).graphs[-1]
    assert [x.reason for x in graph.frozen] == [""]
    told = {x.overrides for x in graph.matmuls if x.fqn == "base" and x.decision == "fp8"}
    assert told and all("bytes are multiplied as they are" in str(lines) for lines in told)
    own = {"rules": [{"name": "mine", "parameter": "base.weight", "recipe": "blockwise"}, {"fp8": "on"}]}
    with pytest.raises(StrictError, match="mine.* wants recipe 'blockwise' for base, whose weight is held"):
        compiled(model, "delayed", strict=True, policy=own)(batch(0))


def test_options_that_are_refused() -> None:
    for recipe in ("rowwise", "rowwise_with_gw_hp", "mxfp8"):
        needed = rf"'frozen'.*recipe '{recipe}', whose dgrad needs other scales .* serve both; "
        needed += "or set weight_tiles to"
        with pytest.raises(OptionError, match=needed):
            fp8compile.Recipe(recipe, frozen="fp8")
    with pytest.raises(OptionError, match="Did you mean 'fp8'"):
        fp8compile.Recipe(frozen="fp9")


# -- beside other parts --


def test_statistics_know_its_scales() -> None:
    """Also before and after a measured call, whose errors of inputs and gradients are as ever."""
    model, call = converted("delayed")
    for measured in (False, True):
        found = fp8compile.stats(model, measure=not measured).rows()
        found = [row for row in found if row["name"] in bases(model)]
        rows = {row["name"]: row for row in found if row["role"] == "weight"}
        assert rows.keys() == bases(model).keys() and len(found) > 2 * len(rows)
        for name, p in bases(model).items():
            row = rows[name]
            assert (row["recipe"], row["format"], row["sqnr"]) == ("frozen", "e4m3fn", None)
            assert (row["scale_inv_min"], row["scale_inv_max"]) == (p.inv_.min().item(), p.inv_.max().item())
            assert row["scale_inv"] == p.inv_.item()
        assert all(bool(row["sqnr"]) is measured for row in found if row["role"] == "input")
        call(batch(1)).float().mean().backward()
    assert "frozen" in str(fp8compile.stats(model))


@pytest.mark.slow
def test_scaling_state_goes_on() -> None:
    """The state of inputs and gradients belongs to the weight: it follows, even if loaded before."""
    model, call = converted("delayed")
    saved = {"model": copy.deepcopy(model.state_dict()), "scaling": scaling_tensors(model)}
    assert "base.weight.input.0" in saved["scaling"]
    on = trained(model, call)
    again = made()
    again.load_state_dict(saved["model"])
    load_scaling(again, saved["scaling"])
    assert same(on, trained(again, compiled(again, "delayed")))


@pytest.mark.slow
def test_explain_and_compare_change_nothing() -> None:
    model: Any = made(model=Lora)
    before = dict(model.named_parameters())
    options = {"policy": ALL_FP8, "frozen": "fp8"}
    with hooks.frozen_values() as copies:
        found = fp8compile.explain(model, batch(0), options=options)
    # explaining takes the memory of one weight
    assert len(copies) == 2 and len({copy.data_ptr() for copy in copies}) == 1
    assert [x.reason for x in found.graphs[-1].frozen] == [""] * 2
    assert all(p is before[name] for name, p in model.named_parameters())
    fp8compile.compare(model, batch(0), options=options, loss=lambda out: out.float().square().mean())
    assert all(p is before[name] for name, p in model.named_parameters())
    assert not model.up._state_dict_hooks


@pytest.mark.slow
def test_an_export_is_the_one_without_it(tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    found = []
    for frozen in ("high_precision", "fp8"):
        model = made(torch.float32)
        trained(model, compiled(model, "blockwise", frozen))
        fp8compile.export(model, tmp_path / frozen)
        found.append(safetensors.load_file(tmp_path / frozen / "model.safetensors"))
    assert found[0].keys() == found[1].keys()
    assert any(x.dtype == torch.float8_e4m3fn for x in found[0].values())
    for name, x in found[0].items():
        assert torch.equal(x.float(), found[1][name].float()), name
