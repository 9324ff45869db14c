"""Progress on a terminal and in a log file, and tables of text that came from files."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from leadout import console as module
from leadout.console import Progress, facts_table, table


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def log_file() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def test_progress_is_shown_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("check") as progress:
        advance = progress.stage("texts of the target", 2)
        advance()
        advance()
    out, err = capsys.readouterr()
    assert out == ""
    assert "leadout check: texts of the target" in err


def test_a_log_file_gets_a_line_every_half_minute(clock: Clock) -> None:
    console = log_file()
    with Progress("train", console=console) as progress:
        advance = progress.stage("training", 100)
        for _ in range(8):
            clock.now += 11
            advance(note="loss 1.25")
    assert text_of(console).splitlines() == [
        "leadout train: training",
        "leadout train: training 3/100, 0:17:47 left, loss 1.25",
        "leadout train: training 6/100, 0:17:14 left, loss 1.25",
    ]


def test_a_log_file_gets_a_line_for_each_tenth_of_the_work(clock: Clock) -> None:
    console = log_file()
    with Progress("train", console=console) as progress:
        advance = progress.stage("training", 6)
        for _ in range(6):
            clock.now += 8
            advance()
    lines = text_of(console).splitlines()
    assert len(lines) == 7
    assert lines[-1] == "leadout train: training 6/6, 0:00:48"


def test_fast_steps_do_not_flood_a_log_file(clock: Clock) -> None:
    console = log_file()
    with Progress("check", console=console) as progress:
        advance = progress.stage("files", 1000)
        for _ in range(1000):
            clock.now += 0.001
            advance()
    assert text_of(console).splitlines() == ["leadout check: files"]


def test_steps_of_an_earlier_run_do_not_count_for_the_pace(clock: Clock) -> None:
    console = log_file()
    with Progress("data", console=console) as progress:
        advance = progress.stage("samples", 100, done=90)
        clock.now += 40
        advance(5)
    assert text_of(console).splitlines()[-1] == "leadout data: samples 95/100, 0:00:40 left"


def test_the_remaining_time_fits_into_80_columns(clock: Clock) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with Progress("train", console=console) as progress:
        advance = progress.stage("a stage whose name is much longer than its column", 10_000)
        clock.now += 60
        advance(100, note="loss 1.250, 1.98 tokens per step on held-out text, and more")
    (line,) = [line for line in text_of(console).splitlines() if "left" in line][-1:]
    assert "100/10000" in line
    assert "1:39:00 left" in line
    assert "loss 1.2" in line


def test_silent_progress_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress.silent() as progress:
        progress.say("a line")
        progress.stage("a stage", 1)()
    assert capsys.readouterr() == ("", "")


def test_work_of_unknown_length(clock: Clock) -> None:
    console = log_file()
    with Progress("data", console=console) as progress:
        advance = progress.stage("starting the engine")
        clock.now += 31
        advance(0)
    assert text_of(console).splitlines()[-1] == "leadout data: starting the engine, 0:00:31"


def test_text_from_files_is_neither_markup_nor_control_characters() -> None:
    console = log_file()
    console.print(table("title", ["name", "count"], [["[bold]x\x1b[31m", "1"]]))
    console.print(facts_table([("label", "\x1b[2J[red]value")]))
    text = text_of(console)
    assert "\x1b" not in text
    assert "[bold]x" in text
    assert "[red]value" in text
