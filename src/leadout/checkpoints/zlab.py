"""z-lab's format: a Qwen3 config with a `dflash_config` section, read by `dflash` and by vLLM.

Both readers pass the file through transformers' Qwen3Config, so its defaults are the defaults of
this format. Draft fields are in `dflash_config` or, in older files, at the top level.
"""

from __future__ import annotations

from pathlib import Path

from leadout.checkpoints.config_fields import (
    Block,
    Epsilon,
    Heads,
    JsonObject,
    LayerIds,
    Layers,
    Multiplier,
    Positions,
    Rows,
    StrictFields,
    TokenId,
    Width,
    agreed,
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
    write_decoder,
)
from leadout.checkpoints.errors import CheckpointError, missing
from leadout.checkpoints.unsupported import unsupported, without_features
from leadout.dflash.config import DrafterConfig, LayerAttention

ARCHITECTURE = "DFlashDraftModel"
DEFAULT_WINDOW = 4096  # in Qwen3Config
_DEFAULT_BLOCK_SIZE = 16  # in z-lab's code


class SharedFields(StrictFields):
    """Draft fields that may be in either place."""

    target_layer_ids: LayerIds | None = None
    num_target_layers: Layers | None = None
    mask_token_id: TokenId | None = None
    block_size: Block | None = None
    input_embedding_scale: Multiplier | None = None
    output_multiplier: Multiplier | None = None
    final_logit_softcapping: float | None = None


class DraftFields(SharedFields, extra="forbid"):
    """`dflash_config`: every field in it is about DFlash, so an unknown one is refused."""

    use_swa: bool | None = None
    swa_window_size: Positions | None = None
    causal: bool | None = None
    # About training or the target; no reader computes with them.
    num_anchors: int | None = None
    max_anchors: int | None = None
    loss_decay_gamma: float | None = None
    backbone_rotary_base: float | None = None


class ModelFields(DecoderFields, SharedFields):
    """The top level; the defaults are those of Qwen3Config."""

    hidden_size: Width = 4096
    intermediate_size: Width = 22016
    num_hidden_layers: Layers = 32
    num_attention_heads: Heads = 32
    num_key_value_heads: Heads | None = 32  # null: as many as attention heads
    head_dim: Width = 128
    v_head_dim: Width | None = None
    rms_norm_eps: Epsilon = 1e-6
    max_position_embeddings: Positions = 32768
    vocab_size: Rows = 151936
    draft_vocab_size: Rows | None = None
    target_hidden_size: Width | None = None
    sliding_window: Positions | None = DEFAULT_WINDOW
    is_causal: bool | None = None
    eagle_aux_hidden_state_layer_ids: LayerIds | None = None


# If absent, these take a default, which a note then reports.
WORTH_STATING = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "vocab_size",
)  # fmt: skip


def matches(config: JsonObject) -> bool:
    """Whether this is a z-lab drafter, by its architecture or, without one, its section."""
    architectures = config.get("architectures")
    if architectures:
        return isinstance(architectures, list) and ARCHITECTURE in architectures
    return "dflash_config" in config


def read(config: JsonObject, path: Path) -> ConfigReading:
    """Read a config.json in z-lab's format."""
    section = config.get("dflash_config") or {}
    if not isinstance(section, dict):
        raise CheckpointError(path, "dflash_config", section, "a JSON object", "Correct the field.")
    top = {name: value for name, value in config.items() if name != "dflash_config"}
    model = validated(ModelFields, without_features(top), path, "")
    draft = validated(DraftFields, without_features(section), path, "dflash_config")
    kept = keep_inert(model.model_extra, path, "")
    kept |= {
        name: value
        for name in ("num_anchors", "max_anchors", "loss_decay_gamma", "backbone_rotary_base")
        if (value := getattr(draft, name)) is not None
    }
    _refuse_other_decoders(model, path)
    notes: list[str] = []
    _note_defaults(model, notes)
    with naming_the_file(path, FILE_NAMES):
        drafter = _drafter_config(model, draft, path, notes)
    return ConfigReading(config=drafter, notes=tuple(notes), kept=kept)


def write(config: DrafterConfig, dtype: str, kept: JsonObject, path: Path) -> JsonObject:
    """The config.json from which `dflash` and vLLM compute this drafter."""
    _refuse_own_vocabulary(config, path)
    if config.target_num_layers is None:
        # z-lab's class fails without this field, even if the layer ids are given. An invented
        # number would mislead checks of the drafter against its target.
        raise missing(
            path,
            "num_target_layers",
            "the number of target layers, which z-lab's code requires",
            "Pass the target's local folder with --target.",
        )
    draft: JsonObject = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": config.block_size,
    }
    if config.embedding_scale != 1.0:
        draft["input_embedding_scale"] = config.embedding_scale
    if config.logit_multiplier != 1.0:
        draft["output_multiplier"] = config.logit_multiplier
    if config.logit_softcap is not None:
        draft["final_logit_softcapping"] = config.logit_softcap
    return {
        **kept,
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": dtype,
        **write_decoder(config, path),
        **_write_causality(config, path),
        "num_target_layers": config.target_num_layers,
        "block_size": config.block_size,  # older readers look here, newer ones in dflash_config
        "dflash_config": draft,
    }


def _drafter_config(
    model: ModelFields, draft: DraftFields, path: Path, notes: list[str]
) -> DrafterConfig:
    num_target_layers = agreed(
        path, "num_target_layers", draft.num_target_layers, model.num_target_layers
    )
    mask_token_id = agreed(path, "mask_token_id", draft.mask_token_id, model.mask_token_id)
    if mask_token_id is None:
        raise missing(path, "dflash_config.mask_token_id", "a token id")
    block_size = agreed(path, "block_size", draft.block_size, model.block_size)
    if block_size is None:
        block_size = _DEFAULT_BLOCK_SIZE
        notes.append(f"block_size is missing; z-lab's code assumes {block_size}")
    embedding_scale, multiplier, softcap = _scalings(model, draft, path, notes)
    if model.states_no_rope:
        notes.append("rope_theta is missing; readers assume 10000")
    kinds = _layer_types(model, path)
    rope = read_rope(model, frozenset(kinds), model.max_position_embeddings, path, "")
    if rope.fraction != 1.0:
        notes.append("z-lab's own code ignores partial_rotary_factor; vLLM and Leadout apply it")
    return DrafterConfig(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_attention_heads,
        num_kv_heads=model.num_key_value_heads or model.num_attention_heads,
        head_dim=model.head_dim,
        layers=_layers(model, draft, kinds, path, notes),
        rope=rope,
        max_positions=model.max_position_embeddings,
        rms_norm_eps=model.rms_norm_eps,
        attention_bias=model.attention_bias,
        target_layer_ids=_layer_ids(model, draft, num_target_layers, path, notes),
        target_hidden_size=model.target_hidden_size,
        target_num_layers=num_target_layers,
        vocab_size=model.vocab_size,
        mask_token_id=mask_token_id,
        block_size=block_size,
        embedding_scale=embedding_scale,
        logit_multiplier=multiplier,
        logit_softcap=softcap,
    )


def _layer_ids(
    model: ModelFields,
    draft: DraftFields,
    num_target_layers: int | None,
    path: Path,
    notes: list[str],
) -> tuple[int, ...]:
    ids = agreed(path, "target_layer_ids", draft.target_layer_ids, model.target_layer_ids)
    if ids is None:
        if num_target_layers is None:
            raise missing(
                path,
                "dflash_config.target_layer_ids",
                "the target layers whose outputs the drafter reads",
                "Add the field; id i is the output of target layer i.",
            )
        ids = _spread_layer_ids(num_target_layers, model.num_hidden_layers)
        notes.append(f"target_layer_ids is missing; z-lab's code assumes {ids}")
    shifted = model.eagle_aux_hidden_state_layer_ids
    if shifted is not None and shifted != [i + 1 for i in ids]:
        raise CheckpointError(
            path,
            "eagle_aux_hidden_state_layer_ids",
            shifted,
            f"{[i + 1 for i in ids]}, which is target_layer_ids plus one",
            "vLLM reads this list and z-lab's code the other; correct or remove it.",
        )
    return tuple(ids)


def _spread_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """The default ids in z-lab's code: evenly spaced from layer 1 to the third last."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return [round(1 + i * step) for i in range(num_draft_layers)]


def _layer_types(model: ModelFields, path: Path) -> tuple[str, ...]:
    if model.layer_types is not None:
        return require_layer_types(model.layer_types, model.num_hidden_layers, path, "")
    slides = model.use_sliding_window and model.sliding_window is not None
    return tuple(
        SLIDING if slides and i >= model.max_window_layers else FULL
        for i in range(model.num_hidden_layers)
    )


def _layers(
    model: ModelFields, draft: DraftFields, kinds: tuple[str, ...], path: Path, notes: list[str]
) -> tuple[LayerAttention, ...]:
    """Window and causality of each layer.

    Causality: a top-level `is_causal` applies to all layers in both readers; next comes
    `dflash_config.causal`, which only vLLM reads; otherwise sliding layers are causal and full ones
    bidirectional. `use_swa`, which only vLLM reads, makes every layer slide, but not causal.
    """
    forced = bool(draft.use_swa) and SLIDING not in kinds
    if forced:
        notes.append(
            "z-lab's own code ignores use_swa and uses full attention; vLLM and Leadout apply "
            "the window"
        )
    slides = [forced or kind == SLIDING for kind in kinds]
    window = _window(model, draft, path, notes) if any(slides) else None
    causal = [kind == SLIDING for kind in kinds]
    if model.is_causal is not None:
        causal = [model.is_causal] * len(kinds)
    elif draft.causal is not None:
        if causal != [draft.causal] * len(kinds):
            notes.append("z-lab's own code ignores dflash_config.causal; vLLM and Leadout apply it")
        causal = [draft.causal] * len(kinds)
    return tuple(
        LayerAttention(window=window if slide else None, causal=is_causal)
        for slide, is_causal in zip(slides, causal, strict=True)
    )


def _window(model: ModelFields, draft: DraftFields, path: Path, notes: list[str]) -> int:
    stated = "sliding_window" in model.model_fields_set
    window = agreed(
        path, "sliding_window", draft.swa_window_size, model.sliding_window if stated else None
    )
    if window is None and model.use_sliding_window and not stated:
        notes.append(f"sliding_window is missing; readers assume {DEFAULT_WINDOW}")
        return DEFAULT_WINDOW
    if window is None:
        raise missing(path, "sliding_window", "the window of the sliding layers")
    if draft.swa_window_size is None and model.use_sliding_window is False:
        raise CheckpointError(
            path,
            "use_sliding_window",
            False,
            f"true, since layers have a sliding window of {window}",
            "Correct it, or make the layers full_attention.",
        )
    if not model.use_sliding_window and not (draft.use_swa and draft.swa_window_size):
        vllm = "refuses to start" if draft.swa_window_size is None else "applies it"
        notes.append(
            f"use_sliding_window is not true: z-lab's code ignores the window of {window}, vLLM "
            f"{vllm}; `leadout convert --to zlab` adds the field"
        )
    return window


def _scalings(
    model: ModelFields, draft: DraftFields, path: Path, notes: list[str]
) -> tuple[float, float, float | None]:
    scale = agreed(
        path, "input_embedding_scale", draft.input_embedding_scale, model.input_embedding_scale
    )
    multiplier = agreed(path, "output_multiplier", draft.output_multiplier, model.output_multiplier)
    name = "final_logit_softcapping"
    softcap = agreed(path, name, draft.final_logit_softcapping, model.final_logit_softcapping)
    if softcap is not None and softcap <= 0:
        softcap = None  # as in z-lab's code
    in_use = {
        "input_embedding_scale": scale not in (None, 1.0),
        "output_multiplier": multiplier not in (None, 1.0),
        name: softcap is not None,
    }
    if any(in_use.values()):
        ignored = ", ".join(field for field, used in in_use.items() if used)
        notes.append(f"vLLM's DFlash ignores {ignored}; z-lab's code and Leadout apply it")
    return scale or 1.0, multiplier or 1.0, softcap


def _note_defaults(model: ModelFields, notes: list[str]) -> None:
    assumed = [
        f"{name} {getattr(model, name)}"
        for name in WORTH_STATING
        if name not in model.model_fields_set
    ]
    if assumed:
        notes.append(f"missing fields, for which readers assume: {', '.join(assumed)}")


def _refuse_other_decoders(model: ModelFields, path: Path) -> None:
    if model.model_type != "qwen3":
        raise unsupported(path, "model_type", model.model_type, "a drafter with another decoder")
    if model.v_head_dim not in (None, model.head_dim):
        raise unsupported(
            path, "v_head_dim", model.v_head_dim, "a drafter whose value heads have another size"
        )
    if model.draft_vocab_size not in (None, model.vocab_size):
        raise unsupported(
            path,
            "draft_vocab_size",
            model.draft_vocab_size,
            "a reduced draft vocabulary, which this format has no tensors for",
        )


def _refuse_own_vocabulary(config: DrafterConfig, path: Path) -> None:
    if config.draft_vocab_size is not None or config.own_embedding or config.own_head:
        raise CheckpointError(
            path,
            "format",
            "zlab",
            "a format that supports the drafter's own embedding, head or vocabulary",
            "Use `--to speculators`.",
        )


def _write_causality(config: DrafterConfig, path: Path) -> JsonObject:
    causal = [layer.causal for layer in config.layers]
    if all(layer.causal == (layer.window is not None) for layer in config.layers):
        return {}  # the default
    if len(set(causal)) == 1:
        return {"is_causal": causal[0]}
    raise CheckpointError(
        path,
        "is_causal",
        causal,
        "one value for all layers, or exactly the sliding layers causal",
        "No published format supports this drafter.",
    )
