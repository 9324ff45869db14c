"""The server's own word on its drafter, and swaps by hand (entry point `vllm.endpoint_plugins`).

    GET  /leadout/drafter                     which version is served, and how it does
    POST /leadout/swap     {"version": 3}     serve another version of the registry

Both want `Authorization: Bearer KEY` with the key in LEADOUT_ADMIN_KEY; without that variable there
are no such routes. A version is a number: no path, name or code can be given. The follower of the
registry's pointer runs with or without a key.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leadout.checkpoints import read_checkpoint
from leadout.engine.hot_swap import SwapFailedError, Swapper, SwapRefusedError
from leadout.engine.plugin import SWITCH
from leadout.engine.rollout import NUMBERS, Follower, ServingDrafter
from leadout.engine.settings import followed_registry, version_of_drafter
from leadout.engine.small_files import small_file

logger = logging.getLogger("vllm.leadout")  # governed by VLLM_LOGGING_LEVEL

KEY = "LEADOUT_ADMIN_KEY"
MOST_BODY_BYTES = 1024


class SwapAsked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: int = Field(ge=1, lt=10**9)


class AdminPlugin:
    """What vLLM asks of an endpoint plugin."""

    name = "leadout"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        if os.environ.get(KEY) and os.environ.get(SWITCH) != "0":
            app.add_api_route("/leadout/drafter", show_drafter, methods=["GET"])
            app.add_api_route("/leadout/swap", swap, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        registry = None
        if engine_client is not None and os.environ.get(SWITCH) != "0":
            registry = followed_registry(engine_client.vllm_config)
        if registry is None:
            return
        config = engine_client.vllm_config
        speculation = config.speculative_config
        version = None if speculation is None else version_of_drafter(registry, speculation.model)
        if version is None:
            logger.error(
                "Leadout does not follow %s: found a drafter that is no version of it. Start the "
                "server with `leadout serve TARGET --registry FOLDER`.",
                registry.folder,
            )
            return
        most = read_checkpoint(registry.path(version)).config.max_draft_tokens
        drafter = ServingDrafter(
            registry,
            registry.manifest(version),
            Swapper(engine_client),
            small_file(NUMBERS, config.instance_id, config.parallel_config.data_parallel_rank),
            has_whole_blocks=speculation.num_speculative_tokens == most,
        )
        state.leadout_drafter = drafter
        # Kept, for the event loop itself does not keep its tasks.
        state.leadout_follower = asyncio.create_task(Follower(registry, drafter).follow())


async def show_drafter(request: Request) -> JSONResponse:
    drafter = _drafter_for(request)
    if isinstance(drafter, JSONResponse):
        return drafter
    return JSONResponse(asdict(await drafter.report()))


async def swap(request: Request) -> JSONResponse:
    drafter = _drafter_for(request)
    if isinstance(drafter, JSONResponse):
        return drafter
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            return _refusal(413, f"wanted at most {MOST_BODY_BYTES} bytes")
    try:
        asked = SwapAsked.model_validate_json(body)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        return _refusal(422, f'{field}: {first["msg"]}; wanted {{"version": NUMBER}}')
    try:
        await drafter.change_to(asked.version, "asked for by hand")
    except SwapRefusedError as problem:
        return _refusal(409, str(problem))
    except SwapFailedError as problem:
        return _refusal(500, str(problem))
    return JSONResponse(asdict(await drafter.report()))


def _drafter_for(request: Request) -> ServingDrafter | JSONResponse:
    """The drafter, or the refusal; nothing of a request is looked at before its key."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    wanted = os.environ.get(KEY, "")
    # Header bytes arrive as latin-1.
    is_right = hmac.compare_digest(given.encode("latin-1"), wanted.encode())
    if scheme.lower() != "bearer" or not wanted or not is_right:
        return _refusal(401, f"wanted 'Authorization: Bearer KEY' with the key in {KEY}")
    drafter: ServingDrafter | None = getattr(request.app.state, "leadout_drafter", None)
    return _refusal(404, "this server follows no registry") if drafter is None else drafter


def _refusal(status: int, why: str) -> JSONResponse:
    return JSONResponse({"error": why}, status_code=status)
