"""What a person sees of a tuning in the terminal: a bar while it runs, then verdict and table."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leadout.checkpoints.errors import printable
from leadout.control.tuned import Tuned
from leadout.tune.rows import rows
from leadout.tune.words import next_command, price, verdict


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
