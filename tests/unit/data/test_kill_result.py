"""The committed proof: ten kills, most of them amid the answers, and nothing lost or doubled."""

import json

from support.models import ROOT


def test_ten_kills_left_the_samples_of_an_undisturbed_run() -> None:
    result = json.loads((ROOT / "results" / "data" / "kill.json").read_text())
    assert result["provenance"]["command"].startswith("python scripts/kill_data.py")
    assert result["equal"] is True
    assert result["same_manifest"] is True
    assert result["missing"] == result["different"] == 0
    assert result["samples"] == result["samples_after_kills"] > 500
    kills = result["kills"]
    assert len(kills) == 10
    assert sum(kill["new_samples"] > 0 for kill in kills) >= 5
    assert kills[-1]["samples"] < result["samples"]  # the last one too came before the end
