"""Encrypted lines: captured traffic that cannot be read without a key.

    {"key": "3f9a61c2", "sealed": "gAAAAA..."}

Each line is a Fernet token (AES-128-CBC with HMAC-SHA256) of the `cryptography` package, with the
id of its key: a killed writer loses at most the line that it was writing, and a wrong key is told
apart from a damaged line. Keys are lines of a file, or of an environment variable. The first one
encrypts and all of them decrypt, so a key is replaced by putting a new one before it, and removed
once the traffic that it encrypted is gone:

    python -c "from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())"
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from leadout.errors import LeadoutError
from leadout.files import read_text

if TYPE_CHECKING:
    from cryptography.fernet import Fernet

VARIABLE = "LEADOUT_CAPTURE_KEY"
_KEY, _SEALED = "key", "sealed"


class CaptureKeyError(LeadoutError):
    """Keys that cannot be used, or that do not open what is to be read."""


class Keys:
    """Keys for lines, the newest first; without any, lines stay as they are."""

    def __init__(self, keys: Sequence[str] = (), source: str = "--capture-key") -> None:
        self._by_id: dict[str, Fernet] = {}
        if not keys:
            return
        try:
            from cryptography.fernet import Fernet
        except ImportError:
            raise CaptureKeyError(
                f"{source} needs the package cryptography: pip install 'leadout[crypto]'."
            ) from None
        for number, key in enumerate(keys, 1):
            try:
                self._by_id[_id_of(key)] = Fernet(key)
            except ValueError:
                raise CaptureKeyError(
                    f"{source}: key {number} is no Fernet key, which has 32 bytes in URL-safe "
                    'base64. Make one with `python -c "from cryptography.fernet import Fernet; '
                    'print(Fernet.generate_key().decode())"`.'
                ) from None

    @classmethod
    def read(cls, path: Path | None) -> Self:
        """The keys of a file, or else those of the environment variable, if it is set."""
        if path is None:
            return cls(os.environ.get(VARIABLE, "").split(), VARIABLE)
        keys = read_text(path, max_mib=1).split()
        if not keys:
            raise CaptureKeyError(f"--capture-key {path} has no key; expected one in each line.")
        return cls(keys, f"--capture-key {path}")

    @property
    def are_given(self) -> bool:
        return bool(self._by_id)

    def seal(self, line: bytes) -> bytes:
        """A line, which ends with a newline, encrypted with the newest key."""
        for name, key in self._by_id.items():
            return b'{"%b": "%b", "%b": "%b"}\n' % (
                _KEY.encode(),
                name.encode(),
                _SEALED.encode(),
                key.encrypt(line),
            )
        return line

    def unseal(self, line: bytes) -> bytes | None:
        """The line that was sealed; None if it is damaged. Other lines are returned as they are."""
        if not line.startswith(b'{"%b": "' % _KEY.encode()):
            return line
        try:
            content = json.loads(line)
            name, token = str(content[_KEY]), str(content[_SEALED])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        key = self._by_id.get(name)
        if key is None:
            known = ", ".join(self._by_id) or "none"
            raise CaptureKeyError(
                f"captured traffic is encrypted with the key {name[:16]!r}; the keys of "
                f"--capture-key are: {known}. Add the key to the file, or to {VARIABLE}."
            )
        from cryptography.fernet import InvalidToken

        try:
            return key.decrypt(token)
        except (InvalidToken, ValueError):  # ValueError: letters outside ASCII
            return None


def _id_of(key: str) -> str:
    """Names a key without revealing anything of it."""
    return hashlib.sha256(key.encode()).hexdigest()[:8]
