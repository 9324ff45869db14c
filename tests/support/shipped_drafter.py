"""Which results were made with a drafter that ships, by the fingerprints that they name.

Every committed result that has a drafter must name a shipped one, because README and docs state
it as a result of that drafter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from leadout.models import fingerprint
from support.models import ROOT

RESULTS = ROOT / "results"
SHIPPED = ROOT / "drafters" / "smollm2-135m-instruct-dflash"
# Not in the source distribution, for its size.
SHIPPED_FOR_QWEN = ROOT / "drafters" / "qwen2.5-coder-1.5b-int8-dflash"

# Results that are not about the shipped drafter, which the pages say where they show them.
OTHER_DRAFTERS = {
    "bench/method.json": "bare vLLM against itself, without a drafter",
    "bench/random-tuned.json": "a useless drafter with random weights",
    "control/copying.json": "prompt lookup, without a drafter",
    "control/simulator.json": "simulated acceptance and costs",
    "data/endpoints.json": "text of a tiny target, without a drafter",
    "data/kill.json": "text of a tiny target, without a drafter",
    "faults/tiny.json": "tiny drafters with seeded faults",
    "gpu/dispatch.json": "replayed steps with made-up acceptance, without weights",
    "gpu/resolution.json": "settings that vLLM resolves for a tiny pair with random weights",
    "learn/gate.json": "prepared candidates for a tiny target",
    "learn/gate_cycles.json": "simulated candidates",
    "learn/gate_noise.json": "two candidates that were trained from the shipped drafter",
    "live/ablation.json": "simulated acceptance and costs",
    "live/budget.json": "made-up acceptance, without an engine",
    "live/useless.json": "a drafter with random weights",
    "lossless/smollm2.json": "drafts that are never and always accepted",
    "reliability/adversary.json": "simulated requests, with measured acceptance",
    "make/qwen2.5-coder-1.5b-plan.json": "a plan, before there is a drafter",
    "quickstart/answer.json": "an answer of the target",
    "reliability/chaos.json": "random drafters for a tiny target",
    "reliability/faults.json": "the table of the other results in its folder",
    "reliability/fuzz.json": "damaged files and replies, without a drafter",
    "reliability/kills_capture.json": "captured traffic, without a drafter",
    "reliability/kills_learner.json": "drafters for a tiny target",
    "reliability/kills_registry.json": "files that stand for a drafter",
    "reliability/kills_swap.json": "random drafters for a tiny target",
    "reliability/privacy.json": "a drafter for a tiny target",
    "reliability/registry_faults.json": "files that stand for a drafter",
    "reliability/registry_history.json": "files that stand for a drafter",
    "reliability/requests.json": "a random drafter for a tiny target",
    "reliability/sigterm.json": "a random drafter for a tiny target",
    "states/kill.json": "a drafter for a tiny target",
    "states/parity.json": "hidden states of targets, and drafters for a tiny one",
    "swap/size.json": "random weights of several sizes",
    "train/ablations.json": "short runs that differ in one setting each",
    "train/against_speculators.json": "short runs of two trainers for a tiny target",
    "train/against_speculators_one_seed.json": "short runs of two trainers",
    "train/from_target_layers.json": "the first drafter's own training",
    "train/kill.json": "a drafter for a tiny target",
    "train/kill_ranks.json": "a drafter for a tiny target",
    "train/memory.json": "drafters of a few steps",
    "train/proxies.json": "short runs that differ in one setting each",
    "train/speed.json": "drafters of a few steps",
    "train/text_limit.json": "the shipped drafter at the start of a run that did not pay",
}


def drafters_of(result: Any) -> set[str]:
    """Fingerprints of the drafters that a result names, in its provenance or as a tuned file."""
    models = (result.get("provenance") or {}).get("models") or {}
    found = {print_ for role, print_ in models.items() if role.split()[0] == "drafter"}
    tuned = result.get("drafter")
    return found | ({tuned["fingerprint"]} if isinstance(tuned, dict) else set())


def problem_of(name: str, result: Any) -> str | None:
    """Why a result may not be shown as one of the shipped drafter."""
    drafters = drafters_of(result)
    if name in OTHER_DRAFTERS:
        return None
    if not drafters:
        return f"{name} does not name its drafter: record its fingerprint in the provenance"
    shipped = SHIPPED_FOR_QWEN if "/qwen" in name else SHIPPED
    if shipped == SHIPPED_FOR_QWEN and not shipped.exists():
        return None
    wrong = drafters - {fingerprint(shipped)}
    return f"{name} was made with another drafter: {sorted(wrong)[0][:12]}" if wrong else None


def committed_results() -> dict[str, Any]:
    paths: list[Path] = sorted(RESULTS.rglob("*.json"))
    return {str(path.relative_to(RESULTS)): json.loads(path.read_text()) for path in paths}
