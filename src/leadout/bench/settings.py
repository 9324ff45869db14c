"""What a bench measures, and how: kept beside the rounds, so that only the same one goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from leadout.checkpoints.store import replacing
from leadout.pairing.names import last_part

BARE = "bare"
FEWEST_REQUESTS = 3  # of a cell


class BenchError(ValueError):
    """The bench cannot be made as asked."""


class Arm(BaseModel):
    """One server that is measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: Literal["bare", "fixed", "tuned", "live"]
    drafter: str | None = None
    draft_tokens: int | None = None  # K of a fixed arm
    tuned: str | None = None  # the file of a tuned arm; a live one starts from it

    @property
    def is_bare(self) -> bool:
        return self.name == BARE


class BenchSettings(BaseModel):
    """One cell is a prompt set at a concurrency; each round measures it once on every arm."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    arms: list[Arm]
    prompts: dict[str, str]  # of each prompt set, the hash of its prompts
    concurrencies: list[int]
    rounds: int
    waves: int  # requests of a cell for each place in its concurrency
    output_tokens: int
    flags: list[str]  # of all servers

    def requests_at(self, concurrency: int) -> int:
        return max(FEWEST_REQUESTS, self.waves * concurrency)

    def goes_on_from(self, earlier: BenchSettings) -> bool:
        """Whether rounds of an earlier run count in this one: only their number may differ."""
        return self.model_copy(update={"rounds": earlier.rounds}) == earlier

    def without_folders(self) -> Self:
        """Folders of this machine mean nothing elsewhere."""

        def short(name: str | None) -> str | None:
            return None if name is None else last_part(name)

        arms = [
            arm.model_copy(update={"drafter": short(arm.drafter), "tuned": short(arm.tuned)})
            for arm in self.arms
        ]
        return self.model_copy(update={"target": last_part(self.target), "arms": arms})

    def write(self, path: Path) -> None:
        with replacing(path) as temporary:
            temporary.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
