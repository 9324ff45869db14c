"""Signed versions: manifests, which have the hashes of all files, are authenticated by a key.

Learners sign with a private key and servers verify with the public one, so that nobody else who can
write to a registry, a server included, can make a version that is served. Keys are Ed25519 in PEM
files:

    openssl genpkey -algorithm ed25519 -out private.pem
    openssl pkey -in private.pem -pubout -out public.pem

A file may hold several public keys, one after the other: while a key is being replaced, versions of
both are accepted.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from leadout.files import read_text
from leadout.registry.records import RegistryError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

SIGNATURE = "signature"
_CONTEXT = b"leadout registry manifest\n"  # a signature of anything else with this key is no use
_PEM = re.compile(r"-----BEGIN [A-Z ]+-----.*?-----END [A-Z ]+-----\n?", re.DOTALL)


class RegistryKeyError(RegistryError):
    """A file that holds no usable key."""


class WrongSignatureError(RegistryError):
    """A version that none of the keys has signed; it must not be used."""


class RegistryKey:
    """The key or keys of a file: public ones, or a private one, which can also sign."""

    def __init__(
        self, public: tuple[Ed25519PublicKey, ...], private: Ed25519PrivateKey | None = None
    ) -> None:
        self._public, self._private = public, private

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives import serialization
            from cryptography.hazmat.primitives.asymmetric.ed25519 import (
                Ed25519PrivateKey,
                Ed25519PublicKey,
            )
        except ImportError:
            raise RegistryKeyError(
                "--registry-key needs the package cryptography: pip install 'leadout[crypto]'."
            ) from None
        public: list[Ed25519PublicKey] = []
        private: Ed25519PrivateKey | None = None
        for block in _PEM.findall(read_text(path, max_mib=1)):
            key: Any
            try:
                if "PRIVATE" in block.partition("\n")[0]:
                    key = serialization.load_pem_private_key(block.encode(), password=None)
                else:
                    key = serialization.load_pem_public_key(block.encode())
            # TypeError: it is encrypted.
            except (ValueError, TypeError, UnsupportedAlgorithm) as problem:
                raise RegistryKeyError(f"--registry-key {path}: {problem}. {_EXPECTED}") from None
            if isinstance(key, Ed25519PrivateKey):
                private = key
                public.append(key.public_key())
            elif isinstance(key, Ed25519PublicKey):
                public.append(key)
        if not public:
            raise RegistryKeyError(f"--registry-key {path} has no Ed25519 key. {_EXPECTED}")
        return cls(tuple(public), private)

    @property
    def can_sign(self) -> bool:
        return self._private is not None

    def sign(self, manifest: bytes) -> bytes:
        """The same manifest with a signature."""
        if self._private is None:
            raise RegistryKeyError(
                "--registry-key is a public key, which cannot sign versions. Give the learner the "
                "private key."
            )
        content = json.loads(manifest)
        signature = self._private.sign(_signed_bytes(content))
        content[SIGNATURE] = base64.b64encode(signature).decode()
        return json.dumps(content, indent=2).encode() + b"\n"

    def verify(self, manifest: bytes, where: str) -> None:
        """Refuse a manifest that none of the keys has signed."""
        from cryptography.exceptions import InvalidSignature

        content = json.loads(manifest)
        encoded = content.pop(SIGNATURE, None)
        if not isinstance(encoded, str):
            raise WrongSignatureError(
                f"{where} is not signed, but --registry-key is given. Create a signed registry "
                "from its folder with `leadout learn TARGET --registry NEW --registry-key PRIVATE "
                "--start FOLDER`."
            )
        for key in self._public:
            try:
                key.verify(base64.b64decode(encoded, validate=True), _signed_bytes(content))
                return
            except (InvalidSignature, ValueError):  # ValueError: not base64
                continue
        raise WrongSignatureError(
            f"{where} has no valid signature of the keys in --registry-key: it was changed, or "
            "signed by another key. Do not serve this version; publish it again."
        )


_EXPECTED = "Expected a PEM file as `openssl genpkey -algorithm ed25519` writes it."


def _signed_bytes(content: dict[str, Any]) -> bytes:
    """Independent of how the file is formatted; includes fields of later releases."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return _CONTEXT + text.encode()
