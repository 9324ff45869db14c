"""The dashboard file is whole: panels apart, each with a query, every gauge of ours on it."""

from itertools import combinations
from typing import Any

import pytest

from leadout.engine.metrics import LIVE_GAUGES, acceptance_families, request_family
from support.ops_files import dashboard, dashboard_queries


@pytest.fixture(scope="module")
def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = dashboard()["panels"]
    return found


def test_panels_do_not_overlap_and_have_numbers_of_their_own(panels: list[dict[str, Any]]) -> None:
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_every_panel_asks_something_of_the_chosen_source(panels: list[dict[str, Any]]) -> None:
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert "$instance" in target["expr"] or target["expr"] == "leadout:break_even"
    variables = {each["name"] for each in dashboard()["templating"]["list"]}
    assert variables == {"datasource", "model", "instance"}


def test_every_gauge_of_ours_is_shown() -> None:
    queries = " ".join(dashboard_queries())
    others = (*acceptance_families(), request_family())
    for name in (*(family.name for family in others), *LIVE_GAUGES):
        assert name in queries
