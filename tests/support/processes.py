"""Several processes on a CPU, by gloo, each under a time limit: what goes wrong among processes hangs.

Processes wait for the next work, so that loading torch and compiling for the first time are paid once. After
an error or a hang, new ones take their place.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import io
import itertools
import logging
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.support import hooks

TIME_LIMIT = 300  # seconds
SEEN = "fp8compile"
# Forked from this process, which has loaded what they need. With a GPU, autograd's threads would be missing.
START = "forkserver" if torch.cuda.is_available() else "fork"
if START == "fork":
    # Autograd starts a thread for each device in its first backward. Once fake tensors were made, a CUDA
    # build without a GPU counts eight devices, and a fork would miss their threads: so the first backward is
    # here.
    torch.ones((), requires_grad=True).backward()


def warnings() -> list[str]:
    """Filled with what the package warns of in this process from here on."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logging.getLogger(SEEN).addHandler(Keep(logging.WARNING))
    return found


# -- in a process --


def error_of(do: Callable[[], Any]) -> str:
    """What `do` raises, or "nothing"."""
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextlib.contextmanager
def _afresh(environment: dict[str, str], inductor: bool) -> Iterator[None]:
    """As the fixture `fresh` for tests: nothing is left from the work before. (DTensor's cache would hold
    meshes that equal ours and are other objects, which torch's tracing cannot always tell apart.)"""
    before, handlers = dict(os.environ), [*logging.getLogger(SEEN).handlers]
    os.environ.clear()
    os.environ.update(environment)
    hooks.forget()
    # a fork has not the threads that wait for compile workers
    alone = torch._inductor.config.patch(compile_threads=1)
    with hooks.strictly(), alone if inductor else hooks.interpreted():
        yield
    os.environ.clear()
    os.environ.update(before)
    logging.getLogger(SEEN).handlers[:] = handlers
    hooks.forget()
    _clear_sharding_prop_cache()
    gc.collect()


def _process(rank: int, ranks: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    gc.freeze()
    limit = datetime.timedelta(seconds=TIME_LIMIT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit)
    while True:
        work, args, inductor, environment = pipe.recv()
        try:
            with _afresh(environment, inductor):
                result = work(rank, *args)
                made = io.BytesIO()
                torch.save(result, made)
                del result
            dist.barrier()
            pipe.send((True, made.getvalue()))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            os._exit(1)  # which ends what the others wait for


# -- here --


@functools.cache
def _loaded() -> None:
    """Compile once, so that each process does not load what that needs."""
    with hooks.interpreted():
        model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))
        torch.compile(model, backend="fp8", dynamic=False)(torch.ones(16, 128)).sum().backward()
    hooks.forget()


class _Pool:
    """Processes that share a process group of all of them."""

    def __init__(self, ranks: int) -> None:
        _loaded()
        # a fork that frees a process group of ours waits for threads that it does not have
        _clear_sharding_prop_cache()
        context = multiprocessing.get_context(START)
        store = tempfile.mktemp(prefix="fp8compile-store-")
        pairs = [context.Pipe() for _ in range(ranks)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=_process, args=(rank, ranks, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self.processes, pairs, strict=True):
            process.start()
            theirs.close()

    def run(self, work: Callable[..., Any], args: tuple[Any, ...], inductor: bool, limit: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((work, args, inductor, dict(os.environ)))
        deadline, done, failed = time.monotonic() + limit, dict[int, bytes](), dict[int, str]()
        left = dict(zip(self.pipes, itertools.count()))
        while left and (seconds := deadline - time.monotonic()) > 0:
            for pipe in wait(list(left), seconds):
                rank = left.pop(pipe)  # type: ignore[call-overload]
                try:
                    fine, result = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    fine, result = False, f"rank {rank} ended without a word"
                (done if fine else failed)[rank] = result
        assert not left and not failed, f"{len(left)} of {len(self.pipes)} processes hang\n" + "\n".join(
            failed.values()
        )
        return [torch.load(io.BytesIO(done[rank]), weights_only=False) for rank in range(len(self.pipes))]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


_pools: dict[int, _Pool] = {}


def on_ranks(
    ranks: int,
    work: Callable[..., Any],
    *args: Any,
    inductor: bool = False,
    once: bool = False,
    limit: float = TIME_LIMIT,
) -> list[Any]:
    """`work(rank, *args)` in as many processes; what it returned on each. Graphs are interpreted, or compiled
    by Inductor. `once`: no other work has these processes, before or after. `limit`: in seconds."""
    pool = None if once else _pools.pop(ranks, None)
    pool, kept = pool or _Pool(ranks), False
    try:
        found = pool.run(work, args, inductor, limit)
        kept = not once
    finally:
        if not kept:
            pool.end()
    if kept:
        _pools[ranks] = pool
    return found
