"""`fp8compile.mismatch`: how far a server's log-probabilities are from those that training computes.

    server    samples tokens, and gives the log-probability q of each             policy q
    trainer   the same tokens, by the forward that the loss is computed with      policy p

    KL(q, p)  = E_q[log q - log p]                 exact, with q of the whole vocabulary
    k3        = E_q[exp(d) - 1 - d], d = log p - log q    of the samples: unbiased, and never below 0

k3 is Schulman's (http://joschu.net/blog/kl-approx.html): his x ~ q, his r = p(x) / q(x).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MismatchError, at_most
from ...runtime.calls import freeze_scaling_state
from ...runtime.named_weights import unwrapped
from .export import served_weights

QUANTILES = (0.5, 0.9, 0.99)
CHUNK = 1 << 23  # log-probabilities that are in float64 at once
ABOVE = 1e-4  # by so much a rounded log-probability may be above zero
NORMALIZED = 0.1  # by so much the logarithm of a sum of probabilities may: bf16 rounds each by 0.4%


@dataclass(frozen=True)
class Mismatch:
    """`tokens`: how many were compared. `kl`: of server to trainer in nats a token, exact; None without the
    server's whole distributions. `k3`: its estimate from the sampled tokens; None without them. `quantiles`:
    of the magnitudes of the differences of the tokens' log-probabilities, by 0.5, 0.9 and 0.99. `largest`:
    the largest of them. `at`: where that is, (sequence, position). `first_difference`: the first tensor, in
    the model's order, that is another one in the server; None if all are equal, or no weights were given."""

    tokens: int
    kl: float | None
    k3: float | None
    quantiles: dict[float, float]
    largest: float
    at: tuple[int, int]
    first_difference: str | None

    def __str__(self) -> str:
        kinds = {"exact": self.kl, "k3": self.k3}
        kl = ", ".join(f"{value:.3g} ({kind})" for kind, value in kinds.items() if value is not None)
        shares = ", ".join(f"{share:.0%} {value:.3g}" for share, value in self.quantiles.items())
        sizes = f"differences {shares}, largest {self.largest:.3g} at {self.at}"
        weight = f"; first weight that differs: {self.first_difference}" if self.first_difference else ""
        return f"{self.tokens:,} tokens: KL {kl}; {sizes}{weight}"


def mismatch(
    model: nn.Module,
    batch: Any,
    logprobs: Tensor,
    tokens: Tensor | None = None,
    weights: Mapping[str, str | Tensor] | Iterable[tuple[str, Tensor]] | None = None,
    format: str | None = None,
) -> Mismatch:
    """Compare a server's log-probabilities with those that the next forward of training computes.

    `model` is what training calls, compiled or not, in train mode: in eval mode its matmuls are in high
    precision, or with `eval="fp8"` scaled otherwise, so that is refused. It is called as training calls it,
    with gradients enabled, in the memory of a forward; `batch` is its keyword arguments (a mapping), its
    arguments (a tuple or list), or its argument. It returns logits ``[batch, length, vocabulary]``, or has
    them as `logits`. The scaling state stays as it is. Dropout counts as a mismatch.

    `tokens`: int64 ``[batch, length]``, sampled tokens. The logits at a position give the probability of the
    token of that position, so `tokens` are input ids moved to the left by one, as targets of a cross-entropy
    are; positions with a negative one (-100) do not count.

    `logprobs`: of the server, floats ``[batch, length]`` of these tokens; or ``[batch, length, vocabulary]``,
    normalized, -inf for what it never samples, for the exact KL. With the latter, without `tokens`, every
    position counts, and differences are those of the server's likeliest tokens. Give what the server computes
    before it scales by a temperature and cuts.

    `weights`: what the server has loaded, for `first_difference`: (name, tensor) as `served_weights` gives
    them, or a mapping of names to tensors or to their `digest`, from which no tensor need be sent. `format`
    is that of `served_weights`, which is called: a collective call if parameters are sharded.

    Returns a `Mismatch`; sums are in float64. Raises MismatchError (a ValueError) for a model in eval mode,
    for shapes that do not fit, a NaN, probabilities that are none, and names of weights that the model does
    not have, or the server does not; what `served_weights` raises; TypeError for no module."""
    bare = unwrapped(model)
    counted = _counted(logprobs, tokens)
    if not bare.training:
        raise MismatchError(
            "the model is in eval mode, and does not multiply as training does: model.train()"
        )
    first = None if weights is None else _first_difference(bare, weights, format)
    logits = _logits(model, batch)
    _check_logits(logits, logprobs, tokens)
    return _compared(logits, logprobs, tokens, counted, first)


# -- what is compared --


def _counted(logprobs: Tensor, tokens: Tensor | None) -> Tensor:
    """The positions that count, bool ``[batch, length]``."""
    shape = list(logprobs.shape)
    if not logprobs.is_floating_point() or logprobs.dim() not in (2, 3):
        raise MismatchError(
            f"logprobs are {logprobs.dtype} {shape}: give floats [batch, length] of the sampled tokens, or "
            "[batch, length, vocabulary]"
        )
    if tokens is None:
        if logprobs.dim() == 2:
            raise MismatchError(f"logprobs {shape} are those of sampled tokens: give tokens {shape}, too")
        counted = torch.ones(shape[:2], dtype=torch.bool, device=logprobs.device)
    elif list(tokens.shape) != shape[:2] or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise MismatchError(f"tokens are {tokens.dtype} {list(tokens.shape)}: give int64 {shape[:2]}")
    else:
        counted = tokens >= 0
    if not bool(counted.any()):
        raise MismatchError("no token is to be compared: tokens are all negative, or none")
    return counted


def _logits(model: nn.Module, batch: Any) -> Tensor:
    with torch.enable_grad(), freeze_scaling_state():
        if isinstance(batch, Mapping):
            made = model(**batch)
        else:
            made = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    found = made.get("logits") if isinstance(made, Mapping) else getattr(made, "logits", made)
    if not isinstance(found, Tensor):
        raise MismatchError(f"the model returns {type(made).__name__}: it has to be logits, or to have them")
    return found.detach()


def _check_logits(logits: Tensor, logprobs: Tensor, tokens: Tensor | None) -> None:
    if logits.dim() != 3 or logits.shape[: logprobs.dim()] != logprobs.shape:
        raise MismatchError(f"logits are {list(logits.shape)}, and logprobs {list(logprobs.shape)}")
    if tokens is not None and tokens.max().item() >= logits.shape[2]:
        raise MismatchError(f"tokens have {tokens.max().item()}, and the logits {logits.shape[2]} columns")


def _compared(
    logits: Tensor, logprobs: Tensor, tokens: Tensor | None, counted: Tensor, first: str | None
) -> Mismatch:
    exact = logprobs.dim() == 3
    device, vocabulary = logits.device, logits.shape[2]
    places = counted.nonzero().to(device)
    kl, k3 = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
    found = []
    for part in places.split(max(1, CHUNK // vocabulary)):
        rows, columns = part.unbind(1)
        ours = logits[rows, columns].float().log_softmax(-1).double()
        theirs = logprobs[rows.to(logprobs.device), columns.to(logprobs.device)].to(device).double()
        if exact:
            _check_distributions(theirs)
            kl += _kl(theirs, ours)
        taken = tokens.to(device)[rows, columns] if tokens is not None else theirs.argmax(-1)
        own = theirs.gather(1, taken.long().unsqueeze(1)).squeeze(1) if exact else theirs
        if bool((wrong := ~(own.isfinite() & (own <= ABOVE))).any()):
            what = f"logprobs have {own[wrong][0].item():.3g} for a sampled token"
            raise MismatchError(f"{what}: no logarithm of a probability")
        differences = ours.gather(1, taken.long().unsqueeze(1)).squeeze(1) - own
        k3 += (differences.expm1() - differences).sum()
        found.append(differences.abs())
    sizes, count = torch.cat(found), len(places)
    if bool(sizes.isnan().any()):
        raise MismatchError("the model's logits have NaN or infinite values")
    row, column = places[sizes.argmax()].tolist()
    ordered = sizes.sort().values
    return Mismatch(
        tokens=count,
        kl=kl.item() / count if exact else None,
        k3=k3.item() / count if tokens is not None else None,
        quantiles={share: ordered[math.ceil(share * count) - 1].item() for share in QUANTILES},
        largest=sizes.max().item(),
        at=(row, column),
        first_difference=first,
    )


def _check_distributions(logprobs: Tensor) -> None:
    total = logprobs.logsumexp(-1)
    if bool((wrong := ~(total.abs() < NORMALIZED)).any()):
        worst = total[wrong][0].exp().item()
        raise MismatchError(f"logprobs of a position add up to a probability of {worst:.3g}, and not to 1")


def _kl(server: Tensor, trainer: Tensor) -> Tensor:
    """The sum over positions of KL(server, trainer); what the server never samples adds nothing."""
    terms = server.exp() * (server - trainer)
    return torch.where(server.isneginf(), 0.0, terms).sum()


# -- weights --


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor, as 64 hexadecimal digits: of the line ``"float8_e4m3fn [256, 128]\\\\n"`` with its
    dtype and shape, and of its bytes in row-major order. It depends on neither device nor strides, and needs
    nothing of fp8compile to be computed elsewhere: two processes can compare weights without sending them.

    `tensor` is plain, of any dtype and shape. Raises TypeError for a DTensor, which has a part of it."""
    if hasattr(tensor, "full_tensor"):
        raise TypeError("digest: a DTensor has a part of its values on each rank: give tensor.full_tensor()")
    dtype = str(tensor.dtype).removeprefix("torch.")
    found = hashlib.sha256(f"{dtype} {list(tensor.shape)}\n".encode())
    found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _first_difference(
    model: nn.Module, weights: Mapping[str, str | Tensor] | Iterable[tuple[str, Tensor]], format: str | None
) -> str | None:
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    theirs = {name: x if isinstance(x, str) else digest(x) for name, x in pairs}
    names, first = set[str](), None
    for name, tensor in served_weights(model, format):  # to the end: other ranks gather, too
        names.add(name)
        if first is None and name in theirs and digest(tensor) != theirs[name]:
            first = name
    _check_names("the model serves no", [name for name in theirs if name not in names])
    _check_names("the server's weights have no", [name for name in names if name not in theirs])
    return first


def _check_names(what: str, names: Sequence[str]) -> None:
    if names:
        raise MismatchError(f"{what} {', '.join(at_most(3, sorted(names)))}")
