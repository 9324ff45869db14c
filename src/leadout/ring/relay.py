"""A relay streams the sequences of a ring to learners on other hosts, over TCP.

    relay = Relay(RingReader(folder), ("0.0.0.0", 7600), read_keys(key))    on the serving host
    reader = RelayReader("host", 7600, read_keys(key)[0])                   on the learner's

`RelayReader` has the interface of `RingReader`. Every learner gets all sequences that become
complete while it is connected. Nobody waits: the relay drops what a learner does not fetch in time,
and the reader what is not polled in time, the oldest sequence first. Frames are sealed, see
`leadout.ring.channel`; each begins with its kind:

    I   `RingInfo`, once
    P   a part of a sequence; E the last part
    C   the relay's counters, also as a sign of life
"""

from __future__ import annotations

import logging
import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import numpy as np
import torch
from pydantic import BaseModel, ValidationError

from leadout.ring.channel import (
    MAX_PLAIN,
    Channel,
    RelayError,
    connect_as_client,
    connect_as_server,
    read_keys,
)
from leadout.ring.records import RingInfo
from leadout.ring.sequences import RingCounters, RingReader, ServedSequence

logger = logging.getLogger("leadout")

POLL_SECONDS = 0.05
SECONDS_BETWEEN_COUNTERS = 5.0
SECONDS_TO_SEND = 60.0  # one frame, to a learner that reads slowly
MAX_SILENCE = 30.0  # after which a reader connects again
MAX_CONNECTIONS = 32
MAX_WAITING_BYTES = 1 << 30  # for each learner, and in each reader
CONNECT_SECONDS = 30.0  # for the first connection of a reader
BACK_OFF_SECONDS = (0.5, 30.0)  # between attempts: the first time, and at most
MAX_TOKENS = 1 << 24  # of a sequence

_INFO, _PART, _END, _COUNTERS = b"I", b"P", b"E", b"C"
_HEAD = struct.Struct("<IIIId")  # bytes of a value, prompt, response, first position, temperature
_DTYPES = {2: torch.bfloat16, 4: torch.float32}
_Model = TypeVar("_Model", bound=BaseModel)


def pack_sequence(sequence: ServedSequence) -> list[memoryview]:
    """The bytes of a sequence, without a copy of its states."""
    head = _HEAD.pack(
        sequence.states.element_size(),
        len(sequence.prompt),
        len(sequence.response),
        sequence.first,
        sequence.temperature,
    )
    tokens = np.asarray([*sequence.prompt, *sequence.response], np.int32).tobytes()
    states = sequence.states.contiguous().flatten().view(torch.uint8).numpy().data
    return [memoryview(head + tokens), states]


def parse_sequence(content: bytes | bytearray, info: RingInfo) -> ServedSequence:
    """The sequence in these bytes; RelayError if they are anything else."""
    if len(content) < _HEAD.size:
        raise RelayError(f"A sequence has {len(content)} bytes, expected {_HEAD.size} or more.")
    size, prompt, response, first, temperature = _HEAD.unpack_from(content)
    length = prompt + response
    rows = length - 1 - first
    expected = _HEAD.size + 4 * length + rows * info.width * size
    if size not in _DTYPES or rows < 0 or length > MAX_TOKENS or len(content) != expected:
        raise RelayError(
            f"A sequence of {length:,} tokens has {len(content):,} bytes, which is not {rows:,} "
            f"rows of {info.width:,} values."
        )
    tokens = np.frombuffer(content, np.int32, length, _HEAD.size).tolist()
    if not (math.isfinite(temperature) and temperature >= 0) or min(tokens, default=0) < 0:
        raise RelayError("A sequence has a negative token or temperature.")
    states = torch.empty((rows, info.width), dtype=_DTYPES[size])
    if rows:
        values = bytearray(memoryview(content)[_HEAD.size + 4 * length :])
        states = torch.frombuffer(values, dtype=_DTYPES[size]).view(rows, info.width)
    return ServedSequence(tokens[:prompt], tokens[prompt:], temperature, first, states)


class FrameParser:
    """What a relay says, from the plain content of its frames."""

    def __init__(self, max_bytes: int = MAX_WAITING_BYTES) -> None:
        self.info: RingInfo | None = None
        self.counters = RingCounters()
        self._max_bytes = max_bytes
        self._parts = bytearray()

    def add(self, frame: bytes) -> ServedSequence | None:
        """The sequence that this frame completes, if it does."""
        kind, content = frame[:1], frame[1:]
        if (kind == _INFO) != (self.info is None):
            raise RelayError("A relay must describe its ring once, before anything else.")
        if kind == _INFO:
            self.info = _parsed(RingInfo, content)
        elif kind == _COUNTERS:
            self.counters = _parsed(RingCounters, content)
        elif kind in (_PART, _END):
            if len(self._parts) + len(content) > self._max_bytes:
                raise RelayError(
                    f"A sequence has more than {self._max_bytes:,} bytes, for which there is no "
                    "room."
                )
            self._parts += content
            if kind == _END:
                whole, self._parts = self._parts, bytearray()
                assert self.info is not None
                return parse_sequence(whole, self.info)
        else:
            raise RelayError(f"A frame of the unknown kind {kind!r}.")
        return None


def _parsed(model: type[_Model], content: bytes) -> _Model:
    try:
        return model.model_validate_json(content)
    except ValidationError as problem:
        raise RelayError(
            f"A frame has {problem.error_count()} wrong values for a {model.__name__}. Use the "
            "same version of Leadout on both hosts."
        ) from None


class Waiting:
    """Sequences that wait for somebody, up to a number of bytes; the oldest are dropped."""

    def __init__(self, max_bytes: int) -> None:
        self.dropped = 0
        self._max_bytes, self._bytes = max_bytes, 0
        self._sequences: deque[ServedSequence] = deque()
        self._changed = threading.Condition()

    def add(self, sequences: Sequence[ServedSequence]) -> None:
        with self._changed:
            for sequence in sequences:
                self._sequences.append(sequence)
                self._bytes += _bytes_of(sequence)
            while self._bytes > self._max_bytes:
                self._bytes -= _bytes_of(self._sequences.popleft())
                self.dropped += 1
            self._changed.notify_all()

    def take(self, seconds: float) -> ServedSequence | None:
        """The oldest one, as soon as there is one."""
        with self._changed:
            if not self._sequences:
                self._changed.wait(seconds)
            if not self._sequences:
                return None
            sequence = self._sequences.popleft()
            self._bytes -= _bytes_of(sequence)
            return sequence

    def take_all(self) -> list[ServedSequence]:
        with self._changed:
            taken, self._bytes = list(self._sequences), 0
            self._sequences.clear()
            return taken


def _bytes_of(sequence: ServedSequence) -> int:
    return sequence.states.nbytes + 4 * (len(sequence.prompt) + len(sequence.response))


class Relay:
    """Reads a ring and sends what is in it to every learner that has the key."""

    def __init__(
        self,
        reader: RingReader,
        address: tuple[str, int],
        keys: Sequence[bytes],
        *,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._reader, self._keys, self._max_waiting_bytes = reader, keys, max_waiting_bytes
        self._learners: list[Waiting] = []
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._server = _listening(address)
        self.port: int = self._server.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name="relay-accept", daemon=True)
        self._accepting.start()

    @property
    def learners(self) -> int:
        with self._lock:
            return len(self._learners)

    def run(self) -> None:
        """Read the ring until `close` is called."""
        while not self._ended.is_set():
            sequences = self._reader.poll()
            with self._lock:
                for learner in self._learners:
                    learner.add(sequences)
            self._ended.wait(POLL_SECONDS)

    def close(self) -> None:
        self._ended.set()
        _end(self._server)
        self._accepting.join(1.0)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            _end(connection)

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:
                if not self._ended.is_set():
                    self._ended.wait(POLL_SECONDS)  # too many open files, for example
                continue
            with self._lock:
                has_room = len(self._connections) < MAX_CONNECTIONS
                if has_room:
                    self._connections.add(connection)
            if not has_room:
                _end(connection)
                continue
            threading.Thread(
                target=self._serve, args=(connection,), name="relay-learner", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        waiting = Waiting(self._max_waiting_bytes)
        try:
            channel = connect_as_server(connection, self._keys)
            _send(channel, _INFO, self._reader.info.model_dump_json().encode())
            with self._lock:
                self._learners.append(waiting)
            logger.info("A learner has connected.")
            self._feed(channel, waiting)
        except RelayError as problem:  # says nothing about what users wrote
            logger.info("A connection has ended: %s", problem)
        finally:
            _end(connection)
            with self._lock:
                self._connections.discard(connection)
                if waiting in self._learners:
                    self._learners.remove(waiting)

    def _feed(self, channel: Channel, waiting: Waiting) -> None:
        next_counters = 0.0
        while not self._ended.is_set():
            if time.monotonic() >= next_counters:
                next_counters = time.monotonic() + SECONDS_BETWEEN_COUNTERS
                found = self._reader.counters
                counters = found.model_copy(update={"dropped": found.dropped + waiting.dropped})
                _send(channel, _COUNTERS, counters.model_dump_json().encode())
            sequence = waiting.take(max(0.0, next_counters - time.monotonic()))
            if sequence is not None:
                _send_sequence(channel, sequence)


def _listening(address: tuple[str, int]) -> socket.socket:
    host, port = address
    try:
        (family, _, _, _, place), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        return socket.create_server(place[:2], family=family, backlog=MAX_CONNECTIONS)
    except OSError as problem:
        raise RelayError(
            f"--listen {host}:{port}: cannot listen there ({problem.strerror}). Name an address of "
            "this host and a port that is free."
        ) from None


def _send(channel: Channel, kind: bytes, content: bytes | memoryview) -> None:
    channel.send(kind + content, SECONDS_TO_SEND)


def _send_sequence(channel: Channel, sequence: ServedSequence) -> None:
    head, states = pack_sequence(sequence)
    size = MAX_PLAIN - 1
    pieces = [part[at : at + size] for part in (head, states) for at in range(0, len(part), size)]
    for piece in pieces[:-1]:
        _send(channel, _PART, piece)
    _send(channel, _END, pieces[-1])


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
    connection.close()


class RelayReader:
    """Reads what a relay sends, as `RingReader` reads a ring; connects again when it has to."""

    info: RingInfo

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes,
        *,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        self._place, self._key = (host, port), key
        self._waiting = Waiting(max_waiting_bytes)
        self.counters = RingCounters()
        self._max_bytes = max_waiting_bytes
        self._remote = RingCounters()
        self._problem: RelayError | None = None  # of the last connection
        self._fatal: RelayError | None = None
        self._connection: socket.socket | None = None
        self._has_info, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay-reader", daemon=True)
        self._thread.start()
        if not self._has_info.wait(connect_seconds):
            self.close()
            raise RelayError(
                f"tcp://{host}:{port} is not a relay that can be used: "
                f"{self._problem or 'it has not answered.'} Start `leadout relay` there first."
            )

    def poll(self) -> list[ServedSequence]:
        """All sequences that have arrived since the last call; never waits."""
        if self._fatal is not None:
            raise self._fatal
        found, before = self._waiting.take_all(), self.counters
        # What was lost on the way is what the relay counts, and what was not polled in time.
        self.counters = self._remote.model_copy(
            update={
                "sequences": before.sequences + len(found),
                "tokens": before.tokens + sum(len(sequence.states) for sequence in found),
                "dropped": self._remote.dropped + self._waiting.dropped,
            }
        )
        return found

    def close(self) -> None:
        self._ended.set()
        connection = self._connection
        if connection is not None:
            _end(connection)
        self._thread.join(5.0)

    def _run(self) -> None:
        pause, longest = BACK_OFF_SECONDS
        while not self._ended.is_set():
            started = time.monotonic()
            try:
                self._read()
            except RelayError as problem:
                if self._has_info.is_set() and not self._ended.is_set():
                    logger.warning("The relay %s:%d: %s", *self._place, problem)
                self._problem = problem
            if time.monotonic() - started > longest:  # it worked for a while
                pause = BACK_OFF_SECONDS[0]
            self._ended.wait(pause)
            pause = min(2 * pause, longest)

    def _read(self) -> None:
        """Read from one connection until it ends."""
        try:
            connection = socket.create_connection(self._place, timeout=CONNECT_SECONDS)
        except OSError as problem:
            raise RelayError(f"it cannot be reached ({problem.strerror or problem}).") from None
        self._connection = connection
        parser = FrameParser(self._max_bytes)
        try:
            if self._ended.is_set():
                return
            channel = connect_as_client(connection, self._key)
            while True:
                sequence = parser.add(channel.receive(MAX_SILENCE))
                if sequence is not None:
                    self._waiting.add([sequence])
                    continue
                self._remote = parser.counters
                self._set_info(parser.info)
        finally:
            _end(connection)

    def _set_info(self, info: RingInfo | None) -> None:
        assert info is not None  # the parser refuses everything else before it
        if not self._has_info.is_set():
            self.info = info
            self._has_info.set()
        elif info.tag != self.info.tag:
            self._fatal = RelayError(
                f"The relay {self._place[0]}:{self._place[1]} now has states of another target, "
                "other layers or another precision. Start this command again."
            )
            self._ended.set()
            raise self._fatal


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, also with tcp:// before them; [HOST] for IPv6."""
    try:
        parts = urlsplit(f"//{text.removeprefix('tcp://')}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or parts.path or parts.username is not None:
        raise RelayError(f"{option} {text}: expected a host and a port, such as 10.0.0.5:7600.")
    return host, port


def open_states(name: str, key: Path | None) -> RingReader | RelayReader:
    """The reader of what `--states` names: the folder of a ring, or a relay as tcp://HOST:PORT."""
    if not name.startswith("tcp://"):
        return RingReader(Path(name))
    host, port = parse_address(name, "--states")
    if key is None:
        raise RelayError(
            f"--states {name} requires --states-key, the file that `leadout relay --key` has there."
        )
    return RelayReader(host, port, read_keys(key)[0])
