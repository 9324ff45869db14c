"""How many tokens a step brings, by how many are drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """`tokens[k]`: tokens a request gains in a step that verifies k drafts; `tokens[0]` is 1."""

    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.tokens or self.tokens[0] != 1.0:
            raise ValueError(
                f"acceptance curve: found {self.tokens[:1]} for no draft, wanted exactly 1 token"
            )

    @classmethod
    def of_survival(cls, survival: Sequence[float]) -> AcceptanceCurve:
        """From the chance that the first k drafts stand together, for k = 1, 2, ..."""
        return cls(tuple(accumulate(survival, initial=1.0)))

    @classmethod
    def of_odds(cls, odds: Sequence[float]) -> AcceptanceCurve:
        """From the chance that draft k stands where all before it did."""
        return cls.of_survival(list(accumulate(odds, mul)))

    @property
    def most(self) -> int:
        """The largest K that the curve knows."""
        return len(self.tokens) - 1
