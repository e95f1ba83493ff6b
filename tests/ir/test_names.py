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
from fp8compile.ir.inputs import readable, readable_module
from tests.support import hooks
from tests.support.harness import noise


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']._modules['up']._parameters['weight']", "up.weight"),
        ("G['m']._modules['net']._modules['0']._parameters['weight']", "net.0.weight"),
        ("L['f'].__closure__[0].cell_contents._modules['up']._buffers['b']", "up.b"),
        ("L['w']", "w"),
        ("L['ws'][0]", "ws.0"),
        ("G['ws']['first']", "ws.first"),
        ("L['weights']['net.0.weight']", "net.0.weight"),
        ("L['self'].w", "w"),
        ("L['trainer'].ws['a'][1]", "trainer.ws.a.1"),
        ("something(L['x'])", "something(L['x'])"),
        ("", ""),
    ],
)
def test_a_parameter(source: str, name: str) -> None:
    assert readable(source) == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self']", ""),
        ("L['self'].layers.0", "layers.0"),
        ("L['self']._modules['up']", "up"),
        ("L['self'].__dict__['_modules']['up']", "up"),
        ("L['fn'].__self__.layers.0", "layers.0"),
        ("L['fn'].func.__self__.layers.0", "layers.0"),
        ("L['f'].__defaults__[0].layers.0", "layers.0"),
        ("L['f'].__kwdefaults__['model'].layers.0", "layers.0"),
        ("L['f'].__closure__[0].cell_contents.net.0", "net.0"),
        # a host has put a function instead of `forward`
        ("L['self'].attention.forward.__closure__[0].cell_contents.__self__.qkv.w", "attention.qkv.w"),
        ("L['self'].mlp.forward.func.__self__.up", "mlp.up"),
        ("L['self'].forward.__func__.__wrapped__.__self__.up", "up"),
        ("L['args'][0].layers.0", "layers.0"),  # a decorated forward
        ("L['args'][0]", ""),
        ("L['args'][1].net", "1.net"),
        ("getattr(G['m'].net, '0')", "net.0"),
        ("getattr(getattr(G['m'].blocks, '0').net, '2')", "blocks.0.net.2"),
        ("G['models']['teacher'].net.0", "teacher.net.0"),
        ("G['layers'][3]", "3"),
        ("L['self'].parts['a-b'].net.0", "parts.a-b.net.0"),
        ("L['self']._orig_mod.layers.0._checkpoint_wrapped_module.fc", "layers.0.fc"),
    ],
)
def test_a_module(path: str, name: str) -> None:
    assert readable_module(path) == name


def _as_a_closure(module: nn.Module) -> None:
    original = module.forward
    module.forward = lambda x: original(x)  # torchtitan


def _as_a_partial(module: nn.Module) -> None:
    module.forward = functools.partial(module.forward)


def _as_a_method(module: nn.Module) -> None:
    original = type(module).forward

    @functools.wraps(original)
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return original(self, x)

    module.forward = types.MethodType(forward, module)  # Accelerate


@pytest.fixture
def traced():
    with hooks.traced():
        yield


@pytest.mark.parametrize("replace", [_as_a_closure, pytest.param(_as_a_partial, marks=pytest.mark.slow), _as_a_method])
@pytest.mark.usefixtures("traced")
def test_a_replaced_forward_is_no_part_of_a_name(replace: Callable[[nn.Module], None]) -> None:
    """A policy names modules as `named_modules` does, whatever a host has put instead of their `forward`."""
    model = nn.Sequential(Net(), Net())
    for module in (model[0], model[1].net):
        replace(module)
    rules = [{"module": "0.net.0", "fp8": "off"}, {"module": "1.net.2", "fp8": "off"}]
    torch.compile(model, backend="fp8", options={"policy": {"rules": rules}, "strict": True})(noise(16, 128)).sum().backward()
    found = {record.fqn: record.decision for record in fp8compile.report(model).matmuls}
    assert found == {"0.net.0": "high_precision", "0.net.2": "fp8", "1.net.0": "fp8", "1.net.2": "high_precision"}


def _decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapper


@pytest.mark.usefixtures("traced")
def test_a_decorated_forward_is_no_part_of_a_name() -> None:
    """As in transformers, where a report had "0.model.layers", and a rule for "model.layers.*" held for nothing."""

    class Decorated(Net):
        forward = _decorated(Net.forward)

    model = Decorated()
    model.compile(backend="fp8", options={"policy": {"rules": [{"module": "net.0", "fp8": "off"}]}, "strict": True})
    model(noise(16, 128)).sum().backward()
    found = {record.fqn: record.decision for record in fp8compile.report(model).matmuls}
    assert found == {"net.0": "high_precision", "net.2": "fp8"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


MODEL = Net()
BY_NAME, IN_A_LIST, SPACE = {"student": MODEL}, [MODEL], types.SimpleNamespace(model=MODEL)


def _default(x: torch.Tensor, model: nn.Module = MODEL) -> Callable[[], torch.Tensor]:
    return lambda: model(x)


def _closing() -> Callable[[torch.Tensor], torch.Tensor]:
    model = MODEL
    return lambda x: model(x)


CALLS: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "global": ("net", lambda x: MODEL(x)),
    "part of a global": ("net", lambda x: MODEL.net(x)),
    "dict": ("student.net", lambda x: BY_NAME["student"](x)),
    "list": ("0.net", lambda x: IN_A_LIST[0](x)),
    "attribute": ("model.net", lambda x: SPACE.model(x)),
    "default": ("net", lambda x: _default(x)()),
    "closure": ("net", lambda x: _closing()(x)),
    "functional_call": ("net", lambda x: torch.func.functional_call(MODEL, dict(MODEL.named_parameters()), (x,))),
    "partial": ("net", functools.partial(MODEL.forward)),
}


QUICK = ("global", "list", "closure", "functional_call", "partial")


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("how", [how if how in QUICK else pytest.param(how, marks=pytest.mark.slow) for how in CALLS])
@pytest.mark.usefixtures("traced")
def test_rows_of_a_report(how: str) -> None:
    name, call = CALLS[how]
    torch.compile(call, backend="fp8")(noise(16, 128)).sum().backward()
    assert {record.fqn for record in fp8compile.report(MODEL).matmuls} == {f"{name}.0", f"{name}.2"}
    assert {record.parameter for record in fp8compile.report(MODEL).matmuls} == {"net.0.weight", "net.2.weight"}
