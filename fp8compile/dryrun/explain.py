"""What `backend="fp8"` would do to a model: `explain` reports on a step that is neither compiled nor run.

    print(fp8compile.explain(model, tokens, labels=labels))

Dynamo and AOTAutograd trace forward and backward, and our passes decide about every matmul as in training.
Inductor generates no code, and graphs compute almost nothing (see `placeholders`). So values do not matter,
and a model may be on the meta device. `sandbox` leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import compat, process
from ..config.options import parse
from ..errors import Fp8CompileError, one_line_where
from ..ir.records import FP8
from ..logs import get_logger
from ..reporting.report import Report, report
from ..runtime.ledger import Ledger
from .autocast import autocast as under
from .placeholders import PLACEHOLDERS
from .sandbox import entry, fuse_attention, inputs, modules_of, roots_of, taken, untouched

if TYPE_CHECKING:
    from ..config.policy import Policy

logger = get_logger(__name__)
UNWEIGHED = (
    'no GPU is named: every matmul that can be FP8 is. device="h200" (--device h200) '
    "keeps those that gain there"
)


def explain(
    model: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    device: str | None = None,
    autocast: bool | None = None,
    **kwargs: Any,
) -> Report:
    """The report that training `model` on `model(*args, **kwargs)` would have.

    `model` is a module, a compiled module, or any function that calls modules; tensors may be on the meta
    device. A model in eval mode is explained as in training. `options` are those of the backend (`strict` is
    ignored, because the report shows what it would warn about). `device` names the described device to decide
    for, e.g. "h100". `autocast` traces under bf16 autocast; None does so if a parameter is float32 and no
    autocast is on, as `estimate` does.

    Code after a graph break (`.item()`, a branch) sees zeros instead of values; only small numbers that
    follow from sizes, constants and integer inputs are real. Attention with dropout is fused on GPUs only. It
    counts as fused if a device is named or the model is on the meta device.

    Raises OptionError for bad options, and any error of the model, as torch.compile passes it on. After a
    graph break, the zeros may be the cause of an error. Such an error becomes a warning, and the report
    covers the graphs before it and says so.
    """
    model = taken(model)
    chosen = {name: value for name, value in (options or {}).items() if name != "strict"}
    if device is not None:
        chosen["device"] = device
    parse(chosen)  # raises errors in the options here, without Dynamo's text around them
    with under(modules_of((model, args, kwargs)), autocast) as how:
        return traced(model, args, kwargs, chosen, notes=[how] if how else [])


def traced(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    adapt: Callable[[Policy], Policy] | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """The report of a step that is traced as it is called. `adapt`: see `backend.fp8`."""
    from ..backend import fp8

    modules = modules_of((model, args, kwargs))
    on_meta = any(p.device.type == "meta" for module in modules for p in module.parameters())
    elsewhere = on_meta or options.get("device") is not None

    def backend(gm: Any, example_inputs: Any) -> Any:
        if elsewhere:
            fuse_attention(gm)
        return fp8(gm, example_inputs, options=options, inner=PLACEHOLDERS, adapt=adapt)

    step = entry(model)
    with untouched(modules), torch.enable_grad():
        args, kwargs = inputs(args), inputs(kwargs)
        note = ""
        try:
            torch.compile(step, backend=backend)(*args, **kwargs)
        except Exception as error:
            known = len(process.of(Ledger))
            if not known or isinstance(error, Fp8CompileError) or compat.dynamo.is_of_backend(error):
                raise
            note = f"incomplete: after graph {known - 1} the model raised {one_line_where(error)}"
        outside = [record for module in roots_of(modules) for record in report(module).outside]
        graphs = report().graphs
        weighed = any(graph.device for graph in graphs)
        if not weighed and any(record.decision == FP8 for graph in graphs for record in graph.matmuls):
            notes = [*notes, UNWEIGHED]
        empty = "nothing was compiled: Dynamo found no graph in this model"
        found = Report(graphs, empty, note, outside, notes=notes)
    if note:
        logger.warning("fp8: explain: %s. Values after a graph break are zeros here, which may be why", note)
    return found
