"""Admin endpoints of a server that follows a registry (entry point `vllm.endpoint_plugins`).

    GET  /leadout/drafter                     the version in service and its acceptance so far
    POST /leadout/swap     {"version": 3}     swap to another version of the registry

Both require `Authorization: Bearer KEY` with the key from LEADOUT_ADMIN_KEY; without that variable
the routes do not exist. A version is a number: no path, name or code can be given. The follower of
the registry's pointer runs with or without a key.
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
from leadout.engine.rollout import Follower, ServingDrafter, served_requests_file
from leadout.engine.settings import followed_registry, version_of_drafter
from leadout.engine.vllm_adapter import ROLLOUT, engine_count, is_usable

logger = logging.getLogger("vllm.leadout")

KEY = "LEADOUT_ADMIN_KEY"
MAX_BODY_BYTES = 1024


class SwapRequest(BaseModel):
    """The body of `POST /leadout/swap`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: int = Field(ge=1, lt=10**9)


class AdminPlugin:
    """Adds the routes and starts the follower; the methods are those of vLLM's endpoint plugins."""

    name = "leadout"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        if os.environ.get(KEY) and os.environ.get(SWITCH) != "0":
            app.add_api_route("/leadout/drafter", show_drafter, methods=["GET"])
            app.add_api_route("/leadout/swap", swap, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        if engine_client is None or os.environ.get(SWITCH) == "0":
            return
        config = engine_client.vllm_config
        registry = followed_registry(config)
        if registry is None or not is_usable(ROLLOUT):
            return
        speculation = config.speculative_config
        version = None if speculation is None else version_of_drafter(registry, speculation.model)
        if version is None:
            logger.error(
                "Leadout does not follow %s: the drafter of this server is not one of its "
                "versions. Start the server with `leadout serve TARGET --registry FOLDER`.",
                registry.folder,
            )
            return
        checkpoint = read_checkpoint(registry.path(version), as_served=True)
        max_draft_tokens = checkpoint.config.max_draft_tokens
        drafter = ServingDrafter(
            registry,
            registry.manifest(version),
            Swapper(engine_client, engine_count(config)),
            [served_requests_file(config, engine) for engine in range(engine_count(config))],
            drafts_whole_blocks=speculation.num_speculative_tokens == max_draft_tokens,
        )
        state.leadout_drafter = drafter
        # The event loop holds only a weak reference to its tasks.
        state.leadout_follower = asyncio.create_task(Follower(registry, drafter).follow())


async def show_drafter(request: Request) -> JSONResponse:
    drafter = _authorized_drafter(request)
    if isinstance(drafter, JSONResponse):
        return drafter
    return JSONResponse(asdict(await drafter.report()))


async def swap(request: Request) -> JSONResponse:
    drafter = _authorized_drafter(request)
    if isinstance(drafter, JSONResponse):
        return drafter
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return _error(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    try:
        asked = SwapRequest.model_validate_json(body)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        return _error(422, f'{field}: {first["msg"]}; expected {{"version": NUMBER}}')
    try:
        await drafter.change_to(asked.version, "requested through the admin endpoint")
    except SwapRefusedError as problem:
        return _error(409, str(problem))
    except SwapFailedError as problem:
        return _error(500, str(problem))
    return JSONResponse(asdict(await drafter.report()))


def _authorized_drafter(request: Request) -> ServingDrafter | JSONResponse:
    """The drafter, or an error; nothing else of a request is read before its key is checked."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    key = os.environ.get(KEY, "")
    # Header bytes arrive decoded as latin-1.
    is_right = hmac.compare_digest(given.encode("latin-1"), key.encode())
    if scheme.lower() != "bearer" or not key or not is_right:
        return _error(401, f"expected 'Authorization: Bearer KEY' with the key from {KEY}")
    drafter: ServingDrafter | None = getattr(request.app.state, "leadout_drafter", None)
    return _error(404, "this server follows no registry") if drafter is None else drafter


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status)
