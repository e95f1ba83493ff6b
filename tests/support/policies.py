"""One matmul of a Llama layer to ask policies about, and the message with which a policy is refused."""

from __future__ import annotations

import pytest

from fp8compile.config.policy import Policy, Site, load
from fp8compile.errors import OptionError

UP = "model.layers.1.mlp.up_proj"


def site(module: str = UP, **changes) -> Site:
    given = dict(
        module=module,
        parameter=f"{module}.weight",
        classes=("Linear", "LlamaMLP", "LlamaDecoderLayer", "LlamaForCausalLM"),
        op="mm",
        gemm="fprop",
        m=8192,
        n=14336,
        k=4096,
        block=(1, 4),
        layer=(5, 29),
        kind="",
    )
    return Site(**{**given, **changes})


def fp8(policy: Policy, *args, **changes) -> str:
    return policy.choose(site(*args, **changes)).fp8


def refusal(source) -> str:
    with pytest.raises(ValueError) as caught:
        load(source)
    assert isinstance(caught.value, OptionError)
    return str(caught.value)
