"""Requests to a test's own server: one by one, or from many clients at once."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


def call(url: str, body: dict[str, Any] | None = None, key: str | None = None) -> tuple[int, Any]:
    """The status and the answer; a POST if there is a body."""
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=900) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.loads(refusal.read() or b"null")


def answer(url: str, prompt: list[int], tokens: int, **more: Any) -> list[int]:
    """The token ids of a greedy answer."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    body |= {"temperature": 0, "return_token_ids": True} | more
    status, response = call(f"{url}/v1/completions", body)
    if status != 200:
        raise RuntimeError(f"{status}: {response}")
    ids: list[int] = response["choices"][0]["token_ids"]
    return ids


@dataclass
class Load:
    answers: list[tuple[int, list[int]]] = field(default_factory=list)  # prompt's place, answer
    failures: list[str] = field(default_factory=list)


@contextmanager
def under_load(
    url: str, prompts: Sequence[list[int]], tokens: int, clients: int = 8
) -> Iterator[Load]:
    """`clients` clients send one prompt after the other for as long as the block lasts."""
    load, is_over = Load(), threading.Event()

    def ask(client: int) -> None:
        place = client
        while not is_over.is_set():
            try:
                ids = answer(url, prompts[place % len(prompts)], tokens)
                load.answers.append((place % len(prompts), ids))
            except Exception as error:  # any kind is a failed request
                load.failures.append(repr(error))
            place += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
