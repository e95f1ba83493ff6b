"""For models on several processes. docs/distributed.md is the guide."""

from __future__ import annotations

from torch import nn

from .config.settings import integer

__all__ = ["compress_gradients", "fp8_all_gather", "fp8_hook"]


def fp8_all_gather(model: nn.Module) -> None:
    """Have FSDP2 gather in FP8 what only FP8 matmuls read. After `fully_shard`, before or after compilation.

    Called again, it only recomputes scales before the next forward: call it if you wrote into weights between
    two forwards by hand, without a backward, an optimizer step or `load_state_dict` in between.

    ShardingError, a ValueError, names the parameter and the fix where this cannot work: nothing is sharded,
    parameters are offloaded to the CPU or have an all-gather extension, `reshard_after_forward` is a number.
    With `delayed`, too, weights are scaled by their current amax; `mxfp8` and `rowwise` have `weight_tiles`.
    """
    from .features.fsdp_gather.all_gather import gather_in_fp8

    gather_in_fp8(model)


def compress_gradients(
    model: nn.Module, *, min_elements: int = 4096, error_feedback: bool = False, sqnr_every: int = 1000
) -> None:
    """Gradients cross the wire in FP8: 0.52 of bf16's bytes. Call it once, after DDP or `fully_shard`.

    E4M3 with a float32 scale for each 128 elements of a parameter. What arrives is added up in float32. Under
    DDP all ranks get the same bits; under FSDP2 each rank gets its shard. It needs no FP8 in the model.
    Infinities and NaN arrive, as NaN. It pays over PCIe and between nodes; inside an NVLink node the
    reduction hides behind the backward.

    * `min_elements`: smaller parameters, norms and biases (one dimension) go as they are.
    * `error_feedback`: DDP only. A buffer of the gradients' size keeps what a step rounds away for the next.
    * `sqnr_every`: `fp8compile.stats(model)` shows the error of each bucket in every so many calls; 0: never.

    ValueError for a model that is neither wrapped nor sharded, and for bad arguments. RuntimeError, from
    torch, if DDP has a communication hook already.
    """
    for name, value in (("min_elements", min_elements), ("sqnr_every", sqnr_every)):
        integer(name, value, 0)
    if not isinstance(model, nn.Module):
        raise TypeError(f"compress_gradients takes the model, a torch.nn.Module; got {type(model).__name__}")
    from .features.compression.compression import compress

    compress(model, min_elements, error_feedback, sqnr_every)


def fp8_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, and takes no strings
    """The communication hook of `compress_gradients`, for who registers it by hand:
    `ddp.register_comm_hook(None, fp8_hook)`, or Lightning's `DDPStrategy(ddp_comm_hook=fp8_hook)`. `state`: a
    process group, or None for the default one."""
    from .features.compression.compression import hook

    return hook(state, bucket)
