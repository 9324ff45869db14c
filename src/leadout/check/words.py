"""The same words for terminal and page: the verdict in one sentence, and rows of numbers."""

from __future__ import annotations

from dataclasses import dataclass

from leadout.check.acceptance import AcceptanceTable, Interval
from leadout.check.findings import Gravity, Verdict, by_weight
from leadout.check.result import CheckResult, Lossless, Parity, ServedAcceptance, Tried
from leadout.pairing.names import last_part

MOST_TRIED = 8
_OPENINGS = {Verdict.UNFIT: "Do not deploy this pair", Verdict.DOUBTFUL: "Look into this first"}


def sentence(result: CheckResult) -> str:
    """The verdict as one sentence that a person can act on."""
    pair = f"{last_part(result.drafter)} for {last_part(result.target)}"
    if result.verdict is not Verdict.FIT:
        first = by_weight(result.findings)[0]
        others = sum(each.gravity is not Gravity.NOTE for each in result.findings) - 1
        more = "" if others < 1 else f" ({others} more {'finding' if others == 1 else 'findings'})"
        return f"{_OPENINGS[result.verdict]}: {first.name}: {first.message}. {first.remedy}{more}"
    if result.offline is None:
        return (
            f"Nothing in the files speaks against {pair}; whether its drafts are accepted was not "
            "measured."
        )
    length = result.offline.overall.length
    served = "".join(f", {each.length:.2f} {name_of(each)}" for each in result.served)
    return (
        f"Deploy {pair}: {length.value:.2f} tokens for each step of the target "
        f"({length.low:.2f} to {length.high:.2f}){served}."
    )


@dataclass(frozen=True, slots=True)
class AcceptanceRow:
    """Acceptance length of some of the texts, by the reference and as served."""

    kind: str  # "all", "prompts" or "prompt length"
    name: str
    offline: AcceptanceTable
    served: list[float | None]  # in the order of the result

    @property
    def label(self) -> str:
        return self.name if self.kind == "all" else f"{self.kind} {self.name}"


def acceptance_rows(result: CheckResult) -> list[AcceptanceRow]:
    if result.offline is None:
        return []
    rows = [AcceptanceRow("all", "all", result.offline.overall, [s.length for s in result.served])]
    for name, table in result.offline.by_set.items():
        served = [each.by_set.get(name) for each in result.served]
        rows.append(AcceptanceRow("prompts", name, table, served))
    for name, table in result.offline.by_context.items():
        rows.append(AcceptanceRow("prompt length", name, table, [None] * len(result.served)))
    return rows


def name_of(served: ServedAcceptance) -> str:
    if served.temperature == 0:
        return "served greedy"
    return f"served at temperature {served.temperature:g}"


def best_tried(result: CheckResult) -> list[Tried]:
    return sorted(result.tried, key=lambda each: -each.after)[:MOST_TRIED]


def parity_words(parity: Parity) -> str:
    same = f"{parity.equal_drafts} of {parity.drafts} drafts in {parity.blocks} blocks are equal"
    if parity.first_difference is None:
        return f"{same}: the engine drafts as the reference does"
    return f"{same}: engine and reference part first at {parity.first_difference}"


def lossless_words(lossless: Lossless) -> str:
    same = f"{lossless.equal_texts} of {lossless.texts} texts are equal with and without drafts"
    if not lossless.divergences:
        return same
    worst = max(each.logit_gap for each in lossless.divergences)
    return (
        f"{same}; where they part, the target's two best tokens are at most {worst:.2g} apart "
        f"(allowed: {lossless.largest_allowed_gap:.2g})"
    )


def spread(interval: Interval) -> str:
    return f"{interval.low:.2f} to {interval.high:.2f}"
