"""Train a small GPT twice, in bf16 and with `torch.compile(model, backend="fp8")`, and compare.

    python examples/train_gpt.py                                    # 2 CPU cores with bf16: minutes
    python examples/train_gpt.py --device cuda --config gpt2-124m
    torchrun --nproc-per-node 2 examples/train_gpt.py --parallel ddp    # or fsdp, or tp: see parallel.py

The model is nanoGPT's, in vanilla modules, and knows nothing of FP8: one string in this file names the
backend. Both runs start from the same weights and see the same batches. Weights and optimizer state are
float32; the forward pass runs under bf16 autocast. The bf16 run is compiled by Inductor, the FP8 run by
`backend="fp8"` (which ends in Inductor, too). So only the precision of the matmuls differs between the two.
Text is read as bytes, so that no tokenizer is needed.

The script prints both losses, their gap, times and the FP8 report. It writes two files into `--out`:
`losses.png`, the two curves, and `gpt_fp8.pt`, the FP8-trained weights as a plain checkpoint. It loads the
checkpoint into an uncompiled model, to show that it is one. On a CPU it ends with an estimate of the gain
from FP8 on an H200.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from experts import MixtureOfExperts
from parallel import KINDS, Processes, alike, leave_it_to_the_first, start
from torch import Tensor, nn
from tqdm import tqdm

MAX_TEXT_BYTES = 16 * 2**20  # more than the demo needs; a large --data folder must not fill the memory
EVAL_BATCHES = 8
ALONE = Processes()


@dataclass(frozen=True)
class Config:
    """Shape of a GPT, and its default training steps and batch size."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int  # at least 256, one for each byte; more entries only give the shapes of GPT-2
    steps: int
    batch_size: int
    experts: int = 0  # instead of each MLP; 0: none
    top_k: int = 2  # experts that compute a token


CONFIGS = {
    "small": Config(layers=4, width=256, heads=4, context=128, vocabulary=256, steps=200, batch_size=8),
    "gpt2-124m": Config(
        layers=12, width=768, heads=12, context=1024, vocabulary=50304, steps=500, batch_size=16
    ),
}


class Attention(nn.Module):
    """Causal self-attention, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: Config):
        super().__init__()
        self.head_width = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linears with a GELU between them, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: Config):
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: Config):
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        if config.experts:
            self.mlp: nn.Module = MixtureOfExperts(
                config.experts, config.top_k, config.width, 4 * config.width, config.layers
            )
        else:
            self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """nanoGPT's model; the output head shares the token embedding's weight."""

    def __init__(self, config: Config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.lm_head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith(("proj.weight", "down.weight")):
                # GPT-2: smaller, because every residual branch adds variance
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Tokens [B, T] to logits [B, T, vocabulary]; with targets [B, T], to the mean cross-entropy in nats
        instead."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build_model(config: Config) -> GPT:
    """A GPT with float32 weights drawn from torch's global generator."""
    return GPT(config)


def build() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """The larger model and a batch, for `fp8compile explain examples/train_gpt.py:build`. bf16 weights
    replace autocast."""
    config = CONFIGS["gpt2-124m"]
    tokens = torch.zeros(config.batch_size, config.context, dtype=torch.int64)
    return build_model(config).bfloat16(), (tokens, tokens)


def build_small() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """The small model as its training begins, and the first batch, for `fp8compile tune
    examples/train_gpt.py:build_small`."""
    config = CONFIGS["small"]
    torch.manual_seed(0)
    model = build_model(config)
    text, _ = split_text(load_text(), config.context)
    return model, next(batches(text, config, config.batch_size, 0, "cpu"))


def load_text(path: Path | str | None = None) -> Tensor:
    """The bytes of a file, or of all UTF-8 files under a folder, as a uint8 vector of at most MAX_TEXT_BYTES.

    Without a path: the Python standard library's own source files, tests left out. Files are put in a fixed
    random order, so that the end of the text, which is held out for validation, resembles the rest. Raises
    OSError if the path cannot be read and ValueError if there is no text in it.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "dist-packages", "test", "tests"}
        skipped |= {"idlelib", "encodings", "lib2to3", "pydoc_data"}
        files = [f for f in root.rglob("*.py") if not skipped & set(f.relative_to(root).parts)]
        from_folder = True
    else:
        root = Path(path)
        files = [root]
        if from_folder := root.is_dir():
            files = [f for f in root.rglob("[!.]*") if f.is_file() and ".git" not in f.parts]
        elif root.exists() and not root.is_file():
            raise ValueError(f"{root} is neither a file nor a folder")
    files.sort()
    random.Random(0).shuffle(files)
    text = bytearray()
    for file in files:
        if len(text) >= MAX_TEXT_BYTES:
            break
        with file.open("rb") as stream:
            content = stream.read(MAX_TEXT_BYTES)
        if from_folder and not _is_utf8(content):
            # a folder may contain images and other binary files; a file given by name is not checked
            continue
        text += content
    if not text:
        raise ValueError(f"no text in {root}")
    return torch.frombuffer(text[:MAX_TEXT_BYTES], dtype=torch.uint8)


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def split_text(text: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """(training, validation) parts, nine tenths and one tenth. ValueError if one is under a context."""
    boundary = len(text) * 9 // 10
    if len(text) - boundary <= context:
        raise ValueError(
            f"{len(text)} bytes of text are too few: a context of {context} needs at least "
            f"{10 * (context + 1)}"
        )
    return text[:boundary], text[boundary:]


def windows(text: Tensor, starts: Tensor, context: int, device: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both [len(starts), context] int64: targets are the inputs' next bytes."""
    chunk = text[starts[:, None] + torch.arange(context + 1)].long().to(device)
    return chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()


def batches(
    text: Tensor, config: Config, batch_size: int, seed: int, device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields random batches without end; they depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - config.context, (batch_size,), generator=generator)
        yield windows(text, starts, config.context, device)


@torch.no_grad()
def evaluate(
    model: nn.Module, text: Tensor, config: Config, batch_size: int, device: str, processes: Processes = ALONE
) -> float:
    """Mean loss over EVAL_BATCHES batches spread evenly over the text."""
    was_training = model.training
    model.eval()
    starts = torch.linspace(
        0, len(text) - config.context - 1, EVAL_BATCHES * batch_size, dtype=torch.float64
    ).long()
    losses = []
    for part in starts.split(batch_size):
        inputs, targets = processes.part(windows(text, part, config.context, device))
        with torch.autocast(device, dtype=torch.bfloat16):
            losses.append(model(inputs, targets))
    model.train(was_training)
    return processes.mean(torch.stack(losses).mean()).item()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first tenth of the steps, then a cosine down to a tenth of the peak."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@dataclass
class Run:
    """The results of one training run. Losses are in nats per byte, times in seconds."""

    name: str
    model: nn.Module
    train_losses: list[float]
    val_losses: list[tuple[int, float]]  # (steps done, loss)
    compile_seconds: float  # the first step and the first evaluation, which are almost only compilation
    train_seconds: float  # the other steps
    total_seconds: float
    tokens_per_second: float
    peak_bytes: int | None  # of device memory; None on a CPU

    @property
    def val_loss(self) -> float:
        return self.val_losses[-1][1]


def train(
    config: Config,
    text: Tensor,
    *,
    backend: str | Callable[..., Any] | None = None,
    options: dict[str, Any] | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    lr: float = 5e-4,
    seed: int = 0,
    device: str = "cpu",
    evaluations: int = 5,
    name: str = "train",
    progress: bool = False,
    processes: Processes = ALONE,
) -> Run:
    """Train a fresh GPT for `steps` under bf16 autocast; float32 weights, AdamW, gradients clipped to norm 1.

    `backend` and `options` go to torch.compile; None trains eagerly. Weights and batches depend on the seed
    alone, so runs with one seed differ only in their backend. The validation loss is computed `evaluations`
    times, the last time after the last step. With several `processes`, all of them call this with the same
    arguments and return the same losses.
    """
    steps, batch_size = steps or config.steps, batch_size or config.batch_size
    train_text, val_text = split_text(text, config.context)
    torch.manual_seed(seed)
    model = build_model(config).to(device)
    called, compiled = processes.distribute(model, device)
    for module in compiled if backend is not None else ():
        module.compile(backend=backend, options=options, dynamic=False)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": part, "weight_decay": 0.1} for part in alike(decayed)]
    groups += [{"params": part, "weight_decay": 0.0} for part in alike(others)]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses: list[Tensor] = []
    val_losses: list[tuple[int, float]] = []
    eval_steps = {steps * (i + 1) // evaluations for i in range(evaluations)}
    compile_seconds = train_seconds = 0.0
    started = time.perf_counter()
    label = f"{name}: compiling" if backend else name
    interval = 0.2 if sys.stderr.isatty() else 10.0
    hidden = not (progress and processes.first)
    bar = tqdm(total=steps, desc=label, disable=hidden, unit="step", mininterval=interval)
    source = batches(train_text, config, batch_size, seed, device)
    step_started = started
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, lr)
        inputs, targets = processes.part(next(source))
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = called(inputs, targets)
        loss.backward()
        processes.clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(processes.mean(loss.detach()))
        done = step + 1
        if done == 1 or done in eval_steps:  # the time is read here, so wait until the device has finished
            if on_gpu:
                torch.cuda.synchronize()
            now = time.perf_counter()
            if done == 1:
                compile_seconds += now - step_started
                bar.set_description(name, refresh=False)
            else:
                train_seconds += now - step_started
            if done in eval_steps:
                first = not val_losses
                val_losses.append((done, evaluate(called, val_text, config, batch_size, device, processes)))
                compile_seconds += time.perf_counter() - now if first else 0.0
            step_started = time.perf_counter()
        if progress and (done % 10 == 0 or done == steps):
            val_loss = f"{val_losses[-1][1]:.3f}" if val_losses else "-"
            bar.set_postfix(loss=f"{losses[-1].item():.3f}", val=val_loss, refresh=False)
        bar.update()
    bar.close()
    return Run(
        name=name,
        model=model,
        train_losses=torch.stack(losses).tolist(),
        val_losses=val_losses,
        compile_seconds=compile_seconds,
        train_seconds=train_seconds,
        total_seconds=time.perf_counter() - started,
        tokens_per_second=(steps - 1) * batch_size * config.context / train_seconds
        if train_seconds
        else float("nan"),
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
    )


def reload(checkpoint: Path, config: Config, device: str) -> GPT:
    """A vanilla, uncompiled GPT with the checkpoint's weights; RuntimeError if keys or shapes differ."""
    model = build_model(config)
    model.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True), strict=True)
    return model.to(device)


def plot(runs: list[Run], path: Path) -> None:
    """Write the runs' training losses (smoothed) and validation losses as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for run, color, style in zip(runs, ("tab:blue", "tab:orange"), ("-", "--"), strict=True):
        smooth, average = [], run.train_losses[0]
        for loss in run.train_losses:
            average += 0.3 * (loss - average)
            smooth.append(average)
        axes.plot(
            range(1, len(smooth) + 1),
            smooth,
            style,
            color=color,
            label=f"{run.name}, training (moving average)",
        )
        axes.plot(*zip(*run.val_losses, strict=True), "o" if style == "-" else "x", color=color, markersize=8,
                  label=f"{run.name}, validation: {run.val_loss:.4f} at the end")  # fmt: skip
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="The same GPT and batches, bf16 and FP8")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def fp8_report(model: nn.Module) -> str:
    """The report of the compiler: its decision for each matmul of the model."""
    import fp8compile  # training does not need this import: torch finds the backend by its name

    return str(fp8compile.report(model))


def print_estimate(name: str, batch_size: int, options: dict[str, Any]) -> None:
    """Print the estimated time of a training step on an H200, in bf16 and in FP8. Trains nothing."""
    import fp8compile

    config = CONFIGS[name]
    with torch.device("meta"):
        model, tokens = build_model(config), torch.zeros(batch_size, config.context, dtype=torch.int64)
    try:
        found = fp8compile.estimate(
            model, tokens, tokens, device="h200", options=options, extrapolate=config.layers > 4
        )
    except fp8compile.Fp8CompileError as error:
        print(f"  {name}: {error}")
        return
    print(
        f"  {name}, {batch_size * config.context} tokens: {found.summary()}\n    {found.report.summary()}",
        flush=True,
    )


def print_comparison(bf16: Run, fp8: Run) -> None:
    print(f"\n{'':22}{bf16.name:>12}{fp8.name:>12}")
    rows: list[tuple[str, str, Callable[[Run], float]]] = [
        ("final training loss", ".4f", lambda run: sum(run.train_losses[-10:]) / len(run.train_losses[-10:])),
        ("final validation loss", ".4f", lambda run: run.val_loss),
        ("tokens/s", ",.0f", lambda run: run.tokens_per_second),
        ("compilation, s", ".1f", lambda run: run.compile_seconds),
        ("training, s", ".1f", lambda run: run.train_seconds),
        ("total, s", ".1f", lambda run: run.total_seconds),
    ]
    if bf16.peak_bytes is not None:
        rows.append(("peak memory, GiB", ".2f", lambda run: (run.peak_bytes or 0) / 2**30))
    for label, spec, value in rows:
        print(f"{label:22}{format(value(bf16), spec):>12}{format(value(fp8), spec):>12}")
    print(f"gap of the validation losses: {100 * (fp8.val_loss - bf16.val_loss) / bf16.val_loss:+.3f}%")


class OneLineParser(argparse.ArgumentParser):
    """argparse without the usage text in front of each error. One process says it for all."""

    def error(self, message: str) -> NoReturn:
        leave_it_to_the_first(2)
        self.exit(2, f"{self.prog}: error: {message}\n")


def whole_number(value: str, least: int = 0) -> int:
    if not (value.isascii() and value.isdecimal() and least <= int(value) < 2**31):
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number from {least} to 2**31 - 1")
    return int(value)


def positive_int(value: str) -> int:
    return whole_number(value, least=1)


def positive_float(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{value!r} is not a positive number")
    return number


def parse_arguments(argv: list[str] | None = None) -> tuple[OneLineParser, argparse.Namespace]:
    parser = OneLineParser(
        description="Train a small GPT in bf16 and in FP8 and compare.", allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--config", choices=tuple(CONFIGS), default="small", help="size of the model (default: small)"
    )
    parser.add_argument(
        "--steps", type=positive_int, help="training steps of each run (default: the configuration's)"
    )
    parser.add_argument(
        "--batch-size", type=positive_int, help="sequences a step (default: the configuration's)"
    )
    parser.add_argument("--lr", type=positive_float, default=5e-4, help="peak learning rate (default: 5e-4)")
    parser.add_argument(
        "--seed", type=whole_number, default=0, help="of the weights and the batches (default: 0)"
    )
    recipes = ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")
    parser.add_argument(
        "--recipe", choices=recipes, default="delayed", help="how scales are found (default: delayed)"
    )
    formats = "hybrid: gradients are E5M2 (default: the recipe's)"
    parser.add_argument("--fp8-format", choices=("hybrid", "e4m3"), help=formats)
    parser.add_argument(
        "--experts", type=whole_number, default=0, help="experts instead of each MLP (default: 0, none)"
    )
    parser.add_argument(
        "--top-k", type=positive_int, default=2, help="experts that compute a token (default: 2)"
    )
    shared = "how the processes that torchrun started share the work (default: there is one)"
    parser.add_argument("--parallel", choices=KINDS, help=shared)
    parser.add_argument(
        "--data", type=Path, help="a text file or a folder (default: the standard library's sources)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for the plot and the checkpoint (default: out)"
    )
    return parser, parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    started = time.perf_counter()
    parser, args = parse_arguments(argv)
    if args.experts and args.top_k > args.experts:
        parser.error(f"--top-k: at most {args.experts}, the number of experts")
    if args.experts and args.parallel == "tp":
        parser.error("--experts: not with --parallel tp, which divides MLPs")
    config = replace(CONFIGS[args.config], experts=args.experts, top_k=args.top_k)
    steps, batch_size = args.steps or config.steps, args.batch_size or config.batch_size
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    try:
        text = load_text(args.data)
        _, val_text = split_text(text, config.context)
    except OSError as error:
        parser.error(f"--data: {error.filename}: {error.strerror}")
    except ValueError as error:
        parser.error(f"--data: {error}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error.filename}: {error.strerror}")
    processes = start(
        args.parallel, heads=config.heads, batch_size=batch_size, device=args.device, error=parser.error
    )
    if args.device == "cpu":
        # FP8 values are exact in bf16: this lets their float32 matmuls use the CPU's bf16 instructions.
        torch.set_float32_matmul_precision("medium")

    parameters = sum(p.numel() for p in build_model(config).parameters())
    if processes.first:
        print(
            f"GPT {args.config}: {config.layers} layers, {config.width} wide, context {config.context}, "
            f"{f'{config.experts} experts, ' if config.experts else ''}"
            f"{parameters / 1e6:.1f}M parameters\n"
            f"{len(text):,} bytes of text; "
            f"{steps} steps of {batch_size * config.context} tokens on {args.device}\n"
            f"both runs: float32 weights, bf16 autocast, seed {args.seed}{processes.note}; "
            f"the FP8 run: {args.recipe} scaling",
            flush=True,
        )
    settings = dict(
        steps=steps, batch_size=batch_size, lr=args.lr, seed=args.seed, device=args.device, progress=True
    )
    settings["processes"] = processes
    bf16 = train(config, text, backend="inductor", name="bf16", **settings)
    fp8_options = {"recipe": args.recipe, **({"fp8_format": args.fp8_format} if args.fp8_format else {})}
    fp8 = train(config, text, backend="fp8", options=fp8_options, name="fp8", **settings)
    weights = processes.state_dict(fp8.model)
    if processes.first:
        print_comparison(bf16, fp8)
        print(f"\n{fp8_report(fp8.model)}\n")
        plot([bf16, fp8], args.out / "losses.png")
        checkpoint = args.out / "gpt_fp8.pt"
        torch.save(weights, checkpoint)
        reloaded = evaluate(
            reload(checkpoint, config, args.device), val_text, config, batch_size, args.device
        )
        print(f"loss curves: {args.out / 'losses.png'}")
        print(
            f"{checkpoint}, loaded with strict=True into an uncompiled model: "
            f"validation loss {reloaded:.4f} (compiled: {fp8.val_loss:.4f})"
        )
        if args.device == "cpu":
            print(
                "\nFP8 on a CPU is an emulation, and slower: values are rounded to FP8 and multiplied in a "
                "wider format.\nOn a GPU with FP8 tensor cores large matmuls gain. A step on an H200, "
                "estimated and not measured:",
                flush=True,
            )
            sizes = {args.config: batch_size}
            sizes.setdefault("gpt2-124m", CONFIGS["gpt2-124m"].batch_size)
            for name, sequences in sizes.items():
                print_estimate(name, sequences, fp8_options)
        print(f"everything took {time.perf_counter() - started:.0f} s")
    processes.finish()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
