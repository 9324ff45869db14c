"""The relay of a ring: over real sockets, only for holders of the key, and nobody waits for it."""

from __future__ import annotations

import base64
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from cryptography.fernet import Fernet

from leadout.ring import channel, relay
from leadout.ring.channel import (
    MAX_PLAIN,
    ConnectionEndedError,
    Opener,
    RelayError,
    Sealer,
    Stream,
    connect_as_client,
    connect_as_server,
    read_keys,
)
from leadout.ring.folder import open_writer, prepare
from leadout.ring.records import RingInfo, StatesRecord, TextRecord, request_key
from leadout.ring.relay import (
    FrameParser,
    Relay,
    RelayReader,
    Waiting,
    open_states,
    pack_sequence,
    parse_address,
    parse_sequence,
)
from leadout.ring.sequences import RingReader, ServedSequence

KEY, OTHER = bytes(range(32)), bytes(32)
COUNT = 110
SECONDS = 60.0  # for whatever must happen, on a busy machine


def info(width: int = 4, target: str = "f") -> RingInfo:
    return RingInfo(
        target="tiny",
        target_fingerprint=target * 64,
        layer_ids=(0,),
        hidden_size=width,
        dtype="float32",
        server_id="a server",
    )


class Server:
    """The writers of a server, and a relay of their ring."""

    def __init__(self, folder: Path, described: RingInfo) -> None:
        self.info, self.count = described, 0
        prepare(folder, described)
        self.states = open_writer(folder, "states", 1 << 24, described)
        self.texts = open_writer(folder, "texts", 1 << 20, described)

    def answer(self, prompt: list[int], response: list[int]) -> torch.Tensor:
        """Write a finished request into the ring; returns its states."""
        self.count += 1
        key, tokens = request_key(str(self.count), "salt"), torch.tensor([*prompt, *response[:-1]])
        states = torch.randn(len(tokens), self.info.width)
        self.states.write(StatesRecord(key, 0, tokens.int(), states).packed(self.info))
        self.texts.write(TextRecord(key, prompt, response, 0.5).packed())
        return states


@contextmanager
def relayed(
    folder: Path, described: RingInfo | None = None, port: int = 0, **settings: int
) -> Iterator[tuple[Server, Relay]]:
    server = Server(folder, described or info())
    reader = RingReader(folder)
    running = Relay(reader, ("127.0.0.1", port), [KEY], **settings)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    try:
        yield server, running
    finally:
        running.close()
        thread.join(SECONDS)
        assert not thread.is_alive()
        reader.close()
        server.states.close()
        server.texts.close()


@contextmanager
def reading(running: Relay) -> Iterator[RelayReader]:
    reader = RelayReader("127.0.0.1", running.port, KEY, connect_seconds=SECONDS)
    try:
        wait_until(lambda: running.learners > 0)
        yield reader
    finally:
        reader.close()


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not is_true() and time.monotonic() < end:
        time.sleep(0.01)
    assert is_true()


def polled(reader: RelayReader, count: int) -> list[ServedSequence]:
    found: list[ServedSequence] = []

    def has_enough() -> bool:
        found.extend(reader.poll())
        return len(found) >= count

    wait_until(has_enough)
    return found


def test_a_learner_elsewhere_gets_what_is_in_the_ring(shared_memory: Path) -> None:
    # Rows of 80,000 bytes: a sequence takes several frames.
    with (
        relayed(shared_memory / "ring", info(20_000)) as (server, running),
        reading(running) as reader,
    ):
        assert reader.info == server.info
        expected = [server.answer([1, 2, n], list(range(40))) for n in range(3)]
        found = polled(reader, 3)
        assert [sequence.prompt for sequence in found] == [[1, 2, 0], [1, 2, 1], [1, 2, 2]]
        for sequence, states in zip(found, expected, strict=True):
            assert sequence.response == list(range(40))
            assert (sequence.temperature, sequence.first) == (0.5, 0)
            assert torch.equal(sequence.states, states)
        assert reader.poll() == []
        counters = reader.counters
        assert (counters.sequences, counters.tokens, counters.dropped) == (3, 3 * 42, 0)


def test_every_learner_gets_all_sequences_of_several_servers(shared_memory: Path) -> None:
    with (
        relayed(shared_memory / "one") as (first, of_first),
        relayed(shared_memory / "two") as (second, of_second),
        reading(of_first) as a,
        reading(of_second) as b,
        reading(of_first) as other,
    ):
        wait_until(lambda: of_first.learners == 2)
        first.answer([1], [2, 3, 4])
        second.answer([5], [6, 7, 8])
        assert [polled(reader, 1)[0].prompt for reader in (a, b, other)] == [[1], [5], [1]]


def test_without_the_key_there_is_nothing_but_the_end(shared_memory: Path) -> None:
    with relayed(shared_memory / "ring") as (server, running):
        public = bytes(32)
        hellos = {
            "another key": channel.MAGIC + public + channel._proof(OTHER, b"client", public),
            "no key": b"GET / HTTP/1.1\r\nHost: relay\r\n\r\n".ljust(72),
            # A public value that gives the same secret with every other.
            "low order": channel.MAGIC + public + channel._proof(KEY, b"client", public),
        }
        for name, hello in hellos.items():
            with socket.create_connection(("127.0.0.1", running.port), SECONDS) as connection:
                connection.sendall(hello)
                assert connection.recv(1) == b"", name
        with pytest.raises(RelayError, match="as it does with a wrong key"):
            RelayReader("127.0.0.1", running.port, OTHER, connect_seconds=2.0)
        assert running.learners == 0
        with reading(running) as reader:  # it still works
            server.answer([1], [2, 3, 4])
            assert polled(reader, 1)[0].prompt == [1]


def test_a_recorded_connection_cannot_be_played_back(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A relay that has nothing to send notices an end when it sends these.
    monkeypatch.setattr(relay, "SECONDS_BETWEEN_COUNTERS", 0.2)
    with relayed(shared_memory / "ring") as (_, running):
        recorded = bytearray()

        class Recording(Stream):
            def write(self, content: bytes, seconds: float) -> None:
                recorded.extend(content)
                super().write(content, seconds)

        with (
            pytest.MonkeyPatch.context() as patch,
            socket.create_connection(("127.0.0.1", running.port), SECONDS) as connection,
        ):
            patch.setattr(channel, "Stream", Recording)
            opened = connect_as_client(connection, KEY)
            assert opened.receive(SECONDS)[:1] == b"I"
        wait_until(lambda: running.learners == 0)
        with socket.create_connection(("127.0.0.1", running.port), SECONDS) as connection:
            connection.sendall(bytes(recorded))
            answer = bytearray()
            while part := connection.recv(1 << 16):
                answer += part
        assert len(answer) == channel._HELLO_BYTES  # a public value and its proof, nothing sealed


def test_what_is_not_a_relay_is_not_believed() -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(channel.MAGIC + bytes(64))
        with pytest.raises(RelayError, match="not a relay, or does not have the key"):
            connect_as_client(near, KEY)


def test_frames_are_refused_when_changed_left_out_repeated_or_too_large() -> None:
    sealer = Sealer(KEY)
    first, second = sealer.seal(b"one"), sealer.seal(b"two")
    assert b"one" not in first

    def opened(content: bytes) -> list[bytes]:
        opener, left = Opener(KEY), bytearray(content)

        def read(count: int) -> bytes:
            if count > len(left):
                raise ConnectionEndedError("end")
            taken = bytes(left[:count])
            del left[:count]
            return taken

        found = []
        with suppress(ConnectionEndedError):
            while True:
                found.append(opener.open(read))
        return found

    assert opened(first + second) == [b"one", b"two"]
    for bad in (second, first + first, second + first, first[:-1] + b"x", first[:4] + bytes(19)):
        with pytest.raises(RelayError, match="was changed on its way"):
            opened(bad)
    for place in range(len(first)):
        damaged = bytearray(first + second)
        damaged[place] ^= 1
        with suppress(RelayError):
            assert opened(bytes(damaged)) == []  # another length: it waits for the rest
    for length in (0, 15, MAX_PLAIN + 17, 2**32 - 1):
        with pytest.raises(RelayError, match="expected at most"):
            opened(length.to_bytes(4, "big"))


def test_a_stuck_learner_costs_neither_the_relay_nor_other_learners(shared_memory: Path) -> None:
    limit = 2_000_000  # three sequences
    with (
        relayed(shared_memory / "ring", info(5000), max_waiting_bytes=limit) as (server, running),
        socket.create_connection(("127.0.0.1", running.port), SECONDS) as stuck,
        reading(running) as reader,
    ):
        opened = connect_as_client(stuck, KEY)
        wait_until(lambda: running.learners == 2)
        for number in range(COUNT):  # 64 MB, more than the system buffers; the stuck one reads none
            server.answer([number], list(range(30)))
            polled(reader, 1)
        assert reader.counters.sequences == COUNT
        # It continues with the newest ones.
        parser, kept = FrameParser(), list[int]()
        while not kept or kept[-1] != COUNT - 1:
            sequence = parser.add(opened.receive(SECONDS))
            kept += [] if sequence is None else sequence.prompt
        assert kept == sorted(kept)
        assert len(kept) < COUNT


def test_what_is_not_polled_in_time_is_dropped_the_oldest_first() -> None:
    waiting = Waiting(3 * 52)
    for number in range(5):
        states = torch.zeros(2, 5)
        waiting.add([ServedSequence([number], [1, 2], 0.0, 0, states)])
    assert [sequence.prompt for sequence in waiting.take_all()] == [[2], [3], [4]]
    assert waiting.dropped == 2
    assert waiting.take(0.0) is None


def test_a_reader_connects_again(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "BACK_OFF_SECONDS", (0.05, 0.2))
    with relayed(shared_memory / "ring") as (_, running):
        reader, port = RelayReader("127.0.0.1", running.port, KEY), running.port
    try:
        with relayed(shared_memory / "again", port=port) as (server, running):
            wait_until(lambda: running.learners == 1)
            server.answer([1], [2, 3, 4])
            assert polled(reader, 1)[0].prompt == [1]
        with relayed(shared_memory / "other", info(target="e"), port=port):
            wait_until(lambda: reader._fatal is not None)
            with pytest.raises(RelayError, match="now has states of another target"):
                reader.poll()
    finally:
        reader.close()


def test_a_silent_relay_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_SILENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            opened = connect_as_server(connection, [KEY])
            opened.send(b"I" + info().model_dump_json().encode(), SECONDS)
            silent.wait(SECONDS)
            connection.close()

        silent = threading.Event()
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        reader = RelayReader("127.0.0.1", listening.getsockname()[1], KEY)
        wait_until(lambda: "nothing for too long" in str(reader._problem))
        silent.set()
        reader.close()
        thread.join(SECONDS)


def test_a_place_without_a_relay_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(RelayError, match=r"cannot be reached.*Start `leadout relay` there"):
        RelayReader("127.0.0.1", port, KEY, connect_seconds=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_is_the_same_after_its_bytes(dtype: torch.dtype) -> None:
    states = torch.randn(5, 4).to(dtype)
    sequence = ServedSequence([1, 2, 3], [4, 5, 6, 7], 0.25, 1, states)
    content = b"".join(pack_sequence(sequence))
    found = parse_sequence(content, info())
    assert torch.equal(found.states, states)
    assert found.states.dtype == dtype
    assert (found.prompt, found.response, found.first) == ([1, 2, 3], [4, 5, 6, 7], 1)
    for bad in (content[:-1], content + b"\0", content[:8], b"\3" + content[1:]):
        with pytest.raises(RelayError):
            parse_sequence(bad, info())


def test_a_relay_describes_its_ring_once_and_sends_nothing_that_is_unknown() -> None:
    described = b"I" + info().model_dump_json().encode()
    for before, frame in (
        ([], b"E"),
        ([], b"I{}"),
        *(([described], f) for f in (described, b"X", b"")),
    ):
        parser = FrameParser()
        for each in before:
            parser.add(each)
        with pytest.raises(RelayError):
            parser.add(frame)
    parser = FrameParser(max_bytes=100)
    parser.add(described)
    parser.add(b"P" + bytes(90))
    with pytest.raises(RelayError, match="more than 100 bytes"):
        parser.add(b"P" + bytes(11))


def test_states_are_a_folder_or_a_relay(shared_memory: Path, tmp_path: Path) -> None:
    with pytest.raises(RelayError, match="requires --states-key"):
        open_states("tcp://10.0.0.5:7600", None)
    (tmp_path / "key").write_bytes(base64.urlsafe_b64encode(KEY))
    with relayed(shared_memory / "ring") as (server, running):
        for name in (str(shared_memory / "ring"), f"tcp://127.0.0.1:{running.port}"):
            reader = open_states(name, tmp_path / "key")
            assert reader.info == server.info
            reader.close()


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    new, old = Fernet.generate_key(), Fernet.generate_key()
    path.write_bytes(new + b"\n" + old + b"\n")
    assert len(read_keys(path)) == 2
    near, far = socket.socketpair()
    with near, far:
        # A learner that still has the old key is let in.
        thread = threading.Thread(target=connect_as_server, args=(far, read_keys(path)))
        thread.start()
        connect_as_client(near, read_keys(path)[1])
        thread.join(SECONDS)
    for content, message in ((b"", "has no key"), (b"secret", "key 1 is not one of 32 bytes")):
        path.write_bytes(content)
        with pytest.raises(RelayError, match=message):
            read_keys(path)


@pytest.mark.parametrize("text", ["host", "host:x", ":7600", "host:70000", "u@host:1", "h:1/x", ""])
def test_addresses(text: str) -> None:
    assert parse_address("tcp://10.0.0.5:7600", "--states") == ("10.0.0.5", 7600)
    assert parse_address("[::1]:7600", "--listen") == ("::1", 7600)
    with pytest.raises(RelayError, match=r"--listen .*expected a host and a port"):
        parse_address(text, "--listen")


# A run of the command that says at its end whether its memory can get into a core file.
RUN = """
import ctypes, resource, sys
from leadout.cli.app import app
try:
    app(sys.argv[1:])
finally:
    core, _ = resource.getrlimit(resource.RLIMIT_CORE)
    print("core:", core, "dumpable:", ctypes.CDLL(None).prctl(3))
"""


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_the_command_relays_until_it_is_stopped(
    stop: signal.Signals, shared_memory: Path, tmp_path: Path
) -> None:
    (tmp_path / "key").write_bytes(base64.urlsafe_b64encode(KEY))
    server = Server(shared_memory / "ring", info())
    command = [sys.executable, "-c", RUN, "relay", str(shared_memory / "ring")]
    command += ["--listen", "127.0.0.1:0", "--key", str(tmp_path / "key")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(line.partition("127.0.0.1:")[2].partition(".")[0])
        reader = RelayReader("127.0.0.1", port, KEY, connect_seconds=SECONDS)
        try:
            end = time.monotonic() + SECONDS
            found: list[ServedSequence] = []
            while not found and time.monotonic() < end:  # those before the connection are gone
                server.answer([1, 2], [3, 4, 5])
                time.sleep(0.1)
                found = reader.poll()
            assert found[0].response == [3, 4, 5]
        finally:
            reader.close()
            process.send_signal(stop)
            assert process.wait(SECONDS) == 0
        assert process.stdout.read() == "core: 0 dumpable: 0\n"
    server.states.close()
    server.texts.close()


def test_a_relay_without_a_key_does_not_start(shared_memory: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "leadout",
        "relay",
        str(shared_memory),
        "--listen",
        "0.0.0.0:0",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--key" in ended.stderr
