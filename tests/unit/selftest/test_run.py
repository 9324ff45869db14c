"""A self-test goes on whatever happens: checks that fail, servers that do not start, no time."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from rich.console import Console

from leadout.checkpoints import load_weights, read_checkpoint
from leadout.control.tuned_file import ServerConfig
from leadout.engine.child_process import EngineError
from leadout.engine.inspection import WorkerFacts
from leadout.engine.load_test import client_session
from leadout.environment import EngineFacts, EnvironmentReport, Hardware
from leadout.errors import NEGATIVE, SUCCESS
from leadout.provenance import Provenance
from leadout.registry import Registry
from leadout.selftest import checks, run
from leadout.selftest.result import (
    Check,
    SelftestResult,
    ServerRun,
    Status,
    failed,
    not_applicable,
    passed,
    print_result,
)
from leadout.selftest.servers import (
    CAPTURE,
    CHANGED,
    EVERYTHING,
    FIRST,
    LIVE,
    REGISTRY,
    STOCK,
    Pair,
    PlannedServer,
    Plans,
    TestedServer,
    publish_versions,
)
from leadout.selftest.settings import SelftestSettings
from leadout.settings import SettingsError
from support.drafters import TINY_DRAFTER, write_random_drafter
from support.models import tiny_llama

CONFIG = replace(TINY_DRAFTER, target_num_layers=4)
RESOLVED = WorkerFacts(
    draft_class=None,
    runner="V1",
    dtype="float32",
    config=ServerConfig(
        async_scheduling=False,
        cuda_graphs="NONE",
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        quantization=None,
        kv_cache_dtype="auto",
    ),
    draft_tokens=4,
    device="cpu",
)


def planned(folder: Path, minutes: float = 10.0, **refused: str) -> run._Test:
    settings = SelftestSettings(
        target="t", drafter="d", minutes=minutes, out=folder / "result.json"
    )
    test = run._Test(settings, Pair(folder, folder), folder, time.monotonic())
    test._plans = Plans(servers={}, parts=[], refused=refused, resolved=RESOLVED, max_requests=8)
    return test


def rows(test: run._Test, server: str) -> list[Check]:
    return [test._rows[name] for name in run.CHECKS_OF[server]]


def test_an_error_in_a_check_is_its_failure(tmp_path: Path) -> None:
    test = planned(tmp_path)

    async def judge() -> Check:
        raise EngineError("the server has gone\nsecond line with a key")

    asyncio.run(test._check(checks.METRICS, judge))
    row = test._rows[checks.METRICS]
    assert row.status is Status.FAIL
    assert row.measured == "could not be measured: the server has gone"


def test_servers_that_time_does_not_suffice_for_are_left_out(tmp_path: Path) -> None:
    test = planned(tmp_path, minutes=1)
    test._longest = 30.0
    assert not test._is_left_out(LIVE)
    test._longest = 90.0
    assert not test._is_left_out(EVERYTHING)  # without it nothing would be tested
    assert test._is_left_out(LIVE)
    (row,) = rows(test, LIVE)
    assert row.status is Status.NOT_APPLICABLE
    assert row.measured == "out of time: --minutes 1 did not suffice"


def test_a_part_that_the_flags_rule_out_is_not_applicable(tmp_path: Path) -> None:
    reason = "--registry requires --pipeline-parallel-size 1, got 2"
    test = planned(tmp_path, registry=reason)
    assert test._is_left_out(REGISTRY)
    assert not test._is_left_out(CAPTURE)
    assert {(row.status, row.measured) for row in rows(test, REGISTRY)} == {
        (Status.NOT_APPLICABLE, reason)
    }


def test_a_server_that_does_not_start_fails_its_checks(tmp_path: Path) -> None:
    test = planned(tmp_path)
    test._problems[EVERYTHING] = "The server exited during startup."
    with pytest.raises(EngineError, match="Neither stock vLLM nor Leadout starts"):
        asyncio.run(test._test_server(EVERYTHING, None, None))
    test.servers[STOCK] = ServerRun(start_seconds=40.0)
    asyncio.run(test._test_server(EVERYTHING, None, None))
    assert {row.status for row in rows(test, EVERYTHING)} == {Status.FAIL}


class FakeServer:
    """Answers `/metrics` without Leadout's names."""

    async def metrics(self) -> str:
        return "vllm:num_requests_running 0"


@pytest.mark.parametrize(("api_servers", "status"), [(1, "fail"), (2, "not applicable")])
def test_several_api_servers_have_no_metrics_of_leadout(
    tmp_path: Path, api_servers: int, status: str
) -> None:
    test = planned(tmp_path)
    test._plans = test._plans.model_copy(update={"api_servers": api_servers})
    test.servers[EVERYTHING] = ServerRun(start_seconds=1.0)
    asyncio.run(test._observe_after_load(FakeServer()))  # type: ignore[arg-type]
    assert test._rows[checks.METRICS].status == status


def test_a_server_that_loads_longer_than_the_test_names_the_flag(tmp_path: Path) -> None:
    plan = PlannedServer(
        command=[sys.executable, "-c", "import time; time.sleep(60)"], environment={}
    )

    async def start() -> None:
        async with client_session() as session:
            server = TestedServer("slow", plan, session, tmp_path / "log")
            try:
                await server.until_ready(0.1)
            finally:
                server.stop()

    with pytest.raises(EngineError, match="increase --minutes"):
        asyncio.run(start())


def test_the_targets_revision_and_the_download_folder_are_those_of_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None, str | None]] = []

    def fake_download(name: str, **settings: Any) -> str:
        asked.append((name, settings["revision"], settings["cache_dir"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_download)
    Pair.of("acme/target", "acme/drafter", ["--revision=v2", "--download_dir", "/models"])
    assert asked == [("acme/target", "v2", "/models"), ("acme/drafter", None, "/models")]


def test_versions_of_the_test_differ_in_fingerprint_and_drafts(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "target")
    # Without the number of target layers, which not every published drafter states.
    drafter = write_random_drafter(tmp_path / "drafter", CONFIG)
    config = json.loads((drafter / "config.json").read_text())
    del config["num_target_layers"]
    (drafter / "config.json").write_text(json.dumps(config))
    registry = publish_versions(Pair(tmp_path / "target", drafter), tmp_path)
    assert isinstance(registry, Registry)
    assert registry.require_pointer().version == FIRST
    manifests = [registry.verify(version) for version in (FIRST, CHANGED)]
    assert manifests[0].fingerprint != manifests[1].fingerprint
    one, other = (read_checkpoint(registry.path(version)) for version in (FIRST, CHANGED))
    assert one.config == other.config  # else the engine would refuse the swap
    weights, changed = load_weights(one), load_weights(other)
    differ = [name for name in weights if not weights[name].equal(changed[name])]
    assert differ == ["norm.weight"]


def test_flags_before_the_pair_are_refused(tmp_path: Path) -> None:
    settings = SelftestSettings(target="--dtype", drafter="float32", out=tmp_path / "r.json")
    with pytest.raises(SettingsError, match="TARGET DRAFTER"):
        run.selftest(settings, run.Progress.silent())


def result_of(*rows: Check) -> SelftestResult:
    return SelftestResult(
        target="t",
        drafter="d",
        flags=["--api-key", "REDACTED"],
        checks=list(rows),
        resolved=None,
        servers={},
        seconds=90.0,
        environment=EnvironmentReport(
            leadout="0",
            python="3",
            libraries={},
            engine=EngineFacts(),
            hardware=Hardware(
                system="Linux", machine="m", cores=2, memory_gib=4.0, accelerators=["Some GPU"]
            ),
            commands={},
            warnings=[],
        ),
        provenance=Provenance.of_this_run(),
    )


GOOD = passed("swap", "expected", "as expected")
ABSENT = not_applicable("full CUDA graphs", "expected", "no graphs here")
BAD = failed("drafts", "all equal", "3 of 40", "Report this [result].")


def test_exit_codes() -> None:
    assert result_of(GOOD, ABSENT).exit_code == SUCCESS
    assert result_of(GOOD, BAD, ABSENT).exit_code == NEGATIVE


def test_the_table_names_every_check_its_result_and_the_remedy() -> None:
    shown = io.StringIO()
    print_result(result_of(GOOD, BAD, ABSENT), Console(file=shown, width=120))
    text = shown.getvalue()
    for part in ("Some GPU", "as expected", "no graphs here", "drafts: Report this [result]."):
        assert part in text
    assert "1 pass, 1 fail, 1 not applicable; 1.5 minutes" in text
