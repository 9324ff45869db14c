"""The errors of this package: what is wrong with a checkpoint, and what to do about it."""

from __future__ import annotations

from pathlib import Path

from leadout.errors import LeadoutError, printable, shown

WHOLE = ("file", "folder", "destination")  # fields that mean the path itself


class Phrase(str):
    """What is wrong with a field, where its value alone would not say it: "has shape [2, 3]"."""

    __slots__ = ()

    def __repr__(self) -> str:
        return printable(str(self))


MISSING = Phrase("is missing")


class CheckpointError(LeadoutError):
    """A checkpoint that cannot be read or written.

    The message reads "PATH: FIELD is VALUE; expected EXPECTED. REMEDY"; a `Phrase` in place of the
    value replaces "is VALUE". `field` is a config field, a tensor or a file in the folder `path`;
    if it is one of `WHOLE`, the message is about the path itself.
    """

    def __init__(
        self, path: Path | str, field: str, value: object, expected: str, remedy: str
    ) -> None:
        self.path = Path(path)
        self.field = printable(field)
        self.value = value
        self.expected = expected
        self.remedy = remedy
        super().__init__(f"{self._subject()} {self._problem()}; expected {expected}. {remedy}")

    def _subject(self) -> str:
        return str(self.path) if self.field in WHOLE else f"{self.path}: {self.field}"

    def _problem(self) -> str:
        if isinstance(self.value, Phrase):
            return shown(self.value)
        return "is null" if self.value is None else f"is {shown(self.value)}"


class UnsupportedCheckpointError(CheckpointError):
    """A checkpoint of a known kind whose computation Leadout does not implement."""
