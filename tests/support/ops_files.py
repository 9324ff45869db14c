"""What the files under ops/ ask of a server and of Prometheus."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from support.models import ROOT

OPS = ROOT / "ops"
_METRIC = re.compile(r"\b(?:vllm|leadout):[a-z0-9_:]+")


def dashboard() -> Any:
    return json.loads((OPS / "grafana" / "leadout.json").read_text())


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((OPS / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_queries() -> list[str]:
    """PromQL of all panels, with Grafana's variables filled in."""
    found = [
        target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])
    ]
    filled = {"$__rate_interval": "5m", "$model": ".*", "$instance": ".*"}
    for name, value in filled.items():
        found = [expression.replace(name, value) for expression in found]
    return found


def scraped_metrics() -> set[str]:
    """Names that a server must have: used by a rule or a panel, and recorded by no rule."""
    expressions = [*dashboard_queries(), *(rule["expr"] for rule in rules())]
    expressions += [each["definition"] for each in dashboard()["templating"]["list"][1:]]
    used = {name for expression in expressions for name in _METRIC.findall(expression)}
    return used - {rule["record"] for rule in rules() if "record" in rule}


def shutdown_timeout() -> str:
    """The flag by which the servers of the Kubernetes example finish running requests."""
    manifests = (OPS / "kubernetes" / "serving" / "deployment.yaml").read_text()
    deployment = next(yaml.safe_load_all(manifests))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (flag,) = [arg for arg in container["args"] if arg.startswith("--shutdown-timeout=")]
    return str(flag)
