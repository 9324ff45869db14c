"""Whole sequences from a ring: joins the states of a request with its text.

    reader = RingReader(Path("/dev/shm/leadout-ring"))
    for sequence in reader.poll():
        ...

Drafts are verified in the same pass that computes states, so records also have the rows of drafts
that were rejected. They never get into a sequence: the next step of the request begins at the first
rejected position and replaces all rows from there on, and every row that is used must have been
computed from the tokens of the finished text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from leadout.ring.folder import STATES, read_info, ring_files
from leadout.ring.memory import RingError, RingFileReader
from leadout.ring.records import StatesRecord, TextRecord

logger = logging.getLogger("leadout")

MAX_OPEN_BYTES = 2 << 30
# A text may be in the ring before its last states: those of a GPU are copied in the background.
SECONDS_FOR_STATES = 5.0
MAX_FINISHED = 8192  # requests of which further records are ignored
SECONDS_AFTER_END = 60.0  # until the file of a process that has ended is removed


class RingCounters(BaseModel):
    """Since the reader was created."""

    model_config = ConfigDict(extra="forbid")

    sequences: int = 0
    tokens: int = 0  # rows of those sequences
    overtaken: int = 0  # records that were overwritten before they were read
    overtaken_texts: int = 0  # those of them that were texts, each the only trace of its sequence
    with_gaps: int = 0  # sequences dropped: some of their states were lost
    without_states: int = 0  # texts dropped: none of their states were read
    dropped: int = 0  # sequences dropped because too many were open
    damaged: int = 0  # files that are not read any more
    open: int = 0  # sequences that are not complete yet

    @property
    def lost(self) -> int:
        """Sequences that will never be complete.

        Without states that were overtaken a sequence has a gap, or none at all, and counts as such
        when its text is read.
        """
        return self.with_gaps + self.without_states + self.dropped + self.overtaken_texts


@dataclass(frozen=True)
class ServedSequence:
    """A finished request with the states that the server computed for it."""

    prompt: list[int]
    response: list[int]
    temperature: float
    first: int  # position of the first row; 0 unless the beginning came from the prefix cache
    states: Tensor  # [len(prompt) + len(response) - 1 - first, layers * H]

    @property
    def complete(self) -> bool:
        return self.first == 0


@dataclass
class _Open:
    """What is known of a request that is not complete."""

    parts: list[StatesRecord] = field(default_factory=list)  # ascending, without overlap
    text: TextRecord | None = None
    deadline: float = 0.0  # for its states, once the text is known
    source: Path | None = None  # the file of its states
    bytes: int = 0

    def add(self, record: StatesRecord) -> None:
        """A step computes all positions from its first one on anew: earlier rows are void."""
        while self.parts and self.parts[-1].first >= record.first:
            self.bytes -= self.parts.pop().states.nbytes
        if self.parts:
            last = self.parts[-1]
            if last.first + len(last.tokens) > record.first:
                kept = record.first - last.first
                # Copies, so that the memory of the other rows is free.
                rows, tokens = last.states[:kept].clone(), last.tokens[:kept].clone()
                self.parts[-1] = StatesRecord(last.key, last.first, tokens, rows)
                self.bytes -= last.states.nbytes - rows.nbytes
        self.parts.append(record)
        self.bytes += record.states.nbytes

    def joined(self) -> ServedSequence | None:
        """The sequence, if states of all its positions from the first one on are there."""
        text = self.text
        if text is None or not self.parts:
            return None
        tokens = torch.tensor([*text.prompt, *text.response], dtype=torch.int32)
        end, first = len(tokens) - 1, self.parts[0].first
        position, rows = first, []
        for part in self.parts:
            if part.first != position:
                return None
            used = min(len(part.tokens), end - position)
            if not torch.equal(part.tokens[:used], tokens[position : position + used]):
                return None
            rows.append(part.states[:used])
            position += used
            if position == end:
                states = torch.cat(rows)
                return ServedSequence(text.prompt, text.response, text.temperature, first, states)
        return None


class RingReader:
    """Reads all ring files of a folder, also those of servers that start later."""

    def __init__(
        self,
        folder: Path,
        *,
        max_open_bytes: int = MAX_OPEN_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.info = folder, read_info(folder)
        self.counters = RingCounters()
        self._max_open_bytes, self._clock = max_open_bytes, clock
        self._files: dict[Path, RingFileReader] = {}
        self._unusable: set[Path] = set()
        self._ended: dict[Path, float] = {}  # when the end of a writer was noticed
        self._open: dict[bytes, _Open] = {}  # the one that was extended last is the last one
        self._open_bytes = 0
        # A server that schedules ahead computes one more step of a request that has ended.
        self._finished: dict[bytes, None] = {}

    def poll(self) -> list[ServedSequence]:
        """All sequences that have become complete since the last call; never waits."""
        self._attach()
        found: list[ServedSequence] = []
        states = [path for path in self._files if path.name.startswith(f"{STATES}-")]
        texts = [path for path in self._files if path not in states]
        for path in [*states, *texts]:
            self._read(path, found)
        self._give_up()
        self.counters.open = len(self._open)
        return found

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._open.clear()

    def _attach(self) -> None:
        try:
            paths = set(ring_files(self.folder))
            info = read_info(self.folder)
        except OSError as problem:
            raise RingError(
                f"The ring {self.folder} cannot be read any more ({problem.strerror})."
            ) from None
        if info.tag != self.info.tag:
            raise RingError(
                f"The ring {self.folder} now has states of another target, other layers or another "
                "precision. Start this command again."
            )
        self._unusable &= paths
        for path in sorted(paths - self._files.keys() - self._unusable):
            with self._setting_aside(path):
                file = RingFileReader(path)
                self._files[path] = file
                if file.tag != self.info.tag:
                    raise RingError(f"{path} has records of another ring.")

    def _read(self, path: Path, found: list[ServedSequence]) -> None:
        file, lost = self._files[path], self._files[path].lost
        is_ended = file.is_abandoned  # before reading: nothing can follow after that
        with self._setting_aside(path):
            for content in file.records():
                if path.name.startswith(f"{STATES}-"):
                    self._add_states(StatesRecord.parse(content, self.info), path, found)
                else:
                    self._add_text(TextRecord.parse(content), found)
        overtaken = file.lost - lost
        self.counters.overtaken += overtaken
        if not path.name.startswith(f"{STATES}-"):
            self.counters.overtaken_texts += overtaken
        if is_ended and path in self._files:
            self._end(path)

    def _end(self, path: Path) -> None:
        """Forget the file of a writer that has ended, when texts and other readers had time."""
        since = self._ended.setdefault(path, self._clock())
        if self._clock() - since > SECONDS_AFTER_END:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            self._ended.pop(path)
            self._files.pop(path).close()
            for key in [key for key, each in self._open.items() if each.source == path]:
                self._forget(key)  # their texts cannot come any more

    def _add_states(self, record: StatesRecord, source: Path, found: list[ServedSequence]) -> None:
        if record.key in self._finished:
            return
        request = self._open.pop(record.key, None) or _Open()
        self._open_bytes -= request.bytes
        if request.source not in (None, source):  # never mixes what two processes computed
            request = _Open(text=request.text, deadline=request.deadline)
        request.source = source
        request.add(record)
        self._open_bytes += request.bytes
        self._open[record.key] = request
        if request.text is not None:
            self._join(record.key, found)
        while self._open_bytes > self._max_open_bytes and self._open:
            self._forget(next(iter(self._open)))
            self.counters.dropped += 1

    def _add_text(self, text: TextRecord, found: list[ServedSequence]) -> None:
        if not text.response:
            self._finish(text.key)
            return
        request = self._open.setdefault(text.key, _Open())
        request.text, request.deadline = text, self._clock() + SECONDS_FOR_STATES
        self._join(text.key, found)

    def _join(self, key: bytes, found: list[ServedSequence]) -> None:
        sequence = self._open[key].joined()
        if sequence is not None:
            self._finish(key)
            found.append(sequence)
            self.counters.sequences += 1
            self.counters.tokens += len(sequence.states)

    def _finish(self, key: bytes) -> None:
        self._forget(key)
        self._finished[key] = None
        if len(self._finished) > MAX_FINISHED:
            del self._finished[next(iter(self._finished))]

    def _forget(self, key: bytes) -> None:
        request = self._open.pop(key, None)
        if request is not None:
            self._open_bytes -= request.bytes

    def _give_up(self) -> None:
        """Drop texts whose states have not come."""
        now = self._clock()
        waiting = [(key, each) for key, each in self._open.items() if each.text is not None]
        for key, request in waiting:
            if now >= request.deadline:
                self._finish(key)
                if request.parts:
                    self.counters.with_gaps += 1
                else:
                    self.counters.without_states += 1

    def _setting_aside(self, path: Path) -> _SettingAside:
        return _SettingAside(self, path)


class _SettingAside:
    """Stops reading a file at the first `RingError`: those of other servers are still good."""

    def __init__(self, reader: RingReader, path: Path) -> None:
        self._reader, self._path = reader, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, RingError):
            return False
        reader, path = self._reader, self._path
        reader._unusable.add(path)
        if path in reader._files:
            reader._files.pop(path).close()
        if path.exists():  # else its writer has just removed it
            reader.counters.damaged += 1
            logger.warning("A file of the ring is not read any more: %s", error)
        return True
