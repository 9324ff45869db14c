"""The HTML page of a check."""

from __future__ import annotations

from leadout.check import long_context, prefix_cache
from leadout.check.report import (
    TRIED_HEADINGS,
    acceptance_rows,
    best_tried,
    describe_lossless,
    describe_parity,
    range_text,
    sentence,
    served_label,
    tried_rows,
    verdict_text,
)
from leadout.check.result import (
    CheckResult,
    Divergence,
    OfflineAcceptance,
    Outcome,
    ServedAcceptance,
    Verdict,
)
from leadout.findings import Severity, worst_first
from leadout.models import last_part
from leadout.report import charts, html
from leadout.stats import Interval

_OFFLINE = "offline"
_MAX_DIVERGENCES = 20
_FITS = {Verdict.FIT: "yes", Verdict.UNFIT: "no", Verdict.UNDECIDED: "undecided"}
_PAYS: dict[Outcome, str] = {"pays": "yes", "does not pay": "no", "undecided": "undecided"}
_TONES: dict[str, html.Tone] = {
    Verdict.FIT: "good",
    Verdict.UNDECIDED: "warning",
    Verdict.UNFIT: "bad",
    Severity.ERROR: "bad",
    Severity.WARNING: "warning",
    Severity.NOTE: "note",
}


def page(result: CheckResult) -> str:
    sections = [
        _findings(result),
        _payoff(result),
        _acceptance(result),
        _parity(result),
        _lossless(result),
        _prefix_cache(result),
        _long_context(result),
        _tried(result),
        _versions(result),
    ]
    facts = [f"target {result.target}", f"drafter {result.drafter}"]
    if result.draft_tokens is not None:
        facts.append(f"{result.draft_tokens} draft tokens per step")
    if result.date:
        facts.append(result.date)
    tone, word = _TONES[result.verdict], verdict_text(result)
    return html.render(
        html.Page(
            command="check",
            heading=f"{last_part(result.drafter)} for {last_part(result.target)}",
            facts=[*facts, f"{result.seconds:.0f} seconds"],
            verdict=html.Verdict(tone, [sentence(result)], word=word),
            cards=_cards(result),
            sections=[section for section in sections if section is not None],
        )
    )


def _cards(result: CheckResult) -> list[html.Card]:
    cards = [html.Card("fits", _FITS[result.verdict], "")]
    if result.pays is not None:
        cards.append(html.Card("pays", _PAYS[result.pays.outcome], "at the costs of --tuned"))
    else:
        cards.append(html.Card("pays", "not known", "leadout tune measures it"))
    if result.offline is not None:
        length = result.offline.overall.length
        value = f"{length.value:.2f}"
        cards.append(html.Card("tokens per step, offline", value, range_text(length)))
    for served in result.served:
        name, steps = f"tokens per step, {served_label(served)}", f"{served.steps:,} steps"
        cards.append(html.Card(name, f"{served.length:.2f}", steps))
    if result.parity is not None and result.parity.drafts:
        share = result.parity.equal_drafts / result.parity.drafts
        count = f"of {result.parity.drafts:,}"
        cards.append(html.Card("drafts equal to the reference", f"{share:.1%}", count))
    if result.lossless is not None and result.lossless.texts:
        share = result.lossless.equal_texts / result.lossless.texts
        count = f"of {result.lossless.texts}"
        if (control := result.lossless.control) is not None and control.texts:
            count += f"; {control.equal_texts / control.texts:.0%} in the control"
        cards.append(html.Card("texts unchanged", f"{share:.0%}", count))
    return cards


def _findings(result: CheckResult) -> html.Section:
    found = worst_first(result.findings)
    if not found:
        return html.Section("Findings", [html.Text("None.")])
    table = html.Table(
        ["severity", "finding", "what was found", "remedy"],
        [[each.severity.value, each.name, each.message, each.remedy] for each in found],
        text_columns=4,
        tones=[_TONES[each.severity] for each in found],
    )
    return html.Section("Findings", [table])


def _payoff(result: CheckResult) -> html.Section | None:
    if result.pays is None:
        return None
    rows = [
        [
            f"{load.concurrency}",
            f"{load.draft_tokens}",
            f"{load.break_even:.2f}",
            f"{load.length:.2f}",
            load.outcome,
        ]
        for load in result.pays.loads
    ]
    heads = ["concurrent requests", "K", "break-even", "acceptance length", ""]
    return html.Section("Break-even", [html.Table(heads, rows, text_columns=0)])


def _acceptance(result: CheckResult) -> html.Section | None:
    if result.offline is None:
        return None
    explained = (
        "Tokens per step of the target, its own token included. Offline: computed by the reference "
        "implementation along the target's own greedy texts, with 95% confidence intervals over "
        "texts. Served: from vLLM's counters."
    )
    by_position = _by_position(result.offline, result.served)
    blocks: list[html.Block] = [
        html.Text(explained, soft=True),
        html.Heading("By prompt set"),
        html.Drawing(charts.bars(_by_set(result), "acceptance length by prompt set")),
        html.Heading("By position in the block"),
        html.Drawing(
            charts.lines(
                by_position,
                "acceptance by position in the block",
                "position in the block",
                "share of steps that accept it",
            )
        ),
    ]
    if result.offline.by_context:
        points = [_point(name, each.length) for name, each in result.offline.by_context.items()]
        series = [charts.Series(_OFFLINE, points)]
        blocks += [
            html.Heading("By prompt length"),
            html.Drawing(charts.bars(series, "acceptance length by prompt length")),
        ]
    return html.Section("Acceptance", [*blocks, _all_lengths(result)])


def _by_set(result: CheckResult) -> list[charts.Series]:
    rows = [row for row in acceptance_rows(result) if row.kind != "prompt length"]
    series = [charts.Series(_OFFLINE, [_point(row.name, row.offline.length) for row in rows])]
    for place, served in enumerate(result.served):
        found = [(row.name, row.served[place]) for row in rows]
        points = [charts.Point(name, value) for name, value in found if value is not None]
        series.append(charts.Series(served_label(served), points))
    return series


def _by_position(offline: OfflineAcceptance, served: list[ServedAcceptance]) -> list[charts.Series]:
    shares = enumerate(offline.overall.by_position, start=1)
    series = [charts.Series(_OFFLINE, [_point(str(place), share) for place, share in shares])]
    for each in served:
        found = enumerate(each.by_position, start=1)
        points = [charts.Point(str(place), share) for place, share in found]
        series.append(charts.Series(served_label(each), points))
    return series


def _all_lengths(result: CheckResult) -> html.Folded:
    names = [served_label(each) for each in result.served]
    rows = [
        [
            row.label,
            f"{row.offline.texts:,}",
            f"{row.offline.steps:,}",
            f"{row.offline.length.value:.3f}",
            range_text(row.offline.length),
            *("" if value is None else f"{value:.3f}" for value in row.served),
        ]
        for row in acceptance_rows(result)
    ]
    heads = ["texts", "count", "steps", _OFFLINE, "95% interval", *names]
    return html.Folded("All numbers", [html.Table(heads, rows, text_columns=1)])


def _parity(result: CheckResult) -> html.Section | None:
    parity = result.parity
    if parity is None:
        return None
    blocks: list[html.Block] = [html.Text(f"{describe_parity(parity)}.")]
    rows = [
        [name, f"{value:.2e}", f"{parity.allowed[name]:.2e}" if name in parity.allowed else ""]
        for name, value in parity.differences.items()
    ]
    if rows:
        heads = ["tensor", "largest relative difference", "explained by rounding"]
        summary = "Differences between engine and reference, by tensor"
        blocks.append(html.Folded(summary, [html.Table(heads, rows, text_columns=1)]))
    return html.Section("Parity", blocks)


def _lossless(result: CheckResult) -> html.Section | None:
    lossless = result.lossless
    if lossless is None:
        return None
    blocks: list[html.Block] = [html.Text(f"{describe_lossless(lossless)}.")]
    blocks += _differing_texts("Where texts differ with drafts", lossless.divergences)
    if lossless.control is not None:
        without = "Where texts differ without drafts, at another batch size"
        blocks += _differing_texts(without, lossless.control.divergences)
    return html.Section("Losslessness", blocks)


def _prefix_cache(result: CheckResult) -> html.Section | None:
    found = result.prefix_cache
    if found is None:
        return None
    blocks: list[html.Block] = [html.Text(f"{prefix_cache.describe(found)}.")]
    if found.ratio is not None:
        blocks.append(
            html.Table(
                ["", "acceptance length"],
                [
                    ["empty cache", f"{found.cold:.3f}"],
                    ["warm cache", f"{found.warm:.3f}"],
                    ["ratio", f"{found.ratio:.3f}"],
                ],
                text_columns=1,
            )
        )
    return html.Section("Prefix cache", blocks)


def _long_context(result: CheckResult) -> html.Section | None:
    found = result.long_context
    if found is None:
        return None
    points = [_point(f"{each.tokens} tokens", each.length) for each in found.contexts]
    bars = charts.bars([charts.Series("served greedy", points)], "acceptance length by context")
    explained = (
        "The same tasks behind contexts of several lengths, with 95% confidence intervals over "
        f"{found.contexts[0].texts} tasks. Longest against shortest: ratio {found.ratio:.2f}. "
        f"{long_context.describe_limits(found)}."
    )
    return html.Section("Long contexts", [html.Text(explained), html.Drawing(bars)])


def _differing_texts(summary: str, divergences: list[Divergence]) -> list[html.Block]:
    worst = sorted(divergences, key=lambda each: -each.logit_gap)[:_MAX_DIVERGENCES]
    if not worst:
        return []
    rows = [[each.prompt_set, f"{each.position}", f"{each.logit_gap:.3g}"] for each in worst]
    table = html.Table(["prompts", "position in the answer", "logit gap"], rows, text_columns=1)
    return [html.Folded(f"{summary}, largest logit gap first", [table])]


def _tried(result: CheckResult) -> html.Section | None:
    best = best_tried(result)
    if not best:
        return None
    explained = (
        f"Known causes of rejected drafts, each undone on the same texts: the best {len(best)} of "
        f"{len(result.tried)} changes. In tokens per block, with a block at every position; right "
        "of the line is better than the drafter as it is."
    )
    points = [_point(each.cause, each.difference) for each in best]
    return html.Section(
        "Changes tried",
        [
            html.Text(explained, soft=True),
            html.Drawing(charts.intervals(points, "gain of each change")),
            html.Table(TRIED_HEADINGS, tried_rows(result, digits=3), text_columns=2),
        ],
    )


def _versions(result: CheckResult) -> html.Section | None:
    if not result.versions:
        return None
    rows = [[name, version] for name, version in result.versions.items()]
    table = html.Table(["", "version"], rows, text_columns=2)
    return html.Section("", [html.Folded("Versions", [table])])


def _point(label: str, interval: Interval) -> charts.Point:
    return charts.Point(label, interval.value, interval.low, interval.high)
