"""The prompts of a check: three small sets that come with Leadout, and long contexts.

The long prompts are lists of records with a question at the end. A wrong rotary setting or a
missing attention window shows only over a long context.

Acceptance on prompts that the drafter was trained on is higher than on new ones, and says little
about traffic: such prompts are noticed, and left out if possible.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

from leadout.data.chat import Chat
from leadout.data.prompt_record import NAME, PromptRecord, PromptRecordError
from leadout.data.prompts import Prompt, read_prompts
from leadout.findings import Finding, note, warning

FOLDER = Path(__file__).parent / "default_prompts"
LONG = "long"
LONG_PROMPTS = 6
MIN_NEW_PROMPTS = 12  # that must remain if those of the training are left out
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


def without_seen(
    prompts: Mapping[str, list[list[int]]], drafter: Path
) -> tuple[dict[str, list[list[int]]], list[Finding]]:
    """The prompts to measure acceptance on, and what was found about the others."""
    try:
        record = PromptRecord.read(drafter)
    except PromptRecordError as problem:
        remedy = "Remove the file if it belongs to something else."
        return dict(prompts), [note("prompt-record-unreadable", str(problem), remedy)]
    if record is None:
        message = (
            f"the drafter has no {NAME}, so prompts of this check that it was trained on cannot be "
            "recognized; on such prompts acceptance would be too high"
        )
        remedy = "None needed if the prompts of this check are new to the drafter."
        return dict(prompts), [note("training-prompts-unknown", message, remedy)]
    return leave_out_seen(prompts, record)


def leave_out_seen(
    prompts: Mapping[str, list[list[int]]], record: PromptRecord
) -> tuple[dict[str, list[list[int]]], list[Finding]]:
    """Leave out the prompts of the record if enough others remain."""
    others = {
        name: [prompt for prompt in part if prompt not in record] for name, part in prompts.items()
    }
    total, left = (sum(map(len, each.values())) for each in (prompts, others))
    seen = total - left
    if not seen:
        return dict(prompts), []
    known = ""
    if record.share < 1:
        known = f" (the record holds {record.share:.0%} of the training prompts)"
    found = f"{seen} of {total} prompts of this check are training prompts of the drafter{known}"
    remedy = "Give prompts that the drafter was not trained on: --prompts FILE."
    evidence = {"seen": seen, "prompts": total}
    if left < MIN_NEW_PROMPTS:
        message = (
            f"{found}, and only {left} are not, so they were kept; acceptance on new prompts is "
            "probably lower than measured"
        )
        return dict(prompts), [warning("training-prompts", message, remedy, **evidence)]
    message = f"{found}; they were left out"
    remaining = {name: part for name, part in others.items() if part}
    return remaining, [warning("training-prompts", message, remedy, **evidence)]


def tasks_in_context(chat: Chat, length: int, count: int) -> list[list[int]]:
    """The same default prompts for every length, each behind as many records as fit."""
    default = prompts_or_default(())
    tasks = default[:: max(1, len(default) // count)][:count]
    # Other records for each length: nothing of a context is in the prefix cache from another one.
    return [
        _in_context(chat, task.text, length + number, length) for number, task in enumerate(tasks)
    ]


def _in_context(chat: Chat, task: str, number: int, max_tokens: int) -> list[int]:
    def prompt(records: int) -> list[int]:
        listed = "\n".join(_record(place, number) for place in range(records))
        return chat.prompt([f"{listed}\n\nIgnore this list of deliveries. {task}"])

    # A record has several tokens, so no more than `max_tokens` of them fit.
    fitting = bisect_right(range(max_tokens), max_tokens, key=lambda count: len(prompt(count)))
    return prompt(max(fitting - 1, 0))


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
