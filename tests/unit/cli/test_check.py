"""`leadout check`: the exit code is the verdict, and nothing else looks like one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sample_results import finding, whole_result
from typer.testing import CliRunner, Result

from leadout.check import run as check_run
from leadout.check.result import CheckError, CheckResult, Verdict
from leadout.check.settings import CheckSettings
from leadout.cli.app import app
from leadout.cli.options import NEEDS
from leadout.environment import Need
from leadout.findings import Severity

SEVERITIES = {Verdict.UNDECIDED: Severity.WARNING, Verdict.UNFIT: Severity.ERROR}


class FakeCheck:
    """Takes the place of `leadout.check.run.check`, which would start an engine."""

    def __init__(self) -> None:
        self.result: CheckResult | Exception = whole_result()
        self.settings: list[CheckSettings] = []

    def __call__(self, settings: CheckSettings, _progress: object) -> CheckResult:
        self.settings.append(settings)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> FakeCheck:
    fake = FakeCheck()
    monkeypatch.setattr(check_run, "check", fake)
    return fake


def run(*arguments: object) -> Result:
    pair = ("owner/tiny-target", "drafters/tiny-drafter")
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["check", *pair, *map(str, arguments)])


@pytest.mark.parametrize(
    ("verdict", "code"), [(Verdict.FIT, 0), (Verdict.UNFIT, 1), (Verdict.UNDECIDED, 3)]
)
def test_the_exit_code_is_the_verdict(made: FakeCheck, verdict: Verdict, code: int) -> None:
    findings = [] if verdict is Verdict.FIT else [finding(SEVERITIES[verdict])]
    made.result = whole_result(verdict=verdict, findings=findings)
    ended = run()
    assert ended.exit_code == code, ended.output
    assert ended.stdout.startswith(verdict.value.upper())


def test_every_flag_is_a_setting(made: FakeCheck, tmp_path: Path) -> None:
    run("--prompts", "a.jsonl", "--prompts", "b.jsonl", "--texts", 5, "--draft-tokens", 3,
        "--dtype", "float32", "--no-thinking", "--long-context", 512,
        "--baseline", tmp_path / "old.json", "--fix", tmp_path / "fixed",
        "--save", "s.json", "--report", "r.html", "--tuned", "t.json")  # fmt: skip
    assert made.settings == [
        CheckSettings(
            target="owner/tiny-target",
            drafter="drafters/tiny-drafter",
            prompts=("a.jsonl", "b.jsonl"),
            texts=5,
            draft_tokens=3,
            dtype="float32",
            thinking=False,
            long_context=512,
            baseline=tmp_path / "old.json",
            fix=tmp_path / "fixed",
            save=Path("s.json"),
            report=Path("r.html"),
            tuned=Path("t.json"),
        )
    ]


def test_json_is_the_whole_result_alone(made: FakeCheck) -> None:
    ended = run("--json", "--save", "s.json")
    assert CheckResult.model_validate_json(ended.stdout) == made.result
    assert "wrote s.json" in ended.stderr


def test_results_of_earlier_versions_are_read() -> None:
    old = json.loads(whole_result(findings=[finding()]).model_dump_json())
    old["verdict"] = "doubtful"
    old["findings"][0]["gravity"] = {"warning": "doubtful"}[old["findings"][0].pop("severity")]
    read = CheckResult.model_validate_json(json.dumps(old))
    assert read.verdict is Verdict.UNDECIDED
    assert read.findings == [finding()]


@pytest.mark.usefixtures("made")
def test_written_files_and_the_next_step_are_named() -> None:
    lines = run("--save", "s.json", "--report", "r.html").stdout.splitlines()
    assert lines[-3:-1] == ["wrote r.html", "wrote s.json"]
    assert lines[-1] == "Next: leadout tune owner/tiny-target drafters/tiny-drafter"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--no-such-flag",),
        ("--draft-tokens", "0"),
        ("--draft-tokens", "many"),
        ("--dtype", "int8"),
        ("--static", "--baseline", "old.json"),
        ("--static", "--fix", "new"),
        ("--static", "--tuned", "tuned.json"),
    ],
)
def test_wrong_usage_is_not_a_verdict(made: FakeCheck, arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2
    assert CliRunner().invoke(app, ["check"]).exit_code == 2
    assert made.settings == []


def test_what_cannot_be_combined_is_named() -> None:
    assert "cannot be combined with --static" in run("--static", "--fix", "new").stderr


@pytest.mark.parametrize(
    "problem", [CheckError("cannot"), RuntimeError("cannot"), AssertionError("cannot")]
)
def test_a_check_that_fails_is_not_a_verdict(made: FakeCheck, problem: Exception) -> None:
    made.result = problem
    ended = run()
    assert ended.exit_code == 2
    assert "cannot" in ended.stderr
    assert ("Traceback" in ended.stderr) == (not isinstance(problem, CheckError))


def test_only_a_static_check_runs_without_the_engine(
    made: FakeCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NEEDS, "check", (Need(module="no_such_module", remedy="pip install it"),))
    ended = run()
    assert ended.exit_code == 2
    assert "pip install it" in ended.output
    assert made.settings == []
    assert run("--static").exit_code == 0
    assert made.settings[0].static


def test_help_explains_the_exit_codes() -> None:
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["check", "--help"])
    assert shown.exit_code == 0
    text = " ".join(shown.output.split())
    assert "0 the pair fits, 1 it does not, 2 the check could not run, 3 undecided" in text
