"""Which arms a request makes, how they are called, and what their servers are started with."""

import json

import pytest

from leadout.bench.settings import KV_SPACE, BenchError, arm_command, common_flags, make_arms
from leadout.engine.plugin import SWITCH

ONE = {"folder/drafter": 7}


def names(*args: object) -> list[str]:
    return [arm.name for arm in make_arms(*args)]  # type: ignore[arg-type]


def test_one_drafter_is_fixed_at_all_that_its_block_holds() -> None:
    bare, fixed = make_arms(ONE, [], None)
    assert (bare.name, bare.kind) == ("bare", "bare")
    assert (fixed.name, fixed.draft_tokens, fixed.drafter) == ("fixed", 7, "folder/drafter")


def test_every_draft_length_is_an_arm_with_its_own_name() -> None:
    assert names(ONE, [7, 3, 3], "t.json") == ["bare", "fixed", "fixed-3", "tuned"]


def test_several_drafters_are_called_by_their_names() -> None:
    two = {"a/first": 7, "b/second": 3}
    assert names(two, [], None) == ["bare", "first", "second"]
    assert names(two, [3], None) == ["bare", "first-3", "second"]


def test_names_stay_unique_whatever_the_drafters_are_called() -> None:
    found = names({"a/bare": 7, "b/bare": 7, "c/tuned": 7}, [], "t.json")
    assert found == ["bare", "bare-again-2", "bare-again-3", "tuned", "tuned-again-2"]


def test_a_draft_length_beyond_the_block_is_refused() -> None:
    with pytest.raises(BenchError, match=r"--draft-tokens: found 8, wanted 1 to 7"):
        make_arms(ONE, [8], None)


def test_bare_and_fixed_run_vllm_as_it_is() -> None:
    bare, fixed = make_arms(ONE, [3], None)
    for arm in (bare, fixed):
        launch = arm_command(arm, "target", ["--max-num-seqs", "8"])
        assert launch.environment[SWITCH] == "0"
        assert "target" in launch.command
        assert "--max-num-seqs 8" in " ".join(launch.command)
    assert "--speculative-config" not in arm_command(bare, "target", []).command
    command = arm_command(fixed, "target", []).command
    assert json.loads(command[command.index("--speculative-config") + 1]) == {
        "method": "dflash",
        "model": "folder/drafter",
        "num_speculative_tokens": 3,
    }


def test_the_tuned_arm_runs_leadout_serve_with_the_plugin() -> None:
    tuned = make_arms(ONE, [], "t.json", "folder/drafter")[-1]
    launch = arm_command(tuned, "target", ["--max-num-seqs", "8"])
    told = " ".join(launch.command[1:])
    assert told == (
        "-m leadout serve target --draft folder/drafter --tuned t.json --max-num-seqs 8"
    )
    assert SWITCH not in launch.environment


def test_with_several_drafters_the_tuned_file_names_its_own() -> None:
    tuned = make_arms({"a/first": 7, "b/second": 3}, [], "t.json")[-1]
    assert "--draft" not in arm_command(tuned, "target", []).command


def test_the_users_cache_size_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    (bare,) = make_arms({}, [], None)
    monkeypatch.delenv(KV_SPACE, raising=False)
    assert arm_command(bare, "target", []).environment[KV_SPACE] == "1"
    monkeypatch.setenv(KV_SPACE, "7")
    assert arm_command(bare, "target", []).environment[KV_SPACE] == "7"


def test_no_server_keeps_prefixes_and_all_requests_have_room() -> None:
    for on_cpu in (True, False):
        flags = common_flags([1, 16, 8], 3, on_cpu)
        assert "--no-enable-prefix-caching" in flags
        assert flags[flags.index("--max-num-seqs") + 1] == "16"
    assert "--enforce-eager" in common_flags([1], 3, on_cpu=True)
    shared = common_flags([1], 3, on_cpu=False)
    assert float(shared[shared.index("--gpu-memory-utilization") + 1]) * 3 <= 0.9


def test_the_live_arm_starts_from_the_tuned_file_or_from_the_only_drafter() -> None:
    live = make_arms(ONE, [], "t.json", "folder/drafter", live=True)[-1]
    words = " ".join(arm_command(live, "target", ["--port", "1"]).command)
    assert words.endswith("serve target --draft folder/drafter --tuned t.json --live --port 1")
    alone = make_arms(ONE, [], None, live=True)[-1]
    words = " ".join(arm_command(alone, "target", []).command)
    assert words.endswith("serve target --draft folder/drafter --live")
    with pytest.raises(BenchError, match="--live: found 2 drafters and no --tuned file"):
        make_arms({"a": 7, "b": 7}, [], None, live=True)
