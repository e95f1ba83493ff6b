"""How many instructions does a thread of a kernel execute? Follows NVIDIA's machine code, as `nvdisasm -c`
prints it.

    executed(text)      Counter({"FMUL": 64, "MUFU": 16, "LDG": 4, ...}), or None if a loop's end is not known

ptxas unrolls loops as it likes, so trips of a loop of the source say little about the machine code. The code
is therefore walked from its entry to its end, as one thread of the first program would. Only what decides
about branches is computed: integers and predicates that follow from numbers in the code. All else is unknown:
what is loaded, arguments, the index of the thread.

* A branch backwards whose condition is unknown is a loop of unknown length: there is no count.
* A branch forwards whose condition is unknown is not taken, so that what it would skip counts. It is taken if
  it skips a call: calls are slow paths, such as that of an exact division by a denormal number.
* An instruction whose predicate is false is issued and counts, as on the device. NOPs do not count.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

MOST = 4_000_000  # instructions to follow
_LINE = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@(!?)(U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"(\.L_x_\d+):")
_TARGET = re.compile(r"\.L_x_\d+")
_REGISTER = re.compile(r"(U?R)(\d+)$")
_PREDICATE = re.compile(r"!?U?P(\d+|T)$")
_NUMBER = re.compile(r"(0x[0-9a-f]+|\d+)$")
_MASK = (1 << 32) - 1
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "GE": int.__ge__,
    "GT": int.__gt__,
    "LE": int.__le__,
    "LT": int.__lt__,
    "EQ": int.__eq__,
    "NE": int.__ne__,
}


@dataclass(frozen=True)
class _Instruction:
    name: str  # without its modifiers
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str  # "P0", "!P0", or "" for none
    target: int  # of a branch; -1 for none


def executed(text: str) -> Counter[str] | None:
    """The instructions that a thread issues, by their names without modifiers."""
    code = _parse(text)
    thread = _Thread()
    counts = [0] * len(code)
    at, steps = 0, 0
    while at < len(code):
        now = code[at]
        counts[at] += 1
        steps += 1
        if steps > MOST:
            return None
        holds = thread.predicate(now.guard) if now.guard else True
        if now.name in ("EXIT", "RET") and (holds or (holds is None and not now.guard)):
            break
        if now.name == "CALL" and now.guard and holds and now.target > at:
            at = now.target  # how ptxas leaves some loops: a jump that never returns
            continue
        if now.name == "BRA":
            taken = _taken(code, at, thread, holds)
            if taken is None:
                return None
            at = now.target if taken else at + 1
            continue
        if holds is not False:
            thread.execute(now, holds)
        at += 1
    total: Counter[str] = Counter()
    for instruction, count in zip(code, counts, strict=True):
        if count and instruction.name != "NOP":
            total[instruction.name] += count
    return total


def _taken(code: list[_Instruction], at: int, thread: _Thread, holds: bool | None) -> bool | None:
    """Whether a branch is taken; None for the end of a loop that is not known."""
    now = code[at]
    # threads of a warp that went different ways meet for a shuffle, which they always do here
    if "DIV" in now.modifiers:
        return False
    if now.target < 0:
        return None
    for operand in now.operands[:-1]:  # BRA.U !UP0, `(.L_x_0)
        also = thread.predicate(operand) if _PREDICATE.match(operand) else None
        holds = False if also is False else None if also is None else holds
        if holds is False:
            return False
    if holds is None and now.target > at:
        return any(skipped.name == "CALL" for skipped in code[at + 1 : now.target])
    return holds


def _parse(text: str) -> list[_Instruction]:
    lines: list[tuple[str, str, str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif found := _LINE.match(line):
            negated, predicate, name, operands = found.groups()
            lines.append((f"{negated}{predicate}" if predicate else "", name, operands, line))
    code = []
    for guard, whole, operands, _ in lines:
        name, *modifiers = whole.split(".")
        target = _TARGET.search(operands) if name in ("BRA", "CALL") else None
        parts = tuple(part.strip().removesuffix(".reuse") for part in operands.split(",")) if operands else ()
        code.append(
            _Instruction(name, tuple(modifiers), parts, guard, labels.get(target[0], -1) if target else -1)
        )
    return code


@dataclass
class _Thread:
    """What is known of a thread's registers: 32-bit numbers and predicates. All others are unknown."""

    registers: dict[str, int] = field(default_factory=dict)
    predicates: dict[str, bool] = field(default_factory=dict)

    def predicate(self, operand: str) -> bool | None:
        name = operand.lstrip("!")
        value = True if name in ("PT", "UPT") else self.predicates.get(name)
        return value if value is None or not operand.startswith("!") else not value

    def value(self, operand: str) -> int | None:
        """A 32-bit number without a sign."""
        sign, name = (operand[0], operand[1:]) if operand[:1] in ("-", "~") else ("", operand)
        if name in ("RZ", "URZ", "SRZ"):
            found: int | None = 0
        elif _NUMBER.match(name):
            found = int(name, 0)
        else:
            found = self.registers.get(name)
        if found is None or not sign:
            return found
        return (-found if sign == "-" else ~found) & _MASK

    def _long(self, operand: str) -> int | None:
        """A 64-bit number: an immediate, or a register and its successor."""
        found = _REGISTER.match(operand)
        if not found:
            return self.value(operand)
        low, high = self.value(operand), self.value(f"{found[1]}{int(found[2]) + 1}")
        return None if low is None or high is None else low | high << 32

    @staticmethod
    def _pair(operand: str, value: int | None) -> dict[str, int | bool | None]:
        """A 64-bit result in two registers."""
        found = _REGISTER.match(operand)
        if not found or value is None:
            return {}
        return {operand: value & _MASK, f"{found[1]}{int(found[2]) + 1}": value >> 32 & _MASK}

    def execute(self, now: _Instruction, holds: bool | None) -> None:
        """Note what an instruction writes: its results if they are known and it is executed for sure, else
        that they are unknown."""
        results: dict[str, int | bool | None] = dict.fromkeys(_written(now))
        if holds:
            results |= self._results(now)
        for name, value in results.items():
            where: dict = self.predicates if _PREDICATE.match(name) else self.registers
            if value is None:
                where.pop(name, None)
            else:
                where[name] = value

    def _results(self, now: _Instruction) -> dict[str, int | bool | None]:
        name, operands = now.name.removeprefix("U"), now.operands
        if name in ("IADD3", "VIADD", "IADD"):
            return self._sum(now)
        if name == "ISETP":
            return self._comparison(now)
        if name == "PLOP3":
            return self._logic(operands)
        if name == "HFMA2" and operands[1:3] == ("-RZ", "RZ"):  # how ptxas writes some constants
            return {operands[0]: _halves(*operands[3:5])}
        if name == "MOV" and "64" in now.modifiers:
            return self._pair(operands[0], self._long(operands[1]))
        values = [self.value(operand) for operand in operands[1:]]
        if name == "MOV" and values:
            return {operands[0]: values[0]}
        if name in ("R2UR", "S2R", "S2UR"):
            return {operands[0]: 0 if "SR_CTAID" in operands[1] else values[0] if name == "R2UR" else None}
        if name == "CS2R" and operands[1] == "SRZ":
            return dict.fromkeys(_written(now), 0)
        if name == "IMAD" and len(values) >= 3 and not {"WIDE", "HI"} & {*now.modifiers}:
            a, b, c = values[:3]
            return {operands[0]: _product(a, b, c, self._carry(now))}
        if name == "SHF" and now.modifiers == ("L", "U32") and None not in values[:2]:
            return {operands[0]: (int(values[0] or 0) << int(values[1] or 0)) & _MASK}
        if name in ("VIMNMX", "IMNMX", "SEL") and None not in values[:2]:
            first = self.predicate(operands[3]) if len(operands) > 3 else None
            if first is None:
                return {}
            pair = [int(x) for x in values[:2] if x is not None]
            if name != "SEL":
                pair.sort(key=lambda x: x if "U32" in now.modifiers else _signed(x, 32))
            return {operands[0]: pair[0] if first else pair[1]}
        return {}

    def _carry(self, now: _Instruction) -> int | None:
        """What IMAD.X adds."""
        return (
            0
            if "X" not in now.modifiers
            else self.predicate(now.operands[4])
            if len(now.operands) > 4
            else None
        )

    def _logic(self, operands: tuple[str, ...]) -> dict[str, int | bool | None]:
        """PLOP3.LUT P0, P1, PT, PT, UP0, 0x80, 0x8: two functions of three predicates, as tables."""
        inputs = [self.predicate(x) for x in operands[2:5]]
        if len(operands) < 7 or None in inputs:
            return {}
        a, b, c = map(int, inputs)  # type: ignore[arg-type]
        return {
            to: bool(int(table, 16) >> (4 * a + 2 * b + c) & 1)
            for to, table in zip(operands, operands[5:7], strict=False)
        }

    def _sum(self, now: _Instruction) -> dict[str, int | bool | None]:
        """IADD3 R2, P0, PT, R2, 0x1000, RZ: a register and the carries of a sum, which IADD3.X adds up."""
        first = 1
        while first < len(now.operands) and _PREDICATE.match(now.operands[first]):
            first += 1
        carries = now.operands[1:first]
        terms = [x for x in now.operands[first:] if not _PREDICATE.match(x)]
        added = [x for x in now.operands[first:] if _PREDICATE.match(x)] if "X" in now.modifiers else []
        wide = "64" in now.modifiers
        values = [self._long(x) if wide else self.value(x) for x in terms] + [
            self.predicate(x) for x in added
        ]
        if None in values:
            return {}
        total = sum(map(int, values))  # type: ignore[arg-type]
        if wide:
            return self._pair(now.operands[0], total)
        exact = not any(x.startswith(("-", "~")) for x in terms)
        made: dict[str, int | bool | None] = {now.operands[0]: total & _MASK}
        for carry in carries[:1]:
            made[carry] = bool(total >> 32) if exact else None
        return made

    def _comparison(self, now: _Instruction) -> dict[str, int | bool | None]:
        """ISETP.GE.U32.AND.EX P0, PT, R3, RZ, PT, P1: a comparison, joined with a predicate. EX compares the
        upper halves of 64-bit numbers; its last predicate is the comparison of the lower halves."""
        kind = next((x for x in now.modifiers if x in _COMPARE), None)
        if kind is None or len(now.operands) < 5 or "OR" in now.modifiers or "XOR" in now.modifiers:
            return {}
        wide, unsigned = bool({"U64", "S64"} & {*now.modifiers}), bool({"U32", "U64"} & {*now.modifiers})
        numbers = [self._long(x) if wide else self.value(x) for x in now.operands[2:4]]
        joined = self.predicate(now.operands[4])
        if joined is False:
            return {now.operands[0]: False}
        a, b = numbers
        if a is None or b is None or joined is None:
            return {}
        if not unsigned:
            bits = 64 if wide else 32
            a, b = _signed(a, bits), _signed(b, bits)
        if "EX" not in now.modifiers:
            return {now.operands[0]: _COMPARE[kind](a, b)}
        lower = self.predicate(now.operands[5]) if len(now.operands) > 5 else None
        if lower is None:
            return {}
        if kind == "NE":
            return {now.operands[0]: a != b or lower}
        return {now.operands[0]: lower if a == b else kind != "EQ" and _COMPARE[kind](a, b)}


def _signed(number: int, bits: int) -> int:
    return number - (1 << bits) if number >> bits - 1 else number


def _product(a: int | None, b: int | None, c: int | None, carry: int | None) -> int | None:
    """a * b + c + carry, where a factor of 0 makes the other irrelevant."""
    product = 0 if 0 in (a, b) else None if a is None or b is None else a * b
    return None if product is None or c is None or carry is None else (product + c + carry) & _MASK


def _halves(high: str, low: str) -> int | None:
    """The number whose halves are these two, written as float16."""
    try:
        return int.from_bytes(struct.pack(">ee", float(high), float(low)), "big")
    except (ValueError, OverflowError):
        return None


def _written(now: _Instruction) -> list[str]:
    """The registers and predicates that an instruction may write."""
    if now.name in ("ST", "STG", "STS", "STL", "RED", "REDG", "BAR", "BRA", "EXIT", "CALL"):
        return []
    first, *rest = now.operands or ("",)
    # ISETP P0, PT, R1, ...: two predicates; SHFL.DOWN P0, R2, ...: a register, too
    if _PREDICATE.match(first):
        return (
            [first, *_registers(now, rest[0])]
            if rest and not _PREDICATE.match(rest[0])
            else [first, *rest[:1]]
        )
    made = _registers(now, first)
    for operand in rest if made else ():  # IADD3 R2, P0, P1, R4, ...
        if not _PREDICATE.match(operand) or operand.startswith("!"):
            break
        made.append(operand)
    return made


def _registers(now: _Instruction, operand: str) -> list[str]:
    """A register that an instruction writes, and those after it that hold the rest of a wide result."""
    found = _REGISTER.match(operand)
    if not found:
        return []
    sizes = {"128": 4, "96": 3, "64": 2, "WIDE": 2, "F64": 2, "U64": 2, "S64": 2}
    size = max((sizes.get(modifier, 1) for modifier in now.modifiers), default=1)
    if now.name.endswith("MMA"):
        size = 4
    elif now.name in ("DADD", "DMUL", "DFMA") or (now.name == "CS2R" and "32" not in now.modifiers):
        size = 2
    return [f"{found[1]}{int(found[2]) + i}" for i in range(size)]
