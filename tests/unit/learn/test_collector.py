"""Served sequences in memory: which are used, how many are kept, and what is counted."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import pytest
import torch

from leadout.checkpoints import read_checkpoint
from leadout.dflash.config import DrafterConfig, LayerAttention
from leadout.learn.collector import Collector
from leadout.ring.memory import RingError
from leadout.ring.sequences import RingCounters, RingReader, ServedSequence
from support import served_world
from support.learn_world import NEW, World, requests
from support.models import TINY_VOCAB
from support.served_world import ring_info, served


class ListedSource:
    """Hands out one list of sequences after the other."""

    def __init__(self, world: World, *polls: list[ServedSequence] | RingError) -> None:
        self.info, self.counters = ring_info(world), RingCounters(with_gaps=2, without_states=1)
        self._polls = list(polls)
        self.is_closed = False

    def poll(self) -> list[ServedSequence]:
        found = self._polls.pop(0) if self._polls else []
        if isinstance(found, RingError):
            raise found
        return found

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def config(world: World) -> DrafterConfig:
    return read_checkpoint(world.drafter).config


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sequences_are_kept_in_their_order_and_unusable_ones_counted(
    world: World, config: DrafterConfig
) -> None:
    good = served(world, requests(NEW, 4))
    unknown = dataclasses.replace(good[0], prompt=[TINY_VOCAB, *good[0].prompt[1:]])
    brief = dataclasses.replace(good[0], response=[1] * (config.block_size - 1))
    damaged = dataclasses.replace(good[0], states=torch.full_like(good[0].states, torch.nan))
    source = ListedSource(world, [good[0], unknown, brief], [damaged, *good[1:]])
    with Collector([source], config, TINY_VOCAB, 1 << 30) as collector:
        wait_until(lambda: collector.counts().sequences == 7)
        kept, counts = collector.newest(), collector.counts()
    assert [each.sample.response for each in kept] == [each.response for each in good]
    assert [each.sample.id for each in kept] == sorted(each.sample.id for each in kept)
    assert (counts.used, counts.unusable, counts.without_beginning, counts.lost) == (4, 3, 0, 3)
    assert source.is_closed


def test_the_oldest_are_dropped_when_memory_is_full(world: World, config: DrafterConfig) -> None:
    sequences = served(world, requests(NEW, 10))
    room = sum(each.states.nbytes for each in sequences[-3:])
    source = ListedSource(world, sequences)
    with Collector([source], config, TINY_VOCAB, room) as collector:
        wait_until(lambda: collector.counts().sequences == 10)
        kept = collector.newest()
    assert [each.sample.prompt for each in kept] == [each.prompt for each in sequences[-3:]]


@pytest.mark.parametrize(
    ("window", "missing", "is_used"),
    # The first anchor of an answer after 6 tokens is at 6; it sees 6 - window + 1 and later ones.
    [(None, 1, False), (3, 4, True), (3, 5, False), (16, 1, False), (16, 0, True)],
)
def test_a_sequence_without_its_beginning_is_used_where_no_block_sees_it(
    world: World, config: DrafterConfig, window: int | None, missing: int, is_used: bool
) -> None:
    windowed = dataclasses.replace(config, layers=(LayerAttention(window, causal=True),))
    (sample,) = requests(NEW, 1)
    (sequence,) = served(
        world, [sample.model_copy(update={"prompt": [1, 2, 3, 4, 5, 6]})], first=missing
    )
    source = ListedSource(world, [sequence])
    with Collector([source], windowed, TINY_VOCAB, 1 << 30) as collector:
        wait_until(lambda: collector.counts().sequences == 1)
        counts, kept = collector.counts(), collector.newest()
    assert (counts.used, counts.without_beginning) == ((1, 0) if is_used else (0, 1))
    assert [each.states.first for each in kept] == ([missing] if is_used else [])


def test_a_ring_that_cannot_be_read_any_more_ends_the_wait(
    world: World, config: DrafterConfig
) -> None:
    source = ListedSource(world, [], RingError("gone"))

    def has_failed() -> bool:
        try:
            collector.newest()
        except RingError:
            return True
        return False

    with Collector([source], config, TINY_VOCAB, 1 << 30) as collector:
        wait_until(has_failed)


def test_what_the_server_overwrote_before_it_was_read_counts_as_lost(
    world: World, config: DrafterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all requests either the text or the states are gone, or nothing is."""
    monkeypatch.setattr(served_world, "RING_BYTES", 1 << 16)
    with served_world.ring_of(world) as ring:
        reader = RingReader(ring.folder, clock=lambda: 100 * time.monotonic())
        ring.serve(requests(NEW, 1))
        assert len(reader.poll()) == 1  # the reader was there before the others
        for _ in range(20):
            ring.serve(requests(NEW, 30, first=100))
        with Collector([reader], config, TINY_VOCAB, 1 << 30) as collector:
            wait_until(lambda: collector.counts().sequences + collector.counts().lost >= 600)
            counts, counters = collector.counts(), reader.counters
    assert counts.lost == 600 - counts.sequences
    assert counters.overtaken_texts > 100
    assert counters.without_states + counters.with_gaps > 100
    assert counters.overtaken > counts.lost  # each sequence has several records of states
