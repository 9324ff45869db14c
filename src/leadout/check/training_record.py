"""Findings from the drafter's training record: has target, template, mode or drafter changed?"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from leadout.check.tokenizer import TokenFiles
from leadout.check.weights import has_weights
from leadout.checkpoints import Checkpoint
from leadout.findings import Finding, Severity
from leadout.models import fingerprint

RECORD = "training.json"
THINKING_SWITCH = "enable_thinking"  # the variable in templates with two modes


class TrainedConfig(BaseModel):
    """The training settings that the drafter's config.json repeats."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    layers: int | None = None
    block_size: int | None = None
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None


class TrainingRecord(BaseModel):
    """The fields of training.json that a check needs; other versions may write more."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    target: str
    target_fingerprint: str | None = None
    template_hash: str | None = None
    thinking: bool | None = None
    config: TrainedConfig = TrainedConfig()


def record_findings(
    checkpoint: Checkpoint, target: Path, tokens: TokenFiles | None, thinking: bool | None
) -> list[Finding]:
    """Compare the record beside the drafter, if there is one, with the pair as it is now."""
    path = checkpoint.path / RECORD
    if not path.is_file():
        return []
    try:
        record = TrainingRecord.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return [
            Finding(
                name="record-unreadable",
                severity=Severity.NOTE,
                message=f"{path} is not a record that `leadout train` wrote, so it was ignored",
                remedy="Remove the file if it belongs to something else.",
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
        name: f"{name} is {_shown(now)} but was {_shown(then)}"
        for name, (now, then) in pairs.items()
        if then is not None and now != then
    }
    if not changed:
        return []
    return [
        Finding(
            name="not-as-trained",
            severity=Severity.WARNING,
            message=f"{', '.join(changed.values())} in training, according to {RECORD}",
            evidence={"fields": ", ".join(changed)},
            remedy="Restore the values of the training in the drafter's config.json.",
        )
    ]


def _other_target(record: TrainingRecord, target: Path) -> list[Finding]:
    then = record.target_fingerprint
    if then is None or not has_weights(target):
        return []
    now = fingerprint(target)
    if now == then:
        return []
    return [
        Finding(
            name="other-target",
            severity=Severity.WARNING,
            message=(
                f"the target's fingerprint is {now[:12]}, but the drafter was trained for "
                f"{record.target} with {then[:12]}: this is another model, or it was fine-tuned, "
                "merged or quantised since"
            ),
            evidence={"found": now, "wanted": then},
            remedy="Serve the target of the training, or continue training for this one.",
        )
    ]


def _other_template(record: TrainingRecord, template: str | None) -> list[Finding]:
    then = record.template_hash
    if then is None or template is None:
        return []
    now = hashlib.sha256(template.encode()).hexdigest()
    if now == then:
        return []
    return [
        Finding(
            name="other-template",
            severity=Severity.WARNING,
            message=(
                f"the chat template's hash is {now[:12]}, but the drafter's training text was made "
                f"with a template of hash {then[:12]}"
            ),
            evidence={"found": now, "wanted": then},
            remedy="Serve with the template of the training, or train the drafter with this one.",
        )
    ]


def _other_thinking(
    record: TrainingRecord, template: str | None, thinking: bool | None
) -> list[Finding]:
    """The thinking modes of one target produce different kinds of text."""
    recorded = "thinking" in record.model_fields_set
    has_modes = template is not None and THINKING_SWITCH in template
    if not recorded or not has_modes or record.thinking == thinking:
        return []
    certain = None not in (record.thinking, thinking)
    return [
        Finding(
            name="other-thinking",
            severity=Severity.WARNING if certain else Severity.NOTE,
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
