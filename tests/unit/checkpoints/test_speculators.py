"""The speculators format: two readers, one meaning, or an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from leadout.checkpoints import (
    CheckpointError,
    UnsupportedCheckpointError,
    read_checkpoint,
    write_checkpoint,
)
from leadout.dflash.config import LayerAttention, Rope
from support.drafters import MINI, edit_config, edit_weights, random_weights

ABSENT = object()
FULL, SLIDE = "full_attention", "sliding_attention"


def changed(folder: Path, top: dict[str, Any] | None = None, **decoder: Any) -> Path:
    """Set fields at the top level and in the decoder's section; ABSENT removes one."""

    def change(config: dict[str, Any]) -> None:
        sections = ((config, top or {}), (config["transformer_layer_config"], decoder))
        for section, fields in sections:
            for name, value in fields.items():
                if value is ABSENT:
                    section.pop(name, None)
                else:
                    section[name] = value

    edit_config(folder, change)
    return folder


def test_layer_ids_are_shifted(speculators_folder: Path) -> None:
    ids = {"aux_hidden_state_layer_ids": [1, 6]}
    assert read_checkpoint(changed(speculators_folder, ids)).config.target_layer_ids == (0, 5)


def test_the_embedding_output_cannot_be_tapped(speculators_folder: Path) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="embedding output"):
        read_checkpoint(changed(speculators_folder, {"aux_hidden_state_layer_ids": [0, 3]}))


def test_block_size_defaults_to_eight(speculators_folder: Path) -> None:
    checkpoint = read_checkpoint(changed(speculators_folder, {"block_size": ABSENT}))
    assert checkpoint.config.block_size == 8
    assert any("block_size" in note for note in checkpoint.notes)


SLIDING = {"sliding_window": 6, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("flag", "kinds", "layers", "noted"),
    [
        (True, [FULL, FULL], (LayerAttention(),) * 2, None),
        (True, [SLIDE, SLIDE], (LayerAttention(6),) * 2, None),
        (True, [SLIDE, FULL], (LayerAttention(6), LayerAttention()), None),
        (False, [SLIDE, SLIDE], (LayerAttention(6, causal=True),) * 2, None),
        (
            False,
            [SLIDE, FULL],
            (LayerAttention(6, causal=True), LayerAttention()),
            "serves them as trained. `leadout convert --to zlab` writes",
        ),
        (
            False,
            [FULL, FULL],
            (LayerAttention(),) * 2,
            "serves them as trained. `leadout convert --to speculators` writes",
        ),
        (ABSENT, [FULL, FULL], (LayerAttention(),) * 2, None),
        (ABSENT, [SLIDE, FULL], (LayerAttention(6), LayerAttention()), "read as bidirectional"),
        (None, [SLIDE, SLIDE], (LayerAttention(6),) * 2, "read as bidirectional"),
    ],
)
def test_causality(
    flag: Any,
    kinds: list[str],
    layers: tuple[LayerAttention, ...],
    noted: str | None,
    speculators_folder: Path,
) -> None:
    fields = {"sliding_window_non_causal": flag}
    checkpoint = read_checkpoint(changed(speculators_folder, fields, layer_types=kinds, **SLIDING))
    assert checkpoint.config.layers == layers
    if noted is None:
        assert not checkpoint.notes
    else:
        assert any(noted in note for note in checkpoint.notes)


def test_absent_layer_types_are_full(speculators_folder: Path) -> None:
    checkpoint = read_checkpoint(changed(speculators_folder, layer_types=ABSENT))
    assert checkpoint.config.layers == (LayerAttention(),) * 2


@pytest.mark.parametrize(
    ("fields", "named", "why"),
    [
        # speculators and vLLM would complete these differently.
        ({"rope_theta": ABSENT, "rope_parameters": ABSENT}, "rope_parameters", "vLLM 1000000"),
        ({"head_dim": ABSENT}, "head_dim", "hidden_size / num_attention_heads"),
        (
            {"layer_types": ABSENT, "use_sliding_window": True, "max_window_layers": 1},
            "layer_types",
            "vLLM none",
        ),
        # vLLM has no default for these.
        ({"rms_norm_eps": ABSENT}, "rms_norm_eps", "a value"),
        ({"max_position_embeddings": ABSENT}, "max_position_embeddings", "a value"),
        ({"num_key_value_heads": ABSENT}, "num_key_value_heads", "a value"),
        ({"layer_types": [SLIDE, SLIDE], "sliding_window": None}, "sliding_window", "the window"),
        (
            {"layer_types": [SLIDE, SLIDE], "sliding_window": 6, "use_sliding_window": False},
            "use_sliding_window",
            "true",
        ),
    ],
)
def test_what_readers_complete_differently_must_be_stated(
    fields: dict[str, Any], named: str, why: str, speculators_folder: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(changed(speculators_folder, **fields))
    assert caught.value.field == f"transformer_layer_config.{named}"
    assert why in str(caught.value)


def test_head_dim_may_be_absent_where_both_readers_agree(tmp_path: Path) -> None:
    config = replace(MINI, hidden_size=256, head_dim=128)
    folder = tmp_path / "wide"
    write_checkpoint(folder, random_weights(config), config, "speculators", target_name="t")
    assert read_checkpoint(changed(folder, head_dim=ABSENT)).config.head_dim == 128


def test_rope_without_theta_is_ten_thousand_for_both_readers(speculators_folder: Path) -> None:
    rope = {"rope_theta": ABSENT, "rope_parameters": {"rope_type": "default"}}
    assert read_checkpoint(changed(speculators_folder, **rope)).config.rope == Rope(10_000.0)


@pytest.mark.parametrize(
    ("top", "reason"),
    [
        ({"sample_from_anchor": True}, "anchor"),
        ({"speculators_model_type": "dflash2"}, "DFlash 2"),
        ({"speculators_model_type": "dspark"}, "DSpark"),
        ({"speculators_model_type": "eagle3"}, "EAGLE"),
        ({"quantization_config": {"format": "float-quantized"}}, "quantized"),
    ],
)
def test_relatives(top: dict[str, Any], reason: str, speculators_folder: Path) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=reason):
        read_checkpoint(changed(speculators_folder, top))


def test_several_residual_streams(speculators_folder: Path) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="hyper-connections"):
        read_checkpoint(changed(speculators_folder, hc_mult=4))


@pytest.mark.parametrize(
    ("top", "named"),
    [
        ({"speculators_model_type": "guess"}, "speculators_model_type"),
        ({"mask_token_id": ABSENT}, "mask_token_id"),
        ({"mask_token_id": 40}, "mask_token_id"),
        ({"draft_vocab_size": ABSENT}, "draft_vocab_size"),
        ({"draft_vocab_size": 41}, "draft_vocab_size"),
        ({"aux_hidden_state_layer_ids": ABSENT}, "aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [2, 7]}, "aux_hidden_state_layer_ids (minus one)"),
        ({"transformer_layer_config": ABSENT}, "transformer_layer_config"),
        ({"markov_temperature": 1.0}, "markov_temperature"),
        (
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]}},
            "speculators_config.proposal_methods.0.speculative_tokens",
        ),
        ({"speculators_config": {"algorithm": "eagle"}}, "speculators_config.algorithm"),
        ({"speculators_config": "dflash"}, "speculators_config"),
    ],
)
def test_impossible_values(top: dict[str, Any], named: str, speculators_folder: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(changed(speculators_folder, top))
    assert caught.value.field == named


def test_decoder_fields_outside_the_decoder_are_decoys(speculators_folder: Path) -> None:
    checkpoint = read_checkpoint(changed(speculators_folder, {"sliding_window": 16}))
    assert checkpoint.config.layers == (LayerAttention(),) * 2
    assert any("sliding_window" in note for note in checkpoint.notes)
    assert "sliding_window" not in checkpoint.kept


def test_an_own_head_follows_from_the_tensors(tmp_path: Path) -> None:
    for own in (False, True):
        config = replace(MINI, own_embedding=own, own_head=own)
        folder = tmp_path / f"own-{own}"
        write_checkpoint(folder, random_weights(config), config, "speculators", target_name="t")
        assert read_checkpoint(folder).config == config


def test_copies_of_the_verifier_are_passed_over(speculators_folder: Path) -> None:
    head = load_file(speculators_folder / "model.safetensors")["lm_head.weight"]

    def add(weights: dict[str, Any]) -> None:
        weights["verifier_lm_head.weight"] = head.clone()
        weights["verifier_norm.weight"] = head[0].clone()

    edit_weights(speculators_folder, add)
    assert "verifier_norm.weight" not in read_checkpoint(speculators_folder).tensors.drafter


def test_without_its_own_section_vllm_cannot_tell(speculators_folder: Path) -> None:
    checkpoint = read_checkpoint(changed(speculators_folder, {"speculators_config": ABSENT}))
    assert checkpoint.target_name is None
    assert checkpoint.draft_tokens is None
    assert any("vLLM cannot recognise" in note for note in checkpoint.notes)
