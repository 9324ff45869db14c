"""Prompts of a check that the drafter was trained on: noticed, and left out if possible.

Acceptance on the training prompts is higher than on new ones, and says little about traffic.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from leadout.data.prompt_record import NAME, PromptRecord, PromptRecordError
from leadout.findings import Finding, note, warning

MIN_OTHERS = 12  # prompts that must remain if the others are left out

TokensBySet = Mapping[str, list[list[int]]]


def without_seen(
    prompts: TokensBySet, drafter: Path
) -> tuple[dict[str, list[list[int]]], list[Finding]]:
    """The prompts to measure acceptance on, and what was found about the others."""
    try:
        record = PromptRecord.read(drafter)
    except PromptRecordError as problem:
        remedy = "Remove the file if it belongs to something else."
        return dict(prompts), [note("prompt-record-unreadable", str(problem), remedy)]
    if record is None:
        message = (
            f"the drafter has no {NAME}, so prompts of this check that it was trained on cannot be "
            "recognized; on such prompts acceptance would be too high"
        )
        remedy = "None needed if the prompts of this check are new to the drafter."
        return dict(prompts), [note("training-prompts-unknown", message, remedy)]
    return select(prompts, record)


def select(
    prompts: TokensBySet, record: PromptRecord
) -> tuple[dict[str, list[list[int]]], list[Finding]]:
    """Leave out the prompts of the record if enough others remain."""
    others = {
        name: [prompt for prompt in part if prompt not in record] for name, part in prompts.items()
    }
    total, left = (sum(map(len, each.values())) for each in (prompts, others))
    seen = total - left
    if not seen:
        return dict(prompts), []
    if record.share < 1:
        known = f" (the record holds {record.share:.0%} of the training prompts)"
    else:
        known = ""
    found = f"{seen} of {total} prompts of this check are training prompts of the drafter{known}"
    evidence = {"seen": seen, "prompts": total}
    if left < MIN_OTHERS:
        message = (
            f"{found}, and only {left} are not, so they were kept; acceptance on new prompts is "
            "probably lower than measured"
        )
        remedy = "Give prompts that the drafter was not trained on: --prompts FILE."
        return dict(prompts), [warning("training-prompts", message, remedy, **evidence)]
    message = f"{found}; they were left out"
    remedy = "None needed. More new prompts make the estimate more precise."
    remaining = {name: part for name, part in others.items() if part}
    return remaining, [note("training-prompts", message, remedy, **evidence)]
