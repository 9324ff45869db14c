"""The measured cells of a bench, a JSON line each, written as soon as one is there."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from leadout.bench.plan import Cell
from leadout.bench.settings import BenchError, BenchSettings
from leadout.checkpoints.store import replacing
from leadout.engine.load import LoadResult

ROUNDS, SETTINGS = "rounds.jsonl", "settings.json"


class Measured(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    cell: Cell
    load: LoadResult


class RoundsFile:
    """`rounds.jsonl` in the out folder; settings.json beside it says what was measured."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / ROUNDS

    def begin(self, settings: BenchSettings, *, resume: bool) -> list[Measured]:
        """What earlier runs have measured; without `resume` there must be nothing."""
        done = self.read()
        if done and not resume:
            raise BenchError(
                f"--out {self._folder}: found the rounds of an earlier bench, wanted an empty "
                "folder; add --resume to go on with them, or choose another folder"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        if done:
            self._require_same(settings)
        settings.write(self._folder / SETTINGS)
        # A line that a kill has cut is written anew, so that the next one starts on its own.
        with replacing(self._path) as temporary:
            temporary.write_text("".join(each.model_dump_json() + "\n" for each in done))
        return done

    def read(self) -> list[Measured]:
        if not self._path.exists():
            return []
        lines = self._path.read_text(encoding="utf-8").splitlines()
        found = []
        for number, line in enumerate(lines, start=1):
            try:
                found.append(Measured.model_validate_json(line))
            except ValidationError as problem:
                if number == len(lines):  # cut by a kill
                    break
                raise BenchError(
                    f"{self._path}, line {number}: found {problem.errors()[0]['msg']}, wanted a "
                    "measured cell; remove the line, or begin in another folder"
                ) from None
        return found

    def append(self, measured: Measured) -> None:
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(measured.model_dump_json() + "\n")

    def _require_same(self, settings: BenchSettings) -> None:
        path = self._folder / SETTINGS
        try:
            earlier = BenchSettings.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError):
            raise BenchError(
                f"{path}: found no settings of an earlier bench, wanted those of {self._path}; "
                "begin in another folder"
            ) from None
        if settings.goes_on_from(earlier):
            return
        ours, theirs = settings.model_dump(), earlier.model_dump()
        name = next(name for name in ours if name != "rounds" and ours[name] != theirs[name])
        raise BenchError(
            f"--resume: found {name} {ours[name]!r}, wanted that of the rounds in {self._folder}: "
            f"{theirs[name]!r}; ask for the same, or begin in another folder"
        )
