"""A pair that has changed since the drafter was trained is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from editing import edit_json, edit_weights, names

from leadout.check import training_record
from leadout.check.static import static_findings
from leadout.data.chat import Chat
from leadout.findings import Severity
from leadout.models import fingerprint
from leadout.train import export
from leadout.train.config import TrainConfig
from leadout.train.export import TrainReport


@pytest.fixture
def written(target: Path, drafter: Path) -> dict[str, Any]:
    config = {"layers": 3, "block_size": 5, "target_layer_ids": [1, 2, 3], "mask_token_id": 319}
    content = {
        "target": "tiny-target",
        "target_fingerprint": fingerprint(target),
        "template_hash": Chat(target).template_hash,
        "thinking": None,
        "config": config,
        "field_of_a_later_version": 1,
    }
    (drafter / "training.json").write_text(json.dumps(content))
    return content


@pytest.mark.usefixtures("written")
def test_an_unchanged_pair_gives_no_finding(target: Path, drafter: Path) -> None:
    assert static_findings(target, drafter) == []


@pytest.mark.usefixtures("written")
def test_changed_target_weights_are_a_warning(target: Path, drafter: Path) -> None:
    edit_weights(target, lambda w: w["model.norm.weight"].add_(0.01))
    (found,) = static_findings(target, drafter)
    assert (found.name, found.severity) == ("other-target", Severity.WARNING)


@pytest.mark.usefixtures("written")
def test_a_target_without_weights_is_not_compared(target: Path, drafter: Path) -> None:
    (target / "model.safetensors").unlink()
    assert names(static_findings(target, drafter)) == ["target-weights-absent"]


@pytest.mark.usefixtures("written")
def test_a_changed_chat_template_is_a_warning(target: Path, drafter: Path) -> None:
    with (target / "chat_template.jinja").open("a") as file:
        file.write("{{ 'Be brief.' }}")
    (found,) = static_findings(target, drafter)
    assert (found.name, found.severity) == ("other-template", Severity.WARNING)


@pytest.mark.parametrize(
    ("trained", "checked", "severity"),
    [
        (True, False, Severity.WARNING),
        (None, False, Severity.NOTE),
        (False, False, None),
    ],
)
def test_another_thinking_mode_is_reported(
    target: Path,
    drafter: Path,
    written: dict[str, Any],
    trained: bool | None,
    checked: bool,
    severity: Severity | None,
) -> None:
    (drafter / "training.json").write_text(json.dumps(written | {"thinking": trained}))
    found = static_findings(target, drafter, thinking=checked)
    assert [(each.name, each.severity) for each in found] == (
        [] if severity is None else [("other-thinking", severity)]
    )


@pytest.mark.usefixtures("written")
def test_fields_changed_since_training_are_named(target: Path, drafter: Path) -> None:
    edit_json(
        drafter / "config.json",
        lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 2], mask_token_id=310),
    )
    (found,) = static_findings(target, drafter)
    assert (found.name, found.severity) == ("not-as-trained", Severity.WARNING)
    assert "target_layer_ids is [0, 1, 2] but was [1, 2, 3]" in found.message
    assert "mask_token_id is 310 but was 319" in found.message


@pytest.mark.usefixtures("written")
def test_an_old_record_without_fingerprints(target: Path, drafter: Path) -> None:
    names_ = ("target_fingerprint", "template_hash", "thinking")
    edit_json(drafter / "training.json", lambda c: [c.pop(name) for name in names_])
    edit_weights(target, lambda w: w["model.norm.weight"].add_(0.01))
    assert static_findings(target, drafter, thinking=True) == []


def test_its_fields_are_those_that_training_writes() -> None:
    assert training_record.RECORD == export.RECORD
    assert set(training_record.TrainingRecord.model_fields) <= set(TrainReport.model_fields)
    assert set(training_record.TrainedConfig.model_fields) <= set(TrainConfig.model_fields)


def test_a_file_that_is_not_a_record_is_a_note(target: Path, drafter: Path) -> None:
    (drafter / "training.json").write_text("[]")
    (found,) = static_findings(target, drafter)
    assert (found.name, found.severity) == ("record-unreadable", Severity.NOTE)
