"""Acceptance over the last minute, the break-even warning, and live control's gauges.

The tests set the clock. The stat logger as a whole is in the engine tests.
"""

import time
from pathlib import Path

import pytest

from leadout.engine.counters import write_small
from leadout.engine.live import LiveMetrics
from leadout.engine.metrics import (
    LIVE_GAUGES,
    MIN_DRAFTS,
    AcceptanceWindow,
    BreakEvenWarning,
    add_live_metrics,
    live_families,
)

BREAK_EVEN, MINUTES = 1.1, 3.0
GOOD, BAD = 1.5, 1.0


def test_without_drafts_there_is_no_acceptance() -> None:
    window = AcceptanceWindow()
    assert window.acceptance_length(5.0) is None
    assert window.acceptance_per_position(5.0) == []


def test_acceptance_is_averaged_over_all_drafts_of_the_window() -> None:
    window = AcceptanceWindow()
    window.add_drafts(10.2, drafts=3, draft_tokens=9, accepted=4, by_position=[2, 1, 1])
    window.add_drafts(10.9, drafts=1, draft_tokens=3, accepted=3, by_position=[1, 1, 1])
    window.add_drafts(40.0, drafts=4, draft_tokens=12, accepted=1, by_position=[1, 0, 0])
    assert window.acceptance_length(41.0) == 1 + 8 / 8
    assert window.acceptance_per_position(41.0) == [4 / 8, 2 / 8, 2 / 8]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (59.9, 1 + 4 / 3),
        (60.0, 1 + 1 / 2),  # second 0 has expired
        (88.9, 1 + 1 / 2),
        (89.0, None),
        (10_000.0, None),
    ],
)
def test_a_second_expires_after_a_minute(now: float, expected: float | None) -> None:
    window = AcceptanceWindow()
    window.add_drafts(0.5, drafts=1, draft_tokens=3, accepted=3, by_position=[1, 1, 1])
    window.add_drafts(29.0, drafts=2, draft_tokens=6, accepted=1, by_position=[1, 0, 0])
    assert window.acceptance_length(now) == expected
    assert (window.acceptance_per_position(now) == []) is (expected is None)


class Traffic:
    """One step per second through a window and a warning; collects the warnings and their times."""

    def __init__(self) -> None:
        self.window = AcceptanceWindow()
        self.warning = BreakEvenWarning(BREAK_EVEN, MINUTES, remedy="do something")
        self.now = 1000.0
        self.warnings: list[tuple[float, str]] = []

    def run(self, seconds: int, acceptance_length: float, drafts: int = 20) -> None:
        for _ in range(seconds):
            self.now += 1
            accepted = round(drafts * (acceptance_length - 1))
            self.window.add_drafts(self.now, drafts, 3 * drafts, accepted, [accepted, 0, 0])
            warning = self.warning.observe(self.now, self.window)
            if warning is not None:
                self.warnings.append((self.now - 1000.0, warning))

    def pause(self, seconds: int) -> None:
        self.now += seconds


# (seconds, acceptance length, drafts per second), where no drafts are a pause, and the number of
# warnings. Twenty drafts per second are enough evidence after ten seconds, and the window delays
# every change a little.
HISTORIES: dict[str, tuple[list[tuple[int, float, int]], int]] = {
    "good all along": ([(1000, GOOD, 20)], 0),
    "exactly break-even": ([(1000, 1.1, 20)], 0),
    "bad, but not for long enough": ([(180, BAD, 20)], 0),
    "bad for long enough": ([(200, BAD, 20)], 1),
    "bad all along": ([(3000, BAD, 20)], 1),
    "too few drafts as evidence": ([(3000, BAD, 3)], 0),
    "just enough drafts as evidence": ([(3000, BAD, 4)], 1),
    "recovered in between": ([(150, BAD, 20), (60, GOOD, 20), (150, BAD, 20)], 0),
    "quiet in between": ([(120, BAD, 20), (60, BAD, 1), (120, BAD, 20)], 0),
    "bad, paused, bad": ([(150, BAD, 20), (600, BAD, 0), (150, BAD, 20)], 0),
    # One step with enough evidence before and after a pause says nothing about the pause.
    "a burst, paused, a burst": ([(1, BAD, 500), (600, BAD, 0), (1, BAD, 500)], 0),
    "a short pause is bridged": ([(100, BAD, 20), (30, BAD, 0), (100, BAD, 20)], 1),
    "good for too short to re-arm": ([(250, BAD, 20), (120, GOOD, 20), (250, BAD, 20)], 1),
    "re-armed": ([(250, BAD, 20), (300, GOOD, 20), (300, BAD, 20)], 2),
    "a pause does not re-arm": ([(250, BAD, 20), (900, BAD, 0), (300, BAD, 20)], 1),
    "re-armed twice": ([(250, BAD, 20), (300, GOOD, 20)] * 2 + [(300, BAD, 20)], 3),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_number_of_warnings(name: str) -> None:
    history, warnings = HISTORIES[name]
    traffic = Traffic()
    for seconds, acceptance_length, drafts in history:
        if drafts:
            traffic.run(seconds, acceptance_length, drafts)
        else:
            traffic.pause(seconds)
    assert len(traffic.warnings) == warnings


def test_the_warning_comes_after_the_minutes_and_names_the_remedy() -> None:
    traffic = Traffic()
    traffic.run(600, acceptance_length=1.05)
    [(seconds, warning)] = traffic.warnings
    evidence = MIN_DRAFTS / 20  # the time counts from the first second with enough drafts
    assert seconds == evidence + 60 * MINUTES
    for part in ("3 minutes", "1.05 tokens", "60 of 3600", "1.1", "LEADOUT_BREAK_EVEN"):
        assert part in warning
    assert warning.endswith("Drafts cost more than they gain; do something.")


def settings(**environment: str) -> BreakEvenWarning:
    return BreakEvenWarning.from_environment(environment, remedy="do something")


@pytest.mark.parametrize(
    ("environment", "acceptance_length", "first_warning"),
    [
        ({}, 1.05, 190.0),
        ({}, 1.15, None),
        ({"LEADOUT_BREAK_EVEN": "2.5"}, 2.0, 190.0),
        ({"LEADOUT_BREAK_EVEN": "1"}, 1.0, None),
        ({"LEADOUT_BREAK_EVEN_MINUTES": "0.5"}, 1.05, 40.0),
        ({"LEADOUT_BREAK_EVEN_MINUTES": "0"}, 1.05, 10.0),
    ],
)
def test_settings_come_from_the_environment(
    environment: dict[str, str], acceptance_length: float, first_warning: float | None
) -> None:
    traffic = Traffic()
    traffic.warning = settings(**environment)
    traffic.run(600, acceptance_length)
    assert [seconds for seconds, _ in traffic.warnings] == (
        [first_warning] if first_warning else []
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LEADOUT_BREAK_EVEN", "much"),
        ("LEADOUT_BREAK_EVEN", "0.9"),
        ("LEADOUT_BREAK_EVEN", "nan"),
        ("LEADOUT_BREAK_EVEN", ""),
        ("LEADOUT_BREAK_EVEN_MINUTES", "-1"),
        ("LEADOUT_BREAK_EVEN_MINUTES", "inf"),
    ],
)
def test_an_invalid_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}, expected a number of at least"):
        settings(**{name: value})


def test_live_gauges_show_the_metrics_file_of_an_engine(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    gauges = live_families()
    add_live_metrics(gauges, ["model", "0"], path)
    assert not any(gauge.samples for gauge in gauges)
    metrics = LiveMetrics(
        written=time.time(), steps=1, drafted=3, available=4, verified=4, lookup=1, probes=2
    )
    write_small(metrics, path)
    add_live_metrics(gauges, ["model", "0"], path)
    shown = {gauge.name: [sample.value for sample in gauge.samples] for gauge in gauges}
    assert shown == {
        "leadout:draft_length": [3.0],
        "leadout:skipped_drafts": [0.25],
        "leadout:copied_drafts": [0.25],
        "leadout:probes": [2.0],
        "leadout:estimated_gain": [],  # unknown so far
    }
    assert list(shown) == list(LIVE_GAUGES)
