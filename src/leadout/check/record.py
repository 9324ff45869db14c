"""What the drafter's own record says: for which target it was trained, and how."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from leadout.check.result import Finding, Gravity
from leadout.check.target_files import TokenFiles, has_weights
from leadout.checkpoints import Checkpoint
from leadout.models import fingerprint

RECORD = "training.json"
THINKING_SWITCH = "enable_thinking"  # what templates with two modes read


class TrainedConfig(BaseModel):
    """The part of a run's settings that a drafter's config.json repeats."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    layers: int | None = None
    block_size: int | None = None
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None


class TrainingRecord(BaseModel):
    """The part of training.json that a check needs; other versions may have written the rest."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    target: str
    target_fingerprint: str | None = None
    template_hash: str | None = None
    thinking: bool | None = None
    config: TrainedConfig = TrainedConfig()


def record_findings(
    checkpoint: Checkpoint, target: Path, tokens: TokenFiles | None, thinking: bool | None
) -> list[Finding]:
    """The record beside the drafter, if there is one, against drafter and target as they are."""
    path = checkpoint.path / RECORD
    if not path.is_file():
        return []
    try:
        record = TrainingRecord.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return [
            Finding(
                name="record-unreadable",
                gravity=Gravity.NOTE,
                message=f"{path}: found no record as `leadout train` writes it, so it was not used",
                remedy="Remove the file if it is something else.",
            )
        ]
    template = None if tokens is None else tokens.template
    return [
        *_changed_drafter(record, checkpoint),
        *_other_target(record, target),
        *_other_template(record, template),
        *_other_thinking(record, template, thinking),
    ]


def _changed_drafter(record: TrainingRecord, checkpoint: Checkpoint) -> list[Finding]:
    config, trained = checkpoint.config, record.config
    pairs = {
        "num_hidden_layers": (config.num_layers, trained.layers),
        "block_size": (config.block_size, trained.block_size),
        "target_layer_ids": (config.target_layer_ids, trained.target_layer_ids),
        "mask_token_id": (config.mask_token_id, trained.mask_token_id),
    }
    changed = {
        name: (_shown(found), _shown(wanted))
        for name, (found, wanted) in pairs.items()
        if wanted is not None and found != wanted
    }
    if not changed:
        return []
    words = ", ".join(
        f"{name} {found}, trained with {wanted}" for name, (found, wanted) in changed.items()
    )
    return [
        Finding(
            name="not-as-trained",
            gravity=Gravity.DOUBTFUL,
            message=f"found {words} according to {RECORD}",
            evidence={"fields": ", ".join(changed)},
            remedy="Put the values of the training back into the drafter's config.json.",
        )
    ]


def _other_target(record: TrainingRecord, target: Path) -> list[Finding]:
    wanted = record.target_fingerprint
    if wanted is None or not has_weights(target):
        return []
    found = fingerprint(target)
    if found == wanted:
        return []
    return [
        Finding(
            name="other-target",
            gravity=Gravity.DOUBTFUL,
            message=(
                f"found a target with the fingerprint {found[:12]}, wanted {wanted[:12]}, that of "
                f"{record.target} when the drafter was trained: it is another model, or it was "
                "fine-tuned, merged or quantised since"
            ),
            evidence={"found": found, "wanted": wanted},
            remedy="Serve the target as it was then, or go on training the drafter for this one.",
        )
    ]


def _other_template(record: TrainingRecord, template: str | None) -> list[Finding]:
    wanted = record.template_hash
    if wanted is None or template is None:
        return []
    found = hashlib.sha256(template.encode()).hexdigest()
    if found == wanted:
        return []
    return [
        Finding(
            name="other-template",
            gravity=Gravity.DOUBTFUL,
            message=(
                f"found a chat template with the hash {found[:12]}, wanted {wanted[:12]}, the one "
                "that the drafter's training text was made with"
            ),
            evidence={"found": found, "wanted": wanted},
            remedy="Serve with the template of then, or train the drafter with this one.",
        )
    ]


def _other_thinking(
    record: TrainingRecord, template: str | None, thinking: bool | None
) -> list[Finding]:
    """Two modes of one target are two kinds of text."""
    recorded = "thinking" in record.model_fields_set
    has_modes = template is not None and THINKING_SWITCH in template
    if not recorded or not has_modes or record.thinking == thinking:
        return []
    certain = None not in (record.thinking, thinking)
    return [
        Finding(
            name="other-thinking",
            gravity=Gravity.DOUBTFUL if certain else Gravity.NOTE,
            message=(
                f"the drafter was trained {_mode(record.thinking)} and is checked {_mode(thinking)}"
            ),
            remedy="Check and serve it in the mode it was trained in.",
        )
    ]


def _mode(thinking: bool | None) -> str:
    if thinking is None:
        return "in the template's default mode"
    return "with thinking" if thinking else "without thinking"


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
