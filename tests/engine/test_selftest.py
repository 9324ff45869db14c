"""`leadout selftest` on a tiny pair: real servers, every check, one file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

from leadout.errors import NEGATIVE, SUCCESS
from leadout.selftest.result import SelftestResult, Status
from support.drafters import TINY_DRAFTER, write_random_drafter
from support.processes import family_of, new_processes
from support.tiny_chat import MASK_TOKEN, write_tiny_chat_target

pytestmark = pytest.mark.timeout(7200)  # three servers
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}
KEY = "sk-not-for-anybody"


@dataclass(frozen=True)
class Ended:
    result: SelftestResult
    printed: str
    code: int

    def status(self, name: str) -> Status:
        return next(check.status for check in self.result.checks if check.name == name)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("selftest")
    config = replace(TINY_DRAFTER, target_num_layers=6, mask_token_id=MASK_TOKEN)
    target = write_tiny_chat_target(folder / "target")
    drafter = write_random_drafter(folder / "drafter", config)
    out = folder / "result.json"
    words = [sys.executable, "-m", "leadout", "selftest", str(target), str(drafter)]
    words += ["--no-by-part", "--concurrency", "2", "--seconds", "1", "--output-tokens", "16"]
    words += ["--minutes", "90"]  # the default leaves servers out where each takes minutes to start
    words += ["--out", str(out), "--json"]
    words += ["--dtype", "float32", "--max-model-len", "512", "--api-key", KEY]
    before = family_of(os.getpid())
    run = subprocess.run(
        words, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=6600
    )
    assert run.returncode in (SUCCESS, NEGATIVE), run.stderr
    assert new_processes(before) == []
    result = SelftestResult.model_validate_json(out.read_text())
    return Ended(result, run.stdout, run.returncode)


@pytest.mark.parametrize("name", ["draft class", "metrics", "capture", "drafts", "swap"])
def test_what_a_cpu_can_prove_passes(ended: Ended, name: str) -> None:
    row = next(check for check in ended.result.checks if check.name == name)
    assert row.status is Status.PASS, row


@pytest.mark.parametrize("name", ["async scheduling", "full CUDA graphs"])
def test_what_only_a_gpu_has_is_not_applicable(ended: Ended, name: str) -> None:
    assert ended.status(name) is Status.NOT_APPLICABLE


def test_every_part_has_a_row_of_its_overhead(ended: Ended) -> None:
    """Not judged here: a second of a tiny model on a busy machine proves nothing about speed."""
    names = [check.name for check in ended.result.checks]
    for part in ("everything", "registry"):
        assert f"overhead of {part}" in names
    for name in ("stock", "everything", "registry"):
        assert min(ended.result.servers[name].tokens_per_second) > 0


def test_steps_are_counted_by_kind_of_graph(ended: Ended) -> None:
    """On CPUs there are no graphs; vLLM's table is read all the same."""
    for name in ("stock", "everything"):
        assert ended.result.servers[name].graph_steps.get("NONE", 0) > 0


def test_the_exit_code_is_that_of_the_checks(ended: Ended) -> None:
    assert ended.code == ended.result.exit_code


def test_the_printed_result_is_the_file_and_has_no_key(ended: Ended) -> None:
    assert SelftestResult.model_validate(json.loads(ended.printed)) == ended.result
    assert KEY not in ended.printed
    assert ended.result.provenance.models is not None
    assert set(ended.result.provenance.models) == {"target", "drafter"}
