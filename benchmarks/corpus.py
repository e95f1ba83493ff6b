"""Make the tokens of a loss curve: `python -m benchmarks.corpus`, on a machine with many Python packages.

It writes `out/tokens.bin`: 16-bit tokens, at most 56 MB of them, of the source files of all packages that
this Python has, each file once, in a random order of its own seed. The vocabulary is a byte-pair encoding of
GPT-2's size, made from the same text. Nothing is downloaded. The package `tokenizers` does the work;
`transformers` brings it. The machine that trains needs the file alone: copy it there, to the same place, or
name it in FP8COMPILE_TOKENS.
"""

from __future__ import annotations

import array
import hashlib
import os
import random
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from .pool import ROOT

if TYPE_CHECKING:
    from torch import Tensor

VARIABLE, PATH = "FP8COMPILE_TOKENS", ROOT / "out" / "tokens.bin"
VOCABULARY = 50304  # of GPT-2 as nanoGPT pads it
ENTRIES = END = 50257  # what texts consist of; and the token after each
MEGABYTES, MILLION = 56, 1_000_000
LEAST, MOST = 500, 1_000_000  # bytes of a file: neither empty modules nor tables
LEARNED = 4000  # files from which the encoding is made


def place() -> Path:
    return Path(os.environ.get(VARIABLE) or PATH)


def read() -> Tensor:
    """The tokens, int32. ValueError if there is no file."""
    import torch

    path = place()
    if not path.is_file():
        raise ValueError(f"no tokens in {path}: python -m benchmarks.corpus makes them")
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint16).to(torch.int32)


def files(folders: list[Path]) -> list[Path]:
    """The Python files under the folders, each text once, in a random order that is always the same."""
    seen: set[bytes] = set()
    found = []
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            text = path.read_bytes() if path.is_file() else b""
            name = hashlib.sha256(text).digest()
            if LEAST < len(text) < MOST and name not in seen:
                seen.add(name)
                found.append(path)
    random.Random(0).shuffle(found)
    return found


def write(path: Path, folders: list[Path], megabytes: int) -> int:
    """Write the tokens; how many there are."""
    from tokenizers import ByteLevelBPETokenizer

    chosen = files(folders)
    texts = (file.read_text(errors="ignore") for file in chosen[:LEARNED])
    encoding = ByteLevelBPETokenizer()
    encoding.train_from_iterator(texts, vocab_size=ENTRIES, min_frequency=2, show_progress=False)
    limit, number = megabytes * MILLION // 2, 0
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        for i in range(0, len(chosen), 100):
            some = [text.read_text(errors="ignore") for text in chosen[i : i + 100]]
            made = [token for one in encoding.encode_batch(some) for token in (*one.ids, END)]
            made = made[: limit - number]
            array.array("H", made).tofile(file)
            number += len(made)
            if number == limit:
                break
    new.replace(path)
    return number


def main() -> None:
    paths = sysconfig.get_paths()
    folders = [Path(paths[name]) for name in ("stdlib", "purelib", "platlib")]
    number = write(place(), list(dict.fromkeys(folders)), MEGABYTES)
    print(f"{number / 1e6:.1f} M tokens, {2e-6 * number:.1f} MB, in {place()}")


if __name__ == "__main__":
    main()
