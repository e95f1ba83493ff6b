"""Names of modules and parameters, from Dynamo's expressions for them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.frontend.inputs import readable, readable_module
from tests.support import hooks
from tests.support.harness import noise


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']._modules['up']._parameters['weight']", "up.weight"),
        ("L['f'].__closure__[0].cell_contents._modules['up']._buffers['b']", "up.b"),
        ("L['ws'][0]", "ws.0"),
        ("L['weights']['net.0.weight']", "net.0.weight"),
        ("L['trainer'].ws['a'][1]", "trainer.ws.a.1"),
        ("something(L['x'])", "something(L['x'])"),
    ],
)
def test_a_parameter(source: str, name: str) -> None:
    assert readable(source) == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self']", ""),
        ("L['self'].layers.0", "layers.0"),
        ("L['self'].__dict__['_modules']['up']", "up"),
        ("L['fn'].func.__self__.layers.0", "layers.0"),
        ("L['f'].__defaults__[0].layers.0", "layers.0"),
        ("L['f'].__kwdefaults__['model'].layers.0", "layers.0"),
        # a host has put a function instead of `forward`
        ("L['self'].attention.forward.__closure__[0].cell_contents.__self__.qkv.w", "attention.qkv.w"),
        ("L['self'].mlp.forward.func.__self__.up", "mlp.up"),
        ("L['self'].forward.__func__.__wrapped__.__self__.up", "up"),
        ("L['args'][0].layers.0", "layers.0"),  # a decorated forward
        ("L['args'][1].net", "1.net"),
        ("getattr(getattr(G['m'].blocks, '0').net, '2')", "blocks.0.net.2"),
        ("G['models']['teacher'].net.0", "teacher.net.0"),
        ("G['layers'][3]", "3"),
        ("L['self'].parts['a-b'].net.0", "parts.a-b.net.0"),
        ("L['self']._orig_mod.layers.0._checkpoint_wrapped_module.fc", "layers.0.fc"),
    ],
)
def test_a_module(path: str, name: str) -> None:
    assert readable_module(path) == name


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def high_precision(model: nn.Module, *modules: str) -> set[str]:
    """Trains a step with rules for these modules, and returns the names of those that were not in FP8."""
    rules = [{"module": module, "fp8": "off"} for module in modules]
    with hooks.traced():
        run = torch.compile(model, backend="fp8", options={"policy": {"rules": rules}, "strict": True})
        run(noise(16, 128)).sum().backward()
    return {record.fqn for record in fp8compile.report(model).matmuls if record.decision == "high_precision"}


def _decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapper


def test_a_replaced_forward_is_no_part_of_a_name() -> None:
    """A policy names modules as `named_modules` does, whatever a host has put instead of their `forward`."""
    model = nn.Sequential(Net(), Net(), Net())
    first, second, third = model[0], model[1].net, model[2]
    original = first.forward
    first.forward = lambda x: original(x)  # torchtitan
    second.forward = types.MethodType(_decorated(type(second).forward), second)  # Accelerate
    third.forward = functools.partial(third.forward)
    assert high_precision(model, "0.net.0", "1.net.2", "2.net.2") == {"0.net.0", "1.net.2", "2.net.2"}


def test_a_decorated_forward_is_no_part_of_a_name() -> None:
    """As in transformers, where a report had "0.model.layers", which no rule for "model.layers.*" met."""

    class Decorated(Net):
        forward = _decorated(Net.forward)

    assert high_precision(Decorated(), "net.0") == {"net.0"}


MODEL = Net()
BY_NAME, IN_A_LIST, SPACE = {"student": MODEL}, [MODEL], types.SimpleNamespace(model=MODEL)


def _default(x: torch.Tensor, model: nn.Module = MODEL) -> torch.Tensor:
    return model(x)


CALLS: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "part of a global": ("net", lambda x: MODEL.net(x)),
    "dict": ("student.net", lambda x: BY_NAME["student"](x)),
    "list": ("0.net", lambda x: IN_A_LIST[0](x)),
    "attribute": ("model.net", lambda x: SPACE.model(x)),
    "default": ("net", lambda x: _default(x)),
    "functional_call": (
        "net",
        lambda x: torch.func.functional_call(MODEL, dict(MODEL.named_parameters()), (x,)),
    ),
    "partial": ("net", functools.partial(MODEL.forward)),
}


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("how", CALLS)
def test_rows_of_a_report(how: str) -> None:
    name, call = CALLS[how]
    with hooks.traced():
        torch.compile(call, backend="fp8")(noise(16, 128)).sum().backward()
    matmuls = fp8compile.report(MODEL).matmuls
    assert {record.fqn for record in matmuls} == {f"{name}.0", f"{name}.2"}
    assert {record.parameter for record in matmuls} == {"net.0.weight", "net.2.weight"}
