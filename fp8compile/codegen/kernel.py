"""Group -> the source of one Triton kernel.

    one pass                                        with sums over rows (a norm)

    a program is a tile [BLOCK_R, BLOCK_C]          a program is a block of BLOCK_R whole rows
        load, compute, store                            for each pass: for each tile of the block: load, accumulate
                                                        for each tile of the block: load, compute, store

Values are named after their order (`v3`), inputs `x0`, scales `s0`, outputs `y0`. Offsets are 64-bit. Row numbers are
[BLOCK_R, 1], column numbers [1, BLOCK_C], so a value that varies with one of them only is computed once a row or column.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace

import sympy
import torch
from torch.fx import Node

from ..graph import arg
from .domain import VIEWS, Index, kind, sizes
from .expressions import FLOATS, HEAVY, TRITON_DTYPE, expression, number_text, prelude, rounded
from .group import Group, Output, statistics_of


@dataclass(frozen=True)
class Kernel:
    """A kernel's source and what to call it with."""

    name: str
    source: str
    inputs: tuple[Node, ...]
    scales: tuple[Node, ...]
    outputs: tuple[Output, ...]  # those with a pointer of their own
    sums: tuple[Output, ...]  # these share one: [blocks of rows, sums * columns]
    amaxes: tuple[Output, ...]
    symbols: tuple[sympy.Symbol, ...]
    row_blocks: bool  # a program is a block of whole rows
    heavy: bool  # computes an exp or the like, which takes registers

    @property
    def parameters(self) -> list[str]:
        names = [f"x{i}" for i in range(len(self.inputs))]
        names += [f"s{i}" for i in range(len(self.scales))]
        names += [f"y{i}" for i in range(len(self.outputs))]
        if self.sums:
            names.append("sums")
        names += [f"amax{i}" for i in range(len(self.amaxes))]
        return names + [f"n{i}" for i in range(len(self.symbols))]


def write(group: Group) -> Kernel:
    """The kernel of a group. Same group, same source: names do not depend on the graph."""
    return _Writer(group).write()


class _Writer:
    def __init__(self, group: Group):
        self.group, self.domain = group, group.domain
        self.inputs = {node: f"x{i}" for i, node in enumerate(group.inputs)}
        self.scales = {node: f"s{i}" for i, node in enumerate(group.scales)}
        stored = group.of_kind("copy", "transposed", "value", "row")
        self.pointers = {id(output): f"y{i}" for i, output in enumerate(stored)}
        self.stored, self.sums, self.amaxes = stored, group.of_kind("sum"), group.of_kind("amax")
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}  # as the kernel calls them: n0, n1, ..
        self.count = 0
        self.outer: dict[tuple[Node, Index], str] = {}  # values that vary with the row or with nothing
        self.outer_lines: list[str] = []
        self.loop: dict[tuple[Node, Index], str] = {}  # values of the tile at hand
        self.lines: list[str] = []
        self.reduced: dict[Node, str] = {}  # sums over rows that are known by now
        self.means: dict[Node, str] = {}

    # -- the whole --

    def write(self) -> Kernel:
        group = self.group
        rows, columns = self.text(self.domain.rows), self.text(self.domain.columns)
        looping = bool(group.passes)
        body: list[str] = ["pid = tl.program_id(0).to(tl.int64)"]
        if not looping:
            body += [f"tiles = ({columns} + BLOCK_C - 1) // BLOCK_C", "block = pid // tiles", "start = pid % tiles * BLOCK_C"]
        else:
            body += ["block = pid"]
        body += ["row = block * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]", f"row_inside = row < {rows}"]
        for name in self.scales.values():
            body.append(f"{name}_value = tl.load({name})")
        for number in range(group.passes):
            body += self.reduce(number, columns)
        if looping:
            for i in range(len(self.amaxes)):
                body.append(f"largest{i} = tl.zeros([BLOCK_R, BLOCK_C], tl.int32)")
        self.lines, self.loop, self.outer_lines = [], {}, []
        outputs = self.outputs(looping)
        head = self.columns(columns)
        tile = [*head, *self.lines, *outputs]
        body += self.outer_lines
        if looping:
            body += [f"for start in range(0, {columns}, BLOCK_C):", *_indented(tile)]
        else:
            body += tile
        for output in group.of_kind("row"):
            body += self.store_row(output)
        for i in range(len(self.amaxes)):
            body.append(f'tl.atomic_max(amax{i}, tl.max(largest{i}), sem="relaxed")')
        kernel = Kernel(
            name="",
            source="",
            inputs=tuple(self.inputs),
            scales=tuple(self.scales),
            outputs=tuple(self.stored),
            sums=tuple(self.sums),
            amaxes=tuple(self.amaxes),
            symbols=tuple(self.symbols),
            row_blocks=looping,
            heavy=any(node.target in HEAVY for node in group.members),
        )
        parameters = ", ".join([*kernel.parameters, "BLOCK_R: tl.constexpr", "BLOCK_C: tl.constexpr"])
        text = "\n".join(_indented([*self.comments(), *body]))
        name = f"{_title(group)}_{hashlib.sha256(f'{parameters}{text}'.encode()).hexdigest()[:8]}"
        source = f"import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef {name}({parameters}):\n{text}\n"
        return replace(kernel, name=name, source=source)

    def comments(self) -> list[str]:
        """What is what: each pointer with its dtype and shape."""
        lines = []
        for node, name in self.inputs.items():
            shape = ", ".join(self.text(size).strip("()") for size in sizes(node))
            lines.append(f"# {name}: {_dtype(node.meta['val'].dtype)} [{shape}]")
        for output in self.stored:
            dtype = output.dtype or output.node.meta["val"].dtype
            lines.append(f"# {self.pointers[id(output)]}: {output.kind} {_dtype(dtype)}")
        return lines  # and s: float32, a scale; amax: int32, the bits of a float32; sums: float32

    def columns(self, columns: str) -> list[str]:
        lines = ["col = start + tl.arange(0, BLOCK_C)[None, :].to(tl.int64)", f"col_inside = col < {columns}"]
        return [*lines, "inside = row_inside & col_inside"]

    # -- passes --

    def reduce(self, number: int, columns: str) -> list[str]:
        """One pass: all sums over rows that are known after it."""
        nodes = [node for node, level in self.group.levels.items() if level == number]
        self.lines, self.loop, self.outer_lines = [], {}, []
        start, last, names = [], [], {}
        for node in nodes:
            whole, part = statistics_of(node)
            source = arg(whole, 0)
            index = self.domain.full(sizes(source))
            assert index is not None
            value, name, into = self.value(source, index), self.name("r"), self.name("acc")
            start.append(f"{into} = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)")
            if part == "var":
                mean = self.means[whole]
                value = f"({value} - {mean}) * ({value} - {mean})"
            self.lines.append(f"{into} += tl.where(inside, {value}, 0.0)")
            total = f"tl.sum({into}, 1, keep_dims=True)"
            size = self.text(self.domain.columns)
            if part == "mean":
                total = f"tl.div_rn({total}, {size} * 1.0)"
            elif part == "var":
                correction = whole.kwargs.get("correction", 1)
                total = f"tl.div_rn({total}, {size} - {number_text(float(correction))})"  # type: ignore[arg-type]
            if part == "mean" and whole is not node:  # the variance is about the mean before it is rounded
                self.means[whole] = self.name("mean")
                last.append(f"{self.means[whole]} = {total}")
                total = self.means[whole]
            last.append(f"{name} = {rounded(total, node.meta['val'].dtype)}")
            names[node] = name
        head = self.columns(columns)
        lines = [*self.outer_lines, *start, f"for start in range(0, {columns}, BLOCK_C):"]
        lines += [*_indented([*head, *self.lines]), *last]
        self.reduced.update(names)
        return lines

    # -- values --

    def value(self, node: Node, index: Index) -> str:
        """The name of a value; writes what computes it where it is computed first."""
        key = (node, index)
        for known in (self.loop, self.outer):
            if key in known:
                return known[key]
        if node in self.reduced and key not in self.group.loads:
            return self.reduced[node]
        if key in self.group.loads:
            text, name, before = self.load(node, index), self.name("v"), []
        else:
            operands = self.domain.operands(node, index)
            assert operands is not None, node
            texts = [self.value(*x) if isinstance(x, tuple) else number_text(x) for x in operands]
            if node.target in VIEWS:
                return texts[0]
            name = f"v{self.count + 1}"
            text, before = expression(node, texts, name), prelude(node, texts, name)
            if text in texts:
                return text
            self.count += 1
        inner = kind(index) in ("full", "col")
        (self.loop if inner else self.outer)[key] = name
        lines = self.lines if inner else self.outer_lines
        lines += [*before, f"{name} = {text}"]
        return name

    def load(self, node: Node, index: Index) -> str:
        dtype = node.meta["val"].dtype
        varying = kind(index)
        mask = {"full": "inside", "row": "row_inside", "col": "col_inside"}.get(varying)
        guarded = f", mask={mask}, other={'0.0' if dtype in FLOATS else '0'}" if mask else ""
        axes = {"full": ("row", "col"), "row": ("row",), "col": ("col",)}.get(varying, ())
        text = f"tl.load({self.inputs[node]}{self.offset(node, index, *axes)}{guarded})"
        return f"{text}.to(tl.float32)" if dtype in FLOATS else f"{text} != 0" if dtype == torch.bool else text

    def offset(self, node: Node, index: Index, *varying: str) -> str:
        """` + ...`: from a tensor's first element to those at `index`. As many as rows or columns (`varying`), even if a
        matrix of one row or column has no term for them."""
        parts = []
        for (axis, divisor, size), stride in self.domain.address(node, index).items():
            text = axis if divisor == 1 else f"{axis} // {self.text(divisor)}"
            text = text if size is None else f"{text} % {self.text(size)}"
            parts.append(text if stride == 1 else f"{self.bracketed(text)} * {self.text(stride)}")
        parts += [f"{axis} * 0" for axis in varying if not any(re.search(rf"\b{axis}\b", part) for part in parts)]
        return "".join(f" + {part}" for part in parts)

    # -- outputs --

    def outputs(self, looping: bool) -> list[str]:
        lines: list[str] = []
        quantized: dict[tuple, str] = {}
        columns = self.text(self.domain.columns)
        padded = self.text(padded_rows(self.domain.rows))
        if self.group.of_kind("transposed"):
            lines.append("row_t = block * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]")
            lines.append("col_t = start + tl.arange(0, BLOCK_C)[:, None].to(tl.int64)")
        for output in self.group.outputs:
            if output.kind == "row":
                continue
            index = self.domain.full(sizes(output.node))
            assert index is not None
            value = self.value(output.node, index)
            pointer = self.pointers.get(id(output), "")
            if output.kind == "amax":
                name = f"largest{self.amaxes.index(output)}"
                bits = f"tl.where(inside, tl.abs({value}).to(tl.int32, bitcast=True), 0)"  # NaN is above infinity
                lines.append(f"{name} = tl.maximum({name}, {bits})" if looping else f"{name} = {bits}")
            elif output.kind == "sum":
                n, i = len(self.sums), self.sums.index(output)
                lines.append(f"total = tl.sum(tl.where(inside, {value}, 0.0), 0)[None, :]")
                lines.append(f"tl.store(sums + (block * {n} + {i}) * {columns} + col, total, mask=col_inside)")
            elif output.kind == "value":
                dtype = TRITON_DTYPE[output.node.meta["val"].dtype]
                where = self.offset(output.node, index, "row", "col")
                lines.append(f"tl.store({pointer}{where}, {value}.to({dtype}), mask=inside)")
            else:
                key = (value, output.scale, output.dtype, output.fp8_max)
                if key not in quantized:
                    quantized[key] = self.quantize(output, value, lines)
                if output.kind == "copy":
                    lines.append(f"tl.store({pointer} + row * {columns} + col, {quantized[key]}, mask=inside)")
                else:
                    lines.append(
                        f"tl.store({pointer} + col_t * {padded} + row_t, tl.trans({quantized[key]}), "
                        f"mask=(col_t < {columns}) & (row_t < {padded}))"
                    )
        return lines

    def quantize(self, output: Output, value: str, lines: list[str]) -> str:
        """value * scale, saturated; NaN where the value is infinite or NaN; zero outside of the matrix."""
        assert output.scale is not None and output.dtype is not None
        name, largest = self.name("q"), number_text(float(output.fp8_max))
        lines.append(f"{name} = {value} * {self.scales[output.scale]}_value")
        # by comparisons, which let NaN pass: Triton (#11111) miscompiles NaN-propagating min and max next to these stores
        lines.append(f"{name} = tl.where({name} > {largest}, {largest}, tl.where({name} < -{largest}, -{largest}, {name}))")
        lines.append(f'{name} = tl.where(tl.abs({value}) == float("inf"), float("nan"), {name})')
        lines.append(f"{name} = tl.where(inside, {name}, 0.0).to({TRITON_DTYPE[output.dtype]})")
        return name

    def store_row(self, output: Output) -> list[str]:
        index = self.domain.row_index(output.node)
        assert index is not None
        self.outer_lines = []
        value = self.value(output.node, index)
        where, dtype = self.offset(output.node, index, "row"), TRITON_DTYPE[output.node.meta["val"].dtype]
        store = f"tl.store({self.pointers[id(output)]}{where}, {value}.to({dtype}), mask=row_inside)"
        return [*self.outer_lines, store]

    # -- text --

    def name(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def text(self, expr: sympy.Expr) -> str:
        """An integer expression. Symbols become parameters."""
        for symbol in sorted(expr.free_symbols, key=str):
            self.symbols.setdefault(symbol, sympy.Symbol(f"n{len(self.symbols)}", integer=True, positive=True))
        return self.bracketed(_python(expr.subs(self.symbols, simultaneous=True)))

    @staticmethod
    def bracketed(text: str) -> str:
        return text if text.isidentifier() or text.isdigit() else f"({text})"


def padded_rows(rows: sympy.Expr) -> sympy.Expr:
    """`ops.padded_rows` of an expression."""
    if rows.is_Integer:
        return sympy.Integer(max(16, -(-int(rows) // 16) * 16))
    from torch.utils._sympy.functions import FloorDiv

    return FloorDiv(rows + 15, 16) * 16


def _python(expr: sympy.Expr) -> str:
    """Raises Unwritable for what has no form in a kernel."""
    if expr.is_Integer or expr.is_Symbol:
        return str(expr)
    if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
        return " * ".join([f"({_python(expr.base)})"] * int(expr.exp))
    sign = {"Add": " + ", "Mul": " * ", "FloorDiv": " // ", "Mod": " % ", "PythonMod": " % "}.get(type(expr).__name__)
    if sign is None:
        raise Unwritable(f"the size {expr}")
    return sign.join(_python(x) if x.is_Atom else f"({_python(x)})" for x in expr.args)


class Unwritable(Exception):
    """A group that cannot be written as a kernel."""


def _title(group: Group) -> str:
    """Named after what it fuses: the operators that the user wrote, then what is written."""
    names: dict[str, None] = {}
    for node in group.members:
        original = node.meta.get("original_aten")
        name = getattr(getattr(original, "overloadpacket", None), "__name__", "") if original is not None else ""
        if name and name not in _QUIET:
            names[name.strip("_")] = None
    names = {name: None for name in names if f"{name}_backward" not in names}
    kinds = {x.kind for x in group.outputs}
    return "_".join(["fp8", *list(names)[:4], *(word for kind, word in _DONE.items() if kind in kinds)])


_DONE = {"copy": "cast", "transposed": "transpose", "amax": "amax", "sum": "sum"}
_QUIET = "view _unsafe_view reshape t transpose permute expand clone detach alias _to_copy mm addmm".split()


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
