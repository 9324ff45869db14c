"""A registry of drafter versions: what to serve, what never to serve again, and why."""

from leadout.registry.records import (
    BadMark,
    Event,
    Evidence,
    ExpectedAcceptance,
    LedgerEntry,
    Manifest,
    MissingVersionError,
    Pointer,
    PointerMovedError,
    RegistryError,
    RequestAcceptance,
)
from leadout.registry.registry import FIRST, LAST, LEDGER, MANIFEST, POINTER, Registry
from leadout.registry.signing import RegistryKey, RegistryKeyError, WrongSignatureError

__all__ = [
    "FIRST",
    "LAST",
    "LEDGER",
    "MANIFEST",
    "POINTER",
    "BadMark",
    "Event",
    "Evidence",
    "ExpectedAcceptance",
    "LedgerEntry",
    "Manifest",
    "MissingVersionError",
    "Pointer",
    "PointerMovedError",
    "Registry",
    "RegistryError",
    "RegistryKey",
    "RegistryKeyError",
    "RequestAcceptance",
    "WrongSignatureError",
]
