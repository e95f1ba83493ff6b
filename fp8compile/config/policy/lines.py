"""Where in a TOML text a key stands. tomllib does not say, so headers are counted and keys are looked for below them.

It knows the usual way of writing a policy, one header or key a line. Anything else gives None, or the line of the header.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_HEADER = re.compile(r"^\s*(\[\[?)\s*(.+?)\s*\]\]?\s*(?:#.*)?$")
_PART = re.compile(r'"((?:[^"\\]|\\.)*)"|\'([^\']*)\'|([\w-]+)')


def line_of(text: str, path: Sequence[str | int]) -> int | None:
    """The line, from 1, of what `path` leads to: ("rules", 1, "gemm"), ("recipes", "mine"), ("eval",). None if unknown."""
    sections = _sections(text)
    if not path:
        return None
    if path[0] == "rules" and len(path) > 1 and isinstance(path[1], int):
        rules = [section for section in sections if section[1] == ("[[", ("rules",))]
        if path[1] < len(rules):
            number, _, lines = rules[path[1]]
            return _key_line(lines, path[2:3]) or number
        return _key_line(sections[0][2], ("rules",))
    for depth in range(len(path), 0, -1):
        for number, (brackets, header), lines in sections:
            if brackets and header == tuple(path[:depth]):
                return _key_line(lines, path[depth : depth + 1]) or number
    return _key_line(sections[0][2], path[:1])


def _sections(text: str) -> list[tuple[int, tuple[str, tuple[str, ...]], list[tuple[int, str]]]]:
    """(line of the header, (its brackets, its names), the lines below it); first what stands above all headers."""
    sections: list[tuple[int, tuple[str, tuple[str, ...]], list[tuple[int, str]]]] = [(1, ("", ()), [])]
    within = ""  # the quotes of a string over several lines
    for number, line in enumerate(text.splitlines(), 1):
        inside = bool(within)
        for quotes in re.findall(r'"""|\'\'\'', line):
            within = quotes if not within else "" if within == quotes else within
        header = None if inside else _HEADER.match(line)
        if header:
            names = tuple(a or b or c for a, b, c in _PART.findall(header.group(2)))
            sections.append((number, (header.group(1), names), []))
        elif not inside:
            sections[-1][2].append((number, line))
    return sections


def _key_line(lines: list[tuple[int, str]], key: Sequence[str | int]) -> int | None:
    if not key:
        return None
    wanted = re.compile(r"\s*[\"']?" + re.escape(str(key[0])) + r"[\"']?\s*[=.]")
    return next((number for number, line in lines if wanted.match(line)), None)
