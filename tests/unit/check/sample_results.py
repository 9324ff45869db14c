"""Results of checks that never ran, for tables, pages and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leadout.check.result import (
    BatchControl,
    CheckResult,
    ContextLength,
    Divergence,
    LongContext,
    Lossless,
    OfflineAcceptance,
    Parity,
    PrefixCache,
    ServedAcceptance,
    TextFigures,
    Tried,
    Verdict,
)
from leadout.evaluate.acceptance import AcceptanceTable
from leadout.findings import Finding, Severity
from leadout.stats import Interval

SETS = ("code", "chat", "math")


def interval(value: float, half: float = 0.1) -> Interval:
    return Interval(value=value, low=value - half, high=value + half)


def table(length: float, half: float = 0.1, texts: int = 16) -> AcceptanceTable:
    shares = [0.7, 0.45, 0.3]
    return AcceptanceTable(
        texts=texts,
        steps=texts * 40,
        length=interval(length, half),
        by_position=[interval(share, 0.03) for share in shares],
    )


def figures(
    lengths: Sequence[float], prompt_set: str = "code", steps: int = 40, first: int = 0
) -> list[TextFigures]:
    """Texts with these acceptance lengths; prompts are numbered from `first` on."""
    return [
        TextFigures(
            prompt=f"{prompt_set}-{first + place}",
            prompt_set=prompt_set,
            steps=steps,
            tokens=round(steps * length),
        )
        for place, length in enumerate(lengths)
    ]


def offline(
    length: float = 2.4, half: float = 0.1, sets: dict[str, AcceptanceTable] | None = None
) -> OfflineAcceptance:
    by_set = {name: table(length + 0.2 * place, 2 * half) for place, name in enumerate(SETS)}
    return OfflineAcceptance(
        overall=table(length, half, texts=48),
        by_set=by_set if sets is None else sets,
        by_context={"up to 255": table(length, half), "256 to 511": table(length - 0.2, half)},
    )


def served(length: float, temperature: float) -> ServedAcceptance:
    return ServedAcceptance(
        temperature=temperature,
        steps=2010,
        length=length,
        by_position=[0.68, 0.44, 0.31],
        by_set={name: length + 0.1 * place for place, name in enumerate(SETS)},
    )


def tried(cause: str, after: float) -> Tried:
    return Tried(
        cause=cause,
        edit=f"{cause}: 1 -> 2",
        before=2.4,
        after=after,
        difference=interval(after - 2.4, 0.05),
        texts=40,
    )


def finding(severity: Severity = Severity.WARNING, **fields: Any) -> Finding:
    given = {"name": "rope", "message": "theta is 1, expected 2", "remedy": "Change it."}
    return Finding(severity=severity, **(given | fields))


def whole_result(**fields: Any) -> CheckResult:
    given: dict[str, Any] = {
        "target": "owner/tiny-target",
        "drafter": "drafters/tiny-drafter",
        "static_only": False,
        "verdict": Verdict.FIT,
        "findings": [],
        "draft_tokens": 3,
        "offline": offline(),
        "served": [served(2.38, 0.0), served(2.11, 0.8)],
        "parity": Parity(
            blocks=12,
            drafts=36,
            equal_drafts=35,
            first_difference="layer 1 context keys",
            differences={"layer 1 context keys": 3e-3},
            allowed={"layer 1 context keys": 1e-3},
        ),
        "lossless": Lossless(
            texts=20,
            equal_texts=19,
            divergences=[Divergence(prompt_set="chat", position=17, logit_gap=0.0123)],
            largest_allowed_gap=0.06,
            control=BatchControl(
                batch=16,
                other_batch=4,
                texts=20,
                equal_texts=18,
                divergences=[Divergence(prompt_set="math", position=31, logit_gap=0.0456)] * 2,
                p_value=0.88,
            ),
        ),
        "prefix_cache": PrefixCache(
            texts=6,
            other_texts=14,
            prompt_tokens=1200,
            cached_tokens=900,
            cold=2.35,
            warm=2.34,
            ratio=interval(0.99, 0.02),
        ),
        "long_context": LongContext(
            limit=2048,
            drafter_positions=4096,
            target_positions=8192,
            window=None,
            contexts=[
                ContextLength(tokens=tokens, texts=6, length=interval(2.2))
                for tokens in (240, 1940)
            ],
            ratio=interval(0.98, 0.04),
        ),
        "tried": [tried("rope-theta", 2.7), tried("window", 2.3), tried("mask-token", 1.4)],
        "seconds": 93.4,
        "versions": {"leadout": "0.1", "torch": "2.13.0"},
        "date": "2026-11-15",
    }
    return CheckResult(**(given | fields))
