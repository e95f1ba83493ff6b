"""explain(): the report of a real step without compiling, and without changing anything."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fp8compile
from fp8compile.reporting.report import Report
from tests.support import hooks, models
from tests.support.harness import load_scaling, scaling_tensors

ROWS, WIDTH = 32, 128


def decisions(report: Report) -> list[tuple]:
    return [(r.fqn, r.gemm, r.m, r.n, r.k, r.decision, r.reason, r.recipe, r.op) for r in report.matmuls]


def reported(model: nn.Module, *args, options=None, **kwargs) -> Report:
    """The report of a real training step (interpreted, as Inductor's C++ does not matter here)."""
    with hooks.interpreted():
        torch.compile(model, backend="fp8", options=options or {})(*args, **kwargs)
    return fp8compile.report(model)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """Fails the test if explain reaches Inductor's lowering or ours: no kernel may be generated."""
    from torch._inductor import compile_fx
    from torch._inductor.graph import GraphLowering

    def fail(*args, **kwargs):
        raise AssertionError("compiled")

    monkeypatch.setattr(GraphLowering, "run", fail)
    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", fail)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (ROWS, WIDTH)))


# -- the same report --


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"recipe": "tensorwise", "override_linear_precision": (False, True, False)}, {}]
)
def test_the_decisions_of_a_real_step(options):
    model = models.make(lambda: models.Block(WIDTH, gated=True))
    explained = fp8compile.explain(torch.compile(model, backend="fp8"), x(2, ROWS, WIDTH), options=options)
    real = reported(model, x(2, ROWS, WIDTH), options=options)
    assert decisions(explained) == decisions(real) and explained.opaque == real.opaque
    how, unweighed = explained.notes
    assert "autocast" in how and "no GPU is named" in unweighed
    assert str(explained).splitlines()[1:3] == [f"* {how}", f"* {unweighed}"] and real.notes == ()
    assert explained.summary() == real.summary() and explained.graphs[0].name == real.graphs[0].name
    assert explained.graphs[0].edges == real.graphs[0].edges


def test_a_function_that_calls_backward_on_a_model_in_eval_mode():
    """It is explained as training, and its gradients stay."""
    model = models.make(models.Mlp).eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def step(inputs: torch.Tensor) -> None:
        model(inputs).sum().backward()

    with torch.no_grad():
        report = fp8compile.explain(step, x())
    assert report.fp8_flop_fraction == 1.0 and len(report.matmuls) == 5
    assert not any(m.training for m in model.modules())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


@pytest.mark.slow
def test_for_a_device_and_a_frozen_part_stays_in_eval_mode():
    model = models.make(lambda: models.Stack(models.Mlp(), models.Mlp()))
    model.inner[0].eval()
    assert fp8compile.explain(model, x()).fp8_flop_fraction == 1.0
    report = fp8compile.explain(model, x(), device="h100")
    assert report.fp8_flop_fraction == 0.0 and report.graphs[0].device == "NVIDIA H100 80GB HBM3"
    assert model.training and not model.inner[0].training and model.inner[1].training
    with pytest.raises(fp8compile.OptionError, match="h1000.*Did you mean 'h100'"):
        fp8compile.explain(model, x(), device="h1000")


# -- without memory --


class Deep(nn.Module):
    """A model of 70 billion parameters, with a buffer, and a weight that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        width, hidden = 8192, 28672
        self.layers = nn.ModuleList(models.SwiGlu(width, hidden) for _ in range(100))
        self.last = nn.Linear(width, width, bias=False)
        self.last.weight = nn.Parameter(torch.empty(width, width))
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.last.weight
        self.register_buffer("scale", torch.ones(width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            inputs = inputs + layer(inputs)
        return self.head(self.last(inputs * self.scale))


def identities(model: nn.Module) -> dict[str, int]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: id(tensor) for name, tensor in tensors}


@pytest.mark.slow
def test_a_model_on_the_meta_device():
    """With an input on a CPU."""
    with torch.device("meta"):
        model = Deep().bfloat16()
    assert sum(p.numel() for p in model.parameters()) > 70e9
    before = identities(model)
    inputs = torch.zeros(4, 16, 8192, dtype=torch.bfloat16)
    report = fp8compile.explain(model, inputs)
    in_fp8 = {r.fqn for r in report.matmuls if r.decision == "fp8"}
    assert in_fp8 >= {"layers.0.gate", "layers.1.down", "last"} and identities(model) == before
    assert model.head.weight is model.last.weight and model.scale.device.type == "meta"


@pytest.mark.parametrize(("device", "op"), [(None, "flash_attention_for_cpu"), ("h100", "flash_attention")])
def test_attention_has_the_name_that_it_has_on_the_device(device: str | None, op: str) -> None:
    q = x(1, 2, 16, 64).requires_grad_()
    report = fp8compile.explain(lambda q: F.scaled_dot_product_attention(q, q, q), q, device=device)
    expected = [f"aten._scaled_dot_product_{op}{end}.default" for end in ("", "_backward")]
    assert [record.op for graph in report.graphs for record in graph.opaque] == expected


# -- nothing changes (see also test_nothing_is_left.py) --


@pytest.mark.slow
def test_reports_and_compiled_code_are_left_as_they_were():
    """Also more often than Dynamo's recompile limit, and for frames after a graph break, which explain
    compiles, too."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list as entries

    first = models.make(lambda: models.Broken(models.linear(), nn.Tanh(), models.linear()))
    other = models.make(models.Mlp)
    frames = [models.Broken.forward.__code__, models.Mlp.forward.__code__]
    first_real, real = str(reported(first, x())), str(reported(other, x()))
    before = [len(entries(code)) for code in frames]
    everything = str(fp8compile.report())
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in range(16, 64, 16):
            report = fp8compile.explain(first, x(rows, WIDTH))
            assert [r.m for r in report.matmuls][0] == rows and not any(r.dynamic for r in report.matmuls)
            assert [graph.index for graph in report.graphs] == [0, 1, 2]
    assert all(before) and models.Broken.forward.__code__ is frames[0]
    assert [len(entries(code)) for code in frames] == before
    assert str(fp8compile.report()) == everything
    assert str(fp8compile.report(first)) == first_real and str(fp8compile.report(other)) == real


@pytest.mark.slow
def test_state_and_measurements_are_left_as_they_were():
    """explain does not complain about a loaded state that no graph has taken yet; a requested measurement
    stays pending."""
    model, twin = models.make(models.Mlp), models.make(models.Mlp)
    with hooks.interpreted():
        run = torch.compile(model, backend="fp8")
        run(x()).sum().backward()
        fp8compile.stats(model, measure=True)
        state = scaling_tensors(model)
        load_scaling(twin, state)
        for each in (model, twin):
            assert fp8compile.explain(each, x()).fp8_flop_fraction == 1
        left = scaling_tensors(twin)
        assert len(state) > 1 and all(torch.equal(state[name], left[name]) for name in state | left)
        run(x()).sum().backward()
        assert all(row["mse"] is not None for row in fp8compile.stats(model))


@pytest.mark.slow
def test_a_warning_is_said_again_when_the_model_is_trained(caplog):
    """`strict` is for training."""
    model = models.make(lambda: models.Stack(models.Mlp(8, 8)))
    for options in ({}, {"strict": True}):
        caplog.clear()
        report = fp8compile.explain(model, x(ROWS, 8), options=options)
        assert "no matmul of Stack becomes FP8" in caplog.text
        assert report.fp8_flop_fraction == 0 and "under 128 wide" in report.summary()
    caplog.clear()
    reported(model, x(ROWS, 8))
    assert "no matmul of Stack becomes FP8" in caplog.text


# -- errors --


def test_errors_of_the_model_and_of_the_options():
    model = models.make(models.Mlp)
    with pytest.raises(RuntimeError, match="reduction dim|shapes cannot be multiplied"):
        fp8compile.explain(model, x(ROWS, WIDTH + 1))
    with pytest.raises(TypeError, match="positional argument"):
        fp8compile.explain(model)
    with pytest.raises(fp8compile.OptionError, match="recipe"):
        fp8compile.explain(model, x(), options={"recipe": "tensor"})


class Sliced(nn.Module):
    """After a graph break, continues with numbers that it reads from tensors."""

    def __init__(self, read) -> None:
        super().__init__()
        self.first, self.second, self.read = models.Mlp(), models.Mlp(), read

    def forward(self, inputs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        y = self.first(inputs)
        length = self.read(y, lengths)
        torch._dynamo.graph_break()
        return self.second(y[: int(length)].view(2, int(length) // 2, -1))


@pytest.mark.cases(test=1, slow=1)
@pytest.mark.parametrize(
    "read",
    [
        lambda y, lengths: (torch.tensor(2.0) * lengths[1].float()).long(),
        pytest.param(lambda y, lengths: torch.tensor(y.shape[0] - 4), marks=pytest.mark.slow),
        pytest.param(lambda y, lengths: lengths.max(), marks=pytest.mark.slow),
    ],
    ids=["float", "size", "input"],
)
def test_small_numbers_are_what_they_are(read):
    model, given = models.make(lambda: Sliced(read)), (x(), torch.tensor([10, 14, 28]))
    explained = fp8compile.explain(model, *given)
    assert sorted({r.m for r in explained.matmuls if r.gemm == "fprop"}) == [28, ROWS]
    assert decisions(explained) == decisions(reported(model, *given))


def test_what_follows_from_a_matmul_is_zero(caplog):
    """Results of matmuls are zeros in explain, which may cause an error: the report lists the graphs before
    the error and names it."""
    model = models.make(lambda: Sliced(lambda y, lengths: (y.detach() * 0 + 28).amax().long()))
    report = fp8compile.explain(model, x(), torch.tensor([28]))
    assert {r.fqn for r in report.matmuls} == {"first.up", "first.down"}
    assert "incomplete: after graph " in report.summary() and "test_explain.py:" in report.summary()
    assert "the model raised RuntimeError: cannot reshape" in report.summary()
    assert "zeros here" in caplog.text and "Traceback" not in str(report)
    assert report.to_dict()["summary"] == report.summary() and model.second.up.weight.grad is None


@pytest.mark.slow
def test_an_error_of_the_passes_is_one():
    model = models.make(lambda: models.Broken(models.Mlp(), nn.Tanh(), models.Mlp()))

    def behind_a_graph_break() -> bool:  # where the zeros may cause errors
        return bool(fp8compile.report().graphs)

    with hooks.failing_passes(behind_a_graph_break), pytest.raises(Exception, match="ours"):
        fp8compile.explain(model, x())


def test_nothing_to_compile():
    assert "Dynamo found no graph" in fp8compile.explain(lambda: 1).summary()
