"""Send the weights of a model that trains in FP8 to a server in another process, through shared memory.

    python examples/serve.py                         # a CPU; under a minute

After each step the trainer hands over the tensors of `served_weights` in shared memory, with their digests.
The server needs nothing of fp8compile: it computes the digests itself, takes all new weights at once, and
tells which it serves. One tensor at a time is in shared memory.
"""

from __future__ import annotations

import hashlib
from multiprocessing.connection import Connection

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

STEPS = 3


# -- the server: a process of its own --


def digest(tensor: Tensor) -> str:
    """As `fp8compile.digest`: of dtype, shape and bytes."""
    kind = str(tensor.dtype).removeprefix("torch.")
    found = hashlib.sha256(f"{kind} {list(tensor.shape)}\n".encode())
    found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def serve(pipe: Connection) -> None:
    """Gets (name, tensor, digest) of each new weight; None when these are all, and answers what it serves."""
    weights: dict[str, Tensor] = {}
    new: dict[str, Tensor] = {}
    while (message := pipe.recv()) != "stop":
        if message is None:
            weights, new = new, {}  # here a server swaps: no request sees some old and some new weights
            pipe.send({name: digest(tensor) for name, tensor in weights.items()})
            continue
        name, shared, expected = message
        new[name] = shared.clone()  # the sender uses the memory again
        pipe.send(digest(new[name]) == expected)


# -- the trainer --


def send(model: nn.Module, pipe: Connection) -> dict[str, str]:
    """Hand over all weights. Returns their digests, by name."""
    import fp8compile

    digests = {}
    for name, tensor in fp8compile.served_weights(model):
        digests[name] = fp8compile.digest(tensor)
        shared = torch.empty_like(tensor, device="cpu").share_memory_()
        pipe.send((name, shared.copy_(tensor), digests[name]))
        if not pipe.recv():
            raise RuntimeError(f"{name} has not arrived as it was sent")
    pipe.send(None)
    return digests


def main() -> None:
    ours, theirs = mp.Pipe()
    server = mp.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).bfloat16()
    compiled = torch.compile(model, backend="fp8", options={"recipe": "blockwise"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x = torch.randn(128, 256, dtype=torch.bfloat16)
        nn.functional.mse_loss(compiled(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
        sent = send(model, ours)
        same = "all as sent" if ours.recv() == sent else "NOT as sent"
        print(f"step {step}: the server has {len(sent)} tensors, {same}; 0.weight {sent['0.weight'][:12]}")
    ours.send("stop")
    server.join()


if __name__ == "__main__":
    main()
