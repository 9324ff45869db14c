"""The result of a check: one object for people, machines, the HTML page and later comparisons."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from leadout.check.acceptance import AcceptanceTable, Interval
from leadout.check.findings import Finding, Verdict


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OfflineAcceptance(_Record):
    """By the reference, along the target's own greedy texts."""

    overall: AcceptanceTable
    by_set: dict[str, AcceptanceTable]
    by_context: dict[str, AcceptanceTable]  # by the length of the prompt, such as "256 to 511"


class ServedAcceptance(_Record):
    """By vLLM's counters."""

    temperature: float
    steps: int
    length: float
    by_position: list[float]
    by_set: dict[str, float]


class Parity(_Record):
    """Whether the engine computes the reference's drafts, and where they part if not."""

    blocks: int
    drafts: int
    equal_drafts: int
    first_difference: str | None  # the first tensor that differs, such as "layer 1 context keys"
    differences: dict[str, float]  # of each tensor, relative to its size
    allowed: dict[str, float] = {}  # of each tensor, the difference that rounding explains


class Divergence(_Record):
    """Where an answer with speculation first leaves the one without."""

    prompt_set: str
    position: int  # in the answer
    logit_gap: float  # between the two tokens, in the target's own logits there


class Lossless(_Record):
    texts: int
    equal_texts: int
    divergences: list[Divergence]
    largest_allowed_gap: float  # 0 in float32: every text must be equal


class Tried(_Record):
    """One change that was tried on the drafter."""

    cause: str
    edit: str
    before: float
    after: float
    difference: Interval
    texts: int  # that it was tried on


class CheckResult(_Record):
    target: str
    drafter: str
    static_only: bool
    verdict: Verdict
    findings: list[Finding]
    draft_tokens: int | None = None
    offline: OfflineAcceptance | None = None
    served: list[ServedAcceptance] = []  # greedy, then sampled
    parity: Parity | None = None
    lossless: Lossless | None = None
    tried: list[Tried] = []
    seconds: float = 0.0
    versions: dict[str, str] = {}
    date: str = ""
