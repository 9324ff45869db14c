"""A new drafter: layers, taps, mask token, sizes, initial weights, reduced draft vocabulary."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from typer.testing import CliRunner

from leadout.checkpoints import load_drafter, write_checkpoint
from leadout.cli.app import app
from leadout.data.manifest import DataFolder
from leadout.dflash.config import DrafterConfig, InvalidDrafterError
from leadout.dflash.drafter import Drafter
from leadout.dflash.target import Target, UnsupportedTargetError
from leadout.learn.prepare import first_settings
from leadout.pairing.sizes import sizes_from_config
from leadout.pairing.target import spread_layer_ids
from leadout.train.config import TrainConfig, TrainError
from leadout.train.export import SETTINGS
from leadout.train.init import (
    TokenCounts,
    choose_mask_token,
    default_layers,
    frequent_tokens,
    new_config,
    new_drafter,
    reduce_draft_vocab,
)
from support.models import TINY_VOCAB
from support.small_runs import MakeRun
from support.target_configs import CONFIGS


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (36, (1, 9, 17, 25, 33)),  # as the published drafter of Qwen3-8B
        (30, (1, 8, 14, 20, 27)),
        (6, (1, 2, 3)),
        (4, (0, 1, 2, 3)),
        (1, (0,)),
    ],
)
def test_taps_are_spread_evenly_over_the_target(layers: int, expected: tuple[int, ...]) -> None:
    assert spread_layer_ids(layers) == expected
    assert spread_layer_ids(36, taps=1) == (18,)


def test_small_targets_get_fewer_draft_layers() -> None:
    small, large = (sizes_from_config(CONFIGS[n], n) for n in ("SmolLM2-135M", "DeepSeek-V3"))
    assert (default_layers(small), default_layers(large)) == (2, 5)


def test_the_mask_token_has_no_meaning_in_the_data() -> None:
    assert choose_mask_token(110, 100, {98, 99}, {99}, set()) == 100  # beyond the tokenizer
    assert choose_mask_token(100, 100, {90, 95, 96, 97}, {90}, {95}) == 96
    with pytest.raises(TrainError, match="No mask token could be chosen"):
        choose_mask_token(100, 100, {90, 95}, {90}, {95})


def config_for(
    target: Path,
    layers: int = 3,
    ids: tuple[int, ...] = (1, 2, 3),
    mlp_width: int | None = None,
) -> DrafterConfig:
    return new_config(
        target,
        layers=layers,
        block_size=5,
        target_layer_ids=ids,
        mask_token_id=9,
        mlp_width=mlp_width,
    )


def test_a_new_drafter_has_the_targets_sizes(target_folder: Path) -> None:
    config = config_for(target_folder)
    target = AutoConfig.from_pretrained(target_folder)
    assert (config.hidden_size, config.intermediate_size) == (64, 128)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)
    assert config.rope.theta == target.rope_parameters["rope_theta"]
    assert config.target_num_layers == 6
    assert all(layer.window is None and not layer.causal for layer in config.layers)


def test_the_mlp_can_be_narrower_than_the_targets(target_folder: Path) -> None:
    config = config_for(target_folder, mlp_width=48)
    assert config == dataclasses.replace(config_for(target_folder), intermediate_size=48)
    assert new_drafter(config, seed=0).layers[0].mlp.gate_proj.weight.shape == (48, 64)


def test_taps_beyond_the_target_are_rejected(target_folder: Path) -> None:
    with pytest.raises(InvalidDrafterError, match=r"target_layer_ids is \(1, 9\)"):
        config_for(target_folder, ids=(1, 9))


def test_a_target_without_a_known_rotary_embedding_is_rejected(tmp_path: Path) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=4)
    written = config.to_dict()
    written.pop("rope_parameters", None)
    LlamaConfig.from_dict(written).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"rope_theta"', '"another_theta"'))
    with pytest.raises(UnsupportedTargetError, match="no rotary position embedding"):
        config_for(tmp_path)


def test_random_weights_depend_on_the_seed_only(target_folder: Path) -> None:
    config = config_for(target_folder)
    first, same, other = (new_drafter(config, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


@pytest.fixture
def source(trained: Drafter, tmp_path: Path) -> Path:
    weights = {name: p.detach() for name, p in trained.named_parameters()}
    write_checkpoint(tmp_path / "whole", weights, trained.config, "zlab", target_name="tiny")
    return tmp_path / "whole"


def test_initial_weights_may_come_from_a_drafter_with_another_block_size(
    make_run: MakeRun, trained: Drafter, source: Path
) -> None:
    run = make_run(layers=1, block_size=3, initial=str(source))
    assert run.drafter_config.block_size == 3
    weights = dict(trained.named_parameters())
    for name, parameter in run.drafter.named_parameters():
        assert torch.equal(parameter, weights[name])


def test_initial_weights_of_another_shape_are_rejected(make_run: MakeRun, source: Path) -> None:
    with pytest.raises(
        TrainError, match=r"has layers .* settings ask for .*only the block size may"
    ):
        make_run(layers=2, initial=str(source))


@pytest.fixture
def answers(data: DataFolder) -> list[list[int]]:
    samples = data.samples()
    return [list(samples[index].response) for index in range(len(samples))]


def test_logits_of_frequent_tokens_equal_those_of_the_full_drafter(
    source: Path, target_folder: Path, target: Target, answers: list[list[int]], tmp_path: Path
) -> None:
    counted = TokenCounts(TINY_VOCAB)
    for answer in answers:
        counted.add(answer)
    counts = counted.total()
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


def test_a_vocabulary_has_other_tokens_where_the_answers_have_too_few() -> None:
    counts = torch.tensor([0, 3, 0, 0, 9, 1, 0])
    assert frequent_tokens(counts, 2).tolist() == [1, 4]
    found = frequent_tokens(counts, 5).tolist()
    assert found == sorted(set(found))
    assert (len(found), {1, 4, 5} - set(found)) == (5, set())
    with pytest.raises(TrainError, match="--draft-vocab 7 must be between 1 and 6"):
        frequent_tokens(counts, 7)


def test_a_vocabulary_as_large_as_the_targets_is_rejected(
    source: Path, target_folder: Path, answers: list[list[int]], tmp_path: Path
) -> None:
    with pytest.raises(TrainError, match=f"--draft-vocab {TINY_VOCAB} must be"):
        reduce_draft_vocab(source, tmp_path / "reduced", target_folder, answers, TINY_VOCAB)
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


@pytest.mark.parametrize(
    "flags",
    [
        ["--draft-vocab", "8", "--frequent-in", "DATA"],
        ["--head-dim", "64"],
        [],
    ],
)
def test_converted_drafters_keep_the_settings_of_their_training(
    flags: list[str], source: Path, target_folder: Path, data: DataFolder, tmp_path: Path
) -> None:
    """`leadout learn` continues with them."""
    words = [str(data.folder) if word == "DATA" else word for word in flags]
    for has_settings in (False, True):
        out = tmp_path / f"out-{has_settings}"
        if has_settings:
            TrainConfig(anchors=7).write(source / SETTINGS)
        command = ["convert", str(source), str(out), "--to", "speculators", *words]
        result = CliRunner().invoke(app, [*command, "--target", str(target_folder)])
        assert result.exit_code == 0, result.output
        assert (out / SETTINGS).exists() is has_settings
    assert first_settings(out).anchors == 7
