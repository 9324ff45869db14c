"""The text of a cycle: traffic and replayed data, split into five parts without overlap.

    traffic.jsonl     requests to train on
    replay.jsonl      original data to train on, against forgetting
    validation.jsonl  some of both, to select the best step
    held_out.jsonl    the newest requests, for the gate only
    base.jsonl        original data that no cycle trains on, for the gate only

Captured traffic is split into files of these names; of served sequences the parts are in memory.

Traffic is split by time, because future traffic resembles the newest most. A prompt that was
requested again counts once, at its last request, so that the gate never evaluates on a prompt that
was trained on.

The base of a cycle is drawn from a pool: what the first training held out and, if that is too
little, a fixed tenth of the rest, which no cycle replays. Version 1 was trained on that tenth, as
every later version was through it, so a loss there is at most overestimated. Cycles go through the
pool in turn: a candidate cannot be selected for its luck with the same few sequences again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from leadout.data.manifest import DataFolder
from leadout.engine.capture_store import INFO, is_segment, read_info, segment_paths
from leadout.evaluate.blocks import Split, split
from leadout.files import MissingFileError
from leadout.learn.config import CycleSettings, LearnError, TooLittleTrafficError
from leadout.sealed import Keys
from leadout.shards import (
    Sample,
    Samples,
    SampleSet,
    SamplesInMemory,
    ShardWriter,
    read_shard,
    usable_samples,
)
from leadout.storage import open_storage
from leadout.train.config import TrainConfig
from leadout.train.run import Corpus, evenly_spaced, make_corpus

TRAFFIC, REPLAY, VALIDATION = "traffic.jsonl", "replay.jsonl", "validation.jsonl"
HELD_OUT, BASE = "held_out.jsonl", "base.jsonl"
PARTS = (TRAFFIC, REPLAY, VALIDATION, HELD_OUT, BASE)
TRAINING = PARTS[:3]

# Enough for the budget of one cycle; older requests say less about future ones.
MAX_REQUESTS = 20_000
MAX_LENGTH = 2048  # longer requests are cut, unless the drafter was trained on longer ones
UNCUT_SHARE = 0.95  # of the requests, within MAX_LENGTH
LENGTH_MULTIPLE = 64
MAX_HELD_OUT = 400  # more hardly make the confidence interval smaller
MAX_VALIDATION = 32  # from the traffic, and as many from the replay
MAX_VALIDATION_SHARE = 0.1  # of the traffic to train on
POOL_CYCLES = 4  # until base sequences are used again, if there is enough data
_RESERVED_BYTES = 26  # of the 256 values of a byte: a tenth


@dataclass(frozen=True, slots=True)
class Traffic:
    """Distinct requests as indices into `samples`, oldest first."""

    samples: SampleSet
    max_length: int
    training: list[int]
    held_out: list[int]


class CopiedTraffic(NamedTuple):
    paths: list[Path]
    unusable: int  # lines that were left out
    segments: dict[str, int]  # lines that were read, by the name of the file


def download_newest(url: str, folder: Path, names: Collection[str] | None = None) -> Path:
    """Fetch the newest captured files from a store into a new folder, as many as a cycle can use.

    With `names`, only files of these names. Readable by the owner only: they contain what users
    wrote.
    """
    storage = open_storage(url)
    read_info(storage)  # says what is wrong if this is no place of captured traffic
    folder.mkdir(parents=True, mode=0o700)
    segments = [entry.name for entry in storage.entries() if is_segment(entry.name)]
    if names is not None:
        segments = [name for name in segments if name in names]
    requests = 0
    for name in (INFO, *reversed(segments)):
        stored = storage.read(name)
        if stored is None:  # the oldest are removed first: all older ones are gone too
            break
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(stored.content)
        requests += stored.content.count(b"\n") if name != INFO else 0
        if requests >= MAX_REQUESTS:
            break
    return folder


def copy_newest(
    folder: Path,
    target_fingerprint: str,
    vocab_size: int,
    copy: Path,
    keys: Keys,
    segments: Mapping[str, int] | None = None,
) -> CopiedTraffic:
    """Copy the newest files of captured traffic, since the server keeps writing and removing.

    Lines that cannot be trained on are left out and counted: one of them must not stop learning
    until it is old enough to be deleted. With `segments`, so many lines of these files are copied
    and nothing else: what was copied before, whatever servers have added since.
    """
    info = read_info(folder)
    if info.target_fingerprint != target_fingerprint:
        raise LearnError(
            f"--traffic {folder} was captured from {info.target} (fingerprint "
            f"{info.target_fingerprint[:12]}), not from the target ({target_fingerprint[:12]}). A "
            "drafter learns only from its own target's text: capture the traffic of this target in "
            "a separate folder."
        )
    copy.mkdir(parents=True, mode=0o700)
    copied: list[Path] = []
    seen: set[str] = set()
    read: dict[str, int] = {}
    unusable = 0
    for path in reversed(segment_paths(folder)):
        if len(seen) >= MAX_REQUESTS:
            break
        if segments is not None and path.name not in segments:
            continue
        max_lines = None if segments is None else segments[path.name]
        lines = 0
        part = copy / path.name
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            try:
                for found in islice(usable_samples(path, vocab_size, keys.unseal), max_lines):
                    lines += 1
                    if found is None or found[1].id in seen:
                        unusable += 1
                        continue
                    line, sample = found
                    seen.add(sample.id)
                    file.write(line)
            except MissingFileError:  # the oldest are removed first: all older ones are gone too
                break
        copied.append(part)
        read[path.name] = lines
    return CopiedTraffic(copied, unusable, read)


def split_traffic(
    samples: SampleSet,
    settings: CycleSettings,
    *,
    block_size: int,
    min_length: int,
    max_length: int,
) -> Traffic:
    """Distinct requests, the newest held out; the two lengths bound where sequences are cut."""
    length = sequence_length(samples, min_length, max_length)
    newest: dict[bytes, int] = {}
    for index in range(len(samples)):
        sample = samples[index]
        # Acceptance can only be counted where a whole block lies within the answer.
        if min(len(sample.response), length - len(sample.prompt)) >= block_size:
            newest[prompt_key(sample)] = index
    requests = sorted(newest.values())[-MAX_REQUESTS:]
    held_out = max(settings.min_requests, round(settings.held_out * len(requests)))
    if len(requests) - held_out < settings.min_requests:
        raise TooLittleTrafficError(
            f"--traffic has {len(requests)} distinct requests with an answer of at least "
            f"{block_size} tokens, but {2 * settings.min_requests} are required: half to train on, "
            "half to evaluate on. Capture more traffic, or lower --min-requests."
        )
    return Traffic(samples, length, requests[:-held_out], requests[-held_out:])


def sequence_length(samples: SampleSet, min_length: int, max_length: int) -> int:
    """The length to which sequences are cut: long enough for nearly all of them."""
    lengths = sorted(len(sample.prompt) + len(sample.response) for sample in samples)
    if not lengths:
        return min_length
    needed = lengths[round(UNCUT_SHARE * (len(lengths) - 1))]
    rounded = -(-needed // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    return min(max(min_length, min(rounded, MAX_LENGTH)), max_length)


def prompt_key(sample: Sample) -> bytes:
    """A hash that is equal for equal prompts."""
    return hashlib.sha256(repr(sample.prompt).encode()).digest()


class Mix(NamedTuple):
    """The samples of the five parts."""

    traffic: list[Sample]
    replay: list[Sample]
    validation: list[Sample]
    held_out: list[Sample]
    base: list[Sample]


def make_mix(
    traffic: Traffic,
    replay: DataFolder,
    first: TrainConfig,
    settings: CycleSettings,
    number: int,
    available: Collection[int] | None = None,
) -> Mix:
    """The mix of cycle `number`.

    `first` are the settings of the drafter's first training, which say what was held out. Of the
    replayed data only the `available` samples are used, as returned by `select_base`; None: all.
    """
    samples = replay.samples()
    parts = split_replay(replay, samples, first, settings)
    usable = set(range(len(samples)) if available is None else available)
    count = max(1, min(MAX_VALIDATION, round(MAX_VALIDATION_SHARE * len(traffic.training))))

    def shuffled(index: int) -> str:
        return hashlib.sha256(f"replay {number} {samples[index].id}".encode()).hexdigest()

    pool = sorted(usable.intersection(parts.training), key=shuffled)
    validation = [
        *(traffic.samples[index] for index in evenly_spaced(traffic.training, count)),
        *(samples[index] for index in pool[:count]),
    ]
    gate_only = [index for index in parts.gate_only if index in usable]
    base = [
        samples[index] for index in rotated(samples, gate_only, settings.base_sequences, number)
    ]
    held_out = [traffic.samples[index] for index in evenly_spaced(traffic.held_out, MAX_HELD_OUT)]
    excluded = {prompt_key(sample) for sample in validation}
    excluded |= {prompt_key(samples[index]) for index in parts.not_trained_on}
    # All of the newest requests, not only those that are evaluated.
    excluded |= {prompt_key(traffic.samples[index]) for index in traffic.held_out}

    def allowed(source: SampleSet, indices: Sequence[int]) -> list[Sample]:
        chosen = (source[index] for index in indices)
        return [sample for sample in chosen if prompt_key(sample) not in excluded]

    new, old = allowed(traffic.samples, traffic.training), allowed(samples, pool[count:])
    count = replay_count(len(new), settings.replay_share)
    return Mix(new, old[:count], validation, held_out, base)


class ReplayParts(NamedTuple):
    """The replayed data by its use, as indices of samples."""

    training: list[int]
    not_trained_on: list[int]
    gate_only: list[int]  # the part of `not_trained_on` from which the bases are drawn


def split_replay(
    replay: DataFolder, samples: SampleSet, first: TrainConfig, settings: CycleSettings
) -> ReplayParts:
    original = split(samples.facts, first.max_length, first.validation_sequences)
    if not original.validation:
        raise LearnError(
            f"--replay {replay.folder}: {len(samples)} samples are too few to hold some out and "
            "measure forgetting; expected at least 5 with answers of two tokens. Generate more "
            "with `leadout data`."
        )
    reserved = reserved_for_base(samples, original, first.block_size)
    gate_only, both = original.validation, [*original.validation, *reserved]
    if len(gate_only) < POOL_CYCLES * settings.base_sequences:
        gate_only = both
    return ReplayParts(sorted(set(original.train).difference(reserved)), both, gate_only)


def select_base(
    replay: DataFolder, first: TrainConfig, settings: CycleSettings, count: int
) -> list[int]:
    """The samples of the data that all cycles together need: `count` to train on, and the bases."""
    samples = replay.samples()
    parts = split_replay(replay, samples, first, settings)
    to_train = sorted(parts.training, key=lambda index: samples.facts[index].prompt_hash)[:count]
    bases = rotated(samples, parts.gate_only, POOL_CYCLES * settings.base_sequences, number=0)
    return sorted([*to_train, *bases])


def reserved_for_base(samples: SampleSet, original: Split, block_size: int) -> list[int]:
    """The greedy part of a fixed tenth of the training prompts, the same in every cycle."""
    found = []
    for index in original.train:
        sample = samples[index]
        is_measurable = sample.temperature == 0 and len(sample.response) >= block_size
        # By the prompt alone: more data does not move other prompts into or out of the tenth.
        if is_measurable and prompt_key(sample)[0] < _RESERVED_BYTES:
            found.append(index)
    return found


def rotated(samples: SampleSet, pool: Sequence[int], count: int, number: int) -> list[int]:
    """`count` indices of the pool, equally many of each source as far as possible.

    Consecutive numbers take consecutive parts of the pool and begin again at its end.
    """
    queues: dict[str, list[tuple[str, int]]] = {}
    for index in pool:
        sample = samples[index]
        rank = hashlib.sha256(f"base {sample.id}".encode()).hexdigest()
        queues.setdefault(sample.source, []).append((rank, index))
    shares = dict.fromkeys(sorted(queues), 0)
    left = min(count, len(pool))
    while left:
        for source in shares:
            if left and shares[source] < len(queues[source]):
                shares[source] += 1
                left -= 1
    chosen = []
    for source, share in shares.items():
        queue = [index for _, index in sorted(queues[source])]
        chosen += [queue[(number * share + place) % len(queue)] for place in range(share)]
    return sorted(chosen)


def write_mix(mix: Mix, folder: Path) -> None:
    """Readable by the owner only: it contains what users wrote."""
    folder.mkdir(parents=True, mode=0o700)
    for name, samples in zip(PARTS, mix, strict=True):
        with ShardWriter(folder / name) as writer:
            for sample in samples:
                writer.append(sample)


def read_part(folder: Path, name: str) -> list[Sample]:
    return [sample for _, sample in read_shard(folder / name)]


def read_training(folder: Path, max_length: int, replay_share: float, vocab_size: int) -> Corpus:
    """What to train on, of a mix in files."""
    paths = [folder / name for name in TRAINING]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    return _training(Samples(paths), max_length, replay_share, vocab_size, digest)


def training_in_memory(mix: Mix, max_length: int, replay_share: float, vocab_size: int) -> Corpus:
    """What to train on, of a mix that is in no file; not even a hash of it is kept."""
    samples = SamplesInMemory(dict(zip(TRAINING, mix[: len(TRAINING)], strict=True)))
    return _training(samples, max_length, replay_share, vocab_size, content_hash="")


def _training(
    samples: SampleSet, max_length: int, replay_share: float, vocab_size: int, content_hash: str
) -> Corpus:
    """Replayed samples are repeated if there are too few for their share."""
    by_part: dict[str, list[int]] = {name: [] for name in TRAINING}
    for index in range(len(samples)):
        by_part[samples.part_of(index)].append(index)
    new, old = by_part[TRAFFIC], by_part[REPLAY]
    count = replay_count(len(new), replay_share)
    repeated = (old * -(-count // len(old)))[:count] if old else []
    parts = Split([*new, *repeated], by_part[VALIDATION])
    return make_corpus(samples, parts, max_length, vocab_size, content_hash)


def replay_count(new: int, share: float) -> int:
    """The number of replayed sequences beside `new` new ones."""
    return round(new * share / (1 - share))
