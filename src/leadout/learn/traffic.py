"""Captured traffic as learning needs it: each prompt once, and the newest part kept for judging.

The split is by time, because the traffic to come resembles the newest most, and by request: a
prompt that was asked again counts where it was asked last, so nothing that is judged was trained
on.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from leadout.captured import read_info, segments
from leadout.learn.config import LearnConfig, LearnError
from leadout.shards import Sample, Samples, read_shard

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
    for path in reversed(segments(folder)):
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
