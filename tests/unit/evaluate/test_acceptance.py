"""Validation counts the drafts that the decoding loop accepts; its intervals are sound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from leadout.dflash.drafter import Drafter
from leadout.dflash.generate import acceptance_length, generate
from leadout.dflash.target import Target
from leadout.evaluate.acceptance import (
    AcceptedDrafts,
    DraftHead,
    TextAcceptance,
    accepted_drafts,
    along_decoding,
    anchors_per_pass,
    paired_gain,
    summarise,
    tabulate,
)
from leadout.evaluate.blocks import BlockForward, TrainingSequence
from leadout.evaluate.hidden_states import ComputedStates, Indexed
from leadout.evaluate.target_weights import TargetFiles, load_target_weights
from leadout.stats import bootstrap, ratio_interval
from leadout.train.run import Corpus

NEW_TOKENS = 40


def accepted(
    drafter: Drafter, target: Target, folder: Path, texts: Sequence[Indexed]
) -> list[AcceptedDrafts]:
    weights = load_target_weights(TargetFiles(folder), torch.float32, torch.device("cpu"))
    forward = BlockForward(drafter, weights.embedding)
    source = ComputedStates(lambda: target)
    head = DraftHead.of(drafter, weights)
    return accepted_drafts(forward, head, source, texts, drafter.config.block_size)


def with_half_of_the_vocabulary(drafter: Drafter, target: Target, corpus: Corpus) -> Drafter:
    """A copy that drafts only half of the tokens that answers have, the most frequent ones."""
    counts = corpus.token_counts
    ids = counts.topk(int((counts > 0).sum()) // 2).indices.sort().values
    config = replace(drafter.config, own_head=True, draft_vocab_size=len(ids))
    head = target.head(torch.eye(config.hidden_size)).T  # [vocab, H]
    own = {"lm_head.weight": head[ids], "d2t": ids - torch.arange(len(ids))}
    reduced = Drafter(config)
    reduced.load_state_dict(drafter.state_dict() | own)
    return reduced


@pytest.mark.parametrize("vocabulary", ["whole", "reduced"])
def test_every_step_accepts_the_drafts_that_the_reference_loop_accepts(
    trained: Drafter, target: Target, target_folder: Path, corpus: Corpus, vocabulary: str
) -> None:
    if vocabulary == "reduced":
        trained = with_half_of_the_vocabulary(trained, target, corpus)
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


def text(*steps: int) -> TextAcceptance:
    return TextAcceptance("set", 10, torch.tensor(steps), list(steps))


def test_acceptance_length_is_tokens_per_step() -> None:
    table = tabulate([text(2, 0, 3), text(1)], draft_tokens=3)
    assert table.steps == 4
    assert table.length.value == pytest.approx(1 + 6 / 4)
    assert [place.value for place in table.by_position] == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert sum(place.value for place in table.by_position) == pytest.approx(1.5)


def test_intervals_cover_the_true_value_at_their_level() -> None:
    generator = torch.Generator().manual_seed(1)
    covered = 0
    for _ in range(200):
        rates = 0.4 + 0.2 * torch.rand(40, generator=generator)  # texts differ
        parts = torch.binomial(torch.full((40,), 30.0), rates, generator=generator).double()
        interval = ratio_interval(parts.numpy(), np.full(40, 30.0))
        covered += interval.low <= 0.5 <= interval.high
    assert 180 <= covered <= 198  # 95% of 200 is 190


def test_intervals_are_reproducible_and_contain_the_value() -> None:
    first = bootstrap(5, lambda draw: draw.mean(-1))
    assert first == bootstrap(5, lambda draw: draw.mean(-1))
    assert first.low < first.value < first.high


def test_a_small_gain_on_the_same_positions_is_significant() -> None:
    generator = torch.Generator().manual_seed(0)
    before = [torch.randint(0, 7, (100,), generator=generator) for _ in range(30)]
    after = []
    for counts in before:
        better = counts.clone()
        better[torch.randperm(100, generator=generator)[:6]] += 1  # 1.5% more
        after.append(better)
    gain = paired_gain(before, after)
    assert gain.p_value < 0.05
    assert gain.difference.low > 0
    assert gain.relative == pytest.approx(0.06 / 4, rel=0.1)
    assert paired_gain(after, before).difference.high < 0
    assert paired_gain(before, before).p_value == 1


def test_long_texts_have_fewer_anchors_in_a_pass() -> None:
    assert anchors_per_pass(8, 1024) == 64
    few = anchors_per_pass(8, 32_768)
    assert 1 <= few < 16
    assert 64 * few * 8 * 32_776 * 12 <= 1 << 30  # the scores of a pass, in bytes
    assert anchors_per_pass(16, 1 << 20) == 1
