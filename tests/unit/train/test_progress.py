"""What a person sees of a run, on a terminal and in a log file."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from leadout.evaluate.acceptance import Acceptance, Validation
from leadout.train import progress as show
from leadout.train.progress import LINE_EVERY_STEPS, StepRecord, TrainProgress, ValidationRecord


def step(number: int) -> StepRecord:
    return StepRecord(
        step=number,
        seconds=60.0 * number,
        loss=2.5,
        learning_rate=1e-3,
        gradient_norm=0.5,
        blocks_per_second=100.0,
        drafts_hit=1.25,
    )


def validation(number: int) -> ValidationRecord:
    found = Acceptance(
        acceptance_length=1.75, by_position=[], steps=9, every_position=1.5, positions=9
    )
    whole = Validation(overall=found, by_source={"a": found})
    return ValidationRecord(step=number, seconds=60.0 * number, validation=whole)


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool, speaks: bool = True) -> str:
    written = io.StringIO()

    def console(**settings: object) -> Console:
        return Console(
            file=written, force_terminal=terminal, width=150, quiet=bool(settings["quiet"])
        )

    monkeypatch.setattr(show, "Console", console)
    with TrainProgress(40, speaks) as progress:
        for number in range(1, LINE_EVERY_STEPS + 1):
            progress(step(number))
        progress(validation(LINE_EVERY_STEPS))
    return written.getvalue()


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, terminal=True)
    assert "step 20/40" in text
    assert "held-out acceptance length 1.750" in text


def test_a_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, terminal=False).splitlines()
    assert lines == [
        "step 20, 20.0 min, loss 2.500, 1.25 on training text, no validation yet",
        "step 20, 20.0 min: held-out acceptance length 1.750",
    ]


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, terminal=False, speaks=False) == ""
