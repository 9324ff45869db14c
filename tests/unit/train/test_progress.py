"""What a user sees of a run, on a terminal and in a log file; the README and message at its end."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from leadout import console
from leadout.console import Progress
from leadout.evaluate.acceptance import Acceptance, Validation
from leadout.train.progress import StepRecord, ValidationRecord, progress_listener
from support.small_runs import KilledError, MakeRun


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


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setattr(console, "MIN_LINE_SECONDS", 0.0)

    def show(run: object, *records: StepRecord | ValidationRecord, terminal: bool) -> str:
        written = io.StringIO()
        screen = Console(file=written, force_terminal=terminal, width=80, highlight=False)
        with Progress("train", console=screen) as progress:
            listen = progress_listener(progress, run)  # type: ignore[arg-type]
            for record in records:
                listen(record)
        return written.getvalue()

    return show


def test_a_terminal_shows_the_time_left_in_80_columns(
    make_run: MakeRun, shown: Callable[..., str]
) -> None:
    text = shown(make_run(), step(1), validation(1), step(2), terminal=True)
    assert "2/7" in text
    assert " left" in text
    assert "loss 2.50, acceptance 1.75" in text
    assert "held-out acceptance length 1.750" in text


def test_a_log_file_gets_lines_with_the_latest_acceptance(
    make_run: MakeRun, shown: Callable[..., str]
) -> None:
    lines = shown(make_run(), step(1), validation(1), step(2), terminal=False).splitlines()
    assert lines[0] == "leadout train: training"
    assert lines[1].startswith("leadout train: training 1/7, ")
    assert lines[2] == "leadout train: step 1 of 7, 1.0 min: held-out acceptance length 1.750"
    assert lines[3].endswith("left, loss 2.50, acceptance 1.75")


def test_the_first_epoch_says_that_it_computes_states(
    make_run: MakeRun, shown: Callable[..., str]
) -> None:
    expected = "computing the target's hidden states during the first epoch"
    run = make_run(states="disk", epochs=1.5)
    assert expected in shown(run, terminal=False)
    run.train(lambda _: None)
    assert expected not in shown(make_run(states="disk", epochs=1.5), terminal=False)
    assert expected not in shown(make_run("computed", states="compute"), terminal=False)


def test_a_resumed_run_shows_its_last_validation(
    make_run: MakeRun, shown: Callable[..., str]
) -> None:
    def dies(record: StepRecord | ValidationRecord) -> None:
        if record.step == 5:
            raise KilledError

    with pytest.raises(KilledError):
        make_run().train(dies)
    text = shown(make_run(), step(5), terminal=False)  # saved at step 4, validated at step 3
    assert "continuing after step 4; held-out acceptance length 1." in text
    assert "at step 3" in text
    assert "training 5/7" in text
    assert ", acceptance 1." in text.splitlines()[-1]
