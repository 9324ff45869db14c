"""The text of a cycle: traffic by time, replay, and no overlap of training and evaluation."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet

from leadout.data.manifest import DataFolder
from leadout.engine.capture_store import segment_name, segment_paths
from leadout.evaluate.blocks import split
from leadout.learn.config import CycleSettings, LearnError, TooLittleTrafficError
from leadout.learn.data import (
    BASE,
    HELD_OUT,
    Mix,
    Traffic,
    copy_newest,
    make_mix,
    prompt_key,
    read_part,
    read_training,
    reserved_for_base,
    rotated,
    split_traffic,
    write_mix,
)
from leadout.models import fingerprint
from leadout.sealed import CaptureKeyError, Keys
from leadout.shards import Sample, Samples, ShardWriter
from leadout.train.run import evenly_spaced
from support.learn_world import NEW, SETTINGS_OF_FIRST, World, requests, write_capture
from support.models import TINY_VOCAB
from support.tiny_data import write_data

FEW = CycleSettings(min_requests=5)


def traffic_of(samples: list[Sample], folder: Path, settings: CycleSettings = FEW) -> Traffic:
    with ShardWriter(folder / "all.jsonl") as writer:
        for sample in samples:
            writer.append(sample)
    return split_traffic(
        Samples([writer.path]), settings, block_size=5, min_length=64, max_length=512
    )


def test_the_newest_requests_are_held_out(tmp_path: Path) -> None:
    asked = requests(NEW, 50)
    traffic = traffic_of(asked[::-1], tmp_path)  # whatever the order in the file
    held_out = [traffic.samples[index].id for index in traffic.held_out]
    assert held_out == [sample.id for sample in asked[-10:]]
    assert len(traffic.training) == 40


def test_a_repeated_prompt_counts_once_at_its_last_request(
    tmp_path: Path,
) -> None:
    asked = requests(NEW, 50)
    again = requests(NEW, 1, first=100)[0].model_copy(update={"prompt": asked[0].prompt})
    traffic = traffic_of([*asked, again], tmp_path)
    everything = [traffic.samples[i] for i in [*traffic.training, *traffic.held_out]]
    assert len({prompt_key(sample) for sample in everything}) == len(everything) == 50
    assert traffic.samples[traffic.held_out[-1]] == again
    assert asked[0] not in everything


def test_answers_shorter_than_a_block_are_left_out(tmp_path: Path) -> None:
    short = requests(NEW, 1, first=200)[0]
    short = short.model_copy(update={"response": short.response[:4]})
    traffic = traffic_of([*requests(NEW, 50), short], tmp_path)
    assert short not in [traffic.samples[i] for i in traffic.held_out]


def test_too_little_traffic_is_undecided(tmp_path: Path) -> None:
    with pytest.raises(
        TooLittleTrafficError, match=r"has 9 distinct requests .*, but 10 are required"
    ) as problem:
        traffic_of(requests(NEW, 9), tmp_path)
    assert problem.value.exit_code == 3


def test_sequences_are_long_enough_for_most_requests_within_bounds(tmp_path: Path) -> None:
    long = [s.model_copy(update={"prompt": s.prompt * 20}) for s in requests(NEW, 50)]
    needed = sorted(len(s.prompt) + len(s.response) for s in long)[round(0.95 * 49)]
    length = traffic_of(long, tmp_path).max_length
    assert needed <= length < needed + 64
    bounded = split_traffic(
        Samples([tmp_path / "all.jsonl"]), FEW, block_size=5, min_length=64, max_length=180
    )
    assert bounded.max_length == 180


def test_traffic_of_another_target_is_an_error(world: World, tmp_path: Path) -> None:
    capture = write_capture(tmp_path / "capture", world.target, requests(NEW, 4))
    with pytest.raises(LearnError, match=r"was captured from tiny .* not from the target"):
        copy_newest(capture, "another", TINY_VOCAB, tmp_path / "copy", Keys())


def test_traffic_is_copied_readable_by_the_owner_only(world: World, tmp_path: Path) -> None:
    asked = requests(NEW, 8)
    capture = write_capture(tmp_path / "capture", world.target, asked, segments=3)
    for path in segment_paths(capture):
        path.chmod(0o600)
    copied, unusable, _ = copy_newest(
        capture, fingerprint(world.target), TINY_VOCAB, tmp_path / "copy", Keys()
    )
    assert unusable == 0
    for path in segment_paths(capture):
        path.unlink()  # as the server does
    assert [sample.id for sample in Samples(copied)] == [sample.id for sample in asked]
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in copied} == {0o600}


@pytest.mark.parametrize(
    "line",
    [
        b"no JSON",
        b'{"id": "x"}',
        b'{"id": "x", "source": "s", "prompt": [-1], "response": [1], "temperature": 0}',
        b'{"id": "x", "source": "s", "prompt": [1], "response": [2147483648], "temperature": 0}',
        b'{"id": "x", "source": "s", "prompt": [%d], "response": [1], "temperature": 0}'
        % TINY_VOCAB,
        b"\xff\xfe" * 100,
    ],
)
def test_one_bad_line_does_not_stop_learning(world: World, tmp_path: Path, line: bytes) -> None:
    asked = requests(NEW, 8)
    capture = write_capture(tmp_path / "capture", world.target, asked, segments=2)
    first, second = segment_paths(capture)
    lines = first.read_bytes().splitlines()
    first.write_bytes(b"\n".join([lines[0], line, *lines[1:], b""]))
    second.write_bytes(second.read_bytes() + lines[0] + b"\n" + b'{"id": "torn')
    copied, unusable, _ = copy_newest(
        capture, fingerprint(world.target), TINY_VOCAB, tmp_path / "copy", Keys()
    )
    assert sorted(sample.id for sample in Samples(copied)) == [sample.id for sample in asked]
    assert unusable == 2  # the line, and a request that occurs twice


def test_what_servers_added_since_is_not_copied_again(world: World, tmp_path: Path) -> None:
    asked = requests(NEW, 9)
    capture = write_capture(tmp_path / "capture", world.target, asked[3:8], segments=2)
    target = fingerprint(world.target)
    first = copy_newest(capture, target, TINY_VOCAB, tmp_path / "one", Keys())
    written = segment_paths(capture)
    assert first.segments == {path.name: path.read_bytes().count(b"\n") for path in written}

    def add(path: Path, sample: Sample) -> None:
        with path.open("ab") as file:
            file.write(sample.model_dump_json().encode() + b"\n")

    add(written[0], asked[0])  # by a server that is slow to write
    add(written[1], asked[8])
    for number, sample in enumerate(asked[1:3]):  # older files, uploaded late, and newer ones
        started = datetime(2020 + 79 * number, 1, 1, tzinfo=UTC)
        add(capture / segment_name(started, 1), sample)
    again = copy_newest(capture, target, TINY_VOCAB, tmp_path / "two", Keys(), first.segments)
    assert [sample.id for sample in Samples(again.paths)] == [each.id for each in asked[3:8]]
    assert (again.unusable, again.segments) == (0, first.segments)
    everything = copy_newest(capture, target, TINY_VOCAB, tmp_path / "three", Keys())
    assert len(Samples(everything.paths)) == 9


def test_encrypted_traffic_is_read_with_its_keys_only(world: World, tmp_path: Path) -> None:
    asked, keys = requests(NEW, 8), Keys([Fernet.generate_key().decode()])
    capture = write_capture(tmp_path / "capture", world.target, asked)
    for path in segment_paths(capture):
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(map(keys.seal, lines)))
    target = fingerprint(world.target)
    copied = copy_newest(capture, target, TINY_VOCAB, tmp_path / "copy", keys)
    assert [sample.id for sample in Samples(copied.paths)] == [sample.id for sample in asked]
    with pytest.raises(CaptureKeyError, match="encrypted with the key"):
        copy_newest(capture, target, TINY_VOCAB, tmp_path / "another", Keys())


def test_evenly_spaced_indices_cover_the_range() -> None:
    assert evenly_spaced(range(10), 3) == [0, 3, 6]
    assert evenly_spaced(range(2), 5) == [0, 1]


@pytest.fixture
def mix(world: World, tmp_path: Path) -> Mix:
    # One held-out prompt of the original data is requested again.
    samples = world.data.samples()
    held_out = split(samples.facts, 64, SETTINGS_OF_FIRST.validation_sequences).validation
    asked = requests(NEW, 60)
    asked[3] = asked[3].model_copy(update={"prompt": samples[held_out[0]].prompt})
    return mix_of(traffic_of(asked, tmp_path), world.data, number=1)


def mix_of(traffic: Traffic, replay: DataFolder, number: int = 1, **settings: Any) -> Mix:
    chosen = CycleSettings(**{"base_sequences": 20, **settings})
    return make_mix(traffic, replay, SETTINGS_OF_FIRST, chosen, number)


def test_no_prompt_is_in_two_files(mix: Mix) -> None:
    parts = [{prompt_key(sample) for sample in part} for part in mix]
    for number, one in enumerate(parts):
        for other in parts[number + 1 :]:
            assert not one & other


def test_the_base_was_held_out_by_the_first_training_or_is_of_the_reserved_tenth(
    mix: Mix, world: World
) -> None:
    samples = world.data.samples()
    original = split(samples.facts, 64, SETTINGS_OF_FIRST.validation_sequences)
    reserved = reserved_for_base(samples, original, block_size=5)
    assert 0.05 < len(reserved) / len(original.train) < 0.2
    pool = {samples[index].id for index in [*original.validation, *reserved]}
    assert len(mix.base) == 20
    assert {sample.id for sample in mix.base} <= pool


def test_a_large_held_out_part_is_the_whole_pool(world: World, tmp_path: Path) -> None:
    """Then no version was trained on any base sequence."""
    held_out = SETTINGS_OF_FIRST.validation_sequences
    samples = world.data.samples()
    unseen = {samples[index].id for index in split(samples.facts, 64, held_out).validation}
    asked = traffic_of(requests(NEW, 60), tmp_path)
    few = CycleSettings.model_construct(base_sequences=held_out // 4)
    for number in range(6):
        mix = make_mix(asked, world.data, SETTINGS_OF_FIRST, few, number)
        assert {sample.id for sample in mix.base} <= unseen


def test_base_sequences_rotate_and_are_never_replayed(world: World, tmp_path: Path) -> None:
    asked = traffic_of(requests(NEW, 60), tmp_path)
    cycles = [mix_of(asked, world.data, number) for number in range(6)]
    again = mix_of(asked, world.data, 3)
    assert again == cycles[3]  # the same cycle has the same text
    bases = [{sample.id for sample in cycle.base} for cycle in cycles]
    assert not bases[0] & bases[1]
    assert len(set.union(*bases)) > 2 * len(bases[0])
    trained = {
        prompt_key(sample) for cycle in cycles for sample in [*cycle.replay, *cycle.validation]
    }
    for cycle in cycles:
        assert not trained & {prompt_key(sample) for sample in cycle.base}
        sources = [sample.source for sample in cycle.base]
        assert sources.count("asked") == sources.count("self")
    assert cycles[0].replay != cycles[1].replay


def test_a_small_pool_is_used_as_a_whole(world: World) -> None:
    samples = world.data.samples()
    assert rotated(samples, range(8), 20, number=3) == list(range(8))


def test_replay_has_the_requested_share(mix: Mix, world: World, tmp_path: Path) -> None:
    assert len(mix.replay) == len(mix.traffic) == 42  # of 48: 5 validate, 1 is held out
    asked = traffic_of(requests(NEW, 60), tmp_path / "more")
    assert len(mix_of(asked, world.data, replay_share=0.2).replay) == 11
    assert not mix_of(asked, world.data, replay_share=0.0).replay


def test_too_little_replay_is_repeated(mix: Mix, tmp_path: Path) -> None:
    write_mix(mix._replace(replay=mix.replay[:10]), tmp_path / "mix")
    corpus = read_training(tmp_path / "mix", 64, 0.5, TINY_VOCAB)
    names = [corpus.samples.part_of(index) for index in corpus.split.train]
    assert names.count("replay.jsonl") == names.count("traffic.jsonl") == 42
    assert len(set(corpus.split.train)) == 52


def test_training_never_sees_what_the_gate_evaluates_on(mix: Mix, tmp_path: Path) -> None:
    write_mix(mix, tmp_path / "mix")
    corpus = read_training(tmp_path / "mix", 64, 0.5, TINY_VOCAB)
    seen = {prompt_key(sample) for sample in corpus.samples}
    for name in (HELD_OUT, BASE):
        assert not seen & {prompt_key(sample) for sample in read_part(tmp_path / "mix", name)}
    validated = [corpus.samples[index] for index in corpus.split.validation]
    assert sorted(validated, key=lambda sample: sample.id) == sorted(
        mix.validation, key=lambda sample: sample.id
    )
    assert not set(corpus.split.train) & set(corpus.split.validation)


def test_the_mix_is_readable_by_the_owner_only(mix: Mix, tmp_path: Path) -> None:
    write_mix(mix, tmp_path / "mix")
    assert (tmp_path / "mix").stat().st_mode & 0o777 == 0o700


def test_replay_of_too_few_samples_is_an_error(world: World, tmp_path: Path) -> None:
    write_data(tmp_path / "data", world.target, list(world.data.samples())[:4])
    asked = traffic_of(requests(NEW, 60), tmp_path)
    with pytest.raises(LearnError, match="4 samples are too few to hold some out"):
        mix_of(asked, DataFolder(tmp_path / "data"))


def test_replay_without_greedy_samples_holds_out_sampled_ones(world: World, tmp_path: Path) -> None:
    warm = [s.model_copy(update={"temperature": 1.0}) for s in world.data.samples()]
    write_data(tmp_path / "data", world.target, warm)
    asked = traffic_of(requests(NEW, 60), tmp_path)
    assert mix_of(asked, DataFolder(tmp_path / "data")).base
