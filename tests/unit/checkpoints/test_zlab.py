"""z-lab's fields: what each one means, alone and together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leadout.checkpoints import CheckpointError, UnsupportedCheckpointError, read_checkpoint
from leadout.dflash.config import LayerAttention, LinearScaling, Llama3Scaling, Rope, Yarn
from support.drafters import edit_config

ABSENT = object()
FULL, SLIDE = "full_attention", "sliding_attention"


def changed(folder: Path, top: dict[str, Any] | None = None, **draft: Any) -> Path:
    """Set fields at the top level and in dflash_config; ABSENT removes one."""

    def change(config: dict[str, Any]) -> None:
        for section, fields in ((config, top or {}), (config["dflash_config"], draft)):
            for name, value in fields.items():
                if value is ABSENT:
                    section.pop(name, None)
                else:
                    section[name] = value

    edit_config(folder, change)
    return folder


def bare_attention(config: dict[str, Any]) -> None:
    for name in ("layer_types", "sliding_window", "use_sliding_window"):
        config.pop(name, None)


def bare_rope(config: dict[str, Any]) -> None:
    for name in ("rope_theta", "rope_parameters", "rope_scaling"):
        config.pop(name, None)


@pytest.mark.parametrize(
    ("top", "draft", "block_size"),
    [
        (8, 8, 8),
        (8, ABSENT, 8),
        (ABSENT, 8, 8),
        (ABSENT, None, 16),
        (ABSENT, ABSENT, 16),
    ],
)
def test_block_size(top: Any, draft: Any, block_size: int, zlab_folder: Path) -> None:
    checkpoint = read_checkpoint(changed(zlab_folder, {"block_size": top}, block_size=draft))
    assert checkpoint.config.block_size == block_size
    assumed = any("block_size" in note for note in checkpoint.notes)
    assert assumed == (top is ABSENT and draft in (ABSENT, None))


@pytest.mark.parametrize(
    ("field", "draft", "top"),
    [
        ("block_size", 4, 8),
        ("mask_token_id", 7, 8),
        ("target_layer_ids", [1, 3], [1, 4]),
        ("num_target_layers", 6, 7),
        ("output_multiplier", 2.0, 3.0),
    ],
)
def test_two_places_must_agree(field: str, draft: Any, top: Any, zlab_folder: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{field} is .*; expected .* as in the other place"):
        read_checkpoint(changed(zlab_folder, {field: top}, **{field: draft}))


def test_draft_fields_may_all_lie_at_the_top(zlab_folder: Path) -> None:
    before = read_checkpoint(zlab_folder).config

    def flatten(config: dict[str, Any]) -> None:
        config |= config.pop("dflash_config")

    edit_config(zlab_folder, flatten)
    assert read_checkpoint(zlab_folder).config == before


@pytest.mark.parametrize(
    ("target_layers", "ids"),
    [(6, (1, 3)), (36, (1, 33)), (ABSENT, None)],
)
def test_absent_layer_ids(
    target_layers: Any, ids: tuple[int, ...] | None, zlab_folder: Path
) -> None:
    changed(zlab_folder, {"num_target_layers": target_layers}, target_layer_ids=ABSENT)
    if ids is None:
        with pytest.raises(CheckpointError, match=r"target_layer_ids is missing"):
            read_checkpoint(zlab_folder)
        return
    checkpoint = read_checkpoint(zlab_folder)
    assert checkpoint.config.target_layer_ids == ids
    assert any("target_layer_ids" in note for note in checkpoint.notes)


def test_the_shifted_list_must_be_the_same_layers(zlab_folder: Path) -> None:
    name = "eagle_aux_hidden_state_layer_ids"
    assert read_checkpoint(changed(zlab_folder, {name: [2, 4]})).config.target_layer_ids == (1, 3)
    with pytest.raises(CheckpointError, match=name):
        read_checkpoint(changed(zlab_folder, {name: [1, 3]}))


BOTH_FULL = (LayerAttention(), LayerAttention())


@pytest.mark.parametrize(
    ("top", "draft", "layers"),
    [
        ({}, {}, BOTH_FULL),
        ({"layer_types": [FULL, FULL], "sliding_window": 6}, {}, BOTH_FULL),
        # Sliding layers are causal, full ones are not.
        (
            {"layer_types": [SLIDE, FULL], "sliding_window": 6, "use_sliding_window": True},
            {},
            (LayerAttention(6, causal=True), LayerAttention()),
        ),
        # The file states a window, which transformers ignores; Leadout reads it.
        (
            {"layer_types": [SLIDE, FULL], "sliding_window": 6},
            {},
            (LayerAttention(6, causal=True), LayerAttention()),
        ),
        # Qwen3Config's own window.
        (
            {"layer_types": [SLIDE, FULL], "use_sliding_window": True},
            {},
            (LayerAttention(4096, causal=True), LayerAttention()),
        ),
        # Without layer_types, layers slide from max_window_layers on.
        ({"sliding_window": 6, "use_sliding_window": True}, {}, BOTH_FULL),
        (
            {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
            {},
            (LayerAttention(), LayerAttention(6, causal=True)),
        ),
        ({"sliding_window": 6, "max_window_layers": 0}, {}, BOTH_FULL),
        # vLLM's own switch: every layer slides, none becomes causal.
        ({}, {"use_swa": True, "swa_window_size": 6}, (LayerAttention(6),) * 2),
        ({"sliding_window": 6}, {"use_swa": True}, (LayerAttention(6),) * 2),
        (
            {"layer_types": [FULL, FULL]},
            {"use_swa": True, "swa_window_size": 6, "causal": True},
            (LayerAttention(6, causal=True),) * 2,
        ),
        (
            {"layer_types": [SLIDE, FULL]},
            {"use_swa": True, "swa_window_size": 6},
            (LayerAttention(6, causal=True), LayerAttention()),
        ),
        # is_causal rules all layers, then dflash_config.causal.
        ({"is_causal": True}, {}, (LayerAttention(causal=True),) * 2),
        ({"is_causal": False}, {"causal": True}, BOTH_FULL),
        ({}, {"causal": True}, (LayerAttention(causal=True),) * 2),
        (
            {
                "layer_types": [SLIDE, SLIDE],
                "sliding_window": 6,
                "use_sliding_window": True,
                "is_causal": False,
            },
            {},
            (LayerAttention(6),) * 2,
        ),
    ],
)
def test_window_and_causality(
    top: dict[str, Any],
    draft: dict[str, Any],
    layers: tuple[LayerAttention, ...],
    zlab_folder: Path,
) -> None:
    edit_config(zlab_folder, bare_attention)
    assert read_checkpoint(changed(zlab_folder, top, **draft)).config.layers == layers


@pytest.mark.parametrize(
    ("top", "draft", "field"),
    [
        ({"layer_types": [SLIDE, FULL]}, {}, "sliding_window"),
        ({"layer_types": [SLIDE, FULL], "sliding_window": None}, {}, "sliding_window"),
        (
            {"layer_types": [SLIDE, FULL], "sliding_window": 6, "use_sliding_window": False},
            {},
            "use_sliding_window",
        ),
        ({"sliding_window": 6}, {"use_swa": True, "swa_window_size": 7}, "sliding_window"),
        ({}, {"use_swa": True}, "sliding_window"),
        ({"layer_types": [FULL]}, {}, "layer_types"),
        ({"layer_types": [FULL, "chunked_attention"]}, {}, "layer_types"),
    ],
)
def test_contradictory_windows(
    top: dict[str, Any], draft: dict[str, Any], field: str, zlab_folder: Path
) -> None:
    edit_config(zlab_folder, bare_attention)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(changed(zlab_folder, top, **draft))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({}, Rope(10_000.0)),
        ({"rope_theta": 500}, Rope(500.0)),
        ({"rope_theta": 500, "rope_scaling": None}, Rope(500.0)),
        ({"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}, Rope(500.0)),
        ({"rope_parameters": {"rope_theta": 500.0}, "rope_theta": 500}, Rope(500.0)),
        ({"rope_parameters": {"rope_type": "default"}}, Rope(10_000.0)),
        (
            {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}},
            Rope(500.0, LinearScaling(2.0)),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}},
            Rope(500.0, Yarn(4.0, 256)),  # the file's max_position_embeddings
        ),
        (
            {
                "rope_theta": 500.0,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.5,
                    "beta_fast": 16,
                    "beta_slow": 2,
                    "mscale": 1.0,
                    "mscale_all_dim": 0.5,
                    "truncate": False,
                },
            },
            Rope(500.0, Yarn(4.0, 64, 1.5, 16.0, 2.0, 1.0, 0.5, truncate=False)),
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            Rope(500.0, Llama3Scaling(8.0, 1.0, 4.0, 64)),
        ),
        ({"partial_rotary_factor": 0.5}, Rope(10_000.0, fraction=0.5)),
        (
            {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
            Rope(500.0, fraction=0.5),
        ),
        (
            {"rope_parameters": {FULL: {"rope_theta": 500.0}, SLIDE: {"rope_theta": 9.0}}},
            Rope(500.0),  # no layer slides
        ),
    ],
)
def test_rope(fields: dict[str, Any], rope: Rope, zlab_folder: Path) -> None:
    edit_config(zlab_folder, bare_rope)
    assert read_checkpoint(changed(zlab_folder, fields)).config.rope == rope


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "as in the other place"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"type": "default"},
            },
            "the same as in rope_parameters",
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling.factor is missing"),
        (
            {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
            "no such field with rope_type default",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "rope_scaling.factor is 0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "twist": 1}}, "rope_scaling.twist"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0; expected greater than 1"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ({"rope_parameters": []}, "rope_parameters"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 2.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "high_freq_factor",
        ),
    ],
)
def test_impossible_rope(fields: dict[str, Any], message: str, zlab_folder: Path) -> None:
    edit_config(zlab_folder, bare_rope)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(changed(zlab_folder, fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "mrope_section"),
        (
            {
                "rope_parameters": {FULL: {"rope_theta": 5.0}, SLIDE: {"rope_theta": 9.0}},
                "layer_types": [SLIDE, FULL],
                "sliding_window": 6,
                "use_sliding_window": True,
            },
            "rotate differently",
        ),
        ({"is_neox_style": False}, "interleaved"),
        ({"rope_is_neox_style": False}, "interleaved"),
        ({"hidden_act": "gelu"}, "activation"),
        ({"logit_scale": 0.5}, "scaled logits"),
        ({"model_type": "llama"}, "another decoder"),
        ({"draft_vocab_size": 10}, "reduced draft vocabulary"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"architectures": ["Qwen3DSparkModel"]}, "DSpark"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE"),
        ({"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorr"),
        ({"v_head_dim": 4}, "value heads have another size"),
    ],
)
def test_other_computations_are_refused(
    fields: dict[str, Any], reason: str, zlab_folder: Path
) -> None:
    edit_config(zlab_folder, bare_rope)
    with pytest.raises(UnsupportedCheckpointError, match=reason):
        read_checkpoint(changed(zlab_folder, fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sample_from_anchor": True}, "anchor"),
        ({"attention_sink_bias": True}, "sinks"),
        ({"attention_value_scale": 0.6}, "scaled attention values"),
        ({"use_aux_hidden_state": False}, "without tapped"),
        ({"projector_type": "domino"}, "projector"),
        ({"attention_mode": "mla"}, "latent"),
        ({"markov_rank": 256}, "DSpark"),
        ({"selector_rank": 256}, "DFlash 2"),
    ],
)
def test_other_computations_in_the_section_are_refused(
    fields: dict[str, Any], reason: str, zlab_folder: Path
) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=reason):
        read_checkpoint(changed(zlab_folder, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"sample_from_anchor": False},
        {"attention_sink_bias": False},
        {"attention_value_scale": 1.0},
        {"use_aux_hidden_state": True},
        {"projector_type": "dflash"},
        {"attention_mode": "gqa"},
        {"markov_rank": None},
        {"causal": None},
    ],
)
def test_switched_off_features_do_not_matter(fields: dict[str, Any], zlab_folder: Path) -> None:
    before = read_checkpoint(zlab_folder).config
    assert read_checkpoint(changed(zlab_folder, **fields)).config == before


def test_scalings(zlab_folder: Path) -> None:
    changed(
        zlab_folder,
        {"final_logit_softcapping": 30.0},
        input_embedding_scale=2,
        output_multiplier=0.25,
    )
    checkpoint = read_checkpoint(zlab_folder)
    assert checkpoint.config.embedding_scale == 2.0
    assert checkpoint.config.logit_multiplier == 0.25
    assert checkpoint.config.logit_softcap == 30.0
    assert any("vLLM's DFlash ignores input_embedding_scale" in note for note in checkpoint.notes)


def test_a_softcap_of_zero_is_none(zlab_folder: Path) -> None:
    checkpoint = read_checkpoint(changed(zlab_folder, final_logit_softcapping=0.0))
    assert checkpoint.config.logit_softcap is None
    assert not checkpoint.notes


def test_absent_sizes_take_the_defaults_of_qwen3_and_say_so(zlab_folder: Path) -> None:
    absent = dict.fromkeys(("vocab_size", "rms_norm_eps", "max_position_embeddings"), ABSENT)
    checkpoint = read_checkpoint(changed(zlab_folder, absent))
    assert checkpoint.config.vocab_size == 151936
    assert checkpoint.config.rms_norm_eps == 1e-6
    assert checkpoint.config.max_positions == 32768
    (note,) = checkpoint.notes
    assert "rms_norm_eps 1e-06, max_position_embeddings 32768, vocab_size 151936" in note


def test_defaults_are_those_of_the_installed_transformers() -> None:
    from transformers import Qwen3Config

    from leadout.checkpoints.zlab import DEFAULT_WINDOW, DEFAULTS, ModelFields

    qwen3 = Qwen3Config()
    ours = ModelFields.model_validate(DEFAULTS)
    assert {name: getattr(qwen3, name) for name in DEFAULTS} == DEFAULTS
    assert Qwen3Config(use_sliding_window=True).sliding_window == DEFAULT_WINDOW
    assert ours.max_window_layers == qwen3.max_window_layers
    assert ours.attention_bias == qwen3.attention_bias


HARMLESS = {
    "transformers_version": "4.57.1",
    "torch_dtype": "bfloat16",
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": None,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "id2label": {"0": "LABEL_0"},
    "output_hidden_states": False,
    "output_attentions": False,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
    "mlp_bias": False,
    "temperature": 1.0,
    "release": "spring",
}


def test_the_usual_noise_is_kept(zlab_folder: Path) -> None:
    before = read_checkpoint(zlab_folder)
    checkpoint = read_checkpoint(changed(zlab_folder, HARMLESS))
    assert checkpoint.config == before.config
    rewritten = {"transformers_version", "torch_dtype", "auto_map"}
    assert checkpoint.kept == {k: v for k, v in HARMLESS.items() if k not in rewritten}


@pytest.mark.parametrize(
    "name",
    [
        "attn_logit_softcapping", "query_pre_attn_scalar", "qk_norm_eps", "hiddenDropLayers",
        "num_experts", "use_bidirectional_attention", "mask_embedding_row", "dflash_variant",
        "rope_dim", "residual_multiplier", "sliding_windows", "vocab_offset",
    ],
)  # fmt: skip
def test_an_unknown_field_that_may_compute_is_refused(name: str, zlab_folder: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(changed(zlab_folder, {name: 3}))
    assert caught.value.field == name
    assert caught.value.value == 3


def test_every_unknown_field_in_the_section_is_refused(zlab_folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"dflash_config.colour is 'blue'"):
        read_checkpoint(changed(zlab_folder, colour="blue"))
