"""A matmul of the joint graph: what it is (`collect`), its decision (`decide`), its costs (`weigh`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from torch.fx import Node

from .. import compat
from ..config.operators import MATMULS, MatmulForm
from ..config.recipe import Recipe, Scaling
from .fx_utils import Matrix, arg, aten, hint, peel, value
from .metadata import RESULT
from .records import FP8, HIGH_PRECISION, MatmulRecord

Gemm = Literal["fprop", "dgrad", "wgrad", "matmul"]
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
_FORMS = {getattr(aten, name): form for name, form in MATMULS.items()}


def form_of(node: Node) -> MatmulForm | None:
    """The positions of a matmul's arguments; None for a node that is no matmul."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    return _FORMS.get(packet)


def factors(node: Node) -> tuple[Node, Node]:
    """The arguments a and b of a matmul."""
    form = form_of(node)
    assert form is not None, node
    return arg(node, form.a), arg(node, form.b)


def offs_of(node: Node) -> Node | None:
    """The ends of the groups that a matmul divides rows into."""
    form = form_of(node)
    if form is None or form.offs is None or len(node.args) <= form.offs:
        return None
    return node.args[form.offs]  # type: ignore[return-value]


def operands(node: Node, more: tuple = ()) -> tuple[Matrix, Matrix]:
    """What a matmul's arguments a and b were made from. `more`: further operators that change no value."""
    grouped = offs_of(node) is not None
    a, b = (peel(x, more, stack=grouped and value(x).dim() == 3) for x in factors(node))
    return a, b


def addend_of(node: Node) -> Node | None:
    """What a matmul adds to its product. Read anew each time: it may be a matmul that a pass has replaced."""
    form = form_of(node)
    return None if form is None or form.addend is None else arg(node, form.addend)


class OperandKey(NamedTuple):
    """Gemms with equal keys share the FP8 copies of a tensor. `gradient` is part of it: gradients have their
    own format. `offs` divides its rows into groups."""

    base: Node
    gradient: bool
    scaling: Scaling
    offs: Node | None = None


class Product(NamedTuple):
    """Which matmul it is, for those who look at values of a running graph (`dryrun.observe`). It is noted in
    the metadata of nodes: as RESULT on what has the matmul's result, in either precision, and as PRODUCT on
    the FP8 matmul itself. `input`: the graph's input that is the weight. `nth`: which one it is of those with
    this name and gemm. `groups`: how many experts. `fp8`: it was decided to be FP8."""

    fqn: str
    gemm: Gemm
    parameter: str
    input: int | None
    nth: int
    groups: int
    fp8: bool


@dataclass(frozen=True)
class Decision:
    """FP8 or not, and how. `reason`: why the matmul stays in high precision; None: it becomes FP8. `recipe`:
    the settings that run, `overrides`: what makes them other than those of all layers. `rule`: the policy's
    rule that decided."""

    recipe: Recipe = Recipe()
    overrides: tuple[str, ...] = ()
    reason: str | None = None
    rule: str = ""
    auto: bool = False  # FP8 only if it pays
    wanted: bool = False  # a rule names this layer and wants it in FP8
    on_purpose: bool = False  # somebody chose high precision, other than by a shipped rule about sizes
    emulated: bool = False  # the device has no such FP8 matmul
    either: bool = False  # the weight's copy is read along either dimension: fprop and dgrad share one
    overruled: str = ""  # the recipe that a rule of the user's names, where the weight is held otherwise

    @property
    def how(self) -> str:
        """The recipe that runs, or "high precision"."""
        return self.recipe.name if self.reason is None else "high precision"


@dataclass(frozen=True)
class Price:
    """The cost model's estimates. Microseconds of the matmul in each precision, and of its share of the
    casts; the number of tokens from which its layer gains. None where they are unknown."""

    bf16_us: float | None = None
    fp8_us: float | None = None
    cast_us: float | None = None
    break_even_m: int | None = None


@dataclass(eq=False)
class Matmul:
    """`out[m, n] = a[m, k] @ b[k, n]`, `batch` times; sizes are ints or SymInts.

    With `offs`, the tokens (m of fprop and dgrad, k of wgrad) are divided into `groups`, one for each matrix
    of a stack of weights: m and k count all tokens, n and k the features of one matrix.

    `weight` is the weight that this gemm belongs to (for wgrad: the weight whose gradient it computes), as
    the base of an operand: `parameter`, the placeholder; or a slice of it (the q, k and v of one fused
    parameter); or a tensor that is computed from it alone. Both are None for an activation x activation
    product. `fprop` links dgrad and wgrad to their forward gemm. `weight_operand` is the operand that is the
    weight, or a copy of it. fprop and dgrad have one. A wgrad has one only in a product of two weights, where
    each weight is the input of the other.
    """

    node: Node
    op: str
    gemm: Gemm
    a: Matrix
    b: Matrix
    batch: Any
    m: Any
    n: Any
    k: Any
    fqn: str
    weight: Node | None = None
    weight_operand: Matrix | None = None
    parameter: Node | None = None
    offs: Node | None = None
    groups: int = 0
    fprop: Matmul | None = None
    computed: bool = False  # its weight is computed from parameters in each call, and has no history
    not_a_weight: str = ""  # why it has no weight
    wanted: bool = False  # it has no weight, although the user may well expect one
    name: str = ""  # of the parameter
    flipped: bool = False  # it computes the transpose of its node's result
    merged: tuple[Matmul, ...] = ()  # those that become one with it, itself among them
    decision: Decision = Decision()
    others: tuple[Decision, ...] = ()  # of other graphs that are made of this one, where they differ
    price: Price = Price()

    @property
    def reason(self) -> str | None:
        return self.decision.reason

    @property
    def recipe(self) -> Recipe:
        return self.decision.recipe

    def keep(self, reason: str) -> None:
        """Decide for high precision."""
        self.decision = replace(self.decision, reason=reason)

    @property
    def fp8(self) -> bool:
        return self.reason is None

    @property
    def addend(self) -> Node | None:
        return addend_of(self.node)

    def flip(self) -> None:
        """Compute the transpose of the result, [n, m] = b^T @ a^T, from the same operands."""
        a, b = (replace(matrix, transposed=not matrix.transposed) for matrix in (self.b, self.a))
        if self.weight_operand is not None:
            self.weight_operand = b if self.weight_operand is self.a else a
        self.a, self.b, self.m, self.n, self.flipped = a, b, self.n, self.m, not self.flipped

    @property
    def other_operand(self) -> Matrix:
        """The operand that is not the weight: in fprop the input, in dgrad and in a wgrad that reads a weight
        the gradient."""
        return self.a if self.weight_operand is self.b else self.b

    @property
    def roles(self) -> tuple[tuple[Matrix, str], tuple[Matrix, str]]:
        """The operands a and b of a weight's gemm, each with its role: "input", "weight" or "gradient"."""
        weight = self.weight_operand
        if weight is None:  # a wgrad
            # the gradient is the operand that was made in backward; if both were (the input is recomputed),
            # the input is the operand that fprop reads
            late = [compat.dynamo.is_backward(x.base) for x in (self.a, self.b)]
            read = self.fprop.other_operand.base if self.fprop is not None else None
            a_is_input = self.a.base is read if late[0] == late[1] else late[1]
            a, b = ("input", "gradient") if a_is_input else ("gradient", "input")
        else:
            other = "input" if self.gemm == "fprop" else "gradient"
            a, b = ("weight" if x is weight else other for x in (self.a, self.b))
        return (self.a, a), (self.b, b)

    def operand_key(self, matrix: Matrix, role: str, recipe: Recipe | None = None) -> OperandKey:
        """The key of the FP8 tensor that this gemm reads instead of `matrix`, by its recipe or another."""
        offs = None if role == "weight" else self.offs
        scaling = (recipe or self.recipe).scaling(role, self.gemm)
        return OperandKey(matrix.base, role == "gradient", scaling, offs)

    def other(self, operand: Matrix) -> Matrix:
        return self.a if operand is self.b else self.b

    @property
    def features(self) -> tuple[Any, Any, Any]:
        """(tokens, output features, input features) of the forward gemm; the weight may be its a or its b."""
        forward = self.fprop or self
        if forward.weight_operand is forward.a:
            return forward.n, forward.m, forward.k
        return forward.m, forward.n, forward.k

    def weight_among(self, inputs: Container[int | None]) -> bool:
        """True if the weight, or a slice of it, is one of these inputs of the graph."""
        return self.parameter is not None and compat.dynamo.input_index(self.parameter) in inputs

    def record(self) -> MatmulRecord:
        sizes = (self.m, self.n, self.k, self.batch)
        symbolic = [name for name, size in zip("mnkb", sizes, strict=True) if not isinstance(size, int)]
        m, n, k, batch = map(hint, sizes)
        return MatmulRecord(
            fqn=self.fqn,
            gemm=self.gemm,
            m=m,
            n=n,
            k=k,
            decision=FP8 if self.fp8 else HIGH_PRECISION,
            reason=self.reason or "",
            recipe=self.recipe.name if self.fp8 else "",
            batch=batch,
            groups=self.groups,
            op=self.op,
            dynamic=bool(symbolic),
            symbolic="".join(symbolic),
            parameter=self.name,
            rule=self.decision.rule,
            emulated=self.fp8 and self.decision.emulated,
            merged=tuple(matmul.fqn for matmul in self.merged),
            overrides=self.decision.overrides if self.fp8 else (),
            others=tuple((one.rule, one.how) for one in self.others),
            **asdict(self.price),
        )


def note_products(matmuls: Sequence[Matmul], fp8: Container[Matmul]) -> None:
    """Write into the metadata of each matmul what its result is. `fp8`: those that some graph makes FP8."""
    seen: Counter[tuple[str, str]] = Counter()
    for x in matmuls:
        position = compat.dynamo.input_index(x.parameter) if x.parameter is not None else None
        nth = seen[x.fqn, x.gemm]
        x.node.meta[RESULT] = Product(x.fqn, x.gemm, x.name, position, nth, x.groups, x in fp8)
        seen[x.fqn, x.gemm] += 1
