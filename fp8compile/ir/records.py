"""The report of a compiled graph: a record for every matmul with its decision and reason, for every op that
hides matmuls, and what features add. Plain data: it holds no tensor and no node of a graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

from ..config.recipe import WHOLE, Block

T = TypeVar("T")

FP8: Literal["fp8"] = "fp8"
HIGH_PRECISION: Literal["high_precision"] = "high_precision"


@dataclass(frozen=True)
class MatmulRecord:
    """One gemm of a graph: ``out[m, n] = a[m, k] @ b[k, n]``, `batch` times. The sizes are its own.

    So for a linear on M tokens, from K to N features: fprop is (M, N, K), dgrad (M, K, N), wgrad (N, K, M).
    `groups`: the experts that the tokens are divided between; M counts the tokens of all of them, N and K are
    those of one. `gemm` is "matmul" for one without a weight, as in attention. `reason` is "" for fp8,
    `recipe` is "" for high precision. `dynamic`: some size is symbolic, and the number here is that of the
    call that was compiled. `symbolic`: which ones, letters of "mnkb" (b: the batch).
    `parameter` is the name of the weight, `rule` that of the policy's rule that decided.
    Where a device's description decided: `bf16_us` and `fp8_us` are this gemm's estimated times in high
    precision (which may be float32) and in FP8, `cast_us` its share of the casts (all in microseconds),
    `break_even_m` the number of tokens from which its layer gains.
    `emulated`: the device has no tensor cores for the recipe; FP8 values are multiplied in bf16, which is
    exact and not faster. `merged`: the layers, itself among them, whose gemms of this kind are one matmul.
    `overrides`: what makes the settings that run other than those of all layers, a line each. `others`: what
    rules decide at other steps: (rule, its recipe or "high precision").
    """

    fqn: str
    gemm: Literal["fprop", "dgrad", "wgrad", "matmul"]
    m: int
    n: int
    k: int
    decision: Literal["fp8", "high_precision"]
    reason: str = ""
    recipe: str = ""
    batch: int = 1
    groups: int = 0
    op: str = "mm"
    dynamic: bool = False
    parameter: str = ""
    rule: str = ""
    bf16_us: float | None = None
    fp8_us: float | None = None
    cast_us: float | None = None
    break_even_m: int | None = None
    emulated: bool = False
    merged: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    symbolic: str = ""

    @property
    def how(self) -> str:
        """The recipe, as reports show it."""
        notes = [note for note, holds in (("emulated", self.emulated), ("merged", self.merged)) if holds]
        return f"{self.recipe} ({', '.join(notes)})" if notes else self.recipe

    @property
    def flops(self) -> int:
        """Multiplications and additions: 2 * batch * m * n * k."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Gatherable:
    """What a training graph says of a weight: whether FSDP2 may gather it in FP8, as its matmuls cast it,
    with a scale of its own amax, or one for each `block`, which is square. `reason`: why not, "" if it
    may. `shared`: it may not, since not only matmuls read it, but an FP8 matmul does."""

    reason: str = ""
    shared: bool = False
    margin: int = 0
    power_of_2: bool = False
    fnuz: bool = False
    block: Block = WHOLE


class TableRecord:
    """A record that a report shows as a row of a table: a frozen dataclass, whose first field is a name.
    Records that are alike, and whose names differ in numbers only, share a row, such as `h.0-11.fc.weight`.

    A feature derives its own records from this class, and gives them to the report of a graph
    (`GraphFeature.report`) or of a model (`Feature.records`).
    """

    key: ClassVar[str] = ""  # the attribute of the report that has them, and their key in `to_dict()`
    of_model: ClassVar[bool] = False  # they are of a model, not of one of its graphs
    titles: ClassVar[tuple[str, ...]]  # of the table and of its columns: what the first one is a table of
    sides: ClassVar[str]  # "<" or ">" for each column
    about: ClassVar[str] = ""  # a sentence beside the table on a page

    @property
    def name(self) -> str:
        return getattr(self, fields(self)[0].name)  # type: ignore[arg-type]

    @property
    def like(self) -> Hashable:
        """Equal for records that are alike: those whose rows would have the same cells."""
        return self.cells([self])

    @classmethod
    def cells(cls, alike: Sequence[Any]) -> tuple[str, ...]:
        """The cells of a row, after the name."""
        raise NotImplementedError

    @classmethod
    def brief(cls, records: Sequence[Any]) -> str:
        """All of them in a few words, for the summary of a report."""
        return ""


def kinds(of_model: bool) -> dict[str, type[TableRecord]]:
    """The records that features add to the report of a model, or of a graph, by their key."""
    return {kind.key: kind for kind in TableRecord.__subclasses__() if kind.key and kind.of_model is of_model}


def of_key(records: Sequence[TableRecord], key: str, of_model: bool) -> tuple[Any, ...]:
    """Those that a report has as this attribute. AttributeError if there is no such kind."""
    if (kind := kinds(of_model).get(key)) is None:
        raise AttributeError(f"this report has no {key!r}")
    return tuple(record for record in records if type(record) is kind)


def as_dicts(records: Sequence[TableRecord], of_model: bool) -> dict[str, list[dict[str, Any]]]:
    """The records of each kind by its key, as plain dicts."""
    return {key: [asdict(x) for x in of_key(records, key, of_model)] for key in kinds(of_model)}


@dataclass(frozen=True)
class OpaqueRecord(TableRecord):
    """An op that hides matmuls: they are not listed one by one, and the op is not rewritten.

    `reason` names the op's family ("attention", "convolution"), or says after a colon why it is left alone.
    """

    titles, sides = ("not rewritten", "op", "why"), "<<<"

    fqn: str
    op: str
    reason: str
    matmuls: tuple[MatmulRecord, ...] = ()  # of a nested graph: those can be listed

    @classmethod
    def cells(cls, alike: Sequence[OpaqueRecord]) -> tuple[str, ...]:
        return alike[0].op, alike[0].reason


@dataclass(frozen=True)
class GraphReport:
    """One compiled graph. `name` is for people, e.g. "GPT, training"; `note` holds for the whole graph.

    `edges` are pairs of positions in `matmuls`: the output of the first reaches the second with no matmul
    between them. `device` names the device description by which FP8 was weighed, "" if there was none.
    `remarks` are further notes. `added`: what features say of the graph. Each of their `kinds` is an
    attribute of its own, such as `graph.collectives`. `prefix`: what names begin with, "layers.2.", in the
    graph of a part of a model. It may serve other parts that are alike: see `at`. `cold_calls`: forwards that
    ran unfused, because a tensor had no scale yet; `later_cold_calls`: those that were not the first of their
    weights.
    """

    index: int
    name: str
    matmuls: tuple[MatmulRecord, ...]
    opaque: tuple[OpaqueRecord, ...] = ()
    note: str = ""
    edges: tuple[tuple[int, int], ...] = ()
    device: str = ""
    remarks: tuple[str, ...] = ()
    added: tuple[TableRecord, ...] = ()
    prefix: str = ""
    cold_calls: int = 0
    later_cold_calls: int = 0

    def at(self, prefixes: Iterable[str]) -> GraphReport:
        """What the graph computes for each of these parts of models, with the names of all of them."""
        places, count = sorted({*prefixes} or {self.prefix}, key=in_order), len(self.matmuls)
        if places == [self.prefix]:
            return self

        def placed(records: Sequence[T]) -> tuple[T, ...]:
            names = [partial(self._named, place) for place in places]
            return tuple(_renamed(record, name) for name in names for record in records)

        edges = tuple((a + i * count, b + i * count) for i in range(len(places)) for a, b in self.edges)
        matmuls, opaque, added = placed(self.matmuls), placed(self.opaque), placed(self.added)
        each = f" (in each of {len(places)} parts)" if len(places) > 1 else ""
        remarks = tuple(remark + each for remark in self.remarks)
        return replace(self, matmuls=matmuls, opaque=opaque, added=added, edges=edges, remarks=remarks)

    def _named(self, prefix: str, name: str) -> str:
        inside = f"{name}.".startswith(self.prefix)
        return (prefix + f"{name}."[len(self.prefix) :]).rstrip(".") if inside else name

    def plus(self, records: Iterable[TableRecord]) -> GraphReport:
        """With these records of a feature, too."""
        return replace(self, added=(*self.added, *records))

    def __getattr__(self, name: str) -> tuple[Any, ...]:
        return of_key(self.added if "added" in self.__dict__ else (), name, of_model=False)


@dataclass(frozen=True)
class Findings:
    """What is told of a graph: its report, what is complained about before its summary, and what after it."""

    report: GraphReport
    training: bool
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def in_order(name: str) -> list[tuple[bool, int, str]]:
    """A key by which "layers.10" comes after "layers.9"."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")]


def _renamed(record: Any, name: Callable[[str], str]) -> Any:
    """A record with other names: of its module, its parameter, and of matmuls beside or inside of it."""
    first = fields(record)[0].name
    found: dict[str, Any] = {first: name(getattr(record, first))}
    if isinstance(record, MatmulRecord):
        found |= {"parameter": name(record.parameter), "merged": tuple(map(name, record.merged))}
    if isinstance(record, OpaqueRecord):
        found["matmuls"] = tuple(_renamed(matmul, name) for matmul in record.matmuls)
    return replace(record, **found)


FORWARD = {"dgrad": "mkn", "wgrad": "kmn"}  # which of a gemm's own sizes are m, n and k of the forward


def forward_sizes(record: MatmulRecord) -> tuple[int, int, int]:
    """(m, n, k) of the forward gemm that `record` is the dgrad or wgrad of."""
    m, n, k = (getattr(record, name) for name in FORWARD.get(record.gemm, "mnk"))
    return m, n, k
