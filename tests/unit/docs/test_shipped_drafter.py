"""Figures in README and docs come from results of the drafter that ships."""

from __future__ import annotations

from typing import Any

import pytest

from leadout.models import fingerprint
from support.shipped_drafter import (
    OTHER_DRAFTERS,
    SHIPPED,
    committed_results,
    problem_of,
)

ANOTHER = "0" * 64


def result_with(**models: str) -> dict[str, Any]:
    return {"provenance": {"command": "leadout bench", "models": models}}


@pytest.mark.parametrize("name", committed_results())
def test_a_result_is_of_the_shipped_drafter(name: str) -> None:
    assert problem_of(name, committed_results()[name]) is None


def test_exceptions_exist() -> None:
    assert OTHER_DRAFTERS.keys() <= committed_results().keys()


def test_a_result_of_another_drafter_is_refused() -> None:
    shipped = fingerprint(SHIPPED)
    assert problem_of("bench/new.json", result_with(target=ANOTHER, drafter=shipped)) is None
    found = problem_of("bench/new.json", result_with(drafter=ANOTHER))
    assert found == "bench/new.json was made with another drafter: 000000000000"
    both = {"drafter": shipped, "drafter reduced": ANOTHER}
    assert "another drafter" in str(problem_of("bench/new.json", result_with(**both)))


def test_a_tuned_file_of_another_drafter_is_refused() -> None:
    tuned = {"provenance": {"command": "x"}, "drafter": {"name": "a", "fingerprint": ANOTHER}}
    assert "another drafter" in str(problem_of("bench/new-tuned.json", tuned))


def test_a_result_that_does_not_name_its_drafter_is_refused() -> None:
    assert "does not name" in str(problem_of("bench/new.json", result_with(target=ANOTHER)))
    assert "does not name" in str(problem_of("bench/new.json", {"provenance": {"command": "x"}}))
