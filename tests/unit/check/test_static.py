"""Every static check reports its fault and nothing about a healthy pair."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from editing import edit_json, edit_weights, names, only, set_mask

from leadout import environment
from leadout.check import static
from leadout.check.static import static_findings
from leadout.data.chat import Chat
from leadout.findings import Severity
from leadout.models import fingerprint
from leadout.pairing import read_target
from leadout.train import export
from leadout.train.config import TrainConfig
from leadout.train.export import TrainReport
from support.faults import FAULTS, LOAD, Fault, healthy_reduced, healthy_speculators

SETTINGS_FAULTS = {"causality", "positions", "batched-tokens", "mixed-layers", "non-causal-backend"}
LOW_MASK = 7  # below every vocabulary that a fault makes
FILE_FAULTS = [fault for fault in FAULTS if fault.rule not in SETTINGS_FAULTS]


def test_a_healthy_pair_gives_no_finding(target: Path, drafter: Path) -> None:
    assert static_findings(target, drafter) == []
    assert static_findings(target, drafter, draft_tokens=4, dtype="float32", thinking=True) == []


@pytest.mark.parametrize("make", [healthy_speculators, healthy_reduced])
def test_a_healthy_pair_in_another_format_gives_notes_at_most(
    target: Path, drafter: Path, tmp_path: Path, make: Callable[..., Path]
) -> None:
    made = make(drafter, tmp_path / "made", read_target(target))
    found = static_findings(target, made)
    assert {finding.severity for finding in found} <= {Severity.NOTE}, found


def test_it_imports_neither_engine_nor_model_library(target: Path, drafter: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from leadout.check.static import static_findings\n"
        f"assert static_findings(Path({str(target)!r}), Path({str(drafter)!r})) == []\n"
        "print([m for m in ('vllm', 'transformers') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("fault", FILE_FAULTS, ids=lambda fault: fault.name)
def test_seeded_faults_are_found(fault: Fault, target: Path, drafter: Path, tmp_path: Path) -> None:
    set_mask(drafter, LOW_MASK)
    made = fault.make(drafter, tmp_path / "faulty", read_target(target))
    arguments = fault.engine_arguments
    found = static_findings(
        target,
        made,
        draft_tokens=arguments.get("num_speculative_tokens"),
        dtype=arguments.get("dtype", "auto"),
    )
    if fault.rule == LOAD:
        assert found
        assert Severity.ERROR in {finding.severity for finding in found}
    else:
        assert fault.rule in names(found)
    assert all(finding.remedy for finding in found)


@pytest.mark.parametrize(
    ("rule", "severity"),
    [
        ("layer-order", Severity.ERROR),
        ("rope", Severity.WARNING),
        ("partial-rotary", Severity.WARNING),
        ("verifier", Severity.NOTE),  # quantised copies of a target break it
        ("vocabulary-padding", Severity.NOTE),
        ("logit-scaling", Severity.NOTE),
    ],
)
def test_severity_of_broken_rules(
    rule: str, severity: Severity, target: Path, drafter: Path, tmp_path: Path
) -> None:
    (fault,) = [each for each in FAULTS if each.rule == rule]
    set_mask(drafter, LOW_MASK)
    made = fault.make(drafter, tmp_path / "faulty", read_target(target))
    assert only(static_findings(target, made), rule).severity is severity


def test_a_target_without_a_config_is_an_error(target: Path, drafter: Path) -> None:
    (target / "config.json").unlink()
    found = only(static_findings(target, drafter), "target-unreadable")
    assert found.severity is Severity.ERROR
    assert "config.json" in found.message


def test_the_precision_of_the_targets_config_is_checked(target: Path, drafter: Path) -> None:
    edit_json(target / "config.json", lambda c: c.update(dtype="float16"))
    assert only(static_findings(target, drafter), "dtype").severity is Severity.WARNING
    assert static_findings(target, drafter, dtype="bfloat16") == []


def test_shorter_drafter_positions_are_a_note(target: Path, drafter: Path) -> None:
    edit_json(drafter / "config.json", lambda c: c.update(max_position_embeddings=128))
    (found,) = static_findings(target, drafter)
    assert (found.name, found.severity) == ("positions", Severity.NOTE)
    assert "--max-model-len 128" in found.remedy


def test_an_unsupported_engine_version_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, target: Path, drafter: Path
) -> None:
    monkeypatch.setattr(static, "installed_version", lambda _: "0.33.0")
    (found,) = static_findings(target, drafter)
    assert (found.name, found.severity) == ("engine-version", Severity.WARNING)
    assert "0.33.0" in found.message


def test_a_missing_engine_is_a_note(
    monkeypatch: pytest.MonkeyPatch, target: Path, drafter: Path
) -> None:
    monkeypatch.setattr(static, "installed_distribution", lambda: None)
    (found,) = static_findings(target, drafter)
    assert (found.name, found.severity) == ("engine-missing", Severity.NOTE)


def test_a_torch_companion_of_another_build_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, target: Path, drafter: Path
) -> None:
    versions = {"torch": "2.13.0+cpu", "torchaudio": "2.13.0"}
    monkeypatch.setattr(environment, "installed_version", versions.get)
    (found,) = static_findings(target, drafter)
    assert (found.name, found.severity) == ("torch-companion", Severity.WARNING)
    assert found.remedy == "run 'pip uninstall torchaudio'"


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
def test_a_pair_as_it_was_trained_gives_no_finding(target: Path, drafter: Path) -> None:
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
def test_an_old_training_record_without_fingerprints(target: Path, drafter: Path) -> None:
    names_ = ("target_fingerprint", "template_hash", "thinking")
    edit_json(drafter / "training.json", lambda c: [c.pop(name) for name in names_])
    edit_weights(target, lambda w: w["model.norm.weight"].add_(0.01))
    assert static_findings(target, drafter, thinking=True) == []


def test_the_fields_of_the_record_are_those_that_training_writes() -> None:
    assert static.RECORD == export.RECORD
    assert set(static.TrainingRecord.model_fields) <= set(TrainReport.model_fields)
    assert set(static.TrainedConfig.model_fields) <= set(TrainConfig.model_fields)


def test_a_file_that_is_not_a_training_record_is_a_note(target: Path, drafter: Path) -> None:
    (drafter / "training.json").write_text("[]")
    (found,) = static_findings(target, drafter)
    assert (found.name, found.severity) == ("record-unreadable", Severity.NOTE)
