"""The errors of this package: what is wrong with a checkpoint, and what to do about it."""

from __future__ import annotations

from pathlib import Path

from leadout.errors import LeadoutError, printable, shown


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
    "file", "folder" and "destination" mean the path itself.
    """

    def __init__(
        self,
        path: Path | str,
        field: str,
        value: object,
        expected: str,
        remedy: str = "Download the checkpoint again.",
    ) -> None:
        self.path, self.field, self.value = Path(path), printable(field), value
        self.expected, self.remedy = expected, remedy
        whole = field in ("file", "folder", "destination")
        subject = str(path) if whole else f"{path}: {self.field}"
        verb = "" if isinstance(value, Phrase) else "is "
        problem = "is null" if value is None else f"{verb}{shown(value)}"
        super().__init__(f"{subject} {problem}; expected {expected}. {remedy}")


class UnsupportedCheckpointError(CheckpointError):
    """A checkpoint of a known kind whose computation Leadout does not implement."""


def missing(
    path: Path, field: str, expected: str, remedy: str = "Add the field."
) -> CheckpointError:
    return CheckpointError(path, field, MISSING, expected, remedy)
