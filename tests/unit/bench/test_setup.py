"""Arms and their servers, prompt sets, the order of cells, and the plan."""

import json
from collections import Counter
from pathlib import Path

import pytest
from sample_rounds import BARE, FIXED, TUNED, setup

from leadout.bench.settings import BenchError
from leadout.bench.setup import (
    KV_SPACE,
    PromptSet,
    Rates,
    all_cells,
    arm_command,
    common_flags,
    make_arms,
    make_plan,
    read_sets,
    write_prompts,
)
from leadout.engine.plugin import SWITCH

ONE = {"folder/drafter": 7}


def names(*args: object) -> list[str]:
    return [arm.name for arm in make_arms(*args)]  # type: ignore[arg-type]


def test_one_drafter_uses_its_maximum_k() -> None:
    bare, fixed = make_arms(ONE, [], None)
    assert (bare.name, bare.kind) == ("bare", "bare")
    assert (fixed.name, fixed.draft_tokens, fixed.drafter) == ("fixed", 7, "folder/drafter")


def test_every_k_is_an_arm() -> None:
    assert names(ONE, [7, 3, 3], "t.json") == ["bare", "fixed", "fixed-3", "tuned"]


def test_several_drafters_give_their_names_to_arms() -> None:
    two = {"a/first": 7, "b/second": 3}
    assert names(two, [], None) == ["bare", "first", "second"]
    assert names(two, [3], None) == ["bare", "first-3", "second"]


def test_arm_names_are_unique() -> None:
    found = names({"a/bare": 7, "b/bare": 7, "c/tuned": 7}, [], "t.json")
    assert found == ["bare", "bare-again-2", "bare-again-3", "tuned", "tuned-again-2"]


def test_a_k_beyond_the_block_is_refused() -> None:
    with pytest.raises(BenchError, match=r"--draft-tokens 8: folder/drafter drafts 1 to 7"):
        make_arms(ONE, [8], None)


def test_bare_and_fixed_arms_run_plain_vllm() -> None:
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
    (bare,) = make_arms({}, [], None)
    monkeypatch.delenv(KV_SPACE, raising=False)
    assert arm_command(bare, "target", []).environment[KV_SPACE] == "1"
    monkeypatch.setenv(KV_SPACE, "7")
    assert arm_command(bare, "target", []).environment[KV_SPACE] == "7"


def test_common_flags_disable_prefix_caching_and_fit_all_requests() -> None:
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
    with pytest.raises(BenchError, match=r"--live requires either .* got 2 drafters and no file"):
        make_arms({"a": 7, "b": 7}, [], None, live=True)


def test_every_cell_is_measured_once_a_round_on_every_arm() -> None:
    given = setup(arms=(BARE, FIXED, TUNED), rounds=3)
    cells = all_cells(given)
    assert len(cells) == len(set(cells)) == 2 * 2 * 3 * 3
    assert Counter(cell.arm for cell in cells) == {"bare": 12, "fixed": 12, "tuned": 12}


def test_arms_take_turns_and_another_starts_each_round() -> None:
    given = setup(arms=(BARE, FIXED, TUNED), sets=("math",), concurrencies=(8,), rounds=4)
    order = [cell.arm for cell in all_cells(given)]
    assert order[0:3] == ["bare", "fixed", "tuned"]
    assert order[3:6] == ["fixed", "tuned", "bare"]
    assert order[6:9] == ["tuned", "bare", "fixed"]
    assert order[9:12] == order[0:3]


def test_requests_grow_with_concurrency() -> None:
    given = setup()
    assert [given.requests_at(c) for c in (1, 4, 16)] == [3, 8, 32]


def test_rounds_take_other_prompts_and_wrap_around() -> None:
    prompts = PromptSet("some", ("a", "b", "c", "d", "e"), "hash")
    assert prompts.of_round(0, 2) == ["a", "b"]
    assert prompts.of_round(1, 2) == ["c", "d"]
    assert prompts.of_round(2, 2) == ["e", "a"]
    assert prompts.of_round(0, 7) == ["a", "b", "c", "d", "e", "a", "b"]


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


def test_prompts_are_written_in_the_generators_format(tmp_path: Path) -> None:
    path = write_prompts(["one\nline", "Ünï"], tmp_path / "p.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"prompt": "one\nline"}, {"prompt": "Ünï"}]


def test_a_plan_counts_what_is_left() -> None:
    given = setup(sets=("math",), concurrencies=(1, 8), rounds=2)
    rates = Rates({1: 32.0, 8: 256.0}, "a probe")
    fresh = make_plan(given, [], rates)
    assert (fresh.cells, fresh.cells_done) == (8, 0)
    # Two rounds, two arms: 3 requests at 1, 16 at 8, of 64 tokens each.
    assert fresh.output_tokens == 2 * 2 * (3 + 16) * 64
    seconds = 4 * (3 * 64 / 32 + 16 * 64 / 256) + 8 * 1.5
    assert fresh.minutes == pytest.approx(seconds / 60)
    assert fresh.rates_from == "a probe"
    half = make_plan(given, all_cells(given)[:4], rates)
    assert (half.cells, half.cells_done) == (4, 4)
    assert half.minutes == pytest.approx(fresh.minutes / 2)
