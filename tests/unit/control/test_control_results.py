"""What the docs say of live control is what its result files say."""

import json
from typing import Any

from leadout.control.copying import LEAST_MATCH
from support.models import ROOT


def result(name: str) -> Any:
    return json.loads((ROOT / "results" / "control" / name).read_text())


def test_the_policy_is_near_the_oracle_in_nearly_every_cell() -> None:
    simulated = result("simulator.json")
    assert simulated["provenance"]["command"].startswith("python scripts/simulate_control.py")
    fair = [cell for cell in simulated["cells"] if not cell["adversary"]]
    near = [cell for cell in fair if cell["of_oracle"] >= 0.97]
    assert len({cell["traffic"] for cell in fair}) >= 20
    assert {cell["batch"] for cell in fair} == {1, 2, 4, 8, 16, 32}
    summary = simulated["summary"]
    assert (summary["cells"], summary["at_least_bound"]) == (len(fair), len(near))
    assert len(near) >= 0.98 * len(fair)
    assert summary["worst"]["of_oracle"] >= 0.95
    told = f"{len(near)} of {len(fair)} cells"
    assert told in (ROOT / "docs" / "live.md").read_text()


def test_a_wrong_prior_lasts_less_than_200_steps() -> None:
    for cells in result("simulator.json")["wrong_prior_steps"].values():
        assert max(cells.values()) < 200


def test_a_decision_for_64_requests_takes_less_than_a_fifth_of_a_millisecond() -> None:
    assert result("simulator.json")["decision_microseconds"]["64"]["decide_median"] < 200


def test_the_least_match_is_the_measured_one() -> None:
    copying = result("copying.json")
    assert copying["provenance"]["command"].startswith("python scripts/measure_copying.py")
    row = copying["by_match"][str(LEAST_MATCH)]["all"]
    share, stood = f"{100 * row['offered']:.0f}%", f"{row['stood_per_offer']:.1f}"
    told = f"{share} of the steps have such a copy, and {stood} of its 7 tokens stand"
    assert told in " ".join((ROOT / "docs" / "live.md").read_text().split())
