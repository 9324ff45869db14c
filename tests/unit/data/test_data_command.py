"""`leadout data` makes a job, continues it, and says what is wrong with what it was asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fake_engine import FakeEngine, KilledError, starting
from typer.testing import CliRunner

from leadout.cli.app import app
from leadout.data import generate as job
from leadout.data.manifest import DataFolder
from leadout.shards import ShardWriter
from leadout.version import installed_versions
from support.tiny_chat import write_tiny_chat_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_target(tmp_path_factory.mktemp("models") / "tiny-target")


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()
    monkeypatch.setattr(job, "TextEngine", starting(engine))
    return engine


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "asked.jsonl"
    rows = [{"turns": ["One?", "Two?"]}, {"prompt": "Three?"}, {"prompt": "Four?"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Command:
    """The command with the flags that every test gives."""

    def __init__(self, target: Path, asked: Path, out: Path) -> None:
        self.target, self.asked, self.out = target, asked, out

    def __call__(self, *flags: str, out: str = "data") -> Result:
        folder = str(self.out / out)
        words = ["data", str(self.target), "--prompts", str(self.asked), "--out", folder]
        sizes = ["--max-new-tokens", "8", "--max-length", "200"]
        return CliRunner().invoke(app, [*words, *sizes, *flags], env={"COLUMNS": "200"})

    def samples(self, out: str = "data") -> list[Any]:
        return list(DataFolder(self.out / out).samples())


@pytest.fixture
def command(target: Path, asked: Path, tmp_path: Path) -> Command:
    return Command(target, asked, tmp_path)


def test_the_manifest_tells_what_was_made_and_how(command: Command) -> None:
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


def test_the_table_shows_counts_and_what_was_skipped(command: Command, asked: Path) -> None:
    with asked.open("a") as file:
        file.write(json.dumps({"prompt": "x" * 300}) + "\n")
    ended = command()
    assert ended.exit_code == 0
    assert next(line.split()[:2] for line in ended.stdout.splitlines() if "asked" in line) == [
        "asked",
        "4",
    ]
    assert "skipped 1 conversations" in ended.stdout
    assert "answers of tiny-target, part 1 of 1" in ended.stdout


def test_two_parts_are_the_whole(command: Command) -> None:
    assert command("--prompts", "self:3", out="whole").exit_code == 0
    for part in ("1/2", "2/2"):
        assert command("--prompts", "self:3", "--shard", part).exit_code == 0
    assert command.samples() == command.samples("whole")
    assert len(DataFolder(command.out / "data").manifests) == 2


def test_a_killed_job_goes_on_with_resume_only(
    command: Command, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine
) -> None:
    assert command(out="whole").exit_code == 0
    monkeypatch.setattr(job, "TextEngine", starting(FakeEngine(dies_after=2)))
    assert isinstance(command().exception, KilledError)
    assert len(command.samples()) == 2
    assert not DataFolder(command.out / "data").manifests[0].complete

    monkeypatch.setattr(job, "TextEngine", starting(engine))
    refused = command()
    assert refused.exit_code == 2
    assert "give --resume to continue it" in refused.stderr
    assert command("--resume").exit_code == 0
    assert command.samples() == command.samples("whole")
    whole, resumed = (DataFolder(command.out / name) for name in ("whole", "data"))
    assert resumed.content_hash() == whole.content_hash()
    assert resumed.manifests == whole.manifests


def test_a_complete_job_is_not_begun_again(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("--resume").exit_code == 0  # nothing to resume is a beginning
    monkeypatch.delattr(job, "TextEngine")
    ended = command("--resume")
    assert ended.exit_code == 0
    assert "part 1 of 1" in ended.stdout


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
def test_a_folder_takes_one_job_only(command: Command, flags: list[str], field: str) -> None:
    assert command().exit_code == 0
    before = sorted(path.name for path in (command.out / "data").iterdir())
    refused = command("--resume", *flags)
    assert refused.exit_code == 2
    assert f"manifest-1-of-1.json: {field}: found" in refused.stderr
    assert sorted(path.name for path in (command.out / "data").iterdir()) == before


def test_a_prompt_file_that_has_changed_is_another_job(command: Command, asked: Path) -> None:
    assert command().exit_code == 0
    asked.write_text(asked.read_text().replace("Three", "Thirteen"))
    refused = command("--resume")
    assert refused.exit_code == 2
    assert "prompts_hash: found" in refused.stderr


def test_samples_without_their_manifest_are_not_continued(command: Command) -> None:
    assert command().exit_code == 0
    (command.out / "data" / "manifest-1-of-1.json").unlink()
    refused = command("--resume")
    assert refused.exit_code == 2
    assert "found samples without manifest-1-of-1.json" in refused.stderr


def test_a_job_under_way_is_not_joined(command: Command) -> None:
    with ShardWriter(command.out / "data" / "samples-1-of-1.jsonl"):
        refused = command("--resume")
    assert refused.exit_code == 2
    assert "found another process that writes it" in refused.stderr


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2", ""])
def test_a_bad_shard_is_named(command: Command, shard: str) -> None:
    refused = command("--shard", shard)
    assert refused.exit_code == 2
    assert "--shard" in refused.stderr
    assert f"found {shard!r}, wanted i/n with 1 <= i <= n" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-new-tokens", "200"], "wanted less than --max-length (200)"),
        (["--greedy-share", "1.5"], "--greedy-share"),
        (["--temperature", "0"], "--temperature"),
        (["--prompts", "gone.jsonl"], "gone.jsonl: found no such file"),
        (["--prompts", "self"], "for instance self:1000"),
    ],
)
def test_a_bad_flag_is_named_and_leaves_no_trace(
    command: Command, flags: list[str], words: str
) -> None:
    refused = command(*flags)
    assert refused.exit_code == 2
    assert words in refused.stderr
    assert not (command.out / "data").exists()


def test_an_out_that_is_a_file_is_refused(command: Command, asked: Path) -> None:
    refused = command(out=asked.name)
    assert refused.exit_code == 2
    assert "found a file, wanted a folder" in refused.stderr


def test_a_target_that_is_nowhere_is_named(asked: Path, tmp_path: Path) -> None:
    words = ["data", str(tmp_path / "gone"), "--prompts", str(asked), "--out", str(tmp_path / "o")]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert "found neither a folder nor a hub model" in refused.stderr
