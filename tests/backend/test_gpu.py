"""On a CUDA device: the agreement of test_agreement.py through Inductor, and the numerics of the tensor
cores.

The reference runs on the same device in eager mode with exact float64 sums. Hopper's FP8 tensor cores keep
about 14 bits of a float32 sum (fast accumulation, in fprop) before they round, so a float32 model is held to
the floor of bf16 models here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile import compat
from fp8compile.optim import AdamW
from fp8compile.passes.pipeline import run_post_grad
from tests.backend.test_agreement import BUILDS
from tests.equivalence.features import MODELS
from tests.support import hooks
from tests.support.groups import CASES, Cast, Made, Source, trace
from tests.support.harness import ALL_FP8, MOVING, Pair, assert_close, assert_fp8, like, noise
from tests.support.kernel_checks import check
from tests.support.models import Mlp, make

pytestmark = pytest.mark.gpu

FLOOR_DB = 30.0
CHAIN_DB = 18.0  # of a chain of FP8 layers in bf16, which multiplies the noise: 20 dB on a CPU, too


@pytest.fixture(params=["cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """A device with FP8 tensor cores."""
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    return request.param


@pytest.mark.parametrize(
    ("name", "dtype", "recipe"),
    [
        ("mlp", torch.float32, "tensorwise"),
        ("block", torch.float32, "delayed"),
        ("mlp", torch.bfloat16, "delayed"),
        ("checkpointed_relus", torch.bfloat16, "delayed"),
        ("checkpointed_relus", torch.bfloat16, "tensorwise"),
    ],
    ids=str,
)
def test_ten_steps(name: str, dtype: torch.dtype, recipe: str, device: str) -> None:
    """The second and the ninth have two forwards before two backwards. Nothing jumps there: the host would
    hear of it after the second forward, the reference before it."""
    floor = CHAIN_DB if name == "checkpointed_relus" else FLOOR_DB
    pair = Pair(make(BUILDS[name], dtype, device), recipe, floor_db=floor, deep=True, policy=ALL_FP8)
    for step, factor in enumerate(MOVING):
        x = noise(2, 32, 128, seed=step, scale=factor, dtype=dtype, device=device)
        if step in (1, 8):
            pair.zero_grad()
            pair.two_calls(x, x)
        else:
            pair.step(x, grad=like(x, step) / factor)
        pair.sgd(0.001 * factor)
    pair.finish()


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_shapes(recipe: str, device: str) -> None:
    """Another shape, a number of rows that is no multiple of 16, one row, no row."""
    pair = Pair(make(Mlp, torch.bfloat16, device), recipe, policy=ALL_FP8)
    for step, rows in enumerate((32, 48, 17, 1, 32)):
        pair.step(noise(rows, 128, seed=step, dtype=torch.bfloat16, device=device))
    pair.assert_fp8()
    pair.step(noise(0, 128, dtype=torch.bfloat16, device=device))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_modes(mode: str, device: str) -> None:
    """CUDA graphs replay the update of the state as well."""
    run = hooks.backend_with(policy=ALL_FP8, merge_matmuls=False)  # torch takes no options beside a mode
    pair = Pair(
        make(Mlp, torch.bfloat16, device), compile=lambda model: torch.compile(model, backend=run, mode=mode)
    )
    for step, factor in enumerate(MOVING):
        torch.compiler.cudagraph_mark_step_begin()
        pair.step(noise(32, 128, seed=step, scale=factor, dtype=torch.bfloat16, device=device))
    pair.assert_fp8()


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_weights_that_are_kept_in_fp8_only(cuda_graphs: bool, device: str) -> None:
    """Adapters on a frozen base learn what they learn beside plain frozen weights."""
    found = []
    for frozen in ("high_precision", "fp8"):
        torch._dynamo.reset()
        model = MODELS["lora"]().to(device)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=1e-2)
        options = {"policy": ALL_FP8, "recipe": "tensorwise", "frozen": frozen}
        options["triton.cudagraphs"] = cuda_graphs
        call = torch.compile(model, backend="fp8", options=options)
        outputs = []
        for step in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            y = call(noise(2, 24, 128, seed=step, dtype=torch.bfloat16, device=device))
            y.float().square().mean().backward()
            outputs.append(y.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
        assert any(map(hooks.frozen, model.parameters())) == (frozen == "fp8")
        found.append({str(i): x for i, x in enumerate((*outputs, *(p.detach().clone() for p in trained)))})
    assert_close(*found, 40.0, "training")


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (1, 4096)], ids=["blocks", "rows"])
@pytest.mark.parametrize("out", [1024, 12288])
def test_weights_of_a_checkpoint(rows: int, columns: int, out: int, device: str, tmp_path: Path) -> None:
    """Forward and dgrad of linears of Qwen3-8B multiply the bytes of the file."""
    safetensors = pytest.importorskip("safetensors.torch")
    scales = noise(out // rows, 4096 // columns, seed=2, device=device).exp() / 100
    data = noise(out, 4096, seed=3, device=device).to(torch.float8_e4m3fn)
    name = "weight_scale_inv" if rows == 128 else "weight_scale"
    safetensors.save_file({"weight": data, name: scales}, tmp_path / "model.safetensors")
    layer = nn.Linear(4096, out, bias=False, device=device, dtype=torch.bfloat16)
    fp8compile.load_fp8(layer, tmp_path)
    x = noise(512, 4096, seed=0, dtype=torch.bfloat16, device=device).requires_grad_()
    y = torch.compile(layer, backend="fp8", options={"policy": ALL_FP8})(x)
    dy = like(y, 1)
    y.backward(dy)
    assert_fp8(layer)
    assert_fp8(layer, gemm="dgrad")
    weight = data.double() * scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    wanted = {"y": x.detach().double() @ weight.t(), "dx": dy.double() @ weight}
    assert x.grad is not None
    assert_close(wanted, {"y": y.detach().double(), "dx": x.grad.double()}, 28.0, "a product")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(1000, 272), (17, 1000), (4096, 768)], ids=str)
def test_generated_kernels(name: str, shape: tuple[int, int], device: str) -> None:
    """The checks of test_kernels.py, with Triton's compiler and the device instead of Triton's interpreter.
    Without Inductor, nothing but Triton's default says whether kernels are contracted."""
    case = CASES[name]
    inputs = case.inputs(Source(*shape, torch.bfloat16))
    inputs = tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs)
    oracle = trace(lambda *x: case.call(Cast(), *x), inputs)
    fused = compat.dynamo.copy_graph(oracle)
    run_post_grad(fused.graph)
    fused.recompile()
    assert hooks.count_generated(fused.graph) == len(case.kernels)
    with hooks.uncontracted():
        check(case, Made(oracle, fused, (), ()), inputs, "normal")


def test_a_step_that_casts_its_weights(device: str) -> None:
    """Copies are those of the casts in the next forward, to the bit; weights are those of the update without
    casts, but for the last place."""
    results = []
    for early in (False, True):
        model = make(BUILDS["mlp"], torch.bfloat16, device)
        optimizer = AdamW(model.parameters(), lr=1e-2, master="bf16+remainder", fp8_weights=early)
        options = {"policy": ALL_FP8, "cache_weights": True, "power_of_2_scale": True}
        call = torch.compile(model, backend="fp8", options=options)
        with hooks.casts_by_place() as found:
            for seed in range(4):
                x = noise(2, 32, 128, seed=seed, dtype=torch.bfloat16, device=device)
                y = call(x)
                y.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        if early:
            assert found[-2:] == ["update", "update"]
            kept = call(x).detach().clone()
            fp8compile.refresh_weight_cache()
            assert torch.equal(call(x), kept)
        results.append([p.detach().float() for p in model.parameters()])
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= 2**-6 * one.abs().max()
