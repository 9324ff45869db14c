"""Arms and their servers, prompt sets, the order of cells, and the plan."""

import json
from collections import Counter
from pathlib import Path

import pytest
from sample_rounds import BARE, BARE_AGAIN, FIXED, TUNED, setup

from leadout.bench.settings import BenchError
from leadout.bench.setup import (
    PromptSet,
    all_cells,
    arm_command,
    common_flags,
    make_arms,
    make_plan,
    read_sets,
)
from leadout.engine.plugin import SWITCH
from leadout.engine.server_turns import KV_SPACE

ONE = {"folder/drafter": 7}


def names(*args: object) -> list[str]:
    return [arm.name for arm in make_arms(*args)]  # type: ignore[arg-type]


def test_one_drafter_uses_its_maximum_k() -> None:
    bare, again, fixed = make_arms(ONE, [], None)
    assert (bare.name, bare.kind) == ("bare", "bare")
    assert (again.name, again.kind) == ("bare-again", "bare")
    assert (fixed.name, fixed.draft_tokens, fixed.drafter) == ("fixed", 7, "folder/drafter")


def test_every_k_is_an_arm() -> None:
    assert names(ONE, [7, 3, 3], "t.json") == ["bare", "bare-again", "fixed", "fixed-3", "tuned"]


def test_several_drafters_give_their_names_to_arms() -> None:
    two = {"a/first": 7, "b/second": 3}
    assert names(two, [], None) == ["bare", "bare-again", "first", "second"]
    assert names(two, [3], None) == ["bare", "bare-again", "first-3", "second"]


def test_arm_names_are_unique() -> None:
    found = names({"a/bare": 7, "b/bare": 7, "c/tuned": 7}, [], "t.json")
    others = ["bare-again-2", "bare-again-3", "tuned", "tuned-again-2"]
    assert found == ["bare", "bare-again", *others]


def test_a_k_beyond_the_block_is_refused() -> None:
    with pytest.raises(BenchError, match=r"--draft-tokens 8: folder/drafter drafts 1 to 7"):
        make_arms(ONE, [8], None)


def test_bare_and_fixed_arms_run_plain_vllm() -> None:
    bare, again, fixed = make_arms(ONE, [3], None)
    for arm in (bare, again, fixed):
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


def test_an_arm_with_leadouts_draft_class_differs_in_nothing_else() -> None:
    *_, fixed, ours = make_arms(ONE, [3], None, leadout_class=True)
    assert ours.name == "fixed-3-leadout"
    launch, own = (arm_command(arm, "target", []) for arm in (fixed, ours))
    assert own.command == launch.command
    assert SWITCH not in own.environment


def test_arms_with_adaptive_verification_differ_in_nothing_else() -> None:
    arms = make_arms(ONE, [3], None, adaptive_verification=True)[2:]
    assert [arm.name for arm in arms] == ["fixed-3", "fixed-3-adaptive"]
    commands = [arm_command(arm, "target", []).command for arm in arms]
    place = commands[0].index("--speculative-config") + 1
    own, adaptive = (json.loads(command.pop(place)) for command in commands)
    assert adaptive == {**own, "enable_adaptive_verification": True}
    assert commands[0] == commands[1]


def test_the_tuned_arm_runs_leadout_serve() -> None:
    tuned = make_arms(ONE, [], "t.json", "folder/drafter")[-1]
    launch = arm_command(tuned, "target", ["--max-num-seqs", "8"])
    words = " ".join(launch.command[1:])
    assert words == (
        "-m leadout serve target --draft folder/drafter --tuned t.json --max-num-seqs 8"
    )
    assert SWITCH not in launch.environment


def test_with_several_drafters_the_tuned_file_names_its_own() -> None:
    tuned = make_arms({"a/first": 7, "b/second": 3}, [], "t.json")[-1]
    assert "--draft" not in arm_command(tuned, "target", []).command


def test_the_users_cache_size_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    bare, _ = make_arms({}, [], None)
    monkeypatch.delenv(KV_SPACE, raising=False)
    assert arm_command(bare, "target", []).environment[KV_SPACE] == "1"
    monkeypatch.setenv(KV_SPACE, "7")
    assert arm_command(bare, "target", []).environment[KV_SPACE] == "7"


def test_common_flags_disable_prefix_caching_and_fit_all_requests() -> None:
    for on_cpu in (True, False):
        flags = common_flags([1, 16, 8], on_cpu, 3)
        assert "--no-enable-prefix-caching" in flags
        assert flags[flags.index("--max-num-seqs") + 1] == "16"
    assert "--enforce-eager" in common_flags([1], True, 3)
    shared = common_flags([1], False, 3)
    assert float(shared[shared.index("--gpu-memory-utilization") + 1]) * 3 <= 0.9
    assert "--gpu-memory-utilization" not in common_flags([1], False, 1)


def test_the_live_arm_starts_from_the_tuned_file_or_from_the_only_drafter() -> None:
    live = make_arms(ONE, [], "t.json", "folder/drafter", live=True)[-1]
    words = " ".join(arm_command(live, "target", ["--port", "1"]).command)
    assert words.endswith("serve target --draft folder/drafter --tuned t.json --live --port 1")
    alone = make_arms(ONE, [], None, live=True)[-1]
    words = " ".join(arm_command(alone, "target", []).command)
    assert words.endswith("serve target --draft folder/drafter --live")
    with pytest.raises(BenchError, match=r"--live requires either .* got 2 drafters and no file"):
        make_arms({"a": 7, "b": 7}, [], None, live=True)


def test_every_cell_is_measured_once_a_round_on_every_arm() -> None:
    given = setup(arms=(BARE, BARE_AGAIN, FIXED, TUNED), rounds=3)
    cells = all_cells(given)
    assert len(cells) == len(set(cells)) == 2 * 2 * 4 * 3
    assert Counter(cell.arm for cell in cells) == dict.fromkeys(
        ["bare", "bare-again", "fixed", "tuned"], 12
    )


def test_prompts_come_in_a_random_order_that_is_the_same_for_all_arms() -> None:
    prompts = PromptSet("some", tuple(str(n) for n in range(100)), "hash")
    first = prompts.in_random_order(concurrency=2, start=0)
    assert sorted(first) == sorted(prompts.texts)
    assert first != prompts.texts
    assert first == prompts.in_random_order(concurrency=2, start=0)
    # A bench that continues does not measure the same prompts again.
    assert first != prompts.in_random_order(concurrency=2, start=3)


def test_sets_that_share_prompts_are_refused(tmp_path: Path) -> None:
    for name, texts in (("one", ["a", "b"]), ("two", ["c"]), ("both", ["b", "d", "c"])):
        lines = [json.dumps({"prompt": text}) + "\n" for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("one", "two", "both")}
    assert len(read_sets([files["one"], files["two"]])) == 2
    with pytest.raises(BenchError, match="one and both share 1 prompts"):
        read_sets([files["one"], files["both"]])


def test_prompts_are_first_turns_by_file(tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_text('{"turns": ["first", "second"]}\n{"turns": ["third"]}\n')
    (tmp_path / "task.jsonl").write_text('{"prompt": "do it"}\n')
    talk, task = read_sets([str(tmp_path / "talk.jsonl"), str(tmp_path / "task.jsonl")])
    assert (talk.name, talk.texts) == ("talk", ("first", "third"))
    assert (task.name, task.texts) == ("task", ("do it",))
    assert talk.hash != task.hash


def test_packaged_sets_are_the_default() -> None:
    assert [each.name for each in read_sets([])] == ["chat", "code", "math"]


def test_generated_prompts_are_refused() -> None:
    with pytest.raises(BenchError, match="bench needs prompt texts"):
        read_sets(["self:3"])


def test_a_plan_counts_what_is_left() -> None:
    given = setup(sets=("math",), concurrencies=(1, 8), rounds=2)
    fresh = make_plan(given, [])
    assert (fresh.cells, fresh.cells_done) == (12, 0)
    assert fresh.minutes == pytest.approx(12 * (4.0 + 0.5) / 60)
    half = make_plan(given, all_cells(given)[:6])
    assert (half.cells, half.cells_done) == (6, 6)
    assert (fresh.server_starts, half.server_starts) == (3, 3)
    assert make_plan(given, all_cells(given)).server_starts == 0
    single = given.model_copy(update={"turns": "single"})
    assert make_plan(single, []).server_starts == 6  # three servers in each of two rounds
