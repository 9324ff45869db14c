"""A valid pair of target and drafter, and the settings with which an engine would serve it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from leadout.checkpoints import Checkpoint, read_checkpoint
from leadout.dflash.config import Rope
from leadout.pairing import EngineSettings, Pair, TargetFacts
from support.drafters import MINI

TARGET = TargetFacts(
    name="tests/tiny-target",
    hidden_size=16,
    num_layers=6,
    vocab_size=320,
    rope=Rope(10_000.0),
    max_positions=512,
)
DRAFTER = replace(MINI, max_positions=512, target_layer_ids=(1, 3, 4), vocab_size=320)
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
    """The pair with a drafter in a folder, as vLLM alone would serve it with these arguments."""
    checkpoint = read_checkpoint(folder)
    changes = dict(arguments or {}) | dict(facts or {})
    settings = replace(
        SETTINGS,
        draft_tokens=changes.pop("num_speculative_tokens", checkpoint.config.max_draft_tokens),
        served_causal=causality_in_vllm(folder),
        **changes,
    )
    return Pair(target, checkpoint, settings)


def causality_in_vllm(folder: Path) -> tuple[bool, ...]:
    """Which draft layers vLLM 0.32 serves as causal, from the drafter's config.json."""
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
    """The checkpoint with other config values."""
    return replace(checkpoint, config=replace(checkpoint.config, **changes))
