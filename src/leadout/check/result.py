"""The result of a check: one object for the terminal, the HTML report, JSON and baselines."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from leadout.errors import NEGATIVE, SUCCESS, UNDECIDED, LeadoutError
from leadout.evaluate.acceptance import AcceptanceTable
from leadout.findings import Finding, Severity, worst_first
from leadout.provenance import Provenance
from leadout.stats import Interval

Outcome = Literal["pays", "does not pay", "undecided"]

TOO_FEW_TEXTS = "too-few-texts"  # the finding that leaves a check undecided


class CheckError(LeadoutError):
    """The check could not be made as asked, which says nothing about the pair."""


class Verdict(StrEnum):
    """The outcome of a check: that of its most severe finding."""

    FIT = "fit"
    UNDECIDED = "undecided"
    UNFIT = "unfit"

    @classmethod
    def _missing_(cls, value: object) -> Verdict | None:
        return cls.UNDECIDED if value == "doubtful" else None  # its name in earlier versions

    @property
    def exit_code(self) -> int:
        codes = {Verdict.FIT: SUCCESS, Verdict.UNDECIDED: UNDECIDED, Verdict.UNFIT: NEGATIVE}
        return codes[self]


def verdict_of(findings: Iterable[Finding]) -> Verdict:
    severities = {finding.severity for finding in findings}
    if Severity.ERROR in severities:
        return Verdict.UNFIT
    return Verdict.UNDECIDED if Severity.WARNING in severities else Verdict.FIT


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# At most the largest integer up to which a float holds all integers: figures are averaged.
_Count = Annotated[int, Field(ge=0, le=2**53)]


class TextFigures(_Record):
    """Acceptance along one text: what a later check of the same prompt is compared with."""

    prompt: str  # a hash of its token ids
    prompt_set: str
    steps: _Count  # of the target, with drafts
    tokens: _Count  # of these steps


class OfflineAcceptance(_Record):
    """Acceptance by the reference implementation along the target's own greedy texts."""

    overall: AcceptanceTable
    by_set: dict[str, AcceptanceTable]
    by_context: dict[str, AcceptanceTable]  # by the length of the prompt, such as "256 to 511"
    by_draft_tokens: list[Interval] = []  # acceptance length with K = 1, 2, ...
    texts: list[TextFigures] = []


class ServedAcceptance(_Record):
    """Acceptance by vLLM's counters."""

    temperature: float
    steps: int
    length: float
    by_position: list[float]
    by_set: dict[str, float]


class Parity(_Record):
    """Whether the engine computes the same drafts as the reference, and where they differ first."""

    blocks: int
    drafts: int
    equal_drafts: int
    first_difference: str | None  # the first tensor that differs, such as "layer 1 context keys"
    differences: dict[str, float]  # of each tensor, relative to its norm
    allowed: dict[str, float] = {}  # of each tensor, the difference that rounding explains


class Divergence(_Record):
    """The first difference between two answers to one prompt."""

    prompt_set: str
    position: int  # in the answer
    logit_gap: float  # between the target's logits for the two tokens


class BatchControl(_Record):
    """Greedy answers without speculation, compared with themselves at another batch size."""

    batch: int  # requests at a time
    other_batch: int
    texts: int
    equal_texts: int
    divergences: list[Divergence]
    # That speculation changes no larger share of the texts (Fisher's exact test, one-sided).
    p_value: float


class Lossless(_Record):
    """Greedy answers with and without speculation."""

    texts: int
    equal_texts: int
    divergences: list[Divergence]
    largest_allowed_gap: float  # 0 if every text must be equal: in float32, not quantized
    # None in that case, in `leadout learn` and in results of earlier versions.
    control: BatchControl | None = None


class PrefixCache(_Record):
    """Served acceptance length of the same prompts with an empty and with a warm prefix cache."""

    texts: int  # of which a part came from the cache
    other_texts: int  # not compared: nothing of them was cached
    prompt_tokens: int  # of the compared texts
    cached_tokens: int  # of these
    cold: float
    warm: float
    ratio: Interval | None  # warm over cold; None if too few texts were cached


class ContextLength(_Record):
    """Served acceptance length after prompts of one length."""

    tokens: int  # of the longest of these prompts
    texts: int
    length: Interval


class LongContext(_Record):
    """Served acceptance length of the same tasks in contexts of several lengths."""

    limit: int  # tokens, answer included
    drafter_positions: int
    target_positions: int | None
    window: int | None  # the smallest attention window of the drafter
    contexts: list[ContextLength]  # the shortest first
    ratio: Interval  # the longest over the shortest, paired by task


class Tried(_Record):
    """A change of the drafter that undoes a possible fault, and what it does to acceptance."""

    cause: str
    edit: str
    before: float
    after: float
    difference: Interval
    texts: int  # that it was tried on
    p_value: float | None = None  # corrected for the number of tests; None: screened only


class LoadPayoff(_Record):
    """Whether drafting is faster at one load, with the K that suits it best."""

    concurrency: int
    draft_tokens: int
    break_even: float  # acceptance length at which a step with drafts pays for itself
    length: Interval  # the measured acceptance length with this K

    @property
    def outcome(self) -> Outcome:
        if self.length.low > self.break_even:
            return "pays"
        return "does not pay" if self.length.high < self.break_even else "undecided"


class Payoff(_Record):
    """Whether drafting is faster on the machine of a tuned file."""

    outcome: Outcome
    loads: list[LoadPayoff]  # in ascending concurrency


class CheckResult(_Record):
    target: str
    drafter: str
    static_only: bool
    verdict: Verdict  # on whether the pair fits
    fits: bool | None = None  # None: undecided
    pays: Payoff | None = None  # None: needs the costs in a tuned file
    findings: list[Finding]
    draft_tokens: int | None = None
    offline: OfflineAcceptance | None = None
    served: list[ServedAcceptance] = []  # greedy, then sampled
    parity: Parity | None = None
    lossless: Lossless | None = None
    prefix_cache: PrefixCache | None = None
    long_context: LongContext | None = None
    tried: list[Tried] = []
    seconds: float = 0.0
    versions: dict[str, str] = {}
    date: str = ""
    provenance: Provenance | None = None  # None in results of earlier versions

    def judged(self, findings: Iterable[Finding]) -> CheckResult:
        """With these findings and the verdict that follows from them."""
        found = worst_first(findings)
        verdict = verdict_of(found)
        fits = {Verdict.FIT: True, Verdict.UNFIT: False}.get(verdict)
        return self.model_copy(update={"findings": found, "verdict": verdict, "fits": fits})
