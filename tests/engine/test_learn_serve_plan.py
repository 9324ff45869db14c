"""`leadout serve --learn-states`: the flags, and what is refused."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leadout.engine import serve_plan
from leadout.engine.learn_plan import learn_settings
from leadout.engine.serve_plan import Plan, make_plan
from leadout.engine.settings import SCHEDULER, STATES_TAP_WORKER, ServeSettings
from leadout.models import fingerprint
from leadout.registry import Registry
from leadout.ring.folder import open_writer, read_info
from leadout.settings import SettingsError
from support.version_registry import CONFIG, publish

FLAGS = ("--max-model-len", "128", "--max-num-seqs", "8")


@pytest.fixture(scope="module")
def registry(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Registry:
    work = tmp_path_factory.mktemp("work")
    registry = Registry(work / "registry")
    publish(registry, target, work, seed=0)
    registry.point_to(1, "the start")
    return registry


@pytest.fixture
def ring() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="leadout-test-", dir="/dev/shm"))
    yield folder / "ring"
    shutil.rmtree(folder)


def plan_of(target: Path, *flags: str, **settings: Any) -> Plan:
    return make_plan(ServeSettings(target=str(target), vllm_flags=(*FLAGS, *flags), **settings))


def test_worker_scheduler_and_section(registry: Registry, target: Path, ring: Path) -> None:
    plan = plan_of(
        target, registry=registry.folder, learn_states=ring, learn_rate=0.25, learn_ring_gib=0.125
    )
    flags = dict(zip(plan.command, plan.command[1:], strict=False))
    assert flags["--worker-cls"] == STATES_TAP_WORKER
    assert flags["--scheduler-cls"] == SCHEDULER
    section = json.loads(flags["--additional-config"])["leadout"]["learn"]
    assert section["folder"] == str(ring)
    assert (section["rate"], section["max_bytes"]) == (0.25, 1 << 27)
    info = read_info(ring)
    assert info.server_id == section["server_id"]
    assert info.layer_ids == CONFIG.target_layer_ids
    assert info.target_fingerprint == fingerprint(target)
    assert info.hidden_size == CONFIG.hidden_size
    assert ring.stat().st_mode & 0o777 == 0o700
    assert any("--learn-states" in note and "25%" in note for note in plan.notes)
    fp8 = plan_of(target, registry=registry.folder, learn_states=ring, learn_states_fp8=True)
    assert '"dtype": "float8"' in " ".join(fp8.command)


def test_live_control_has_the_same_worker(registry: Registry, target: Path, ring: Path) -> None:
    plan = plan_of(target, registry=registry.folder, learn_states=ring, live=True)
    assert plan.command.count("--worker-cls") == 1
    assert STATES_TAP_WORKER in plan.command


@pytest.mark.parametrize(
    ("flags", "settings", "reason"),
    [
        ((), {"registry": None}, "requires a drafter"),
        ((), {"learn_states": None, "learn_rate": 0.5}, "--learn-rate requires --learn-states"),
        (("--worker-cls", "some.Worker"), {}, "--worker-cls some.Worker"),
        (("--pipeline-parallel-size", "2"), {}, "pipeline-parallel-size"),
        ((), {"learn_ring_gib": 1e6}, "shared memory"),
        ((), {"states": True, "registry": None}, "--learn-states"),
    ],
)
def test_refusals(
    registry: Registry,
    target: Path,
    ring: Path,
    flags: tuple[str, ...],
    settings: dict[str, Any],
    reason: str,
) -> None:
    usual: dict[str, Any] = {"registry": registry.folder, "learn_states": ring}
    with pytest.raises(SettingsError, match=reason):
        plan_of(target, *flags, **usual | settings)


def test_adaptive_verification_is_refused(
    registry: Registry, target: Path, ring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM resolves it with CUDA graphs only, so it is switched on in what vLLM resolved here."""

    def adaptive(settings: Any, ring: Path, *rest: Any) -> Any:
        *others, config, notes = rest
        config.speculative_config.enable_adaptive_verification = is_adaptive
        return learn_settings(settings, ring, *others, config, notes)

    monkeypatch.setattr(serve_plan, "learn_settings", adaptive)
    is_adaptive = True
    with pytest.raises(SettingsError, match="combined with enable_adaptive_verification"):
        plan_of(target, registry=registry.folder, learn_states=ring)
    assert not ring.exists()
    plan_of(target, registry=registry.folder)  # without a ring it is nobody's concern
    is_adaptive = False
    plan_of(target, registry=registry.folder, learn_states=ring)
    assert ring.exists()


def test_a_folder_on_a_disk_is_refused(registry: Registry, target: Path) -> None:
    with pytest.raises(SettingsError, match=r"--learn-states: .*expected tmpfs"):
        plan_of(target, registry=registry.folder, learn_states=Path("/proc/ring"))


def test_a_ring_of_another_target_in_use_is_refused(
    registry: Registry, target: Path, ring: Path
) -> None:
    plan_of(target, registry=registry.folder, learn_states=ring)
    info = read_info(ring).model_copy(update={"target_fingerprint": "0" * 64})
    (ring / "ring.json").write_text(info.model_dump_json())
    writer = open_writer(ring, "states", 1 << 16, info)
    with pytest.raises(SettingsError, match="another folder"):
        plan_of(target, registry=registry.folder, learn_states=ring)
    writer.close()
    plan_of(target, registry=registry.folder, learn_states=ring)
    assert read_info(ring).target_fingerprint == fingerprint(target)
