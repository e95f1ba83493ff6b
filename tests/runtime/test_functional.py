"""torch.func inside a compiled function: its gradients are part of the forward. FP8 with parameters, else
high precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap

import fp8compile
from fp8compile.ir.records import FP8
from tests.support.harness import noise
from tests.support.models import Mlp

pytestmark = [pytest.mark.usefixtures("interpreted"), pytest.mark.shares_graphs]


Weights = dict[str, Tensor]


def functions(model: nn.Module) -> dict[str, Callable[[Weights, Tensor, Tensor], Any]]:
    """Functions of (weights, x, y) that differentiate `model`."""

    def out(p: Weights, x: Tensor) -> Tensor:
        return functional_call(model, p, (x,))

    def loss(p: Weights, x: Tensor, y: Tensor) -> Tensor:
        return (out(p, x) - y).square().mean()

    def pulled(p: Weights, x: Tensor, y: Tensor) -> Any:
        z, pull = vjp(lambda p: out(p, x), p)
        return z, pull(y)

    direction = {name: noise(*p.shape, seed=i) for i, (name, p) in enumerate(model.named_parameters())}
    return {
        "grad": lambda p, x, y: grad(loss, argnums=(0, 1))(p, x, y),
        "vjp": pulled,
        "jvp": lambda p, x, y: jvp(lambda p: out(p, x), (p,), (direction,)),
        "vmap of grad": lambda p, x, y: vmap(grad(loss), in_dims=(None, 0, 0))(
            p, x.unsqueeze(1), y.unsqueeze(1)
        ),
        "hvp": lambda p, x, y: jvp(lambda p: grad(loss)(p, x, y), (p,), (direction,))[1],
    }


def worst(expected: Any, got: Any) -> float:
    """The lowest SQNR of the tensors, in dB."""
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True)
    errors = [(float((a - b).detach().norm()), float(a.detach().norm())) for a, b in pairs]
    return min(
        200.0 if not error else float(20 * torch.log10(torch.tensor(size / error))) for error, size in errors
    )


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", ["grad", "jvp", "vmap of grad", pytest.param("hvp", marks=pytest.mark.slow)])
def test_with_parameters(name: str) -> None:
    """Matmuls with a parameter are FP8, also in the inner backward; the inner gradient of a weight is a
    matmul of two activations. The results, and gradients through them, are right."""
    model = Mlp()
    parameters, x, y = dict(model.named_parameters()), noise(32, 128), noise(32, 128, seed=1)
    function = functions(model)[name]
    run = torch.compile(function, backend="fp8")
    for _ in range(2):  # cold, and warm
        expected, got = function(parameters, x, y), run(parameters, x, y)
        assert worst(expected, got) > 20
        wanted = [p for p in model.parameters() if p.dim() == 2]
        sums = [sum(leaf.square().sum() for leaf in pytree.tree_leaves(result)) for result in (expected, got)]
        assert worst(*(torch.autograd.grad(total, wanted) for total in sums)) > 15
    gemms = {(record.gemm, record.decision) for record in fp8compile.report(model).matmuls}
    assert (
        ("fprop", FP8) in gemms and ("fprop", "high_precision") not in gemms and ("matmul", FP8) not in gemms
    )


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", ["vjp", "jvp", "vmap of grad"])
def test_with_other_tensors(name: str) -> None:
    """Without a parameter no matmul has a weight. The model's report says where such graphs are."""
    torch._dynamo.reset()  # the report of all graphs is asked for
    model = Mlp()
    tensors, x, y = (
        {name: p.detach().clone() for name, p in model.named_parameters()},
        noise(32, 128),
        noise(32, 128, seed=1),
    )
    function = functions(model)[name]
    assert worst(function(tensors, x, y), torch.compile(function, backend="fp8")(tensors, x, y)) > 100
    assert {record.decision for record in fp8compile.report().matmuls} == {"high_precision"}
    assert "functional_call" in fp8compile.report(model).summary() and not fp8compile.report(model).outside
    assert {record.fqn for record in fp8compile.report().matmuls} <= {"", "up", "down"}


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize("parameters", [True, False])
def test_a_whole_step_in_a_function_says_so(parameters: bool, caplog: pytest.LogCaptureFixture) -> None:
    """No backward follows, but it is no evaluation, and nobody finds out late that nothing ran in FP8."""
    model = Mlp()
    weights = {name: p if parameters else p.detach() for name, p in model.named_parameters()}

    def step(weights: Weights, x: Tensor) -> Weights:
        gradients = grad(lambda p, x: functional_call(model, p, (x,)).square().mean())(weights, x)
        return {name: p - 0.1 * gradients[name] for name, p in weights.items()}

    with torch.no_grad():
        expected, got = (
            step(weights, noise(32, 128)),
            torch.compile(step, backend="fp8")(weights, noise(32, 128)),
        )
    assert worst(expected, got) > 100
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "computes its gradients inside of the compiled function" in warning.getMessage()
    assert any(
        "its gradients are computed inside of the graph" in graph.note for graph in fp8compile.report().graphs
    )
    with torch.no_grad(), pytest.raises(Exception, match="computes its gradients inside"):
        torch.compile(lambda p, x: step(p, x), backend="fp8", options={"strict": True})(
            weights, noise(32, 128)
        )
