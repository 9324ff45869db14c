"""The look of a page that loads nothing: readable in light and dark, on paper and on a phone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from leadout.report import charts as svg
from leadout.report.charts import STYLE as CHART_STYLE
from leadout.report.charts import WIDTH

STYLE = """
:root { color-scheme: light dark;
  --back: light-dark(#ffffff, #14171c); --ink: light-dark(#1c2330, #e4e8ee);
  --soft: light-dark(#5b6675, #9aa5b4); --rule: light-dark(#dfe4ea, #2c333d);
  --card: light-dark(#f6f8fa, #1c2128);
  --fit: light-dark(#15803d, #4ade80); --doubtful: light-dark(#a16207, #facc15);
  --unfit: light-dark(#b91c1c, #f87171); --note: light-dark(#5b6675, #9aa5b4); }
body { background: var(--back); color: var(--ink); margin: 0 auto; padding: 2rem 1.25rem 4rem;
  max-width: 60rem; font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.4rem 0 .6rem; }
h3 { font-size: .95rem; margin: 1.4rem 0 .3rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); } code { font-size: .9em; }
.verdict { border-left: 6px solid var(--tone); background: var(--card); border-radius: 6px;
  padding: .9rem 1.1rem; margin: 1.2rem 0; overflow-wrap: anywhere; }
.word { color: var(--tone); font-weight: 700; letter-spacing: .04em; text-transform: uppercase; }
.fit { --tone: var(--fit); } .doubtful { --tone: var(--doubtful); }
.unfit { --tone: var(--unfit); } .note { --tone: var(--note); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .8rem; }
.card { background: var(--card); border-radius: 6px; padding: .7rem .9rem; }
.card b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th { text-align: left; color: var(--soft); font-weight: 600; }
th, td { border-bottom: 1px solid var(--rule); padding: .4rem .9rem .4rem 0; vertical-align: top; }
td.long { min-width: 11rem; overflow-wrap: anywhere; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
td.word { white-space: nowrap; font-size: .8rem; }
details { margin-top: .6rem; } summary { cursor: pointer; color: var(--soft); }
@media print { body { max-width: none; padding: 0; } details { display: block; } }
"""

# The parts that every page is made of: the document itself, tables, what is folded away.


def document(title: str, parts: Sequence[str]) -> str:
    """One file without scripts, which loads nothing; empty parts are left out."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{svg.STYLE}</style></head>\n"
        f"<body>\n{chr(10).join(part for part in parts if part)}\n</body></html>\n"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """The first columns are words, the others numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        shown = (
            f"<{tag}{'' if place < words else ' class=number'}>{escape(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr>{''.join(shown)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table>{line(heads, "th")}{body}</table></div>'


def folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


# Charts as a picture of its own: one SVG file for a README, readable on light and dark pages.

_MARGIN, _HEADING_HEIGHT, _GAP = 16, 26, 18
_INK = "#1c2330"
# On its own light ground only the light colours are needed, and every viewer knows those.
_LIGHT = re.sub(r"light-dark\(([^,]+), [^)]+\)", r"\1", CHART_STYLE)
_HEADING = f".heading {{ font: 600 14px system-ui, sans-serif; fill: {_INK}; }}"


def standalone(charts: Sequence[tuple[str, str]]) -> str:
    """Charts below each other, each with its heading."""
    parts, top = [], float(_MARGIN)
    for heading, chart in charts:
        height = float(chart.partition(f'viewBox="0 0 {WIDTH} ')[2].partition('"')[0])
        text = f'x="{_MARGIN}" y="{top + 12:.0f}" class="heading"'
        parts.append(f"<text {text}>{escape(heading)}</text>")
        place = f'x="{_MARGIN}" y="{top + _HEADING_HEIGHT:.0f}" width="{WIDTH}"'
        parts.append(chart.replace("<svg", f'<svg {place} height="{height:.0f}"', 1))
        top += height + _HEADING_HEIGHT + _GAP
    width = WIDTH + 2 * _MARGIN
    box = f'width="{width}" height="{top:.0f}" viewBox="0 0 {width} {top:.0f}"'
    style = f"svg {{ color: {_INK}; }} {_HEADING} {_LIGHT}"
    ground = '<rect width="100%" height="100%" rx="8" fill="#ffffff"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}><style>{style}</style>{ground}'
        f"{''.join(parts)}</svg>\n"
    )
