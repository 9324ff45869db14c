"""A repaired drafter is the old one with one edit, and nothing is ever overwritten."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from leadout.check.diagnosis import NotFixableError, write_fixed
from leadout.check.hypotheses import Surroundings, Variant, last_norm, order_of_taps, shifted_taps
from leadout.checkpoints import CheckpointError, convert, load_weights, read_checkpoint

AROUND = Surroundings(target_layers=6, target_rope=None, special_tokens=(), longest_context=512)


def up_by_one(drafter: Path) -> Variant:
    return next(iter(shifted_taps(read_checkpoint(drafter).config, AROUND)))


@pytest.mark.parametrize("to", ["zlab", "speculators"])
def test_a_field_is_edited_and_all_else_kept(drafter: Path, tmp_path: Path, to: str) -> None:
    if to == "speculators":
        convert(drafter, tmp_path / "converted", "speculators", "some/target")
        drafter = tmp_path / "converted"
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"made_by": "somebody"}))
    before = read_checkpoint(drafter)
    fixed = write_fixed(drafter, up_by_one(drafter), tmp_path / "fixed")
    assert fixed.config == replace(before.config, target_layer_ids=(2, 3, 4))
    assert fixed.format == to
    assert fixed.target_name == before.target_name
    assert fixed.draft_tokens == before.draft_tokens
    assert fixed.kept == before.kept
    assert fixed.kept["made_by"] == "somebody"
    old, new = load_weights(before), load_weights(fixed)
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert read_checkpoint(drafter) == before


def test_weights_are_edited(drafter: Path, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(drafter)
    reverse = next(iter(order_of_taps(checkpoint.config, AROUND)))
    fixed = write_fixed(drafter, reverse, tmp_path / "fixed")
    old, new = load_weights(checkpoint)["fc.weight"], load_weights(fixed)["fc.weight"]
    first, second, third = old.split(checkpoint.config.context_size, dim=1)
    assert torch.equal(new, torch.cat([third, second, first], dim=1))


def test_a_file_without_the_targets_layers_is_completed(drafter: Path, tmp_path: Path) -> None:
    config = json.loads((drafter / "config.json").read_text())
    del config["num_target_layers"]
    (drafter / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="num_target_layers"):
        write_fixed(drafter, up_by_one(drafter), tmp_path / "fixed")
    fixed = write_fixed(drafter, up_by_one(drafter), tmp_path / "fixed", target_layers=6)
    assert fixed.config.target_num_layers == 6


def test_nothing_is_overwritten(drafter: Path, tmp_path: Path) -> None:
    before = (drafter / "config.json").read_bytes()
    for out in (drafter, tmp_path):
        with pytest.raises(CheckpointError, match="a new or empty folder"):
            write_fixed(drafter, up_by_one(drafter), out)
    assert (drafter / "config.json").read_bytes() == before


def test_what_no_file_can_say_is_refused(drafter: Path, tmp_path: Path) -> None:
    config = replace(read_checkpoint(drafter).config, target_layer_ids=(1, 2, 5))
    (variant,) = last_norm(config, AROUND)
    with pytest.raises(NotFixableError, match="last-layer-norm"):
        write_fixed(drafter, variant, tmp_path / "fixed")
    assert not (tmp_path / "fixed").exists()
