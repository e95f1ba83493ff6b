"""The decisions of each shipped policy for the names and shapes of real models."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
import torch.nn as nn

import fp8compile
from fp8compile.config.options import parse
from fp8compile.config.policy import BUILTIN, Choice, Policy, Site, load
from fp8compile.config.recipe import RECIPES, Recipe
from fp8compile.errors import OptionError
from fp8compile.passes.classify import HEADS, ROUTERS
from tests.support.policies import site

transformers = pytest.importorskip("transformers")

KINDS = dict.fromkeys(ROUTERS, "router gate: by its name")
KINDS |= dict.fromkeys(HEADS, "output head: by its name")
KINDS["down_proj"] = "down projection: gated in all models that call it so"


def sites(model: nn.Module, m: int = 8192) -> Iterator[Site]:
    """Three gemms for each weight of `model` in a matmul: linears, GPT-2's Conv1D, stacked experts."""
    modules = dict(model.named_modules())
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    weights = []
    for name, module in modules.items():
        for key, weight in module.named_parameters(recurse=False):
            linear = isinstance(module, (nn.Linear, transformers.pytorch_utils.Conv1D)) and key == "weight"
            routes = "Router" in type(module).__name__ and weight.dim() == 2
            if linear or routes or ("expert" in name and weight.dim() == 3):
                weights.append((name, f"{name}.{key}", module, weight))
    for i, (name, parameter, module, weight) in enumerate(weights):
        around = [name.rsplit(".", depth)[0] for depth in range(name.count(".") + 1)]
        conv = isinstance(module, transformers.pytorch_utils.Conv1D)
        n, k = weight.shape[::-1] if conv else weight.shape[-2:]
        last = name.rsplit(".", 1)[-1]
        kind = "output head: tied" if weight in tables else KINDS.get(last, "")
        block = re.match(r"(.*?)\.(\d+)\.", name)
        for gemm in ("fprop", "dgrad", "wgrad"):
            yield Site(
                module=name,
                parameter=parameter,
                classes=tuple(type(modules[one]).__name__ for one in [*around, ""]),
                op="bmm" if weight.dim() == 3 else "mm",
                gemm=gemm,
                m=m,
                n=n,
                k=k,
                block=(int(block[2]), len(modules[block[1]])) if block else None,
                layer=(i, len(weights)),
                kind=kind,
            )


def decided(policy: str | Policy, model: nn.Module) -> dict[str, Choice]:
    """parameter -> the choice, which must be equal for its three gemms."""
    policy = load(policy)
    choices: dict[str, Choice] = {}
    for gemm in sites(model):
        choice = policy.choose(gemm)
        assert choices.setdefault(gemm.parameter, choice) == choice
    return choices


def by_label(choices: dict[str, Choice]) -> dict[str, set[str]]:
    """label of a rule -> its parameters, with the first number of a name replaced by *."""
    found: dict[str, set[str]] = {}
    for parameter, choice in choices.items():
        name = re.sub(r"\.\d+\.", ".*.", parameter, count=1).removesuffix(".weight")
        found.setdefault(choice.label, set()).add(name)
    return found


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4)
    llama = dict(**sizes, vocab_size=1024, num_key_value_heads=2)
    narrow = dict(n_embd=256, n_layer=3, n_head=4, vocab_size=1024)
    wide = {**narrow, "n_embd": 1600, "n_head": 25}
    with torch.device("meta"):
        return {
            "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama)),
            "gpt2": transformers.GPT2LMHeadModel(transformers.GPT2Config(**narrow)),
            "gpt2-xl": transformers.GPT2LMHeadModel(transformers.GPT2Config(**wide)),
            "vit": transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, num_labels=1000)),
            "moe": transformers.MixtralForCausalLM(transformers.MixtralConfig(**llama, num_local_experts=8)),
        }


BLOCK = "model.layers.*."
ATTENTION = {f"{BLOCK}self_attn.{name}_proj" for name in "qkv"}
OUTPUT = f"{BLOCK}self_attn.o_proj"
UP, DOWN = {f"{BLOCK}mlp.gate_proj", f"{BLOCK}mlp.up_proj"}, f"{BLOCK}mlp.down_proj"


@pytest.mark.parametrize("policy", ["default", "llama"])
def test_a_llama(models, policy):
    choices = decided(policy, models["llama"])
    found = {"output head": {"lm_head"}, "down projection": {DOWN}, "": {*ATTENTION, OUTPUT, *UP}}
    assert by_label(choices) == found
    down, up = choices["model.layers.0.mlp.down_proj.weight"], choices["model.layers.0.mlp.up_proj.weight"]
    assert choices["lm_head.weight"].fp8 == "off" and down.fp8 == up.fp8 == "auto"
    assert down.recipe == Recipe(current_scaling=(True, False, False)) and up.recipe == Recipe()


def test_narrow_layers():
    narrow = nn.Sequential(nn.Linear(256, 256, device="meta"), nn.Linear(256, 64, device="meta"))
    assert by_label(decided("default", narrow)) == {"": {"0"}, "under 128 wide": {"1"}}  # as of a LoRA's rank


def test_gpt2(models):
    block = "transformer.h.*."
    rest = {f"{block}attn.c_attn", f"{block}mlp.c_fc", f"{block}mlp.c_proj"}
    found = {"output head": {"lm_head"}, "narrow attention output": {f"{block}attn.c_proj"}, "": rest}
    assert by_label(decided("gpt2", models["gpt2"])) == found
    found = {"output head": {"lm_head"}, "": {*rest, f"{block}attn.c_proj"}}
    assert by_label(decided("gpt2", models["gpt2-xl"])) == found


def test_vit(models):
    found = by_label(decided("vit", models["vit"]))
    assert found["classifier"] == {"classifier"} and set(found) == {"classifier", ""} and len(found[""]) == 6
    policy = load("vit")
    for name in ("patch_embed.proj", "vit.embeddings.patch_embeddings.projection", "to_patch_embedding.2"):
        assert policy.choose(site(name)).label == "patch embedding"


def test_moe(models):
    choices = decided("moe", models["moe"])
    found = by_label(choices)
    assert found["output head"] == {"lm_head"} and found["router"] == {f"{BLOCK}mlp.gate"}
    assert found["down projection"] == {f"{BLOCK}mlp.experts.down_proj"}
    assert found[""] == {*ATTENTION, OUTPUT, f"{BLOCK}mlp.experts.gate_up_proj"}
    assert choices["model.layers.0.mlp.gate.weight"].fp8 == "off"
    assert choices["model.layers.0.mlp.experts.down_proj"].recipe.current_scaling == (True, False, False)


def test_conservative(models):
    choices = decided("conservative", models["llama"])
    for name, choice in choices.items():
        first_or_last = name.startswith(("model.layers.0.", "model.layers.2."))
        kept = first_or_last or name.endswith("o_proj.weight") or name == "lm_head.weight"
        assert choice.fp8 == ("off" if kept else "auto"), name
        current = name.endswith("down_proj.weight") and not first_or_last
        assert choice.recipe.margin == (0 if current else (1, 1, 11))
        assert choice.recipe.delayed is not current
    names = (("gpt2", "attn.c_proj", "mlp.c_proj"), ("moe", "o_proj", "experts.down_proj"))
    for model, outputs, downs in names:
        found = by_label(decided("conservative", models[model]))
        assert all(name.endswith(outputs) for name in found["attention output"])
        assert all(name.endswith(downs) for name in found["down projection"])
    outputs = by_label(decided("conservative", models["vit"]))["attention output"]
    assert len(outputs) == 1 and "attention" in outputs.pop()


@pytest.mark.feature("delayed")
def test_accelerate_defaults(models):
    choices = decided("accelerate-defaults", models["llama"])
    names = list(choices)
    assert [name for name in names if choices[name].fp8 == "off"] == [names[0], names[-1]]
    assert all(choice.fp8 == "on" for choice in list(choices.values())[1:-1])
    used = Recipe(margin=0, amax_history_len=1024, amax_compute_algo="most_recent")
    assert choices[names[1]].recipe == used
    sides = ((64, 64), (64, 72), (72, 64), (64, 64), (64, 64))
    odd = nn.Sequential(*(nn.Linear(a, b, device="meta") for a, b in sides))
    kept = [choice.fp8 for choice in decided("accelerate-defaults", odd).values()]
    assert kept == ["off", "off", "off", "on", "off"]
    conv = decided("accelerate-defaults", models["gpt2"])  # the head is the only nn.Linear
    assert {choice.fp8 for choice in conv.values()} == {"off"}


def test_vllm(models):
    """What vLLM merges into one layer is of one precision, whatever a cost model says. What `export`
    could not write is not FP8: blocks that are cut, experts in stacks, other modules than Linear."""
    choices = decided("vllm", models["llama"])
    on = {name.removesuffix(".weight") for name in by_label(choices)["linear"]}
    assert on == {*ATTENTION, OUTPUT, *UP, DOWN} and choices["lm_head.weight"].fp8 == "off"
    assert {choice.fp8 for choice in choices.values()} == {"on", "off"}
    recipe = Recipe("blockwise", serve="vllm")
    assert all(choice.recipe == recipe for choice in choices.values())
    assert by_label(decided("vllm", models["moe"])) == {
        "output head": {"lm_head"},
        "sides that 128 does not divide": {f"{BLOCK}mlp.gate"},  # a graph shows its kind
        "linear": {*ATTENTION, OUTPUT},
        "not a linear": {f"{BLOCK}mlp.experts.{name}_proj" for name in ("gate_up", "down")},
    }
    assert {choice.fp8 for choice in decided("vllm", models["gpt2"]).values()} == {"off"}  # Conv1D
    odd = nn.Sequential(nn.Linear(256, 192, device="meta"), nn.Linear(192, 256, device="meta"))
    assert by_label(decided("vllm", odd)) == {"sides that 128 does not divide": {"0", "1"}}
    with pytest.raises(OptionError, match="'serve' must be 'none' with recipe 'rowwise'"):
        parse({"policy": "vllm", "recipe": "rowwise"})


@pytest.mark.parametrize("policy", sorted({*BUILTIN} - {"vllm"}))  # which is for one recipe
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_goes_with_every_policy(recipe, policy):
    """A policy's settings for one recipe do not conflict with another recipe in the options."""
    found = parse({"policy": policy, "recipe": recipe}).policy
    assert found.choose(site()).recipe.name == found.defaults.recipe == recipe


# -- compiled, as a user would --


GRAPHS = [
    (policy, "llama")
    for policy in ("conservative", "default", "fast", "llama", "accelerate-defaults", "vllm")
]
GRAPHS += [("gpt2", "gpt2"), ("fast", "gpt2"), ("vit", "vit")]


@pytest.mark.weekly
@pytest.mark.parametrize(("policy", "name"), GRAPHS)
def test_the_graph_decides_as_the_names_do(models, policy, name):
    """Compares the report of a training step with `decided`, rule by rule; every rule of the shipped file
    decides something."""
    model = models[name]
    given = {"input_ids": torch.zeros(2, 64).long()}
    if name == "vit":
        given = {"pixel_values": torch.zeros(2, 3, 224, 224)}
    report = fp8compile.explain(model, options={"policy": policy}, **given)
    expected = decided(policy, model)
    records = [record for record in report.matmuls if record.parameter]
    found = {(record.parameter, record.rule, record.recipe or "high precision") for record in records}
    assert len(found) >= 13
    for parameter, rule, recipe in found:
        choice = expected.get(parameter) or expected["lm_head.weight"]  # tied to an embedding
        assert rule == choice.label, parameter
        assert recipe == ("high precision" if choice.fp8 == "off" else choice.recipe.name), parameter
    ours, default = load(policy), load("default")
    own = {label for label, rule in zip(ours.labels, ours.rules, strict=True) if rule not in default.rules}
    absent = {"sides that 128 does not divide", "adapter", "router gate"}
    absent |= {"sides that 16 does not divide", "not a linear", "patch embedding"}  # a convolution here
    assert own - absent <= {rule for _, rule, _ in found}
