"""The prompts of a bench: sets of first turns, of which every round takes others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from leadout.bench.settings import BenchError
from leadout.check.prompts import default_or_given
from leadout.data.prompts import prompts_hash


@dataclass(frozen=True, slots=True)
class PromptSet:
    name: str
    texts: tuple[str, ...]
    hash: str

    def of_round(self, number: int, count: int) -> list[str]:
        """The prompts of a round, which begin where those of the round before ended."""
        return [self.texts[(number * count + i) % len(self.texts)] for i in range(count)]


def read_sets(sources: Sequence[str]) -> list[PromptSet]:
    """One set for each file; without a file, the small sets that come with Leadout."""
    prompts = default_or_given(sources)
    if not all(prompt.turns for prompt in prompts):
        raise BenchError(
            "--prompts: found prompts that the target writes itself, wanted texts; give files"
        )
    names = dict.fromkeys(prompt.source for prompt in prompts)
    by_set = {name: [prompt for prompt in prompts if prompt.source == name] for name in names}
    return [
        PromptSet(name, tuple(prompt.turns[0] for prompt in part), prompts_hash(part))
        for name, part in by_set.items()
    ]


def write_prompts(texts: Sequence[str], path: Path) -> Path:
    """As vLLM's load generator reads them."""
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path
