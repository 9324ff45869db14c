"""Every route of vLLM: what is captured, how a request opts out, and what is left of it.

A route that is new in a release of vLLM makes the first test fail: find out whether it generates
text, and how its requests opt out, before it is added to the table.
"""

from __future__ import annotations

import functools
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import pytest

from leadout.engine.capture import OPT_OUT_ID, REQUEST_ARGUMENT
from leadout.engine.capture_store import segment_paths
from leadout.engine.serve_plan import make_plan
from leadout.engine.server import Server
from leadout.engine.settings import ServeSettings
from leadout.shards import read_shard
from support.marker import Marker, files_with
from support.model_infos import copy_model_infos
from support.models import tiny_llama
from support.tiny_chat import tiny_tokenizer

Kind = Literal["xargs", "sampling params", "request id", "labels", "audio", "pooling", "no text"]
# How requests of a route opt out, or why nothing of them is captured.
ROUTES: dict[str, Kind] = {
    # "vllm_xargs" in the body; the id of the request works, too.
    "/v1/chat/completions": "xargs",
    "/v1/chat/completions/batch": "xargs",
    "/v1/completions": "xargs",
    "/v1/responses": "xargs",
    "/v1/messages": "xargs",
    "/invocations": "xargs",  # any of the bodies above
    # "sampling_params" of the body are vLLM's own, with "extra_args".
    "/inference/v1/generate": "sampling params",
    # Bodies without a place for it: the header X-Request-Id.
    "/cohere/v2/chat": "request id",
    # Answers are labels of one or two tokens, which are never captured.
    "/generative_scoring": "labels",
    "/v1/systemone": "labels",
    # Requests with audio are never captured.
    "/v1/audio/transcriptions": "audio",
    "/v1/audio/translations": "audio",
    "/v1/realtime": "audio",
    # Requests without sampling parameters are never captured.
    **dict.fromkeys(
        (
            "/classify",
            "/pooling",
            "/rerank",
            "/score",
            "/v1/embeddings",
            "/v1/rerank",
            "/v1/score",
            "/v2/embed",
            "/v2/rerank",
        ),
        "pooling",
    ),
    # Nothing is generated.
    **dict.fromkeys(
        (
            "/abort_requests",
            "/adapters",
            "/adapters/{adapter_name}",
            "/cohere/v2/chat/render",
            "/collective_rpc",
            "/detokenize",
            "/docs",
            "/docs/oauth2-redirect",
            "/fault_tolerance/apply",
            "/fault_tolerance/status",
            "/finish_weight_update",
            "/get_world_size",
            "/health",
            "/inference/v1/abort_requests",
            "/init_weight_transfer_engine",
            "/is_paused",
            "/is_scaling_elastic_ep",
            "/is_sleeping",
            "/kv_event_sources",
            "/load",
            "/metrics",
            "/openapi.json",
            "/pause",
            "/ping",
            "/redoc",
            "/release_kv_cache_memory",
            "/reset_encoder_cache",
            "/reset_mm_cache",
            "/reset_prefix_cache",
            "/resume",
            "/scale_elastic_ep",
            "/server_info",
            "/shutdown_weight_transfer_engine",
            "/sleep",
            "/start_draft_weight_update",
            "/start_profile",
            "/start_weight_update",
            "/stop_profile",
            "/tokenize",
            "/tokenizer_info",
            "/update_weight_version",
            "/update_weights",
            "/v1/chat/completions/derender",
            "/v1/chat/completions/render",
            "/v1/completions/derender",
            "/v1/completions/render",
            "/v1/load_lora_adapter",
            "/v1/messages/count_tokens",
            "/v1/messages/render",
            "/v1/models",
            "/v1/responses/render",
            "/v1/responses/{response_id}",
            "/v1/responses/{response_id}/cancel",
            "/v1/unload_lora_adapter",
            "/version",
            "/wake_up",
            "/weight_checker",
            "/weight_info",
        ),
        "no text",
    ),
}


def test_every_route_of_vllm_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVER_DEV_MODE", "ENABLE_COHERE_API", "ALLOW_RUNTIME_LORA_UPDATING"):
        monkeypatch.setenv(f"VLLM_{name}", "1")
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.tasks import POOLING_TASKS
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    flags = ["--enable-scale-out", "--enable-tokenizer-info-endpoint"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    args.enable_fault_tolerance = True
    tasks: Any = ("generate", "transcription", "realtime", *POOLING_TASKS)
    app = build_app(args, supported_tasks=tasks)
    found = {path for route in app.routes for path in [getattr(route, "path", None)] if path}
    assert "/v1/completions" in found
    assert found - ROUTES.keys() == set()  # others exist for some models only


TOKENS = 8
CHAT = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
OPT_OUT = {REQUEST_ARGUMENT: "off"}
TURN = {"role": "user"}


def chat(text: str) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{**TURN, "content": text}], **CHAT}


def completion(text: str) -> dict[str, Any]:
    return {"model": "tiny", "prompt": text, **CHAT}


# One request of each route that generates text, and more forms of some.
BODIES: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "completion": ("/v1/completions", completion),
    "two answers": ("/v1/completions", lambda text: completion(text) | {"n": 2, "temperature": 1}),
    "stream": ("/v1/completions", lambda text: completion(text) | {"stream": True}),
    "chat": ("/v1/chat/completions", chat),
    "batch": (
        "/v1/chat/completions/batch",
        lambda text: chat(text) | {"messages": [[{**TURN, "content": text}]]},
    ),
    "responses": (
        "/v1/responses",
        lambda text: {
            "model": "tiny",
            "input": text,
            "max_output_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "store": False,
        },
    ),
    "messages": (
        "/v1/messages",
        lambda text: {
            "model": "tiny",
            "max_tokens": TOKENS,
            "temperature": 0,
            "messages": [{**TURN, "content": text}],
        },
    ),
    "invocations": ("/invocations", completion),
    "tokens": (
        "/inference/v1/generate",
        lambda text: {
            "model": "tiny",
            "token_ids": ids_of(text),
            "sampling_params": {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
        },
    ),
}
LABELS: dict[str, Any] = {
    "model": "tiny",
    "items": [" yes", " no"],
    "label_token_ids": [5, 6],
    "apply_softmax": False,
}


@functools.cache
def tokenizer() -> Any:
    return tiny_tokenizer()


def ids_of(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text, add_special_tokens=False)
    return found


def marker(name: str) -> Marker:
    """Words that occur nowhere else, different in all their parts from those of other names."""
    draw = Marker.of_ids(crc32(name.encode()), 26, length=24).ids
    text = "".join(chr(97 + number) for number in draw)
    return Marker(tuple(ids_of(text)), text)


class World:
    def __init__(self, folder: Path) -> None:
        self.folder, self.capture, self.target = folder, folder / "capture", folder / "target"
        tiny_llama().save_pretrained(self.target)
        tiny_tokenizer().save_pretrained(self.target)
        for name in ("tmp", "home"):
            (folder / name).mkdir()
        copy_model_infos(folder / "home" / ".cache")

    def server(self) -> Server:
        flags = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "512")
        flags += ("--max-num-seqs", "8", "--served-model-name", "tiny", "--enable-scale-out")
        plan = make_plan(
            ServeSettings(target=str(self.target), vllm_flags=flags, capture=self.capture)
        )
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "TMPDIR": str(self.folder / "tmp"),
            "HOME": str(self.folder / "home"),
        }
        log = self.folder / "server.log"
        return Server(plan.command, log=log, environment=environment | plan.environment)

    def has(self, name: str) -> bool:
        """Whether the words of this name are in the captured traffic."""
        words = list(marker(name).ids)
        return any(
            sample.prompt[start : start + len(words)] == words
            for path in segment_paths(self.capture)
            for _, sample in read_shard(path)
            for start in range(len(sample.prompt))
        )

    def wait_for(self, name: str, seconds: float = 600) -> None:
        """Requests are written in the order in which they end."""
        deadline = time.monotonic() + seconds
        while not (self.capture.is_dir() and self.has(name)):
            assert time.monotonic() < deadline, f"{name} was not captured"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("routes"))


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[Server]:
    with world.server() as running:
        yield running


def send(server: Server, path: str, body: dict[str, Any], **headers: str) -> None:
    data = json.dumps(body).encode()
    fields = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(server.url + path, data, fields)
    with urllib.request.urlopen(request, timeout=900) as response:
        response.read()


@pytest.mark.parametrize("form", BODIES)
def test_a_request_opts_out(server: Server, world: World, form: str) -> None:
    path, body = BODIES[form]
    out, kept = (body(marker(f"{form} {word}").text) for word in ("off", "on"))
    if ROUTES[path] == "sampling params":
        out["sampling_params"]["extra_args"] = OPT_OUT
    else:
        out["vllm_xargs"] = OPT_OUT
    send(server, path, out)
    send(server, path, kept)  # later, so that it is captured later
    world.wait_for(f"{form} on")
    assert not world.has(f"{form} off")


def test_the_id_of_a_request_opts_it_out(server: Server, world: World) -> None:
    for form in ("completion", "chat", "messages", "tokens"):
        path, body = BODIES[form]
        name = {"X-Request-Id": f"{form}-{OPT_OUT_ID}-1"}
        send(server, path, body(marker(f"{form} by id").text), **name)
    send(server, "/v1/completions", completion(marker("after the ids").text))
    world.wait_for("after the ids")
    assert not [form for form in BODIES if world.has(f"{form} by id")]


def test_requests_for_scores_and_beams_are_not_captured(server: Server, world: World) -> None:
    send(server, "/generative_scoring", LABELS | {"query": marker("scores").text})
    beams = completion(marker("beams").text) | {"use_beam_search": True, "n": 2}
    send(server, "/v1/completions", beams | {"vllm_xargs": OPT_OUT})
    send(server, "/v1/completions", completion(marker("after the scores").text))
    world.wait_for("after the scores")
    assert not world.has("scores")
    assert not world.has("beams")


def test_every_route_that_generates_text_was_tried() -> None:
    tried = {path for path, _ in BODIES.values()}
    assert tried == {path for path, kind in ROUTES.items() if kind in ("xargs", "sampling params")}


def test_no_text_is_left_outside_the_captured_traffic(server: Server, world: World) -> None:
    """The last test of this file: it ends the server."""
    server.stop()
    names = [f"{form} {word}" for form in BODIES for word in ("on", "off", "by id")]
    names += ["after the ids", "scores", "beams", "after the scores"]
    markers = [marker(name) for name in names]
    found, searched = files_with(markers, [world.folder], [world.capture])
    assert found == []
    assert searched > 5
    silent = [marker(name) for name in names if not name.endswith((" on", "ids", "scores"))]
    assert files_with([*silent, marker("scores")], [world.capture])[0] == []
    # The search finds what is there.
    assert files_with([marker("chat on")], [world.capture])[0]
