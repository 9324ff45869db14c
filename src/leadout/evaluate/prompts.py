"""The prompts of a check: three small sets that come with Leadout, and long contexts.

The long prompts are lists of records with a question at the end. A wrong rotary setting or a
missing attention window shows only over a long context.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from leadout.data.chat import Chat
from leadout.data.prompts import Prompt, read_prompts

FOLDER = Path(__file__).parent / "default_prompts"
LONG = "long"
LONG_PROMPTS = 6
_TOWNS = ("Alder", "Birch", "Cedar", "Dover", "Elm", "Fern", "Grove", "Heath", "Iris", "Juniper")
_GOODS = ("apples", "bricks", "candles", "desks", "engines", "flour", "glass", "hammers")


def check_prompts(
    files: Sequence[str], chat: Chat, max_tokens: int, per_set: int | None = None
) -> dict[str, list[list[int]]]:
    """Token ids of prompts by set: from the user's files, or from the default sets.

    Prompts longer than `max_tokens` are left out; `per_set` limits the prompts of each set.
    """
    found: dict[str, list[list[int]]] = {}
    for prompt in prompts_or_default(files):
        tokens = chat.prompt(prompt.turns[:1])
        if len(tokens) <= max_tokens:
            found.setdefault(prompt.source, []).append(tokens)
    if not files:
        found[LONG] = [_long_prompt(chat, number, max_tokens) for number in range(LONG_PROMPTS)]
    return {name: prompts[:per_set] for name, prompts in found.items()}


def prompts_or_default(files: Sequence[str]) -> list[Prompt]:
    """The prompts of these files; without files, those that come with Leadout."""
    return read_prompts(list(files) or [str(path) for path in sorted(FOLDER.glob("*.jsonl"))])


def _long_prompt(chat: Chat, number: int, max_tokens: int) -> list[int]:
    """As many records as fit into `max_tokens`."""
    records: list[str] = []
    tokens = chat.prompt([_question(records, number)])
    while True:
        more = [*records, *(_record(len(records) + i, number) for i in range(8))]
        longer = chat.prompt([_question(more, number)])
        if len(longer) > max_tokens:
            return tokens
        records, tokens = more, longer


def _question(records: Sequence[str], number: int) -> str:
    ends = (
        "Continue the list with eight more deliveries in the same form.",
        "Repeat the last ten lines exactly, then say which town appears most often.",
        "Write a summary of these deliveries for a manager.",
    )
    listed = "\n".join(records)
    return f"These deliveries were made this month:\n{listed}\n{ends[number % len(ends)]}"


def _record(place: int, number: int) -> str:
    town = _TOWNS[(place * 7 + number * 3) % len(_TOWNS)]
    goods = _GOODS[(place * 5 + number) % len(_GOODS)]
    amount = (place * 37 + number * 11) % 90 + 10
    return f"{place + 1}. {amount} boxes of {goods} to {town}, paid {amount * 3} dollars."
