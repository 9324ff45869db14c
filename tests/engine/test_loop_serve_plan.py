"""`leadout serve --registry --capture`: the flags and environment, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from leadout.cli.app import app
from leadout.engine.capture_store import INFO, CaptureInfo
from leadout.engine.serve_plan import Plan, make_plan
from leadout.engine.settings import SCHEDULER, WORKER_EXTENSION, ServeSettings
from leadout.engine.vllm_flags import (
    PLUGINS,
)
from leadout.registry import Registry, RegistryError
from leadout.settings import SettingsError
from support.version_registry import publish, with_nan

FLAGS = ("--max-model-len", "128", "--max-num-seqs", "8")


@pytest.fixture
def registry(target: Path, tmp_path: Path) -> Registry:
    registry = Registry(tmp_path / "registry")
    for seed in (0, 1):
        publish(registry, target, tmp_path, seed=seed)
    registry.point_to(2, "the start")
    return registry


def plan_of(target: Path, *flags: str, **settings: Any) -> Plan:
    return make_plan(ServeSettings(target=str(target), vllm_flags=(*FLAGS, *flags), **settings))


def value_of(plan: Plan, flag: str) -> Any:
    return json.loads(plan.command[plan.command.index(flag) + 1])


def test_the_current_version_is_served_and_followed(registry: Registry, target: Path) -> None:
    plan = plan_of(target, "--additional-config", '{"other": 1}', registry=registry.folder)
    assert value_of(plan, "--speculative-config")["model"] == str(registry.path(2))
    additional = [
        json.loads(value)
        for flag, value in zip(plan.command, plan.command[1:], strict=False)
        if flag == "--additional-config"
    ][-1]
    assert additional == {
        "other": 1,
        "leadout": {"registry": {"folder": str(registry.folder.resolve())}},
    }
    assert SCHEDULER in plan.command
    assert WORKER_EXTENSION in plan.command
    assert "leadout" in plan.environment[PLUGINS].split(",")


def test_a_revision_is_not_applied_to_versions_of_a_registry(
    registry: Registry, target: Path
) -> None:
    flags = ("--speculative-config", '{"revision": "v2", "num_speculative_tokens": 2}')
    plan = plan_of(target, *flags, registry=registry.folder)
    speculation = value_of(plan, "--speculative-config")
    assert "revision" not in speculation
    assert speculation["num_speculative_tokens"] == 2
    assert any(note.startswith("revision v2: not used") for note in plan.notes)


def test_capture_alone_needs_no_drafter_and_no_plugin_names(target: Path, tmp_path: Path) -> None:
    plan = plan_of(target, capture=tmp_path, capture_rate=0.5)
    assert value_of(plan, "--additional-config") == {
        "leadout": {"capture": {"folder": str(tmp_path), "rate": 0.5}}
    }
    assert "--speculative-config" not in plan.command
    assert WORKER_EXTENSION not in plan.command
    assert plan.environment == {}
    assert any("token ids of 50% of the requests" in note for note in plan.notes)


def test_conflicting_flags_are_refused(
    registry: Registry, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {"registry": registry.folder}
    with pytest.raises(SettingsError, match="--registry cannot be combined with the drafter x"):
        plan_of(target, draft="x", **ours)
    with pytest.raises(SettingsError, match=r"--registry cannot be .* --worker-extension-cls a\.b"):
        plan_of(target, "--worker-extension-cls", "a.b", **ours)
    with pytest.raises(SettingsError, match=r"--registry cannot be .* --scheduler-cls a\.b"):
        plan_of(target, "--scheduler-cls", "a.b", **ours)
    with pytest.raises(SettingsError, match="--registry requires --api-server-count 1, got 2"):
        plan_of(target, "--api-server-count", "2", **ours)
    with pytest.raises(SettingsError, match="--registry cannot be combined with --grpc"):
        plan_of(target, "--grpc", **ours)
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_USE_RUST_FRONTEND", "1")
        with pytest.raises(SettingsError, match="combined with VLLM_USE_RUST_FRONTEND"):
            plan_of(target, **ours)
    ngram = '{"method": "ngram", "num_speculative_tokens": 2}'
    with pytest.raises(SettingsError, match=r"--registry works with the method dflash.* ngram"):
        plan_of(target, "--speculative-config", ngram, **ours)
    redactor = '{"leadout": {"capture": {"redactor": "os:system"}}}'
    with pytest.raises(SettingsError, match=r"--capture: .*'os:system'"):
        plan_of(target, "--additional-config", redactor, capture=tmp_path / "c")


def test_another_targets_registry_or_traffic_is_refused(
    registry: Registry, target: Path, tmp_path: Path
) -> None:
    publish(registry, target, tmp_path, seed=2, other_target=True)
    registry.point_to(3, "of another target")
    with pytest.raises(RegistryError, match="fingerprint 000000000000"):
        plan_of(target, registry=registry.folder)
    other = CaptureInfo(target="other", target_fingerprint="ab")
    (tmp_path / INFO).write_text(other.model_dump_json())
    with pytest.raises(SettingsError, match=r"--capture: .* other"):
        plan_of(target, capture=tmp_path)


def test_a_broken_version_is_served_bare_on_request(registry: Registry, target: Path) -> None:
    (registry.path(2) / "model.safetensors").write_bytes(b"half")
    plan = plan_of(target, if_unfit="bare", registry=registry.folder)
    assert "--speculative-config" not in plan.command
    assert plan.environment == {}
    assert any("serving WITHOUT speculation" in note for note in plan.notes)


def test_a_server_starts_while_the_pointer_names_a_version_that_cannot_be_served(
    registry: Registry, target: Path, tmp_path: Path
) -> None:
    """Servers that run keep their version then, and a restart must not end one of them."""
    for spoiled in ({"spoil": with_nan}, {"other_target": True}):
        version = publish(registry, target, tmp_path, seed=2, parent=2, **spoiled).version
        registry.point_to(version, "a bad one")
        plan = plan_of(target, registry=registry.folder)
        assert value_of(plan, "--speculative-config")["model"] == str(registry.path(2))
        assert any(f"version {version} cannot be served" in note for note in plan.notes)
    child = publish(registry, target, tmp_path, seed=2, parent=version).version
    (registry.path(child) / "model.safetensors").write_bytes(b"half")
    registry.point_to(child, "worse: its parent is bad, too")
    plan = plan_of(target, registry=registry.folder)
    assert value_of(plan, "--speculative-config")["model"] == str(registry.path(2))


def test_the_printed_plan_can_be_run_as_it_is(
    registry: Registry, target: Path, tmp_path: Path
) -> None:
    words = ["serve", str(target), "--registry", str(registry.folder), "--plan", *FLAGS]
    words += ["--capture", str(tmp_path / "traffic"), "--capture-rate", "0.25"]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.startswith("VLLM_PLUGINS=")
    assert '"rate": 0.25' in ran.stdout
    refused = CliRunner().invoke(app, [*words[:-1], "1.5"])
    assert refused.exit_code == 2


@pytest.mark.parametrize("upload", ["traffic", "file:///tmp/traffic"])
def test_captured_traffic_is_not_uploaded_to_a_folder(
    target: Path, tmp_path: Path, upload: str
) -> None:
    with pytest.raises(SettingsError, match=rf"--capture-upload {upload} is a folder.*s3://"):
        plan_of(target, capture=tmp_path, capture_upload=upload)
