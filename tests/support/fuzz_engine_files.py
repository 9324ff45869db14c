"""Files and replies of engines and servers, for the fuzzing: a valid sample of each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Coroutine
from copy import copy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import torch
from openai._models import construct_type
from openai.types import Completion as OpenAiCompletion
from safetensors.torch import save, save_file
from starlette.requests import Request
from torch import Tensor

from leadout.control.rollback import Tally
from leadout.data.endpoints import answer_in
from leadout.engine import admin
from leadout.engine.capture import CaptureCounters
from leadout.engine.counters import read_small, write_small
from leadout.engine.draft_recorder import (
    RecordedBlock,
    RecordedContext,
    RecordedText,
    read_texts,
    write_texts,
)
from leadout.engine.hot_swap import SwapRefusedError
from leadout.engine.inspection import DraftStep, read_steps, write_steps
from leadout.engine.live import LiveMetrics
from leadout.engine.load_test import parse_counters, usage_in
from leadout.engine.offline import Completion, TextRequest
from leadout.engine.served_requests import ServedRequests
from leadout.engine.settings import STATES, StatesSettings, read_section
from leadout.engine.states_folder import StatesInfo, parse_states
from leadout.engine.step_records import RecordedSteps, StepRecord
from leadout.evaluate.states_client import ClientSettings, StatesServer
from support.fuzzing import Reader, put, write_lines

NAME = "0" * 32  # of states
PRINT = "f" * 64
LIVE = LiveMetrics(written=1.0)


def _write_steps(folder: Path) -> None:
    record = StepRecord(round=1, seconds=0.1, prompt_tokens=0, drafted=3, decoded=[(0, 3, 2)])
    write_lines(folder / "steps.jsonl", record, record)


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def _write_states(folder: Path, *, fp8: bool) -> None:
    states = _ones(3, 2, 4)
    tensors = {"states": states, "tokens": torch.arange(3), "layers": torch.arange(2)}
    if fp8:
        tensors |= {"states": states.to(torch.float8_e4m3fn), "scales": _ones(3, 2)}
    save_file(tensors, folder / "s.safetensors")


def _write_draft_steps(folder: Path) -> None:
    step = DraftStep(*(_ones(2) for _ in range(4)))
    write_steps([step], folder / "d.safetensors")


def _write_texts(folder: Path) -> None:
    context = RecordedContext(
        **{name: _ones(2, 2) for name in ("positions", "states", "features")},
        keys=[_ones(2)],
        values=[_ones(2)],
    )
    block = RecordedBlock(
        **{
            each: [_ones(2)] if "list" in str(kind) else _ones(2)
            for each, kind in RecordedBlock.__annotations__.items()
        }
    )
    write_texts([RecordedText(torch.arange(3), context, [block])], folder / "t.safetensors")


def _states_info() -> StatesInfo:
    return StatesInfo(
        layer_ids=(1, 2), target_fingerprint=PRINT, fp8=False, folder=Path("/nowhere"),
        server_id="x", max_model_len=100, max_bytes=1000, waiting_files=0, waiting_bytes=0,
    )  # fmt: skip


@cache
def _new_server() -> StatesServer:
    """Made once and then copied: its client reads the certificates of this machine."""
    return StatesServer("http://fake", ClientSettings())


class _Server:
    """A server of states whose next reply is the content of a file."""

    def __init__(self, replies: Callable[[httpx2.Request], bytes]) -> None:
        self.server = copy(_new_server())
        self.server._client = httpx2.Client(
            base_url="http://fake",
            transport=httpx2.MockTransport(
                lambda request: httpx2.Response(200, content=replies(request))
            ),
        )


def _fake_info(folder: Path) -> None:
    server = _Server(lambda _: (folder / "reply").read_bytes()).server
    server._local_folder()


STATES_INFO = _states_info().model_dump_json().encode()
STATES_FILE = save(
    {"states": torch.ones(3, 2, 4), "tokens": torch.arange(1, 4), "layers": torch.arange(2)}
)


def _fake_compute(folder: Path) -> None:
    def reply(request: httpx2.Request) -> bytes:
        if request.url.path.endswith("completions"):
            return (folder / "reply").read_bytes()
        return STATES_FILE if request.url.path.endswith(NAME) else STATES_INFO

    _Server(reply).server.compute([1, 2, 3])


class _FakeDrafter:
    async def change_to(self, version: int, _why: str) -> None:
        assert 1 <= version < 10**9
        raise SwapRefusedError("fake")


def _swap(folder: Path) -> None:
    body = (folder / "body").read_bytes()
    os.environ[admin.KEY] = key = "k" * 32

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    app = SimpleNamespace(state=SimpleNamespace(leadout_drafter=_FakeDrafter()))
    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": "POST", "headers": headers, "app": app}
    assert _result(admin.swap(Request(scope, receive))).status_code in (409, 413, 422)


def _result(steps: Coroutine[Any, Any, Any]) -> Any:
    """Of a coroutine in which nothing waits."""
    try:
        steps.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waits")


def _answer(folder: Path) -> None:
    try:
        reply = json.loads((folder / "reply").read_bytes())
    except (ValueError, RecursionError):  # as the client does
        return
    request = TextRequest(id="a", prompt=(1, 2), max_tokens=8)
    made = construct_type(value=reply, type_=OpenAiCompletion)
    assert isinstance(answer_in(made, request, "http://fake"), str | Completion)


REPLY = {
    "id": "x", "object": "text_completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "text": "", "finish_reason": "stop", "token_ids": [3, 4],
    "prompt_token_ids": [1, 2], "logprobs": None}],
    "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
}  # fmt: skip


def _section(folder: Path) -> None:
    try:
        additional = json.loads((folder / "a.json").read_bytes())
    except (ValueError, RecursionError):  # vLLM's own flag
        return
    if isinstance(additional, dict) and isinstance(additional.get("leadout"), dict):
        read_section(SimpleNamespace(additional_config=additional), STATES, StatesSettings)


METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 12.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 7.0
"""


def _small(kind: Any) -> Callable[[Path], object]:
    return lambda folder: read_small(folder / "small.json", kind)


def _write_small(content: Any) -> Callable[[Path], None]:
    return lambda folder: write_small(content, folder / "small.json")


def _at(name: str, read: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: read(folder / name)


def _sent(name: str, read: Callable[[bytes], object]) -> Callable[[Path], object]:
    return lambda folder: read((folder / name).read_bytes())


USAGE = {"id": "x", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
SECTION = {"leadout": {"states": {"folder": "/x", "layer_ids": [1, 2], "target_fingerprint": "f"}}}
FACTS = {
    "runner": "V1", "dtype": "float32",
    "config": {"async_scheduling": True, "cuda_graphs": "NONE", "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1, "quantization": None, "kv_cache_dtype": "auto"},
}  # fmt: skip


FROM_ENGINES = [
    Reader("data: answers of servers", "reply", "json", put("reply", REPLY), _answer,
           is_file=False),
    Reader("load: part of a stream", "chunk", "json", put("chunk", USAGE),
           _sent("chunk", usage_in), is_file=False),
    Reader("load: metrics", "metrics", "bytes", put("metrics", METRICS),
           _sent("metrics", lambda data: parse_counters(data.decode(errors="replace"))),
           is_file=False),
    Reader("engine: served requests", "small.json", "json",
           _write_small(ServedRequests(since=1.0, tally=Tally().with_request(3, 5))),
           _small(ServedRequests), is_tolerant=True),
    Reader("engine: live metrics", "small.json", "json", _write_small(LIVE), _small(LiveMetrics),
           is_tolerant=True),
    Reader("engine: capture counters", "small.json", "json", _write_small(CaptureCounters()),
           _small(CaptureCounters), is_tolerant=True),
    Reader("engine: server facts", "server.json", "json", put("server.json", FACTS),
           lambda folder: RecordedSteps(folder).facts()),
    Reader("engine: steps", "steps.jsonl", "json", _write_steps,
           lambda folder: RecordedSteps(folder).new()),
    Reader("engine: settings of the plugin", "a.json", "json", put("a.json", SECTION), _section,
           is_file=False),
    Reader("engine: recorded drafts", "t.safetensors", "safetensors", _write_texts,
           _at("t.safetensors", read_texts)),
    Reader("engine: recorded steps", "d.safetensors", "safetensors",
           _write_draft_steps,
           _at("d.safetensors", read_steps)),
    Reader("engine: body of a swap", "body", "json", put("body", {"version": 3}), _swap,
           is_file=False, is_tolerant=True),
    Reader("states: file", "s.safetensors", "safetensors",
           lambda folder: _write_states(folder, fp8=False), _sent("s.safetensors", parse_states),
           is_file=False),
    Reader("states: file in FP8", "s.safetensors", "safetensors",
           lambda folder: _write_states(folder, fp8=True), _sent("s.safetensors", parse_states),
           is_file=False),
    Reader("states: description of a server", "reply", "json",
           put("reply", _states_info().model_dump_json()), _fake_info, is_file=False),
    Reader("states: reply of a server", "reply", "json",
           put("reply", {"choices": [], "kv_transfer_params": {"states": NAME}}), _fake_compute,
           is_file=False),
]  # fmt: skip
