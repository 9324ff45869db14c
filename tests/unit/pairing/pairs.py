"""A tiny healthy pair, and how the engine would serve a drafter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from leadout.checkpoints import Checkpoint, read_checkpoint
from leadout.dflash.config import DrafterConfig, LayerAttention, Rope
from leadout.pairing import EngineSettings, Pair, TargetFacts

TARGET = TargetFacts(
    name="tests/tiny-target",
    hidden_size=16,
    num_layers=6,
    vocab_size=320,
    rope=Rope(10_000.0),
    max_positions=512,
)
DRAFTER = DrafterConfig(
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    layers=(LayerAttention(), LayerAttention()),
    rope=Rope(10_000.0),
    max_positions=512,
    target_layer_ids=(1, 3, 4),
    target_num_layers=6,
    vocab_size=320,
    mask_token_id=7,
    block_size=4,
)
SETTINGS = EngineSettings(
    draft_tokens=3,
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=2048,
    dtype="bfloat16",
    model_runner="V1",
    backend_name="CPU_ATTN",
    backend_takes_non_causal=True,
    served_causal=(False, False),
)


def served_pair(
    folder: Path,
    target: TargetFacts,
    arguments: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Pair:
    """A drafter in a folder, as stock vLLM would serve it with these arguments."""
    checkpoint = read_checkpoint(folder)
    changes = dict(arguments or {}) | dict(facts or {})
    most = checkpoint.config.max_draft_tokens
    settings = replace(
        SETTINGS,
        draft_tokens=changes.pop("num_speculative_tokens", most),
        served_causal=stock_causality(folder),
        **changes,
    )
    return Pair(target, checkpoint, settings)


def stock_causality(folder: Path) -> tuple[bool, ...]:
    """What vLLM 0.32 makes of a drafter's config.json: which layers it serves causal."""
    config = json.loads((folder / "config.json").read_text())
    decoder = config.get("transformer_layer_config", config)
    kinds = decoder.get("layer_types") or ["full_attention"] * decoder["num_hidden_layers"]
    if "speculators_model_type" in config:
        forced = not config.get("sliding_window_non_causal", True)
    else:
        forced = config.get("is_causal", config.get("dflash_config", {}).get("causal"))
    if forced is not None:
        return (forced,) * len(kinds)
    return tuple(kind == "sliding_attention" for kind in kinds)


def changed(checkpoint: Checkpoint, **changes: Any) -> Checkpoint:
    """The checkpoint, had its file said something else."""
    return replace(checkpoint, config=replace(checkpoint.config, **changes))
