"""attribute: find the fprop that each matmul of the backward belongs to, as its dgrad or its wgrad.

    y = mm(x, permute(w))      fprop
    gx = mm(gy, w)             dgrad: reads w and contracts the output features of fprop
    gw = mm(permute(gy), x)    wgrad: has the shape of w, reads x or a tensor that x was computed from, and
                               becomes the gradient of w with no matmul in between
    p = mm(gy, q)              neither: a hook that projects a gradient, say

A gemm carries autograd's number (`seq_nr`) of the forward operator in whose backward it runs. This number
tells two uses of a weight apart, but it proves nothing: a hook carries its operator's number, a gemm in a
custom autograd function that of the function's last call, and a forward gemm without an autograd node
(frozen, detached) that of the node before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch.fx import Graph, Node

from .. import compat
from ..ir.fx_utils import Matrix, aten, reached, root, same_shape, same_size
from ..ir.matmul import Matmul, operands
from .origins import Gradients, Origins, ingredients

ONLY_BACKWARD = "only in backward: no weight's gradient"
NO_PARAMETER = "not a weight: neither operand is a parameter"


def attribute(graph: Graph, matmuls: list[Matmul], origins: Origins, barriers: frozenset[Node]) -> None:
    """Link each matmul of the backward to its fprop. Each matmul that remains without a weight gets the
    reason. `barriers`: all nodes that multiply matrices."""
    found = _Attribution(graph, matmuls, origins, barriers)
    found.dgrads()
    found.wgrads()
    found.rest()


def uncopied(matmul: Matmul, origins: Origins) -> None:
    """Let an operand that is a copy of a parameter refer to the parameter itself."""
    for side, matrix in zip(("a", "b"), operands(matmul.node, (aten.clone.default,)), strict=True):
        if origins.bare(matrix.base) is not None:
            setattr(matmul, side, matrix)


class _Attribution:
    def __init__(self, graph: Graph, matmuls: list[Matmul], origins: Origins, barriers: frozenset[Node]):
        self.origins, self.barriers = origins, barriers
        self.gradients = Gradients(graph, barriers)
        self.forward = [x for x in matmuls if not compat.dynamo.is_backward(x.node)]
        self.fprops = [x for x in self.forward if x.weight is not None]
        self.products = [x for x in self.forward if x.weight is None]
        self.order = {x: i for i, x in enumerate(self.fprops)}
        self.of_parameter: dict[Node, list[Matmul]] = defaultdict(list)
        self.of_source: dict[Node, list[Matmul]] = defaultdict(list)  # by what the weight is computed from
        self.of_weight: dict[Node, list[Matmul]] = defaultdict(list)
        for fprop in self.fprops:
            self.of_parameter[fprop.parameter].append(fprop)  # type: ignore[index]
            self.of_weight[root(fprop.weight)].append(fprop)  # type: ignore[arg-type]
            for source in self.sources(fprop):
                self.of_source[source].append(fprop)
        self.backward = [x for x in matmuls if compat.dynamo.is_backward(x.node)]
        for matmul in self.backward:
            uncopied(matmul, origins)

    @property
    def left(self) -> list[Matmul]:
        return [x for x in self.backward if x.fprop is None]

    # -- dgrads --

    def dgrads(self) -> None:
        reads: dict[Matmul, tuple[Matmul, Matrix]] = {}
        taken: set[Matmul] = set()
        for matmul in self.backward:
            for operand in (matmul.b, matmul.a):
                found = self.read(matmul, operand, taken)
                if found is not None:
                    reads[matmul] = found, operand
                    taken.add(found)
                    break
        readers: dict[Node, list[Matmul]] = defaultdict(list)
        for matmul, (fprop, _) in reads.items():
            readers[root(fprop.weight)].append(matmul)  # type: ignore[arg-type]
        for weight, dgrads in readers.items():
            for matmul in self.hooks(self.of_weight[weight], dgrads):
                del reads[matmul]
        for matmul, (fprop, operand) in reads.items():
            other = self.origins[fprop.other_operand.base]
            # in a product of two weights, the gradient of each is a wgrad
            wgrad = not (other.activation or other.by) and self.gradients.reach(matmul.node, other.sources)
            self.belongs(matmul, "wgrad" if wgrad else "dgrad", fprop, operand)

    def read(self, matmul: Matmul, operand: Matrix, taken: set[Matmul]) -> Matmul | None:
        """The fprop whose weight this operand is, contracted over its other dimension. Of several uses of a
        weight: the one with the number of `matmul`, else the last one that has no dgrad yet."""
        origin = self.origins[operand.base]
        if origin.activation or origin.by:
            return None
        uses = [use for source in origin.sources for use in self.of_parameter[source]]
        return self.best(matmul, [x for x in uses if _turned(matmul, operand, x)], taken, operand.base)

    def hooks(self, uses: list[Matmul], dgrads: list[Matmul]) -> list[Matmul]:
        """The dgrads that hooks made, if a weight has more dgrads than uses: those with the number of no use,
        and those that feed another dgrad of the same number."""
        if len(dgrads) <= len(uses):
            return []
        numbers = [_number(x) for x in uses]
        own = [x for x in dgrads if _number(x) in numbers] or dgrads
        before = [x for x in own if self.feeds(x, own)]
        return [x for x in dgrads if x not in own or x in before]

    @staticmethod
    def feeds(matmul: Matmul, dgrads: list[Matmul]) -> bool:
        """True if another dgrad of the same number reads what is made of this one."""
        others = {x.node for x in dgrads if x is not matmul and _number(x) == _number(matmul)}
        return any(x in others for x in reached([matmul.node], lambda x: x.users))

    # -- wgrads --

    def wgrads(self) -> None:
        taken: set[Matmul] = set()
        for matmul in self.left:
            reached = [x for x in self.of_source if self.gradients.reach(matmul.node, [x])]
            uses = dict.fromkeys(y for x in reached for y in self.of_source[x])
            near = [x for x in uses if _shaped(matmul, x)]
            found = self.best(matmul, [x for x in near if _shares(matmul, x.other_operand)], taken)
            if found is None:  # a custom autograd function may save a tensor that its input was computed from
                found = self.best(matmul, [x for x in near if self.made_of(matmul, x)], taken)
            if found is not None and (_number(found) == _number(matmul) or self.product_of(matmul) is None):
                taken.add(found)
                self.belongs(matmul, "wgrad", found)
        for fprop in self.fprops:  # a hook may multiply the gradient by more matrices: look across matmuls
            if fprop not in taken and self.gradients.wanted(self.sources(fprop)):
                only = [x for x in self.left if self.far(x, fprop)]
                if len(only) == 1:
                    self.belongs(only[0], "wgrad", fprop)

    def sources(self, fprop: Matmul) -> Iterable[Node]:
        return self.origins[fprop.weight].sources  # type: ignore[index]

    def far(self, matmul: Matmul, fprop: Matmul) -> bool:
        if not (_shaped(matmul, fprop) and _shares(matmul, fprop.other_operand)):
            return False
        return self.gradients.reach(matmul.node, self.sources(fprop), far=True)

    def made_of(self, matmul: Matmul, fprop: Matmul) -> bool:
        """True if an operand that is no gradient and the input of `fprop` are made of a common activation."""
        read = ingredients(fprop.other_operand.base, self.origins, self.barriers)
        others = [x.base for x in (matmul.a, matmul.b) if x.base not in self.origins.gradients]
        return any(read & ingredients(x, self.origins, self.barriers) for x in others)

    def product_of(self, matmul: Matmul) -> Matmul | None:
        """The forward product without a weight in whose backward `matmul` is, by its number."""
        return next((x for x in self.products if _number(x) == _number(matmul) and _reads(matmul, x)), None)

    # -- both --

    def best(
        self, matmul: Matmul, fitting: list[Matmul], taken: set[Matmul], base: Node | None = None
    ) -> Matmul | None:
        """`base`: what `matmul` reads; uses of this very weight come first."""

        def fits(fprop: Matmul) -> tuple:
            own = base is not None and root(fprop.weight) is root(base)  # type: ignore[arg-type]
            return own, _number(matmul) == _number(fprop), fprop not in taken, self.order[fprop]

        return max(fitting, key=fits, default=None)

    def belongs(self, matmul: Matmul, gemm: str, fprop: Matmul, operand: Matrix | None = None) -> None:
        matmul.gemm, matmul.fprop, matmul.weight_operand = gemm, fprop, operand  # type: ignore[assignment]
        matmul.weight, matmul.parameter, matmul.name = fprop.weight, fprop.parameter, fprop.name
        matmul.computed = fprop.computed if operand is None else self.origins.bare(operand.base) is None
        matmul.fqn = fprop.fqn

    def rest(self) -> None:
        """Fill in why the remaining matmuls have no weight."""
        for matmul in self.products:
            given = [self.gradients.wanted([x.base]) for x in (matmul.a, matmul.b)]
            matmul.wanted = matmul.wanted or (not self.origins.weights and given[0] != given[1])
            matmul.not_a_weight = matmul.not_a_weight or NO_PARAMETER
        for matmul in self.left:
            made = self.product_of(matmul) or next((x for x in self.products if _reads(matmul, x)), None)
            matmul.not_a_weight = made.not_a_weight if made is not None else ONLY_BACKWARD


def _number(matmul: Matmul) -> int | None:
    return matmul.node.meta.get("seq_nr")


def _turned(matmul: Matmul, operand: Matrix, fprop: Matmul) -> bool:
    """True if `matmul` contracts the weight's output features, where `fprop` contracts the input features."""
    weight = fprop.weight_operand
    assert weight is not None
    _, n, k = fprop.features
    sides = (matmul.k, matmul.n) if operand is matmul.b else (matmul.k, matmul.m)
    if not same_shape(sides, (n, k)) or matmul.groups != fprop.groups:
        return False
    if operand.base is not weight.base or not same_shape(operand.shape, weight.shape):
        return True
    return _contracted(operand, operand is matmul.b) != _contracted(weight, weight is fprop.b)


def _contracted(operand: Matrix, is_b: bool) -> int:
    """The dimension of the base that the matmul sums over."""
    return int(operand.transposed is is_b)


def _shaped(matmul: Matmul, fprop: Matmul) -> bool:
    """True if the result of `matmul` has the shape of the weight of `fprop`, or of its transpose."""
    _, n, k = fprop.features
    sizes = same_size(matmul.batch, fprop.batch) and matmul.groups == fprop.groups
    return sizes and any(same_shape((matmul.m, matmul.n), sides) for sides in ((n, k), (k, n)))


def _reads(matmul: Matmul, product: Matmul) -> bool:
    return _shares(matmul, product.a) or _shares(matmul, product.b)


def _shares(matmul: Matmul, operand: Matrix) -> bool:
    return any(x.base is operand.base or root(x.base) is root(operand.base) for x in (matmul.a, matmul.b))
