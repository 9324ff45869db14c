"""Captured traffic: each prompt once, the newest kept for judging, and only its own target's."""

from __future__ import annotations

from pathlib import Path

import pytest

from leadout.engine.capture_store import segment_paths
from leadout.learn.config import LearnConfig, LearnError
from leadout.learn.data import Traffic, snapshot, split_traffic, spread, text_of
from leadout.models import fingerprint
from leadout.shards import Sample, Samples, ShardWriter
from support.learn_world import NEW, World, requests, write_capture

FEW = LearnConfig(least_requests=5)


def split_of(samples: list[Sample], folder: Path, config: LearnConfig = FEW) -> Traffic:
    with ShardWriter(folder / "all.jsonl") as writer:
        for sample in samples:
            writer.append(sample)
    return split_traffic([writer.path], config, block_size=5, shortest=64, longest=512)


def test_the_newest_requests_are_held_out(tmp_path: Path) -> None:
    asked = requests(NEW, 50)
    traffic = split_of(asked[::-1], tmp_path)  # in whatever order they were written
    held_out = [traffic.samples[index].id for index in traffic.held_out]
    assert held_out == [sample.id for sample in asked[-10:]]
    assert len(traffic.training) == 40


def test_a_prompt_that_is_asked_again_counts_once_and_where_it_was_asked_last(
    tmp_path: Path,
) -> None:
    asked = requests(NEW, 50)
    again = requests(NEW, 1, first=100)[0].model_copy(update={"prompt": asked[0].prompt})
    traffic = split_of([*asked, again], tmp_path)
    everything = [traffic.samples[i] for i in [*traffic.training, *traffic.held_out]]
    assert len({text_of(sample) for sample in everything}) == len(everything) == 50
    assert traffic.samples[traffic.held_out[-1]] == again
    assert asked[0] not in everything


def test_answers_without_a_whole_block_do_not_count(tmp_path: Path) -> None:
    short = requests(NEW, 1, first=200)[0]
    short = short.model_copy(update={"response": short.response[:4]})
    traffic = split_of([*requests(NEW, 50), short], tmp_path)
    assert short not in [traffic.samples[i] for i in traffic.held_out]


def test_too_little_traffic_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(LearnError, match=r"found 9 different requests .*, wanted at least 10"):
        split_of(requests(NEW, 9), tmp_path)


def test_longer_requests_make_longer_sequences_within_bounds(tmp_path: Path) -> None:
    long = [s.model_copy(update={"prompt": s.prompt * 20}) for s in requests(NEW, 50)]
    wanted = sorted(len(s.prompt) + len(s.response) for s in long)[round(0.95 * 49)]
    found = split_of(long, tmp_path).max_length
    assert wanted <= found < wanted + 64
    bounded = split_traffic([tmp_path / "all.jsonl"], FEW, block_size=5, shortest=64, longest=180)
    assert bounded.max_length == 180


def test_traffic_of_another_target_is_refused(world: World, tmp_path: Path) -> None:
    capture = write_capture(tmp_path / "capture", world.target, requests(NEW, 4))
    with pytest.raises(LearnError, match=r"found traffic of tiny .* wanted that of the target"):
        snapshot(capture, "another", tmp_path / "copy")


def test_a_copy_is_taken_that_others_cannot_read(world: World, tmp_path: Path) -> None:
    asked = requests(NEW, 8)
    capture = write_capture(tmp_path / "capture", world.target, asked, segments=3)
    for path in segment_paths(capture):
        path.chmod(0o600)
    copied = snapshot(capture, fingerprint(world.target), tmp_path / "copy")
    for path in segment_paths(capture):
        path.unlink()  # the server goes on
    assert [sample.id for sample in Samples(copied)] == [sample.id for sample in asked]
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in copied} == {0o600}


def test_a_part_is_taken_from_all_over() -> None:
    assert spread(range(10), 3) == [0, 3, 6]
    assert spread(range(2), 5) == [0, 1]
