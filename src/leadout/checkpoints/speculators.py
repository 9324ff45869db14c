"""The speculators format: draft fields at the top level, the decoder in `transformer_layer_config`.

The speculators library passes the decoder section through transformers' Qwen3Config; vLLM reads it
without those defaults. A field for which the two assume different defaults must be in the file.
Layer ids count from the embedding's output, so id j is the output of target layer j - 1.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

from pydantic import Field

from leadout.checkpoints.config_fields import (
    Block,
    Heads,
    JsonObject,
    LayerIds,
    Layers,
    Rows,
    StrictFields,
    TokenId,
    Width,
    keep_inert,
    naming_the_file,
    validated,
)
from leadout.checkpoints.decoder_config import (
    FILE_NAMES,
    FULL,
    SLIDING,
    ConfigReading,
    DecoderFields,
    read_rope,
    require_layer_types,
    window_off,
    write_decoder,
)
from leadout.checkpoints.errors import MISSING, CheckpointError, Phrase, missing
from leadout.checkpoints.unsupported import unsupported, without_features
from leadout.dflash.config import DrafterConfig, LayerAttention, Rope

KIND = "dflash"
DECODER = "transformer_layer_config"
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
_VERSION = "0.9.0"  # the version of the library whose format is written
_DEFAULT_BLOCK_SIZE = 8  # in speculators' code
_QWEN3_HEAD_DIM = 128
_NAMES = FILE_NAMES | {"target_layer_ids": "aux_hidden_state_layer_ids (minus one)"}


class Verifier(StrictFields):
    """The target."""

    name_or_path: str | None = None


class Proposal(StrictFields):
    """A proposal method; vLLM takes K from the first."""

    speculative_tokens: Annotated[int, Field(ge=1, le=2**12)] | None = None


class SpeculationFields(StrictFields):
    """`speculators_config`."""

    algorithm: str = KIND
    verifier: Verifier = Verifier()
    proposal_methods: list[Proposal] = Field(default_factory=list, max_length=16)


class LayerFields(DecoderFields):
    """`transformer_layer_config`; fields without a default are required."""

    num_key_value_heads: Heads
    head_dim: Width | None = None


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
    num_target_layers: Layers | None = None  # added by Leadout; other readers ignore it


def matches(config: JsonObject) -> bool:
    return "speculators_model_type" in config


def read(config: JsonObject, tensor_names: Collection[str], path: Path) -> ConfigReading:
    """Read a config.json; the tensor names show whether there is an own embedding or head."""
    section = config.get(DECODER)
    if not isinstance(section, dict):
        value = MISSING if section is None else section
        raise CheckpointError(path, DECODER, value, "a JSON object", "Add the decoder's section.")
    top = {name: value for name, value in config.items() if name != DECODER}
    draft = validated(DraftFields, without_features(top), path, "")
    decoder = validated(LayerFields, without_features(section), path, DECODER)
    speculation = draft.speculators_config or SpeculationFields()
    for field, kind in (
        ("speculators_model_type", draft.speculators_model_type),
        ("speculators_config.algorithm", speculation.algorithm),
    ):
        if kind != KIND:
            raise CheckpointError(path, field, kind, repr(KIND), "Use a DFlash drafter.")
    notes: list[str] = []
    kept = keep_inert(_without_misplaced(draft.model_extra or {}, notes), path, "")
    kept |= keep_inert(decoder.model_extra, path, DECODER)
    with naming_the_file(path, _NAMES):
        drafter = _drafter_config(draft, decoder, tensor_names, path, notes)
    if draft.speculators_config is None:
        notes.append("speculators_config is missing; vLLM cannot recognise the format without it")
    proposals = speculation.proposal_methods
    draft_tokens = proposals[0].speculative_tokens if proposals else None
    _require_draft_tokens(draft_tokens, drafter, path)
    target_name = speculation.verifier.name_or_path
    return ConfigReading(drafter, target_name, draft_tokens, tuple(notes), kept)


def write(
    config: DrafterConfig,
    dtype: str,
    kept: JsonObject,
    target_name: str | None,
    draft_tokens: int | None,
    path: Path,
) -> JsonObject:
    """The config.json from which both speculators and vLLM compute this drafter."""
    ignored = {
        "partial_rotary_factor": config.rope.fraction != 1.0,
        "input_embedding_scale": config.embedding_scale != 1.0,
        "output_multiplier": config.logit_multiplier != 1.0,
        "final_logit_softcapping": config.logit_softcap is not None,
    }
    for field in (name for name, used in ignored.items() if used):
        problem, expected = Phrase("is used by this drafter"), "none, since speculators ignores it"
        raise CheckpointError(path, field, problem, expected, "Keep z-lab's format.")
    _require_draft_tokens(draft_tokens, config, path)
    if not target_name:
        raise missing(
            path,
            "speculators_config.verifier.name_or_path",
            "the target's name or path, which the format requires",
            "Pass it with --target.",
        )
    count = draft_tokens or config.max_draft_tokens
    result: JsonObject = {
        "architectures": ["DFlashDraftModel"],
        "dtype": dtype,
        "speculators_model_type": KIND,
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": KIND,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": count}],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "draft_vocab_size": config.head_rows,
        "sample_from_anchor": False,
        "sliding_window_non_causal": _non_causal_flag(config, path),
        "target_hidden_size": config.target_hidden_size,
        DECODER: {**kept, "model_type": "qwen3", **write_decoder(config, path)},
    }
    if config.target_num_layers is not None:
        result["num_target_layers"] = config.target_num_layers
    return result


def _drafter_config(
    draft: DraftFields,
    decoder: LayerFields,
    tensor_names: Collection[str],
    path: Path,
    notes: list[str],
) -> DrafterConfig:
    block_size = draft.block_size
    if block_size is None:
        block_size = _DEFAULT_BLOCK_SIZE
        notes.append(f"block_size is missing; speculators assumes {block_size}")
    if 0 in draft.aux_hidden_state_layer_ids:
        what = "a drafter that reads the target's embedding output (id 0)"
        ids = draft.aux_hidden_state_layer_ids
        raise unsupported(path, "aux_hidden_state_layer_ids", ids, what)
    kinds = _layer_types(decoder, path)
    reduced = draft.draft_vocab_size != decoder.vocab_size
    return DrafterConfig(
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        num_heads=decoder.num_attention_heads,
        num_kv_heads=decoder.num_key_value_heads,
        head_dim=_head_dim(decoder, path),
        layers=_layers(draft, decoder, kinds, path, notes),
        rope=_rope(decoder, kinds, path, notes),
        max_positions=decoder.max_position_embeddings,
        rms_norm_eps=decoder.rms_norm_eps,
        attention_bias=decoder.attention_bias,
        target_layer_ids=tuple(j - 1 for j in draft.aux_hidden_state_layer_ids),
        target_hidden_size=draft.target_hidden_size,
        target_num_layers=draft.num_target_layers,
        vocab_size=decoder.vocab_size,
        mask_token_id=draft.mask_token_id,
        block_size=block_size,
        own_embedding=EMBEDDING in tensor_names,
        own_head=HEAD in tensor_names,
        draft_vocab_size=draft.draft_vocab_size if reduced else None,
    )


def _head_dim(decoder: LayerFields, path: Path) -> int:
    if decoder.head_dim is not None:
        return decoder.head_dim
    if decoder.hidden_size == _QWEN3_HEAD_DIM * decoder.num_attention_heads:
        return _QWEN3_HEAD_DIM
    raise missing(
        path,
        f"{DECODER}.head_dim",
        "a value, since readers assume different ones",
        f"Add the field: speculators assumes {_QWEN3_HEAD_DIM}, vLLM hidden_size / "
        "num_attention_heads.",
    )


def _rope(decoder: LayerFields, kinds: tuple[str, ...], path: Path, notes: list[str]) -> Rope:
    if decoder.states_no_rope:
        raise missing(
            path,
            f"{DECODER}.rope_parameters",
            "a rope_theta, since readers assume different ones",
            "Add the field: speculators assumes 10000, vLLM 1000000.",
        )
    rope = read_rope(decoder, frozenset(kinds), decoder.max_position_embeddings, path, DECODER)
    if rope.fraction != 1.0:
        notes.append("speculators ignores partial_rotary_factor; vLLM and Leadout apply it")
    return rope


def _layer_types(decoder: LayerFields, path: Path) -> tuple[str, ...]:
    count = decoder.num_hidden_layers
    if decoder.layer_types is not None:
        return require_layer_types(decoder.layer_types, count, path, DECODER)
    if decoder.use_sliding_window and decoder.max_window_layers < count:
        raise missing(
            path,
            f"{DECODER}.layer_types",
            "the attention type of each layer",
            "Add the field: without it speculators uses sliding layers, vLLM none.",
        )
    return (FULL,) * count


def _layers(
    draft: DraftFields, decoder: LayerFields, kinds: tuple[str, ...], path: Path, notes: list[str]
) -> tuple[LayerAttention, ...]:
    """Window and causality of each layer, as speculators trains them.

    Full layers are always trained bidirectional, sliding layers if `sliding_window_non_causal` is
    true. Version 0.6 and later always write the flag; 0.5 did not have it and trained every layer
    bidirectional.
    """
    window = _window(decoder, path, notes) if SLIDING in kinds else None
    flag = draft.sliding_window_non_causal
    if flag is None and SLIDING in kinds:
        notes.append(
            "sliding_window_non_causal is missing: read as bidirectional, as vLLM serves it and "
            "speculators 0.5 trained it; speculators 0.6 and later assume causal"
        )
    if flag is False and FULL in kinds:
        to = "zlab" if SLIDING in kinds else "speculators"
        notes.append(
            "vLLM 0.32 alone serves these bidirectional full-attention layers as causal; Leadout "
            f"serves them as trained. `leadout convert --to {to}` writes a file that both serve "
            "correctly"
        )
    causal = flag is False
    return tuple(
        LayerAttention(window=window, causal=causal) if kind == SLIDING else LayerAttention()
        for kind in kinds
    )


def _window(decoder: LayerFields, path: Path, notes: list[str]) -> int:
    if decoder.sliding_window is None:
        raise missing(path, f"{DECODER}.sliding_window", "the window of the sliding layers")
    if decoder.use_sliding_window is False:
        raise window_off(path, f"{DECODER}.use_sliding_window", decoder.sliding_window)
    if decoder.use_sliding_window is None:
        notes.append(
            "use_sliding_window is missing: speculators may ignore the window of "
            f"{decoder.sliding_window}, vLLM applies it; `leadout convert` adds the field"
        )
    return decoder.sliding_window


def _require_draft_tokens(stated: int | None, config: DrafterConfig, path: Path) -> None:
    if stated is not None and not 1 <= stated <= config.max_draft_tokens:
        raise CheckpointError(
            path,
            "speculators_config.proposal_methods.0.speculative_tokens",
            stated,
            f"1 to {config.max_draft_tokens}, the block size minus the anchor",
            "Correct it; vLLM uses it as the number of tokens to draft.",
        )


def _without_misplaced(extras: JsonObject, notes: list[str]) -> JsonObject:
    """Drop decoder fields outside the decoder's section, which no reader uses."""
    misplaced = sorted(name for name in extras if name in LayerFields.model_fields)
    if misplaced:
        notes.append(f"ignored outside of {DECODER}, as in every reader: {', '.join(misplaced)}")
    return {name: value for name, value in extras.items() if name not in misplaced}


def _non_causal_flag(config: DrafterConfig, path: Path) -> bool:
    """The format's one flag; vLLM 0.32 applies it to every layer, speculators to sliding ones."""
    causal = {layer.causal for layer in config.layers}
    if causal == {False}:
        return True
    if causal == {True} and all(layer.window is not None for layer in config.layers):
        return False
    raise CheckpointError(
        path,
        "sliding_window_non_causal",
        Phrase("cannot express this mix of causal and bidirectional layers"),
        "all layers bidirectional, or all of them sliding and causal",
        "In this format vLLM would not serve the drafter as trained; keep z-lab's format.",
    )
