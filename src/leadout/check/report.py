"""The terminal report of a check: verdict, findings, tables and the next step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leadout.check import long_context, prefix_cache
from leadout.check.payoff import pays_sentence
from leadout.check.result import (
    TOO_FEW_TEXTS,
    BatchControl,
    CheckResult,
    Lossless,
    Parity,
    ServedAcceptance,
    Tried,
    Verdict,
)
from leadout.console import safe, table
from leadout.evaluate.acceptance import AcceptanceTable
from leadout.findings import Finding, Severity, worst_first
from leadout.models import last_part
from leadout.stats import Interval

MAX_TRIED = 8
TRIED_HEADINGS = ["cause", "change", "before", "after", "difference", "95% interval"]
_OPENINGS = {Verdict.UNFIT: "Do not deploy this pair", Verdict.UNDECIDED: "Look into this first"}
_VERDICT_STYLES = {
    Verdict.FIT: "bold green",
    Verdict.UNDECIDED: "bold yellow",
    Verdict.UNFIT: "bold red",
}
_SEVERITY_STYLES = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def verdict_text(result: CheckResult) -> str:
    """The verdict, with the reason if it is that there were too few texts."""
    undecided = result.verdict is Verdict.UNDECIDED
    if undecided and worst_first(result.findings)[0].name == TOO_FEW_TEXTS:
        return f"{result.verdict.value}: too few texts"
    return result.verdict.value


def sentence(result: CheckResult) -> str:
    """The verdict as one sentence that a person can act on."""
    drafter, target = last_part(result.drafter), last_part(result.target)
    if result.verdict is not Verdict.FIT:
        first = worst_first(result.findings)[0]
        others = len(_problems(result)) - 1
        more = "" if others < 1 else f" ({others} more {'finding' if others == 1 else 'findings'})"
        if first.name == TOO_FEW_TEXTS:
            return f"{first.message[0].upper()}{first.message[1:]}. {first.remedy}{more}"
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
        f"{range_text(length)}){served}. {pays_sentence(result)}"
    )


def next_step(result: CheckResult) -> str:
    """The command to run after this check, or what to do before it is repeated."""
    pair = f"{result.target} {result.drafter}"
    named = {finding.name: finding for finding in result.findings}
    if result.verdict is Verdict.FIT:
        if result.offline is None:
            return f"leadout check {pair}"
        if result.pays is None:
            return f"leadout tune {pair}"
        if result.pays.outcome == "pays":
            return f"leadout serve {result.target} --draft {result.drafter} --tuned FILE"
        if result.pays.outcome == "does not pay":
            return "serve without this drafter, or train a better one with `leadout train`"
        return "repeat the check with more prompts: --prompts FILE"
    if "fixed" in named:
        return named["fixed"].remedy
    if any("edit" in finding.evidence for finding in _problems(result)):
        return f"leadout check {pair} --fix FOLDER writes the repaired drafter"
    return "follow the remedy, then repeat the check"


def _problems(result: CheckResult) -> list[Finding]:
    return [each for each in result.findings if each.severity is not Severity.NOTE]


class AcceptanceRow(NamedTuple):
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


def tried_rows(result: CheckResult, digits: int) -> list[list[str]]:
    """The best changes as cells under `TRIED_HEADINGS`."""
    return [
        [
            each.cause,
            each.edit,
            f"{each.before:.{digits}f}",
            f"{each.after:.{digits}f}",
            f"{each.difference.value:+.{digits}f}",
            range_text(each.difference),
        ]
        for each in best_tried(result)
    ]


def describe_parity(parity: Parity) -> str:
    same = f"{parity.equal_drafts} of {parity.drafts} drafts in {parity.blocks} blocks are equal"
    if parity.first_difference is None:
        return f"{same}: the engine computes the drafts of the reference"
    return f"{same}: engine and reference differ first in {parity.first_difference}"


def describe_lossless(lossless: Lossless) -> str:
    same = f"{lossless.equal_texts} of {lossless.texts} texts are equal with and without drafts"
    if lossless.divergences:
        worst = max(each.logit_gap for each in lossless.divergences)
        same += (
            "; where they differ, the target's logits for the two tokens are at most "
            f"{worst:.2g} apart (allowed: {lossless.largest_allowed_gap:.2g})"
        )
    return same if lossless.control is None else f"{same}. {describe_control(lossless.control)}"


def describe_control(control: BatchControl) -> str:
    gaps = [each.logit_gap for each in control.divergences]
    apart = f"; there the logits are at most {max(gaps):.2g} apart" if gaps else ""
    return (
        f"Control, vLLM without drafts at {control.other_batch} instead of {control.batch} "
        f"requests at a time: {control.equal_texts} of {control.texts} texts are equal{apart}. "
        f"Fisher's exact test of whether drafts change more: p = {control.p_value:.2g}"
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
    verdict = Text(verdict_text(result).upper(), style=_VERDICT_STYLES[result.verdict])
    console.print(Text.assemble(verdict, "  ", safe(sentence(result))))
    if result.findings:
        console.print(_findings_table(result))
    if result.offline is not None:
        console.print(_acceptance_table(result))
    if result.pays is not None and result.verdict is not Verdict.FIT:
        console.print(safe(pays_sentence(result)))
    if result.parity is not None:
        console.print(safe(f"Parity: {describe_parity(result.parity)}."))
    if result.lossless is not None:
        console.print(safe(f"Losslessness: {describe_lossless(result.lossless)}."))
    if result.prefix_cache is not None:
        console.print(safe(f"Prefix cache: {prefix_cache.describe(result.prefix_cache)}."))
    if result.long_context is not None:
        console.print(safe(f"Long contexts: {long_context.describe(result.long_context)}."))
    if result.tried and (verbose or result.verdict is not Verdict.FIT):
        console.print(_tried_table(result))
    for path in written:
        console.print(safe(f"wrote {path}"), soft_wrap=True)
    console.print(safe(f"Next: {next_step(result)}"), soft_wrap=True)


def _findings_table(result: CheckResult) -> Table:
    made = Table("severity", "finding", "what", "remedy", box=box.SIMPLE_HEAD, show_lines=True)
    made.columns[1].overflow = "fold"
    for finding in worst_first(result.findings):
        severity = Text(finding.severity.value, style=_SEVERITY_STYLES[finding.severity])
        texts = (finding.name, finding.message, finding.remedy)
        made.add_row(severity, *(safe(text) for text in texts))
    return made


def _acceptance_table(result: CheckResult) -> Table:
    served_names = (served_label(each) for each in result.served)
    rows = acceptance_rows(result)
    made = table(
        "Acceptance length: tokens per step of the target",
        ("texts", "count", "offline", "95% interval", *served_names),
        (
            (
                row.label,
                str(row.offline.texts),
                f"{row.offline.length.value:.2f}",
                range_text(row.offline.length),
                *("" if value is None else f"{value:.2f}" for value in row.served),
            )
            for row in rows
        ),
    )
    for place, (row, following) in enumerate(pairwise(rows)):
        made.rows[place].end_section = row.kind != following.kind
    return made


def _tried_table(result: CheckResult) -> Table:
    rows = tried_rows(result, digits=2)
    title = f"Changes tried on the drafter, the best {len(rows)} of {len(result.tried)}"
    return table(title, TRIED_HEADINGS, rows, left=2)
