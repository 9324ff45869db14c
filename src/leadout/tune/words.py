"""What a tuning says, in plain sentences."""

from __future__ import annotations

import shlex
from pathlib import Path

from leadout.control.table import NEARLY_EQUAL, Choice, speedups_at
from leadout.control.tuned import Tuned

NOTHING_GAINED = "this drafter gains nothing here: serve without it"


def verdict(tuned: Tuned) -> str:
    """One sentence: how many tokens to draft at which load, and where that stops to pay."""
    if tuned.most_drafts == 0:
        return NOTHING_GAINED
    parts = []
    for number, (_, last, k) in enumerate(tuned.table):
        drafts = str(k) if k else "none"
        if number == 0:
            drafts = f"draft {_tokens(k)}"
        if last == tuned.max_batch:
            where = "at every batch size" if number == 0 else "above"
        else:
            where = f"up to {last}" if number else f"up to {_requests(last)} at a time"
        parts.append(f"{drafts} {where}")
    return f"{', '.join(parts)}: {_where_it_loses(tuned)}"


def price(tuned: Tuned) -> str | None:
    """What the drafter costs where it gains nothing; None if there is no such place."""
    if tuned.most_drafts == 0 or tuned.loses_above is None:
        return None
    worst = min(_served(tuned), key=lambda choice: choice.speedup.value)
    if worst.speedup.value > 1 - NEARLY_EQUAL:
        return None
    why = "though it drafts nothing: its context is kept up" if worst.k == 0 else "at best"
    return (
        f"At {_requests(worst.batch)} a server with this drafter has {worst.speedup} of the speed "
        f"of one without, {why}. If most of your load is there, serve without it."
    )


def next_command(tuned: Tuned, path: Path) -> str:
    words = ["leadout", "serve", tuned.target.name]
    if tuned.most_drafts:
        words += ["--draft", tuned.drafter.name, "--tuned", str(path)]
    return shlex.join(words)


def _where_it_loses(tuned: Tuned) -> str:
    if tuned.loses_above is None:
        return f"speculation gains at all of them, up to the {tuned.max_batch} measured"
    above = [choice for choice in _served(tuned) if choice.batch > tuned.loses_above]
    loses = any(choice.speedup.high < 1 for choice in above)
    return f"speculation {'loses' if loses else 'gains nothing'} above {tuned.loses_above}"


def _served(tuned: Tuned) -> list[Choice]:
    """What the table of the file does at every batch size."""
    by_batch = speedups_at(tuned.speedup, tuned.max_batch)
    return [
        Choice(batch, tuned.k_at(batch), by_k[tuned.k_at(batch)])
        for batch, by_k in by_batch.items()
    ]


def _tokens(count: int) -> str:
    if count == 0:
        return "nothing"
    return f"{count} token" if count == 1 else f"{count} tokens"


def _requests(count: int) -> str:
    return f"{count} request" if count == 1 else f"{count} requests"
