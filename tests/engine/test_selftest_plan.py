"""What a self-test would start: stock vLLM, and servers with the parts that the flags allow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from leadout.engine.inspection import INSPECTION, INSPECTION_AND_SWAP
from leadout.engine.plugin import SWITCH
from leadout.selftest.servers import (
    CAPTURE,
    EVERYTHING,
    LIVE,
    REGISTRY,
    STOCK,
    Pair,
    PlanRequest,
    Plans,
    plan_here,
    publish_versions,
)
from leadout.settings import SettingsError
from support.drafters import TINY_DRAFTER, write_random_drafter
from support.models import tiny_llama


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    tiny_llama().save_pretrained(folder / "target")
    config = replace(TINY_DRAFTER, target_num_layers=4)
    drafter = write_random_drafter(folder / "drafter", config)
    registry = publish_versions(Pair(folder / "target", drafter), folder)
    assert registry is not None
    return folder / "target", drafter, registry.folder


def plans(pair: tuple[Path, Path, Path], *flags: str, registry: bool = True) -> Plans:
    target, drafter, folder = pair
    request = PlanRequest(
        target=str(target),
        drafter=str(drafter),
        flags=("--skip-tokenizer-init", "--dtype", "float32", *flags),
        on_cpu=True,
        registry=folder if registry else None,
        capture=folder.parent / "capture",
    )
    return plan_here(request, lambda _: None)


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_stock_vllm_has_the_same_drafter_and_k_and_nothing_of_leadout(
    pair: tuple[Path, Path, Path],
) -> None:
    asked = '{"method": "dflash", "num_speculative_tokens": 3}'
    made = plans(pair, "--speculative-config", asked, "--max-num-seqs", "7")
    assert set(made.servers) == {STOCK, EVERYTHING, REGISTRY, LIVE, CAPTURE}
    assert made.parts == [REGISTRY, LIVE, CAPTURE]
    assert (made.resolved.draft_tokens, made.max_requests) == (3, 7)
    stock = made.servers[STOCK]
    assert stock.environment[SWITCH] == "0"
    assert not any("leadout.engine" in word for word in stock.command)
    for server in made.servers.values():
        speculation = json.loads(value(server.command, "--speculative-config"))
        assert speculation["num_speculative_tokens"] == 3
        assert "--cudagraph-metrics" in server.command
        assert value(server.command, "--max-num-seqs") == "7"
    for name in (EVERYTHING, REGISTRY):
        command = made.servers[name].command
        assert value(command, "--worker-extension-cls") == INSPECTION_AND_SWAP


def test_parts_that_the_flags_rule_out_are_named(pair: tuple[Path, Path, Path]) -> None:
    made = plans(pair, "--pipeline-parallel-size", "2")
    assert set(made.refused) == {REGISTRY}
    assert "--pipeline-parallel-size" in made.refused[REGISTRY]
    command = made.servers[EVERYTHING].command
    assert value(command, "--worker-extension-cls") == INSPECTION
    sections = json.loads(value(command, "--additional-config"))["leadout"]
    assert set(sections) == {LIVE, CAPTURE}


def test_api_servers_are_counted(pair: tuple[Path, Path, Path]) -> None:
    assert plans(pair, "--data-parallel-size", "2").api_servers == 1  # the registry needs one
    two = plans(pair, "--api-server-count", "2")
    assert (two.api_servers, set(two.refused)) == (2, {REGISTRY})
    assert plans(pair, "--data-parallel-size", "2", registry=False).api_servers == 2


def test_a_drafter_that_cannot_be_swapped_needs_no_registry(pair: tuple[Path, Path, Path]) -> None:
    made = plans(pair, registry=False)
    assert set(made.refused) == {REGISTRY}
    assert REGISTRY not in made.servers


def test_an_unknown_flag_is_refused(pair: tuple[Path, Path, Path]) -> None:
    with pytest.raises(
        SettingsError, match=r"--minuts is not a flag of `leadout selftest`.* mean --minutes\?"
    ):
        plans(pair, "--minuts", "3")
