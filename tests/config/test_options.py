"""Options, recipes and formats: accepted values, the resulting recipes, and the texts of errors."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import logging
import pickle
import re
from typing import Any

import pytest
import torch

import fp8compile.distributed
from fp8compile.config import options, peers
from fp8compile.config.options import Options, parse
from fp8compile.config.policy import load
from fp8compile.config.recipe import Recipe
from fp8compile.devices import formats
from fp8compile.errors import OptionError
from tests.support.reference_settings import RECIPES, ROLES, Settings


def error_of(given, mode=None) -> str:
    with pytest.raises(ValueError) as caught:
        parse(given, mode)
    assert isinstance(caught.value, OptionError)
    return str(caught.value)


# -- defaults and values --


@pytest.mark.feature("delayed")
def test_defaults():
    parsed = parse()
    assert parsed == parse({}, "default") == Options(load("default"), False, {})
    assert parsed.recipe == Recipe("delayed", "hybrid", None, 16, "max", 1, (False, False, False), False)
    assert parsed.recipe.delayed


def test_a_recipe_by_the_name_that_the_policy_gives_it():
    policy = {"recipes": {"careful": {"base": "tensorwise", "margin": 2}}}
    parsed = parse({"policy": policy, "recipe": "careful", "fp8_format": "e4m3"})
    assert parsed.recipe == Recipe("tensorwise", "e4m3", margin=2)
    assert "careful" in error_of({"policy": policy, "recipe": "carefull"})


# of each setting another value than the default, where delayed scaling allows one
GIVEN = {
    "fp8_format": "e4m3",
    "margin": 2,
    "amax_history_len": 4,
    "amax_compute_algo": "most_recent",
    "interval": 3,
    "override_linear_precision": (False, True, True),
    "reduce_amax": True,
    "amax_group": "tp",
    "recast_weights": True,
    "merge_matmuls": True,
    "cache_weights": True,
    "frozen": "fp8",
    "fp8_all_to_all": True,
    "use_fast_accum": (True, True, False),
    "current_scaling": (True, False, False),
    "on_overflow": "saturate",
    "power_of_2_scale": False,
    "fp8_encoding": "fnuz",
    "weight_tiles": True,
    "serve": "none",
}


def test_every_option_reaches_its_field():
    beside = {"policy": "conservative", "exclude": ["lm_head", "re:.*router"], "strict": True}
    beside |= {"device": "h100", "eval": "fp8", "save": "fp8"}
    parsed = parse({"recipe": "delayed", **GIVEN, **beside})
    assert dataclasses.asdict(parsed.recipe) == {"name": "delayed", **GIVEN}
    assert (parsed.policy.device, parsed.policy.eval, parsed.policy.save) == ("h100", "fp8", "fp8")
    assert parsed.policy.rules[2:] == load("conservative").rules
    first, second = parsed.policy.rules[:2]
    assert first.module == ("lm_head", "*.lm_head", "lm_head.*", "*.lm_head.*")
    assert second.module == ("re:.*router",) and first.fp8 == second.fp8 == "off"
    assert parsed.policy.labels[:2] == ("exclude lm_head", "exclude re:.*router")
    assert parsed.strict and parsed.inductor == {}
    assert {"recipe", *GIVEN, *beside} == set(options.OURS)


def test_a_recipe_made_in_python():
    made = Recipe("tensorwise", margin=2, use_fast_accum=(False, False, False))
    found = parse({"recipe": made, "fp8_format": "e4m3"}).recipe
    assert found == dataclasses.replace(made, fp8_format="e4m3")
    assert "'margin' is given twice" in error_of({"recipe": made, "margin": 2})


def test_what_cannot_be_excluded():
    for given in (3, [3], [""], {"lm_head": True}):
        assert "'exclude' must be a list of names of modules" in error_of({"exclude": given})


def test_dashes_are_underscores_and_a_format_has_any_case():
    parsed = parse({"fp8-format": "E4M3", "max-autotune": True})
    assert parsed.recipe.fp8_format == "e4m3" and parsed.inductor == {"max_autotune": True}
    assert "'fp8_format' is given twice" in error_of({"fp8-format": "e4m3", "fp8_format": "e4m3"})


# -- errors: key, value, what is allowed --


@pytest.mark.parametrize(
    "key, value, allowed",
    [
        ("recipe", "Delayed", "Did you mean 'delayed'?"),
        ("recipe", "auto", f"one of {', '.join(map(repr, RECIPES))}"),
        ("recipe", None, "'delayed', 'tensorwise'"),
        ("fp8_format", "E5M2", "'hybrid', 'e4m3'"),
        ("margin", -1, "integer >= 0"),
        ("margin", 1.0, "integer >= 0"),
        ("margin", True, "integer >= 0"),
        ("margin", (1, 2), "three: for inputs, weights and gradients"),
        ("amax_history_len", 0, "integer >= 1"),
        ("amax_compute_algo", max, "'max', 'most_recent'"),
        ("interval", False, "integer >= 1"),
        ("override_linear_precision", True, "fprop, dgrad, wgrad"),
        ("override_linear_precision", (1, 0, 0), "fprop, dgrad, wgrad"),
        ("reduce_amax", 1, "a torch.distributed process group"),
        ("amax_group", True, "False, a torch.distributed process group"),
        ("amax_group", (), "a dimension of a DeviceMesh"),
        ("current_scaling", "input", "inputs, weights, gradients"),
        ("on_overflow", "clip", "'current', 'saturate'"),
        ("power_of_2_scale", "up", "True or False"),
        ("fp8_encoding", "e4m3fnuz", "'auto', 'ocp', 'fnuz'"),
        ("recast_weights", None, "True, False or 'auto'"),
        ("merge_matmuls", "yes", "True, False or 'auto'"),
        ("cache_weights", "auto", "True or False"),
        ("fp8_all_to_all", 1, "True or False"),
        ("strict", None, "True or False"),
    ],
)
def test_bad_value(key, value, allowed):
    message = error_of({key: value})
    assert repr(key) in message and repr(value) in message and allowed in message
    assert type(value).__name__ in message


def test_error_carries_key_and_value_and_pickles():
    with pytest.raises(OptionError) as caught:
        parse({"margin": -3})
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.key, error.value) == ("margin", -3) and "-3" in str(error)


def test_long_values_are_cut():
    assert len(error_of({"recipe": "x" * 5000})) < 300
    assert "cannot be shown (int)" in error_of({"recipe": 10**5000})  # Python refuses to write so many digits


@pytest.mark.parametrize(
    "key, meant",
    [
        ("recpie", "recipe"),
        ("format", "fp8_format"),
        ("FP8_FORMAT", "fp8_format"),
        ("amax_histroy_len", "amax_history_len"),
        ("max_autotun", "max_autotune"),
        ("cudagraphs", "triton.cudagraphs"),
    ],
)
def test_unknown_key_lists_near_matches(key, meant):
    message = error_of({key: "it"})
    suggestions = message.partition("Did you mean ")[2].partition("?")[0]
    assert repr(key) in message and "'it'" in message
    assert suggestions.startswith(repr(meant)), message
    # a near miss, and not the list of all
    assert "torch._inductor.config" not in message and len(message) < 200


@pytest.mark.parametrize("key", ["skip", "enable", "formats", "exclud"])
def test_near_misses_are_ours_before_inductors(key):
    """torch has 600 keys, and one of them is like anything."""
    suggestions = error_of({key: 1}).partition("Did you mean ")[2]
    assert not suggestions or set(re.findall(r"'(\w[\w.]*)'", suggestions)) <= set(options.OURS)


def test_unknown_key_without_a_near_match():
    assert not set(options.OURS) & set(torch._inductor.config.get_config_copy())
    message = error_of({"qqqqqq": 1})
    assert "Did you mean" not in message and "torch._inductor.config" in message
    assert all(name in message for name in options.OURS)


class DelayedScaling:
    """Stands for TransformerEngine's."""


class Name(enum.Enum):
    """Stands for torchao's Float8LinearRecipeName."""

    ROWWISE = "rowwise"


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("Float8CurrentScaling", "tensorwise"),
        ("dynamic", "tensorwise"),
        ("MXFP8BlockScaling", "mxfp8"),
        ("Float8BlockScaling", "blockwise"),
        ("DelayedScaling", "delayed"),
        (DelayedScaling, "delayed"),
        (DelayedScaling(), "delayed"),
        (Name.ROWWISE, "rowwise"),
    ],
)
def test_recipes_by_the_names_of_other_libraries(theirs, ours):
    assert f"'recipe' must be {ours!r}, " in error_of({"recipe": theirs})
    assert parse({"recipe": ours}).recipe.name == ours
    if isinstance(theirs, str):
        assert f"must be {ours!r}, " in error_of({"policy": {"rules": [{"module": "*", "recipe": theirs}]}})


def test_options_by_the_names_of_other_libraries():
    """What a hint names exists: an option, or a function of the package."""
    for theirs in peers._OPTIONS:
        message = error_of({theirs: True})
        assert f"unknown fp8 option {theirs!r}" in message and "Here it is" in message
        assert "Did you mean" not in message
        names = re.findall(r"Here it is '(\w+)'", message)
        assert set(names) <= set(options.OURS), message
    assert "fp8compile.distributed.fp8_all_gather(model)" in error_of({"enable_fsdp_float8_all_gather": True})
    assert callable(fp8compile.distributed.fp8_all_gather)
    assert "'policy'" in error_of({"module_filter_fn": lambda module, name: True})
    inside = {"policy": {"rules": [{"module": "*", "gemm_config_output": True}]}}
    assert "Here it is 'use_fast_accum'" in error_of(inside)
    assert "there is no NVFP4 here" in error_of({"recipe": "NVFP4BlockScaling"})


def test_keys_are_strings_and_options_a_mapping():
    assert "3 (int)" in error_of({3: True})
    assert "a mapping" in error_of(["delayed"])


# -- Inductor's --


def test_inductor_options_pass_through_and_their_type_is_checked():
    given = {"max_autotune": True, "triton.cudagraphs": False, "epilogue_fusion": False, "margin": 1}
    parsed = parse(given)
    assert parsed.recipe.margin == given.pop("margin") and parsed.inductor == given
    message = error_of({"max_autotune": "True"})
    assert "'max_autotune'" in message and "'True'" in message and "bool" in message


@pytest.mark.parametrize("key", ["use_joint_graph_passes", "use_post_grad_passes"])
def test_the_passes_that_we_live_in_cannot_be_switched_off(key):
    assert key in error_of({key: False})
    assert parse({key: True}).inductor == {key: True}


def test_options_override_the_mode():
    overhead = torch._inductor.list_mode_options("reduce-overhead")
    assert parse(None, "reduce-overhead").inductor == overhead != {}
    patches = parse({"triton.cudagraphs": False}, "max-autotune").inductor
    assert patches["triton.cudagraphs"] is False and patches["max_autotune"] is True
    # not changed in place
    assert torch._inductor.list_mode_options("max-autotune")["triton.cudagraphs"] is True


def test_bad_modes():
    assert "Did you mean 'max-autotune'" in (message := error_of(None, "max-autotun")) and "'mode'" in message
    assert "'lite'" in error_of(None, "lite")  # this mode of Inductor runs no joint-graph passes
    assert "3 (int)" in error_of(None, 3)


@pytest.mark.feature("delayed")
@pytest.mark.parametrize(
    ("options", "unused"),
    [
        ({"recipe": "tensorwise", "interval": 2, "amax_history_len": 4}, "'interval', 'amax_history_len'"),
        ({"recipe": "blockwise", "current_scaling": (True, True, False)}, "'current_scaling'"),
        (
            {"recipe": "rowwise", "merge_matmuls": True, "fp8_all_to_all": True},
            "'merge_matmuls', 'fp8_all_to_all'",
        ),
        ({"recipe": "delayed", "current_scaling": (True, True, True), "interval": 2}, "'interval'"),
        (
            {
                "interval": 2,
                "on_overflow": "saturate",
                "current_scaling": (True, False, False),
                "merge_matmuls": True,
            },
            "",
        ),
        ({"recipe": "rowwise", "merge_matmuls": "auto", "fp8_all_to_all": False, "weight_tiles": False}, ""),
        (
            {
                "recipe": "rowwise",
                "interval": 2,
                "policy": {"rules": [{"module": "up", "recipe": "delayed"}]},
            },
            "",
        ),
    ],
)
def test_options_without_effect_are_said_once(options: dict[str, Any], unused: str, caplog) -> None:
    """One rule for all: an option at which no recipe of the policy looks is one warning."""
    with caplog.at_level(logging.WARNING, logger="fp8compile"):
        for _ in range(2):
            parse(options)
    said = [f"fp8 option {unused}: no effect with recipe={options.get('recipe')!r}"] if unused else []
    assert [record.getMessage() for record in caplog.records] == said


# -- formats and errors --


def test_what_a_recipe_fixes():
    for name in ("rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"):
        with pytest.raises(OptionError, match=f"fp8_format.*'e4m3' with recipe '{name}'"):
            Recipe(name, fp8_format="hybrid")
    assert Recipe("rowwise_with_gw_hp").override_linear_precision == (False, False, True)
    assert not Recipe("blockwise", power_of_2_scale=False).power_of_2_scale
    with pytest.raises(OptionError, match="power_of_2_scale.*powers of two"):
        Recipe("mxfp8", power_of_2_scale=False)
    assert Recipe(margin=[2, 2, 2]).margin == 2 and Recipe(margin=[1, 0, 2]).margin == (1, 0, 2)
    assert parse({"margin": None}).recipe.margin is None  # a rule's recipe may have another default


@pytest.mark.parametrize("recipe", RECIPES)
def test_margins_and_scaling_are_those_of_the_reference(recipe):
    settings = [{}, {"margin": 0}, {"margin": 1}, {"margin": (2, 1, 6)}]
    settings += [{"current_scaling": tuple(role == other for other in ROLES)} for role in ROLES]
    settings += [
        {name: GIVEN[name]} for name in ("fp8_format", "fp8_encoding", "weight_tiles", "cache_weights")
    ]
    for given in settings:
        ours, reference = Recipe(recipe, **given), Settings(recipe, **given)
        for role, gemm in itertools.product(ROLES, ("fprop", "dgrad", "wgrad")):
            found = ours.scaling(role, gemm)
            assert found.delayed is reference.delayed(role) and found.block == reference.block(role, gemm)
            assert found.margin == reference.margin_of(role) and found.power_of_2 is reference.rounded(role)
            form = formats.pick(found.wide, found.encoding == "fnuz")
            assert (form.dtype, form.max) == reference.format(role)


@pytest.mark.feature("delayed")
def test_options_are_checked_with_the_recipe_of_the_policy():
    policy = {"defaults": {"recipe": "rowwise"}}
    assert parse({"fp8_format": "hybrid"}).recipe.fp8_format == "hybrid"  # the default recipe is delayed
    assert "fp8_format" in error_of({"policy": policy, "fp8_format": "hybrid"})
    rule = {"rules": [{"module": "a", "recipe": "rowwise", "fp8_format": "hybrid"}]}
    assert "rule" in error_of({"policy": rule}) and "[defaults]" not in error_of({"policy": rule})


def test_current_scaling_that_is_asked_for_comes_on_top_of_that_of_down_projections():
    def of_down(**given) -> tuple:
        return next(r.current_scaling for r in parse(given).policy.possible if r.current_scaling[0])

    assert of_down() == (True, False, False)
    assert of_down(current_scaling=(False, False, True)) == (True, False, True)
    assert of_down(current_scaling=(True, True, True)) == (True, True, True)
    own = {"rules": [{"kind": "down projection", "current_scaling": [False, False, False]}]}
    asked = parse({"policy": own, "current_scaling": (False, False, True)}).policy
    # a rule of the user's own overrides the default rule
    assert asked._effective[0].current_scaling == (False, False, False)
    assert parse().policy.key != parse({"current_scaling": (False, False, True)}).policy.key


@pytest.mark.feature("delayed")
def test_recipes_of_roles():
    for name in RECIPES:
        same = {"rowwise_with_gw_hp": "rowwise"}.get(name, name)
        assert {Recipe(name).scaling(role, "fprop").recipe for role in ROLES} == {same}
    assert Recipe("rowwise_with_gw_hp").scaling("weight", "dgrad").recipe == "tensorwise"
    down = Recipe(current_scaling=(True, False, False))
    assert [down.scaling(role, "fprop").recipe for role in ROLES] == ["tensorwise", "delayed", "delayed"]
    assert down.delayed and not Recipe(current_scaling=(True, True, True)).delayed


@pytest.mark.parametrize("arch, expected", [("gfx942:sramecc+", True), ("gfx950", False), ("gfx1201", False)])
def test_fnuz_follows_the_architecture(monkeypatch, arch, expected):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: type("P", (), {"gcnArchName": arch}))
    assert formats.fnuz() is expected
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked for CUDA"))
    assert formats.fnuz() is False
