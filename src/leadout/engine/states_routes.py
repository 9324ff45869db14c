"""HTTP routes of a server that hands out hidden states (`leadout serve --states`).

    GET    /leadout/states          what the server extracts, and how much waits to be read
    GET    /leadout/states/NAME     the file of a request, as soon as it is written
    DELETE /leadout/states/NAME     delete it: the reader has it

NAME comes with the reply of /v1/completions, in `kv_transfer_params.states`. With --api-key (or
VLLM_API_KEY) these routes require the same key as /v1.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from leadout.engine.bearer_key import error_response, has_key, refuse_key
from leadout.engine.settings import STATES, StatesSettings, read_section, sections_of
from leadout.engine.states_folder import (
    API_KEY,
    ROUTE,
    StatesError,
    StatesInfo,
    error_of,
    hold,
    path_of,
    remove,
    server_id,
    usage,
)

POLL_SECONDS = 0.01
MAX_WAIT_SECONDS = 60.0


class StatesRoutes:
    def __init__(self, settings: StatesSettings, keys: list[str], max_model_len: int) -> None:
        self._settings = settings
        self._keys = keys
        self._max_model_len = max_model_len

    def info(self) -> StatesInfo:
        settings, used = self._settings, usage(self._settings.folder)
        return StatesInfo(
            layer_ids=settings.layer_ids,
            target_fingerprint=settings.target_fingerprint,
            fp8=settings.fp8,
            folder=settings.folder,
            server_id=server_id(settings.folder) or "",
            max_model_len=self._max_model_len,
            max_bytes=settings.max_bytes,
            waiting_files=used.files,
            waiting_bytes=used.bytes,
        )

    async def read(self, name: str) -> Response:
        path = path_of(self._settings.folder, name)
        deadline = asyncio.get_running_loop().time() + MAX_WAIT_SECONDS
        while not path.exists():
            problem = error_of(path)
            if problem is not None:
                return error_response(507, f"the states could not be written: {problem}")
            if asyncio.get_running_loop().time() > deadline:
                return error_response(404, f"there are no states named {name}")
            await asyncio.sleep(POLL_SECONDS)
        return FileResponse(path, media_type="application/octet-stream")

    def delete(self, name: str) -> Response:
        remove(path_of(self._settings.folder, name))
        return Response(status_code=204)

    def is_allowed(self, request: Request) -> bool:
        return not self._keys or has_key(request, self._keys)


def attach_states(app: FastAPI) -> None:
    app.add_api_route(ROUTE, show_states, methods=["GET"])
    app.add_api_route(f"{ROUTE}/{{name}}", read_states, methods=["GET"])
    app.add_api_route(f"{ROUTE}/{{name}}", delete_states, methods=["DELETE"])


def init_states(vllm_config: Any, state: Any, args: Any) -> None:
    """Prepare the routes of a server that has the section `states`."""
    if STATES not in sections_of(vllm_config):
        return
    settings = read_section(vllm_config, STATES, StatesSettings)
    hold(settings.folder)  # the process that made it has ended if its command came from --plan
    given = getattr(args, "api_key", None) or os.environ.get(API_KEY) or []
    keys = [given] if isinstance(given, str) else [key for key in given if key]
    state.leadout_states = StatesRoutes(settings, keys, vllm_config.model_config.max_model_len)


async def show_states(request: Request) -> Response:
    routes = await _allowed_routes(request)
    if isinstance(routes, Response):
        return routes
    return JSONResponse(routes.info().model_dump(mode="json"))


async def read_states(request: Request, name: str) -> Response:
    routes = await _allowed_routes(request)
    if isinstance(routes, Response):
        return routes
    try:
        return await routes.read(name)
    except StatesError as problem:
        return error_response(422, str(problem))


async def delete_states(request: Request, name: str) -> Response:
    routes = await _allowed_routes(request)
    if isinstance(routes, Response):
        return routes
    try:
        return routes.delete(name)
    except StatesError as problem:
        return error_response(422, str(problem))


async def _allowed_routes(request: Request) -> StatesRoutes | Response:
    routes: StatesRoutes | None = getattr(request.app.state, "leadout_states", None)
    if routes is None:
        return error_response(404, "this server was not started with `leadout serve --states`")
    if not routes.is_allowed(request):
        return await refuse_key("of --api-key")
    return routes
