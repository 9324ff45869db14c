"""The same words for terminal and page: the verdict in one sentence, and rows of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leadout.check.result import (
    CheckResult,
    Gravity,
    Lossless,
    Parity,
    ServedAcceptance,
    Tried,
    Verdict,
    by_weight,
)
from leadout.checkpoints.errors import printable
from leadout.evaluate.acceptance import AcceptanceTable
from leadout.files import replacing
from leadout.models import last_part
from leadout.report import charts as svg
from leadout.report.html import document, folded, table
from leadout.stats import Interval

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
    for name, of_set in result.offline.by_set.items():
        served = [each.by_set.get(name) for each in result.served]
        rows.append(AcceptanceRow("prompts", name, of_set, served))
    for name, of_bucket in result.offline.by_context.items():
        rows.append(AcceptanceRow("prompt length", name, of_bucket, [None] * len(result.served)))
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


# What a person sees of a check in the terminal: a bar while it runs, then verdict and tables.

_STYLES = {Verdict.FIT: "bold green", Verdict.DOUBTFUL: "bold yellow", Verdict.UNFIT: "bold red"}
_GRAVITY = {Gravity.UNFIT: "red", Gravity.DOUBTFUL: "yellow", Gravity.NOTE: "dim"}


def print_result(result: CheckResult, console: Console | None = None) -> None:
    console = console or Console()
    verdict = Text(result.verdict.value.upper(), style=_STYLES[result.verdict])
    console.print(Text.assemble(verdict, "  ", _clean(sentence(result))))
    if result.findings:
        console.print(_findings_table(result))
    if result.offline is not None:
        console.print(_acceptance_table(result))
    if result.parity is not None:
        console.print(_clean(f"Parity: {parity_words(result.parity)}."))
    if result.lossless is not None:
        console.print(_clean(f"Losslessness: {lossless_words(result.lossless)}."))
    if result.tried:
        console.print(_tried_table(result))


def _findings_table(result: CheckResult) -> Table:
    table = Table("gravity", "finding", "what", "remedy", box=box.SIMPLE_HEAD, show_lines=True)
    table.columns[1].overflow = "fold"
    for finding in by_weight(result.findings):
        gravity = Text(finding.gravity.value, style=_GRAVITY[finding.gravity])
        texts = (finding.name, finding.message, finding.remedy)
        table.add_row(gravity, *(_clean(text) for text in texts))
    return table


def _acceptance_table(result: CheckResult) -> Table:
    table = Table(
        title="Acceptance length: tokens for each step of the target",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("texts")
    columns = ("count", "offline", "95% interval", *(name_of(each) for each in result.served))
    for heading in columns:
        table.add_column(heading, justify="right")
    kind = "all"
    for row in acceptance_rows(result):
        if row.kind != kind:
            table.add_section()
            kind = row.kind
        length = row.offline.length
        served = ("" if value is None else f"{value:.2f}" for value in row.served)
        table.add_row(
            _clean(row.label),
            str(row.offline.texts),
            f"{length.value:.2f}",
            spread(length),
            *served,
        )
    return table


def _tried_table(result: CheckResult) -> Table:
    best = best_tried(result)
    table = Table(
        title=f"Changes tried on the drafter, the best {len(best)} of {len(result.tried)}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("cause")
    table.add_column("change", overflow="fold")
    for heading in ("before", "after", "difference", "95% interval"):
        table.add_column(heading, justify="right")
    for tried in best:
        table.add_row(
            _clean(tried.cause),
            _clean(tried.edit),
            f"{tried.before:.2f}",
            f"{tried.after:.2f}",
            f"{tried.difference.value:+.2f}",
            spread(tried.difference),
        )
    return table


def _clean(text: str) -> Text:
    """Text that may come from a file: no markup, no control characters."""
    return Text(printable(text))


# A check as one HTML file: no scripts, nothing loaded, every text escaped.

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
    return "\n".join([*parts, _html_acceptance_table(result)])


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


def _html_acceptance_table(result: CheckResult) -> str:
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
