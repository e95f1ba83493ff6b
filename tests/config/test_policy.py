"""Policies: conditions and order of rules, resolution of recipes, sources, and texts of errors."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from importlib import resources

import pytest

from fp8compile.config.policy import BUILTIN, Choice, Policy, Rule, Schedule, load, schema
from fp8compile.config.policy.policy_files import PolicyFile, shipped
from fp8compile.config.policy.policy_tables import SETTINGS, Defaults, NamedRecipe
from fp8compile.config.recipe import Recipe
from fp8compile.errors import OptionError
from tests.config.test_options import GIVEN
from tests.support.policies import UP, fp8, refusal, site

# -- conditions --


@pytest.mark.parametrize(
    "conditions, matching, other",
    [
        ({"module": "*.up_proj"}, {}, {"module": "model.layers.1.mlp.down_proj"}),
        ({"module": "model.*.up_proj"}, {}, {"module": "up_proj"}),  # "*" also matches dots
        ({"module": "model.layers.[0-1].mlp.up_pro?"}, {}, {"module": "model.layers.2.mlp.up_proj"}),
        ({"module": r"re:model\.layers\.(1|3)\..*"}, {}, {"module": "model.layers.2.mlp.up_proj"}),
        # it must match the whole name
        ({"module": "re:layers"}, {"module": "layers"}, {"module": "model.layers"}),
        ({"module": "*.UP_proj"}, {"module": "x.UP_proj"}, {}),  # case matters
        ({"parameter": "*.up_proj.weight"}, {}, {"parameter": "x"}),
        ({"module_class": "Linear"}, {}, {"classes": ("Conv1D", "GPT2MLP")}),
        # classes of the surrounding modules
        ({"module_class": ["*MLP"]}, {}, {"classes": ("Linear", "LlamaAttention")}),
        ({"op": "mm"}, {}, {"op": "bmm"}),
        ({"gemm": ["fprop", "dgrad"]}, {"gemm": "dgrad"}, {"gemm": "wgrad"}),
        ({"where": "m < 512"}, {"m": 511}, {"m": 512}),
        ({"blocks": "first 2"}, {"block": (1, 4)}, {"block": (2, 4)}),
        ({"blocks": "last 1"}, {"block": (3, 4)}, {"block": (2, 4)}),
        ({"blocks": "first 9"}, {"block": (3, 4)}, {"block": None}),  # a module outside of all blocks
        ({"blocks": ["first 1", "last 1"]}, {"block": (0, 4)}, {"block": (1, 4)}),
        ({"layers": "first 1"}, {"layer": (0, 29)}, {"layer": (1, 29)}),
        ({"layers": "last 2"}, {"layer": (27, 29)}, {"layer": (26, 29)}),
        ({"kind": "output head"}, {"kind": "output head: by its name"}, {"kind": "router gate: by its name"}),
        ({"kind": ["output head", "router gate"]}, {"kind": "router gate"}, {"kind": ""}),
        ({"module": "*.up_proj", "gemm": "fprop"}, {}, {"gemm": "dgrad"}),  # all conditions must hold
    ],
)
def test_conditions(conditions, matching, other):
    policy = load({"extends": "none", "rules": [{**conditions, "fp8": "off"}]})
    assert fp8(policy, **matching) == "off"
    assert fp8(policy, **other) == "auto"


def test_the_first_rule_that_matches_decides():
    rules = [
        {"name": "gradients", "gemm": ["dgrad", "wgrad"], "module": "*.up_proj", "fp8": False},
        {"module": "*.mlp.*", "fp8": True, "recipe": "tensorwise"},
        {"where": "n > 0"},
    ]
    policy = load({"rules": rules})
    assert policy.choose(site(gemm="dgrad")) == Choice("off", Recipe(), 0, "gradients")
    assert policy.choose(site()) == Choice("on", Recipe("tensorwise"), 1, "rule 2")
    head = site("lm_head", kind="output head: by its name")
    assert policy.choose(head) == Choice("auto", Recipe(), 2, "rule 3")  # before those of the default policy
    assert policy.own == 3 and len(policy.rules) == 3 + len(load("default").rules)
    default = load({"extends": "none", "defaults": {"margin": 3}})
    assert default.choose(site()) == Choice("auto", Recipe(margin=3), None, "")


# -- recipes --


def test_a_setting_is_looked_up_in_the_rule_the_recipe_the_options_the_defaults():
    defaults = {"margin": 1, "interval": 2, "fp8_format": "E4M3", "amax_history_len": 7}
    data = {
        "extends": "none",
        "defaults": {"recipe": "tensorwise", **defaults},
        "recipes": {
            "outer": {"base": "inner", "margin": 3, "interval": 5},
            "inner": {"base": "delayed", "margin": 4, "amax_compute_algo": "most_recent"},
        },
        "rules": [
            {"module": "a", "recipe": "outer", "interval": 6},
            {"module": "b", "margin": 8},
            {"module": "c", "recipe": "delayed"},
        ],
    }
    policy = load(data)
    assert policy.choose(site("a")).recipe == Recipe("delayed", "e4m3", 3, 7, "most_recent", 6)
    assert policy.choose(site("b")).recipe == Recipe("tensorwise", "e4m3", 8, 7, "max", 2)
    assert policy.choose(site("c")).recipe == Recipe("delayed", "e4m3", 1, 7, "max", 2)
    assert policy.choose(site("d")).recipe == policy.recipe == Recipe("tensorwise", "e4m3", 1, 7, "max", 2)
    assert set(policy.possible) == {policy.choose(site(name)).recipe for name in "abcd"}

    beside = policy.with_defaults(margin=0, interval=9, recipe="delayed", amax_history_len=1)
    assert beside.choose(site("a")).recipe == Recipe("delayed", "e4m3", 3, 1, "most_recent", 6)
    assert beside.choose(site("b")).recipe == Recipe("delayed", "e4m3", 8, 1, "max", 9)
    assert beside.recipe == Recipe("delayed", "e4m3", 0, 1, "max", 9)
    assert beside.key != policy.key and policy.with_defaults() == policy
    assert policy.with_defaults(recipe="outer").recipe == Recipe("delayed", "e4m3", 3, 7, "most_recent", 5)


def test_every_field_of_a_recipe_is_a_key():
    assert {"name", *GIVEN} == {field.name for field in dataclasses.fields(Recipe)}
    for name, value in GIVEN.items():
        expected = dataclasses.replace(Recipe(), **{name: value})
        assert load({"defaults": {name: value}}).recipe == expected
        assert load({"rules": [{"module": UP, name: value}]}).choose(site()).recipe == expected
        named = {"recipes": {"mine": {name: value}}, "rules": [{"module": UP, "recipe": "mine"}]}
        assert load(named).choose(site()).recipe == expected


@pytest.mark.feature("delayed")
def test_extending():
    mine = {"defaults": {"amax_history_len": 4}, "rules": [{"module": "a", "name": "mine"}]}
    policy = load({"extends": "conservative", **mine})
    assert policy.recipe == Recipe(margin=(1, 1, 11), amax_history_len=4)
    assert policy.labels[:2] == ("mine", "first and last block") and policy.own == 1
    assert policy.labels[-1] == load("default").labels[-1]
    assert load("conservative").own == 0  # rules of a shipped policy are not the user's own


def test_extending_files(write, tmp_path):
    rule = '[[rules]]\nmodule = "b"\nfp8 = "off"\nrecipe = "x"\n'
    write(f"{rule}[recipes.x]\nmargin = 1\n[schedule]\nwarmup_steps = 3\n", "base.toml")
    (tmp_path / "sub").mkdir()
    text = 'extends = "../base.toml"\neval = "fp8"\n[[rules]]\nmodule = "a"\nrecipe = "x"\n'
    mine = write(text, "sub/mine.toml")
    policy = load(mine)
    assert policy.labels[:2] == ("rule 1", f"rule 1 of {tmp_path / 'sub' / '../base.toml'}")
    assert policy.own == 1 and policy.schedule == Schedule(warmup_steps=3) and policy.eval == "fp8"
    assert {policy.choose(site(name)).recipe for name in "ab"} == {Recipe(margin=1)}
    # the nearer of two recipes wins; the file is read again
    mine.write_text(mine.read_text() + "[recipes.x]\nmargin = 2\n")
    assert load(mine).choose(site("b")).recipe == Recipe(margin=2)


def test_plain_keys(write):
    path = write('device = "h100"\neval = "fp8"\n[schedule]\nwarmup_steps = 10\ncooldown_at = 90\n')
    policy = load(path)
    assert policy.device == "h100" and policy.eval == "fp8"
    assert policy.schedule == Schedule(warmup_steps=10, cooldown_at=90)
    assert policy.source == str(path) and str(path) not in policy.key
    changed = dataclasses.replace(policy, eval="high_precision", device=None)
    assert changed.eval == "high_precision" and changed.labels == policy.labels and changed != policy
    with pytest.raises(OptionError, match="'eval' must be"):
        dataclasses.replace(policy, eval="fp16")
    assert load({}).schedule is None and load({}).eval == "high_precision"
    assert load({"schedule": {}}).schedule == Schedule()


def test_equal_hashed_and_picklable_by_what_they_decide():
    data = {"recipes": {"a": {"margin": 1}}, "rules": [{"module": "x", "where": "n<3", "recipe": "a"}]}
    one, other = load(data), load(json.loads(json.dumps(data)))
    assert one == other and hash(one) == hash(other) and one.key == other.key
    assert pickle.loads(pickle.dumps(one)) == one and {one: 1}[other] == 1
    assert one.key != load({**data, "device": "h100"}).key


def test_in_python():
    rules = (Rule(module="*.mlp.*", fp8=False), Rule(where="n < 3", recipe="mine"))
    policy = Policy(rules=rules, recipes={"mine": NamedRecipe(margin=2)})
    assert fp8(policy) == "off" and policy.choose(site("a", n=2)).recipe.margin == 2
    assert load(policy) is policy and "margin=2" in repr(policy)
    assert copy.deepcopy(policy) == policy == dataclasses.replace(policy)
    one = Policy((Rule(module="a"),))
    assert Policy(rules=[{"module": "a"}]) == Policy(rules=(Rule(module=["a"]),)) == one
    tables = {"rules": [{"module": "a"}], "schedule": {}}
    assert load({"rules": [Rule(module="a")], "schedule": Schedule()}) == load(tables)
    for wrong in (lambda: Rule("a"), lambda: Policy((), rules=())):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.rules[0].fp8 = "on"


WRONG = {"fp8": 1, "self": 2}


@pytest.mark.parametrize(
    "made, key, says",
    [
        (lambda: Policy((Rule(recipe="delayd"),)), "recipe", "rule 1: .* must be .*Did you mean 'delayed'"),
        (lambda: Policy(rules=Rule(module="a")), "rules", "'rules' must be a list of tables"),
        (lambda: Rule(margin="3"), "margin", "'margin' must be .*; got '3'"),
        (
            lambda: Rule(fp8=1, modul="a"),
            "fp8",
            "2 errors:\n  'fp8' must be .*\n  unknown key 'modul'.*'module'",
        ),
        (lambda: Policy([{}, WRONG]), "fp8", "rule 2: 'fp8' .*\n  rule 2: unknown key 'self'"),
        (lambda: Policy().with_defaults(margn=1), "margn", "'margn'.*Did you mean 'margin'"),
    ],
)
def test_errors_in_python(made, key, says):
    with pytest.raises(OptionError, match=says) as caught:
        made()
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.key == caught.value.key == key
    assert again.value == caught.value.value and again.value is not None


# -- sources --


def test_sources(write, monkeypatch, tmp_path):
    path = write("[[rules]]\nmodule = 'a'\n")
    monkeypatch.delenv("FP8COMPILE_POLICY", raising=False)
    assert load() == load("default") == load(None) and load().source == "default"
    assert load(path) == load(str(path)) == load({"rules": [{"module": "a"}]})
    monkeypatch.chdir(tmp_path)
    assert load("mine.toml") == load("./mine.toml") == load(path)
    monkeypatch.setenv("FP8COMPILE_POLICY", str(path))
    assert load() == load(path) and load("default") != load()
    monkeypatch.setenv("FP8COMPILE_POLICY", "llama")
    assert load() == load("llama")
    monkeypatch.setenv("FP8COMPILE_POLICY", "lama")
    assert "FP8COMPILE_POLICY" in refusal(None) and "Did you mean 'llama'" in refusal(None)
    monkeypatch.setenv("FP8COMPILE_POLICY", str(tmp_path / "gone.toml"))
    assert "FP8COMPILE_POLICY" in refusal(None) and "does not exist" in refusal(None)
    monkeypatch.setenv("FP8COMPILE_POLICY", "")
    assert load().source == "default"


def test_unusable_files(write, tmp_path):
    path = write("[[rules]]\nmodule = 'a'\n")
    path.unlink()
    assert f"{str(path)!r} cannot be read: it does not exist" in refusal(path)
    assert "'llama', without .toml" in refusal("llama.toml")
    (tmp_path / "folder.toml").mkdir()
    assert "Is a directory" in refusal(tmp_path / "folder.toml")
    assert "not UTF-8 (byte 0xe9 in line 2)" in refusal(write(b"# a\n# caf\xe9\n"))
    assert "cannot be read" in refusal("a\0.toml") and "cannot be read" in refusal("x" * 5000 + ".toml")
    assert "a path, a dict" in refusal(b"x.toml") and "a path, a dict" in refusal(3)
    assert "Did you mean 'conservative'" in refusal("conservativ")
    # a byte order mark, Windows' line ends
    assert load(write(b"\xef\xbb\xbf[[rules]]\r\nmodule = 'a'\r\n")).own == 1
    assert load(write("")).own == 0


def test_circles(write):
    a = write('extends = "./b.toml"\n', "a.toml")
    write('extends = "./a.toml"\n', "b.toml")
    assert "extend each other in a circle" in refusal(a) and "b.toml" in refusal(a)
    assert "in a circle" in refusal(write('extends = "self.toml"', "self.toml"))
    message = refusal(write('extends = "lama"\n'))
    assert "line 1: 'extends' must be 'none', or one of" in message and "Did you mean 'llama'" in message
    assert "nowhere.toml' cannot be read" in refusal(write('\nextends = "nowhere.toml"\n'))
    broken = write("[[rules]]\nrole = 3\n", "broken.toml")
    message = refusal(write('extends = "broken.toml"'))
    assert message.startswith(f"policy {broken}, line 2, rule 1: unknown key 'role'")


# -- schema, shipped policies, fuzzing --


def test_schema():
    made = schema()
    json.dumps(made)
    tables = {"Rule": Rule, "NamedRecipe": NamedRecipe, "Defaults": Defaults, "Schedule": Schedule}
    for name, table in tables.items():
        described = made["$defs"][name]
        assert set(described["properties"]) == {field.name for field in dataclasses.fields(table)}
        assert described["additionalProperties"] is False
        assert "\n" not in described["description"].replace("\n\n", "")  # editors wrap it themselves
        assert all(part.get("description") for part in described["properties"].values())
    assert set(made["properties"]) == {field.name for field in dataclasses.fields(PolicyFile)}
    assert set(SETTINGS) < set(made["$defs"]["Rule"]["properties"])
    assert '"null"' not in json.dumps(made)


def test_shipped_policies_are_a_start_for_ones_own(write):
    for name in BUILTIN:
        policy, copy = load(name), load(write(shipped(name)))
        assert policy == copy and policy.key == copy.key and policy.labels == copy.labels
        assert all(rule.name for rule in policy.rules) and shipped(name).startswith("# ")
    folder = resources.files("fp8compile.config") / "policies"
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.toml" for name in BUILTIN)


def test_fuzzed():
    from tests.support.fuzz_policies import run

    outcomes = run(300, seed=1, limit_s=10)
    assert outcomes["loaded"] > 15 and len(outcomes) > 40
