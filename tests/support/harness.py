"""Compares a compiled model with the oracle of reference.py, step by step: outputs, gradients, state."""

from __future__ import annotations

import hashlib
import io
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8compile
from tests.support.hooks import interpreted as interpreted  # tests import it from here
from tests.support.hooks import slots_of
from tests.support.models import SwiGlu
from tests.support.reference import Reference
from tests.support.reference_casts import scale_of
from tests.support.reference_settings import ROLES

# every matmul that can be FP8 is FP8, even if the device's description says that FP8 is slower
ALL_FP8 = {"rules": [{"where": "n >= 128 and k >= 128", "fp8": "on"}]}
# an output head that Inductor computes by chunks of rows, and a policy that keeps it in high precision
CHUNKED = {"auto_chunker.enable": True, "auto_chunker.amplify_ratio_threshold": 1}
CHUNKED |= {"auto_chunker.output_size_threshold": 1024}
HEAD_OFF = {"rules": [{"module": "*head*", "fp8": "off"}, *ALL_FP8["rules"]]}
FLOOR_DB = {torch.float32: 40.0, torch.bfloat16: 30.0}

# How much one FP8 rounding in the other direction may change the amax of a later tensor. Values that differ
# in their last bit (another order of summation, another BLAS) can lie on both sides of a rounding boundary.
# That changes one operand by 1/8 of its value, and a sum of 128 such products by about 1/128. bf16 rounds
# intermediates that a fused kernel does not: 2**-8 more.
AMAX_RTOL = {torch.float32: 1e-2, torch.bfloat16: 4e-2}

# In a chain of FP8 layers such a rounding spreads: it changes a row of the next tensor. If that row contains
# the amax, the scale changes, and with it the rounding of every value of the tensor. Two float32 references
# that sum in different orders are then at 22 dB, about once in ten steps of two blocks. So a `deep` model
# must reach the floor in the median of its steps, and the limits below in each step. Only errors are far off:
# a wrong scale gives 20 to 28 dB at every step, a wrong tensor -3 dB.
DEEP_FLOOR_DB = 14.0
DEEP_AMAX_RTOL = 0.15


def scaling_tensors(model: nn.Module | Sequence[nn.Module]) -> dict[str, Any]:
    """The scaling state of this rank, as plain tensors."""
    return fp8compile.ScalingState(model, all_ranks=False).state_dict()


def load_scaling(model: nn.Module, state: Mapping[str, Any] | None, strict: bool = False) -> None:
    fp8compile.ScalingState(model, strict=strict).load_state_dict(state)


def row_error(x: Tensor, values: Tensor) -> float:
    """The median of |x - values| / |x| over the rows of x that are not zero; finite elements in float64."""
    errors = []
    for row, copy in zip(x.double(), values.double(), strict=True):
        a, c = row[row.isfinite()], copy[row.isfinite()]
        errors += [((a - c).norm() / a.norm()).item()] if a.norm() > 0 else []
    return sorted(errors)[(len(errors) - 1) // 2]


def cosine(one: Tensor, other: Tensor) -> float:
    """Of the angle between two tensors."""
    return torch.cosine_similarity(one.flatten(), other.flatten(), 0).item()


def sqnr(reference: Tensor, test: Tensor) -> float:
    """10 log10(|reference|^2 / |reference - test|^2) in dB.

    inf for equal tensors; -inf where the two disagree about inf and NaN, or where the reference is all zeros
    and test is not.
    """
    assert reference.shape == test.shape, f"shapes {tuple(reference.shape)} and {tuple(test.shape)}"
    a, b = reference.detach().double().cpu(), test.detach().double().cpu()
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()) or not torch.equal(
        a[~finite].nan_to_num(0.0), b[~finite].nan_to_num(0.0)
    ):
        return -math.inf
    a, b = a[finite], b[finite]
    peak = max(a.abs().max().item(), b.abs().max().item()) if a.numel() else 0.0
    if peak == 0.0:
        return math.inf
    a, b = a / peak, b / peak  # without this, squares of very small gradients underflow, even in float64
    signal, noise = a.square().sum().item(), (a - b).square().sum().item()
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf


def assert_close(
    reference: Mapping[str, Tensor], test: Mapping[str, Tensor], floor_db: float, where: str
) -> None:
    """Same names, dtypes and shapes, and every tensor at floor_db or above; the error lists all others."""
    assert reference.keys() == test.keys(), (
        f"{where}: {sorted(reference.keys() ^ test.keys())} on one side only"
    )
    assert reference, f"{where}: nothing to compare"
    for name, expected in reference.items():
        assert test[name].dtype == expected.dtype, (
            f"{where}: {name} is {test[name].dtype}, expected {expected.dtype}"
        )
    assert_floor({name: sqnr(expected, test[name]) for name, expected in reference.items()}, floor_db, where)


def assert_floor(ratios: Mapping[str, float], floor_db: float, where: str) -> None:
    """Every ratio is floor_db or more."""
    low = [f"{name}: {ratio:.1f} dB" for name, ratio in ratios.items() if not ratio >= floor_db]
    assert not low, f"{where}: below {floor_db} dB: " + ", ".join(low)


def compiled(
    model: nn.Module,
    recipe: str = "delayed",
    *,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """`torch.compile(model, backend="fp8")` with these options of ours or of Inductor."""
    given = {"recipe": recipe, **options}
    return torch.compile(model, backend="fp8", dynamic=dynamic, fullgraph=fullgraph, options=given)


def grads_of(model: nn.Module, inputs: Sequence[Tensor] = ()) -> dict[str, Tensor]:
    """Copies of the gradients of the parameters, and of inputs as "input 0", ..., that have one."""
    named = {name: p.grad for name, p in model.named_parameters()}
    named |= {f"input {i}": x.grad for i, x in enumerate(inputs)}
    return {name: grad.detach().clone() for name, grad in named.items() if grad is not None}


def histories(model: nn.Module) -> dict[tuple[str, str, int], tuple[list[float], float]]:
    """(parameter name, role, use) -> (history newest first, scale) of a compiled model's scaling state."""
    return {key: (slot.history(), slot.scale()) for key, slot in slots_of(model).items()}


def digest(*data: Tensor | str | None) -> str:
    """Of tensors by their bytes, or of text."""
    made = hashlib.sha256()
    for x in data:
        if isinstance(x, Tensor):
            made.update(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            made.update(str(x).encode())
    return made.hexdigest()[:10]


def reloaded(x: Any, **how: Any) -> Any:
    """x after torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **how)


def leaf(x: Tensor) -> Tensor:
    """A copy of x that collects a gradient, if x can have one."""
    return x.detach().clone().requires_grad_(x.is_floating_point())


def gated_inputs(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Overrides by a default rule: down projections after a gate scale inputs by their current amax."""
    names = [name for name, module in model.named_modules() if isinstance(module, SwiGlu)]
    return {f"{name}.down.weight".lstrip("."): {"current_scaling": (True, False, False)} for name in names}


class Pair:
    """One model compiled with backend="fp8" beside its eager FP8 reference. Each `step` compares outputs,
    gradients and state.

    floor_db: from the dtype of the model unless given.
    options: as for torch.compile. `overrides` are passed to the reference.
    compile: how to compile the model, for tests that do not compile the whole model at once.
    No matmuls are merged: the reference scales each tensor by itself (see test_merge.py).
    deep: the model is a chain of FP8 layers. Then the floor holds for the median of the steps (`finish`).
    After each comparison the reference takes over the state of the compiled model, so that both begin each
    step with the same state.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: str = "delayed",
        *,
        floor_db: float | None = None,
        autocast: torch.dtype | None = None,
        dynamic: bool | None = None,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        deep: bool = False,
        compile: Callable[[nn.Module], Callable[..., Any]] | None = None,
        **options: Any,
    ) -> None:
        theirs = {name: value for name, value in options.items() if name != "policy"}
        options = {"merge_matmuls": False, **options}
        self.model, self.recipe, self.options, self.autocast = model, recipe, options, autocast
        overrides = {**gated_inputs(model), **(overrides or {})}
        self.reference = Reference(model, recipe, overrides=overrides, **theirs)
        if compile is None:
            self.compiled = compiled(model, recipe, dynamic=dynamic, **options)
        else:
            self.compiled = compile(model)
        self.dtype = autocast or next(model.parameters()).dtype
        self.floor_db = FLOOR_DB[self.dtype] if floor_db is None else floor_db
        self.deep, self.ratios = deep, defaultdict[str, list[float]](list)
        self.steps = 0

    def compare(self, expected: Mapping[str, Tensor], got: Mapping[str, Tensor], where: str) -> None:
        """Every tensor is at the floor; if deep, at the deep floor, and recorded for `finish`."""
        assert_close(expected, got, DEEP_FLOOR_DB if self.deep else self.floor_db, f"{where} {self.steps}")
        if self.deep:
            for name, tensor in expected.items():
                self.ratios[name].append(sqnr(tensor, got[name]))

    def finish(self) -> None:
        """After the last step: it ran in FP8, and, if deep, every tensor's median is at the floor."""
        assert_floor({name: median(ratios) for name, ratios in self.ratios.items()}, self.floor_db, "medians")
        self.assert_fp8()

    def two_calls(self, first: Tensor, second: Tensor, reverse: bool = False) -> None:
        """Two forwards, then two backwards, in this order or in reverse. Compares after each of the four."""
        calls = []
        for x in (first, second):
            calls.append(self.forward(x))
            self.compare_state()
        for call in reversed(calls) if reverse else calls:
            self.backward(*call)
        self.steps += 1

    def forward(self, *inputs: Tensor) -> tuple[Any, Any, list[Tensor], list[Tensor]]:
        """One forward of both; compares the outputs. -> outputs (compiled, reference), leaves of both."""
        sides = []
        dtype, enabled = self.autocast or torch.bfloat16, self.autocast is not None
        for run in (self.compiled, self.reference):
            leaves = [leaf(x) for x in inputs]
            with torch.autocast(inputs[0].device.type, dtype=dtype, enabled=enabled):
                sides.append((run(*leaves), leaves))
        (out, leaves), (expected, expected_leaves) = sides
        self.compare({"output": expected}, {"output": out}, "forward")
        assert out.requires_grad == expected.requires_grad
        return out, expected, leaves, expected_leaves

    def backward(
        self,
        out: Any,
        expected: Any,
        leaves: list[Tensor],
        expected_leaves: list[Tensor],
        grad: Tensor | None = None,
    ) -> None:
        """The backward of both with the same gradient of the output; compares gradients and state."""
        if grad is None:
            grad = like(out, self.steps)
        out.backward(grad)
        expected.backward(grad)
        self.compare_grads(leaves, expected_leaves)
        self.compare_state()

    def compare_grads(self, leaves: Sequence[Tensor] = (), expected_leaves: Sequence[Tensor] = ()) -> None:
        expected = grads_of(self.reference.model, expected_leaves)
        self.compare(expected, grads_of(self.model, leaves), "gradients of step")

    def compare_state(self) -> None:
        """Compares histories and scales with the reference's. A scale must be exactly the one that its
        history gives.

        A slot that has seen no amax yet may be missing on either side.
        """
        slots = {
            key: value for key, value in histories(self.model).items() if any(value[0]) or value[1] != 1.0
        }
        if not any(self.reference.of(name).delayed(role) for name in self.reference.names for role in ROLES):
            assert not slots, f"current scaling has no state, yet {sorted(slots)}"
            return
        moved = self.reference.slots
        expected = {key: slot for key, slot in moved.items() if any(slot.history) or slot.scale is not None}
        rtol = DEEP_AMAX_RTOL if self.deep else AMAX_RTOL[self.dtype]
        assert slots.keys() <= expected.keys(), f"slots of nothing: {sorted(slots.keys() - expected.keys())}"
        where = f"step {self.steps}"
        kept = {(key[1], tuple(expected[key].history)) for key in slots}
        for key, slot in expected.items():
            # for a tensor with several readers, the package has one slot (its first reader's), the reference
            # several equal ones
            assert key in slots or (key[1], tuple(slot.history)) in kept, f"{where}: no slot for {key}"
        for key, (history, scale) in slots.items():
            slot = expected[key]
            torch.testing.assert_close(
                torch.tensor(history),
                torch.tensor(slot.history),
                rtol=rtol,
                atol=0.0,
                msg=lambda m, k=key: f"{where} {k}: {m}",
            )
            wanted = 1.0 if slot.scale is None else slot.scale
            assert math.isclose(scale, wanted, rel_tol=rtol), (
                f"{where} {key}: scale {scale}, expected {wanted}"
            )
            settings = self.reference.of(key[0])
            length = 1 if settings.amax_compute_algo == "most_recent" else settings.amax_history_len
            if settings.interval == 1 and max(history[:length]) > 0.0:
                exact = scale_of(
                    max(history[:length]), settings.format(key[1])[1], settings.margin_of(key[1])
                )
                assert scale == exact, f"{where} {key}: {scale}"
        if self.deep:
            homes = {(key[1], tuple(expected[key].history)): key for key in slots}
            for key, slot in list(expected.items()):
                home = key if key in slots else homes[key[1], tuple(slot.history)]
                slot.history, slot.scale = list(slots[home][0]), slots[home][1]

    def step(self, *inputs: Tensor, grad: Tensor | None = None, zero_grad: bool = True) -> None:
        """A step of both with the same gradient of the output; compares output, gradients and state."""
        if zero_grad:
            self.zero_grad()
        self.backward(*self.forward(*inputs), grad)
        self.steps += 1

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.reference.model.zero_grad(set_to_none=True)

    def sgd(self, lr: float) -> None:
        """One SGD step of the compiled model; the reference takes over its weights, so neither drifts."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(lr * parameter.grad)
            theirs = dict(self.reference.model.named_parameters())
            for name, parameter in self.model.named_parameters():
                theirs[name].detach().copy_(parameter)

    def assert_fp8(self) -> None:
        """The matmuls ran in FP8. (A silent fall back to eager would fail comparisons, but less clearly.)"""
        override = self.options.get("override_linear_precision", (False, False, False))
        gemm = ("fprop", "dgrad", "wgrad")[tuple(override).index(False)]
        assert_fp8(self.model, [] if gemm != "fprop" else self.reference.names, gemm)


def assert_fp8(model: nn.Module, names: Sequence[str] = (), gemm: str = "fprop") -> None:
    """The report of this model lists this gemm in FP8, for each of these parameters."""
    report = fp8compile.report(model)
    done = {record.fqn for record in report.matmuls if record.gemm == gemm and record.decision == "fp8"}
    assert done, f"no {gemm} in FP8:\n{report}"
    missing = [name for name in names if not done & {name, name.removesuffix(".weight")}]
    assert not missing, f"{missing} not in FP8:\n{report}"


class Dispatched(TorchDispatchMode):
    """Notes the names of the operators that run inside."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:  # else Dynamo leaves the model to eager in this mode
        return True

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def like(x: Tensor, seed: int) -> Tensor:
    """Normal noise in the shape, dtype and device of x, the same on every device."""
    return noise(*x.shape, seed=1000 + seed, dtype=x.dtype, device=x.device)


def noise(
    *shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32, device: Any = "cpu"
) -> Tensor:
    """Normal noise times scale, the same on every device."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (drawn * scale).to(device=device, dtype=dtype)


# Factors of the inputs in ten steps: scales rise and fall by a factor of 40; some values saturate or vanish.
MOVING = (1.0, 1.5, 4.0, 0.5, 8.0, 0.25, 0.2, 2.0, 3.0, 1.0)
