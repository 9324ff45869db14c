"""Charts as a picture of its own: one SVG file for a README, readable on light and dark pages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from leadout.pages.svg import STYLE, WIDTH

_MARGIN, _HEADING_HEIGHT, _GAP = 16, 26, 18
_INK = "#1c2330"
# On its own light ground only the light colours are needed, and every viewer knows those.
_LIGHT = re.sub(r"light-dark\(([^,]+), [^)]+\)", r"\1", STYLE)
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
