"""The parts that every page is made of: the document itself, tables, what is folded away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from leadout.pages import svg
from leadout.pages.style import STYLE


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
