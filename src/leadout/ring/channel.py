"""The encrypted connection of a relay: who does not have the key gets nothing but its end.

    client to server   a public value C, and an HMAC of it; the server closes if it is wrong
    server to client   a public value S, and an HMAC of C and S
    both               sealed frames; the client's first one is empty

C and S are X25519 values that are made for this connection. The keys of its two directions are
derived (HKDF) from what both sides compute of them, from the shared key, and from C and S. So a
recorded connection cannot be played back to either side, and a shared key that leaks later does
not open it. A frame is its length and an AES-256-GCM ciphertext; the nonce is the number of the
frame, so that frames cannot be left out, repeated or reordered. The algorithms are those of the
`cryptography` package. The shared key has the format of the keys for captured traffic:

    python -c "from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())"
"""

from __future__ import annotations

import base64
import hmac
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from leadout.files import read_text
from leadout.ring.memory import RingError

MAGIC = b"LEADRLY1"
MAX_PLAIN = 1 << 20  # bytes of a frame before it is sealed
HANDSHAKE_SECONDS = 10.0
_TAG_BYTES, _PUBLIC_BYTES, _PROOF_BYTES, _KEY_BYTES = 16, 32, 32, 32
_HELLO_BYTES = len(MAGIC) + _PUBLIC_BYTES + _PROOF_BYTES
_LENGTH = struct.Struct("!I")
_NONCE = struct.Struct("!4xQ")
_MAKE_KEY = (
    'Make one with `python -c "from cryptography.fernet import Fernet; '
    'print(Fernet.generate_key().decode())"`, and copy it to both hosts.'
)


class RelayError(RingError):
    """A relay that cannot be reached, refuses the key, or sends something else than sequences."""


class ConnectionEndedError(RelayError):
    """The other side has closed the connection, or has not said anything for too long."""


def read_keys(path: Path) -> list[bytes]:
    """The keys of a file, one in each line. The first one is used; a relay accepts all of them."""
    _require_crypto()
    keys = []
    for number, line in enumerate(read_text(path, max_mib=1).split(), 1):
        try:
            key = base64.b64decode(line, altchars=b"-_", validate=True)
        except ValueError:
            key = b""
        if len(key) != _KEY_BYTES:
            raise RelayError(
                f"{path}: key {number} is not one of 32 bytes in URL-safe base64. {_MAKE_KEY}"
            )
        keys.append(key)
    if not keys:
        raise RelayError(f"{path} has no key; expected one in each line. {_MAKE_KEY}")
    return keys


def _require_crypto() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise RelayError(
            "A relay needs the package cryptography: pip install 'leadout[crypto]'."
        ) from None


class Stream:
    """Whole pieces of bytes from and to a socket, each until a deadline."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def read(self, count: int, seconds: float) -> bytes:
        """Exactly `count` bytes."""
        end, parts = time.monotonic() + seconds, bytearray()
        try:
            while len(parts) < count:
                left = end - time.monotonic()
                if left <= 0:
                    raise ConnectionEndedError("The other side has sent nothing for too long.")
                self.socket.settimeout(left)
                part = self.socket.recv(min(count - len(parts), MAX_PLAIN))
                if not part:
                    raise ConnectionEndedError("The other side has closed the connection.")
                parts += part
        except TimeoutError:
            raise ConnectionEndedError("The other side has sent nothing for too long.") from None
        except OSError as problem:
            raise ConnectionEndedError(f"The connection has ended ({problem.strerror}).") from None
        return bytes(parts)

    def write(self, content: bytes, seconds: float) -> None:
        try:
            self.socket.settimeout(seconds)
            self.socket.sendall(content)
        except OSError as problem:  # with TimeoutError
            what = problem.strerror or "the other side does not read"
            raise ConnectionEndedError(f"The connection has ended ({what}).") from None


class Sealer:
    """Seals the frames of one direction."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher, self._number = AESGCM(key), 0

    def seal(self, content: bytes | memoryview) -> bytes:
        sealed = self._cipher.encrypt(_NONCE.pack(self._number), bytes(content), None)
        self._number += 1
        return _LENGTH.pack(len(sealed)) + sealed


class Opener:
    """Opens the frames of one direction, in their order."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher, self._number = AESGCM(key), 0

    def open(self, read: Callable[[int], bytes]) -> bytes:
        """The next frame; `read(n)` returns the next n bytes."""
        from cryptography.exceptions import InvalidTag

        (length,) = _LENGTH.unpack(read(_LENGTH.size))
        if not _TAG_BYTES <= length <= MAX_PLAIN + _TAG_BYTES:
            raise RelayError(f"A frame has {length:,} bytes, expected at most {MAX_PLAIN:,}.")
        sealed = read(length)
        try:
            content = self._cipher.decrypt(_NONCE.pack(self._number), sealed, None)
        except InvalidTag:
            raise RelayError(
                "A frame was changed on its way, or is not the next one of this connection."
            ) from None
        self._number += 1
        return content


class Channel:
    """A connection of which both sides have proved that they have the key."""

    def __init__(self, stream: Stream, sealer: Sealer, opener: Opener) -> None:
        self._stream, self._sealer, self._opener = stream, sealer, opener

    def send(self, content: bytes | memoryview, seconds: float) -> None:
        self._stream.write(self._sealer.seal(content), seconds)

    def receive(self, seconds: float) -> bytes:
        end = time.monotonic() + seconds
        return self._opener.open(lambda count: self._stream.read(count, end - time.monotonic()))


def connect_as_client(connection: socket.socket, key: bytes) -> Channel:
    private, public = _new_pair()
    stream = Stream(connection)
    stream.write(MAGIC + public + _proof(key, b"client", public), HANDSHAKE_SECONDS)
    try:
        answer = stream.read(_HELLO_BYTES, HANDSHAKE_SECONDS)
    except ConnectionEndedError:
        raise RelayError(
            "The relay has closed the connection, as it does with a wrong key. Compare the files "
            "of `leadout relay --key` and `leadout learn --states-key`."
        ) from None
    theirs = answer[len(MAGIC) : len(MAGIC) + _PUBLIC_BYTES]
    expected = MAGIC + theirs + _proof(key, b"server", public + theirs)
    if not hmac.compare_digest(answer, expected):
        raise RelayError("What answers is not a relay, or does not have the key.")
    to_server, to_client = _directions(key, private, theirs, public + theirs)
    channel = Channel(stream, Sealer(to_server), Opener(to_client))
    channel.send(b"", HANDSHAKE_SECONDS)
    return channel


def connect_as_server(connection: socket.socket, keys: Sequence[bytes]) -> Channel:
    """Nothing is sent before the client has proved that it has one of the keys."""
    stream = Stream(connection)
    hello = stream.read(_HELLO_BYTES, HANDSHAKE_SECONDS)
    theirs = hello[len(MAGIC) : len(MAGIC) + _PUBLIC_BYTES]
    for key in keys:
        if hmac.compare_digest(hello, MAGIC + theirs + _proof(key, b"client", theirs)):
            break
    else:
        raise RelayError("A client does not have the key.")
    private, public = _new_pair()
    to_server, to_client = _directions(key, private, theirs, theirs + public)
    stream.write(MAGIC + public + _proof(key, b"server", theirs + public), HANDSHAKE_SECONDS)
    channel = Channel(stream, Sealer(to_client), Opener(to_server))
    # A hello that was recorded gets this far, a frame for these public values does not.
    channel.receive(HANDSHAKE_SECONDS)
    return channel


def _proof(key: bytes, side: bytes, content: bytes) -> bytes:
    return hmac.digest(key, b"leadout relay 1 " + side + content, "sha256")


def _new_pair() -> tuple[object, bytes]:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    private = X25519PrivateKey.generate()
    return private, private.public_key().public_bytes_raw()


def _directions(key: bytes, private: object, theirs: bytes, both: bytes) -> tuple[bytes, bytes]:
    """The keys of frames to the server and to the client."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    assert isinstance(private, X25519PrivateKey)
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError:  # a value that gives the same result with every other
        raise RelayError("The other side has sent an invalid public value.") from None
    derived = HKDF(SHA256(), 2 * _KEY_BYTES, salt=both, info=b"leadout relay 1").derive(
        shared + key
    )
    return derived[:_KEY_BYTES], derived[_KEY_BYTES:]
