"""How much headroom should delayed scaling leave, and what does it cost? Casts, small models, models of timm.

    python -m benchmarks.margins                              # all parts, about 15 minutes of one core
    python -m benchmarks.margins --part casts
    python -m benchmarks.margins --show --update notes/accuracy.md

A margin m makes scale = FP8 maximum / (amax * 2^m): a tensor may grow 2^m times beyond its history before it
saturates, and loses m of the binades of its format. `casts` measures the cost of this headroom, `models` its
cost and its benefit, `timm` its effect on gradients.

casts    1,024 tokens of 512 normal features. Each token has its own size, log-uniform over 0 to 32 binades.
         Measures the signal to quantization noise ratio in dB of the whole tensor, and of the median token,
         where small elements count, too
models   small models train in float32 without FP8: GPT and Llama on text, a vision transformer on synthetic
         classes, the same after a LayerScale of 1e-6 or with a head of 2e-5, a GPT of which every eighth
         batch is one sequence, not sixteen. Inputs, weights and gradients of their linears, in steps 1 to 16
         and in the last 8 of 300, are cast as delayed scaling would do with each margin, with the package's
         own code for scales
timm     five tiny vision transformers of timm, in their first 8 steps: the cosine between gradients in FP8
         and in float32 on the same weights, for gradients whose cosine in eager bf16 is at least 0.99.
         `tensorwise` is FP8 without a history. Needs timm

Everything is emulated on a CPU. Each result is one line of JSON in `--out`.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.devices.formats import E4M3, E5M2, Format
from fp8compile.ir import ops, state_page
from fp8compile.ir.scale import scale_of

from . import machine, models
from .interpreted import interpreted
from .results import RESULTS
from .show import table
from .tables import update

sys.path.append(str(machine.ROOT / "examples"))
import train_gpt  # noqa: E402

PATH = RESULTS / "margins.jsonl"
PARTS = ("casts", "models", "timm")
MARGINS = tuple(range(13))
SPANS = (0, 8, 16, 24, 32)  # binades
EARLY, LATE, STEPS = 16, 8, 300
HISTORY = 16
ROLES = ("input", "weight", "gradient")
CASES = (("input", E4M3), ("weight", E4M3), ("gradient", E5M2), ("gradient", E4M3))
TIMM_STEPS, GOOD, GOAL = 8, 0.99, 0.97
TIMM_ARMS = {str(m): {"margin": (0, 0, m)} for m in (0, 6, 8, 10, 11, 12)} | {
    "tensorwise": {"recipe": "tensorwise"}
}
KEYS = ("part", "model", "when", "role", "format", "span", "arm")  # they identify a line of the results
SHOWN = (0, 1, 2, 3, 4, 6, 8, 10, 11, 12)

Row = dict[str, Any]


def noise_of(x: Tensor, scale: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """[R, C] -> the squared error and the squared signal of each row, in float64."""
    copied = ops.cast(x, scale, form.dtype, form.max).double() / scale.double()
    wide = x.double()
    return (copied - wide).square().sum(1), wide.square().sum(1)


def db(noise: Tensor, signal: Tensor) -> Tensor:
    return 10.0 * torch.log10(signal / noise.clamp(min=1e-300))


# -- casts --


def casts() -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    for span in SPANS:
        sizes = torch.exp2(-span * torch.rand(1024, 1, generator=generator, dtype=torch.float64))
        x = (torch.randn(1024, 512, generator=generator, dtype=torch.float64) * sizes).float()
        for form in (E5M2, E4M3):
            found = [noise_of(x, scale_of(x.abs().amax().reshape(1), form.max, m), form) for m in MARGINS]
            whole = [float(db(noise.sum(), signal.sum())) for noise, signal in found]
            middle = [float(db(noise, signal).median()) for noise, signal in found]
            yield {
                "part": "casts",
                "format": form.name,
                "span": span,
                "tensor": rounded(whole),
                "token": rounded(middle),
            }


def rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 2) for value in values]


# -- tensors of small models --


class Vision(nn.Module):
    """A pre-norm vision transformer: [B, patches, width] -> classes. `scale`: initial value of LayerScale;
    None: no LayerScale. `head`: standard deviation of the head's weight."""

    def __init__(self, scale: float | None = None, head: float = 0.02, width: int = 128, layers: int = 2):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        scales = (
            nn.Parameter(torch.full((width,), 1.0 if scale is None else scale)) for _ in range(2 * layers)
        )
        self.scales = nn.ParameterList(scales).requires_grad_(scale is not None)
        self.head = nn.Linear(width, 160)
        nn.init.trunc_normal_(self.head.weight, std=head, a=-2 * head, b=2 * head)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        for i, (qkv, out, up, down) in enumerate(zip(self.qkv, self.out, self.up, self.down, strict=True)):
            q, k, v = qkv(self.norms[2 * i](x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + self.scales[2 * i] * out(mixed)
            x = x + self.scales[2 * i + 1] * down(F.gelu(up(self.norms[2 * i + 1](x))))
        return self.head(self.norms[-1](x).mean(1))


Loss = Callable[[nn.Module, int], Tensor]


def _text(sequences: Callable[[int], int]) -> Loss:
    text = train_gpt.load_text()

    def loss(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - 65, (sequences(step),), generator=generator)
        inputs, targets = train_gpt.windows(text, starts, 64, "cpu")
        return model(inputs, targets)

    return loss


def _classes(model: nn.Module, step: int) -> Tensor:
    """The loss on synthetic data. A class is a random picture; an example is this picture plus noise."""
    pictures = torch.randn(160, 16, 128, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(step)
    y = torch.randint(160, (16,), generator=generator)
    return F.cross_entropy(model(pictures[y] + torch.randn(16, 16, 128, generator=generator)), y)


def _gpt() -> nn.Module:
    return train_gpt.build_model(train_gpt.Config(2, 128, 2, 64, 256, STEPS, 16))


def _llama() -> nn.Module:
    return models.materialise(lambda: models.Llama(models.LLAMA_TINY, 64), "cpu", torch.float32)


def small_models() -> dict[str, tuple[Callable[[], nn.Module], Loss]]:
    return {
        "gpt": (_gpt, _text(lambda _: 16)),
        "llama": (_llama, _text(lambda _: 16)),
        "vit": (Vision, _classes),
        "vit, LayerScale": (lambda: Vision(scale=1e-6), _classes),
        "vit, small head": (lambda: Vision(head=2e-5), _classes),
        "gpt, small batches": (_gpt, _text(lambda step: 1 if step % 8 == 7 else 16)),
    }


class Recorder:
    """Keeps delayed scales of every linear's tensors for every margin. On request, measures the errors of
    casts with them."""

    def __init__(self, model: nn.Module):
        self.now: dict[tuple[str, str], Tensor] = {}
        self.pages: dict[tuple[str, str, str], Tensor] = {}
        self.found: list[Row] = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and "head" not in name:
                module.register_forward_hook(
                    lambda m, args, out, name=name: self._forward(name, m, args[0], out)
                )

    def _forward(self, name: str, module: nn.Module, x: Tensor, out: Tensor) -> None:
        self.now[name, "input"], self.now[name, "weight"] = (
            x.detach().flatten(0, -2),
            module.weight.detach().clone(),
        )
        out.register_hook(lambda grad: self.now.__setitem__((name, "gradient"), grad.flatten(0, -2)))

    def step(self, measured: bool) -> None:
        """Update all scales at the end of a step; `measured`: measure casts with them before. A page has one
        row per margin."""
        for role, form in CASES:
            for name in [name for name, seen in self.now if seen == role]:
                x, key = self.now[name, role], (name, role, form.name)
                amax = x.abs().amax()
                if key not in self.pages:
                    gradient = role == "gradient"
                    slots = [
                        state_page.SlotSettings(
                            form.max / 2.0**m, HISTORY, 1, state_page.limit_of(form.max, m, gradient)
                        )
                        for m in MARGINS
                    ]
                    self.pages[key] = state_page.new_page(len(MARGINS), HISTORY, torch.device("cpu"), slots)
                page = self.pages[key]
                snapshot = state_page.snapshot_of(page)
                if measured and amax > 0:
                    self.found.append(
                        {"role": role, "format": form.name, **self._measure(x, amax, snapshot, form)}
                    )
                self.pages[key] = state_page.next_page(page, snapshot, amax.expand(len(MARGINS)))
        self.now.clear()

    @staticmethod
    def _measure(x: Tensor, amax: Tensor, snapshot: Tensor, form: Format) -> Row:
        """For each margin: dB of the tensor, dB of its median token, and whether it saturates. `own`: dB of
        the tensor when its scale comes from its own amax."""
        whole, middle, saturated = [], [], []
        own = db(*(part.sum() for part in noise_of(x, scale_of(amax.reshape(1), form.max, 0), form)))
        for m in MARGINS:
            scale = ops.delayed_scale(snapshot, amax.reshape(1), m, form.max, m)
            noise, signal = noise_of(x, scale, form)
            whole.append(float(db(noise.sum(), signal.sum())))
            middle.append(float(db(noise, signal)[signal > 0].median()))
            saturated.append(bool(amax * scale > form.max * (1 + 1e-6)))
        return {"own": float(own), "tensor": whole, "token": middle, "saturated": saturated}


def of_models() -> Iterator[Row]:
    """A line for each model, period of training (early, late), role and format."""
    for title, (build, loss_of) in small_models().items():
        torch.manual_seed(0)
        model = build()
        recorder = Recorder(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95))
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            recorder.step(step < EARLY or step >= STEPS - LATE)
            optimizer.step()
            if step + 1 in (EARLY, STEPS):
                for role, form in CASES:
                    seen = [x for x in recorder.found if (x["role"], x["format"]) == (role, form.name)]
                    yield {
                        "part": "models",
                        "model": title,
                        "when": "early" if step < EARLY else "late",
                        **summary(seen),
                    }
                recorder.found.clear()


def summary(seen: Sequence[Row]) -> Row:
    """For each margin: the mean and the lowest ratio in dB, the percentage of tensors that lose more than 3
    dB against a scale from their own amax, and the percentage that saturates."""
    row: Row = {"role": seen[0]["role"], "format": seen[0]["format"], "tensors": len(seen)}
    row["own"] = round(statistics.fmean(x["own"] for x in seen), 2)
    for key in ("tensor", "token"):
        row[key] = rounded([statistics.fmean(x[key][m] for x in seen) for m in MARGINS])
    row["lowest"] = rounded([min(x["tensor"][m] for x in seen) for m in MARGINS])
    row["lost"] = rounded(
        [100 * statistics.fmean(x["tensor"][m] < x["own"] - 3.0 for x in seen) for m in MARGINS]
    )
    row["saturated"] = rounded([100 * statistics.fmean(x["saturated"][m] for x in seen) for m in MARGINS])
    return row


# -- timm --


SMALL = {"embed_dim": 128, "depth": 2, "num_heads": 4, "img_size": 64}
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "beit": ("beit_base_patch16_224", SMALL),
    "deit3": ("deit3_base_patch16_224", SMALL),
    "cait": ("cait_s24_224", SMALL | {"depth_token_only": 1}),
    "hiera": (
        "hiera_tiny_224",
        {"embed_dim": 128, "stages": (1, 1, 2, 1), "num_heads": 2, "img_size": (64, 64)},
    ),
    "eva": ("eva02_base_patch14_224", SMALL | {"img_size": 56, "mlp_ratio": 4.0}),
}


def of_timm(arms: Sequence[str]) -> Iterator[Row]:
    """A line for each model and arm."""
    import timm

    for title, (name, settings) in TIMM.items():
        for arm, options in ((arm, TIMM_ARMS[arm]) for arm in arms):
            torch.manual_seed(0)
            built = timm.create_model(
                name, pretrained=False, num_classes=100, drop_path_rate=0.0, **settings
            ).train()
            found = first_steps(built, options, settings["img_size"])
            yield {"part": "timm", "model": title, "name": name, "settings": settings, "arm": arm, **found}


def first_steps(exact: nn.Module, options: dict[str, Any], size: int | tuple[int, int]) -> Row:
    """Cosines between gradients in FP8 and in float32, for gradients that bf16 gets right (GOOD): the lowest
    of each step, and the number below the goal."""
    torch.compiler.reset()
    half, model = copy.deepcopy(exact), copy.deepcopy(exact)
    shape = (3, size, size) if isinstance(size, int) else (3, *size)
    pictures = torch.randn(100, *shape, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(exact.parameters(), 1e-3)
    cosines: list[list[float]] = []
    with interpreted():
        fp8 = torch.compile(model, backend="fp8", options=options)
        for step in range(TIMM_STEPS):
            generator = torch.Generator().manual_seed(step)
            y = torch.randint(100, (16,), generator=generator)
            x = pictures[y] + torch.randn(16, *shape, generator=generator)
            for other in (half, model):
                other.load_state_dict(exact.state_dict())
            gradients = []
            for run, parameters in ((exact, exact), (half, half), (fp8, model)):
                parameters.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=run is not exact):
                    loss = F.cross_entropy(run(x).float(), y)
                loss.backward()
                gradients.append([p.grad for p in parameters.parameters() if p.grad is not None])
            trusted = [(a, c) for a, b, c in zip(*gradients, strict=True) if a.any() and cosine(a, b) >= GOOD]
            cosines.append([cosine(a, c) for a, c in trusted])
            optimizer.step()
    below = sum(value < GOAL for step in cosines for value in step)
    return {
        "lowest": [round(min(step), 4) for step in cosines],
        "below": below,
        "compared": sum(map(len, cosines)),
    }


def cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


# -- results --


def tabled(rows: Sequence[Row]) -> str:
    """Markdown tables: the cost of a margin, its benefit, and the gradients of timm's models."""
    heads = [str(m) for m in SHOWN]
    parts = []
    synthetic = sorted(
        (r for r in rows if r["part"] == "casts"), key=lambda r: (r["format"] != E5M2.name, r["span"])
    )
    if synthetic:
        lines = [
            [f"{r['format']}, {r['span']} binades", *(f"{r['token'][m]:.1f}" for m in SHOWN)]
            for r in synthetic
        ]
        parts.append(table(lines, ["median token, dB by margin", *heads], markdown=True))
    seen = [r for r in rows if r["part"] == "models"]
    if seen:
        lines = []
        for role, form in CASES:
            group = [r for r in seen if (r["role"], r["format"]) == (role, form.name) and r["when"] == "late"]
            lines.append(
                [
                    f"{role}, {form.name}",
                    *(f"{statistics.fmean(r['token'][m] for r in group):.1f}" for m in SHOWN),
                ]
            )
        parts.append(table(lines, ["late in training, dB by margin", *heads], markdown=True))
        early = [
            r for r in seen if (r["role"], r["format"]) == ("gradient", E5M2.name) and r["when"] == "early"
        ]
        lines = [[r["model"], *(f"{r['lowest'][m]:.1f}" for m in SHOWN)] for r in early]
        parts.append(table(lines, ["worst gradient of steps 1 to 16, dB by margin", *heads], markdown=True))
    found = {(r["model"], r["arm"]): r for r in rows if r["part"] == "timm"}
    if found:
        lines = [[model, *(of_arm(found.get((model, arm))) for arm in TIMM_ARMS)] for model in TIMM]
        parts.append(table(lines, ["lowest cosine (gradients below 0.97)", *TIMM_ARMS], markdown=True))
    return "\n\n".join(parts) + "\n"


def of_arm(row: Row | None) -> str:
    return "" if row is None else f"{min(row['lowest']):.3f} ({row['below']} of {row['compared']})"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--arm", action="append", choices=tuple(TIMM_ARMS), help="of timm; default: all")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=PATH, help="results; what is measured again is replaced")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the tables into this page")
    given = parser.parse_args(argv)
    rows = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    about = {"date": machine.now(), **machine.commit(), "versions": machine.versions()}
    for part in [] if given.show else given.part or PARTS:
        for row in {
            "casts": casts,
            "models": of_models,
            "timm": lambda: of_timm(given.arm or tuple(TIMM_ARMS)),
        }[part]():
            print(*(row[key] for key in KEYS if key in row), file=sys.stderr, flush=True)
            rows = [old for old in rows if [old.get(key) for key in KEYS] != [row.get(key) for key in KEYS]]
            rows.append(row | about)
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(tabled(rows))
    if given.update:
        update(given.update, "margins", tabled(rows))


if __name__ == "__main__":
    main()
