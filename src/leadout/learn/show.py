"""What a person sees of learning in the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leadout.checkpoints.errors import printable
from leadout.learn.gate import Comparison
from leadout.learn.result import TRAFFIC, LearnResult
from leadout.learn.status import Status, VersionStatus


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
