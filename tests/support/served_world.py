"""Rings as a server of the tiny world writes them, with the states of transformers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from leadout.checkpoints import read_checkpoint
from leadout.learn.config import LearnConfig
from leadout.learn.continuous import learn_from_states
from leadout.models import fingerprint
from leadout.ring.folder import open_writer, prepare
from leadout.ring.records import RingInfo, StatesRecord, TextRecord, request_key
from leadout.ring.sequences import ServedSequence
from leadout.shards import Sample
from support.learn_world import World, start
from support.tiny_data import loaded

RING_BYTES = 64 << 20
STEP = 7  # positions of one step of the server
BASE_SEQUENCES = 20  # of a gate; they decide which states of replayed data there are


def ring_info(world: World) -> RingInfo:
    config = read_checkpoint(world.drafter).config
    return RingInfo(
        target="tiny",
        target_fingerprint=fingerprint(world.target),
        layer_ids=config.target_layer_ids,
        hidden_size=config.context_size,
        dtype="float32",
        server_id="tiny",
    )


def served(world: World, samples: Sequence[Sample], first: int = 0) -> list[ServedSequence]:
    """The sequences that a reader of a ring makes of these requests."""
    return [
        ServedSequence(each.prompt, each.response, each.temperature, first, states[first:])
        for each in samples
        for states in [_states(world, each)]
    ]


class Ring:
    """A ring in memory, to which a server writes finished requests."""

    def __init__(self, world: World, folder: Path) -> None:
        self.folder, self._world = folder, world
        self._info = ring_info(world)
        prepare(folder, self._info)
        self._states = open_writer(folder, "states", RING_BYTES, self._info)
        self._texts = open_writer(folder, "texts", RING_BYTES, self._info)
        self._count = 0

    def serve(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._count += 1
            key = request_key(f"request {self._count}", "salt")
            states = _states(self._world, sample)
            tokens = torch.tensor([*sample.prompt, *sample.response])
            for first in range(0, len(states), STEP):
                part = slice(first, min(first + STEP, len(states)))
                record = StatesRecord(key, first, tokens[part], states[part])
                self._states.write(record.packed(self._info))
            text = TextRecord(key, sample.prompt, sample.response, sample.temperature)
            self._texts.write(text.packed())

    def close(self) -> None:
        self._states.close()
        self._texts.close()


@contextmanager
def ring_of(world: World) -> Iterator[Ring]:
    folder = Path(tempfile.mkdtemp(prefix="leadout-test-ring-", dir="/dev/shm"))
    try:
        ring = Ring(world, folder)
        yield ring
        ring.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compute_base(world: World, folder: Path) -> Path:
    """Compute the states of replayed data as a learner does when it starts, in a child process.

    A learner that finds a copy in its work folder starts seconds earlier.
    """
    registry, work = start(world, folder / "registry").folder, folder / "work"
    with ring_of(world) as ring:
        config = LearnConfig(
            target=str(world.target),
            registry=registry,
            replay=world.data.folder,
            work=work,
            states=(str(ring.folder),),
            base_sequences=BASE_SEQUENCES,
        )
        learn_from_states(config.model_copy(update={"cycles": 0}))
    return work / "base"


def _states(world: World, sample: Sample) -> torch.Tensor:
    """Of all positions but the last."""
    taps = tuple(read_checkpoint(world.drafter).config.target_layer_ids)
    return _computed(world.target, taps, (*sample.prompt, *sample.response))


@cache  # many tests serve the same requests
def _computed(target: Path, taps: tuple[int, ...], tokens: tuple[int, ...]) -> torch.Tensor:
    states = loaded(target, taps).observe(torch.tensor([tokens])).states
    return states[0, :-1].clone()
