"""Whether a drafter fits a target and the settings of a server: facts, rules, findings."""

from leadout.pairing.facts import EngineSettings, Finding, Pair, Rule, Severity, TargetFacts
from leadout.pairing.rules import RULES, batched_tokens_for, examine
from leadout.pairing.target import read_target, target_from_config

__all__ = [
    "RULES",
    "EngineSettings",
    "Finding",
    "Pair",
    "Rule",
    "Severity",
    "TargetFacts",
    "batched_tokens_for",
    "examine",
    "read_target",
    "target_from_config",
]
