"""AdamW with states of three bytes per parameter, in place of torch.optim.AdamW."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..devices.support import casts_to_e4m3
from ..extension import CastInStep, features
from ..logs import get_logger, say_once
from .states import MASTERS, State, fresh, from_blocks, is_small, local, packed, to_blocks, vanilla
from .update import cast_into, compiled, factors, launch_update, launches, update, update_small

logger = get_logger(__name__)

_OURS = ("master", "fp8_weights", "_compiled", "_stepped")
Asked = Mapping[int, CastInStep]  # by parameter (id)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class AdamW(Optimizer):
    """torch.optim.AdamW with 3.06 bytes of states per parameter instead of 8. Its `state_dict()` is torch's.

    The first moment is kept in E4M3 and the second in FP16, in blocks of 128 elements with a power-of-two
    scale each; the arithmetic is float32. Parameters of fewer than 4,096 elements keep float32 moments. No
    step waits for the device.

    * `params`, `lr` (may be a tensor), `betas`, `eps`, `weight_decay`, `maximize`: as torch.optim.AdamW's.
    * `master`: what keeps the digits that a 16-bit weight loses in a step. None: nothing. "bf16+remainder":
      the lower half of the float32 master weight, 2 bytes per parameter; exact, for bf16 weights. "float32":
      a float32 copy, 4 bytes. Weights in float32 need none.
    * `fp8_weights`: the step also writes the FP8 weights of the next forward, for models that are compiled
      with `backend="fp8"`, `cache_weights=True` and `power_of_2_scale=True`, of one scale a weight. They are
      those that a forward would cast. After a write to `weight.data` after a step, call
      `fp8compile.refresh_weight_cache()`. Where no weight can be written, it has no effect, and warns once.
    * `compiled`: False runs the update as plain torch operators, slower, without waiting for a compilation.
      So do NVIDIA's GPUs before Ada (A100, RTX 30), for which Triton has no E4M3.
    * `foreach`, `fused`: are accepted and have no effect; the update is always one kernel per parameter.

    `state_dict()` has float32 moments under torch.optim.AdamW's keys, and a float32 `master_param` if there
    is a master. torch.optim.AdamW loads it, and this class loads torch.optim.AdamW's. While it is made, 8
    bytes per parameter are allocated.

    Raises ValueError for values out of range, for amsgrad, capturable or differentiable, for a parameter that
    is not float32, bf16 or FP16, and for a checkpoint of another optimizer or other shapes, which leaves
    everything as it was; RuntimeError for sparse gradients, before any parameter is updated.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master: str | None = None,
        fp8_weights: bool = False,
        compiled: bool = True,
    ) -> None:
        if master not in MASTERS:
            raise ValueError(f"master must be None, 'bf16+remainder' or 'float32'; got {master!r}")
        self.master, self.fp8_weights, self._compiled, self._stepped = master, fp8_weights, compiled, False
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": True,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. ValueError for what this optimizer cannot do; nothing is added then."""
        before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1], self.master)
        except ValueError:
            del self.param_groups[before:]
            raise

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters that have gradients. Returns what `closure` returns, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        for index, (_, parameters) in enumerate(work):
            for p in parameters:
                if p.grad.layout != torch.strided:
                    raise RuntimeError(
                        f"AdamW does not support sparse gradients: a parameter {list(p.shape)} of group "
                        f"{index} has one. Use torch.optim.SparseAdam for it, or "
                        "sparse=False in its embedding"
                    )
        asked = self._asked(work) if self.fp8_weights else {}
        written: list[Tensor] = []
        for group, parameters in work:
            by_step = defaultdict(list)
            for p in parameters:
                state = self.state[p] = self.state[p] or fresh(p, self.master)
                state["step"] += 1
                by_step[int(state["step"]), local(p).device].append((p, state))
            for (step, _), members in by_step.items():
                written += self._update(group, step, members, asked)
        for feature in features() if written else ():
            feature.step_wrote(self, written)
        return loss

    def _asked(self, work: Sequence[tuple[dict[str, Any], list[Tensor]]]) -> Asked:
        """The casts that are wanted of this step."""
        why, asked = None, []
        if getattr(type(self).step, "__wrapped__", None) is not _STEP:  # torch wraps it once, for its hooks
            why = f"{type(self).__name__} has its own step, which may write to weights after the update"
        elif not (can := self._castable(work)) and any(parameters for _, parameters in work):
            why = "the update casts with compiled=True, an eps from 1e-12 on and a learning rate that is a "
            why += "number or on the CPU, on AMD's GPUs and on NVIDIA's since Ada"
        else:
            asked = [its for feature in features() if (its := feature.wanted_casts(self, can)) is not None]
            if not asked and self._stepped:  # the first step may be torch.distributed.checkpoint's
                why = "no compiled graph has FP8 weights that a step can write: compile with "
                why += "options={'cache_weights': True, 'power_of_2_scale': True}"
        if why is not None:
            say_once(logger, logging.WARNING, f"fp8: AdamW's fp8_weights has no effect: {why}")
        self._stepped = True
        return {key: cast for its in asked for key, cast in its.items()}

    def _castable(self, work: Sequence[tuple[dict[str, Any], list[Tensor]]]) -> frozenset[int]:
        """The parameters (ids) that their update can cast, too."""
        found: list[int] = []
        for group, parameters in work:
            devices = {local(p).device for p in parameters}
            casts = {device for device in devices if self._casts(group, device)}
            found += [id(p) for p in parameters if local(p).device in casts]
        return frozenset(found)

    def _casts(self, group: dict[str, Any], device: torch.device) -> bool:
        """True if the update of this group's parameters on a device can cast them, too."""
        return device.type != "cuda" or (self._compiled and casts_to_e4m3(device) and launches(group))

    def _update(
        self,
        group: dict[str, Any],
        step: int,
        members: list[tuple[Tensor, State]],
        asked: Asked,
    ) -> list[Tensor]:
        """Returns the parameters that were cast, too."""
        written = []
        by = factors(group, step)
        compiles = self._compiled and casts_to_e4m3(local(members[0][0]).device)
        for p, state in members:
            weight = local(p)
            if is_small(p) or not weight.numel():
                continue
            kept = state.get("remainder", state.get("master"))
            rows = to_blocks(weight).data  # without the view's base, whose shape Dynamo would guard
            moments = [state[key] for key in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")]
            given = (rows, to_blocks(local(p.grad)).data, *moments, kept, by)  # type: ignore[arg-type]
            cast = asked.get(id(p))
            if cast is not None and weight.is_cuda:
                launch_update(given, cast, weight.shape[-1])
            else:
                (compiled(update) if compiles else update)(*given)
                if cast is not None:
                    cast_into(rows.view(-1, weight.shape[-1]), cast)
            torch.autograd.graph.increment_version(p)  # `.data` does not count
            if rows.data_ptr() != weight.data_ptr():  # a copy: not contiguous, or its last block not full
                weight.copy_(from_blocks(rows, weight.shape))
            if cast is not None:
                written.append(p)
        small = [(local(p), local(p.grad), s) for p, s in members if is_small(p) and local(p).numel()]  # type: ignore[arg-type]
        if small:
            weights, gradients = [weight for weight, *_ in small], [gradient for _, gradient, _ in small]
            masters = [s["master"] if "master" in s else w.float() for w, _, s in small]
            first, second = [s["exp_avg"] for *_, s in small], [s["exp_avg_sq"] for *_, s in small]
            update_small(weights, gradients, first, second, masters, by)
        for p, _ in members:
            if is_small(p) and (wanted := asked.get(id(p))) is not None:
                cast_into(local(p).view(-1, p.shape[-1]), wanted)
                written.append(p)
        return written

    def state_dict(self) -> dict[str, Any]:
        """torch.optim.AdamW's, with float32 moments: 8 bytes per parameter, newly allocated."""
        mine = self.state
        whole = {p: vanilla(p, s) if isinstance(p, Tensor) and s else s for p, s in mine.items()}
        self.state = defaultdict(dict, whole)  # so that the hooks of others see torch's keys too
        try:
            return super().state_dict()
        finally:
            self.state = mine

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch.optim.AdamW's `state_dict()`, or ours. ValueError for another's: nothing is changed."""
        found: dict[Tensor, State] = {}

        def take(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:  # after the hooks of others
            found.update(self._packed(saved))
            return {**saved, "state": {}}

        def give(_: Optimizer) -> None:  # before the hooks of others
            self.state = defaultdict(dict, found)

        before = self.register_load_state_dict_pre_hook(take)
        with before, self.register_load_state_dict_post_hook(give, prepend=True):
            super().load_state_dict(state_dict)

    def _packed(self, saved: dict[str, Any]) -> dict[Tensor, State]:
        ours, theirs = self.param_groups, saved["param_groups"]
        got, have = [len(group["params"]) for group in theirs], [len(group["params"]) for group in ours]
        if got != have:
            shapes = f"{got} and {have}"
            raise ValueError(f"the checkpoint has other parameter groups: {shapes} parameters in it and here")
        for mine, group in zip(ours, theirs, strict=True):
            absent = [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]
            if absent:
                keys = " and no ".join(absent)
                raise ValueError(f"a group of the checkpoint has no {keys}: it is not of torch.optim.AdamW")
            _check({**self.defaults, **group, "params": mine["params"]}, self.master)
        before, after = ([p for group in groups for p in group["params"]] for groups in (theirs, ours))
        ids = dict(zip(before, after, strict=True))
        strangers = [key for key in saved["state"] if key not in ids]
        if strangers:
            raise ValueError(f"the checkpoint has states of parameters that are in no group: {strangers[:5]}")
        names = {p: _name(group, i) for group in ours for i, p in enumerate(group["params"])}
        return {ids[k]: packed(ids[k], v, self.master, names[ids[k]]) for k, v in saved["state"].items() if v}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in _OURS}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            group["decoupled_weight_decay"] = True


_STEP = AdamW.step  # as long as there is no optimizer of this class


def _name(group: dict[str, Any], index: int) -> str:
    names = group.get("param_names")
    return names[index] if names else f"parameter {index} of its group"


def _check(group: dict[str, Any], master: str | None) -> None:
    """ValueError, with the key, for what a parameter group cannot have."""
    lr, betas = group["lr"], group["betas"]
    if not isinstance(lr, Tensor) and not lr >= 0:
        raise ValueError(f"lr must not be negative; got {lr!r}")
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must be a number or a tensor of one element; got one of {list(lr.shape)}")
    if len(betas) != 2 or not all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers, at least 0 and below 1; got {betas!r}")
    for key in ("eps", "weight_decay"):
        if not group[key] >= 0:
            raise ValueError(f"{key} must not be negative; got {group[key]!r}")
    for key in ("amsgrad", "capturable", "differentiable"):
        if group[key]:
            raise ValueError(f"fp8compile.optim.AdamW has no {key}: use torch.optim.AdamW for it")
    for index, p in enumerate(group["params"]):
        if p.dtype not in _DTYPES:
            does = "fp8compile.optim.AdamW updates float32, bfloat16 and float16"
            raise ValueError(f"{_name(group, index)} is {p.dtype}: {does}. Give it to torch.optim.AdamW")
        if master == "bf16+remainder" and p.dtype == torch.float16:
            what = f"{_name(group, index)} is float16: master='bf16+remainder' is for bfloat16"
            raise ValueError(f"{what}. Take master='float32'")
