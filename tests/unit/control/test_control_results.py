"""The numbers in docs/live.md are those of the result files."""

import json
from typing import Any

import pytest

from leadout.control.prompt_lookup import MIN_MATCH
from support.models import ROOT


def result(name: str) -> Any:
    return json.loads((ROOT / "results" / "control" / name).read_text())


def page() -> str:
    return " ".join((ROOT / "docs" / "live.md").read_text().split())


@pytest.mark.parametrize(("part", "kinds"), [("chosen_on", 25), ("held_out", 14)])
def test_page_reports_the_distance_from_the_oracle(part: str, kinds: int) -> None:
    simulated = result("simulator.json")
    assert simulated["provenance"]["command"].startswith("python scripts/simulate_control.py")
    fair = [
        cell
        for cell in simulated["cells"]
        if not cell["adversary"] and cell["held_out"] == (part == "held_out")
    ]
    assert len({cell["traffic"] for cell in fair}) == kinds
    assert {cell["batch"] for cell in fair} == {1, 2, 4, 8, 16, 32}
    near = sum(cell["of_oracle"] >= 0.97 for cell in fair)
    mean = sum(cell["of_oracle"] for cell in fair) / len(fair)
    worst = min(cell["of_oracle"] for cell in fair)
    text = f"({kinds} kinds): {near} of {len(fair)} cells; {mean:.3f} on average, {worst:.3f} in"
    assert text in page()


def test_page_names_the_worst_cells() -> None:
    simulated = result("simulator.json")
    below = simulated["held_out"]["below_bound"]
    one_kind = [cell for cell in below if cell[0] == "requests that switch to translation"]
    assert f"Of the {len(below)} cells below, {len(one_kind)} are one kind" in page()
    fair = [cell for cell in simulated["cells"] if not cell["adversary"]]
    assert f"the worst cell has {min(cell['of_bare'] for cell in fair):.3f}" in page()
    lured = min(cell["of_bare"] for cell in simulated["cells"] if cell["adversary"])
    assert f"{lured:.2f} of a bare engine in the worst cell" in page()


def test_wrong_prior_lasts_less_than_200_steps() -> None:
    found = result("simulator.json")["wrong_prior_steps"].values()
    longest = max(steps for cells in found for steps in cells.values())
    assert longest < 200
    assert f"lasts {longest} steps at most" in page()


def test_decision_for_64_requests_takes_less_than_200_microseconds() -> None:
    assert result("simulator.json")["decision_microseconds"]["64"]["decide_median"] < 200


def test_page_reports_the_acceptance_of_prompt_lookup() -> None:
    copying = result("copying.json")
    assert copying["provenance"]["command"].startswith("python scripts/measure_copying.py")
    row = copying["by_match"][str(MIN_MATCH)]["all"]
    share, accepted = f"{100 * row['offered']:.0f}%", f"{row['stood_per_offer']:.1f}"
    text = f"{share} of the steps have such a draft, and {accepted} of its 7 tokens are accepted"
    assert text in page()


def test_page_reports_the_speed_on_a_real_server() -> None:
    found = json.loads((ROOT / "results" / "live" / "smollm2.json").read_text())
    assert found["provenance"]["command"].startswith("python scripts/measure_live.py")
    one, eight = (found["traffic"]["ratios"][at] for at in ("1", "8"))
    for text in (
        f"{one['to_each_arm_over_all']['bare']:.2f} times as fast as bare vLLM with one request",
        f"{eight['to_each_arm_over_all']['bare']:.2f} times with eight",
        f"{one['overall']:.2f} and {eight['overall']:.2f} times as fast as the tuned table",
        f"{found['phase_worst_ratio']:.2f} of the best fixed length",
    ):
        assert text in page()
    readme = " ".join((ROOT / "README.md").read_text().split())
    over_bare = [each["to_each_arm_over_all"]["bare"] for each in (one, eight)]
    assert f"{over_bare[0]:.2f} times as fast as bare vLLM with one request" in readme
    assert f"and {over_bare[1]:.2f} times with eight" in readme
    useless = [f"{ratio:.2f}" for ratio in found["useless"]["ratios"].values()]
    assert f"{', '.join(useless[:3])} and {useless[3]} of bare vLLM" in page()
    copying = found["copying"]["ratios"]
    assert f"{copying['translation']:.2f} on translation" in page()
    for name in ("summarization", "rag", "coding", "qa", "writing"):
        assert f"{name} {copying[name]:.2f}" in page()
