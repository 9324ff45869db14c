"""The files of a registry as models, and its errors.

Servers and learners of different releases share a registry: readers ignore fields that they do not
know, and fields that are added later have defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leadout.errors import LeadoutError
from leadout.files import decoded, first_problem

MAX_ACCEPTANCE = 1000.0  # tokens per step; no drafter has blocks as long as that


class RegistryError(LeadoutError):
    """A registry or one of its versions cannot be used as asked."""


class MissingVersionError(RegistryError):
    """There is no such version, or this machine does not see it yet."""


class PointerMovedError(RegistryError):
    """Another process has changed the pointer meanwhile; nothing was written."""


def now(timespec: str = "seconds") -> str:
    return datetime.now(UTC).isoformat(timespec=timespec)


class RegistryFile(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class RequestAcceptance(RegistryFile):
    """The acceptance length of requests as servers count them (`leadout.control.rollback`)."""

    length: float = Field(ge=1, le=MAX_ACCEPTANCE)
    low: float = Field(ge=1, le=MAX_ACCEPTANCE)  # lower end of the 95% confidence interval
    low_share: float = Field(default=0, ge=0, le=1)  # of requests that accept far less than that


class ExpectedAcceptance(RegistryFile):
    """The acceptance length of a version on one kind of text, measured before publishing."""

    acceptance_length: float = Field(ge=1, le=MAX_ACCEPTANCE)
    low: float = Field(ge=1, le=MAX_ACCEPTANCE)  # 95% confidence interval
    high: float = Field(ge=1, le=MAX_ACCEPTANCE)
    requests: int
    # What servers compare with; versions that were published earlier do not have it.
    per_request: RequestAcceptance | None = None
    before: RequestAcceptance | None = None  # of the parent, on the same requests


# As many digits as the name of a version's folder may have.
VersionNumber = Annotated[int, Field(ge=1, lt=10**9)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(RegistryFile):
    """Describes a version; its folder holds exactly the files listed here."""

    version: VersionNumber
    parent: int | None  # the version that training started from
    made: str  # UTC
    fingerprint: str  # of the drafter
    target_fingerprint: str
    promises: dict[str, ExpectedAcceptance]  # by kind of text
    files: dict[str, Sha256]  # by file name


class Pointer(RegistryFile):
    """The version that servers should run."""

    version: VersionNumber
    changed: str  # UTC
    reason: str


class PointerFile(Pointer):
    """The pointer with the versions that have been rolled back.

    A mark is another file. Being in this one too, a roll-back and a move of the pointer to the same
    version cannot both succeed, also where no lock spans two files.
    """

    rolled_back: tuple[int, ...] = ()


class BadMark(RegistryFile):
    """Why a version must not be served again."""

    reason: str
    marked: str  # UTC


class LastNumber(RegistryFile):
    version: int = Field(ge=0, lt=10**9)


Event = Literal[
    "published",
    "promoted",
    "rejected",
    "undecided",
    "swapped",
    "refused",
    "rolled_back",
    "started",
]
Evidence = Mapping[str, float | int | str | bool]


class LedgerEntry(RegistryFile):
    """One decision about a version."""

    when: str = Field(default_factory=lambda: now("milliseconds"))  # UTC
    event: str  # an `Event`, or one of a later release
    version: int | None
    why: str
    evidence: dict[str, float | int | str | bool | None] = {}
    once: bool = False  # the version has one entry for the event; later ones are ignored


AnyFile = TypeVar("AnyFile", bound=RegistryFile)


def dumped(content: RegistryFile) -> bytes:
    return content.model_dump_json(indent=2, exclude_defaults=True).encode() + b"\n"


def parsed(content: bytes, kind: type[AnyFile], where: str) -> AnyFile:
    try:
        return kind.model_validate_json(decoded(content, where))
    except ValidationError as problem:
        raise RegistryError(
            f"{where}: {first_problem(problem, with_value=True)}. Restore the file, or start a new "
            "registry."
        ) from None
