"""Several processes on a CPU, by gloo, each under a time limit: what goes wrong among processes hangs."""

from __future__ import annotations

import contextlib
import datetime
import logging
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fp8compile.runtime.interpreter import Eager
from tests.support.harness import interpreted

TIME_LIMIT = 300  # seconds
# Processes are forked from one that has imported these. It has no threads, and has computed nothing.
IMPORTED = [
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
]
IMPORTED += ["torch.distributed.tensor.parallel", "fp8compile.backend", "fp8compile.distributed", "tests.support.harness"]


@contextlib.contextmanager
def sent(targets: tuple[Any, ...]) -> Iterator[list[tuple[torch.dtype, int]]]:
    """The dtype and bytes of each tensor that these collectives of compiled graphs send."""
    found: list[tuple[torch.dtype, int]] = []
    stock = Eager.call_function

    def call(self: Eager, target: Any, args: tuple, kwargs: dict) -> Any:
        if target in targets:
            found.append((args[0].dtype, args[0].nbytes))
        return stock(self, target, args, kwargs)

    with mock.patch.object(Eager, "call_function", call):
        yield found


def warnings() -> list[str]:
    """Filled with what the package warns of in this process from here on."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logging.getLogger("fp8compile").addHandler(Keep(logging.WARNING))
    return found


def _process(
    work: Callable[..., Any],
    rank: int,
    ranks: int,
    folder: str,
    args: tuple[Any, ...],
    inductor: bool,
    environment: dict[str, str],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    try:
        torch.set_num_threads(1)
        limit = datetime.timedelta(seconds=TIME_LIMIT)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=limit)
        with contextlib.nullcontext() if inductor else interpreted():
            result = work(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        result = traceback.format_exc()
    torch.save(result, f"{folder}/{rank}")


def on_ranks(ranks: int, folder: Path, work: Callable[..., Any], *args: Any, inductor: bool = False) -> list[Any]:
    """`work(rank, *args)` in as many processes; what it returned on each. Graphs are interpreted, or compiled by Inductor.
    `folder` is empty before."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    given = [(work, rank, ranks, str(folder), args, inductor, dict(os.environ)) for rank in range(ranks)]
    processes = [context.Process(target=_process, args=one) for one in given]
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=TIME_LIMIT)
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(1.0, (deadline - datetime.datetime.now()).total_seconds()))
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    done = {rank: torch.load(folder / str(rank)) for rank in range(ranks) if (folder / str(rank)).exists()}
    failed = "\n".join(result for result in done.values() if isinstance(result, str))
    ended = [process.exitcode for process in processes]
    assert not late and not failed and len(done) == ranks, f"{len(late)} of {ranks} processes hang; status {ended}\n{failed}"
    return [done[rank] for rank in range(ranks)]
