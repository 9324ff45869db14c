"""The fields of a speculators config.json and their types; see `speculators` for their meaning."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from leadout.checkpoints.fields import (
    Block,
    Epsilon,
    Heads,
    LayerIds,
    Layers,
    LayerTypes,
    Positions,
    Rows,
    StrictFields,
    TokenId,
    Width,
)
from leadout.checkpoints.strict_json import JsonObject

KIND = "dflash"


class Verifier(StrictFields):
    """The target, by the format's name for it."""

    name_or_path: str | None = None


class Proposal(StrictFields):
    """How to draft; vLLM takes K from the first one."""

    speculative_tokens: Annotated[int, Field(ge=1, le=2**12)] | None = None


class SpeculationFields(StrictFields):
    """`speculators_config`."""

    algorithm: str = KIND
    verifier: Verifier = Verifier()
    proposal_methods: list[Proposal] = Field(default_factory=list, max_length=16)


class DecoderFields(StrictFields):
    """`transformer_layer_config`; what has no default here must be in the file."""

    model_type: str = "qwen3"
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads
    head_dim: Width | None = None
    rms_norm_eps: Epsilon
    attention_bias: bool = False
    max_position_embeddings: Positions
    vocab_size: Rows

    rope_theta: float | None = None
    rope_parameters: JsonObject | None = None
    rope_scaling: JsonObject | None = None
    partial_rotary_factor: float | None = None

    layer_types: LayerTypes | None = None
    sliding_window: Positions | None = None
    use_sliding_window: bool | None = None
    max_window_layers: int = 28


class DraftFields(StrictFields):
    """The top level."""

    speculators_model_type: str
    speculators_version: str | None = None
    speculators_config: SpeculationFields | None = None
    aux_hidden_state_layer_ids: LayerIds
    mask_token_id: TokenId
    block_size: Block | None = None
    draft_vocab_size: Rows
    target_hidden_size: Width | None = None
    sliding_window_non_causal: bool | None = None
    num_target_layers: Layers | None = None  # Leadout's own addition; other readers pass it over
