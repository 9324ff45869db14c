"""Live control around a policy: caps, copies, outcomes and what is told."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from control_simulator.traffic import MACHINES
from leadout.control.acceptance_model import AcceptanceCurve, Outcome
from leadout.control.policy import Policy
from leadout.engine import live
from leadout.engine.live import LiveControl, read_numbers

MOST = 4
COSTS = MACHINES["cpu"]()


def request(
    name: str, drafts: list[int], text: list[int] | None = None, **arguments: Any
) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=name,
        spec_token_ids=drafts,
        all_token_ids=text or [1, 2, 3],
        sampling_params=SimpleNamespace(extra_args=arguments or None),
    )


class Heard(Policy):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(MOST, COSTS, AcceptanceCurve.of_odds([0.95] * MOST))
        self.outcomes: list[Outcome] = []
        self.seconds: float | None = -1.0

    def observe(self, outcomes: Any, k: int, seconds: float | None) -> None:
        self.outcomes, self.seconds = list(outcomes), seconds
        super().observe(outcomes, k, seconds)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def policy() -> Heard:
    return Heard()


@pytest.fixture
def control(policy: Heard, lines: list[str], tmp_path: Path) -> LiveControl:
    return LiveControl(policy, MOST, tmp_path / "numbers.json", lines.append, copy_match=3)


def test_requests_get_what_they_ask_for(control: LiveControl, lines: list[str]) -> None:
    drafts = [11, 12, 13, 14]
    requests = [
        request("free", drafts),
        request("off", drafts, leadout_draft="off"),
        request("two", drafts, leadout_draft=2),
        request("bad", drafts, leadout_draft="much"),
        request("bad too", drafts, leadout_draft="more"),
    ]
    step, chosen = control.plan(requests)
    assert [each.tokens for each in chosen] == [drafts, [], [11, 12], drafts, drafts]
    assert step.decision.draft == MOST
    control.plan(requests)
    assert len(lines) == 1
    assert "found 'much'" in lines[0]


def test_a_text_that_repeats_itself_is_copied_where_the_drafter_has_nothing(
    control: LiveControl,
) -> None:
    text = [5, 6, 7, 8, 9, 5, 6, 7]
    _, (free, off) = control.plan(
        [request("a", [], text), request("b", [], text, leadout_draft="off")]
    )
    assert free.are_copied
    assert free.tokens == [8, 9, 5, 6]
    assert off.tokens == []


def test_outcomes_are_those_of_what_the_engine_did(control: LiveControl, policy: Heard) -> None:
    requests = [request(name, [11, 12, 13, 14]) for name in ("all", "cut", "gone")]
    step, _ = control.plan(requests)
    control.done(
        step, {"all": 4, "cut": 2, "gone": 4}, {"all": 5, "cut": 2, "new": 3}, is_pure=True
    )
    assert policy.outcomes == [Outcome("all", 4, 4), Outcome("cut", 2, 1)]
    assert policy.seconds is None  # one of them was not there to the end


def test_only_steps_that_do_nothing_else_tell_what_decoding_costs(
    control: LiveControl, policy: Heard
) -> None:
    step, _ = control.plan([request("a", [11])])
    control.done(step, {"a": 1}, {"a": 2}, is_pure=False)
    assert policy.seconds is None
    step, _ = control.plan([request("a", [11])])
    control.done(step, {"a": 1}, {"a": 2}, is_pure=True)
    assert policy.seconds is not None
    assert policy.seconds > 0


def test_overlapping_steps_share_the_time_between_them(
    control: LiveControl, policy: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 10.1, 11.0, 12.5])  # two plans, two ends
    monkeypatch.setattr(live.time, "perf_counter", lambda: next(clock))
    first, _ = control.plan([request("a", [11])])
    second, _ = control.plan([request("a", [11])])
    control.done(first, {"a": 1}, {"a": 2}, is_pure=True)
    assert policy.seconds == pytest.approx(1.0)
    control.done(second, {"a": 1}, {"a": 2}, is_pure=True)
    assert policy.seconds == pytest.approx(1.5)


def test_what_was_done_is_written_and_said(
    control: LiveControl, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LOG_SECONDS", 0.0)
    step, _ = control.plan([request("a", [11, 12])])
    control.done(step, {"a": 2}, {"a": 2}, is_pure=True)
    numbers = read_numbers(tmp_path / "numbers.json")
    assert numbers is not None
    assert (numbers.steps, numbers.made, numbers.verified, numbers.accepted) == (1, 2, 2, 1)
    assert "1 of 2 verified drafts accepted" in lines[-1]
    control.close()
    assert not (tmp_path / "numbers.json").exists()


def test_a_request_that_ended_leaves_nothing_behind(control: LiveControl, policy: Heard) -> None:
    step, _ = control.plan([request("a", [11], leadout_draft=1)])
    control.done(step, {"a": 1}, {"a": 1}, is_pure=True)
    assert policy.acceptance.looks("a") > 0
    control.forget("a")
    assert policy.acceptance.looks("a") == 0
    _, (again,) = control.plan([request("a", [11, 12])])
    assert len(again.tokens) == 2  # another request under the same name
