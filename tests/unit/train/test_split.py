"""What is held out: greedy answers of every source, to prompts that training never sees."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from small_runs import small_config

from leadout.data.manifest import DataFolder
from leadout.evaluate.blocks import Split, split, to_sequence
from leadout.shards import Sample
from leadout.train.run import Corpus, UnfitDataError, read_corpus
from support.models import TINY_VOCAB
from support.tiny_chat import write_tiny_chat_target
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


def split_of(samples: list[Sample], held_out: int = 4, max_length: int = 64) -> Split:
    return split(samples, max_length, held_out)  # type: ignore[arg-type]


def test_only_greedy_answers_are_held_out_and_each_source_has_its_share() -> None:
    samples = [
        sample(f"{source}/{n}#0/0", [n, count], temperature=0.0 if n % 2 else 0.7)
        for source, count in (("code", 40), ("math", 20), ("chat", 6))
        for n in range(count)
    ]
    parts = split_of(samples, held_out=9)
    held_out = [samples[index] for index in parts.validation]
    assert all(each.temperature == 0 for each in held_out)
    assert Counter(each.source for each in held_out) == {"code": 3, "math": 3, "chat": 3}
    assert sorted(parts.train + parts.validation) == list(range(len(samples)))


def test_no_prompt_is_on_both_sides() -> None:
    samples = [
        sample(f"asked/{n}#{again}/{turn}", [n] * (turn + 1), temperature=0.7 * again)
        for n in range(20)
        for again in range(2)
        for turn in range(2)
    ]
    parts = split_of(samples, held_out=6)
    prompts = {samples[index].id.partition("#")[0] for index in parts.validation}
    assert not prompts & {samples[index].id.partition("#")[0] for index in parts.train}
    assert len(parts.train) == len(samples) - 4 * len(prompts)


def test_the_same_text_under_another_name_is_held_out_too() -> None:
    samples = [sample(f"a/{n}#0/0", [n // 2]) for n in range(40)]  # every prompt twice
    parts = split_of(samples)
    texts = {tuple(samples[index].prompt) for index in parts.validation}
    assert len(parts.validation) == 4
    assert not texts & {tuple(samples[index].prompt) for index in parts.train}


def test_the_choice_does_not_depend_on_the_order_or_on_other_samples() -> None:
    samples = [sample(f"a/{n}#0/0", [n]) for n in range(40)]
    chosen = {samples[index].id for index in split_of(samples).validation}
    turned = samples[::-1]
    assert {turned[index].id for index in split_of(turned).validation} == chosen


def test_four_of_five_samples_stay_for_training() -> None:
    parts = split_of([sample(f"a/{n}#0/0", [n]) for n in range(20)], held_out=96)
    assert len(parts.validation) == 4


def test_answers_that_teach_nothing_are_left_out() -> None:
    samples = [sample(f"a/{n}#0/0", [n]) for n in range(10)]
    samples.append(sample("a/short#0/0", [1], answer=1))
    samples.append(sample("a/long#0/0", [1] * 63))
    parts = split_of(samples)
    assert {10, 11}.isdisjoint([*parts.train, *parts.validation])


def read(samples: list[Sample], target: Path, folder: Path, **changes: Any) -> Corpus:
    write_data(folder, target, samples)
    return read_corpus(DataFolder(folder), target, small_config(**changes), TINY_VOCAB)


def test_data_without_greedy_answers_is_refused(target_folder: Path, tmp_path: Path) -> None:
    samples = [sample(f"a/{n}#0/0", [n], temperature=0.7) for n in range(20)]
    with pytest.raises(UnfitDataError, match="found 20 samples to train on and 0 greedy ones"):
        read(samples, target_folder, tmp_path)


def test_data_without_one_whole_block_to_judge_is_refused(
    target_folder: Path, tmp_path: Path
) -> None:
    samples = [sample(f"a/{n}#0/0", [n], answer=6) for n in range(20)]
    with pytest.raises(UnfitDataError, match="--block-size: found 7, wanted less"):
        read(samples, target_folder, tmp_path / "wide", block_size=7)
    assert len(read(samples, target_folder, tmp_path / "fits", block_size=6).split.validation) == 4


def test_data_of_another_target_is_refused(
    data: DataFolder, target_folder: Path, tmp_path: Path
) -> None:
    other = write_tiny_chat_target(tmp_path, seed=1)
    with pytest.raises(UnfitDataError, match=r"found answers of tiny .* wanted those of"):
        read_corpus(data, other, small_config(), TINY_VOCAB)


def test_only_training_answers_are_counted(target_folder: Path, tmp_path: Path) -> None:
    corpus = read([sample(f"a/{n}#0/0", [n]) for n in range(20)], target_folder, tmp_path)
    assert corpus.token_counts[7] == corpus.token_counts.sum() == 16 * 9
    assert corpus.lengths == [10] * 20


def test_a_sequence_is_cut_to_the_longest_length() -> None:
    cut = to_sequence(sample("a/0#0/0", [1, 2, 3], answer=9), 8)
    assert cut.tokens.tolist() == [1, 2, 3, 7, 7, 7, 7, 7]
    assert cut.prompt_length == 3
