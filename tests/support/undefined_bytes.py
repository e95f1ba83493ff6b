"""Bytes that machine code for an NVIDIA GPU stores although nothing has written them: miscompiled kernels,
found without a GPU.

    stored_undefined(sass)    [(the store, the first register that is not whole)]

The code is read once from top to bottom. For each register it is known which of its four bytes are defined:
after a load all, after a move of a half that half. What an instruction makes of undefined bytes is undefined:
byte by byte where it moves, shifts or masks, else as a whole. Kernels with loops and long arithmetic in bf16
may be accused wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Callable

ALL = 15  # four bytes, the lowest first
LINE = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
REGISTER = re.compile(r"(?<![UP\w])R(\d+)")
IMMEDIATE = re.compile(r"0x[0-9a-f]+")
STORES = ("STG", "STS", "ST", "STL", "ATOMG", "ATOMS", "RED", "REDG")
NO_RESULT = ("CALL", "RET", "WARPSYNC")  # although a register is their first operand
LOADS = ("LDG", "LDS", "LD", "LDL", "LDC", "LDSM", "S2R", "CS2R", "SHFL")
PAIRS = ("HADD2", "HMUL2", "HFMA2", "HMNMX2")


def stored_undefined(sass: str) -> list[tuple[str, int]]:
    undefined: dict[int, int] = {}  # the bytes of a register; of one that was never written, all
    found: list[tuple[str, int]] = []

    def of(operand: str) -> int:
        register = REGISTER.search(operand)
        missing = undefined.get(int(register[1]), ALL) if register else 0
        for half, bits in ((".H0_H0", 3), (".H1_H1", 12)):
            if half in operand:
                return ALL if missing & bits else 0
        return missing

    for line in sass.splitlines():
        if not (match := LINE.match(line)):
            continue
        guard, (name, *parts) = match[1], match[2].split(".")
        operands = [x.strip() for x in re.split(r",(?![^\[]*\])", match[3])]
        if name in STORES:
            register = REGISTER.search(operands[-1])
            if register and "[" not in operands[-1]:
                needed = 1 if "U8" in parts else 3 if "U16" in parts else ALL
                wide = [
                    x for x in range(_width(name, parts)) if undefined.get(int(register[1]) + x, ALL) & needed
                ]
                found += [(match[0].strip(), int(register[1]) + wide[0])] if wide else []
        elif name not in NO_RESULT and re.match(r"R\d", operands[0]):
            made, first = _made(name, parts, operands[1:], of), int(operands[0][1:].split(".")[0])
            for register_number in range(first, first + _width(name, parts)):
                before = undefined.get(register_number, 0) if guard else 0
                undefined[register_number] = made | before
    return found


def _width(name: str, parts: list[str]) -> int:
    """The registers that an instruction stores, or writes."""
    if name == "LDSM":
        return int(next((x for x in parts if x in ("2", "4")), "1"))
    return 4 if "128" in parts else 2 if "64" in parts or "WIDE" in parts or name == "CS2R" else 1


def _made(name: str, parts: list[str], sources: list[str], of: Callable[[str], int]) -> int:
    """The undefined bytes of a result."""
    number = int(sources[1], 16) if len(sources) > 1 and IMMEDIATE.fullmatch(sources[1]) else None
    if name in LOADS:
        return 0
    if name == "PRMT" and sources[1] == "RZ":
        number = 0
    if name == "PRMT" and number is not None:
        both = of(sources[0]) | of(sources[2]) << 4
        return sum((both >> (number >> 4 * i & 7) & 1) << i for i in range(4))
    if name == "F2FP":  # of two numbers a half; with C, its low half goes above them
        pair = (of(sources[0]), of(sources[1]))
        if "PACK_AB_MERGE_C" in parts:  # the second one is the lower byte
            above = 3 if sources[2].split(".")[0] == "R1" else of(sources[2]) & 3  # R1 is the stack's
            return (2 if pair[0] else 0) | (1 if pair[1] else 0) | above << 2
        return (12 if pair[0] else 0) | (3 if pair[1] else 0)
    if name == "LOP3" and number is not None and sources[3] == "0xc0":
        return sum(1 << i for i in range(4) if of(sources[0]) >> i & 1 and number >> 8 * i & 255)
    if (name, number) == ("IMAD", 0x10000) or name == "SHF" and parts[0] == "L" and number is not None:
        return of(sources[0]) << (2 if name == "IMAD" else number // 8) & ALL  # type: ignore[operator]
    if name == "SHF" and parts[0] == "R" and sources[0] == "RZ" and number is not None:
        return of(sources[2]) >> number // 8
    if name == "MOV" or name == "IMAD" and parts[:1] == ["MOV"]:
        return of(sources[-1])
    missing = 0
    for source in sources:
        missing |= of(source)
    if name in PAIRS and "F32" not in parts:
        return (3 if missing & 3 else 0) | (12 if missing & 12 else 0)
    return missing if name in ("SEL", "FSEL", "LOP3") else ALL if missing else 0
