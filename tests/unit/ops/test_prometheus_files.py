"""Prometheus' own tool accepts the files, every alert fires in its case, every query parses."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from leadout.engine.metrics import DEFAULT_BREAK_EVEN, MIN_DRAFTS
from support.ops_files import OPS, dashboard_queries, rules, scraped_metrics

PROMETHEUS = OPS / "prometheus"


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None and "LEADOUT_CI" not in os.environ:
        pytest.skip("promtool is not installed (Debian: apt install prometheus)")
    assert found is not None, "CI must have promtool: see .ci/environment"
    return found


def run(promtool: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool, *words], capture_output=True, text=True)


def test_the_config_and_its_rules_are_valid(promtool: str) -> None:
    checked = run(promtool, "check", "config", PROMETHEUS / "prometheus.yml")
    assert checked.returncode == 0, checked.stderr
    assert f"{len(rules())} rules found" in checked.stdout


def test_every_alert_fires_and_stays_silent_in_its_cases(promtool: str) -> None:
    tested = run(promtool, "test", "rules", PROMETHEUS / "alerts_test.yml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_the_cases_are_not_empty_words(promtool: str, tmp_path: Path) -> None:
    text = (PROMETHEUS / "alerts.yml").read_text()
    for before, after in (("vector(1.1)", "vector(1.0)"), ("0.9 *", "0.5 *"), ("0.8 *", "0.5 *")):
        assert before in text
        (tmp_path / "alerts.yml").write_text(text.replace(before, after))
        shutil.copy(PROMETHEUS / "alerts_test.yml", tmp_path)
        assert run(promtool, "test", "rules", tmp_path / "alerts_test.yml").returncode != 0


def test_every_alert_has_both_cases() -> None:
    cases = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    asked = [rule for case in cases for rule in case["alert_rule_test"]]
    for alert in (rule["alert"] for rule in rules() if "alert" in rule):
        fires = {bool(each["exp_alerts"]) for each in asked if each["alertname"] == alert}
        assert fires == {True, False}, alert


def test_every_query_of_the_dashboard_parses(promtool: str, tmp_path: Path) -> None:
    recorded = [
        {"record": f"panel:{number}", "expr": query}
        for number, query in enumerate(dashboard_queries())
    ]
    assert len(recorded) > 20
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    checked = run(promtool, "check", "rules", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_rules_and_server_agree_on_what_is_too_little() -> None:
    by_name = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
    assert by_name["leadout:break_even"] == f"vector({DEFAULT_BREAK_EVEN})"
    assert f">= {MIN_DRAFTS}" in by_name["leadout:acceptance_length:rate5m"]


def test_only_vllms_and_our_metrics_are_asked_for() -> None:
    names = scraped_metrics()
    assert "vllm:spec_decode_num_drafts_total" in names
    assert "leadout:acceptance_length" in names
    assert "leadout:break_even" not in names  # a rule makes it
