"""Captured traffic as learning needs it: each prompt once, and the newest part kept for judging.

The split is by time, because the traffic to come resembles the newest most, and by request: a
prompt that was asked again counts where it was asked last, so nothing that is judged was trained
on.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from leadout.data.manifest import DataFolder
from leadout.engine.capture_store import read_info, segment_paths
from leadout.evaluate.blocks import Split, split
from leadout.learn.config import LearnConfig, LearnError
from leadout.shards import Sample, Samples, ShardWriter, read_shard
from leadout.train.config import TrainConfig
from leadout.train.run import Corpus

# Enough for any budget of one cycle; older requests say less about those to come.
MOST_REQUESTS = 20_000
LONGEST = 2048  # longer requests are cut, unless the drafter was trained on longer ones
COVERED = 0.95  # of the requests are not cut
STEP_OF_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Traffic:
    """Distinct requests, as numbers of samples in the order of time."""

    samples: Samples
    max_length: int
    training: list[int]
    held_out: list[int]


def snapshot(folder: Path, target_fingerprint: str, copy: Path) -> list[Path]:
    """Copy the newest files: a server goes on writing them, and removes old ones."""
    found = read_info(folder)
    if found.target_fingerprint != target_fingerprint:
        raise LearnError(
            f"--traffic {folder}: found traffic of {found.target} (fingerprint "
            f"{found.target_fingerprint[:12]}), wanted that of the target "
            f"({target_fingerprint[:12]}): a drafter learns only from its own target's text; "
            "capture the traffic of this target in a folder of its own"
        )
    copy.mkdir(parents=True, mode=0o700)
    copied: list[Path] = []
    requests = 0
    for path in reversed(segment_paths(folder)):
        if requests >= MOST_REQUESTS:
            break
        try:
            copied.append(Path(shutil.copy(path, copy)))  # with its permissions
        except FileNotFoundError:  # the oldest go first: no older one is there either
            break
        requests += sum(1 for _ in read_shard(copied[-1]))
    return copied


def split_traffic(
    paths: Sequence[Path], config: LearnConfig, *, block_size: int, shortest: int, longest: int
) -> Traffic:
    """`shortest` and `longest` bound the length of sequences to train on."""
    samples = Samples(paths)
    max_length = length_for(samples, shortest, longest)
    newest: dict[bytes, int] = {}
    for index in range(len(samples)):
        sample = samples[index]
        # Only where a whole block lies in the answer is it known how many drafts stand.
        if min(len(sample.response), max_length - len(sample.prompt)) >= block_size:
            newest[text_of(sample)] = index
    requests = sorted(newest.values())[-MOST_REQUESTS:]
    held_out = max(config.least_requests, round(config.held_out * len(requests)))
    if len(requests) - held_out < config.least_requests:
        raise LearnError(
            f"--traffic: found {len(requests)} different requests with an answer of {block_size} "
            f"tokens and more, wanted at least {2 * config.least_requests}: half to train on, half "
            "to judge by; let the server capture more, or lower --least-requests"
        )
    return Traffic(samples, max_length, requests[:-held_out], requests[-held_out:])


def length_for(samples: Samples, shortest: int, longest: int) -> int:
    """The length to which sequences are cut."""
    lengths = sorted(len(sample.prompt) + len(sample.response) for sample in samples)
    if not lengths:
        return shortest
    wanted = lengths[round(COVERED * (len(lengths) - 1))]
    rounded = -(-wanted // STEP_OF_LENGTH) * STEP_OF_LENGTH
    return min(max(shortest, min(rounded, LONGEST)), longest)


def text_of(sample: Sample) -> bytes:
    """Stands for the prompt."""
    return hashlib.sha256(repr(sample.prompt).encode()).digest()


def spread(indices: Sequence[int], count: int) -> list[int]:
    """So many of them, from all over their range."""
    wanted = min(count, len(indices))
    return [indices[len(indices) * place // wanted] for place in range(wanted)]


# What a cycle trains on and what it is judged by, on the disk: five files that share no prompt.
#
# traffic.jsonl     captured requests to train on
# replay.jsonl      original data to train on, so that little is forgotten
# validation.jsonl  some of both, to choose the best step by
# held_out.jsonl    the newest requests: only for the gate
# base.jsonl        original data that no drafter of this line was trained on: only for the gate

TRAFFIC, REPLAY, VALIDATION = "traffic.jsonl", "replay.jsonl", "validation.jsonl"
HELD_OUT, BASE = "held_out.jsonl", "base.jsonl"
MOST_JUDGED = 400  # of the newest requests: more hardly narrow the interval
MOST_VALIDATED = 32  # of the traffic, and as many of the replay
VALIDATED_SHARE = 0.1  # at most, of the traffic to train on


class Mix(NamedTuple):
    """The samples of each file."""

    traffic: list[Sample]
    replay: list[Sample]
    validation: list[Sample]
    held_out: list[Sample]
    base: list[Sample]


def make_mix(
    traffic: Traffic, replay: DataFolder, settings: TrainConfig, share: float, seed: int
) -> Mix:
    """`settings` are those that the drafter was first trained with: they say what was held out."""
    samples = replay.samples()
    original = split(samples, settings.max_length, settings.validation_sequences)
    if not original.validation:
        raise LearnError(
            f"--replay {replay.folder}: found {len(samples)} samples and no greedy one to hold "
            "out, wanted some: they show what is forgotten; make more data with `leadout data`"
        )
    count = max(1, min(MOST_VALIDATED, round(VALIDATED_SHARE * len(traffic.training))))
    validated = spread(traffic.training, count)
    pool = sorted(original.train, key=lambda index: _rank(seed, samples[index].id))
    validation = [
        *(traffic.samples[index] for index in validated),
        *(samples[index] for index in pool[:count]),
    ]
    base = [samples[index] for index in original.validation]
    held_out = [traffic.samples[index] for index in spread(traffic.held_out, MOST_JUDGED)]
    hidden = {text_of(sample) for sample in [*validation, *base]}
    # All of the newest requests, not only those that are judged.
    hidden |= {text_of(traffic.samples[index]) for index in traffic.held_out}
    new = list(_without(hidden, (traffic.samples[index] for index in traffic.training)))
    old = list(_without(hidden, (samples[index] for index in pool[count:])))
    return Mix(new, old[: replayed(len(new), share)], validation, held_out, base)


def write_mix(mix: Mix, folder: Path) -> None:
    """Readable by the owner only: it is what users wrote."""
    folder.mkdir(parents=True, mode=0o700)
    names = (TRAFFIC, REPLAY, VALIDATION, HELD_OUT, BASE)
    for name, samples in zip(names, mix, strict=True):
        with ShardWriter(folder / name) as writer:
            for sample in samples:
                writer.append(sample)


def read_part(folder: Path, name: str) -> list[Sample]:
    return [sample for _, sample in read_shard(folder / name)]


def read_training(folder: Path, max_length: int, share: float, vocab_size: int) -> Corpus:
    """The parts to train on as a run takes them; too little replay is repeated to its share."""
    paths = [folder / name for name in (TRAFFIC, REPLAY, VALIDATION)]
    samples = Samples(paths)
    by_path: dict[str, list[int]] = {path.name: [] for path in paths}
    lengths, counts = [], torch.zeros(vocab_size, dtype=torch.int64)
    for index in range(len(samples)):
        sample = samples[index]
        by_path[samples.path_of(index).name].append(index)
        lengths.append(min(len(sample.prompt) + len(sample.response), max_length))
        if samples.path_of(index).name != VALIDATION:
            counts += torch.bincount(torch.tensor(sample.response), minlength=vocab_size)
    new, old = by_path[TRAFFIC], by_path[REPLAY]
    wanted = replayed(len(new), share)
    repeated = (old * -(-wanted // len(old)))[:wanted] if old else []
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    return Corpus(samples, Split([*new, *repeated], by_path[VALIDATION]), lengths, counts, digest)


def replayed(new: int, share: float) -> int:
    """So many sequences of replay beside so many new ones."""
    return round(new * share / (1 - share))


def _without(hidden: set[bytes], samples: Iterable[Sample]) -> Iterator[Sample]:
    return (sample for sample in samples if text_of(sample) not in hidden)


def _rank(seed: int, name: str) -> str:
    return hashlib.sha256(f"replay {seed} {name}".encode()).hexdigest()
