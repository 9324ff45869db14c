"""Which data a run accepts, and which settings it chooses automatically."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from leadout import shards
from leadout.data.manifest import DataFolder
from leadout.shards import Sample
from leadout.train.config import TrainError
from leadout.train.run import (
    MAX_PRIMITIVES,
    PRIMITIVE_CACHE,
    Corpus,
    complete_settings,
    read_corpus,
)
from support.models import TINY_VOCAB
from support.small_runs import MakeRun, small_config
from support.tiny_chat import END_OF_TEXT, END_OF_TURN, START_OF_TURN, write_tiny_chat_target
from support.tiny_data import write_data


def sample(
    name: str,
    prompt: list[int],
    temperature: float = 0.0,
    answer: int = 9,
) -> Sample:
    source = name.partition("/")[0]
    return Sample(
        id=name, source=source, prompt=prompt, response=[7] * answer, temperature=temperature
    )


def read(samples: list[Sample], target: Path, folder: Path, **changes: Any) -> Corpus:
    write_data(folder, target, samples)
    return read_corpus(DataFolder(folder), target, small_config(**changes), TINY_VOCAB)


def test_packed_passes_are_not_compiled(make_run: MakeRun) -> None:
    with pytest.raises(TrainError, match=r"--compile cannot be combined with --packing.* Omit one"):
        make_run(compile=True, packing=True)


def test_few_shapes_stay_compiled_unless_the_user_decides(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PRIMITIVE_CACHE, raising=False)
    make_run()
    assert os.environ[PRIMITIVE_CACHE] == MAX_PRIMITIVES
    monkeypatch.setenv(PRIMITIVE_CACHE, "7")
    make_run()
    assert os.environ[PRIMITIVE_CACHE] == "7"


def test_data_without_greedy_answers_is_validated_on_sampled_ones(
    target_folder: Path, tmp_path: Path
) -> None:
    samples = [sample(f"a/{n}#0/0", [n], temperature=0.7) for n in range(20)]
    parts = read(samples, target_folder, tmp_path).split
    assert (len(parts.train), len(parts.validation)) == (16, 4)


def test_too_little_data_is_rejected(target_folder: Path, tmp_path: Path) -> None:
    samples = [sample(f"a/{n}#0/0", [n]) for n in range(3)]
    with pytest.raises(TrainError, match="has 3 samples to train on and 0 to hold out"):
        read(samples, target_folder, tmp_path)


def test_a_block_size_longer_than_all_held_out_answers_is_rejected(
    target_folder: Path, tmp_path: Path
) -> None:
    samples = [sample(f"a/{n}#0/0", [n], answer=6) for n in range(20)]
    with pytest.raises(TrainError, match="--block-size 7 is too large"):
        read(samples, target_folder, tmp_path / "wide", block_size=7)
    assert len(read(samples, target_folder, tmp_path / "fits", block_size=6).split.validation) == 4


def test_data_of_another_target_is_rejected(
    data: DataFolder, target_folder: Path, tmp_path: Path
) -> None:
    other = write_tiny_chat_target(tmp_path, seed=1)
    with pytest.raises(TrainError, match=r"holds answers of tiny .* not of"):
        read_corpus(data, other, small_config(), TINY_VOCAB)


def test_tokens_are_counted_over_training_answers_only(target_folder: Path, tmp_path: Path) -> None:
    corpus = read([sample(f"a/{n}#0/0", [n]) for n in range(20)], target_folder, tmp_path)
    assert corpus.token_counts[7] == corpus.token_counts.sum() == 16 * 9
    assert corpus.lengths == [10] * 20


def test_every_sample_is_parsed_once(
    data: DataFolder, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    parse = shards._parse

    def counted(line: bytes, where: str) -> Sample:
        found = parse(line, where)
        parsed.append(found.id)
        return found

    monkeypatch.setattr(shards, "_parse", counted)
    corpus = read_corpus(data, target_folder, small_config(), TINY_VOCAB)
    again = {sample_id for sample_id in parsed if parsed.count(sample_id) > 1}
    training = {corpus.samples.facts[index].id for index in corpus.split.train}
    assert set(parsed) > training
    assert not again & training  # only what is left out of the counts is read again


def test_mask_token_and_taps_are_chosen_from_target_and_data(
    target_folder: Path, corpus: Corpus
) -> None:
    config = complete_settings(small_config(), target_folder, corpus, TINY_VOCAB)
    specials = {END_OF_TEXT, START_OF_TURN, END_OF_TURN}
    assert config.mask_token_id not in specials
    assert corpus.token_counts[config.mask_token_id or 0] == 0
    assert (config.mask_token_id or 0) > START_OF_TURN
    assert config.target_layer_ids == (1, 2, 3)


def test_given_settings_are_not_changed(target_folder: Path, corpus: Corpus) -> None:
    given = small_config(mask_token_id=5, target_layer_ids=(0, 4))
    assert complete_settings(given, target_folder, corpus, TINY_VOCAB) == given


@pytest.mark.parametrize(("epochs", "expected"), [(1.0, "compute"), (3.0, "disk")])
def test_states_are_kept_on_disk_if_they_are_read_again(
    target_folder: Path, corpus: Corpus, epochs: float, expected: str
) -> None:
    given = small_config(states="auto", epochs=epochs)
    assert complete_settings(given, target_folder, corpus, TINY_VOCAB).states == expected


def test_validation_covers_all_held_out_samples_by_source(make_run: MakeRun) -> None:
    run = make_run()
    found = run.validate()
    assert set(found.by_source) == {"asked", "self"}
    assert sum(each.positions for each in found.by_source.values()) == found.overall.positions
    assert found == run.validate()  # every position is evaluated: no random draw
