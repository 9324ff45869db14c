"""Live control around a policy: limits, prompt lookup, outcomes and metrics."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from control_simulator.traffic import MACHINES
from leadout.control.acceptance_model import AcceptanceCurve
from leadout.control.policy import Policy
from leadout.engine import live
from leadout.engine.counters import write_small
from leadout.engine.live import (
    LiveControl,
    LiveMetrics,
    Step,
    StepReport,
    draft_limit,
    live_metrics_file,
    read_live_metrics,
)

MAX_DRAFTS = 4
COSTS = MACHINES["cpu"].costs()
STEPS = 3000


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (None, 7),
        ({}, 7),
        ({"other": 1}, 7),
        ({"leadout_draft": "off"}, 0),
        ({"leadout_draft": 0}, 0),
        ({"leadout_draft": 3}, 3),
        ({"leadout_draft": "3"}, 3),
        ({"leadout_draft": 99}, 7),
    ],
)
def test_request_may_limit_its_drafts(options: dict[str, object] | None, limit: int) -> None:
    assert draft_limit(options, 7) == limit


@pytest.mark.parametrize("value", ["on", -1, 2.5, True, [], "²", ""])
def test_other_limits_are_rejected(value: object) -> None:
    with pytest.raises(ValueError, match="leadout_draft in vllm_xargs is"):
        draft_limit({"leadout_draft": value}, 7)


def request(
    name: str, drafts: list[int], text: list[int] | None = None, **options: Any
) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=name,
        spec_token_ids=drafts,
        all_token_ids=text or [1, 2, 3],
        sampling_params=SimpleNamespace(extra_args=options or None),
    )


class RecordingPolicy(Policy):
    """Keeps what it observes."""

    def __init__(self) -> None:
        prior = AcceptanceCurve.from_probabilities([0.95] * MAX_DRAFTS)
        super().__init__(MAX_DRAFTS, COSTS, prior)
        self.outcomes: list[tuple[str, int, int]] = []
        self.seconds: float | None = -1.0
        self.k = self.prefill = -1

    def observe(
        self, outcomes: Any, k: int, seconds: float | None, prefill: int = 0, **rest: bool
    ) -> None:
        columns = (outcomes.request_ids, outcomes.verified.tolist(), outcomes.accepted.tolist())
        self.outcomes = list(zip(*columns, strict=True))
        self.k, self.seconds, self.prefill = k, seconds, prefill
        super().observe(outcomes, k, seconds, prefill, **rest)


def done(
    control: LiveControl,
    step: Step,
    verified: dict[str, int],
    sampled: dict[str, int],
    prefill: dict[str, int] | None = None,
    drafted: int = MAX_DRAFTS,
) -> None:
    """Report a step in which each request of `verified` decodes."""
    scheduled = {name: 1 + count for name, count in verified.items()} | (prefill or {})
    control.step_done(step, StepReport(scheduled, verified, sampled, drafted))


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def policy() -> RecordingPolicy:
    return RecordingPolicy()


@pytest.fixture
def control(policy: RecordingPolicy, lines: list[str], tmp_path: Path) -> LiveControl:
    return LiveControl(policy, MAX_DRAFTS, tmp_path / "metrics.json", lines.append, min_match=3)


def test_limits_of_requests_are_kept_and_a_bad_one_is_logged_once(
    control: LiveControl, lines: list[str]
) -> None:
    drafts = [11, 12, 13, 14]
    requests = [
        request("free", drafts),
        request("off", drafts, leadout_draft="off"),
        request("two", drafts, leadout_draft=2),
        request("bad", drafts, leadout_draft="much"),
        request("bad too", drafts, leadout_draft="more"),
    ]
    step, changed = control.plan(requests)
    assert step.decision.verify == (4, 0, 2, 4, 4)
    assert [(each.request_id, tokens) for each, tokens, _ in changed] == [
        ("off", []),
        ("two", [11, 12]),
    ]
    assert step.decision.draft == MAX_DRAFTS
    control.plan(requests)
    assert len(lines) == 1
    assert "leadout_draft in vllm_xargs is 'much', expected 'off' or" in lines[0]


def test_prompt_lookup_is_used_where_the_drafter_has_nothing(control: LiveControl) -> None:
    text = [5, 6, 7, 8, 9, 5, 6, 7]
    _, ((free, tokens, from_lookup),) = control.plan(
        [request("a", [], text), request("b", [], text, leadout_draft="off")]
    )
    assert free.request_id == "a"
    assert from_lookup
    assert tokens == [8, 9, 5, 6]


def test_outcomes_are_those_of_what_the_engine_did(
    control: LiveControl, policy: RecordingPolicy
) -> None:
    requests = [request(name, [11, 12, 13, 14]) for name in ("all", "cut", "gone", "waits")]
    step, _ = control.plan(requests)
    done(
        control,
        step,
        {"all": 4, "cut": 2, "gone": 4},
        {"all": 5, "cut": 2, "new": 3},
        prefill={"new": 100},
        drafted=2,
    )
    # One of the requests was aborted, another not scheduled.
    assert policy.outcomes == [("all", 4, 4), ("cut", 2, 1), ("gone", 0, 0)]
    assert (policy.k, policy.prefill) == (2, 100)


def test_steps_with_and_without_prefill_are_timed(
    control: LiveControl, policy: RecordingPolicy
) -> None:
    for prefill in (0, 300):
        step, _ = control.plan([request("a", [11])])
        done(control, step, {"a": 1}, {"a": 2}, prefill={"long": prefill} if prefill else None)
        assert policy.seconds is not None
        assert policy.seconds > 0
        assert policy.prefill == prefill


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_drafts_are_made_under_permanent_prefill_and_with_half_the_batch_scheduled(
    lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Every draft is accepted; in pipelines each step holds only a part of the batch."""
    clock = [100.0]
    monkeypatch.setattr(live.time, "perf_counter", lambda: clock[0])
    control = LiveControl(Policy(MAX_DRAFTS), MAX_DRAFTS, tmp_path / "m.json", lines.append)
    requests = [request(f"r{number}", []) for number in range(8)]
    drafting = 0
    for number in range(STEPS):
        step, changed = control.plan(requests)
        for each, tokens, _ in changed:
            each.spec_token_ids = tokens
        first = 0 if share == 1.0 or number % 2 else 4
        served = requests[first : first + round(8 * share)]
        verified = {each.request_id: len(each.spec_token_ids) for each in served}
        k = step.decision.draft
        clock[0] += COSTS.verify_seconds(len(served), sum(verified.values()))
        clock[0] += COSTS.draft_seconds(len(served), k) + 0.1
        sampled = {name: 1 + count for name, count in verified.items()}
        done(control, step, verified, sampled, prefill={"long": 256}, drafted=k)
        for each in served:
            each.spec_token_ids = [-1] * k
        drafting += k > 0
    assert drafting >= 0.9 * STEPS


def test_overlapping_steps_share_the_time_between_them(
    control: LiveControl, policy: RecordingPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 10.1, 11.0, 12.5])  # two plans, two ends
    monkeypatch.setattr(live.time, "perf_counter", lambda: next(clock))
    first, _ = control.plan([request("a", [11])])
    second, _ = control.plan([request("a", [11])])
    done(control, first, {"a": 1}, {"a": 2})
    assert policy.seconds == pytest.approx(1.0)
    done(control, second, {"a": 1}, {"a": 2})
    assert policy.seconds == pytest.approx(1.5)


def test_a_step_in_which_the_process_was_stopped_is_not_timed(
    control: LiveControl, policy: RecordingPolicy
) -> None:
    step, _ = control.plan([request("a", [11, 12])])
    os.kill(os.getpid(), signal.SIGCONT)
    done(control, step, {"a": 2}, {"a": 3})
    assert policy.seconds is None
    assert policy.outcomes == [("a", 2, 2)]  # acceptance is learnt all the same
    step, _ = control.plan([request("a", [11, 12])])
    done(control, step, {"a": 2}, {"a": 3})
    assert policy.seconds is not None


def test_a_stop_concerns_the_steps_that_were_running(
    control: LiveControl, policy: RecordingPolicy
) -> None:
    first, _ = control.plan([request("a", [11])])
    second, _ = control.plan([request("a", [11])])  # runs when the first has ended
    os.kill(os.getpid(), signal.SIGCONT)
    done(control, first, {"a": 1}, {"a": 2})
    assert policy.seconds is None
    third, _ = control.plan([request("a", [11])])
    done(control, second, {"a": 1}, {"a": 2})
    assert policy.seconds is not None
    os.kill(os.getpid(), signal.SIGCONT)
    done(control, third, {"a": 1}, {"a": 2})
    assert policy.seconds is None


def test_metrics_are_written_and_logged(
    control: LiveControl, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LOG_SECONDS", 0.0)
    step, _ = control.plan([request("a", [11, 12])])
    done(control, step, {"a": 2}, {"a": 2})
    metrics = read_live_metrics(tmp_path / "metrics.json")
    assert metrics is not None
    assert (metrics.steps, metrics.available) == (1, 2)
    assert (metrics.verified, metrics.accepted) == (2, 1)
    assert metrics.gain == step.decision.gain
    assert "1 of 2 verified drafts accepted" in lines[-1]
    control.close()
    assert not (tmp_path / "metrics.json").exists()


def test_metrics_cover_the_last_minute(
    control: LiveControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now in (100.2, 130.0, 160.0):
        monkeypatch.setattr(live.time, "monotonic", lambda now=now: now)
        step, _ = control.plan([request("a", [11, 12])])
        done(control, step, {"a": 2}, {"a": 2})
    metrics = read_live_metrics(tmp_path / "metrics.json")
    assert metrics is not None
    assert (metrics.steps, metrics.available) == (2, 4)  # the first is a minute old


def test_ended_request_leaves_nothing_behind(control: LiveControl, policy: RecordingPolicy) -> None:
    step, _ = control.plan([request("a", [11], leadout_draft=1)])
    done(control, step, {"a": 1}, {"a": 1})
    assert "a" in policy.acceptance._rows
    control.forget("a")
    assert "a" not in policy.acceptance._rows
    again, _ = control.plan([request("a", [11, 12])])
    assert again.decision.verify == (2,)  # another request with the same id


def test_shares_of_metrics() -> None:
    metrics = LiveMetrics(written=0, steps=3, drafted=12, available=14, verified=7, lookup=1)
    assert metrics.draft_length == 4.0
    assert metrics.skipped_share == pytest.approx(1 - 6 / 14)
    assert metrics.lookup_share == pytest.approx(1 / 7)
    idle = LiveMetrics(written=0, steps=1)
    assert (idle.skipped_share, idle.lookup_share) == (0.0, 0.0)


def test_metrics_file_expires_after_a_minute(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    assert read_live_metrics(path) is None
    fresh = LiveMetrics(written=time.time(), steps=1, drafted=3, gain=2.0)
    write_small(fresh, path)
    assert read_live_metrics(path) == fresh
    assert list(tmp_path.iterdir()) == [path]
    write_small(LiveMetrics(written=time.time() - 61), path)
    assert read_live_metrics(path) is None
    path.write_text('{"written": 1, "else": 2}')
    assert read_live_metrics(path) is None


def test_each_engine_has_a_file_of_its_own() -> None:
    assert live_metrics_file("ab", 0) != live_metrics_file("ab", 1)
    assert live_metrics_file("ab", 0) != live_metrics_file("ac", 0)
