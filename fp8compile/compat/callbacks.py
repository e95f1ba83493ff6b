"""What Dynamo is to call: when compiled code is called, and when Dynamo gives a frame up. Each is to be asked
for within the backend, and holds for what `torch.compile` is compiling there. Read in 2.11, 2.13 and 2.15."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.utils import get_compilation_metrics

from .dynamo import frames

T = TypeVar("T")


def when_called(kind: type[T]) -> T | None:
    """The object of this class that is called when a call begins, before Dynamo looks for code that fits;
    made if there is none. It returns what is to be called at the end. None outside of a compilation."""
    for frame in frames("torch/_dynamo/eval_frame.py"):
        hooks = getattr(frame.f_locals.get("self"), "enter_exit_hooks", None)
        if hooks is not None:
            known = next((hook for hook in hooks if type(hook) is kind), None)
            if known is None:
                hooks.append(known := kind())
            return known
    return None


Told = Callable[[str, str, str, bool], None]


def when_given_up(name: str, tell: Told) -> None:
    """Call `tell(name, function, cause, all)` where Dynamo leaves a call to eager, though it has compiled the
    function for other calls: now, with this `name`. `all`: it leaves all further ones, too."""
    for frame in frames("torch/_dynamo/convert_frame.py"):
        wrapper = frame.f_locals.get("self")
        if isinstance(wrapper, CatchErrorsWrapper):
            converter: Any = wrapper._torchdynamo_orig_backend
            if not isinstance(converter, _Converter):
                wrapper._torchdynamo_orig_backend = converter = _Converter(converter, {}, tell)
            converter.names[frame.f_locals["frame"].f_code] = name
            return


class _Converter:
    """Dynamo's own converter of frames, which it stands for, and the names of the functions that it knows."""

    def __init__(self, theirs: Any, names: dict[types.CodeType, str], tell: Told):
        self.__dict__.update(vars(theirs))  # which C code reads, where no Python may run
        self.theirs, self.names, self.tell = theirs, names, tell

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        before = get_compilation_metrics()[-1:]
        made = self.theirs(frame, *args, **kwargs)
        code = frame.f_code
        if made.guarded_code is None and code in self.names:
            after = get_compilation_metrics()[-1:]
            metrics: Any = after[0] if after and (not before or after[0] is not before[0]) else None
            function = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
            skips = made.apply_to_code and made.frame_exec_strategy.cur_action == FrameAction.SKIP
            self.tell(self.names[code], function, _cause(made, metrics), skips)
        return made

    def __reduce__(self) -> Any:  # a copy of what was compiled, or a file, has torch's own
        return _itself, (self.theirs,)

    @property
    def _clone_with_backend(self) -> Any:  # of DDPOptimizer
        clone = self.theirs._clone_with_backend
        return lambda backend: _Converter(clone(backend), self.names, self.tell)


# torch asks whether the first caller outside of this file is a `torch.compiler.disable(recursive=False)`
_call: Any = _Converter.__call__
_call.__code__ = _call.__code__.replace(co_filename="torch/_dynamo/convert_frame.py")


def _itself(converter: Any) -> Any:
    return converter


def _cause(made: Any, metrics: Any) -> str:
    """A line: what has failed, and why the code that there is did not fit."""
    failed = getattr(metrics, "fail_reason", None) or getattr(made, "skip_reason", None) or "skipped"
    what, more = (line.strip().rstrip(".:") for line in (*failed.split("\n"), "")[:2])
    more = "" if more.startswith("Frame info") else more.removeprefix("Explanation: ").partition(". ")[0]
    again = getattr(metrics, "recompile_reason", None) or ""  # "0/7: n == 'a'   # return self.l(n)  # m.py:2"
    fit = again.partition(": ")[2].partition("\n")[0].partition("  #")[0].strip()
    why = f"; no compiled code fits, the last because of {fit}" if fit else ""
    return f"{what}: {more}{why}" if more else f"{what}{why}"
