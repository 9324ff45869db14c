"""Markers in what users write, and a search for them in every file that is left behind.

A marker is a run of token ids, and the text of it where there is a tokenizer. Any part of it that
is long enough to be no accident counts, in every encoding that Leadout or vLLM writes: text, lists
of numbers in JSON or in a log, and the bytes of integer tensors.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

WINDOW = 6  # consecutive token ids, or letters of the text: twice as many
_SPACE = b" \t\r\n"
_INTEGERS = ("<i2", "<i4", "<i8", ">i4", ">i8")
_Words = npt.NDArray[np.uint64]
_HASH_BITS = 20
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd; the upper bits of a product depend on all bits
_BLOCK = 1 << 19  # words at a time, which bounds what is computed of them


@dataclass(frozen=True)
class Marker:
    ids: tuple[int, ...]
    text: str = ""

    @classmethod
    def of_ids(cls, seed: int, vocab_size: int, length: int = 12) -> Marker:
        draw = random.Random(f"marker {seed}")
        return cls(tuple(draw.randrange(vocab_size) for _ in range(length)))

    def encodings(self) -> Iterator[bytes]:
        """Byte strings of which one is in every file that has a part of the marker.

        Lists of numbers are to be searched in files without white space.
        """
        for start in range(len(self.ids) - WINDOW + 1):
            part = self.ids[start : start + WINDOW]
            yield ",".join(map(str, part)).encode()
            for kind in _INTEGERS:
                yield np.array(part, dtype=kind).tobytes()
        for start in range(max(0, len(self.text) - 2 * WINDOW + 1)):
            yield self.text[start : start + 2 * WINDOW].encode()


def files_with(
    markers: Sequence[Marker], roots: Iterable[Path], allowed: Iterable[Path] = ()
) -> tuple[list[Path], int]:
    """The files below `roots`, but not below `allowed`, that have a marker; and all that were read.

    Names of files are searched, too.
    """
    wanted = _Wanted({each for marker in markers for each in marker.encodings()})
    outside = [path.resolve() for path in allowed]
    found: list[Path] = []
    searched = 0
    for path in (path for root in roots for path in sorted(root.rglob("*"))):
        if not path.is_file() or path.is_symlink():
            continue
        if any(path.resolve().is_relative_to(folder) for folder in outside):
            continue
        content = str(path).encode() + b"\0" + path.read_bytes()
        dense = content.translate(None, _SPACE)
        searched += 1
        if wanted.is_in(content) or wanted.is_in(dense):
            found.append(path)
    return found, searched


class _Wanted:
    """Thousands of byte strings, all of 8 bytes or more, to be searched at once."""

    def __init__(self, wanted: set[bytes]) -> None:
        self._by_start: dict[int, list[bytes]] = {}
        for each in wanted:
            self._by_start.setdefault(int.from_bytes(each[:8], "little"), []).append(each)
        self._starts = np.array(sorted(self._by_start), dtype=np.uint64)
        self._hashes = np.zeros(1 << _HASH_BITS, dtype=bool)
        self._hashes[_hash(self._starts)] = True

    def is_in(self, content: bytes) -> bool:
        for shift in range(min(8, len(content))):
            words = np.frombuffer(content, "<u8", (len(content) - shift) // 8, shift)
            for first in range(0, len(words), _BLOCK):
                if self._is_among(words[first : first + _BLOCK], content, shift + 8 * first):
                    return True
        return False

    def _is_among(self, words: _Words, content: bytes, offset: int) -> bool:
        """Whether one of the byte strings starts with one of the words, the first at `offset`."""
        # Hashes leave out nearly all words: a search for all of them takes ten times as long.
        maybe = np.flatnonzero(self._hashes[_hash(words)])
        places = maybe[np.isin(words[maybe], self._starts)]
        starts = words[places]
        for start in np.unique(starts).tolist():
            # Some, such as zeros, are at millions of places of a file: not one by one.
            here = offset + 8 * places[starts == start]
            for each in self._by_start[start]:
                for place in _with_end(here, each, content):
                    if content.startswith(each, place):
                        return True
        return False


def _hash(words: _Words) -> _Words:
    return (words * _FACTOR) >> np.uint64(64 - _HASH_BITS)


def _with_end(places: npt.NDArray[np.int64], wanted: bytes, content: bytes) -> list[int]:
    """Those of the places, which are 8 bytes or a multiple apart, with the end of what is wanted.

    The end are its last 8 bytes.
    """
    first = int(places[0]) + len(wanted) - 8
    if first + 8 > len(content):
        return []
    words = np.frombuffer(content, "<u8", (len(content) - first) // 8, first)
    numbers = (places - places[0]) // 8
    inside = numbers < len(words)
    ends = words[numbers[inside]]
    return places[inside][ends == int.from_bytes(wanted[-8:], "little")].tolist()
