"""Served sequences with their states, read in the background and kept in memory.

A ring is overwritten while nobody reads it, so a thread reads while a cycle trains. The newest
sequences are kept up to a limit in bytes. They are what users wrote: they are in no file, and no
message contains any of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch

from leadout.dflash.config import DrafterConfig
from leadout.engine.capture_store import SOURCE
from leadout.evaluate.memory_states import KeptStates, first_position_needed
from leadout.learn.config import LearnError, Record
from leadout.learn.data import MAX_REQUESTS
from leadout.ring.records import RingInfo
from leadout.ring.relay import open_states
from leadout.ring.sequences import RingCounters, ServedSequence
from leadout.shards import Sample

POLL_SECONDS = 0.5
END_SECONDS = 10.0  # for the thread to notice that it must end


class SequenceSource(Protocol):
    """Where served sequences come from."""

    info: RingInfo
    counters: RingCounters

    def poll(self) -> list[ServedSequence]:
        """All sequences that have become complete since the last call; never waits."""

    def close(self) -> None: ...


class ServedCounts(Record):
    """What became of the served sequences since the learner started."""

    sequences: int  # read, with all their states
    used: int  # kept for training; the oldest of them may have been dropped since
    without_beginning: int  # left out: the drafter sees what came from the server's prefix cache
    unusable: int  # left out: too short for a block, or not of this target
    lost: int  # overwritten before they were read, or incomplete


@dataclass(frozen=True, slots=True)
class KeptSequence:
    sample: Sample
    states: KeptStates

    @property
    def bytes(self) -> int:
        return self.states.rows.nbytes


class Collector:
    """Reads all sources until the `with` block ends; `newest` is what it has kept."""

    def __init__(
        self,
        sources: Sequence[SequenceSource],
        drafter: DrafterConfig,
        vocab_size: int,
        max_bytes: int,
    ) -> None:
        self._sources = sources
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._max_bytes = max_bytes
        self._kept: deque[KeptSequence] = deque()
        self._bytes = 0
        self._read = self._used = self._without_beginning = self._unusable = 0
        self._problem: BaseException | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="collector", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(END_SECONDS)
        for source in self._sources:
            source.close()

    def newest(self) -> list[KeptSequence]:
        """The kept sequences, oldest first; raises `problem` if there is one."""
        with self._lock:
            if self._problem is not None:
                raise self._problem
            return list(self._kept)

    @property
    def problem(self) -> BaseException | None:
        """The error that ended the reading, if any."""
        with self._lock:
            return self._problem

    def counts(self) -> ServedCounts:
        with self._lock:
            counters = [source.counters for source in self._sources]
            return ServedCounts(
                sequences=self._read,
                used=self._used,
                without_beginning=self._without_beginning,
                unusable=self._unusable,
                lost=sum(each.lost for each in counters),
            )

    def _work(self) -> None:
        try:
            while not self._ended.is_set():
                for source in self._sources:
                    for sequence in source.poll():
                        self._add(sequence)
                self._ended.wait(POLL_SECONDS)
        except BaseException as problem:  # raised again in the learner's own thread
            with self._lock:
                self._problem = problem

    def _add(self, sequence: ServedSequence) -> None:
        with self._lock:
            self._read += 1
            needed = first_position_needed(self._drafter, len(sequence.prompt))
            if not self._is_usable(sequence):
                self._unusable += 1
                return
            if sequence.first > needed:
                self._without_beginning += 1
                return
            self._used += 1
            sample = Sample(
                id=f"served-{self._used:012}",  # in the order of arrival
                source=SOURCE,
                prompt=sequence.prompt,
                response=sequence.response,
                temperature=sequence.temperature,
            )
            self._kept.append(KeptSequence(sample, KeptStates(sequence.first, sequence.states)))
            self._bytes += self._kept[-1].bytes
            while self._bytes > self._max_bytes or len(self._kept) > MAX_REQUESTS:
                self._bytes -= self._kept.popleft().bytes

    def _is_usable(self, sequence: ServedSequence) -> bool:
        """One sequence that cannot be trained on must not stop learning."""
        tokens = (*sequence.prompt, *sequence.response)
        is_known = max(tokens) < self._vocab_size
        is_long_enough = len(sequence.response) >= self._drafter.block_size
        return is_known and is_long_enough and bool(torch.isfinite(sequence.states).all())


def open_sources(
    names: Sequence[str], key: Path | None, target_fingerprint: str, drafter: DrafterConfig
) -> list[SequenceSource]:
    """The sources of --states, which must all have the states that this drafter reads.

    `key` is the file of --states-key, for relays.
    """
    sources: list[SequenceSource] = []
    try:
        for name in names:
            sources.append(open_states(name, key))
            _require_fit(name, sources[-1].info, target_fingerprint, drafter)
            first = sources[0].info
            if sources[-1].info.dtype != first.dtype:
                raise LearnError(
                    f"--states {name} has states in {sources[-1].info.dtype}, but --states "
                    f"{names[0]} in {first.dtype}; expected the same of all servers. Start them "
                    "with the same precision, or run a learner and a registry for each."
                )
    except BaseException:
        for source in sources:
            source.close()
        raise
    return sources


def _require_fit(
    name: str, info: RingInfo, target_fingerprint: str, drafter: DrafterConfig
) -> None:
    if info.target_fingerprint != target_fingerprint:
        raise LearnError(
            f"--states {name} has states of {info.target} (fingerprint "
            f"{info.target_fingerprint[:12]}), not of the target ({target_fingerprint[:12]}). A "
            "drafter learns only from its own target: name the ring of a server of this target."
        )
    found, expected = info.layer_ids, tuple(drafter.target_layer_ids)
    sizes = info.hidden_size, drafter.context_size
    if found != expected or sizes[0] != sizes[1]:
        raise LearnError(
            f"--states {name} has states of the layers {list(found)} with {sizes[0]} values, but "
            f"the drafter reads {list(expected)} with {sizes[1]}. Start the server with the "
            "registry of this learner."
        )
