"""Live servers under faults: no answer changes, none is lost, all end on the pointer's version."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from support.chaos import FAULTS, Chaos, Pace
from support.chaos_world import bare_answers, disk, make_target

SECONDS = 1800.0  # of the long run, at least, until each fault has happened
SHORT = (
    "engine stopped",
    "disk full",
    "disk slow",
    "disk unreachable",
    "registry locked",
    "version refused",
    "learner killed",
)  # about two minutes; the others restart a server, or wait for enough requests
LIMIT_BESIDE_OTHERS = 60.0  # seconds to the pointer's version: other tests run at the same time


@pytest.mark.timeout(14400)
def test_faults_change_no_answer_and_lose_no_request(
    tmp_path: Path, run_engine: Any, nightly: bool
) -> None:
    target = make_target(tmp_path / "target")
    with run_engine(target, max_model_len=256, max_num_seqs=8) as llm:
        expected = bare_answers(llm)
    with disk(tmp_path, may_mount=True) as folder:
        if nightly:
            pace = Pace(slot=60, hold=15, end_limit=900)
        else:
            pace = Pace(slot=8, hold=3, limit=LIMIT_BESIDE_OTHERS, end_limit=900)
        chaos = Chaos(tmp_path, folder, target, expected, pace)
        end = time.monotonic() + SECONDS
        more = itertools.takewhile(lambda _: time.monotonic() < end, itertools.cycle(FAULTS))
        chaos.run(itertools.chain(FAULTS, more) if nightly else SHORT)
        samples, wrong = chaos.wrong_samples()
    assert [each.fault for each in chaos.disturbances if each.lost] == [], chaos.disturbances
    assert {each.fault for each in chaos.disturbances} == set(FAULTS if nightly else SHORT)
    assert all(each.answers > 0 for each in chaos.disturbances)
    assert chaos.traffic.seen.changed == []
    assert all(map(chaos.is_explained, chaos.traffic.seen.failures))
    assert samples > 0
    assert wrong == 0
    assert chaos.growth != [] or not nightly  # of processes that lived long enough
    assert chaos.grown() == []
