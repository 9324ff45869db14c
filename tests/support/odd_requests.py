"""Odd but mostly valid requests: every parameter at its limits, in combinations, with hang-ups.

`odd_requests` makes them; `send_all` sends them from several clients and says how each was
answered. A server may refuse a request with a 4xx. It may not answer with a 5xx, or not at all. Two
exceptions, in which vLLM without Leadout answers with a 500 and goes on: a grammar and another
constraint together forbid every token, and several answers whose prompt is echoed with
log-probabilities in a stream.
"""

from __future__ import annotations

import http.client
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from support.models import TINY_VOCAB as VOCAB

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ABORTED = "aborted"
CONTRADICTION = "grammar with other constraints"
ECHO = "stream of several answers with echoed log-probabilities"
SECONDS = 900.0  # for an answer; one that takes longer is lost

MAX_LENGTH = 256  # --max-model-len of the server
STEP_TOKENS = 64  # --max-num-batched-tokens: longer prompts are computed in parts
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129)
LENGTHS += (STEP_TOKENS - 1, STEP_TOKENS, STEP_TOKENS + 1, 3 * STEP_TOKENS, 3 * STEP_TOKENS + 1)
LENGTHS += (MAX_LENGTH - 2, MAX_LENGTH - 1, MAX_LENGTH, MAX_LENGTH + 1)


def ids(length: int, first: int = 2) -> list[int]:
    """A prompt; the same one for the same arguments, so that the prefix cache has it."""
    return [2 + (first + 7 * place) % (VOCAB - 2) for place in range(length)]


_NAMES = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}}
_TREE = {
    "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
    "$ref": "#/$defs/node",
}
_STRUCTURED: tuple[dict[str, Any], ...] = (
    {"json": {**_NAMES, "required": ["name"], "additionalProperties": False}},
    {"json": json.dumps(_NAMES)},
    {"json": _TREE},
    {"json": {"type": "integer", "minimum": 5, "maximum": 1}},
    {"json": {"enum": [1, None, "ü", [2]]}},
    {"regex": "[a-z]{3,8}"},
    {"regex": "(yes|no)?"},
    {"regex": "a{0,999}b"},
    {"choice": ["yes", "no", "vielleicht, später"]},
    {"choice": ["one"]},
    {"grammar": 'root ::= "a" root | "b"'},
    {"grammar": 'root ::= root "a" | "a"'},
    {"grammar": 'root ::= ""'},
    {"json_object": True},
)

# By kind: parts of a request's body, each tried alone and then in combinations. vLLM may refuse a
# few of them, and many combinations.
_PARTS: dict[str, tuple[dict[str, Any], ...]] = {
    "temperature": tuple({"temperature": t} for t in (1e-9, 1e-5, 0.01, 1, 2)),
    "seed": tuple({"seed": seed, "temperature": 0.9} for seed in (0, -1, -(2**63), 2**63 - 1)),
    "seed of a long prompt": (
        {"seed": 7, "temperature": 0.8, "prompt": ids(STEP_TOKENS + 9)},
        {"seed": 7, "temperature": 0.8, "prompt": ids(MAX_LENGTH - 9), "max_tokens": 9},
    ),
    "top_p": tuple({"top_p": p, "temperature": 1} for p in (1e-9, 0.5, 1)),
    "top_k": tuple({"top_k": k, "temperature": 1} for k in (-1, 0, 1, VOCAB - 1, VOCAB, VOCAB + 1)),
    "penalties": (
        {"presence_penalty": -2, "frequency_penalty": -2, "repetition_penalty": 0.01},
        {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 2},
        {"repetition_penalty": 1e-9},
        {"repetition_penalty": 1e9, "prompt": ids(100)},
    ),
    "logprobs": tuple({"logprobs": count} for count in (0, 1, 20)),
    "prompt_logprobs": (
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 20, "prompt": ids(STEP_TOKENS + 1)},
        {"prompt_logprobs": 5, "prompt": ids(MAX_LENGTH - 1), "max_tokens": 1},
        {"prompt_logprobs": 1, "echo": True, "logprobs": 1},
    ),
    "logprob_token_ids": (
        {"logprob_token_ids": [0, VOCAB - 1], "logprobs": 2},
        {"logprob_token_ids": [5], "logprobs": 1, "stream": True},
    ),
    "n": (
        {"n": 2, "temperature": 1},
        {"n": 16, "temperature": 1, "seed": 3},
        {"n": 64, "temperature": 2, "max_tokens": 1},
        {"n": 2, "best_of": 4, "temperature": 1},
        {"n": 3, "use_beam_search": True, "max_tokens": 5, "temperature": 0},
    ),
    "max_tokens": tuple({"max_tokens": count} for count in (1, 2, 200)),
    "min_tokens": (
        {"min_tokens": 12, "max_tokens": 12, "ignore_eos": False},
        {"min_tokens": 5, "stop_token_ids": list(range(VOCAB))},
    ),
    "stop": (
        {"stop": ["a", "\n", "é", "<|im_end|>"]},
        {"stop": [chr(33 + place) for place in range(90)], "include_stop_str_in_output": True},
        {"stop": "x" * 5000},
        {"stop": ["e"], "min_tokens": 8, "stream": True},
    ),
    "stop_token_ids": tuple({"stop_token_ids": each} for each in ([0], list(range(VOCAB)))),
    "structured output": tuple({"structured_outputs": each} for each in _STRUCTURED),
    "structured output of a sampled stream": (
        {"structured_outputs": {"regex": "[a-f]+"}, "temperature": 1, "stream": True},
        {"structured_outputs": {"json": _NAMES}, "seed": 4, "temperature": 1, "n": 3},
    ),
    "response_format": (
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _TREE}}},
        {"response_format": {"type": "text"}},
    ),
    "stream": (
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        {"stream": True, "stream_interval": 1000},
    ),
    "echo": (
        {"echo": True},
        {"echo": True, "max_tokens": 0},
        {"echo": True, "max_tokens": 0, "logprobs": 5, "prompt": ids(STEP_TOKENS + 3)},
        {"echo": True, "stream": True, "logprobs": 0},
    ),
    "length": tuple({"prompt": ids(length), "max_tokens": 1} for length in LENGTHS),
    "last position": tuple(
        {"prompt": ids(length), "max_tokens": MAX_LENGTH - length, "ignore_eos": True}
        for length in (1, STEP_TOKENS, MAX_LENGTH - 2)
    ),
    "prompt": (
        {"prompt": "Plain text"},
        {"prompt": "\u0000\ud7ff \U0001f600 <|im_start|>"},
        {"prompt": [0, 1, VOCAB - 1]},
        {"prompt": ["one", "two", "three"]},
        {"prompt": [ids(3), ids(STEP_TOKENS + 1), ids(200), ids(3)]},
        {"prompt": [ids(40)] * 20, "max_tokens": 2},
        {"truncate_prompt_tokens": 1, "prompt": ids(MAX_LENGTH + 50)},
        {"truncate_prompt_tokens": -1, "prompt": ids(MAX_LENGTH + 50)},
        {"add_special_tokens": False, "skip_special_tokens": False},
    ),
    "repeated prompt": (
        {"prompt": ids(200), "max_tokens": 20},
        {"prompt": [*ids(200), 9], "max_tokens": 20, "cache_salt": "salt"},
        {"prompt": ids(200), "prompt_logprobs": 1},
    ),
    "bad_words": (
        {"bad_words": ["a", "the end", "é"]},
        {"bad_words": [chr(97 + place % 26) * (1 + place // 26) for place in range(60)]},
    ),
    "allowed_token_ids": tuple({"allowed_token_ids": each} for each in ([5], list(range(VOCAB)))),
    "switches": (
        {"vllm_xargs": {"leadout_capture": "off"}},
        {"vllm_xargs": {"leadout_capture": 3, "leadout_draft": 1}},
        {"vllm_xargs": {"leadout_draft": "off"}},
        {"vllm_xargs": {"leadout_draft": 0}},
        {"vllm_xargs": {"leadout_draft": "9" * 5000}},
        {"vllm_xargs": {"leadout_draft": -5}},
        {"vllm_xargs": {"leadout_draft": [1, "off"]}},
        {"vllm_xargs": {"leadout_draft": 2**64 - 1}},
        {"vllm_xargs": {"leadout_round": [1, 2, 3], "leadout_draft": 1e308}},
    ),
    "other": (
        {"repetition_detection": {"max_pattern_size": 4, "min_count": 2}, "max_tokens": 100},
        {"watermarking": True},
        {"kv_transfer_params": {"do_remote_decode": True}},
        {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1},
        {"request_id": "the same"},
        {"unknown_field": [[[]]]},
    ),
}
# Tried alone only: a body with one wrong value is refused for it, whatever else it has.
_WRONG: tuple[dict[str, Any], ...] = (
    *({"temperature": each} for each in (2.1, -1)),
    {"seed": 2**63, "temperature": 1},
    *({"top_p": each, "temperature": 1} for each in (0, 1.1)),
    *({"top_k": each, "temperature": 1} for each in (-2, 2**31, 2**63)),
    *({"min_p": each, "temperature": 1} for each in (0.5, 1, 1.1)),
    *({"repetition_penalty": each} for each in (0, -1)),
    {"presence_penalty": 2.1},
    *({"logit_bias": {each: 100}} for each in ("0", str(VOCAB), "word")),
    *({"logprobs": each} for each in (21, -1)),
    {"prompt_logprobs": -1},
    {"prompt_logprobs": 1, "stream": True},
    {"logprob_token_ids": [VOCAB], "logprobs": 1},
    {"logprob_token_ids": [5]},
    {"n": 2, "temperature": 0},
    {"n": 0},
    {"n": 16385, "temperature": 1},
    *({"max_tokens": each} for each in (0, 10**6, None)),
    {"min_tokens": 13, "max_tokens": 12},
    {"min_tokens": -1},
    {"stop": [""]},
    *({"stop_token_ids": [each]} for each in (VOCAB, -1, 2**63)),
    {"structured_outputs": {"json": {"enum": []}}},
    {"structured_outputs": {"json": {"type": "nothing known"}}},
    {"structured_outputs": {"regex": "[unclosed"}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"grammar": "root ::= missing"}},
    {"structured_outputs": {"json": _NAMES, "regex": "a+"}},
    {"response_format": {"type": "other"}},
    {"stream_options": {"include_usage": True}},
    *({"prompt": each} for each in ("", [], [[]], [VOCAB], [-1], [2**63], None)),
    {"prompt_embeds": "bm8gdGVuc29y"},
    {"suffix": "end"},
    {"bad_words": [""]},
    {"bad_words": [chr(97 + place % 26) * (1 + place // 26) for place in range(300)]},
    *({"allowed_token_ids": each} for each in ([], [VOCAB], [-1])),
    {"vllm_xargs": {"leadout_draft": 2**64}},
    {"priority": 5},
    {"thinking_token_budget": 0},
    {"model": "unknown"},
)
_HEADERS: tuple[dict[str, str], ...] = (
    {"X-Request-Id": "the-same"},
    {"X-Request-Id": "../../etc"},
    {"X-Request-Id": "x" * 4000},
    {"X-Session-ID": "a session"},
    {"X-data-parallel-rank": "7"},
    {"X-Vllm-Priority": "-3"},
    {"Authorization": "Bearer ÿ"},
)
_MESSAGES = [{"role": "user", "content": "hello"}]
# Other routes: path and body. Bytes are sent as they are.
_ROUTES: tuple[tuple[str, Any], ...] = (
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [*_MESSAGES, {"role": "assistant", "content": ""}]}),
    (CHAT, {"messages": [{"role": "user", "content": "x" * (2 * MAX_LENGTH)}]}),
    (CHAT, {"messages": [{"role": "nobody", "content": None}]}),
    (CHAT, {"messages": _MESSAGES, "logprobs": True, "top_logprobs": 20}),
    (CHAT, {"messages": _MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]}),
    (CHAT, {"messages": _MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}),
    ("/v1/chat/completions/batch", {"messages": [_MESSAGES, _MESSAGES]}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 5}),
    ("/v1/messages", {"messages": _MESSAGES, "max_tokens": 5}),
    ("/inference/v1/generate", {"token_ids": ids(5), "sampling_params": {"max_tokens": 5}}),
    ("/inference/v1/generate", {"token_ids": ids(70), "sampling_params": {"seed": 1}}),
    ("/generative_scoring", {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6]}),
    ("/tokenize", {"prompt": "text"}),
    ("/detokenize", {"tokens": [5, 2**40]}),
    ("/v1/embeddings", {"input": "text"}),
    (COMPLETIONS, b"{"),
    (COMPLETIONS, b"[" * 10_000),
    (COMPLETIONS, b"\xff"),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}'),
    (COMPLETIONS, b'{"prompt": "a", "temperature": 1, "top_p": Infinity}'),
)


@dataclass(frozen=True)
class OddRequest:
    kind: str
    path: str
    body: dict[str, Any] | bytes
    headers: dict[str, str] = field(default_factory=dict)
    abort_after: int | None = None  # lines of the answer after which the client hangs up

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def odd_requests(combinations: int, seed: int) -> list[OddRequest]:
    """Every odd value once, and as many combinations of several, in random order."""
    draw = random.Random(seed)
    usual = {"model": "tiny", "prompt": ids(12), "max_tokens": 12, "temperature": 0}
    made = [
        OddRequest(kind, COMPLETIONS, usual | part)
        for kind, parts in _PARTS.items()
        for part in parts
    ]
    made += [OddRequest("wrong values", COMPLETIONS, usual | part) for part in _WRONG]
    made += [OddRequest("headers", COMPLETIONS, usual, headers) for headers in _HEADERS]
    for path, body in _ROUTES:
        full = body if isinstance(body, bytes) else {"model": "tiny", "max_tokens": 8} | body
        made.append(OddRequest("routes", path, full))
    made += [
        OddRequest("hang-up", path, usual | _as_chat({"stream": is_stream}, path), {}, lines)
        for path in (COMPLETIONS, CHAT)
        for is_stream in (False, True)
        for lines in (0, 1, 3)
    ]
    made += [_combined(draw, usual) for _ in range(combinations)]
    draw.shuffle(made)
    return made


_CONSTRAINTS = {"allowed_token_ids", "bad_words", "min_tokens", "stop_token_ids"}
_ECHOED = {"echo", "stream", "logprobs", "n"}


def _combined(draw: random.Random, usual: dict[str, Any]) -> OddRequest:
    parts = [draw.choice(_PARTS[kind]) for kind in draw.sample(sorted(_PARTS), draw.randint(2, 4))]
    body = dict(usual)
    for part in parts:
        body |= part
    body |= draw.choice(({}, {"prompt": ids(draw.choice(LENGTHS[:-2]), draw.randrange(4))}))
    body |= draw.choice(({}, {"stream": True}))
    headers = draw.choice(({}, {}, draw.choice(_HEADERS)))
    lines = draw.choice((None, None, None, draw.randrange(12)))
    kind = "combination" if lines is None else "combination and hang-up"
    if {"structured_outputs", "response_format"} & set(body) and _CONSTRAINTS & set(body):
        kind = CONTRADICTION
    elif set(body) >= _ECHOED:
        kind = ECHO
    path = draw.choice((COMPLETIONS, COMPLETIONS, CHAT))
    return OddRequest(kind, path, _as_chat(body, path), headers, lines)


def _as_chat(body: dict[str, Any], path: str) -> dict[str, Any]:
    """The body as the route takes it."""
    if path != CHAT:
        return body
    own = {"prompt", "echo", "suffix", "logprobs", "prompt_embeds"}
    chat = {name: value for name, value in body.items() if name not in own}
    if body.get("logprobs") is not None:
        chat |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    length = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 5
    return chat | {"messages": [{"role": "user", "content": "x" * length}]}


@dataclass(frozen=True)
class Answer:
    request: OddRequest
    status: str  # of HTTP, ABORTED, or why there is none

    @property
    def is_lost(self) -> bool:
        if self.request.kind in (CONTRADICTION, ECHO) and self.status == "500":
            return False
        return self.status != ABORTED and self.status[:1] not in ("2", "4")


def send(url: str, request: OddRequest) -> Answer:
    """Send one request and read its answer to the end, or hang up as it says."""
    where = urlsplit(url)
    assert where.hostname is not None
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=SECONDS)
    headers = {"Content-Type": "application/json"} | request.headers
    coded = {name: value.encode("latin-1") for name, value in headers.items()}
    try:
        connection.request("POST", request.path, request.content, coded)
        if request.abort_after == 0:
            return Answer(request, ABORTED)
        response = connection.getresponse()
        lines = []
        for line in response:
            lines.append(line)
            if len(lines) == request.abort_after:
                return Answer(request, ABORTED)
        return Answer(request, _status(response, lines))
    except (OSError, http.client.HTTPException) as problem:
        return Answer(request, f"no answer: {problem!r}")
    finally:
        connection.close()


def _status(response: http.client.HTTPResponse, lines: list[bytes]) -> str:
    """The status of a whole answer; streams report errors in their text and end with [DONE]."""
    if not (response.getheader("Content-Type") or "").startswith("text/event-stream"):
        return str(response.status)
    errors = [line for line in lines if line.startswith(b'data: {"error"')]
    if errors:
        error = json.loads(errors[0].removeprefix(b"data: "))["error"]
        return str(error.get("code", "an error without a code"))
    is_whole = any(line.startswith((b"data: [DONE]", b"event: message_stop")) for line in lines)
    return str(response.status) if is_whole else "a stream without an end"


def send_all(url: str, requests: Sequence[OddRequest], clients: int) -> Iterator[Answer]:
    """Send requests, `clients` at a time; the answers in the requests' order."""
    with ThreadPoolExecutor(clients) as pool:
        yield from pool.map(lambda request: send(url, request), requests)


def by_kind(answers: Sequence[Answer]) -> dict[str, dict[str, int]]:
    """How often each kind of request was answered with which status."""
    found: dict[str, Counter[str]] = {}
    for answer in answers:
        found.setdefault(answer.request.kind, Counter())[answer.status] += 1
    return {kind: dict(sorted(found[kind].items())) for kind in sorted(found)}


def lost(answers: Sequence[Answer]) -> list[str]:
    """Each lost request with its body, so that it can be sent again."""
    return [
        f"{answer.status}: {answer.request.path} {answer.request.headers} "
        f"{answer.request.content[:2000].decode(errors='replace')}"
        for answer in answers
        if answer.is_lost
    ]
