"""The recipe "auto": which recipe it is on a device, for which layer, what a report says of it, and what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.config.options import parse
from fp8compile.config.policy import Policy, Rule
from fp8compile.config.recipe import AUTO, PREFERRED, Recipe
from fp8compile.devices import catalog
from fp8compile.devices.gpu import Gpu
from tests.support import hooks
from tests.support.harness import ALL_FP8, compiled, grads_of, noise
from tests.support.models import Mlp, make

pytestmark = pytest.mark.usefixtures("interpreted")

DEVICES = {
    "h100": ("delayed", "sm_90"),
    "rtx4090": ("delayed", "sm_89"),
    "mi300x": ("delayed", "gfx942"),
    "b200": ("mxfp8", "sm_100"),
    "rtx5090": ("mxfp8", "sm_120"),
}


def gpu(key: str) -> Gpu:
    return catalog.find(key).gpu


def step(model: nn.Module, x: torch.Tensor, **options) -> fp8compile.Report:
    compiled(model, **options)(x).square().sum().backward()
    return fp8compile.report(model)


def traced(*args, **options) -> fp8compile.Report:
    with hooks.traced():
        return step(*args, **options)


# -- which recipe ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "expected"), DEVICES.items())
def test_the_recipe_of_a_device_is_native_there(key, expected):
    recipe, where = expected
    first, *others = Recipe(AUTO).on(gpu(key))
    assert first == (Recipe(recipe), f"auto on {where}") and first.recipe.built_in.native(gpu(key))
    assert [other.recipe.name for other in others] == (["tensorwise"] if recipe == "mxfp8" else [])


def test_a_cpu_is_like_hopper():
    assert Recipe(AUTO).on(None) == ((Recipe("delayed"), "auto on a CPU"),)


@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_a_named_recipe_is_itself_on_every_device(name):
    assert {Recipe(name).on(one) for one in (None, gpu("h100"), gpu("b200"))} == {((Recipe(name), ""),)}


def test_an_older_cuda_has_no_mx(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    assert Recipe(AUTO).on(gpu("b200")) == ((Recipe("delayed"), "auto on sm_100"),)


@pytest.mark.parametrize(
    ("settings", "key", "recipe", "why"),
    [
        ({"fp8_format": "hybrid"}, "b200", "delayed", "auto on sm_100, as mxfp8 has another fp8_format"),
        ({"fp8_format": "E4M3"}, "b200", "mxfp8", "auto on sm_100"),
        ({"fp8_format": "e4m3"}, "h100", "delayed", "auto on sm_90"),
        ({"power_of_2_scale": False}, "b200", "delayed", "auto on sm_100, as mxfp8 has another power_of_2_scale"),
        ({"power_of_2_scale": True}, "b200", "mxfp8", "auto on sm_100"),
        ({"power_of_2_scale": True}, "h100", "tensorwise", "auto on sm_90, as delayed has another power_of_2_scale"),
        ({"amax_group": "tp"}, "b200", "delayed", "auto on sm_100, as mxfp8 has another amax_group"),
        ({"fp8_all_to_all": True}, "b200", "delayed", "auto on sm_100, as mxfp8 has no fp8_all_to_all"),
        ({"merge_matmuls": True}, "b200", "delayed", "auto on sm_100, as mxfp8 has no merge_matmuls"),
        ({"amax_history_len": 4, "margin": 2}, "b200", "mxfp8", "auto on sm_100"),
    ],
)
def test_a_recipe_that_refuses_the_settings_is_not_taken(settings, key, recipe, why):
    asked = Recipe(AUTO, **settings)
    assert asked.on(gpu(key))[0] == (Recipe(recipe, **settings), why)


def test_the_last_preference_takes_every_setting():
    assert PREFERRED[-1] == "tensorwise" and Recipe("tensorwise", fp8_format="hybrid", power_of_2_scale=True)


def test_bad_settings_are_refused_before_a_device_is_known():
    for name, value in {"fp8_format": "e5m2", "power_of_2_scale": "yes", "fp8_encoding": "ieee", "margin": -1}.items():
        with pytest.raises(fp8compile.OptionError, match=name):
            parse({"recipe": "auto", name: value})
    with pytest.raises(fp8compile.OptionError, match="'auto', 'delayed'.*Did you mean 'auto'"):
        parse({"recipe": "autto"})


def test_auto_in_policies():
    policy = parse({"policy": {"defaults": {"recipe": "auto"}, "rules": [{"module": "up", "recipe": "mine"}],
                               "recipes": {"mine": {"base": "auto", "margin": 1}}}}).policy
    assert policy.recipe == Recipe(AUTO) and Recipe(AUTO, margin=1) in policy.possible and policy.delayed
    assert Policy(rules=(Rule(recipe="auto"),)).possible == (Recipe(AUTO),)
    with pytest.raises(fp8compile.OptionError, match="'auto' is built in"):
        parse({"policy": {"recipes": {"auto": {"base": "delayed"}}}})


# -- in a graph ----------------------------------------------------------------------------------------------------------


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(("key", "expected"), DEVICES.items())
def test_the_report_says_what_was_chosen_and_why(key, expected):
    recipe, where = expected
    report = traced(make(Mlp), noise(128, 128), recipe="auto", policy=ALL_FP8, device=key, strict=True)
    assert {(r.recipe, r.why, r.emulated) for r in report.matmuls} == {(recipe, f"auto on {where}", False)}
    assert f"{recipe} (auto on {where})" in str(report)
    assert report.to_dict()["graphs"][-1]["matmuls"][0]["why"] == f"auto on {where}"


@pytest.mark.slow
@pytest.mark.parametrize(("options", "named"), [({}, "delayed"), ({"device": "b200"}, "mxfp8")])
def test_it_computes_what_the_named_recipe_computes(options, named):
    grads = []
    for recipe in ("auto", named):
        model = make(Mlp)
        run = compiled(model, recipe=recipe, policy=ALL_FP8, **options)
        for seed in range(2):
            run(noise(128, 128, seed=seed)).square().sum().backward()
        grads.append((grads_of(model), {key: slot.page.tensor[slot.row] for key, slot in hooks.slots_of(model).items()}))
    (first, slots), (second, others) = grads
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert slots.keys() == others.keys() and all(torch.equal(slots[key], others[key]) for key in slots)
    assert bool(slots) is (named == "delayed")


@pytest.mark.slow
def test_a_graph_of_blackwell_has_no_state_but_for_what_a_rule_names():
    model = make(Mlp)
    step(model, noise(128, 128), recipe="auto", policy=ALL_FP8, device="b200")
    assert not hooks.slots_of(model) and list(fp8compile.scaling_state(model)) == ["fp8compile.version"]
    rules = [{"module": "down", "recipe": "delayed", "fp8": "on"}, *ALL_FP8["rules"]]
    model = make(Mlp)
    report = step(model, noise(128, 128), recipe="auto", policy={"rules": rules}, device="b200")
    assert {(r.fqn, r.how) for r in report.matmuls} == {("up", "mxfp8 (auto on sm_100)"), ("down", "delayed")}
    assert {name for name, *_ in hooks.slots_of(model)} == {"down.weight"}


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False], ids=["loaded before", "loaded after"])
def test_a_run_goes_on_on_another_device(before):
    """A run on Hopper has a scaling state, which a Blackwell has no use for; what it leaves out starts cold on a Hopper."""
    model = make(Mlp)
    step(model, noise(128, 128), recipe="auto", policy=ALL_FP8, device="h100")
    state, weights = fp8compile.scaling_state(model), model.state_dict()
    assert len(state) > 1
    other = make(Mlp, seed=9)
    other.load_state_dict(weights)
    if before:
        fp8compile.load_scaling_state(other, state)
    report = step(other, noise(128, 128), recipe="auto", policy=ALL_FP8, device="b200")
    if not before:
        fp8compile.load_scaling_state(other, state)
    assert {r.recipe for r in report.matmuls} == {"mxfp8"}
    third = make(Mlp, seed=10)
    third.load_state_dict(other.state_dict())
    fp8compile.load_scaling_state(third, {})
    assert {r.recipe for r in step(third, noise(128, 128), recipe="auto", policy=ALL_FP8, device="h100").matmuls} == {"delayed"}
    assert len(fp8compile.scaling_state(third)) == len(state)


class Experts(nn.Module):
    """Two experts whose weights have sides of `size` and 128."""

    def __init__(self, size: int):
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, size, 128) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([96, 128], dtype=torch.int32)
        return nn.functional.grouped_mm(x, self.up.transpose(1, 2), offs=ends)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "how"), [(64, "mxfp8 (auto on sm_100)"),
                                           (48, "tensorwise (auto on sm_100, as mxfp8 needs other sizes)")])
def test_experts_whose_sides_do_not_fit(size, how):
    """All three gemms of the layer take one recipe, and the graph needs no state."""
    torch.manual_seed(0)
    model = Experts(size).to(torch.bfloat16)
    report = step(model, noise(128, 128, dtype=torch.bfloat16).requires_grad_(), recipe="auto",
                  policy={"rules": [{"fp8": "on"}]}, device="b200")
    assert {(r.gemm, r.how) for r in report.matmuls} == {(gemm, how) for gemm in ("fprop", "dgrad", "wgrad")}
    assert not hooks.slots_of(model)
