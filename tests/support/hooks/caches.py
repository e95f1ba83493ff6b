"""Warm starts, and other passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from .base import Patched, noting


class Enough(BaseException):
    """Ends a compilation of which a test has seen enough."""


@contextlib.contextmanager
def cache_keys() -> Iterator[list[str]]:
    """The keys that AOTAutograd's cache is asked for. Compilations end there or at our passes: `Enough`."""
    from torch._functorch._aot_autograd import autograd_cache

    from fp8compile.runtime.halves import Halves

    made, keys = autograd_cache.autograd_cache_key, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        keys.append(made(*args, **kwargs)[0])
        raise Enough

    with (
        mock.patch.object(Halves, "joint_pass", mock.Mock(side_effect=Enough)),
        mock.patch.object(autograd_cache, "autograd_cache_key", noted),
    ):
        yield keys


def other_facts() -> dict[str, Patched]:
    """Contexts in which our passes read another fact of the process."""
    from fp8compile.devices import catalog

    return {
        "sources": mock.patch("fp8compile.compat.inductor.sources_hash", lambda: "another"),
        "encoding": mock.patch("fp8compile.devices.formats.fnuz", lambda: True),
        "description": mock.patch("fp8compile.devices.catalog.of", lambda _: catalog.find("h100")),
    }


def keys_of_passes() -> Patched:
    """The cache keys of our graph passes that compilations make inside."""
    from fp8compile import compat

    return noting(compat.inductor.GraphPass, "__init__", lambda _, made, *__, **___: made.uuid())


def cached_by_aotautograd() -> Patched:
    """Whether AOTAutograd's cache is on where a half is compiled, for each half."""
    from fp8compile.runtime.halves import Halves

    return noting(Halves, "compile", lambda *_, **__: torch._functorch.config.enable_autograd_cache)


def forwards_of(parameter: Any) -> list[str]:
    """What an export asks for: the forward matmuls of a parameter."""
    from fp8compile.features.export import forwards

    return [str(known) for known in forwards.of(parameter)]


# -- other passes --


def saving_small_tensors(least: int = 0) -> Patched:
    """Inside, `save="fp8"` keeps tensors of any size in FP8, or of at least so many bytes."""
    return mock.patch("fp8compile.features.save.save.LEAST", least)


@contextlib.contextmanager
def generated() -> Iterator[tuple[list[Any], list[dict[str, Any]]]]:
    """The kernels that are generated inside, and the arguments of each launch by name."""
    from fp8compile import compat
    from fp8compile.codegen import launch

    with (
        noting(launch.Launcher, "__call__", lambda _, launcher, before, kernel, *rest: kernel) as kernels,
        noting(
            compat.triton, "launch", lambda _, emit, function, grids, given, *rest, **how: given
        ) as arguments,
    ):
        yield kernels, arguments


@contextlib.contextmanager
def failing_passes(when: Callable[[], bool]) -> Iterator[None]:
    """Inside, our passes raise `ZeroDivisionError("ours")` for a graph at which `when()`."""
    from fp8compile import compilation

    run = compilation.run_joint

    def fail(*args: Any) -> Any:
        if when():
            raise ZeroDivisionError("ours")
        return run(*args)

    with mock.patch.object(compilation, "run_joint", fail):
        yield
