"""Bearer keys of Leadout's own HTTP routes, and the errors that these routes answer with."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Sequence

from fastapi import Request
from fastapi.responses import JSONResponse

from leadout.engine.fail_safe import LimitedLog

WRONG_KEY_SECONDS = 0.5  # until a wrong key is refused: trying many of them takes long

_wrong_key_log = LimitedLog(logging.WARNING)


def has_key(request: Request, keys: Sequence[str]) -> bool:
    """Whether the request has one of the keys, as `Authorization: Bearer KEY`.

    All comparisons take the same time, whichever key is compared and wherever it differs.
    """
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Header bytes arrive decoded as latin-1; a key from the environment need not be UTF-8.
    sent = given.encode("latin-1")
    matches = [hmac.compare_digest(sent, os.fsencode(key)) for key in keys if key]
    return scheme.lower() == "bearer" and any(matches)


async def refuse_key(source: str) -> JSONResponse:
    """The answer to a request without the right key; `source` says where the key comes from."""
    _wrong_key_log("Leadout's HTTP routes were asked without the right key")
    await asyncio.sleep(WRONG_KEY_SECONDS)
    return error_response(401, f"expected 'Authorization: Bearer KEY' with the key {source}")


def error_response(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status)
