"""The one error of this package: what is wrong with a checkpoint, and what to do about it."""

from __future__ import annotations

from pathlib import Path

from leadout.errors import LeadoutError

_LONGEST_SHOWN = 160


class Words(str):
    """Plain words standing in for a value in an error message; shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


NOTHING = Words("nothing")


class CheckpointError(LeadoutError):
    """A checkpoint that cannot be read or written as it stands.

    Names the file or folder, the config field or tensor, the value found, the value wanted, and
    the remedy.
    """

    def __init__(
        self, path: Path | str, field: str, found: object, wanted: str, remedy: str
    ) -> None:
        self.path = Path(path)
        self.field = printable(field)
        self.found = found
        self.wanted = wanted
        self.remedy = remedy
        super().__init__(f"{path}: {self.field}: found {_shown(found)}, wanted {wanted}. {remedy}")


class UnsupportedCheckpointError(CheckpointError):
    """A checkpoint Leadout recognises, but whose computation it does not implement."""


def _shown(value: object) -> str:
    # An enormous or hostile value must not flood the terminal; repr also escapes what is
    # unprintable.
    text = printable(value) if isinstance(value, Words) else repr(value)
    if len(text) <= _LONGEST_SHOWN:
        return text
    return f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"


def printable(text: str) -> str:
    """Text from a file, made safe to show on a terminal."""
    return text if text.isprintable() else ascii(str(text))
