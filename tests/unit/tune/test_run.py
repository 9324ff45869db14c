"""`leadout tune` before any server starts: the plan, and what is refused at once."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leadout.cli.app import app
from leadout.tune import run
from leadout.tune.settings import TuneSettings
from support.drafters import TINY_DRAFTER, write_random_drafter
from support.tiny_chat import MASK_TOKEN, write_tiny_chat_target
from support.tuned_files import a_tuning

FLAGS = ("--dtype", "float32", "--max-model-len", "200")
CONFIG = replace(TINY_DRAFTER, target_num_layers=6, mask_token_id=MASK_TOKEN)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_chat_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_random_drafter(tmp_path_factory.mktemp("drafters") / "tiny", CONFIG))


def test_the_plan_counts_the_rounds(target: str, drafter: str) -> None:
    words = ["tune", target, drafter, "--plan", "--json", "--max-batch", "6", *FLAGS]
    words += ["--turns", "single"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    plan = json.loads(ended.stdout)
    assert plan["batch_sizes"] == [1, 2, 4, 6]
    assert plan["draft_counts"] == [0, 1, 2, 3, 4]
    assert plan["rounds"] == (2 + 2 + 2 + 1) * 5  # 20 requests
    assert plan["prompts"] > 10
    assert plan["minutes"] >= 1
    assert (plan["turns"], plan["server_starts"]) == ("single", 2)


def test_a_short_tuning_has_fewer_rounds(target: str, drafter: str) -> None:
    words = ["tune", target, drafter, "--plan", "--json", "--short", *FLAGS, "--turns", "single"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    plan = json.loads(ended.stdout)
    assert (plan["batch_sizes"], plan["draft_counts"]) == ([1, 4, 16], [0, 1, 2, 4])
    assert (plan["rounds"], plan["tokens"]) == (12, 16)


def test_both_servers_get_the_flags_and_record(target: str, drafter: str) -> None:
    ready = run.prepare(
        TuneSettings(target=target, drafter=drafter, max_batch=6, server_flags=FLAGS)
    )
    for launch in (ready.bare, ready.drafting):
        words = " ".join(launch.command)
        assert " ".join(FLAGS) in words
        config = json.loads(launch.command[launch.command.index("--additional-config") + 1])
        folder = str(ready.folder / launch.name)
        assert config["leadout"] == {"calibration": {"folder": folder, "max_batch": 6}}
    assert not ready.folder.exists()
    assert "--speculative-config" not in ready.bare.command
    at = ready.drafting.command.index("--speculative-config")
    speculation = json.loads(ready.drafting.command[at + 1])
    assert speculation["num_speculative_tokens"] == CONFIG.max_draft_tokens
    assert ready.max_length == 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data-parallel-size", "2"], "--data-parallel-size 2: .* measures one replica"),
        (["--max-num-seqs", "4"], "--max-batch 16 is more than the 4 requests .*--max-num-seqs 16"),
        (
            ["--max-num-seqs", "16", "--max-num-batched-tokens", "100", "--max-model-len", "100"],
            "needs steps of 144 tokens, but max_num_batched_tokens is 100",
        ),
        (
            ["--max-bacth", "4"],
            "--max-bacth is not a flag of `leadout tune` or of vLLM.*--max-batch",
        ),
        (["another"], "Unexpected argument another: `leadout tune` takes TARGET and DRAFTER only"),
        (["--scheduler-cls", "my.Own"], "`leadout tune` cannot be combined with --scheduler-cls"),
    ],
)
def test_flags_that_cannot_be_measured_are_refused(
    target: str, drafter: str, words: list[str], message: str
) -> None:
    ended = CliRunner().invoke(app, ["tune", target, drafter, "--plan", *words])
    assert ended.exit_code == 2
    assert re.search(message, ended.stderr), ended.stderr


def test_flags_before_the_models_are_refused(target: str, drafter: str) -> None:
    ended = CliRunner().invoke(app, ["tune", "--dtype", "float32", target, drafter])
    assert ended.exit_code == 2
    assert "Expected target and drafter before --dtype" in ended.stderr


def test_an_unfit_pair_is_refused_before_anything_starts(target: str, tmp_path: Path) -> None:
    other = replace(CONFIG, mask_token_id=5, target_num_layers=4, target_layer_ids=(1, 2, 3))
    drafter = write_random_drafter(tmp_path / "other", other)
    ended = CliRunner().invoke(app, ["tune", target, str(drafter)])
    assert ended.exit_code == 1
    assert "target and drafter do not fit" in ended.stderr


def test_prompts_that_are_all_too_long_are_refused(
    target: str, drafter: str, tmp_path: Path
) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "word " * 400}))
    ended = CliRunner().invoke(app, ["tune", target, drafter, "--plan", "--prompts", str(file)])
    assert ended.exit_code == 2
    assert "--prompts: every prompt is longer than" in ended.stderr


def test_an_output_path_that_cannot_be_written_is_refused_first(
    target: str, drafter: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    words = ["tune", target, drafter, "--out"]
    ended = CliRunner().invoke(app, [*words, str(tmp_path / "file" / "tuned.json")])
    assert ended.exit_code == 2
    assert "is not a folder" in ended.stderr
    ended = CliRunner().invoke(app, [*words, str(tmp_path)])
    assert ended.exit_code == 2
    assert "is a folder, expected a file name" in ended.stderr


def test_ctrl_c_says_that_nothing_is_kept(
    target: str, drafter: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "calibrate", interrupted)
    ended = CliRunner().invoke(app, ["tune", target, drafter, "--out", str(tmp_path / "t.json")])
    assert ended.exit_code == 130
    assert "keeps no partial results" in ended.stderr


@pytest.mark.parametrize(("acceptance", "code"), [(0.9, 0), (0.0, 1)])
def test_the_exit_code_says_whether_drafting_pays(
    target: str,
    drafter: str,
    acceptance: float,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(run, "tune", lambda *_: a_tuning([acceptance] * 4))
    out = tmp_path / "new" / "tuned.json"
    ended = CliRunner().invoke(app, ["tune", target, drafter, "--out", str(out)])
    assert ended.exit_code == code, ended.output
    assert {path.name for path in out.parent.iterdir()} == {"tuned.json", "tuned.html"}
    assert "leadout serve" in ended.stdout
