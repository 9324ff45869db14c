"""A check as one HTML file: no scripts, nothing loaded, every text escaped."""

from __future__ import annotations

from html import escape
from pathlib import Path

from leadout.check.acceptance import Interval
from leadout.check.findings import by_weight
from leadout.check.result import CheckResult, Lossless, Parity
from leadout.check.words import (
    acceptance_rows,
    best_tried,
    lossless_words,
    name_of,
    parity_words,
    sentence,
    spread,
)
from leadout.checkpoints.store import replacing
from leadout.pages import svg
from leadout.pages.html import document, folded, table
from leadout.pairing.names import last_part

OFFLINE = "offline"
_MOST_DIVERGENCES = 20


def write_page(result: CheckResult, path: Path) -> None:
    with replacing(path) as temporary:
        temporary.write_text(page(result), encoding="utf-8")


def page(result: CheckResult) -> str:
    name = f"{last_part(result.drafter)} for {last_part(result.target)}"
    parts = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="soft">{escape(_circumstances(result))}</p>',
        _verdict(result),
        _cards(result),
        _findings(result),
        _acceptance(result),
        "" if result.parity is None else _parity(result.parity),
        "" if result.lossless is None else _lossless(result.lossless),
        _tried(result),
        _versions(result),
    ]
    return document(f"leadout check: {name}", parts)


def _circumstances(result: CheckResult) -> str:
    facts = [f"target {result.target}", f"drafter {result.drafter}"]
    if result.draft_tokens is not None:
        facts.append(f"{result.draft_tokens} drafted tokens a step")
    if result.date:
        facts.append(result.date)
    facts.append(f"{result.seconds:.0f} seconds")
    return " · ".join(facts)


def _verdict(result: CheckResult) -> str:
    word = f'<span class="word">{result.verdict.value}</span>'
    return (
        f'<div class="verdict {result.verdict.value}">{word}<p>{escape(sentence(result))}</p></div>'
    )


def _cards(result: CheckResult) -> str:
    """The few numbers that people look for first."""
    cards = []
    if result.offline is not None:
        length = result.offline.overall.length
        cards.append(("tokens a step, offline", f"{length.value:.2f}", spread(length)))
    for served in result.served:
        steps = f"{served.steps:,} steps"
        cards.append((f"tokens a step, {name_of(served)}", f"{served.length:.2f}", steps))
    if result.parity is not None and result.parity.drafts:
        share = result.parity.equal_drafts / result.parity.drafts
        cards.append(("drafts as the reference", f"{share:.1%}", f"of {result.parity.drafts:,}"))
    if result.lossless is not None and result.lossless.texts:
        share = result.lossless.equal_texts / result.lossless.texts
        cards.append(("texts unchanged", f"{share:.0%}", f"of {result.lossless.texts}"))
    shown = "".join(
        f'<div class="card"><span class="soft">{escape(name)}</span><b>{escape(number)}</b>'
        f'<span class="soft">{escape(more)}</span></div>'
        for name, number, more in cards
    )
    return f'<div class="cards">{shown}</div>' if cards else ""


def _findings(result: CheckResult) -> str:
    if not result.findings:
        return "<h2>Findings</h2><p>None.</p>"
    rows = "".join(
        f'<tr><td class="word {each.gravity.value}">{each.gravity.value}</td>'
        f"<td><code>{escape(each.name)}</code></td>"
        f'<td class="long">{escape(each.message)}</td>'
        f'<td class="long">{escape(each.remedy)}</td></tr>'
        for each in by_weight(result.findings)
    )
    head = "<tr><th>gravity</th><th>finding</th><th>what was found</th><th>remedy</th></tr>"
    return f'<h2>Findings</h2><div class="wide"><table>{head}{rows}</table></div>'


def _acceptance(result: CheckResult) -> str:
    if result.offline is None:
        return ""
    explained = (
        "Tokens for each step of the target, its own included. Offline: by the reference, along "
        "the target's own greedy texts, with 95% intervals over texts. Served: by vLLM's counters."
    )
    parts = [
        f'<h2>Acceptance</h2><p class="soft">{explained}</p>',
        "<h3>By prompt set</h3>",
        svg.bars(_by_set(result), "acceptance length by prompt set"),
        "<h3>By position in the block</h3>",
        svg.lines(
            _by_position(result),
            "share of steps in which the draft at a position stood",
            "position in the block; height: share of steps in which the draft stood",
        ),
    ]
    if result.offline.by_context:
        points = [_point(name, each.length) for name, each in result.offline.by_context.items()]
        parts += [
            "<h3>By length of the prompt</h3>",
            svg.bars([svg.Series(OFFLINE, points)], "acceptance length by length of the prompt"),
        ]
    return "\n".join([*parts, _acceptance_table(result)])


def _by_set(result: CheckResult) -> list[svg.Series]:
    rows = [row for row in acceptance_rows(result) if row.kind != "prompt length"]
    offline = [_point(row.name, row.offline.length) for row in rows]
    series = [svg.Series(OFFLINE, offline)]
    for place, served in enumerate(result.served):
        found = [(row.name, row.served[place]) for row in rows]
        points = [svg.Point(name, value) for name, value in found if value is not None]
        series.append(svg.Series(name_of(served), points))
    return series


def _by_position(result: CheckResult) -> list[svg.Series]:
    assert result.offline is not None
    shares = result.offline.overall.by_position
    series = [svg.Series(OFFLINE, [_point(str(n + 1), each) for n, each in enumerate(shares)])]
    for served in result.served:
        points = [svg.Point(str(n + 1), share) for n, share in enumerate(served.by_position)]
        series.append(svg.Series(name_of(served), points))
    return series


def _acceptance_table(result: CheckResult) -> str:
    names = [name_of(each) for each in result.served]
    heads = ["texts", "count", "steps", OFFLINE, "95% interval", *names]
    rows = [
        [
            row.label,
            f"{row.offline.texts:,}",
            f"{row.offline.steps:,}",
            f"{row.offline.length.value:.3f}",
            spread(row.offline.length),
            *("" if value is None else f"{value:.3f}" for value in row.served),
        ]
        for row in acceptance_rows(result)
    ]
    return folded("All numbers", table(heads, rows, words=1))


def _parity(parity: Parity) -> str:
    rows = [
        [name, f"{value:.2e}", f"{parity.allowed[name]:.2e}" if name in parity.allowed else ""]
        for name, value in parity.differences.items()
    ]
    shown = f"<h2>Parity</h2><p>{escape(parity_words(parity))}.</p>"
    if not rows:
        return shown
    heads = ["tensor", "largest relative difference", "explained by rounding"]
    differences = table(heads, rows, words=1)
    return shown + folded("Differences between engine and reference, by tensor", differences)


def _lossless(lossless: Lossless) -> str:
    shown = f"<h2>Losslessness</h2><p>{escape(lossless_words(lossless))}.</p>"
    if not lossless.divergences:
        return shown
    worst = sorted(lossless.divergences, key=lambda each: -each.logit_gap)[:_MOST_DIVERGENCES]
    rows = [[each.prompt_set, f"{each.position}", f"{each.logit_gap:.3g}"] for each in worst]
    places = table(["prompts", "position in the answer", "logit gap"], rows, words=1)
    return shown + folded("Where texts part, the widest gap first", places)


def _tried(result: CheckResult) -> str:
    best = best_tried(result)
    if not best:
        return ""
    points = [_point(each.cause, each.difference) for each in best]
    rows = [
        [
            each.cause,
            each.edit,
            f"{each.before:.3f}",
            f"{each.after:.3f}",
            f"{each.difference.value:+.3f}",
            spread(each.difference),
        ]
        for each in best
    ]
    heads = ["cause", "change", "before", "after", "difference", "95% interval"]
    explained = (
        f"Known causes of rejected drafts, each undone on the same texts: the best {len(best)} of "
        f"{len(result.tried)} changes, in tokens at each position. Right of the line is better "
        "than the drafter as it is."
    )
    return (
        f'<h2>What was tried</h2><p class="soft">{explained}</p>'
        f"{svg.intervals(points, 'gain of each change')}{table(heads, rows, words=2)}"
    )


def _versions(result: CheckResult) -> str:
    if not result.versions:
        return ""
    rows = [[name, version] for name, version in result.versions.items()]
    return folded("Versions", table(["", "version"], rows, words=2))


def _point(label: str, interval: Interval) -> svg.Point:
    return svg.Point(label, interval.value, interval.low, interval.high)
