"""`leadout check`: the exit code is the verdict, and nothing else may look like one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sample_results import finding, whole_result
from typer.testing import CliRunner, Result

from leadout.check.result import CheckError, CheckRequest, CheckResult, Gravity, Verdict
from leadout.cli.app import app
from leadout.cli.options import NEEDS
from leadout.environment import Need


class FakeCheck(ModuleType):
    """Stands in for `leadout.check.run`, which would start an engine."""

    def __init__(self) -> None:
        super().__init__("leadout.check.run")
        self.result: CheckResult | Exception = whole_result()
        self.requests: list[CheckRequest] = []

    def check(self, request: CheckRequest, progress: Any) -> CheckResult:
        self.requests.append(request)
        progress.stage("nothing", 1)()
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> FakeCheck:
    fake = FakeCheck()
    monkeypatch.setitem(sys.modules, "leadout.check.run", fake)
    return fake


def run(*words: object) -> Result:
    pair = ("owner/tiny-target", "drafters/tiny-drafter")
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["check", *pair, *map(str, words)])


@pytest.mark.parametrize(
    ("verdict", "code"), [(Verdict.FIT, 0), (Verdict.DOUBTFUL, 1), (Verdict.UNFIT, 2)]
)
def test_the_exit_code_is_the_verdict(made: FakeCheck, verdict: Verdict, code: int) -> None:
    findings = [] if verdict is Verdict.FIT else [finding(Gravity(verdict.value))]
    made.result = whole_result(verdict=verdict, findings=findings)
    ended = run()
    assert ended.exit_code == code, ended.output
    assert ended.stdout.startswith(verdict.value.upper())


def test_the_request_holds_every_flag(made: FakeCheck, tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text(whole_result().model_dump_json())
    run("--prompts", "a.jsonl", "--prompts", "b.jsonl", "--draft-tokens", 3, "--dtype", "float32",
        "--no-thinking", "--baseline", old, "--fix", tmp_path / "fixed")  # fmt: skip
    assert made.requests == [
        CheckRequest(
            target="owner/tiny-target",
            drafter="drafters/tiny-drafter",
            prompts=("a.jsonl", "b.jsonl"),
            static_only=False,
            draft_tokens=3,
            dtype="float32",
            thinking=False,
            baseline=old,
            fix=tmp_path / "fixed",
        )
    ]


def test_json_is_the_whole_result_and_alone(made: FakeCheck) -> None:
    ended = run("--json")
    assert CheckResult.model_validate_json(ended.stdout) == made.result


def test_what_is_saved_is_a_baseline_and_the_page_a_page(made: FakeCheck, tmp_path: Path) -> None:
    saved, report = tmp_path / "result.json", tmp_path / "report.html"
    assert run("--save", saved, "--report", report).exit_code == 0
    assert CheckResult.model_validate_json(saved.read_bytes()) == made.result
    assert report.read_text().startswith("<!DOCTYPE html>")
    assert run("--baseline", saved).exit_code == 0


@pytest.mark.parametrize(
    "words",
    [("--no-such-flag",), ("--draft-tokens", "0"), ("--draft-tokens", "many"), ("surplus",)],
)
@pytest.mark.usefixtures("made")
def test_a_wrong_use_is_no_verdict(words: tuple[str, ...]) -> None:
    assert run(*words).exit_code == 3
    assert CliRunner().invoke(app, ["check"]).exit_code == 3


@pytest.mark.parametrize(
    "problem", [CheckError("cannot"), RuntimeError("cannot"), AssertionError("cannot")]
)
def test_a_check_that_fails_is_no_verdict(made: FakeCheck, problem: Exception) -> None:
    made.result = problem
    ended = run()
    assert ended.exit_code == 3
    assert "cannot" in ended.stderr
    assert ("Traceback" in ended.stderr) == (not isinstance(problem, CheckError))


def test_flags_that_cannot_be_are_refused_before_the_work(made: FakeCheck, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    other = tmp_path / "other.json"
    other.write_text(whole_result(target="owner/another").model_dump_json())
    for words, told in (
        (("--static", "--baseline", other), "--static"),
        (("--static", "--fix", tmp_path / "new"), "--static"),
        (("--report", tmp_path / "no" / "page.html"), "--report"),
        (("--save", tmp_path), "--save"),
        (("--fix", tmp_path / "full"), "a new or empty folder"),
        (("--baseline", other), "owner/another"),
    ):
        ended = run(*words)
        assert ended.exit_code == 3
        assert told in ended.stderr
    assert made.requests == []


def test_only_a_static_check_can_do_without_the_engine(
    made: FakeCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NEEDS, "check", (Need(module="no_such_module", remedy="pip install it"),))
    ended = run()
    assert ended.exit_code == 3
    assert "pip install it" in ended.output
    assert made.requests == []
    assert run("--static").exit_code == 0
    assert made.requests[0].static_only


def test_help_explains_the_exit_codes() -> None:
    shown = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["check", "--help"])
    assert shown.exit_code == 0
    assert "0 fit, 1 doubtful, 2 unfit" in " ".join(shown.output.split())
