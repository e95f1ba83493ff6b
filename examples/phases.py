"""Train one GPT in bf16, then in FP8, then in bf16 again, in one process, and draw the loss.

    python examples/phases.py                        # 2 CPU cores, under 5 minutes; writes out/phases.png

The schedule is part of the policy that the backend gets; the training loop does not know of it. A second run,
in bf16 throughout, starts from the same weights and sees the same batches. At each switch, weights and
optimizer state are compared bit by bit, before and after the first forward and backward in the other
precision: the switch must not change them.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
import train_gpt
from torch import Tensor, nn
from tqdm import tqdm


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A hash of every bit of the weights and of the optimizer's state."""
    digest = hashlib.sha256()
    state = [x for entry in optimizer.state.values() for x in entry.values() if isinstance(x, Tensor)]
    for tensor in (*model.state_dict().values(), *state):
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run(
    config: train_gpt.Config, text: Tensor, steps: int, device: str, schedule: dict[str, int] | None
) -> tuple[list[float], dict[int, tuple[str, str]]]:
    """Training losses; and, for each step at which the phase changes, the fingerprints before and after its
    forward and backward."""
    torch.manual_seed(0)
    model = train_gpt.build_model(config).to(device)
    name = "bf16" if schedule is None else "bf16, fp8, bf16"
    if schedule is None:
        model.compile(backend="inductor", dynamic=False)
    else:
        model.compile(backend="fp8", dynamic=False, options={"policy": {"schedule": schedule}})
    switches = set((schedule or {}).values())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.1)
    losses, compared = [], {}
    train_text, _ = train_gpt.split_text(text, config.context)
    batches = train_gpt.batches(train_text, config, config.batch_size, 0, device)
    for step in tqdm(range(steps), desc=name, mininterval=5.0):
        before = fingerprint(model, optimizer) if step in switches else ""
        for group in optimizer.param_groups:
            group["lr"] = train_gpt.learning_rate(step, steps, 5e-4)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(*next(batches))
        loss.backward()
        if step in switches:
            compared[step] = (before, fingerprint(model, optimizer))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses, compared


def plot(plain: list[float], scheduled: list[float], warmup: int, cooldown: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1))
    steps = range(1, len(plain) + 1)
    above.plot(steps, plain, color="tab:blue", label="bf16 throughout")
    above.plot(steps, scheduled, "--", color="tab:orange", label="bf16, FP8, bf16")
    below.plot(steps, [100 * (b - a) / a for a, b in zip(plain, scheduled, strict=True)], color="tab:gray")
    for axes in (above, below):
        axes.axvspan(
            warmup + 0.5,
            cooldown + 0.5,
            color="tab:orange",
            alpha=0.12,
            label="FP8" if axes is above else None,
        )
        axes.grid(alpha=0.3)
    above.set(ylabel="training loss (nats a byte)", title="One run in three phases, without a relaunch")
    below.set(xlabel="step", ylabel="gap, %")
    above.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=train_gpt.positive_int, default=150)
    parser.add_argument("--warmup-steps", type=train_gpt.whole_number, default=40)
    parser.add_argument("--cooldown-at", type=train_gpt.positive_int, default=110)
    parser.add_argument("--out", type=Path, default=Path("out/phases.png"), help="the picture")
    args = parser.parse_args()
    if not args.warmup_steps < args.cooldown_at < args.steps:
        parser.error("--warmup-steps, --cooldown-at and --steps have to grow in this order")
    if args.device == "cpu":
        torch.set_float32_matmul_precision("medium")  # FP8 values are exact in bf16
    config, text = train_gpt.CONFIGS["small"], train_gpt.load_text()
    schedule = {"warmup_steps": args.warmup_steps, "cooldown_at": args.cooldown_at}
    plain, _ = run(config, text, args.steps, args.device, None)
    scheduled, compared = run(config, text, args.steps, args.device, schedule)
    for step, (before, after) in sorted(compared.items()):
        same = "bitwise the same" if before == after else "CHANGED"
        print(f"step {step}: weights and optimizer state across the switch: {same}")
    for name, start, stop in (
        ("bf16", 0, args.warmup_steps),
        ("FP8", args.warmup_steps, args.cooldown_at),
        ("bf16", args.cooldown_at, args.steps),
    ):
        a, b = (sum(losses[start:stop]) / (stop - start) for losses in (plain, scheduled))
        print(
            f"steps {start + 1}-{stop} in {name}: mean loss {b:.4f}, all in bf16 {a:.4f} "
            f"({100 * (b - a) / a:+.2f}%)"
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    plot(plain, scheduled, args.warmup_steps, args.cooldown_at, args.out)
    print(f"loss curves: {args.out}")
    if any(before != after for before, after in compared.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
