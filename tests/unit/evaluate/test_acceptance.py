"""Validation counts the drafts that the decoding loop accepts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from leadout.dflash.drafter import Drafter
from leadout.dflash.generate import acceptance_length, generate
from leadout.dflash.target import Target
from leadout.evaluate.acceptance import (
    AcceptedDrafts,
    accepted_drafts,
    along_decoding,
    summarise,
)
from leadout.evaluate.blocks import BlockForward, TrainingSequence
from leadout.evaluate.hidden_states import ComputedStates, Indexed
from leadout.evaluate.target_weights import TargetFiles, load_target_weights
from leadout.train.run import Corpus

NEW_TOKENS = 40


def accepted(
    drafter: Drafter, target: Target, folder: Path, texts: Sequence[Indexed]
) -> list[AcceptedDrafts]:
    weights = load_target_weights(TargetFiles(folder), torch.float32, torch.device("cpu"))
    forward = BlockForward(drafter, weights.embedding)
    source = ComputedStates(lambda: target)
    return accepted_drafts(forward, weights, source, texts, drafter.config.block_size)


def test_every_step_accepts_the_drafts_that_the_reference_loop_accepts(
    trained: Drafter, target: Target, target_folder: Path, corpus: Corpus
) -> None:
    prompts = [sample.prompt for sample in corpus.samples][:24]
    completions = generate(target, trained, prompts, max_new_tokens=NEW_TOKENS)
    texts = [
        TrainingSequence(str(n), "s", torch.tensor([*prompt, *completion.tokens]), len(prompt))
        for n, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]
    found = accepted(trained, target, target_folder, list(enumerate(texts)))
    compared = 0
    for completion, each in zip(completions, found, strict=True):
        steps = along_decoding(each.counts)
        assert steps == completion.accepted[: len(steps)]
        # All steps but those whose block runs over the end of the text.
        covered = sum(steps) + len(steps)
        assert covered > NEW_TOKENS - 2 * trained.config.block_size
        compared += len(steps)
    assert acceptance_length(completions) > 1.2  # else it would be easy to agree
    assert compared > 200
    summary = summarise(found, trained.config.block_size).overall
    assert summary.acceptance_length == pytest.approx(acceptance_length(completions), rel=0.05)


def test_decoding_skips_accepted_drafts() -> None:
    assert along_decoding(torch.tensor([2, 0, 0, 1, 3, 0, 0])) == [2, 1, 0, 0]
    assert along_decoding(torch.tensor([], dtype=torch.int64)) == []


def test_acceptance_by_hand_and_by_source() -> None:
    drafts = [
        AcceptedDrafts("code", torch.tensor([2, 0, 0, 1])),  # steps 2, 1
        AcceptedDrafts("chat", torch.tensor([0, 0])),  # steps 0, 0
        AcceptedDrafts("chat", torch.tensor([], dtype=torch.int64)),  # shorter than a block
    ]
    found = summarise(drafts, block_size=4)
    assert found.overall.acceptance_length == 1 + 3 / 4
    assert found.overall.by_position == [2 / 4, 1 / 4, 0]
    assert found.overall.steps == 4
    assert found.overall.every_position == 1 + 3 / 6
    assert found.by_source["code"].acceptance_length == 2.5
    assert found.by_source["chat"].acceptance_length == 1.0
    assert found.by_source["chat"].positions == 2


@pytest.mark.parametrize("answer", [1, 2, 4, 5, 6])
def test_answers_around_the_length_of_a_block(
    trained: Drafter, target: Target, target_folder: Path, answer: int
) -> None:
    text = TrainingSequence("0", "s", torch.arange(3 + answer), 3)
    counts = accepted(trained, target, target_folder, [(0, text)])[0].counts
    assert len(counts) == max(0, answer - trained.config.block_size + 1)
