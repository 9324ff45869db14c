"""The last minute's acceptance, and the warning about it, on a clock that the tests turn."""

import tracemalloc

import pytest

from leadout.engine.metrics import LEAST_DRAFTS, AcceptanceWindow, BelowBreakEven

BREAK_EVEN, MINUTES = 1.1, 3.0
GOOD, BAD = 1.5, 1.0


def test_no_drafts_give_no_acceptance() -> None:
    window = AcceptanceWindow()
    assert window.acceptance_length(5.0) is None
    assert window.acceptance_per_position(5.0) == []


def test_acceptance_is_over_all_drafts_of_the_window() -> None:
    window = AcceptanceWindow()
    window.add(10.2, drafts=3, draft_tokens=9, accepted=4, accepted_per_position=[2, 1, 1])
    window.add(10.9, drafts=1, draft_tokens=3, accepted=3, accepted_per_position=[1, 1, 1])
    window.add(40.0, drafts=4, draft_tokens=12, accepted=1, accepted_per_position=[1, 0, 0])
    assert window.acceptance_length(41.0) == 1 + 8 / 8
    assert window.acceptance_per_position(41.0) == [4 / 8, 2 / 8, 2 / 8]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (59.9, 1 + 4 / 3),
        (60.0, 1 + 1 / 2),  # the second 0 is gone
        (88.9, 1 + 1 / 2),
        (89.0, None),
        (10_000.0, None),
    ],
)
def test_a_second_is_forgotten_after_a_minute(now: float, expected: float | None) -> None:
    window = AcceptanceWindow()
    window.add(0.5, drafts=1, draft_tokens=3, accepted=3, accepted_per_position=[1, 1, 1])
    window.add(29.0, drafts=2, draft_tokens=6, accepted=1, accepted_per_position=[1, 0, 0])
    assert window.acceptance_length(now) == expected
    assert (window.acceptance_per_position(now) == []) is (expected is None)


def test_memory_does_not_grow_with_traffic() -> None:
    def run(window: AcceptanceWindow, start: int, seconds: int) -> None:
        for step in range(start * 20, (start + seconds) * 20):
            window.add(step / 20, 1, 3, 1, [1, 0, 0])

    window = AcceptanceWindow()
    run(window, 0, 120)
    tracemalloc.start()
    run(window, 120, 600)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 30_000
    assert window.total(720.0).drafts == 59 * 20


class Traffic:
    """One step per second through a window and a verdict; collects the warnings and their times."""

    def __init__(self) -> None:
        self.window = AcceptanceWindow()
        self.verdict = BelowBreakEven(BREAK_EVEN, MINUTES, remedy="do something")
        self.now = 1000.0
        self.warnings: list[tuple[float, str]] = []

    def run(self, seconds: int, acceptance_length: float, drafts: int = 20) -> None:
        for _ in range(seconds):
            self.now += 1
            accepted = round(drafts * (acceptance_length - 1))
            self.window.add(self.now, drafts, 3 * drafts, accepted, [accepted, 0, 0])
            warning = self.verdict.observe(self.now, self.window)
            if warning is not None:
                self.warnings.append((self.now - 1000.0, warning))

    def pause(self, seconds: int) -> None:
        self.now += seconds


# What happened, as (seconds, acceptance length, drafts per second) or a pause, and how often it
# warned. Twenty drafts per second are enough evidence after ten seconds, and the window carries
# every change on for some more.
HISTORIES: dict[str, tuple[list[tuple[int, float, int]], int]] = {
    "good all along": ([(1000, GOOD, 20)], 0),
    "exactly break-even": ([(1000, 1.1, 20)], 0),
    "bad, but not for long enough": ([(180, BAD, 20)], 0),
    "bad for long enough": ([(200, BAD, 20)], 1),
    "bad for ever": ([(3000, BAD, 20)], 1),
    "too few drafts to tell": ([(3000, BAD, 3)], 0),
    "just enough drafts to tell": ([(3000, BAD, 4)], 1),
    "recovered in between": ([(150, BAD, 20), (60, GOOD, 20), (150, BAD, 20)], 0),
    "quiet in between": ([(120, BAD, 20), (60, BAD, 1), (120, BAD, 20)], 0),
    "bad, paused, bad": ([(150, BAD, 20), (600, BAD, 0), (150, BAD, 20)], 0),
    # One step with all the evidence needed, before and after a pause: no word about between.
    "a burst, paused, a burst": ([(1, BAD, 500), (600, BAD, 0), (1, BAD, 500)], 0),
    "a short pause is bridged": ([(100, BAD, 20), (30, BAD, 0), (100, BAD, 20)], 1),
    "good for too short to re-arm": ([(250, BAD, 20), (120, GOOD, 20), (250, BAD, 20)], 1),
    "re-armed": ([(250, BAD, 20), (300, GOOD, 20), (300, BAD, 20)], 2),
    "a pause does not re-arm": ([(250, BAD, 20), (900, BAD, 0), (300, BAD, 20)], 1),
    "re-armed twice": ([(250, BAD, 20), (300, GOOD, 20)] * 2 + [(300, BAD, 20)], 3),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_warnings(name: str) -> None:
    history, warnings = HISTORIES[name]
    traffic = Traffic()
    for seconds, acceptance_length, drafts in history:
        if drafts:
            traffic.run(seconds, acceptance_length, drafts)
        else:
            traffic.pause(seconds)
    assert len(traffic.warnings) == warnings


def test_the_warning_comes_after_the_minutes_and_says_what_to_do() -> None:
    traffic = Traffic()
    traffic.run(600, acceptance_length=1.05)
    [(seconds, warning)] = traffic.warnings
    evidence = LEAST_DRAFTS / 20  # the time counts from the first second with enough drafts
    assert seconds == evidence + 60 * MINUTES
    for part in ("3 minutes", "1.05 tokens", "60 of 3600", "1.1", "LEADOUT_BREAK_EVEN"):
        assert part in warning
    assert warning.endswith("Drafts cost more than they gain; do something.")


def settings(**environment: str) -> BelowBreakEven:
    return BelowBreakEven.from_environment(environment, remedy="do something")


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
    traffic.verdict = settings(**environment)
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
def test_a_wrong_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}, wanted a number of at least"):
        settings(**{name: value})
