"""A drafter with a reduced vocabulary drafts the frequent tokens, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from leadout.checkpoints import load_drafter, write_checkpoint
from leadout.cli.app import app
from leadout.data.manifest import DataFolder
from leadout.dflash.drafter import Drafter
from leadout.dflash.target import Target
from leadout.train.config import TrainError
from leadout.train.draft_vocab import reduce_draft_vocab, token_counts
from support.models import TINY_VOCAB


@pytest.fixture
def source(trained: Drafter, tmp_path: Path) -> Path:
    weights = {name: p.detach() for name, p in trained.named_parameters()}
    write_checkpoint(tmp_path / "whole", weights, trained.config, "zlab", target_name="tiny")
    return tmp_path / "whole"


@pytest.fixture
def answers(data: DataFolder) -> list[list[int]]:
    samples = data.samples()
    return [list(samples[index].response) for index in range(len(samples))]


def test_logits_of_frequent_tokens_equal_those_of_the_full_drafter(
    source: Path, target_folder: Path, target: Target, answers: list[list[int]], tmp_path: Path
) -> None:
    counts = token_counts(answers, TINY_VOCAB)
    size = int((counts > 0).sum()) // 2
    written, covered = reduce_draft_vocab(
        source, tmp_path / "reduced", target_folder, answers, size
    )
    assert written.config.draft_vocab_size == size
    whole, reduced = load_drafter(source), load_drafter(tmp_path / "reduced")
    assert reduced.d2t is not None
    ids = torch.arange(size) + reduced.d2t
    assert set(ids.tolist()) == set(counts.topk(size).indices.tolist())
    assert covered == pytest.approx(float(counts[ids].sum() / counts.sum()))
    assert 0.5 < covered < 1
    hidden = torch.randn(5, whole.config.hidden_size)
    of_whole = whole.logits(hidden, target.head)[:, ids]
    assert torch.allclose(reduced.logits(hidden, target.head), of_whole, atol=1e-5)


def test_a_vocabulary_larger_than_the_answers_is_rejected(
    source: Path, target_folder: Path, answers: list[list[int]], tmp_path: Path
) -> None:
    with pytest.raises(TrainError, match=f"--draft-vocab {TINY_VOCAB - 1} must be"):
        reduce_draft_vocab(source, tmp_path / "reduced", target_folder, answers, TINY_VOCAB - 1)
    reduce_draft_vocab(source, tmp_path / "reduced", target_folder, answers, 8)
    with pytest.raises(TrainError, match="already has its own output head"):
        reduce_draft_vocab(tmp_path / "reduced", tmp_path / "twice", target_folder, answers, 4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--to", "zlab"], "--draft-vocab requires --to speculators"),
        (["--to", "speculators"], "--draft-vocab requires --target"),
        (["--to", "speculators", "--target", "tiny"], "--draft-vocab requires --frequent-in"),
    ],
)
def test_convert_says_what_is_missing(
    flags: list[str], message: str, source: Path, tmp_path: Path
) -> None:
    words = ["convert", str(source), str(tmp_path / "out"), "--draft-vocab", "8", *flags]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "out").exists()
