"""What a cycle came to: one object for people, machines and the ledger."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leadout.checkpoints.errors import printable
from leadout.learn.config import LearnConfig
from leadout.learn.gate import Comparison, Decision, Evidence
from leadout.registry import ExpectedAcceptance, LedgerEntry, Registry
from leadout.train.config import TrainConfig

TRAFFIC = "traffic"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CurvePoint(_Record):
    """A validation during training, on requests that are neither trained on nor the gate's."""

    step: int
    minutes: float
    by_source: dict[str, float]  # acceptance length


class Adaptation(_Record):
    """How the candidate was made; goes with it as learned.json."""

    parent: int
    steps: int
    best_step: int
    minutes: float
    traffic_requests: int  # trained on
    replay_sequences: int
    config: LearnConfig
    training: TrainConfig
    curve: list[CurvePoint]


class LearnResult(_Record):
    promoted: bool
    version: int | None  # of the candidate, if it was published
    parent: int
    decision: Decision
    evidence: Evidence
    adaptation: Adaptation
    seconds: float


class Started(_Record):
    """A new registry."""

    version: int
    drafter: str
    fingerprint: str

    def text(self) -> str:
        return f"version {self.version} is to be served: {self.drafter}"


def promises_of(evidence: Evidence) -> dict[str, ExpectedAcceptance]:
    """By kind of text; what servers hold the version to."""
    promised = {name: _promise(found) for name, found in evidence.base_by_source.items()}
    if evidence.traffic is not None:
        promised[TRAFFIC] = _promise(evidence.traffic)
    return promised


def numbers_of(evidence: Evidence, adaptation: Adaptation) -> dict[str, float | int | str | bool]:
    """The evidence as a line of the ledger has it."""
    numbers: dict[str, float | int | str | bool] = {
        "parent": adaptation.parent,
        "steps": adaptation.steps,
        "minutes": round(adaptation.minutes, 2),
    }
    for name, found in ((TRAFFIC, evidence.traffic), ("base", evidence.base)):
        if found is not None:
            numbers[f"{name}_requests"] = found.requests
            numbers[f"{name}_before"] = round(found.before.value, 4)
            numbers[f"{name}_after"] = round(found.after.value, 4)
            numbers[f"{name}_change"] = round(found.change.value, 4)
            numbers[f"{name}_change_low"] = round(found.change.low, 4)
    if evidence.lossless is not None:
        numbers["lossless"] = not evidence.lossless.divergences
    return numbers


def _promise(found: Comparison) -> ExpectedAcceptance:
    after = found.after
    return ExpectedAcceptance(
        acceptance_length=after.value, low=after.low, high=after.high, requests=found.requests
    )


# What a registry holds and what was decided about it.


class _StatusRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class VersionStatus(_StatusRecord):
    version: int
    parent: int | None
    made: str
    serving: bool
    mark: str | None  # why it must not be served again
    promises: dict[str, ExpectedAcceptance]


class Status(_StatusRecord):
    serving: int
    versions: list[VersionStatus]
    ledger: list[LedgerEntry]  # oldest first


def read_status(folder: Path) -> Status:
    registry = Registry(folder)
    pointer = registry.require_pointer()
    return Status(
        serving=pointer.version,
        versions=[_version(registry, number, pointer.version) for number in registry.versions()],
        ledger=registry.ledger(),
    )


def _version(registry: Registry, number: int, serving: int) -> VersionStatus:
    manifest, mark = registry.manifest(number), registry.bad_mark(number)
    return VersionStatus(
        version=number,
        parent=manifest.parent,
        made=manifest.made,
        serving=number == serving,
        mark=None if mark is None else mark.reason,
        promises=manifest.promises,
    )


# What a person sees of learning in the terminal.


def print_result(result: LearnResult, console: Console | None = None) -> None:
    console = console or Console()
    made = result.adaptation
    if result.promoted:
        verdict = f"Promoted: version {result.version} in the place of {result.parent}."
    else:
        verdict = f"Rejected: version {result.parent} goes on serving."
    console.print(Text(verdict, style="bold green" if result.promoted else "bold yellow"))
    for reason in result.decision.reasons:
        console.print(Text(printable(f"  {reason}")), soft_wrap=True)
    found = {TRAFFIC: result.evidence.traffic, "base": result.evidence.base}
    found |= {f"  {name}": each for name, each in result.evidence.base_by_source.items()}
    console.print(_comparisons({name: each for name, each in found.items() if each is not None}))
    console.print(
        f"{made.steps} steps in {made.minutes:.1f} minutes on {made.traffic_requests} requests and "
        f"{made.replay_sequences} replayed sequences, {result.seconds / 60:.1f} minutes in all."
    )


def print_status(status: Status, console: Console | None = None) -> None:
    console = console or Console()
    console.print(_versions(status))
    console.print(_ledger(status))


def _comparisons(found: dict[str, Comparison]) -> Table:
    table = _table("Acceptance length on requests that neither drafter was trained on")
    for heading in ("text", "requests", "serving", "candidate", "change", "95%"):
        table.add_column(heading, justify="left" if heading == "text" else "right", no_wrap=True)
    for name, each in found.items():
        change = each.change
        table.add_row(
            printable(name),
            str(each.requests),
            f"{each.before.value:.3f}",
            f"{each.after.value:.3f}",
            f"{change.value:+.1%}",
            f"{change.low:+.1%} to {change.high:+.1%}",
        )
    return table


def _versions(status: Status) -> Table:
    table = _table("Versions")
    for heading in ("version", "from", "made", "promised on traffic"):
        table.add_column(heading, no_wrap=True)
    table.add_column("state", overflow="fold")
    for each in status.versions:
        table.add_row(
            str(each.version),
            "" if each.parent is None else str(each.parent),
            each.made[:16],
            _promised(each),
            Text(_state(each), style="green" if each.serving else "red" if each.mark else ""),
        )
    return table


def _promised(version: VersionStatus) -> str:
    promise = version.promises.get(TRAFFIC)
    if promise is None:
        return "nothing measured"
    return f"{promise.acceptance_length:.3f} ({promise.low:.3f} to {promise.high:.3f})"


def _state(version: VersionStatus) -> str:
    marked = "" if version.mark is None else f"marked: {printable(version.mark)}"
    return "serving" if version.serving else marked


def _ledger(status: Status) -> Table:
    table = _table("Ledger")
    for heading in ("when", "event", "version"):
        table.add_column(heading, no_wrap=True)
    table.add_column("why", overflow="fold")
    for entry in status.ledger:
        version = "" if entry.version is None else str(entry.version)
        table.add_row(entry.when[:16], entry.event.replace("_", " "), version, printable(entry.why))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
