"""`leadout data` runs a job, resumes it, and reports wrong flags and folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from leadout.cli.app import app
from leadout.data.chat import Chat
from leadout.data.manifest import DataFolder
from leadout.shards import ShardWriter
from leadout.version import installed_versions
from support.fake_engine import FakeEngine, KilledError, starting
from support.fake_vllm_server import FakeVllmServer
from support.tiny_chat import write_tiny_chat_target

ENGINE = "leadout.engine.offline.TextEngine"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_target(tmp_path_factory.mktemp("models") / "tiny-target")


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()
    monkeypatch.setattr(ENGINE, starting(engine))
    return engine


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "asked.jsonl"
    rows = [{"turns": ["One?", "Two?"]}, {"prompt": "Three?"}, {"prompt": "Four?"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Command:
    """The command with the flags that all tests use."""

    def __init__(self, target: Path, asked: Path, out: Path) -> None:
        self.target, self.asked, self.out = target, asked, out

    def __call__(self, *flags: str, out: str = "data") -> Result:
        folder = str(self.out / out)
        words = ["data", str(self.target), "--prompts", str(self.asked), "--out", folder]
        # Like Qwen3, the tiny target thinks, so it would be sampled only.
        usual = ["--max-new-tokens", "8", "--max-length", "200", "--greedy-share", "0.5"]
        return CliRunner().invoke(app, [*words, *usual, *flags], env={"COLUMNS": "200"})

    def samples(self, out: str = "data") -> list[Any]:
        return list(DataFolder(self.out / out).samples())


@pytest.fixture
def command(target: Path, asked: Path, tmp_path: Path) -> Command:
    return Command(target, asked, tmp_path)


def test_the_manifest_has_the_job_and_its_counts(command: Command) -> None:
    ended = command("--prompts", "self:2", "--seed", "7", "--no-thinking", "--json")
    assert ended.exit_code == 0, ended.output
    manifest = json.loads(ended.stdout)
    assert manifest == json.loads((command.out / "data" / "manifest-1-of-1.json").read_text())
    assert manifest["complete"] is True
    assert manifest["skipped"] == 0
    assert manifest["versions"] == installed_versions()
    made = manifest["job"]
    assert made["target"] == "tiny-target"
    assert made["sources"] == ["asked.jsonl", "self:2"]
    assert made["thinking"] is False
    assert made["sampling"]["seed"] == 7
    assert all(len(made[f"{of}_hash"]) == 64 for of in ("tokenizer", "template", "prompts"))
    samples = command.samples()
    for source, number in (("asked", 4), ("self", 2)):
        of_source = [sample for sample in samples if sample.source == source]
        assert len(of_source) == number
        assert manifest["counts"][source] == {
            "samples": number,
            "prompt_tokens": sum(len(sample.prompt) for sample in of_source),
            "response_tokens": sum(len(sample.response) for sample in of_source),
        }


def test_the_summary_has_counts_skipped_conversations_and_the_next_step(
    command: Command, asked: Path
) -> None:
    with asked.open("a") as file:
        file.write(json.dumps({"prompt": "x" * 300}) + "\n")
    ended = command()
    assert ended.exit_code == 0
    assert next(line.split()[:2] for line in ended.stdout.splitlines() if "asked" in line) == [
        "asked",
        "4",
    ]
    assert "Skipped 1 conversations" in ended.stdout
    errors = command.out / "data" / "errors-1-of-1.jsonl"
    assert f"Which ones, and why: {errors}" in ended.stdout
    assert json.loads(errors.read_text())["id"] == "asked/3#0/0"
    assert f"Wrote 4 answers of tiny-target to {command.out / 'data'}." in ended.stdout
    assert f"Next: leadout train {command.target} --data {command.out / 'data'}" in ended.stdout


def test_two_parts_have_the_samples_of_the_whole(command: Command) -> None:
    assert command("--prompts", "self:3", out="whole").exit_code == 0
    for part in ("1/2", "2/2"):
        ended = command("--prompts", "self:3", "--shard", part)
        assert ended.exit_code == 0
        assert "Next: generate the other parts with --shard" in ended.stdout
    assert command.samples() == command.samples("whole")
    assert len(DataFolder(command.out / "data").manifests) == 2


def test_a_killed_job_continues_only_with_resume(
    command: Command, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine
) -> None:
    assert command(out="whole").exit_code == 0
    monkeypatch.setattr(ENGINE, starting(FakeEngine(dies_after=2)))
    with pytest.raises(KilledError):
        command()
    assert len(command.samples()) == 2
    assert not DataFolder(command.out / "data").manifests[0].complete

    monkeypatch.setattr(ENGINE, starting(engine))
    refused = command()
    assert refused.exit_code == 2
    assert "Add --resume to continue it" in refused.stderr
    assert command("--resume").exit_code == 0
    assert command.samples() == command.samples("whole")
    whole, resumed = (DataFolder(command.out / name) for name in ("whole", "data"))
    assert resumed.content_hash() == whole.content_hash()
    assert resumed.manifests == whole.manifests


def test_a_complete_job_is_not_started_again(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("--resume").exit_code == 0  # without an earlier run it starts one
    monkeypatch.delattr(ENGINE)
    ended = command("--resume")
    assert ended.exit_code == 0
    assert "Wrote 4 answers" in ended.stdout


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--seed", "1"], "sampling"),
        (["--prompts", "self:1"], "sources"),
        (["--limit", "2"], "prompts_hash"),
        (["--thinking"], "thinking"),
        (["--dtype", "float32"], "dtype"),
        (["--shard", "1/2"], "parts"),
    ],
)
def test_a_folder_holds_one_job(command: Command, flags: list[str], field: str) -> None:
    assert command().exit_code == 0
    before = sorted(path.name for path in (command.out / "data").iterdir())
    refused = command("--resume", *flags)
    assert refused.exit_code == 2
    assert f"manifest-1-of-1.json: {field} is " in refused.stderr
    assert sorted(path.name for path in (command.out / "data").iterdir()) == before


def test_a_changed_prompt_file_is_another_job(command: Command, asked: Path) -> None:
    assert command().exit_code == 0
    asked.write_text(asked.read_text().replace("Three", "Thirteen"))
    refused = command("--resume")
    assert refused.exit_code == 2
    assert "prompts_hash is" in refused.stderr


def test_samples_without_their_manifest_are_not_resumed(command: Command) -> None:
    assert command().exit_code == 0
    (command.out / "data" / "manifest-1-of-1.json").unlink()
    refused = command("--resume")
    assert refused.exit_code == 2
    assert "has samples but manifest-1-of-1.json is missing" in refused.stderr


def test_a_job_of_another_process_is_not_joined(command: Command) -> None:
    with ShardWriter(command.out / "data" / "samples-1-of-1.jsonl"):
        refused = command("--resume")
    assert refused.exit_code == 2
    assert "another process" in refused.stderr


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2", ""])
def test_a_wrong_shard_is_an_error(command: Command, shard: str) -> None:
    refused = command("--shard", shard)
    assert refused.exit_code == 2
    assert f"--shard: got {shard!r}, expected i/n with 1 <= i <= n" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-new-tokens", "200"], "must be less than --max-length 200"),
        (["--greedy-share", "1.5"], "--greedy-share"),
        (["--temperature", "0"], "--temperature"),
        (["--prompts", "gone.jsonl"], "gone.jsonl: no such file"),
        (["--prompts", "self"], "for example self:1000"),
    ],
)
def test_a_wrong_flag_is_an_error_and_writes_nothing(
    command: Command, flags: list[str], message: str
) -> None:
    refused = command(*flags)
    assert refused.exit_code == 2
    assert message in refused.stderr
    assert not (command.out / "data").exists()


def test_an_out_that_is_a_file_is_an_error(command: Command, asked: Path) -> None:
    refused = command(out=asked.name)
    assert refused.exit_code == 2
    assert "is a file, expected a folder" in refused.stderr


def test_a_missing_target_is_an_error(asked: Path, tmp_path: Path) -> None:
    words = ["data", str(tmp_path / "gone"), "--prompts", str(asked), "--out", str(tmp_path / "o")]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert str(tmp_path / "gone") in refused.stderr


def test_an_unwritable_out_is_an_error_before_any_work(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    monkeypatch.delattr(ENGINE)
    refused = command()
    assert refused.exit_code == 2
    assert "no permission to write" in refused.stderr


def test_ctrl_c_reports_where_it_stopped_and_how_to_continue(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ENGINE, starting(FakeEngine(dies_after=2, death=KeyboardInterrupt)))
    stopped = command()
    assert stopped.exit_code == 130
    assert "Stopped after 2 of 4 samples" in stopped.stderr
    assert "Run the same command with --resume" in stopped.stderr
    (manifest,) = DataFolder(command.out / "data").manifests
    assert manifest.counts["asked"].samples == 2
    assert not manifest.complete


def test_progress_shows_tokens_per_second(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leadout.console.LINE_SECONDS", 0.0)
    ended = command()
    assert "leadout data: starting vLLM" in ended.stderr
    assert "leadout data: answers 4/4" in ended.stderr
    assert "tokens/s" in ended.stderr


def test_flags_after_two_dashes_reach_the_engine(
    command: Command, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, Any] = {}

    def start(_target: str, **settings: Any) -> FakeEngine:
        started.update(settings)
        return engine

    monkeypatch.setattr(ENGINE, start)
    refused = command("--", "--tensor-parallel-size", "2", "--dtype", "float16")
    assert refused.exit_code == 2
    assert "does not accept --dtype among vLLM's flags; use --dtype" in refused.stderr
    assert not started
    assert command("--", "--tensor-parallel-size", "2").exit_code == 0
    assert started["tensor_parallel_size"] == 2


def test_bad_rows_repeated_prompts_and_failures_do_not_end_the_job(
    command: Command, asked: Path, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine
) -> None:
    with asked.open("a") as file:
        file.write(json.dumps({"prompt": "Four?"}) + "\n" + json.dumps({"question": "?"}) + "\n")
    monkeypatch.setattr(ENGINE, starting(FakeEngine(refuses="asked/0#0/1")))
    ended = command()
    assert ended.exit_code == 0
    for line in (
        "Left out 1 repeated prompts.",
        "Left out 1 rows that are no prompts.",
        "1 conversations failed; --resume tries them again.",
        "Wrote 3 answers",
    ):
        assert line in ended.stdout
    errors = (command.out / "data" / "errors-1-of-1.jsonl").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in errors][1] == "refused on demand"
    assert "line 5" in json.loads(errors[0])["id"]

    monkeypatch.setattr(ENGINE, starting(engine))
    resumed = command("--resume")
    assert resumed.exit_code == 0
    assert [request.id for request in engine.requests] == ["asked/0#0/1"]
    (manifest,) = DataFolder(command.out / "data").manifests
    assert (manifest.failed, manifest.duplicates, manifest.rejected) == (0, 1, 1)
    assert len(command.samples()) == 4


def test_servers_answer_instead_of_an_engine(
    command: Command, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(out="whole").exit_code == 0
    monkeypatch.delattr(ENGINE)
    with FakeVllmServer(Chat(target), "tiny-target") as server:
        ended = command("--endpoint", f"{server.url}/v1")
        assert ended.exit_code == 0, ended.output
        refused = command("--endpoint", server.url, "--max-length", "999", out="longer")
    assert f"{server.url}: 4 answers." in ended.stderr
    assert command.samples() == command.samples("whole")
    # Everything that determines the answers is equal, and so is the hash of the data.
    hashes = {DataFolder(command.out / name).content_hash() for name in ("data", "whole")}
    assert len(hashes) == 1
    assert refused.exit_code == 2
    assert "has --max-model-len 256" in refused.stderr


def test_wrong_prompts_are_reported_before_torch_or_the_engine_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from leadout.cli.app import app\n"
        f"words = ['data', 'target', '--prompts', 'asked.json', '--out', {str(tmp_path)!r}]\n"
        "ended = CliRunner().invoke(app, words)\n"
        "assert 'expected a .jsonl file' in ended.stderr, ended.output\n"
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.strip() == "[]", ended.stderr
