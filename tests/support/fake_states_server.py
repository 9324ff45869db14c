"""A server of hidden states that fails on demand; its states are a function of the tokens."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save
from torch import Tensor

from leadout.engine.states_folder import ROUTE, new_name

WIDTH = 4
LAYERS = (0, 2, 3)


def fake_states(tokens: list[int]) -> Tensor:
    """[tokens, layers, WIDTH]: each value names its token, layer and place."""
    ids = torch.tensor(tokens, dtype=torch.float32)
    layers = torch.tensor(LAYERS, dtype=torch.float32)
    return ids[:, None, None] + 0.1 * layers[:, None] + 0.01 * torch.arange(WIDTH)


class FakeStatesServer(ThreadingHTTPServer):
    """`faults`, one per text: 500, 400, 401, nan, tokens, drop, lost, slow, or an empty string."""

    daemon_threads = True

    def __init__(self, folder: Path, **info: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.faults: list[str] = []
        self.every: str | None = None  # a fault of all further texts
        self.computed: list[list[int]] = []
        self.files: dict[str, bytes] = {}
        self.deleted: list[str] = []
        self.keys: list[str | None] = []
        self.running = self.most_running = 0
        self.lock = threading.Lock()
        self.info = {
            "layer_ids": LAYERS,
            "target_fingerprint": "a-target",
            "fp8": False,
            "folder": str(folder),
            "server_id": "of-another-machine",
            "max_model_len": 100,
            "max_bytes": 1 << 20,
            "waiting_files": 0,
            "waiting_bytes": 0,
        } | info

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Dropped connections are on purpose."""


class _Handler(BaseHTTPRequestHandler):
    server: FakeStatesServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        if self.path == ROUTE:
            return self._reply(200, json.dumps(self.server.info).encode())
        content = self.server.files.get(self.path.removeprefix(f"{ROUTE}/"))
        if content is None:
            return self._reply(404, b'{"error": "there are no such states"}')
        return self._reply(200, content)

    def do_DELETE(self) -> None:
        name = self.path.removeprefix(f"{ROUTE}/")
        self.server.files.pop(name, None)
        self.server.deleted.append(name)
        self._reply(204, b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self._counted():
            self._compute(body["prompt"])

    def _compute(self, tokens: list[int]) -> None:
        server = self.server
        with server.lock:
            fault = server.every or (server.faults.pop(0) if server.faults else "")
        if fault == "slow":
            time.sleep(0.2)
        if fault == "drop":
            self.close_connection = True
            self.connection.close()
            return
        if fault in ("500", "400", "401"):
            self._reply(int(fault), b'{"error": {"message": "on demand"}}')
            return
        states, ids = fake_states(tokens), torch.tensor(tokens)
        if fault == "nan":
            states[-1, -1, -1] = torch.nan
        if fault == "tokens":
            ids = ids + 1
        name = new_name()
        content = {"states": states, "tokens": ids, "layers": torch.tensor(LAYERS)}
        if fault != "lost":
            server.files[name] = save(content)
        server.computed.append(tokens)
        self._reply(200, json.dumps({"kv_transfer_params": {"states": name}}).encode())

    @contextmanager
    def _counted(self) -> Iterator[None]:
        server = self.server
        with server.lock:
            server.running += 1
            server.most_running = max(server.most_running, server.running)
        yield
        with server.lock:
            server.running -= 1

    def _reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Quiet."""
