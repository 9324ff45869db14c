"""Admin endpoints of a server (entry point `vllm.endpoint_plugins`).

A server that hands out hidden states has the routes of `states_routes`. One that follows a registry
has these:

    GET  /leadout/drafter                     the version in service and its acceptance so far
    POST /leadout/swap     {"version": 3}     swap to another version of the registry

Both require `Authorization: Bearer KEY` with the key from LEADOUT_ADMIN_KEY; without that variable,
or with a short key, the routes do not exist. A version is a number: no path, name or code can be
given. The follower of the registry's pointer runs with or without a key.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leadout.checkpoints import read_checkpoint
from leadout.engine.bearer_key import error_response, has_key, refuse_key
from leadout.engine.clients import ClientMiddleware, make_client_tags
from leadout.engine.follower import Follower
from leadout.engine.hot_swap import (
    NotNowError,
    SwapFailedError,
    Swapper,
    SwapRefusedError,
    is_final,
)
from leadout.engine.plugin import SWITCH
from leadout.engine.rollout import ServingDrafter
from leadout.engine.served_requests import served_requests_file
from leadout.engine.settings import followed_registry, version_of_drafter
from leadout.engine.states_routes import attach_states, init_states
from leadout.engine.vllm_adapter import engine_count
from leadout.engine.vllm_internals import ROLLOUT, is_usable
from leadout.errors import LeadoutError
from leadout.files import first_problem
from leadout.registry import Manifest, Registry

logger = logging.getLogger("vllm.leadout")

KEY = "LEADOUT_ADMIN_KEY"
MIN_KEY_LENGTH = 16  # characters; shorter ones can be guessed
MAX_BODY_BYTES = 1024
WAITS_FOR_STORAGE = (1.0, 4.0, 10.0)  # seconds


class SwapRequest(BaseModel):
    """The body of `POST /leadout/swap`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: int = Field(ge=1, lt=10**9)


class AdminPlugin:
    """Adds the routes and starts the follower; the methods are those of vLLM's endpoint plugins."""

    name = "leadout"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        if os.environ.get(SWITCH) == "0":
            return
        attach_states(app)
        app.add_middleware(ClientMiddleware, state=app.state)
        key = os.environ.get(KEY, "")
        if 0 < len(key) < MIN_KEY_LENGTH:
            logger.error(
                "Leadout's admin endpoints are off: %s has %d characters, expected at least %d. "
                "Set a longer key, such as that of `openssl rand -hex 16`.",
                KEY,
                len(key),
                MIN_KEY_LENGTH,
            )
        elif key:
            app.add_api_route("/leadout/drafter", show_drafter, methods=["GET"])
            app.add_api_route("/leadout/swap", swap, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        if engine_client is None or os.environ.get(SWITCH) == "0":
            return
        config = engine_client.vllm_config
        init_states(config, state, args)
        registry = followed_registry(config)
        if registry is None or not is_usable(ROLLOUT):
            return
        speculation = config.speculative_config
        version = None if speculation is None else version_of_drafter(registry, speculation.model)
        if version is None:
            logger.error(
                "Leadout does not follow %s: the drafter of this server is not one of its "
                "versions. Start the server with `leadout serve TARGET --registry FOLDER`.",
                registry.address,
            )
            return
        try:
            manifest, max_draft_tokens = await read_version(registry, version)
        except (LeadoutError, OSError) as problem:
            if is_final(problem):
                raise
            logger.error(
                "Leadout does not follow %s, because version %d could not be read: %s. Serving "
                "goes on with it; restart the server to follow the registry.",
                registry.address,
                version,
                problem,
            )
            return
        drafter = ServingDrafter(
            registry,
            manifest,
            Swapper(engine_client, engine_count(config)),
            [served_requests_file(config, engine) for engine in range(engine_count(config))],
            drafts_whole_blocks=verifies_whole_blocks(speculation, max_draft_tokens),
            # Unlike a process id, the same after a restart.
            server=f"{socket.gethostname()}:{getattr(args, 'port', 0)}",
        )
        state.leadout_drafter = drafter
        state.leadout_client_tags = make_client_tags(config, args)
        # The event loop holds only a weak reference to its tasks.
        state.leadout_follower = asyncio.create_task(Follower(registry, drafter).follow())


def verifies_whole_blocks(speculation: Any, max_draft_tokens: int) -> bool:
    """Whether the counts of this server's steps are those of whole blocks.

    With adaptive verification only the GPU knows how many drafts were verified.
    """
    is_adaptive = bool(speculation.enable_adaptive_verification)
    return speculation.num_speculative_tokens == max_draft_tokens and not is_adaptive


async def read_version(registry: Registry, version: int) -> tuple[Manifest, int]:
    """The manifest of a version and its largest K; storage may be unreachable for a moment."""

    def read() -> tuple[Manifest, int]:
        checkpoint = read_checkpoint(registry.path(version), as_served=True)
        return registry.manifest(version), checkpoint.config.max_draft_tokens

    for seconds in WAITS_FOR_STORAGE:
        try:
            return await asyncio.to_thread(read)
        except (LeadoutError, OSError) as problem:
            if is_final(problem):
                raise
        await asyncio.sleep(seconds)
    return await asyncio.to_thread(read)


async def show_drafter(request: Request) -> JSONResponse:
    drafter = await _authorized_drafter(request)
    if isinstance(drafter, JSONResponse):
        return drafter
    return JSONResponse(asdict(await drafter.report()))


async def swap(request: Request) -> JSONResponse:
    drafter = await _authorized_drafter(request)
    if isinstance(drafter, JSONResponse):
        return drafter
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return error_response(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    try:
        asked = SwapRequest.model_validate_json(body)
    except ValidationError as problem:
        return error_response(
            422, f'{first_problem(problem, "body")}; expected {{"version": NUMBER}}'
        )
    try:
        await drafter.change_to(asked.version, "requested through the admin endpoint")
    except (SwapRefusedError, NotNowError) as problem:
        return error_response(409, str(problem))
    except SwapFailedError as problem:
        return error_response(500, str(problem))
    return JSONResponse(asdict(await drafter.report()))


async def _authorized_drafter(request: Request) -> ServingDrafter | JSONResponse:
    """The drafter, or an error; nothing else of a request is read before its key is checked."""
    if not has_key(request, [os.environ.get(KEY, "")]):
        return await refuse_key(f"from {KEY}")
    drafter: ServingDrafter | None = getattr(request.app.state, "leadout_drafter", None)
    if drafter is None:
        return error_response(404, "this server follows no registry")
    return drafter
