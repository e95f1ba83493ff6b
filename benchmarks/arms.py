"""The arms: ways to compile one model that are compared with each other.

An arm takes a vanilla model and compiles it in place, whole or region by region. To add an arm, add a line to
`ARMS`.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fp8compile.codegen.scaled_mm_kind import SQUARE
from fp8compile.config.policy import Policy, Rule, load
from fp8compile.config.recipe import ROW, WHOLE, Block
from fp8compile.dryrun.measure import by_torchao
from fp8compile.ir import frozen
from fp8compile.runtime import held

from .models import Llama, LoRA

# FP8 wherever the default policy allows it, without the cost model, which is compared with this
ALL = Policy(
    rules=(
        Rule(name="output head", kind="output head", fp8="off"),
        Rule(name="router gate", kind="router gate", fp8="off"),
        Rule(name="wide", where="n >= 128 and k >= 128", fp8="on"),
        Rule(name="under 128 wide", fp8="off"),
    )
)
# the default policy, but that the input of a down projection has the scale of earlier steps, too
DELAYED = Policy(rules=tuple(rule for rule in load(None).rules if rule.name != "down projection"))
_PROCESS = contextlib.ExitStack()  # its contexts stay open until the process ends


@dataclass(frozen=True)
class Arm:
    """`prepare` may replace modules of the model. `how` is the arguments of Module.compile (None: eager).
    `env`: variables of its process. `kind` is "bf16", "eager", "torchao" or "fp8". `packed`: the optimizer is
    fp8compile.optim.AdamW, whose step also casts weights, and not torch's fused AdamW."""

    name: str
    kind: str
    how: Mapping[str, Any] | None = field(default_factory=dict)
    prepare: Callable[[nn.Module], None] = lambda model: None
    env: Mapping[str, str] = field(default_factory=dict)
    packed: bool = False

    @property
    def labels(self) -> dict[str, Any]:
        """Of its row in a result."""
        return {"arm": self.name, "kind": self.kind, "packed": self.packed, "point": ""}

    @property
    def mode(self) -> str:
        return str((self.how or {}).get("mode", ""))


def torchao(recipe: str) -> Callable[[nn.Module], None]:
    return lambda model: by_torchao(model, recipe)


def torchao_experts(model: nn.Module) -> None:
    """Replace stacks of weights by torchao's, whose grouped matmuls are FP8 with scales of rows. torchao
    leaves it to the model to pad each expert's rows to a multiple of 16; ours does not, so this arm is for
    estimates."""
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig
    from torchao.quantization import quantize_

    def stacks(module: nn.Module, name: str) -> bool:
        return any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))

    quantize_(model, config=Float8TrainingOpConfig(pad_token_groups_for_grouped_mm=False), filter_fn=stacks)


class Dequantized(nn.Module):
    """A frozen Linear with its weight in FP8, a scale for 128 x 128, as plain PyTorch multiplies by it:
    dequantized, in forward and once more in backward. 128 has to divide both sides."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = cast(linear.weight.detach(), SQUARE)
        self.data, self.inv = (nn.Parameter(x, requires_grad=False) for x in (weight.data_, weight.inv_))

    def forward(self, x: Tensor) -> Tensor:
        # without a checkpoint, Inductor keeps all weights in bf16 from forward to backward
        return F.linear(x, checkpoint(self.dequantized, x.dtype, use_reentrant=False))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        blocks = self.data.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).float()
        return (blocks * self.inv[:, None, :, None]).to(dtype).view_as(self.data)


def cast(weight: Tensor, block: Block) -> frozen.FrozenWeight:
    data, inv = frozen.cast(weight, torch.float8_e4m3fn, block, margin=0, power_of_2=False)
    stored = frozen.Stored(inv.dtype, "weight_scale", tuple(inv.shape))
    return frozen.FrozenWeight(data, inv, weight.dtype, block, stored=stored)


def dequantized(model: nn.Module) -> None:
    for layer in adapted_layers(model):
        layer.base = Dequantized(layer.base)  # type: ignore[assignment]


def as_from_a_checkpoint(block: Block) -> Callable[[nn.Module], None]:
    """Hold the base of LoRA as `load_fp8` holds weights of an FP8 checkpoint, with scales of blocks."""

    def prepare(model: nn.Module) -> None:
        for layer in adapted_layers(model):
            held.hold(layer.base, "weight", cast(layer.base.weight.detach(), block))

    return prepare


def adapted_layers(model: nn.Module) -> list[LoRA]:
    return [module for module in model.modules() if isinstance(module, LoRA)]


def fp8(recipe: str, **options: Any) -> dict[str, Any]:
    return {"backend": "fp8", "options": {"recipe": recipe, **options}}


GRAPHS = "reduce-overhead"
IN_UPDATE = {"cache_weights": True, "power_of_2_scale": True}  # the step of `packed` writes FP8 weights
FAST = {"use_fast_accum": [True, True, True]}
ARMS = {
    arm.name: arm
    for arm in (
        Arm("bf16", "bf16"),
        Arm("bf16-max-autotune", "bf16", {"mode": "max-autotune"}),
        Arm("bf16-packed", "bf16", packed=True),
        Arm("bf16-graphs", "bf16", {"mode": GRAPHS}),
        Arm("eager-bf16", "eager", None),
        Arm("torchao-tensorwise", "torchao", prepare=torchao("tensorwise")),
        Arm("torchao-rowwise", "torchao", prepare=torchao("rowwise")),
        Arm("torchao-experts", "torchao", prepare=torchao_experts),
        Arm("fp8-delayed", "fp8", fp8("delayed")),
        Arm("fp8-tensorwise", "fp8", fp8("tensorwise")),
        Arm("fp8-delayed-save", "fp8", fp8("delayed", save="fp8")),
        Arm("fp8-delayed-kept", "fp8", fp8("delayed", recast_weights=False)),
        Arm("fp8-delayed-fast-accum", "fp8", fp8("delayed", **FAST)),
        Arm("fp8-delayed-fast-dgrad", "fp8", fp8("delayed", use_fast_accum=[True, True, False])),
        Arm("fp8-delayed-swiglu-delayed", "fp8", fp8("delayed", policy=DELAYED)),
        Arm("fp8-delayed-no-fuse", "fp8", fp8("delayed"), env={"FP8COMPILE_SKIP": "fuse"}),
        # torch takes no options beside a mode; "delayed" is the default
        Arm("fp8-delayed-graphs", "fp8", {"backend": "fp8", "mode": GRAPHS}),
        Arm("fp8-delayed-cached", "fp8", fp8("delayed", cache_weights=True)),
        Arm("fp8-tensorwise-cached", "fp8", fp8("tensorwise", cache_weights=True)),
        Arm("fp8-rowwise-cached", "fp8", fp8("rowwise", cache_weights=True)),
        Arm("fp8-delayed-packed", "fp8", fp8("delayed"), packed=True),
        Arm("fp8-delayed-update", "fp8", fp8("delayed", **IN_UPDATE), packed=True),
        Arm("fp8-delayed-update-fast-accum", "fp8", fp8("delayed", **IN_UPDATE, **FAST), packed=True),
        Arm("fp8-delayed-fastest", "fp8", fp8("delayed", policy=DELAYED, **IN_UPDATE, **FAST), packed=True),
        Arm("fp8-delayed-all", "fp8", fp8("delayed", policy=ALL)),
        Arm("fp8-rowwise", "fp8", fp8("rowwise")),
        Arm("fp8-rowwise-all", "fp8", fp8("rowwise", policy=ALL)),
        Arm("fp8-rowwise-gw-hp", "fp8", fp8("rowwise_with_gw_hp")),
        Arm("fp8-blockwise", "fp8", fp8("blockwise")),
        Arm("fp8-mxfp8", "fp8", fp8("mxfp8")),
        # for LoRA on a base that came in FP8, which decides its recipe
        Arm("dequantized", "dequantized", prepare=dequantized),
        Arm("fp8-held-blocks", "fp8", fp8("delayed"), as_from_a_checkpoint(SQUARE)),
        Arm("fp8-held-rows", "fp8", fp8("delayed"), as_from_a_checkpoint(ROW)),
        Arm("fp8-held-tensor", "fp8", fp8("delayed"), as_from_a_checkpoint(WHOLE)),
    )
}
DEFAULT = "bf16,bf16-max-autotune,eager-bf16,torchao-tensorwise,torchao-rowwise,fp8-delayed,fp8-tensorwise"


def parse_arms(text: str) -> list[Arm]:
    """The arms of comma-separated names, each once. ValueError names an unknown arm."""
    names = list(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))
    for name in names:
        if name not in ARMS:
            raise ValueError(f"no arm {name!r} (there are: {', '.join(ARMS)})")
    if not names:
        raise ValueError("no arms given")
    return [ARMS[name] for name in names]


def regions(model: nn.Module) -> list[nn.Module]:
    """The modules that are compiled one by one when a model is compiled block by block."""
    return model.regions() if isinstance(model, Llama) else list(model.blocks)  # type: ignore[arg-type]


def settings(arm: Arm, accumulate: int, interpreted: bool) -> dict[str, Any] | None:
    """The arguments of Module.compile for `arm`, None for eager.

    max-autotune and reduce-overhead replay CUDA graphs, and the next replay overwrites their outputs (the
    gradients). So gradient accumulation uses max-autotune-no-cudagraphs; the other mode raises ValueError.
    `interpreted`: AOTAutograd alone instead of Inductor (for tests).
    """
    if arm.how is None:
        return None
    how = dict(arm.how)
    if how.get("mode") == "max-autotune" and accumulate > 1:
        how["mode"] = "max-autotune-no-cudagraphs"
    if how.get("mode") == GRAPHS and accumulate > 1:
        raise ValueError(f"{arm.name}: a replay overwrites the gradients of the micro-batch before")
    if interpreted and arm.kind != "fp8":
        return {"backend": "aot_eager"}
    return how


def apply(arm: Arm, model: nn.Module, how: Mapping[str, Any] | None, each: bool) -> None:
    """Compile `model` in place, whole or (`each`) region by region."""
    arm.prepare(model)
    if how is None:
        return
    how = dict(how)
    if how.get("backend") == "fp8":  # the function, because the name "fp8" needs an installed package
        how["backend"] = importlib.import_module("fp8compile.backend").fp8
    for module in regions(model) if each else [model]:
        module.compile(**how, dynamic=False)


def describe(how: Mapping[str, Any] | None) -> str:
    """How an arm was compiled, as text for the results."""
    return "eager" if how is None else ", ".join(f"{key}={value}" for key, value in how.items()) or "inductor"


def torchao_folder(path: Path, unpack: Path) -> Path:
    """The folder to put on sys.path for `--torchao path`. `path` is a folder with the package, a wheel, or a
    folder with a wheel. A wheel is unpacked into `unpack`; only its Python part is needed. ValueError if
    there is no torchao."""
    if (path / "torchao" / "__init__.py").is_file():
        return path
    wheels = [path] if path.suffix == ".whl" and path.is_file() else sorted(path.glob("torchao-*.whl"))
    if not wheels:
        raise ValueError(f"--torchao {path}: no wheel, no folder with one, and none with the package")
    target = unpack / wheels[-1].stem
    if not (target / "torchao" / "__init__.py").is_file():
        with zipfile.ZipFile(wheels[-1]) as wheel:
            wheel.extractall(target)
    return target


def prepare_process(interpreted: bool, torchao_path: str | None) -> None:
    """Settings that every worker makes before it compiles anything."""
    if torchao_path:
        sys.path.insert(0, torchao_path)
    # a silent fall back to eager would be timed as compiled
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch.set_autocast_dtype("cuda", torch.bfloat16)  # torchao reads the dtype for "cuda" on the CPU, too
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    torch.set_float32_matmul_precision("high")
    if interpreted:
        from .interpreted import interpreted as in_interpreter

        _PROCESS.enter_context(in_interpreter())
