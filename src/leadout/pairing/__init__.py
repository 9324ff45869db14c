"""Whether a drafter fits a target and the settings of a server, and which one would.

`decode_costs` estimates whether drafting pays, for a device of `devices`.
"""

from leadout.pairing.rules import RULES, EngineSettings, Pair, Rule, batched_tokens_for, examine
from leadout.pairing.sizes import DraftShape, TargetSizes, read_sizes, shape_for
from leadout.pairing.target import TargetFacts, read_target, target_from_config
from leadout.pairing.trainable import require_trainable

__all__ = [
    "RULES",
    "DraftShape",
    "EngineSettings",
    "Pair",
    "Rule",
    "TargetFacts",
    "TargetSizes",
    "batched_tokens_for",
    "examine",
    "read_sizes",
    "read_target",
    "require_trainable",
    "shape_for",
    "target_from_config",
]
