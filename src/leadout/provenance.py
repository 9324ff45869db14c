"""How a result file was made, to reproduce it: command, code, models, versions, machine, times."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from leadout.version import installed_versions

REDACTED = "REDACTED"
THREADS = "OMP_NUM_THREADS"
_PACKAGE = Path(__file__).resolve().parent

# A value after one of these words in the name of a flag, variable or field is a secret. "Tokens"
# and "keys" are also counted, so numbers after the plurals are kept; --mask-token-id is no secret.
_SECRET = re.compile(
    r"(?:key|secrets?|passwords?|passwd|passphrase|credentials?|token(?![-_]?ids?))$|"
    r"(?:key|secret|password|passphrase|credential|token(?![-_]?ids?))[-_.]",
    re.IGNORECASE,
)
_COUNTED = re.compile(r"(?:tokens|keys)(?:[-_.]|$)", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?\d[\d_,.]*[kmgt]?", re.IGNORECASE)
# NAME=value, "name": "value" and name: value inside of one argument.
_ASSIGNED = re.compile(
    r"""(?P<name>[\w.-]+)(?P<between>["']?\s*[=:]\s*["']?)(?P<value>[^\s"',;{}\[\]]+)"""
)
# Secrets that are recognized without a name: keys of hubs and of APIs, and passwords in addresses.
_SHAPES = re.compile(
    r"\b(?:hf_|sk-|ghp_|github_pat_)\w[\w-]{7,}|(?<=://)[^\s/@]+(?=@)|(?<=[Bb]earer )\S+"
)


@dataclass(frozen=True, slots=True)
class RunStart:
    """What only the beginning of a run can record."""

    time: str
    load: tuple[float, float, float] | None
    commit: str | None

    @classmethod
    def now(cls) -> Self:
        return cls(_now(), _load(), source_commit())


class Provenance(BaseModel):
    """The command, code, models, versions, machine and times of a result.

    Fields that are None were not recorded: the result was made by an earlier version.
    """

    model_config = ConfigDict(extra="forbid")

    command: str
    date: str
    versions: dict[str, str]
    machine: str
    # Of the tree that Leadout runs from, ending in -dirty if its code was changed since; None for
    # an installed package.
    commit: str | None = None
    # Fingerprints by role: "target", "drafter", or "drafter NAME" where there are several.
    models: dict[str, str] | None = None
    processor: str | None = None
    # OMP_NUM_THREADS, with which an engine on a CPU uses fewer cores; None also if it was not set.
    thread_limit: str | None = None
    # Over 1, 5 and 15 minutes.
    load_before: tuple[float, float, float] | None = None
    load_after: tuple[float, float, float] | None = None
    started: str | None = None  # UTC, ISO 8601
    ended: str | None = None

    @classmethod
    def of_this_run(
        cls, models: Mapping[str, str] | None = None, started: RunStart | None = None
    ) -> Self:
        """To be called at the end of a run.

        `models` are fingerprints by role, see `models.fingerprint`. `started` was recorded with
        `RunStart.now()` at the beginning: code may be changed while a run goes on.
        """
        script, *arguments = sys.argv
        return cls(
            command=" ".join(
                [*_program(Path(script)), *map(shlex.quote, shown_arguments(arguments))]
            ),
            date=datetime.now(UTC).date().isoformat(),
            versions=installed_versions(),
            machine=machine(),
            commit=source_commit() if started is None else started.commit,
            models=None if models is None else dict(models),
            processor=_processor(),
            thread_limit=os.environ.get(THREADS),
            load_before=None if started is None else started.load,
            load_after=_load(),
            started=None if started is None else started.time,
            ended=_now(),
        )


def machine() -> str:
    return f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def source_commit() -> str | None:
    """The commit of the tree that this package runs from, with `-dirty` if code was changed.

    None for an installed package, also if its environment is inside of somebody's repository.
    """
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    # Only code: results and pages are written by the runs themselves.
    changed = _git("status", "--porcelain", "--", ":/*.py", ":/pyproject.toml")
    return f"{commit}-dirty" if changed else commit


def shown_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command as others may see them: without secrets and without folders."""
    return [_without_folders(each) for each in redacted(arguments)]


def redacted(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command without keys, tokens and passwords."""
    shown: list[str] = []
    name = ""  # of the flag whose values are read
    for argument in arguments:
        if argument.startswith("-") and not _NUMBER.fullmatch(argument):
            flag, equals, value = argument.partition("=")
            name = "" if equals else flag.lstrip("-")
            hide = equals and _is_secret(flag.lstrip("-"), value)
            shown.append(f"{flag}={REDACTED}" if hide else _redacted_inside(argument))
        elif name and _is_secret(name, argument):
            shown.append(REDACTED)
        else:
            shown.append(_redacted_inside(argument))
        if not argument.startswith("-") and not _SECRET.search(name):
            name = ""  # flags such as vLLM's --api-key take several values, counts take one
    return shown


def _redacted_inside(argument: str) -> str:
    def hide(found: re.Match[str]) -> str:
        if not _is_secret(found["name"], found["value"]):
            return found[0]
        return f"{found['name']}{found['between']}{REDACTED}"

    return _ASSIGNED.sub(hide, _SHAPES.sub(REDACTED, argument))


def _is_secret(name: str, value: str) -> bool:
    if _SECRET.search(name):
        return True
    return bool(_COUNTED.search(name)) and not _NUMBER.fullmatch(value)


def _git(*arguments: str) -> str | None:
    """The output of git in the package's folder; None if git or a repository is missing."""
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    try:
        ended = subprocess.run(
            ["git", *arguments],
            cwd=_PACKAGE,
            env={**environment, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def _processor() -> str | None:
    """The model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or None


def _load() -> tuple[float, float, float] | None:
    try:
        one, five, fifteen = os.getloadavg()
    except OSError:
        return None
    return round(one, 2), round(five, 2), round(fifteen, 2)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _program(script: Path) -> list[str]:
    """`leadout`, however it was started, or the Python script from the root of the repository."""
    if script.name == "leadout" or script.parts[-2:] == ("leadout", "__main__.py"):
        return ["leadout"]
    return ["python", str(Path(*script.parts[-2:]) if script.is_absolute() else script)]


def _without_folders(argument: str) -> str:
    """Absolute paths are shortened to their last part, since folders differ between machines."""
    return Path(argument).name if Path(argument).is_absolute() else argument
