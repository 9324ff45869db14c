"""A tuning as one HTML file: tokens per second by K at each batch size, the chosen one marked."""

from __future__ import annotations

from html import escape
from pathlib import Path

from leadout.checkpoints.store import replacing
from leadout.control.tuned import Tuned
from leadout.pages import svg
from leadout.pages.html import document, table
from leadout.pairing.names import last_part
from leadout.tune.rows import rows, tokens_per_second
from leadout.tune.words import next_command, price, verdict

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
        _table(tuned),
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


def _table(tuned: Tuned) -> str:
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
