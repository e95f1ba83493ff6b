"""Messages about policies that are invalid or have no effect: they name place, key, value and fix."""

from __future__ import annotations

import pytest

from fp8compile.config import policy
from fp8compile.config.policy import load
from tests.support.policies import fp8, refusal, site

# -- errors --

LINES = """\
extends = "default"

[defaults]
margin = 1

[recipes.mine]
base = "delayed"

# a comment
[[rules]]
name = "first"
module = "a"

[[rules]]   # another
module = "b"
where = '''
n < 3
or k < 3
'''
margin = 2
"""


@pytest.mark.parametrize(
    "was, becomes, says",
    [
        (
            "margin = 1",
            "margin = true",
            "line 4, [defaults]: 'margin' must be an integer >= 0; got True (bool)",
        ),
        ("margin = 1", "recipe = 'min'", "line 4, [defaults]: 'recipe' must be one of 'delayed', "),
        (
            'base = "delayed"',
            'base = "mine"',
            "line 7, [recipes.mine]: recipes go in a circle: 'mine' -> 'mine'",
        ),
        ('base = "delayed"', 'recipe = "delayed"', "line 7, [recipes.mine]: unknown key 'recipe'"),
        (
            "recipes.mine",
            "recipes.delayed",
            "line 6, [recipes.delayed]: a recipe called 'delayed' is built in",
        ),
        (
            'module = "a"',
            'role = "x"',
            "line 12, rule 1 ('first'): unknown key 'role' (value 'x' (str)). Did you mean 'gemm'?",
        ),
        (
            'module = "b"',
            "module = 3",
            "line 15, rule 2: 'module' must be a glob, or a list of globs; got 3 (int)",
        ),
        (
            'module = "b"',
            "gemm = 'fpro'",
            "line 15, rule 2: 'gemm' must be one of 'fprop', 'dgrad', 'wgrad'; got 'fpro'",
        ),
        (
            'module = "b"',
            "fp8 = 'of'",
            "'fp8' must be one of 'on', 'off', 'auto'; got 'of' (str). Did you mean 'off'",
        ),
        ('module = "b"', "kind = 'head'", "'kind' must be one of 'output head', 'router gate'"),
        ('module = "b"', "blocks = 'First'", "line 15, rule 2: 'blocks' must be 'first N' or 'last N'"),
        ('module = "b"', "layers = 'last1'", "Did you mean 'last 1'"),
        ('module = "b"', "recipe = 'tensorwize'", "line 15, rule 2: 'recipe' must be one of"),
        (
            "or k < 3",
            "or K < 3",
            "line 16, rule 2: 'where': 'n < 3 or K < 3' names 'K', which is none of the sizes m, n and k",
        ),
        (
            "margin = 2",
            "margin = 99999999999999999999999",
            "line 20, rule 2: 'margin' must be an integer <= 64; got 9999",
        ),
        (
            'extends = "default"',
            "extend = 'none'",
            "line 1: unknown key 'extend' (value 'none' (str)). Did you mean 'extends'",
        ),
        (
            'extends = "default"',
            "margin = 3",
            "line 1: unknown key 'margin' (value 3 (int)). 'margin' goes into [defaults]",
        ),
        (
            "margin = 2",
            "eval = 'fp8'",
            "line 20, rule 2: unknown key 'eval' (value 'fp8' (str)). 'eval' goes to the top of",
        ),
        (
            "margin = 1",
            "fp8 = true",
            "line 4, [defaults]: unknown key 'fp8' (value True (bool)). 'fp8' goes into [[rules]].",
        ),
        (
            "[defaults]",
            "[default]",
            "line 3: unknown key 'default' (value {'margin': 1} (dict)). Did you mean 'defaults'",
        ),
        (
            "[defaults]",
            "[schedule]\nwarmup_steps = 5\ncooldown_at = 5\n[defaults]",
            "line 5, [schedule]: 'cooldown_at' must be greater",
        ),
        ("margin = 1", "margin = ", "not valid TOML: Invalid value (at line 4, column 10)"),
    ],
)
def test_errors_name_the_place(write, was, becomes, says):
    assert load(write(LINES)).own == 2 and LINES.count(was) == 1
    path = write(LINES.replace(was, becomes))
    message = refusal(path)
    assert says in message and message.startswith(f"policy {path}") and len(message) < 1200


def test_several_errors_are_all_shown(write):
    text = LINES.replace("margin = 1", "margin = -1").replace('"a"', '"a..b"').replace("margin = 2", "x = 2")
    first, *lines = refusal(write(text)).splitlines()
    assert first.endswith("3 errors:")
    assert [line.split(",")[0] for line in lines] == ["  line 4", "  line 12", "  line 20"]
    assert "and 7 more" in refusal({"rules": [{"x": 1}] * 12})


@pytest.mark.parametrize(
    "glob, says",
    [
        ("a..b", "between two dots is empty"),
        ("layers.", "no name ends with a dot. Did you mean 'layers.*'"),
        (".mlp", "no name begins with a dot. Did you mean '*.mlp'"),
        ("layers/0/mlp", "Did you mean 'layers.0.mlp'"),
        ("layers 0", "names have no ' '"),
        ("layers.[0", "a bracket has no partner"),
        ("layers.[9-0].x", "the wrong way round"),
        ("layers.(0|1)", "names have no '('. 're:' begins a regular expression"),
        (r"layers\.0", "names have no '\\\\'"),
        ("", "it is empty"),
        ("re:(", "is not a regular expression: missing ), unterminated subpattern at position 0"),
    ],
)
def test_globs_that_can_never_match(glob, says):
    for key in ("module", "parameter"):
        assert says in refusal({"rules": [{key: ["fine", glob]}]})


def test_globs_that_can():
    for glob in "* a a.* **.mlp layers.[!0-3].x-y []a] a.? re: re:.*(a|b)$ größe.*".split():
        assert load({"rules": [{"module": glob}]}).own == 1
    message = refusal({"rules": [{"module_class": "torch.nn.Linear"}]})
    assert "class names have no dots. Did you mean 'Linear'" in message


def test_rules_that_are_never_reached():
    everything = {"name": "all", "fp8": "on"}
    message = refusal({"rules": [{"module": "a"}, everything, {"module": "b", "name": "late"}]})
    assert "rule 3 ('late'): this rule is never reached: all, before it, has no conditions" in message
    same = [{"module": "a", "fp8": "on"}, {"where": "n<3"}, {"module": ["a"], "fp8": "off"}]
    message = refusal({"rules": same})
    assert "rule 3: this rule is never reached: rule 1, before it, has the same conditions" in message
    # it may hide the extended rules
    assert fp8(load({"rules": [everything]}), "lm_head", kind="output head") == "on"


# -- rules that match nothing --

PARTS = ("", ".mlp", ".mlp.up_proj", ".mlp.down_proj")
LAYERS = [f"model.layers.{i}{part}" for i in range(4) for part in PARTS]
MODULES = dict.fromkeys(["", "model", "model.layers", *LAYERS, "lm_head"], "Module")
SITES = [
    site(f"model.layers.{i}.mlp.{name}", gemm=gemm, block=(i, 4))
    for i in range(4)
    for name in ("up_proj", "down_proj")
    for gemm in ("fprop", "dgrad", "wgrad")
]
PARAMETERS = [f"{one.module}.weight" for one in SITES] + ["lm_head.weight"]


def unmatched(rule: dict, whole: bool = True, before=(), modules=MODULES) -> list[str]:
    rules = [*before, {**rule, "fp8": "off"}]
    return policy.unmatched(load({"rules": rules}), SITES, modules, PARAMETERS, whole)


def test_rules_that_match_something_are_not_mentioned():
    assert unmatched({"module": "*.up_proj", "gemm": "wgrad", "blocks": "last 1"}) == []
    # not the user's own
    assert policy.unmatched(load("conservative"), SITES, MODULES, PARAMETERS, True) == []


@pytest.mark.parametrize(
    "rule, says",
    [
        (
            {"module": "model.layers.*.mlp.down"},
            "no module of the model has a name like 'model.layers.*.mlp.down'. Near: ",
        ),
        ({"module": "*.mlp.downproj"}, "Near: '*.mlp.down_proj'"),
        ({"module": "model.layer.0.mlp.up_proj"}, "Near: 'model.layers.*.mlp.up_proj'"),
        (
            {"parameter": "*.up_proj.weigth"},
            "no parameter of the model has a name like '*.up_proj.weigth'. Near: ",
        ),
        ({"module_class": "LlamaMlp"}, "no class of the model has a name like 'LlamaMlp'. Near: 'LlamaMLP'"),
    ],
)
def test_names_that_do_not_exist(rule, says):
    (message,) = unmatched(rule)
    assert says in message and "rule 1 of policy given as a dict matches no matmul" in message
    if "module_class" not in rule:  # a graph of a part of the model may not contain all classes
        assert unmatched(rule, whole=False) == [message]


def test_conditions_that_hold_nowhere():
    (message,) = unmatched({"name": "odd", "module": "*.up_proj", "where": "n < 9"})
    assert "rule 1 ('odd')" in message
    assert "where = 'n < 9' holds for none of the 12 gemms that its other conditions leave" in message
    (message,) = unmatched({"module": "model.layers.2.mlp"})
    assert "write 'model.layers.2.mlp.*'" in message
    assert "holds for none of the 24 gemms" in unmatched({"kind": "output head"})[0]
    elsewhere = {"module": "lm_head"}, {"parameter": "lm_head.weight"}, {"kind": "output head"}
    for rule in (*elsewhere, {"module": "*.up_proj", "where": "n < 9"}):
        assert unmatched(rule) and unmatched(rule, whole=False) == []  # another graph may contain a match


def test_rules_that_others_leave_nothing():
    before = [{"module": "*.up_proj"}, {"gemm": ["fprop", "dgrad"]}, {"module": "*.down_proj"}]
    (message,) = unmatched({"module": "*.mlp.*"}, before=before)
    assert "rule 4 of policy given as a dict" in message
    assert "only what rules 1, 2, 3 decide about before it" in message
    assert unmatched({"module": "*.mlp.*"}, before=before, whole=False) == []


def test_classes_of_the_whole_model():
    classes = {name: "ModuleList" for name in MODULES}
    (message,) = unmatched({"module_class": "LlamaMpl"}, whole=False, modules=classes)
    assert "Near: 'LlamaMLP'" in message
    assert unmatched({"module_class": "ModuleList"}, whole=False, modules=classes) == []
    rules = load({"rules": [{"module": "a"}, {"where": "n<0"}]})
    assert policy.unmatched(rules, [], {}, [], whole=True) == []
