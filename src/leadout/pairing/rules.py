"""All rules of pairing, in the order in which findings are shown.

A rule refuses only what no working pair does; what somebody may rightly want is a warning.
"""

from __future__ import annotations

from leadout.pairing.facts import Pair
from leadout.pairing.model_rules import MODEL_RULES
from leadout.pairing.rule import Finding, Rule
from leadout.pairing.server_rules import SERVER_RULES

RULES: tuple[Rule, ...] = MODEL_RULES + SERVER_RULES


def examine(pair: Pair) -> list[Finding]:
    """Every rule that this pair breaks; without settings, the rules about them are passed over."""
    found = ((rule, rule.broken(pair)) for rule in RULES)
    return [
        Finding(rule=rule.name, severity=rule.severity, message=message, remedy=rule.remedy)
        for rule, message in found
        if message is not None
    ]
