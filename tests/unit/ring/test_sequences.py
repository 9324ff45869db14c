"""The reader of a ring: joins texts and states, and drops what is not whole."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leadout.ring import folder as ring_folder
from leadout.ring.folder import open_writer, prepare, require_memory
from leadout.ring.memory import RingError, RingWriter
from leadout.ring.records import RingInfo, StatesRecord, TextRecord, request_key
from leadout.ring.sequences import (
    SECONDS_AFTER_END,
    SECONDS_FOR_STATES,
    RingReader,
    ServedSequence,
)

WIDTH = 4
INFO = RingInfo(
    target="tiny",
    target_fingerprint="f" * 64,
    layer_ids=(0,),
    hidden_size=WIDTH,
    dtype="float32",
    server_id="a server",
)
PROMPT, RESPONSE = [11, 12, 13, 14], [21, 22, 23]
TEXT = [*PROMPT, *RESPONSE]


def true_states(tokens: list[int], first: int, last: int) -> torch.Tensor:
    """States that depend on every token up to a position, as a target's do."""
    weights = torch.arange(1.0, len(tokens) + 1)
    total = (torch.tensor(tokens).double() * weights).cumsum(0)
    return total[first:last, None].expand(-1, WIDTH).float().contiguous()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Server:
    """The writers of one server."""

    def __init__(self, folder: Path, info: RingInfo = INFO, capacity: int = 1 << 16) -> None:
        prepare(folder, info)
        self.states: RingWriter = open_writer(folder, "states", capacity, info)
        self.texts: RingWriter = open_writer(folder, "texts", 1 << 16, info)

    def step(self, request: str, tokens: list[int], first: int, last: int | None = None) -> None:
        """A step over the positions [first, last) of a request that has these tokens."""
        last = len(tokens) if last is None else last
        inputs = torch.tensor(tokens[first:last], dtype=torch.int32)
        record = StatesRecord(
            request_key(request, "salt"), first, inputs, true_states(tokens, first, last)
        )
        self.states.write(record.packed(INFO))

    def finish(
        self, request: str, response: list[int] = RESPONSE, prompt: list[int] = PROMPT
    ) -> None:
        record = TextRecord(request_key(request, "salt"), prompt, response, 0.5)
        self.texts.write(record.packed())


@pytest.fixture
def folder(shared_memory: Path) -> Path:
    return shared_memory / "ring"


@pytest.fixture
def server(folder: Path) -> Server:
    return Server(folder)


@pytest.fixture
def reader(server: Server, folder: Path) -> RingReader:
    return RingReader(folder, clock=Clock())


def wait(reader: RingReader, seconds: float) -> list[ServedSequence]:
    assert isinstance(reader._clock, Clock)
    reader._clock.now += seconds
    return reader.poll()


def only(sequences: list[ServedSequence]) -> ServedSequence:
    assert len(sequences) == 1
    return sequences[0]


def require_true(sequence: ServedSequence, text: list[int] = TEXT) -> None:
    assert [*sequence.prompt, *sequence.response] == text
    expected = true_states(text, sequence.first, len(text) - 1)
    assert torch.equal(sequence.states, expected)


def test_chunked_prefill_and_decode_become_one_sequence(server: Server, reader: RingReader) -> None:
    server.step("a", TEXT, 0, 3)
    server.step("a", TEXT, 3, 4)
    assert reader.poll() == []
    assert reader.counters.open == 1
    server.step("a", TEXT, 4, 5)
    server.step("a", TEXT, 5, 6)
    server.finish("a")
    sequence = only(reader.poll())
    require_true(sequence)
    assert sequence.complete
    assert sequence.temperature == 0.5
    assert reader.counters.sequences == 1
    assert reader.counters.tokens == len(TEXT) - 1
    assert reader.counters.open == 0


def test_a_rejected_draft_never_enters(server: Server, reader: RingReader) -> None:
    server.step("a", PROMPT, 0)
    # Drafted 90 and 23, of which neither was accepted: 23 follows the wrong token.
    server.step("a", [*PROMPT, 21, 90, 23], 4)
    server.step("a", TEXT, 5, 6)
    server.finish("a")
    require_true(only(reader.poll()))


def test_a_text_before_its_last_states_waits_for_them(server: Server, reader: RingReader) -> None:
    server.step("a", PROMPT, 0)
    server.step("a", [*PROMPT, 21, 90, 23], 4)
    server.finish("a")
    assert reader.poll() == []  # position 5 is known only with the rejected token
    server.step("a", TEXT, 5)
    require_true(only(reader.poll()))
    server.step("a", TEXT, 6)  # of a server that schedules ahead
    assert reader.poll() == []
    assert reader.counters.open == 0


def test_a_rejected_draft_that_no_step_replaced_is_a_gap(
    server: Server, reader: RingReader
) -> None:
    server.step("a", PROMPT, 0)
    server.step("a", [*PROMPT, 21, 90], 4)
    server.finish("a")
    assert reader.poll() == wait(reader, SECONDS_FOR_STATES) == []
    assert reader.counters.with_gaps == 1
    assert reader.counters.open == 0


@given(st.data())
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_schedule_gives_the_true_states(
    shared_memory_of_session: Path, data: st.DataObject
) -> None:
    """Chunks, accepted and rejected drafts, preemption, and a cached prefix."""
    folder = Path(tempfile.mkdtemp(dir=shared_memory_of_session))
    server, reader = Server(folder), RingReader(folder)
    text = data.draw(st.lists(st.integers(1, 5), min_size=5, max_size=20))
    cached = position = data.draw(st.integers(0, 3))
    while position < len(text) - 1:
        drafts = data.draw(st.lists(st.integers(1, 5), max_size=5))
        accepted = 0
        while text[position + 1 + accepted :][:1] == drafts[accepted : accepted + 1] != []:
            accepted += 1
        server.step("a", [*text[: position + 1], *drafts], position)
        position += 1 + accepted
        if data.draw(st.integers(0, 9)) == 9:  # preempted: computed again from some block on
            position = data.draw(st.integers(cached, min(position, len(text) - 2)))
    server.finish("a", text[3:], text[:3])
    sequence = only(reader.poll())
    assert sequence.first == cached
    require_true(sequence, text)
    reader.close()
    server.states.close()
    server.texts.close()


def test_a_cached_prefix_makes_the_sequence_begin_later(server: Server, reader: RingReader) -> None:
    server.step("a", TEXT, 2)
    server.finish("a")
    sequence = only(reader.poll())
    assert (sequence.first, sequence.complete) == (2, False)
    require_true(sequence)


def test_a_gap_drops_the_sequence(server: Server, reader: RingReader) -> None:
    server.step("a", TEXT, 0, 2)
    server.step("a", TEXT, 3)
    server.finish("a")
    server.finish("never seen")
    assert wait(reader, 0) == wait(reader, SECONDS_FOR_STATES) == []
    assert reader.counters.with_gaps == 1
    assert reader.counters.without_states == 1


def test_an_overtaken_reader_counts_and_loses_only_what_was_overwritten(folder: Path) -> None:
    server = Server(folder, capacity=1 << 12)
    reader = RingReader(folder, clock=Clock())
    server.step("first", TEXT, 0)
    reader.poll()
    server.finish("first")
    for number in range(200):
        server.step(f"r{number}", TEXT, 0)
        server.finish(f"r{number}")
    found = reader.poll()
    wait(reader, SECONDS_FOR_STATES)
    for sequence in found:
        require_true(sequence)
    counters = reader.counters
    assert 1 < counters.sequences < 200
    assert counters.overtaken == counters.without_states == 201 - counters.sequences
    assert (counters.overtaken_texts, counters.lost) == (0, counters.without_states)


def test_a_text_that_was_overtaken_is_a_lost_sequence(folder: Path) -> None:
    server = Server(folder)
    reader = RingReader(folder, clock=Clock())
    server.finish("first")
    reader.poll()
    for number in range(1500):
        server.finish(f"r{number}")
    wait(reader, 0)
    counters = reader.counters
    assert counters.overtaken == counters.overtaken_texts == 1501 - len(reader._open) > 0
    wait(reader, SECONDS_FOR_STATES)
    assert counters.lost == 1501


def test_a_text_without_a_response_forgets_the_states(server: Server, reader: RingReader) -> None:
    server.step("a", TEXT, 0)
    server.finish("a", [])
    assert reader.poll() == []
    assert reader.counters.open == 0


def test_open_sequences_have_a_bound(server: Server, folder: Path) -> None:
    row = WIDTH * 4
    reader = RingReader(folder, max_open_bytes=3 * 6 * row)
    for request in "abcde":
        server.step(request, TEXT, 0, 6)
    assert reader.poll() == []
    assert (reader.counters.open, reader.counters.dropped) == (3, 2)
    for request in "abcde":
        server.finish(request)
    assert len(reader.poll()) == 3


def test_several_servers_share_a_folder(server: Server, reader: RingReader, folder: Path) -> None:
    reader.poll()
    other = Server(folder, INFO.model_copy(update={"server_id": "another"}))
    for number, each in enumerate((server, other)):
        each.step(str(number), TEXT, 0)
        each.finish(str(number))
    assert len(reader.poll()) == 2


def test_a_server_with_other_states_must_use_another_folder(server: Server, folder: Path) -> None:
    with pytest.raises(RingError, match="another folder"):
        Server(folder, INFO.model_copy(update={"layer_ids": (2,)}))


def test_a_damaged_file_stops_only_itself(
    server: Server, reader: RingReader, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "states-damaged").write_bytes(b"?" * 20_000)
    other = open_writer(folder, "texts", 1 << 16, INFO)
    other.write([b"not a record"])
    server.step("a", TEXT, 0)
    server.finish("a")
    with caplog.at_level(logging.WARNING, "leadout"):
        require_true(only(reader.poll()))
        assert reader.poll() == []
    assert reader.counters.damaged == 2
    assert len(caplog.records) == 2


def test_a_changed_ring_ends_the_reader(server: Server, reader: RingReader, folder: Path) -> None:
    server.states.close()
    server.texts.close()
    Server(folder, INFO.model_copy(update={"hidden_size": 8}))
    with pytest.raises(RingError, match="again"):
        reader.poll()


def serve_and_wait(folder: Path) -> None:
    server = Server(folder)
    server.step("a", TEXT, 0)
    server.finish("a")
    server.step("unfinished", TEXT, 0)
    (folder / "is-served").touch()
    signal.pause()


def killed_server(folder: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=serve_and_wait, args=(folder,))
    process.start()
    while not (folder / "is-served").exists():
        assert process.is_alive()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def test_what_a_killed_server_has_finished_is_read_and_then_removed(folder: Path) -> None:
    killed_server(folder)
    reader = RingReader(folder, clock=Clock())
    require_true(only(reader.poll()))
    assert reader.counters.open == 1
    assert len(list(ring_folder.ring_files(folder))) == 2  # other readers may want them
    wait(reader, SECONDS_AFTER_END + 1)
    assert list(ring_folder.ring_files(folder)) == []
    assert wait(reader, 0) == []
    assert reader.counters.open == 0


def test_the_next_server_removes_what_a_killed_one_left(folder: Path) -> None:
    killed_server(folder)
    (folder / ".states-partial").touch()
    server = Server(folder, INFO.model_copy(update={"hidden_size": 8}))  # and may be another one
    left = {path.name for path in ring_folder.ring_files(folder, hidden=True)}
    assert left == {server.states.path.name, server.texts.path.name}


def test_a_folder_on_a_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_folder, "_file_system", lambda _path: "ext4")
    with pytest.raises(RingError, match=r"ext4, expected tmpfs.*/dev/shm"):
        prepare(tmp_path / "new" / "ring", INFO)
    assert not (tmp_path / "new").exists()


def test_the_file_system_of_a_folder_is_recognized() -> None:
    require_memory(Path("/dev/shm/not-there/yet"))
    with pytest.raises(RingError, match="kind proc"):
        require_memory(Path("/proc/self"))


def test_a_folder_that_others_can_enter_is_refused(shared_memory: Path) -> None:
    shared_memory.chmod(0o755)
    with pytest.raises(RingError, match="chmod 700"):
        prepare(shared_memory, INFO)


def test_a_new_folder_is_private(server: Server, folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


def test_a_folder_without_a_ring_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RingError, match="--learn-states"):
        RingReader(tmp_path)
    (tmp_path / "ring.json").write_text("{}")
    with pytest.raises(RingError, match="is not a ring"):
        RingReader(tmp_path)
