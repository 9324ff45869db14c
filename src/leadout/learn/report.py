"""Results of cycles and the status of a registry: as records, for JSON, and on the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from leadout.console import safe, table
from leadout.learn.collector import ServedCounts
from leadout.learn.config import CycleSettings, Record
from leadout.learn.gate import Decision, Evidence
from leadout.provenance import Provenance
from leadout.registry import FIRST, ExpectedAcceptance, LedgerEntry, Registry
from leadout.train.config import TrainConfig

TRAFFIC = "traffic"


class CurvePoint(Record):
    """A validation during training, on sequences that neither training nor the gate uses."""

    step: int
    minutes: float
    by_source: dict[str, float]  # acceptance length


class Adaptation(Record):
    """How the candidate was made; published with it as learned.json."""

    parent: int
    steps: int
    best_step: int
    minutes: float
    traffic_requests: int  # trained on
    replay_sequences: int
    config: CycleSettings
    training: TrainConfig
    curve: list[CurvePoint]


class LearnResult(Record):
    """The outcome of a cycle."""

    promoted: bool
    version: int | None  # of the candidate, if it was published
    parent: int
    decision: Decision
    evidence: Evidence
    adaptation: Adaptation
    seconds: float
    served: ServedCounts | None = None  # None for captured traffic
    provenance: Provenance | None = None  # "drafter" is the version that was served before


class Started(Record):
    """A new registry."""

    version: int
    drafter: str
    fingerprint: str


class VersionStatus(Record):
    version: int
    parent: int | None
    made: str
    serving: bool
    mark: str | None  # why it must not be served again
    promises: dict[str, ExpectedAcceptance]


class Status(Record):
    """The versions of a registry, and every decision about them."""

    serving: int
    versions: list[VersionStatus]
    ledger: list[LedgerEntry]  # oldest first


def expected_acceptance(evidence: Evidence) -> dict[str, ExpectedAcceptance]:
    """The candidate's acceptance by kind of text, with which servers compare the live one."""
    compared = dict(evidence.base_by_source)
    if evidence.traffic is not None:
        compared[TRAFFIC] = evidence.traffic
    return {
        name: ExpectedAcceptance(
            acceptance_length=each.after.value,
            low=each.after.low,
            high=each.after.high,
            requests=each.requests,
            per_request=evidence.served_after if name == TRAFFIC else None,
            before=evidence.served_before if name == TRAFFIC else None,
        )
        for name, each in compared.items()
    }


def ledger_evidence(
    evidence: Evidence, adaptation: Adaptation
) -> dict[str, float | int | str | bool]:
    """The evidence as flat numbers for an entry of the ledger."""
    numbers: dict[str, float | int | str | bool] = {
        "parent": adaptation.parent,
        "steps": adaptation.steps,
        "minutes": round(adaptation.minutes, 2),
    }
    compared = ((TRAFFIC, evidence.traffic), ("base", evidence.base), ("first", evidence.first))
    for name, comparison in compared:
        if comparison is not None:
            numbers[f"{name}_requests"] = comparison.requests
            numbers[f"{name}_before"] = round(comparison.before.value, 4)
            numbers[f"{name}_after"] = round(comparison.after.value, 4)
            numbers[f"{name}_change"] = round(comparison.change.value, 4)
            numbers[f"{name}_change_low"] = round(comparison.change.low, 4)
    if evidence.lossless is not None:
        numbers["lossless"] = not evidence.lossless.divergences
    elif evidence.lossless_left_out is not None:
        numbers["lossless"] = f"left out: {evidence.lossless_left_out}"
    return numbers


def read_status(place: Path | str) -> Status:
    registry = Registry(place)
    serving = registry.require_pointer().version
    versions = []
    for manifest in registry.readable_manifests():
        number = manifest.version
        mark = registry.bad_mark(number)
        versions.append(
            VersionStatus(
                version=number,
                parent=manifest.parent,
                made=manifest.made,
                serving=number == serving,
                mark=None if mark is None else mark.reason,
                promises=manifest.promises,
            )
        )
    return Status(serving=serving, versions=versions, ledger=registry.ledger())


def print_result(result: LearnResult, registry: str, candidate: Path) -> None:
    """The decision with its reasons, the comparison, and what happens next."""
    console = Console()
    made = result.adaptation
    if result.promoted:
        verdict = f"Promoted: version {result.version} replaces version {result.parent}."
        following = f"Servers with --registry {registry} swap to it automatically."
    else:
        outcome = result.decision.verdict.capitalize()
        verdict = f"{outcome}: version {result.parent} stays in service."
        following = f"The candidate is kept in {candidate} until the next cycle."
    console.print(Text(verdict, style="bold green" if result.promoted else "bold yellow"))
    for reason in result.decision.reasons:
        console.print(safe(f"  {reason}"), soft_wrap=True)
    evidence, serving = result.evidence, str(result.parent)
    compared = [(TRAFFIC, serving, evidence.traffic), ("base", serving, evidence.base)]
    compared += [(f"  {name}", serving, each) for name, each in evidence.base_by_source.items()]
    if result.parent != FIRST:
        compared.append(("base", str(FIRST), evidence.first))
        by_source = evidence.first_by_source
        compared += [(f"  {name}", str(FIRST), each) for name, each in by_source.items()]
    rows = [
        [
            name,
            version,
            str(each.requests),
            f"{each.before.value:.3f}",
            f"{each.after.value:.3f}",
            f"{each.change.value:+.1%}",
            f"{each.change.low:+.1%} to {each.change.high:+.1%}",
        ]
        for name, version, each in compared
        if each is not None
    ]
    title = "Acceptance length of a version and the candidate, on requests that no cycle trained on"
    headings = ("text", "version", "requests", "before", "candidate", "change", "95% interval")
    shown = table(title, headings, rows)
    shown.columns[-1].no_wrap = True
    console.print(shown)
    served = result.served
    if served is not None:
        left_out = f"{served.without_beginning} without their beginning, {served.unusable} unusable"
        console.print(
            safe(
                f"{served.sequences} sequences served since the start, {served.used} of them used; "
                f"left out: {left_out}, {served.lost} lost."
            ),
            soft_wrap=True,
        )
    for line in (
        f"{made.steps} steps in {made.minutes:.1f} minutes on {made.traffic_requests} requests and "
        f"{made.replay_sequences} replayed sequences; {result.seconds / 60:.1f} minutes in total.",
        following,
        f"History: leadout learn --registry {registry} --status",
    ):
        console.print(safe(line), soft_wrap=True)


def print_status(status: Status) -> None:
    """Versions and ledger as tables."""
    console = Console()
    headings = ("version", "parent", "made", "expected on traffic", "state")
    rows = [
        [
            str(each.version),
            "" if each.parent is None else str(each.parent),
            each.made[:16],
            _described(each.promises.get(TRAFFIC)),
            "serving" if each.serving else f"marked: {each.mark}" if each.mark else "",
        ]
        for each in status.versions
    ]
    _print_table(console, "Versions", headings, rows)
    rows = [
        [
            entry.when[:16],
            entry.event.replace("_", " "),
            "" if entry.version is None else str(entry.version),
            entry.why,
        ]
        for entry in status.ledger
    ]
    _print_table(console, "Ledger", ("when", "event", "version", "reason"), rows)


def _print_table(
    console: Console, title: str, headings: tuple[str, ...], rows: list[list[str]]
) -> None:
    made = table(title, headings, rows, left=len(headings))
    for column in made.columns[:-1]:  # only the last column, which is long, may wrap
        column.no_wrap = True
    console.print(made)


def _described(expected: ExpectedAcceptance | None) -> str:
    if expected is None:
        return "not measured"
    return f"{expected.acceptance_length:.3f} ({expected.low:.3f} to {expected.high:.3f})"
