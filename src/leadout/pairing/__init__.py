"""Whether a drafter fits a target and the settings of a server."""

from leadout.pairing.rules import RULES, EngineSettings, Pair, Rule, batched_tokens_for, examine
from leadout.pairing.target import TargetFacts, read_target, target_from_config

__all__ = [
    "RULES",
    "EngineSettings",
    "Pair",
    "Rule",
    "TargetFacts",
    "batched_tokens_for",
    "examine",
    "read_target",
    "target_from_config",
]
