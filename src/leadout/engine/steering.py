"""A request's own word on drafts: `vllm_xargs: {"leadout_draft": "off"}`, or a number at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME = "leadout_draft"
OFF = "off"


class BadSteeringError(ValueError):
    """A value that says neither off nor a number of drafts."""


def draft_cap(arguments: Mapping[str, Any] | None, most: int) -> int:
    """The most drafts that a request wants verified in a step; `most` if it says nothing."""
    asked = (arguments or {}).get(NAME)
    if asked is None:
        return most
    if asked == OFF:
        return 0
    # Over HTTP a number may arrive as text; True is no number.
    if isinstance(asked, int) and not isinstance(asked, bool):
        number = asked
    elif isinstance(asked, str) and asked.isascii() and asked.isdigit():
        number = int(asked)
    else:
        number = -1
    if number < 0:
        raise BadSteeringError(
            f"{NAME} in vllm_xargs: found {asked!r}, wanted {OFF!r} or a whole number from 0 to "
            f"{most}; the request is served as if it said nothing"
        )
    return min(number, most)
