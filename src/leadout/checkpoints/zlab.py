"""z-lab's format: a Qwen3 config with a `dflash_config` section, read by `dflash` and by vLLM.

Both readers pass the file through transformers' Qwen3Config, so its defaults are the defaults of
this format. Draft fields are in `dflash_config` or, in older files, at the top level.
"""

from __future__ import annotations

from pathlib import Path

from leadout.checkpoints.config_fields import (
    Block,
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
    window_off,
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
    """The top level."""

    num_key_value_heads: Heads | None  # null: as many as attention heads
    head_dim: Width
    v_head_dim: Width | None = None
    draft_vocab_size: Rows | None = None
    target_hidden_size: Width | None = None
    sliding_window: Positions | None = DEFAULT_WINDOW
    is_causal: bool | None = None
    eagle_aux_hidden_state_layer_ids: LayerIds | None = None


# The defaults of Qwen3Config; a note reports those that a file relies on.
DEFAULTS: JsonObject = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 22016,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
    "vocab_size": 151936,
}  # fmt: skip


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
    model = validated(ModelFields, DEFAULTS | without_features(top), path, "")
    draft = validated(DraftFields, without_features(section), path, "dflash_config")
    kept = keep_inert(model.model_extra, path, "")
    kept |= {
        name: value
        for name in ("num_anchors", "max_anchors", "loss_decay_gamma", "backbone_rotary_base")
        if (value := getattr(draft, name)) is not None
    }
    _refuse_other_decoders(model, path)
    notes: list[str] = []
    assumed = [f"{name} {value}" for name, value in DEFAULTS.items() if name not in top]
    if assumed:
        notes.append(f"missing fields, for which readers assume: {', '.join(assumed)}")
    with naming_the_file(path, FILE_NAMES):
        drafter = _drafter_config(model, draft, path, notes)
    return ConfigReading(config=drafter, notes=tuple(notes), kept=kept)


def write(config: DrafterConfig, dtype: str, kept: JsonObject, path: Path) -> JsonObject:
    """The config.json from which `dflash` and vLLM compute this drafter."""
    if config.draft_vocab_size is not None or config.own_embedding or config.own_head:
        raise CheckpointError(
            path,
            "format",
            "zlab",
            "a format that supports the drafter's own embedding, head or vocabulary",
            "Use `--to speculators`.",
        )
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
    stated = SharedFields.model_validate(
        {
            name: agreed(path, name, getattr(draft, name), getattr(model, name))
            for name in SharedFields.model_fields
        }
    )
    if stated.mask_token_id is None:
        raise missing(path, "dflash_config.mask_token_id", "a token id")
    if stated.block_size is None:
        notes.append(f"block_size is missing; z-lab's code assumes {_DEFAULT_BLOCK_SIZE}")
    softcap = stated.final_logit_softcapping
    if softcap is not None and softcap <= 0:
        softcap = None  # as in z-lab's code
    scalings = {
        "input_embedding_scale": stated.input_embedding_scale not in (None, 1.0),
        "output_multiplier": stated.output_multiplier not in (None, 1.0),
        "final_logit_softcapping": softcap is not None,
    }
    if any(scalings.values()):
        ignored = ", ".join(name for name, used in scalings.items() if used)
        notes.append(f"vLLM's DFlash ignores {ignored}; z-lab's code and Leadout apply it")
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
        target_layer_ids=_layer_ids(model, stated, path, notes),
        target_hidden_size=model.target_hidden_size,
        target_num_layers=stated.num_target_layers,
        vocab_size=model.vocab_size,
        mask_token_id=stated.mask_token_id,
        block_size=stated.block_size or _DEFAULT_BLOCK_SIZE,
        embedding_scale=stated.input_embedding_scale or 1.0,
        logit_multiplier=stated.output_multiplier or 1.0,
        logit_softcap=softcap,
    )


def _layer_ids(
    model: ModelFields, stated: SharedFields, path: Path, notes: list[str]
) -> tuple[int, ...]:
    ids = stated.target_layer_ids
    if ids is None:
        if stated.num_target_layers is None:
            raise missing(
                path,
                "dflash_config.target_layer_ids",
                "the target layers whose outputs the drafter reads",
                "Add the field; id i is the output of target layer i.",
            )
        ids = _spread_layer_ids(stated.num_target_layers, model.num_hidden_layers)
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
        raise window_off(path, "use_sliding_window", window)
    if not model.use_sliding_window and not (draft.use_swa and draft.swa_window_size):
        vllm = "refuses to start" if draft.swa_window_size is None else "applies it"
        notes.append(
            f"use_sliding_window is not true: z-lab's code ignores the window of {window}, vLLM "
            f"{vllm}; `leadout convert --to zlab` adds the field"
        )
    return window


def _refuse_other_decoders(model: ModelFields, path: Path) -> None:
    if model.model_type != "qwen3":
        raise unsupported(path, "model_type", model.model_type, "a drafter with another decoder")
    if model.v_head_dim not in (None, model.head_dim):
        raise unsupported(
            path, "v_head_dim", model.v_head_dim, "a drafter whose value heads have another size"
        )
    if model.draft_vocab_size not in (None, model.vocab_size):
        what = "a reduced draft vocabulary, which this format has no tensors for"
        raise unsupported(path, "draft_vocab_size", model.draft_vocab_size, what)


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
