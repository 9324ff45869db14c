"""The result of a bench that never ran."""

import pytest
from sample_rounds import accepted, drifting_rate, measured, setup

from leadout.bench.results import BenchResult, summarize
from leadout.provenance import Provenance


@pytest.fixture(scope="session")
def result() -> BenchResult:
    given = setup()
    rounds = measured(
        given,
        drifting_rate(1.25),
        lambda cell: accepted(100, 150) if cell.arm == "fixed" else None,
    )
    return summarize(given, rounds, Provenance.of_this_run())
