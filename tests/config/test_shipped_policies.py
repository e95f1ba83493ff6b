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
from fp8compile.config.recipe import RECIPES
from fp8compile.passes.classify import HEADS, ROUTERS

transformers = pytest.importorskip("transformers")

KINDS = dict.fromkeys(ROUTERS, "router gate: by its name")
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
        n, k = (
            weight.shape[-2:]
            if not isinstance(module, transformers.pytorch_utils.Conv1D)
            else weight.shape[::-1]
        )
        last = name.rsplit(".", 1)[-1]
        head = (
            "output head: by its name" if last in HEADS else "output head: tied" if weight in tables else ""
        )
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
                kind=head or KINDS.get(last, ""),
            )


def decided(policy: str | Policy, model: nn.Module) -> dict[str, Choice]:
    """parameter -> the choice, which must be equal for its three gemms."""
    policy = load(policy)
    choices: dict[str, Choice] = {}
    for site in sites(model):
        choice = policy.choose(site)
        assert choices.setdefault(site.parameter, choice) == choice
    return choices


def by_label(choices: dict[str, Choice]) -> dict[str, set[str]]:
    """label of a rule -> its parameters, with the first number of a name replaced by *."""
    found: dict[str, set[str]] = {}
    for parameter, choice in choices.items():
        found.setdefault(choice.label, set()).add(
            re.sub(r"\.\d+\.", ".*.", parameter, count=1).removesuffix(".weight")
        )
    return found


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    sizes = dict(vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=3)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    narrow = dict(n_embd=256, n_layer=3, n_head=4, vocab_size=1024)
    with torch.device("meta"):
        return {
            "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)),
            "gpt2": transformers.GPT2LMHeadModel(transformers.GPT2Config(**narrow)),
            "gpt2-xl": transformers.GPT2LMHeadModel(
                transformers.GPT2Config(**{**narrow, "n_embd": 1600, "n_head": 25})
            ),
            "vit": transformers.ViTForImageClassification(
                transformers.ViTConfig(
                    hidden_size=256,
                    intermediate_size=512,
                    num_hidden_layers=3,
                    num_attention_heads=4,
                    num_labels=1000,
                )
            ),
            "moe": transformers.MixtralForCausalLM(
                transformers.MixtralConfig(**sizes, **heads, num_local_experts=8)
            ),
        }


BLOCK = "model.layers.*."
ATTENTION = {f"{BLOCK}self_attn.{name}_proj" for name in "qkv"}
OUTPUT = f"{BLOCK}self_attn.o_proj"
UP, DOWN = {f"{BLOCK}mlp.gate_proj", f"{BLOCK}mlp.up_proj"}, f"{BLOCK}mlp.down_proj"


def test_default(models):
    choices = decided("default", models["llama"])
    assert by_label(choices) == {
        "output head": {"lm_head"},
        "down projection": {DOWN},
        "": {*ATTENTION, OUTPUT, *UP},
    }
    assert (
        choices["lm_head.weight"].fp8 == "off" and choices["model.layers.0.mlp.up_proj.weight"].fp8 == "auto"
    )
    narrow = models["gpt2"]
    narrow.down = nn.Linear(256, 64, device="meta")  # for example the rank of a LoRA
    try:
        assert by_label(decided("default", narrow))["under 128 wide"] == {"down"}
    finally:
        del narrow.down


def test_llama(models):
    choices = decided("llama", models["llama"])
    found = {"output head": {"lm_head"}, "down projection": {DOWN}, "": {*ATTENTION, OUTPUT, *UP}}
    assert by_label(choices) == found
    down, up = choices["model.layers.0.mlp.down_proj.weight"], choices["model.layers.0.mlp.up_proj.weight"]
    assert (down.fp8, down.recipe.name, up.fp8, up.recipe.name) == ("auto", "delayed", "auto", "delayed")
    assert (down.recipe.current_scaling, up.recipe.current_scaling) == (
        (True, False, False),
        (False, False, False),
    )


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
        linear = nn.Sequential()
        parent, last = linear, name.split(".")
        for part in last[:-1]:
            parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last[-1], nn.Linear(768, 768, device="meta"))
        assert [choice.label for choice in decided(policy, linear).values()] == ["patch embedding"]


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
    for model, outputs, downs in (
        ("gpt2", "attn.c_proj", "mlp.c_proj"),
        ("moe", "o_proj", "experts.down_proj"),
    ):
        found = by_label(decided("conservative", models[model]))
        assert all(name.endswith(outputs) for name in found["attention output"])
        assert all(name.endswith(downs) for name in found["down projection"])
    outputs = by_label(decided("conservative", models["vit"]))["attention output"]
    assert len(outputs) == 1 and "attention" in outputs.pop()


def test_accelerate_defaults(models):
    choices = decided("accelerate-defaults", models["llama"])
    names = list(choices)
    assert [name for name in names if choices[name].fp8 == "off"] == [names[0], names[-1]]
    assert all(choice.fp8 == "on" for choice in list(choices.values())[1:-1])
    recipe = choices[names[1]].recipe
    assert (recipe.amax_history_len, recipe.amax_compute_algo, recipe.fp8_format) == (
        1024,
        "most_recent",
        "hybrid",
    )
    odd = nn.Sequential(
        *(nn.Linear(a, b, device="meta") for a, b in ((64, 64), (64, 72), (72, 64), (64, 64), (64, 64)))
    )
    assert [choice.fp8 for choice in decided("accelerate-defaults", odd).values()] == [
        "off",
        "off",
        "off",
        "on",
        "off",
    ]
    conv = decided("accelerate-defaults", models["gpt2"])  # the head is the only nn.Linear
    assert {choice.fp8 for choice in conv.values()} == {"off"}


@pytest.mark.parametrize("policy", sorted(BUILTIN))
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_goes_with_every_policy(recipe, policy):
    """A policy's settings for one recipe do not conflict with another recipe in the options."""
    found = parse({"policy": policy, "recipe": recipe}).policy
    site = next(sites(nn.Linear(256, 256, device="meta")))
    assert found.choose(site).recipe.name == recipe
    assert found.defaults.recipe == recipe


# -- compiled, as a user would --


GRAPHS = [(policy, "llama") for policy in ("conservative", "default", "fast", "llama", "accelerate-defaults")]
GRAPHS += [("gpt2", "gpt2"), ("fast", "gpt2"), ("vit", "vit")]


@pytest.mark.weekly
@pytest.mark.parametrize(("policy", "name"), GRAPHS)
def test_the_graph_decides_as_the_names_do(models, policy, name):
    """Compares the report of a training step with `decided`, rule by rule; every rule of the shipped file
    decides something."""
    model = models[name]
    given = (
        {"pixel_values": torch.zeros(2, 3, 224, 224)}
        if name == "vit"
        else {"input_ids": torch.zeros(2, 64).long()}
    )
    report = fp8compile.explain(model, options={"policy": policy}, **given)
    expected = decided(policy, model)
    records = [record for record in report.matmuls if record.parameter]
    found = {(record.parameter, record.rule, record.recipe or "high precision") for record in records}
    assert len(found) >= 13
    for parameter, rule, recipe in found:
        choice = expected.get(parameter) or expected["lm_head.weight"]  # tied to an embedding
        assert rule == choice.label, parameter
        assert recipe == ("high precision" if choice.fp8 == "off" else choice.recipe.name), parameter
    ours = load(policy)
    own = {
        label
        for label, rule in zip(ours.labels, ours.rules, strict=True)
        if rule not in load("default").rules
    }
    absent = {"sides that 16 does not divide", "not a linear", "patch embedding"}  # a convolution here
    assert own - absent <= {rule for _, rule, _ in found}
