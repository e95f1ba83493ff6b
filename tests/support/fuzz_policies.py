"""Mutated policies: each one loads or is refused with a readable OptionError, in bounded time. Nothing else
may happen.

Two kinds take turns: changed values in the tables of shipped and sample files, and random `where` texts.
"""

from __future__ import annotations

import copy
import datetime
import random
import time
import warnings
from collections import Counter
from importlib import resources

from fp8compile.config.policy import BUILTIN, load, unmatched
from fp8compile.devices.toml import tomllib
from fp8compile.errors import OptionError
from tests.support.policies import site

SAMPLE = """\
extends = "llama"
device = "h100"
eval = "fp8"

[defaults]
recipe = "careful"
fp8_format = "e4m3"

[recipes.careful]
base = "wide"
margin = 2
override_linear_precision = [false, true, false]

[recipes.wide]
base = "delayed"
amax_history_len = 64
use_fast_accum = [true, false, false]

[schedule]
warmup_steps = 100
cooldown_at = 9000
total_steps = 9900

[[rules]]
name = "second"
module = ["*.mlp.*", 're:layers\\.(1|2)\\..*', "layers.[0-3].attn.?_proj"]
gemm = ["dgrad", "wgrad"]
where = \"\"\"
max(n, k) / min(n, k) >= 4
and not m * n * k < 2**30 or m % 16 == 0
\"\"\"
fp8 = true
during = ["..2%", "4000..45.5%"]

[[rules]]
parameter = "*.weight"
module_class = ["Linear", "*MLP"]
op = "addmm"
blocks = ["first 2", "last 1"]
layers = "first 1"
kind = "output head"
recipe = "tensorwise"
during = "by hand"
name = "last"
"""

SITES = [site(m=0), site(gemm="dgrad", kind="output head: by its name"), site(gemm="wgrad", m=17)]

ODD = [
    "by hand", "1..", "..1%", "7..7", "9..8", "50%..9900", "101%..", "..", ["..3", "90%.."], 10**13,
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 10**5000, 0.5, float("nan"), float("inf"), "", " ",
    "x", "on", "3", "\ud800", "a" * 600, "a\0b", "re:(", "re:" + "(" * 300, "re:(?i)x", "re:[[a]", "a..b",
    "[", "[z-a]", "*", "first 0", "first 999999999", "last 2", "fprop", "none", "default", "nowhere",
    "./nowhere.toml", "/", "/dev/zero/x.toml", "~nobody/x", "\0.toml", "tensorwise", "delayed", "careful", [],
    [[]], [True] * 3, [True] * 4, ["x", 3], {}, {"x": 1}, {1: 2}, (1, 2), [["x"] * 3] * 3, b"x", {1, 2},
    object(), datetime.date(2020, 1, 1), 1j,
]  # fmt: skip
WORDS = """
n m k n m k 128 0 0.5 1e30 2**64 + - * / // % ** < <= > >= == != and or not ( ) ( ) min( max( , ; ~ &
lambda: n.x [0]
""".split()


def seeds() -> list[str]:
    folder = resources.files("fp8compile.config") / "policies"
    return [SAMPLE, *((folder / f"{name}.toml").read_text("utf-8") for name in BUILTIN)]


def mutated_tables(text: str, rng: random.Random) -> object:
    """The tables of `text` with values exchanged, keys renamed, and parts repeated, wrapped or removed."""
    data = tomllib.loads(text)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not (places := list(_places(data))):
            return data
        (table, key), (other, name) = rng.choice(places), rng.choice(places)
        if isinstance(table, dict) and rng.random() < 0.15:
            table[str(key) + rng.choice("s_x ")] = table[key]
            key = str(key)
        if rng.random() < 0.15:
            del table[key]
            continue
        table[key] = rng.choice((
            copy.deepcopy(rng.choice(ODD[:-5])),
            rng.choice(ODD),
            copy.deepcopy(other[name]),
            [table[key]] * rng.choice((1, 3, 1200)),
            {"x": table[key]},
            {"x": table[key], "y": data},
            where(rng),
        ))  # fmt: skip
    return data


def _places(data: object, depth: int = 0):
    if depth > 6:
        return
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in list(items):
        yield data, key
        yield from _places(value, depth + 1)


def where(rng: random.Random) -> str:
    """A random `where` text: mostly nonsense, made of the language's own words."""
    return " ".join(rng.choices(WORDS, k=rng.choice((1, 3, 3, 5, 9, 40))))


def check(source: object) -> str:
    """Loads `source` and uses the policy; -> "loaded", or the first words of the refusal. Other exceptions
    are findings."""
    try:
        policy = load(source)
    except OptionError as error:
        message = str(error)
        assert message and len(message) < 10_000, message[:300]
        return " ".join(message.split(":")[-1].split()[:3])
    assert all(policy.choose(each).recipe in policy.possible for each in SITES)
    assert load(policy).key == policy.key and hash(load(policy)) == hash(policy)
    try:
        sets = policy.sets
    except OptionError as error:  # a share of a number of steps that is not given
        assert "total_steps" in str(error)
        return "no total_steps"
    assert all(policy.active(step) in sets for step in (0, 50, 250, 4200, 9500))
    names = {"layers": "ModuleList", "layers.0.mlp": "MLP"}
    for whole in (True, False):
        assert all(isinstance(message, str) for message in unmatched(policy, SITES, names, [], whole))
    return "loaded"


def run(count: int, seed: int = 0, limit_s: float = 2.0) -> Counter[str]:
    """Checks `count` mutants, each within limit_s. Returns the number of each outcome."""
    rng, texts, outcomes = random.Random(seed), seeds(), Counter[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(count):
            text = rng.choice(texts) if i % 2 else SAMPLE
            source = mutated_tables(text, rng) if i % 3 else {"rules": [{"where": where(rng)}]}
            start = time.perf_counter()
            try:
                outcomes[check(source)] += 1
            except Exception as error:
                raise AssertionError(f"mutant {i} of seed {seed}: {error!r}\n{source!r:.2000}") from error
            took = time.perf_counter() - start
            assert took < limit_s, f"mutant {i} of seed {seed} took {took:.1f} s\n{source!r:.2000}"
    return outcomes
