"""The result of a check for people: text and tables in the terminal, and an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leadout.check.result import (
    CheckResult,
    Lossless,
    Parity,
    ServedAcceptance,
    Tried,
    Verdict,
)
from leadout.console import safe
from leadout.evaluate.acceptance import AcceptanceTable
from leadout.files import write_text
from leadout.findings import Finding, Severity, worst_first
from leadout.models import last_part
from leadout.report import charts, html
from leadout.stats import Interval

MAX_TRIED = 8
_OPENINGS = {Verdict.UNFIT: "Do not deploy this pair", Verdict.UNDECIDED: "Look into this first"}
_VERDICT_STYLES = {
    Verdict.FIT: "bold green",
    Verdict.UNDECIDED: "bold yellow",
    Verdict.UNFIT: "bold red",
}
_SEVERITY_STYLES = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def sentence(result: CheckResult) -> str:
    """The verdict as one sentence that a person can act on."""
    drafter, target = last_part(result.drafter), last_part(result.target)
    if result.verdict is not Verdict.FIT:
        first = worst_first(result.findings)[0]
        others = len(_problems(result)) - 1
        more = "" if others < 1 else f" ({others} more {'finding' if others == 1 else 'findings'})"
        return f"{_OPENINGS[result.verdict]}: {first.name}: {first.message}. {first.remedy}{more}"
    if result.offline is None:
        return (
            f"The files of {drafter} and {target} fit together; whether drafts are accepted was "
            "not measured."
        )
    length = result.offline.overall.length
    served = "".join(f", {each.length:.2f} {served_label(each)}" for each in result.served)
    return (
        f"{drafter} fits {target}: {length.value:.2f} tokens per step of the target (95% interval "
        f"{range_text(length)}){served}. Whether this makes serving faster depends on the machine; "
        "`leadout tune` measures it."
    )


def next_step(result: CheckResult) -> str:
    """The command to run after this check, or what to do before it is repeated."""
    pair = f"{result.target} {result.drafter}"
    named = {finding.name: finding for finding in result.findings}
    if result.verdict is Verdict.FIT:
        return f"leadout check {pair}" if result.offline is None else f"leadout tune {pair}"
    if "fixed" in named:
        return named["fixed"].remedy
    if any("edit" in finding.evidence for finding in _problems(result)):
        return f"leadout check {pair} --fix FOLDER writes the repaired drafter"
    return "follow the remedy, then repeat the check"


def _problems(result: CheckResult) -> list[Finding]:
    return [each for each in result.findings if each.severity is not Severity.NOTE]


@dataclass(frozen=True, slots=True)
class AcceptanceRow:
    """Acceptance length of some of the texts, offline and served."""

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


def served_label(served: ServedAcceptance) -> str:
    if served.temperature == 0:
        return "served greedy"
    return f"served at temperature {served.temperature:g}"


def best_tried(result: CheckResult) -> list[Tried]:
    return sorted(result.tried, key=lambda each: -each.after)[:MAX_TRIED]


def describe_parity(parity: Parity) -> str:
    same = f"{parity.equal_drafts} of {parity.drafts} drafts in {parity.blocks} blocks are equal"
    if parity.first_difference is None:
        return f"{same}: the engine computes the drafts of the reference"
    return f"{same}: engine and reference differ first in {parity.first_difference}"


def describe_lossless(lossless: Lossless) -> str:
    same = f"{lossless.equal_texts} of {lossless.texts} texts are equal with and without drafts"
    if not lossless.divergences:
        return same
    worst = max(each.logit_gap for each in lossless.divergences)
    return (
        f"{same}; where they differ, the target's logits for the two tokens are at most "
        f"{worst:.2g} apart (allowed: {lossless.largest_allowed_gap:.2g})"
    )


def range_text(interval: Interval) -> str:
    return f"{interval.low:.2f} to {interval.high:.2f}"


def print_result(
    result: CheckResult,
    console: Console | None = None,
    *,
    written: Sequence[Path] = (),
    verbose: bool = False,
) -> None:
    """The verdict, findings, acceptance, the files that were written, and the next step.

    The changes that were tried on the drafter are shown if something is wrong, or if `verbose`.
    """
    console = console or Console()
    verdict = Text(result.verdict.value.upper(), style=_VERDICT_STYLES[result.verdict])
    console.print(Text.assemble(verdict, "  ", safe(sentence(result))))
    if result.findings:
        console.print(_findings_table(result))
    if result.offline is not None:
        console.print(_acceptance_table(result))
    if result.parity is not None:
        console.print(safe(f"Parity: {describe_parity(result.parity)}."))
    if result.lossless is not None:
        console.print(safe(f"Losslessness: {describe_lossless(result.lossless)}."))
    if result.tried and (verbose or result.verdict is not Verdict.FIT):
        console.print(_tried_table(result))
    for path in written:
        console.print(safe(f"wrote {path}"), soft_wrap=True)
    console.print(safe(f"Next: {next_step(result)}"), soft_wrap=True)


def _findings_table(result: CheckResult) -> Table:
    table = Table("severity", "finding", "what", "remedy", box=box.SIMPLE_HEAD, show_lines=True)
    table.columns[1].overflow = "fold"
    for finding in worst_first(result.findings):
        severity = Text(finding.severity.value, style=_SEVERITY_STYLES[finding.severity])
        texts = (finding.name, finding.message, finding.remedy)
        table.add_row(severity, *(safe(text) for text in texts))
    return table


def _acceptance_table(result: CheckResult) -> Table:
    table = Table(
        title="Acceptance length: tokens per step of the target",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("texts")
    columns = ("count", "offline", "95% interval", *(served_label(each) for each in result.served))
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
            safe(row.label),
            str(row.offline.texts),
            f"{length.value:.2f}",
            range_text(length),
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
    table.add_column("cause", overflow="fold")
    table.add_column("change", overflow="fold")
    for heading in ("before", "after", "difference", "95% interval"):
        table.add_column(heading, justify="right")
    for tried in best:
        table.add_row(
            safe(tried.cause),
            safe(tried.edit),
            f"{tried.before:.2f}",
            f"{tried.after:.2f}",
            f"{tried.difference.value:+.2f}",
            range_text(tried.difference),
        )
    return table


# The HTML page.

_OFFLINE = "offline"
_MAX_DIVERGENCES = 20
_TONES: dict[str, html.Tone] = {
    Verdict.FIT: "good",
    Verdict.UNDECIDED: "warning",
    Verdict.UNFIT: "bad",
    Severity.ERROR: "bad",
    Severity.WARNING: "warning",
    Severity.NOTE: "note",
}


def write_page(result: CheckResult, path: Path) -> None:
    write_text(path, page(result))


def page(result: CheckResult) -> str:
    sections = [
        _findings(result),
        _acceptance(result),
        _parity(result),
        _lossless(result),
        _tried(result),
        _versions(result),
    ]
    return html.render(
        html.Page(
            command="check",
            heading=f"{last_part(result.drafter)} for {last_part(result.target)}",
            facts=_facts(result),
            verdict=html.Verdict(
                _TONES[result.verdict], [sentence(result)], word=result.verdict.value
            ),
            cards=_cards(result),
            sections=[section for section in sections if section is not None],
        )
    )


def _facts(result: CheckResult) -> list[str]:
    facts = [f"target {result.target}", f"drafter {result.drafter}"]
    if result.draft_tokens is not None:
        facts.append(f"{result.draft_tokens} draft tokens per step")
    if result.date:
        facts.append(result.date)
    return [*facts, f"{result.seconds:.0f} seconds"]


def _cards(result: CheckResult) -> list[html.Card]:
    cards = []
    if result.offline is not None:
        length = result.offline.overall.length
        cards.append(
            html.Card("tokens per step, offline", f"{length.value:.2f}", range_text(length))
        )
    for served in result.served:
        name, steps = f"tokens per step, {served_label(served)}", f"{served.steps:,} steps"
        cards.append(html.Card(name, f"{served.length:.2f}", steps))
    if result.parity is not None and result.parity.drafts:
        share = result.parity.equal_drafts / result.parity.drafts
        count = f"of {result.parity.drafts:,}"
        cards.append(html.Card("drafts equal to the reference", f"{share:.1%}", count))
    if result.lossless is not None and result.lossless.texts:
        share = result.lossless.equal_texts / result.lossless.texts
        cards.append(html.Card("texts unchanged", f"{share:.0%}", f"of {result.lossless.texts}"))
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


def _acceptance(result: CheckResult) -> html.Section | None:
    if result.offline is None:
        return None
    explained = (
        "Tokens per step of the target, its own token included. Offline: computed by the reference "
        "implementation along the target's own greedy texts, with 95% confidence intervals over "
        "texts. Served: from vLLM's counters."
    )
    by_position = charts.lines(
        _by_position(result),
        "acceptance by position in the block",
        "position in the block",
        "share of steps that accept it",
    )
    blocks: list[html.Block] = [
        html.Text(explained, soft=True),
        html.Heading("By prompt set"),
        html.Drawing(charts.bars(_by_set(result), "acceptance length by prompt set")),
        html.Heading("By position in the block"),
        html.Drawing(by_position),
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


def _by_position(result: CheckResult) -> list[charts.Series]:
    assert result.offline is not None
    shares = result.offline.overall.by_position
    points = [_point(str(position), share) for position, share in enumerate(shares, start=1)]
    series = [charts.Series(_OFFLINE, points)]
    for served in result.served:
        points = [
            charts.Point(str(position), share)
            for position, share in enumerate(served.by_position, start=1)
        ]
        series.append(charts.Series(served_label(served), points))
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
    worst = sorted(lossless.divergences, key=lambda each: -each.logit_gap)[:_MAX_DIVERGENCES]
    if worst:
        rows = [[each.prompt_set, f"{each.position}", f"{each.logit_gap:.3g}"] for each in worst]
        table = html.Table(["prompts", "position in the answer", "logit gap"], rows, text_columns=1)
        blocks.append(html.Folded("Where texts differ, largest logit gap first", [table]))
    return html.Section("Losslessness", blocks)


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
    rows = [
        [
            each.cause,
            each.edit,
            f"{each.before:.3f}",
            f"{each.after:.3f}",
            f"{each.difference.value:+.3f}",
            range_text(each.difference),
        ]
        for each in best
    ]
    heads = ["cause", "change", "before", "after", "difference", "95% interval"]
    return html.Section(
        "Changes tried",
        [
            html.Text(explained, soft=True),
            html.Drawing(charts.intervals(points, "gain of each change")),
            html.Table(heads, rows, text_columns=2),
        ],
    )


def _versions(result: CheckResult) -> html.Section | None:
    if not result.versions:
        return None
    rows = [[name, version] for name, version in result.versions.items()]
    return html.Section(
        "", [html.Folded("Versions", [html.Table(["", "version"], rows, text_columns=2)])]
    )


def _point(label: str, interval: Interval) -> charts.Point:
    return charts.Point(label, interval.value, interval.low, interval.high)
