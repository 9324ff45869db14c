"""The report of a tuning: the verdict in one sentence, a terminal table and an HTML page."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leadout.control.tuned_file import NEARLY_EQUAL, Choice, Gain, Tuned, gain, speedups_at
from leadout.errors import printable
from leadout.files import write_text
from leadout.models import last_part
from leadout.report import charts, html
from leadout.stats import Interval

NO_GAIN = "this drafter does not speed up serving on this machine: serve without it"
CHOSEN = "◆"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured batch size."""

    batch: int
    bare_seconds: Interval
    k: int  # in the table
    speedup: Interval  # with that K
    gain: Gain  # with the best K, also where the table drafts nothing
    best_speedup: Interval


def rows(tuned: Tuned) -> list[Row]:
    costs, curve = tuned.costs(), tuned.curve()
    found = []
    for batch in sorted(tuned.verify):
        by_k = tuned.speedup[batch]
        k = tuned.k_at(batch)
        best = k or max((each for each in by_k if each), key=lambda each: by_k[each].value)
        served_bare = Interval(value=1.0, low=1.0, high=1.0)
        found.append(
            Row(
                batch=batch,
                bare_seconds=tuned.verify[batch][0],
                k=k,
                speedup=by_k[k] if tuned.max_drafts else served_bare,
                gain=gain(costs, curve, batch, best),
                best_speedup=by_k[best],
            )
        )
    return found


def verdict(tuned: Tuned) -> str:
    """One sentence: how many tokens to draft at which load, and where speculation stops paying."""
    if tuned.max_drafts == 0:
        return NO_GAIN
    parts = []
    for number, (_, last, k) in enumerate(tuned.table):
        drafts = str(k) if k else "none"
        if number == 0:
            drafts = f"draft {_plural(k, 'token')}" if k else "draft nothing"
        if last == tuned.max_batch:
            where = "at every batch size" if number == 0 else "above"
        else:
            requests = _plural(last, "concurrent request")
            where = f"up to {last}" if number else f"up to {requests}"
        parts.append(f"{drafts} {where}")
    return f"{', '.join(parts)}: {_limit(tuned)}"


def overhead_warning(tuned: Tuned) -> str | None:
    """What the drafter costs where it gains nothing; None if it costs nothing anywhere."""
    if tuned.max_drafts == 0 or tuned.loses_above is None:
        return None
    worst = min(_choices(tuned), key=lambda choice: choice.speedup.value)
    if worst.speedup.value > 1 - NEARLY_EQUAL:
        return None
    why = "even without drafting, because the drafter's context must be kept up to date"
    return (
        f"At {_plural(worst.batch, 'concurrent request')} a server with this drafter runs at "
        f"{worst.speedup} of the speed of one without it{'' if worst.k else f', {why}'}. If most "
        "of your load is there, serve without it."
    )


def next_command(tuned: Tuned, path: Path) -> str:
    words = ["leadout", "serve", tuned.target.name]
    if tuned.max_drafts:
        words += ["--draft", tuned.drafter.name, "--tuned", str(path)]
    return shlex.join(words)


def _limit(tuned: Tuned) -> str:
    if tuned.loses_above is None:
        return f"speculation is faster at every batch size up to the measured {tuned.max_batch}"
    above = [choice for choice in _choices(tuned) if choice.batch > tuned.loses_above]
    is_slower = any(choice.speedup.high < 1 for choice in above)
    return f"speculation is {'slower' if is_slower else 'not faster'} above {tuned.loses_above}"


def _choices(tuned: Tuned) -> list[Choice]:
    """What the table does at every batch size."""
    by_batch = speedups_at(tuned.speedup, tuned.max_batch)
    return [
        Choice(batch, tuned.k_at(batch), by_k[tuned.k_at(batch)])
        for batch, by_k in by_batch.items()
    ]


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# The HTML page.


def write_page(tuned: Tuned, file: Path, path: Path) -> None:
    """The page of the tuning in `file`, written to `path`."""
    write_text(path, page(tuned, file))


def page(tuned: Tuned, file: Path) -> str:
    made, warning = tuned.provenance, overhead_warning(tuned)
    heads = ("batch size", "bare step, ms", "K", "speed-up", "perfect drafter", "free drafter")
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
    by_k: list[html.Block] = [
        html.Text(f"{CHOSEN} marks the K in the table; bands are 95% intervals.", soft=True)
    ]
    for batch in sorted(tuned.speedup):
        heading = html.Heading(_plural(batch, "concurrent request"))
        by_k += [heading, html.Drawing(_throughput(tuned, batch))]
    tokens = [_point(str(k), found) for k, found in sorted(tuned.acceptance.tokens.items())]
    acceptance = charts.lines(
        [charts.Series("tokens", tokens)], "tokens per step by K", "K", "tokens per step"
    )
    return html.render(
        html.Page(
            command="tune",
            heading=f"{last_part(tuned.drafter.name)} for {last_part(tuned.target.name)}",
            facts=[made.date, made.machine, tuned.dtype],
            verdict=html.Verdict(
                "good" if tuned.max_drafts else "warning",
                [verdict(tuned), *([] if warning is None else [warning])],
            ),
            sections=[
                html.Section(
                    "",
                    [
                        html.Command(next_command(tuned, file), label="Next:"),
                        html.Table(heads, cells, text_columns=0),
                    ],
                ),
                html.Section("Predicted tokens per second by K", by_k),
                html.Section("Tokens per step by K", [html.Drawing(acceptance)]),
            ],
        )
    )


def _throughput(tuned: Tuned, batch: int) -> charts.Chart:
    """A line over K, beside the throughput of the bare engine."""
    chosen = tuned.k_at(batch)
    bare = batch / tuned.verify[batch][0].value
    drafting = [
        _point(f"{k} {CHOSEN}" if k == chosen and tuned.max_drafts else str(k), speedup.times(bare))
        for k, speedup in tuned.speedup[batch].items()
    ]
    return charts.lines(
        [
            charts.Series("with the drafter", drafting),
            charts.Series("bare", [charts.Point(point.label, bare) for point in drafting]),
        ],
        f"throughput by K at batch size {batch}",
        "K: draft tokens per request and step",
        "tokens per second",
    )


def _point(label: str, interval: Interval) -> charts.Point:
    return charts.Point(label, interval.value, interval.low, interval.high)


# The terminal.


def print_tuned(tuned: Tuned, path: Path, page: Path, console: Console | None = None) -> None:
    console = console or Console()
    sentence = verdict(tuned)
    style = "bold green" if tuned.max_drafts else "bold yellow"
    console.print(Text(printable(f"{sentence[0].upper()}{sentence[1:]}."), style=style))
    warning = overhead_warning(tuned)
    if warning is not None:
        console.print(Text(printable(warning)))
    console.print(_table(tuned))
    max_k = max(tuned.acceptance.tokens)
    console.print(
        Text(
            f"Acceptance length with K = {max_k}: {tuned.acceptance.tokens[max_k]} tokens per "
            f"step; {tuned.acceptance.requests} requests over all K."
        )
    )
    console.print(Text(printable(f"Wrote {path} and {page}. Next:")))
    console.print(Text(printable(f"  {next_command(tuned, path)}")), soft_wrap=True)


def _table(tuned: Tuned) -> Table:
    table = Table(
        title="Decoding with the best K; speed-up over a bare server, 95% intervals",
        caption="perfect: every draft accepted; free: drafting costs nothing; table: K to serve",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    headings = ("batch", "bare ms", "K", "tok/s", "speed-up", "perfect", "free", "table")
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
