"""A small HTTP server that answers like vLLM's, by a fixed rule, and fails on demand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from leadout.data.chat import Chat
from support.fake_engine import answer_to


class FakeVllmServer:
    """Serves until the `with` block ends; every attribute can be changed while it does."""

    def __init__(self, chat: Chat, model: str = "tiny") -> None:
        self.chat = chat
        self.model = model
        self.max_model_len = 256
        self.served: list[dict[str, Any]] = []  # bodies of the requests that were answered
        self.failing = 0  # the next so many completions end with `status`
        self.status = 500
        self.refused: set[int] = set()  # lengths of prompts that are refused with 400
        self.broken: set[int] = set()  # lengths of prompts that end with 500
        self.is_hanging = threading.Event()  # nothing is answered, connections stay open
        self.is_dead = threading.Event()  # connections are closed without an answer
        self.is_over = threading.Event()  # the block has ended
        self.dies_after: int | None = None  # completions
        self.hangs_after: int | None = None
        self.is_open: Callable[[], bool] = lambda: True  # until then completions wait
        self.without_token_ids = False
        self.has_tokenize = True
        self.pages: set[str] = set()  # paths that are answered with a web page
        self.running = 0
        self.max_running = 0
        self.lock = threading.Lock()
        self._http: ThreadingHTTPServer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        fake = self

        class Handler(_Handler):
            server_state = fake

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_hanging.clear()
        self.is_over.set()
        self._http.shutdown()
        self._http.server_close()

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            self.running += 1
            self.max_running = max(self.running, self.max_running)
        try:
            while not self.is_open() and not self.is_over.is_set():
                time.sleep(0.01)
            with self.lock:
                if body["model"] != self.model:  # as vLLM answers
                    message = f"The model `{body['model']}` does not exist."
                    return 404, {"error": {"message": message}}
                if self.failing:
                    self.failing -= 1
                    return self.status, {"error": {"message": "on demand"}}
                if len(body["prompt"]) in self.refused:
                    return 400, {"error": {"message": "this prompt is refused"}}
                if len(body["prompt"]) in self.broken:
                    return 500, {"error": {"message": "this prompt breaks something"}}
                for after, event in (
                    (self.dies_after, self.is_dead),
                    (self.hangs_after, self.is_hanging),
                ):
                    if after is not None and len(self.served) >= after:
                        event.set()
                        return 503, {}
                self.served.append(body)
        finally:
            with self.lock:
                self.running -= 1
        tokens = answer_to(body["prompt"], body["seed"], body["max_tokens"])
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "stop"}
        if body.get("return_token_ids") and not self.without_token_ids:
            choice |= {"token_ids": tokens, "prompt_token_ids": body["prompt"]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return 200, {
            "id": "c",
            "object": "text_completion",
            "created": 0,
            "model": self.model,
            "choices": [choice],
            "usage": usage,
        }

    def tokenize(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if not self.has_tokenize:
            return 404, {}
        if "prompt" in body:
            return 200, {"tokens": self.chat.plain(body["prompt"])}
        return 200, {"tokens": self.chat.prompt([body["messages"][0]["content"]])}

    def models(self) -> dict[str, Any]:
        card = {"id": self.model, "object": "model", "created": 0, "owned_by": "vllm"}
        more = {"root": f"/models/{self.model}", "max_model_len": self.max_model_len}
        return {"object": "list", "data": [card | more]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: FakeVllmServer

    def do_GET(self) -> None:
        reply = self.server_state.models() if self.path == "/v1/models" else {}
        self._send(200, reply)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = {
            "/v1/completions": self.server_state.complete,
            "/tokenize": self.server_state.tokenize,
        }[self.path]
        self._send(*answer(body))

    def _send(self, status: int, reply: dict[str, Any]) -> None:
        while self.server_state.is_hanging.is_set():
            time.sleep(0.01)
        if self.server_state.is_dead.is_set():
            self.close_connection = True
            self.connection.close()
            return
        is_page = self.path in self.server_state.pages
        content = b"<html></html>" if is_page else json.dumps(reply).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if is_page else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # the client has gone
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass
