"""The text of a policy, as a guard writes it, gives the policy again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fp8compile.config.policy import Policy
from fp8compile.config.policy.policy_files import to_toml

WHOLE = {
    "rules": [
        {
            "name": 'quoted "x" \\ é',
            "module": ["a.*", "re:b[0-9]+"],
            "gemm": "fprop",
            "during": ["..5", "90%.."],
        },
        {"where": "n < 128", "fp8": "off"},
        {
            "kind": "output head",
            "recipe": "mine",
            "margin": [0, 1, 0],
            "current_scaling": [True, False, False],
        },
        {"name": "x", "during": "by hand", "fp8": "auto"},
    ],
    "recipes": {"mine": {"base": "delayed", "amax_history_len": 4}, "a name": {"base": "mine"}},
    "defaults": {"recipe": "a name", "reduce_amax": False},
    "schedule": {"warmup_steps": 3, "cooldown_at": 80, "total_steps": 100},
    "guard": {"every": 60, "ladder": ["mine", "high_precision"]},
    "eval": "fp8",
    "save": "fp8",
    "device": "h100",
}
SHIPPED = [
    "default",
    "conservative",
    "fast",
    "gpt2",
    "llama",
    "moe",
    "vit",
    "accelerate-defaults",
    "vllm",
    "none",
]


@pytest.mark.parametrize("source", [WHOLE, *SHIPPED], ids=["everything", *SHIPPED])
def test_the_text_gives_the_policy_again(source: object, tmp_path: Path) -> None:
    policy = Policy.load(source if source != "none" else {"extends": "none"})
    path = tmp_path / "policy.toml"
    path.write_text(to_toml(policy), encoding="utf-8")
    again = Policy.load(path)
    if source is WHOLE:  # its rule about output heads hides that of the policy that it extends
        hidden = next(rule for rule in policy.rules[4:] if rule.kind == ("output head",))
        assert hidden not in again.rules
        policy = dataclasses.replace(
            policy, rules=tuple(x for x in policy.rules if x is not hidden), labels=()
        )
    assert again == policy and again.key == policy.key and again.guard == policy.guard
    assert again.sets == policy.sets
