"""The result of a self-test: one row for each check, what was resolved and measured, and how."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.text import Text

from leadout.console import facts_table, safe, table
from leadout.engine.inspection import WorkerFacts
from leadout.environment import EnvironmentReport
from leadout.errors import NEGATIVE, SUCCESS, printable
from leadout.provenance import Provenance


class Status(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Check(_Part):
    """One row: what was expected of the server, and what was measured."""

    name: str
    status: Status
    expected: str
    measured: str  # of a check that is not applicable, the reason
    remedy: str | None = None  # of a check that failed
    numbers: dict[str, float] = {}


def passed(name: str, expected: str, measured: str, /, **numbers: float) -> Check:
    return Check(
        name=name, status=Status.PASS, expected=expected, measured=measured, numbers=numbers
    )


def failed(name: str, expected: str, measured: str, remedy: str, /, **numbers: float) -> Check:
    return Check(
        name=name,
        status=Status.FAIL,
        expected=expected,
        measured=measured,
        remedy=remedy,
        numbers=numbers,
    )


def not_applicable(name: str, expected: str, reason: str, /, **numbers: float) -> Check:
    return Check(
        name=name,
        status=Status.NOT_APPLICABLE,
        expected=expected,
        measured=reason,
        numbers=numbers,
    )


class ServerRun(_Part):
    """One server of the test."""

    start_seconds: float
    tokens_per_second: list[float] = []  # by window
    graph_steps: dict[str, int] = {}  # steps by the kind of CUDA graph that they ran in


class SelftestResult(_Part):
    """What `leadout selftest` writes."""

    target: str
    drafter: str
    flags: list[str]  # of the user, without keys
    checks: list[Check]
    resolved: WorkerFacts | None  # by vLLM, on the server with everything of Leadout
    servers: dict[str, ServerRun]
    seconds: float
    environment: EnvironmentReport
    provenance: Provenance

    def count(self, status: Status) -> int:
        return sum(check.status is status for check in self.checks)

    @property
    def exit_code(self) -> int:
        return NEGATIVE if self.count(Status.FAIL) else SUCCESS


_STYLES = {Status.PASS: "green", Status.FAIL: "bold red", Status.NOT_APPLICABLE: "dim"}


def print_result(result: SelftestResult, console: Console | None = None) -> None:
    console = console or Console()
    hardware = result.environment.hardware
    console.print(
        facts_table(
            [
                ("engine", result.environment.engine.summary()),
                ("accelerators", ", ".join(hardware.accelerators) or "none"),
                ("flags", " ".join(result.flags) or "none"),
            ]
        )
    )
    shown = table(None, ("check", "result", "measured", "expected"), _rows(result.checks), left=4)
    for row, check in zip(shown.rows, result.checks, strict=True):
        row.style = _STYLES[check.status]
    console.print(shown)
    for check in result.checks:
        if check.remedy is not None:
            console.print(Text.assemble((f"{check.name}: ", "bold"), safe(check.remedy)))
    counts = ", ".join(f"{result.count(status)} {status}" for status in Status)
    console.print(Text(printable(f"{counts}; {result.seconds / 60:.1f} minutes")))


def _rows(checks: Iterable[Check]) -> Iterable[tuple[str, str, str, str]]:
    return ((each.name, str(each.status), each.measured, each.expected) for each in checks)
