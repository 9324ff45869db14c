"""The fields of z-lab's config.json and their types; see `zlab` for what they mean together."""

from __future__ import annotations

from leadout.checkpoints.fields import (
    Block,
    Epsilon,
    Heads,
    LayerIds,
    Layers,
    LayerTypes,
    Multiplier,
    Positions,
    Rows,
    StrictFields,
    TokenId,
    Width,
)
from leadout.checkpoints.strict_json import JsonObject

DEFAULT_WINDOW = 4096  # in Qwen3Config


class DraftFields(StrictFields, extra="forbid"):
    """`dflash_config`: every field in it is about DFlash, so an unknown one is refused."""

    target_layer_ids: LayerIds | None = None
    num_target_layers: Layers | None = None
    mask_token_id: TokenId | None = None
    block_size: Block | None = None
    input_embedding_scale: Multiplier | None = None
    output_multiplier: Multiplier | None = None
    final_logit_softcapping: float | None = None
    use_swa: bool | None = None
    swa_window_size: Positions | None = None
    causal: bool | None = None
    # About training or the target; no reader computes with them.
    num_anchors: int | None = None
    max_anchors: int | None = None
    loss_decay_gamma: float | None = None
    backbone_rotary_base: float | None = None


class ModelFields(StrictFields):
    """The top level; a default is the one of Qwen3Config."""

    model_type: str = "qwen3"
    hidden_size: Width = 4096
    intermediate_size: Width = 22016
    num_hidden_layers: Layers = 32
    num_attention_heads: Heads = 32
    num_key_value_heads: Heads | None = 32  # null: as many as attention heads
    head_dim: Width = 128
    v_head_dim: Width | None = None
    rms_norm_eps: Epsilon = 1e-6
    attention_bias: bool = False
    max_position_embeddings: Positions = 32768
    vocab_size: Rows = 151936
    draft_vocab_size: Rows | None = None
    target_hidden_size: Width | None = None

    rope_theta: float | None = None
    rope_parameters: JsonObject | None = None
    rope_scaling: JsonObject | None = None
    partial_rotary_factor: float | None = None

    layer_types: LayerTypes | None = None
    sliding_window: Positions | None = DEFAULT_WINDOW
    use_sliding_window: bool | None = None
    max_window_layers: int = 28
    is_causal: bool | None = None

    target_layer_ids: LayerIds | None = None
    num_target_layers: Layers | None = None
    mask_token_id: TokenId | None = None
    block_size: Block | None = None
    input_embedding_scale: Multiplier | None = None
    output_multiplier: Multiplier | None = None
    final_logit_softcapping: float | None = None
    eagle_aux_hidden_state_layer_ids: LayerIds | None = None


# Absent, these silently take a default that the tensors or nobody can confirm.
WORTH_STATING = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "vocab_size",
)  # fmt: skip
