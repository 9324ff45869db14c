"""A drafter with wider heads drafts as before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from typer.testing import CliRunner

from leadout.checkpoints import load_drafter, write_checkpoint
from leadout.checkpoints.widen import HeadDimError, widen_heads
from leadout.cli.app import app
from leadout.dflash.config import DrafterConfig, LinearScaling, Rope, Yarn
from leadout.dflash.drafter import Drafter
from leadout.dflash.propose import BlockProposer
from leadout.dflash.target import Target
from support.drafters import SLIDING, TINY_DRAFTER, random_weights

CONFIG = replace(TINY_DRAFTER, target_num_layers=4)
TOKENS = torch.tensor([[5, 9, 2, 44, 7, 7, 31, 200, 13], [60, 61, 62, 30, 4, 4, 4, 9, 250]])


def block_logits(drafter: Drafter, model: PreTrainedModel) -> Tensor:
    target = Target(model, drafter.config.target_layer_ids)
    proposer = BlockProposer(drafter, target, batch=2)
    with torch.no_grad():
        proposer.commit(target.states(TOKENS), torch.tensor([9, 5]))
        return proposer.block_logits(torch.tensor([3, 8]), drafter.config.max_draft_tokens)


def written(folder: Path, config: DrafterConfig) -> Path:
    write_checkpoint(folder, random_weights(config), config, "zlab")
    return folder


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, attention_bias=True, layers=(SLIDING,) * 3),
        replace(CONFIG, rope=Rope(theta=10_000.0, scaling=LinearScaling(factor=4.0))),
    ],
    ids=["plain", "biases and windows", "scaled positions"],
)
def test_wider_heads_do_not_change_the_drafts(
    config: DrafterConfig, head_dim: int, tiny_llama: PreTrainedModel, tmp_path: Path
) -> None:
    source = written(tmp_path / "drafter", config)
    wide = widen_heads(source, tmp_path / "wide", "zlab", head_dim)
    assert wide.config == replace(config, head_dim=head_dim)
    before = block_logits(load_drafter(source, torch.float32), tiny_llama)
    after = block_logits(load_drafter(tmp_path / "wide", torch.float32), tiny_llama)
    # What is left is the epsilon of the head norms, which counts more.
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3 * float(before.std()))
    assert torch.equal(after.argmax(dim=-1), before.argmax(dim=-1))


@pytest.mark.parametrize(
    ("change", "head_dim", "reason"),
    [
        ({}, 48, "multiple of the drafter's 32"),
        ({}, 32, "multiple of the drafter's 32, and larger"),
        ({"rope": Rope(1e4, scaling=Yarn(factor=4.0, original_max_positions=128))}, 64, "YaRN"),
        ({"rope": Rope(1e4, fraction=0.5)}, 64, "part of each head"),
    ],
)
def test_what_would_change_the_drafts_is_refused(
    change: dict[str, object], head_dim: int, reason: str, tmp_path: Path
) -> None:
    source = written(tmp_path / "drafter", replace(CONFIG, **change))
    with pytest.raises(HeadDimError, match=reason):
        widen_heads(source, tmp_path / "wide", "zlab", head_dim)
    assert not (tmp_path / "wide").exists()


def test_the_command_pads_heads_but_not_together_with_a_draft_vocabulary(tmp_path: Path) -> None:
    source = written(tmp_path / "drafter", CONFIG)
    words = ["convert", str(source), str(tmp_path / "wide"), "--to", "zlab", "--head-dim", "128"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert load_drafter(tmp_path / "wide", torch.float32).config.head_dim == 128
    both = [*words[:2], str(tmp_path / "both"), *words[3:], "--draft-vocab", "8"]
    assert CliRunner().invoke(app, both).exit_code == 2
