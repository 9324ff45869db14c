"""The numbers of a tuning at each measured batch size, for terminal and page."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leadout.checkpoints.errors import printable
from leadout.control.tuned_file import NEARLY_EQUAL, Choice, Gain, Tuned, gain, speedups_at
from leadout.files import replacing
from leadout.models import last_part
from leadout.report import charts as svg
from leadout.report.html import document, table
from leadout.stats import Interval


@dataclass(frozen=True, slots=True)
class Row:
    batch: int
    bare_seconds: Interval
    k: int  # of the table
    speedup: Interval  # of the table
    gain: Gain  # of the best K, also where the table has none
    best_speedup: Interval


def rows(tuned: Tuned) -> list[Row]:
    costs, curve = tuned.costs(), tuned.curve()
    found = []
    for batch in sorted(tuned.verify):
        by_k = tuned.speedup[batch]
        k = tuned.k_at(batch)
        best = k or max((each for each in by_k if each), key=lambda each: by_k[each].value)
        found.append(
            Row(
                batch=batch,
                bare_seconds=tuned.verify[batch][0],
                k=k,
                speedup=_of_table(tuned, batch, k),
                gain=gain(costs, curve, batch, best),
                best_speedup=by_k[best],
            )
        )
    return found


def tokens_per_second(tuned: Tuned, batch: int, k: int) -> Interval:
    """Predicted for a measured batch size and K; its spread is that of the speed-up."""
    bare = batch / tuned.verify[batch][0].value
    return tuned.speedup[batch][k].times(bare)


def _of_table(tuned: Tuned, batch: int, k: int) -> Interval:
    if tuned.most_drafts == 0:  # served bare
        return Interval(value=1.0, low=1.0, high=1.0)
    return tuned.speedup[batch][k]


# What a tuning says, in plain sentences.

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


# A tuning as one HTML file: tokens per second by K at each batch size, the chosen one marked.

CHOSEN = "◆"


def write_page(tuned: Tuned, file: Path, path: Path) -> None:
    """The page of the tuning in `file`, at `path`."""
    with replacing(path) as temporary:
        temporary.write_text(page(tuned, file), encoding="utf-8")


def page(tuned: Tuned, file: Path) -> str:
    name = f"{last_part(tuned.drafter.name)} for {last_part(tuned.target.name)}"
    made = tuned.provenance
    parts = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="soft">{escape(f"{made.date} · {made.machine} · {tuned.dtype}")}</p>',
        _verdict(tuned),
        f"<p><code>{escape(next_command(tuned, file))}</code></p>",
        _html_table(tuned),
        "<h2>Predicted tokens per second by K</h2>",
        f'<p class="soft">{CHOSEN} marks what the table takes; bands are 95% intervals.</p>',
        *(_chart(tuned, batch) for batch in sorted(tuned.speedup)),
        "<h2>Tokens of a step by K</h2>",
        _acceptance(tuned),
    ]
    return document(f"leadout tune: {name}", parts)


def _verdict(tuned: Tuned) -> str:
    kind = "doubtful" if tuned.most_drafts == 0 else "fit"
    cost = price(tuned)
    more = "" if cost is None else f"<p>{escape(cost)}</p>"
    return f'<div class="verdict {kind}"><p>{escape(verdict(tuned))}</p>{more}</div>'


def _chart(tuned: Tuned, batch: int) -> str:
    """A line over K beside the level of the bare engine."""
    chosen = tuned.k_at(batch)
    bare = batch / tuned.verify[batch][0].value
    drafting = [
        svg.Point(
            f"{k} {CHOSEN}" if k == chosen and tuned.most_drafts else str(k),
            found.value,
            found.low,
            found.high,
        )
        for k, found in ((k, tokens_per_second(tuned, batch, k)) for k in tuned.speedup[batch])
    ]
    level = [svg.Point(point.label, bare) for point in drafting]
    title = f"{batch} at a time"
    lines = [svg.Series("with the drafter", drafting), svg.Series("bare", level)]
    chart = svg.lines(lines, title, "K: tokens drafted for each request")
    return f"<h3>{title}</h3>{chart}"


def _acceptance(tuned: Tuned) -> str:
    points = [
        svg.Point(str(k), found.value, found.low, found.high)
        for k, found in sorted(tuned.acceptance.tokens.items())
    ]
    return svg.lines([svg.Series("tokens", points)], "tokens of a step by K", "K")


def _html_table(tuned: Tuned) -> str:
    heads = ("requests", "bare step, ms", "K", "speed-up", "perfect drafter", "free drafter")
    cells = [
        [
            str(row.batch),
            f"{1000 * row.bare_seconds.value:.1f}",
            str(row.k),
            str(row.speedup),
            f"{row.gain.perfect:.2f} (K = {row.gain.k})",
            f"{row.gain.free:.2f} (K = {row.gain.k})",
        ]
        for row in rows(tuned)
    ]
    return table(heads, cells, words=0)


# What a person sees of a tuning in the terminal: a bar while it runs, then verdict and table.


def print_tuned(tuned: Tuned, path: Path, page: Path, console: Console | None = None) -> None:
    console = console or Console()
    sentence = verdict(tuned)
    style = "bold yellow" if tuned.most_drafts == 0 else "bold green"
    console.print(Text(printable(sentence[0].upper() + sentence[1:] + "."), style=style))
    cost = price(tuned)
    if cost is not None:
        console.print(Text(printable(cost)))
    console.print(_table(tuned))
    tokens = tuned.acceptance.tokens[max(tuned.acceptance.tokens)]
    console.print(
        Text(
            f"Acceptance length with K = {max(tuned.acceptance.tokens)}: {tokens} tokens a step; "
            f"{tuned.acceptance.requests} requests over all K."
        )
    )
    console.print(Text(printable(f"Written: {path} and {page}. Next:")))
    console.print(Text(printable(f"  {next_command(tuned, path)}")), soft_wrap=True)


def _table(tuned: Tuned) -> Table:
    table = Table(
        title="Decoding with the best K; speed-ups are over a bare server, with 95% intervals",
        caption="perfect: all drafts stand; free: drafting costs nothing; taken: K of the table",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    headings = ("batch", "bare ms", "K", "tok/s", "speed-up", "perfect", "free", "taken")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows(tuned):
        table.add_row(
            str(row.batch),
            f"{1000 * row.bare_seconds.value:.1f}",
            str(row.gain.k),
            f"{row.gain.tokens_per_second:.0f}",
            str(row.best_speedup),
            f"{row.gain.perfect:.2f}",
            f"{row.gain.free:.2f}",
            str(row.k),
        )
    return table
