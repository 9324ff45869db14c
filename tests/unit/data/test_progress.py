"""Progress tells the pace and the time left, on a terminal and in a log."""

from __future__ import annotations

import time

import pytest

from leadout.data import generate as show
from leadout.shards import Sample


def test_a_log_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    sample = Sample(id="a", source="s", prompt=[1], response=[1] * 100, temperature=0.0)
    with show.DataProgress() as progress:
        progress.report(50, 110, None)
        clock += 500  # the engine starts, which is not the pace of its answers
        progress.report(50, 110, None)
        for done in range(51, 71):
            clock += 2
            progress.report(done, 110, sample)
    lines = capsys.readouterr().err.splitlines()
    # 100 tokens in 2 seconds; of the first line, 59 samples are left.
    assert lines == [
        "samples 51/110, 50 tokens/s, 0:01:58 left",
        "samples 67/110, 50 tokens/s, 0:01:26 left",
    ]
