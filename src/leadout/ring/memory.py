"""A ring file: records of bytes in shared memory, from one writer to any number of readers.

    header   one page of 64-bit numbers in this machine's byte order: magic, capacity, tail, head,
             records, and a tag of 16 bytes
    data     `capacity` bytes; each record is a frame (number, length, CRC-32), then its payload

`head` counts all bytes ever written and `tail` the bytes that are overwritten, so both only grow.
Nobody takes a lock and the writer never waits: it advances `tail` before it overwrites the oldest
records, and `head` after a record is complete. A reader copies a record and then looks at `tail`
again; if that has passed, the copy is discarded and the reader continues with the oldest record
that is left. The number of a record tells how many were lost. The CRC detects what is left on
machines that reorder writes, and damage.

The writer holds a lock of the file for as long as it lives, so that the files of killed processes
can be recognized.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from leadout.errors import LeadoutError

HEADER_BYTES = 4096
MIN_CAPACITY = 1 << 12
MAX_CAPACITY = 1 << 42
TAG_BYTES = 16
_ALIGNMENT = 16  # of records: a frame is never split at the end of the data
_FRAME = struct.Struct("<QII")  # number, bytes of the payload, CRC-32 of both and the payload
_UNCHECKED = struct.Struct("<QI")  # the part of a frame that its CRC covers
_MAGIC = int.from_bytes(b"LEADRNG1", "little")
_CAPACITY, _TAIL, _HEAD, _RECORDS, _TAG = 1, 2, 3, 4, 5  # 64-bit words of the header; 0: magic
_ATTEMPTS = 8  # to copy a record that changes meanwhile


class RingError(LeadoutError):
    """A ring of states that cannot be created, read or used."""


class RingWriter:
    """Creates a ring file and writes records; the oldest ones are overwritten."""

    def __init__(self, path: Path, capacity: int, tag: bytes = bytes(TAG_BYTES)) -> None:
        capacity -= capacity % _ALIGNMENT
        if not MIN_CAPACITY <= capacity <= MAX_CAPACITY or len(tag) != TAG_BYTES:
            raise RingError(f"A ring of {capacity:,} bytes: expected {MIN_CAPACITY:,} or more.")
        self.path, self.capacity = path, capacity
        self._head = self._tail = self._records = 0
        self._sizes: deque[int] = deque()  # of the records from tail to head
        partial = path.with_name(f".{path.name}")
        try:
            self._descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Takes the memory now: a full /dev/shm would end the process at a later write.
                os.posix_fallocate(self._descriptor, 0, HEADER_BYTES + capacity)
                self._memory = mmap.mmap(self._descriptor, HEADER_BYTES + capacity)
                _keep_out_of_dumps(self._memory)
                self._words = memoryview(self._memory)[:HEADER_BYTES].cast("Q")
                self._words[_CAPACITY] = capacity
                self._memory[8 * _TAG : 8 * _TAG + TAG_BYTES] = tag
                self._words[0] = _MAGIC
                partial.rename(path)  # readers see complete headers only
            except BaseException:
                partial.unlink(missing_ok=True)
                os.close(self._descriptor)
                raise
        except OSError as problem:
            raise RingError(
                f"A ring of {capacity:,} bytes cannot be created as {path} ({problem.strerror}). "
                "Use a smaller ring, or enlarge the shared memory (in containers --shm-size)."
            ) from None

    def write(self, parts: Sequence[bytes | memoryview]) -> bool:
        """Append a record that consists of these parts; False if it is larger than the ring."""
        views = [memoryview(part).cast("B") for part in parts]
        length = sum(view.nbytes for view in views)
        size = _aligned(_FRAME.size + length)
        if size > self.capacity:
            return False
        while self._head + size - self._tail > self.capacity:
            self._tail += self._sizes.popleft()
        self._words[_TAIL] = self._tail
        checksum = crc32(_UNCHECKED.pack(self._records, length))
        position = self._head + _FRAME.size
        for view in views:
            checksum = crc32(view, checksum)
            self._put(position, view)
            position += view.nbytes
        self._put(self._head, memoryview(_FRAME.pack(self._records, length, checksum)))
        self._sizes.append(size)
        self._records += 1
        self._head += size
        self._words[_RECORDS] = self._records
        self._words[_HEAD] = self._head
        return True

    def _put(self, position: int, view: memoryview) -> None:
        start = position % self.capacity
        first = min(view.nbytes, self.capacity - start)
        at = HEADER_BYTES + start
        self._memory[at : at + first] = view[:first]
        if first < view.nbytes:
            self._memory[HEADER_BYTES : HEADER_BYTES + view.nbytes - first] = view[first:]

    def close(self) -> None:
        """Remove the file. Readers that have it open can still read what it contains."""
        self.path.unlink(missing_ok=True)
        self._words.release()
        self._memory.close()
        os.close(self._descriptor)


class RingFileReader:
    """Reads the records of a ring file, from the oldest one on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0  # records that were overwritten before they were read
        self._next: int | None = None  # the number of the next record
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                self._memory, self.capacity = _mapped(path, self._descriptor)
            except BaseException:
                os.close(self._descriptor)
                raise
        except OSError as problem:
            raise RingError(f"{path} cannot be read ({problem.strerror}).") from None
        self._words = memoryview(self._memory)[:HEADER_BYTES].cast("Q")
        self._cursor = self._words[_TAIL]

    @property
    def tag(self) -> bytes:
        return bytes(self._memory[8 * _TAG : 8 * _TAG + TAG_BYTES])

    def records(self) -> Iterator[bytes]:
        """The payloads that are in the ring now and have not been read."""
        end = self._words[_HEAD]  # later ones are left: a fast writer must not keep a reader here
        while self._cursor < end and (payload := self._read()) is not None:
            yield payload

    def _read(self) -> bytes | None:
        is_damaged = False
        for _ in range(_ATTEMPTS):
            is_damaged = True
            tail, head = self._words[_TAIL], self._words[_HEAD]  # in this order
            self._cursor = max(self._cursor, tail)
            if self._cursor > head or self._cursor % _ALIGNMENT:
                break
            if self._cursor == head:
                return None
            number, length, checksum = _FRAME.unpack(self._copied(self._cursor, _FRAME.size))
            size = _aligned(_FRAME.size + length)
            is_sound = size <= self.capacity and self._cursor + size <= head
            payload = self._copied(self._cursor + _FRAME.size, length) if is_sound else b""
            if self._words[_TAIL] > self._cursor:  # overtaken while it was copied
                is_damaged = False
                continue
            expected = crc32(payload, crc32(_UNCHECKED.pack(number, length)))
            is_sound = is_sound and checksum == expected
            if is_sound and (self._next is None or number >= self._next):
                self.lost += 0 if self._next is None else number - self._next
                self._next = number + 1
                self._cursor += size
                return payload
        if not is_damaged:  # the writer is faster: the next call begins further on
            return None
        raise RingError(
            f"{self.path} is damaged at byte {self._cursor:,} of its records. Remove the file; the "
            "server that writes it must be started again."
        )

    def _copied(self, position: int, length: int) -> bytes:
        start = HEADER_BYTES + position % self.capacity
        first = self._memory[start : min(start + length, HEADER_BYTES + self.capacity)]
        rest = length - len(first)
        return first + self._memory[HEADER_BYTES : HEADER_BYTES + rest] if rest else first

    @property
    def is_abandoned(self) -> bool:
        """Whether the process that wrote the file has ended."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        self._words.release()
        self._memory.close()
        os.close(self._descriptor)


def is_abandoned(path: Path) -> bool:
    """Whether a ring file has no living writer."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _mapped(path: Path, descriptor: int) -> tuple[mmap.mmap, int]:
    found = os.fstat(descriptor)
    capacity = found.st_size - HEADER_BYTES
    if not stat.S_ISREG(found.st_mode) or not MIN_CAPACITY <= capacity <= MAX_CAPACITY:
        raise RingError(f"{path} is not a ring file: it has {found.st_size:,} bytes.")
    memory = mmap.mmap(descriptor, found.st_size, access=mmap.ACCESS_READ)
    _keep_out_of_dumps(memory)
    magic, named = struct.unpack("=QQ", memory[:16])
    if magic != _MAGIC or named != capacity or capacity % _ALIGNMENT:
        memory.close()
        raise RingError(f"{path} is not a ring file of this version of Leadout.")
    return memory, capacity


def _keep_out_of_dumps(memory: mmap.mmap) -> None:
    """The text of users must not get into a core file."""
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_DONTDUMP)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
