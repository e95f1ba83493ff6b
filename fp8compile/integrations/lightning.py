"""PyTorch Lightning: `Trainer(callbacks=[FP8Callback(policy="fast")])`. Fabric needs none: docs/hosts.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import OptionError, near
from .requirement import host
from .training import Training

with host("lightning", "2.6"):
    from lightning.pytorch import Callback


class FP8Callback(Callback):
    """Compiles the networks of the LightningModule in place, and adds to what it logs.

    `network` names an attribute, "net" or "net.encoder"; without it, every child with parameters is compiled,
    and each module of a child that is a list. Nobody calls the LightningModule itself, so it is not compiled.
    Names in checkpoints do not change. `policy`, `schedule` and further keywords are the options of the
    backend; they are checked here: raises OptionError.

    Each `log_every_n_steps` of the trainer, fp8/share, fp8/matmuls and fp8/ROLE/amax are logged
    (`Training.numbers`). `measure_every=100` measures each 100th step, which is slower, and adds overflows,
    underflows and SQNR. A run that resumes goes on at its step of the schedule.

    If nothing is FP8 after the first step: one line, or a StrictError with `strict=True`.
    """

    def __init__(
        self,
        policy: Any = None,
        schedule: Any = None,
        *,
        network: str | None = None,
        measure_every: int | None = None,
        **options: Any,
    ) -> None:
        self.network = network
        self._logged = 0
        self._training = Training(policy, schedule, measure_every, options)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._training.compile(self._networks(pl_module))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Also what `configure_model` has made, which is called after `setup`."""
        self._training.compile(self._networks(pl_module, made=True))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._training.begin(pl_module, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._training.stepped()
        step = trainer.global_step
        if step != self._logged and step % trainer.log_every_n_steps == 0:  # accumulated batches share steps
            self._logged = step
            pl_module.log_dict(self._training.numbers())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._training.end()

    def _networks(self, pl_module: Any, made: bool = False) -> Iterator[nn.Module]:
        if self.network is None:
            yield from _callable(pl_module)
            return
        try:
            found = pl_module.get_submodule(self.network)
        except AttributeError:
            found = None
        if found is None and made:
            close = near(self.network, [name for name, _ in pl_module.named_modules() if name])
            wanted = "the name of a module of the LightningModule"
            raise OptionError.of("network", self.network, wanted, close)
        yield from [] if found is None else [found]


def _callable(module: nn.Module) -> Iterator[nn.Module]:
    """The children with parameters; of a list or dict of modules, which nobody calls, its modules."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _callable(child)
        elif next(child.parameters(), None) is not None:
            yield child
