"""What a check asks the target: three small sets that come with Leadout, and long contexts.

The long ones are lists of records with a question at the end: a wrong rotary setting or a forgotten
window shows only when there is much to look back at.
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
    sources: Sequence[str], chat: Chat, max_prompt: int
) -> dict[str, list[list[int]]]:
    """Token ids of prompts by set: the user's own files, or those that come with Leadout."""
    found: dict[str, list[list[int]]] = {}
    for prompt in default_or_given(sources):
        tokens = chat.prompt(prompt.turns[:1])
        if len(tokens) <= max_prompt:
            found.setdefault(prompt.source, []).append(tokens)
    if not sources:
        found[LONG] = [_long_prompt(chat, number, max_prompt) for number in range(LONG_PROMPTS)]
    return found


def default_or_given(sources: Sequence[str]) -> list[Prompt]:
    files = list(sources) or [str(path) for path in sorted(FOLDER.glob("*.jsonl"))]
    return read_prompts(files)


def _long_prompt(chat: Chat, number: int, max_prompt: int) -> list[int]:
    """As many records as fit, at most three quarters of what the target may read."""
    records: list[str] = []
    tokens = chat.prompt([_question(records, number)])
    while True:
        more = [*records, *(_record(len(records) + i, number) for i in range(8))]
        longer = chat.prompt([_question(more, number)])
        if len(longer) > max_prompt:
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
