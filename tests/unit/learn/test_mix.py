"""What is trained on and what is judged by never meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from leadout.data.manifest import DataFolder
from leadout.evaluate.blocks import split
from leadout.learn.config import LearnConfig, LearnError
from leadout.learn.data import (
    BASE,
    HELD_OUT,
    Mix,
    Traffic,
    make_mix,
    read_part,
    read_training,
    split_traffic,
    text_of,
    write_mix,
)
from leadout.shards import Sample, ShardWriter
from support.learn_world import NEW, SETTINGS_OF_FIRST, World, requests
from support.models import TINY_VOCAB
from support.tiny_data import write_data


def traffic_of(samples: list[Sample], folder: Path) -> Traffic:
    with ShardWriter(folder / "all.jsonl") as writer:
        for sample in samples:
            writer.append(sample)
    config = LearnConfig(least_requests=10)
    return split_traffic([writer.path], config, block_size=5, shortest=64, longest=512)


@pytest.fixture
def mix(world: World, tmp_path: Path) -> Mix:
    # Some of what is held out of the original data is asked for again.
    samples = world.data.samples()
    held_out = split(samples, 64, SETTINGS_OF_FIRST.validation_sequences).validation
    asked = requests(NEW, 60)
    asked[3] = asked[3].model_copy(update={"prompt": samples[held_out[0]].prompt})
    return make_mix(traffic_of(asked, tmp_path), world.data, SETTINGS_OF_FIRST, 0.5, seed=1)


def test_no_prompt_is_in_two_parts(mix: Mix) -> None:
    parts = [{text_of(sample) for sample in part} for part in mix]
    for number, one in enumerate(parts):
        for other in parts[number + 1 :]:
            assert not one & other


def test_the_base_is_what_the_first_training_held_out(mix: Mix, world: World) -> None:
    samples = world.data.samples()
    held_out = split(samples, 64, SETTINGS_OF_FIRST.validation_sequences).validation
    assert mix.base == [samples[index] for index in held_out]


def test_the_replay_has_its_share(mix: Mix, world: World, tmp_path: Path) -> None:
    assert len(mix.replay) == len(mix.traffic) == 42  # of 48: 5 validate, 1 is asked for again
    asked = traffic_of(requests(NEW, 60), tmp_path / "more")
    assert len(make_mix(asked, world.data, SETTINGS_OF_FIRST, 0.2, seed=1).replay) == 11
    assert not make_mix(asked, world.data, SETTINGS_OF_FIRST, 0.0, seed=1).replay


def test_too_little_replay_is_repeated(mix: Mix, tmp_path: Path) -> None:
    write_mix(mix._replace(replay=mix.replay[:10]), tmp_path / "mix")
    corpus = read_training(tmp_path / "mix", 64, 0.5, TINY_VOCAB)
    names = [corpus.samples.path_of(index).name for index in corpus.split.train]
    assert names.count("replay.jsonl") == names.count("traffic.jsonl") == 42
    assert len(set(corpus.split.train)) == 52


def test_a_run_never_sees_what_the_gate_judges_by(mix: Mix, tmp_path: Path) -> None:
    write_mix(mix, tmp_path / "mix")
    corpus = read_training(tmp_path / "mix", 64, 0.5, TINY_VOCAB)
    seen = {text_of(sample) for sample in corpus.samples}
    for name in (HELD_OUT, BASE):
        assert not seen & {text_of(sample) for sample in read_part(tmp_path / "mix", name)}
    validated = [corpus.samples[index] for index in corpus.split.validation]
    assert sorted(validated, key=lambda sample: sample.id) == sorted(
        mix.validation, key=lambda sample: sample.id
    )
    assert not set(corpus.split.train) & set(corpus.split.validation)


def test_other_users_cannot_read_it(mix: Mix, tmp_path: Path) -> None:
    write_mix(mix, tmp_path / "mix")
    assert (tmp_path / "mix").stat().st_mode & 0o777 == 0o700


def test_replay_without_greedy_text_is_refused(world: World, tmp_path: Path) -> None:
    warm = [s.model_copy(update={"temperature": 1.0}) for s in world.data.samples()]
    write_data(tmp_path / "data", world.target, warm)
    asked = traffic_of(requests(NEW, 60), tmp_path)
    with pytest.raises(LearnError, match="no greedy one to hold out"):
        make_mix(asked, DataFolder(tmp_path / "data"), SETTINGS_OF_FIRST, 0.5, seed=1)
