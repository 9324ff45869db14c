"""Several servers answer one queue: none of their failures loses, doubles or changes a sample."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from leadout.data import endpoints
from leadout.data.answers import AnswerQueue, conversations
from leadout.data.chat import Chat
from leadout.data.endpoints import EndpointError, Endpoints, body_of
from leadout.data.manifest import DataError, Sampling
from leadout.data.prompts import Prompt
from leadout.engine.offline import TextRequest
from leadout.shards import Sample, ShardWriter, WrittenSamples
from support.fake_engine import FakeEngine
from support.fake_vllm_server import FakeVllmServer
from support.tiny_chat import CHAT_TEMPLATE, tiny_tokenizer

PROMPTS = [
    Prompt(f"a/{n}", "a", tuple(f"{word} {n}?" for word in ("One", "Two")[: 1 + n % 2]))
    for n in range(40)
]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "FIRST_REST", 0.05)
    monkeypatch.setattr(endpoints, "LONGEST_REST", 0.2)
    monkeypatch.setattr(endpoints, "CLIENT_RETRIES", 0)


@pytest.fixture
def servers(chat: Chat) -> Iterator[Callable[[int], list[FakeVllmServer]]]:
    with ExitStack() as stack:
        yield lambda count: [stack.enter_context(FakeVllmServer(chat)) for _ in range(count)]


class Run:
    """One job in a file, with servers or with an engine that never fails."""

    def __init__(
        self,
        path: Path,
        chat: Chat,
        sampling: Sampling,
        servers: list[FakeVllmServer] | None = None,
        prompts: list[Prompt] = PROMPTS,
        listen: Callable[[str], object] = lambda _: None,  # gets the notices
        **settings: Any,
    ) -> None:
        self.errors: list[DataError] = []
        self.notices: list[str] = []
        written: list[Sample] = []

        def notice(line: str) -> None:
            self.notices.append(line)
            listen(line)

        # A busy machine must not look like a server that is gone.
        usual = {"max_length": 256, "concurrency": 4, "heartbeat_seconds": 60.0}
        usual |= {"patience_seconds": 600.0}
        with ExitStack() as stack:
            writer = stack.enter_context(ShardWriter(path))
            done = WrittenSamples(path, lambda _: None)
            backend: Any = FakeEngine()
            if servers is not None:
                urls = [server.url for server in servers]
                made = Endpoints(urls, "models/tiny", chat, notice=notice, **usual | settings)
                backend = stack.enter_context(made)
            queue = AnswerQueue(backend, chat, sampling, writer, 16, self.errors.append)
            queue.run(conversations(prompts, sampling, 1, 1), done, written.append)
            self.summary = backend.summary() if servers is not None else []
        self.failed = queue.failed
        self.samples = dict(WrittenSamples(path, lambda _: None))  # refuses doubled ones


@pytest.fixture
def expected(tmp_path: Path, chat: Chat, sampling: Callable[..., Sampling]) -> dict[str, Sample]:
    samples = Run(tmp_path / "expected.jsonl", chat, sampling()).samples
    assert len(samples) == 60
    return samples


def test_servers_give_the_samples_of_the_engine_and_share_the_work(
    tmp_path: Path,
    chat: Chat,
    sampling: Callable[..., Sampling],
    servers: Callable[[int], list[FakeVllmServer]],
    expected: dict[str, Sample],
) -> None:
    fast, slow = servers(2)
    slow.is_open = lambda: len(fast.served) >= 50
    run = Run(tmp_path / "a.jsonl", chat, sampling(), [fast, slow])
    assert run.samples == expected
    assert len(fast.served) > 2 * len(slow.served) > 0
    assert max(fast.max_running, slow.max_running) == 4
    assert not run.errors
    assert [line.partition(": ")[2] for line in run.summary] == [
        f"{len(server.served)} answers." for server in (fast, slow)
    ]


def test_a_server_that_dies_leaves_its_requests_to_the_others(
    tmp_path: Path,
    chat: Chat,
    sampling: Callable[..., Sampling],
    servers: Callable[[int], list[FakeVllmServer]],
    expected: dict[str, Sample],
) -> None:
    dying, other = servers(2)
    dying.dies_after, other.is_open = 7, dying.is_dead.is_set
    run = Run(tmp_path / "a.jsonl", chat, sampling(), [dying, other])
    assert run.samples == expected
    assert not run.failed
    assert any(f"{dying.url} gets a rest" in line for line in run.notices)
    # What it had answered before the end of the connection is asked for again.
    assert len(dying.served) + len(other.served) >= 60


def test_a_paused_server_loses_its_requests_and_comes_back(
    tmp_path: Path,
    chat: Chat,
    sampling: Callable[..., Sampling],
    servers: Callable[[int], list[FakeVllmServer]],
    expected: dict[str, Sample],
) -> None:
    paused, other = servers(2)
    paused.hangs_after, other.is_open = 7, lambda: len(paused.served) > 7

    def wake(line: str) -> None:
        if f"{paused.url} gets a rest" in line:
            paused.hangs_after = None
            paused.is_hanging.clear()

    given = [paused, other]
    run = Run(tmp_path / "a.jsonl", chat, sampling(), given, listen=wake, heartbeat_seconds=1.0)
    assert run.samples == expected
    assert any(f"{paused.url} gets a rest: no response" in line for line in run.notices)
    assert f"{paused.url} is available" in run.notices
    assert len(paused.served) > 7


@pytest.mark.parametrize("status", [429, 500, 503])
def test_single_errors_of_a_server_are_tried_again(
    tmp_path: Path,
    chat: Chat,
    sampling: Callable[..., Sampling],
    servers: Callable[[int], list[FakeVllmServer]],
    expected: dict[str, Sample],
    status: int,
) -> None:
    (server,) = servers(1)
    server.failing, server.status = 2, status
    run = Run(tmp_path / "a.jsonl", chat, sampling(), [server])
    assert run.samples == expected
    assert not run.errors


def test_a_server_that_fails_repeatedly_rests(
    tmp_path: Path,
    chat: Chat,
    sampling: Callable[..., Sampling],
    servers: Callable[[int], list[FakeVllmServer]],
    expected: dict[str, Sample],
) -> None:
    failing, other = servers(2)
    rested = threading.Event()
    failing.failing, other.is_open = 10_000, rested.is_set

    def listen(line: str) -> None:
        if "gets a rest" in line:
            rested.set()

    run = Run(tmp_path / "a.jsonl", chat, sampling(), [failing, other], listen=listen)
    assert run.samples == expected
    assert any(f"{failing.url} gets a rest: HTTP 500" in line for line in run.notices)
    assert not run.errors  # the server is at fault, not the requests


def test_refused_requests_go_into_the_error_file_and_are_tried_again_by_the_next_run(
    tmp_path: Path,
    chat: Chat,
    sampling: Callable[..., Sampling],
    servers: Callable[[int], list[FakeVllmServer]],
    expected: dict[str, Sample],
) -> None:
    (server,) = servers(1)
    length = len(chat.prompt(["One 3?"]))  # of ten prompts, five of which have a second turn
    server.refused = {length}
    path = tmp_path / "a.jsonl"
    run = Run(path, chat, sampling(), [server])
    assert run.failed == len(run.errors) == 10
    assert all("this prompt is refused" in error.reason for error in run.errors)
    assert len(run.samples) == 45
    server.refused = set()
    before = len(server.served)
    assert Run(path, chat, sampling(), [server]).samples == expected
    assert len(server.served) - before == 15  # nothing that was written is asked for again


def test_a_request_that_fails_everywhere_ends_in_the_error_file(
    tmp_path: Path,
    chat: Chat,
    sampling: Callable[..., Sampling],
    servers: Callable[[int], list[FakeVllmServer]],
) -> None:
    both = servers(2)
    for server in both:
        server.broken = {len(chat.prompt(["One 3?"])) + 1}  # of the thirty prompts from 10 on
    prompts = [PROMPTS[number] for number in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)]
    run = Run(tmp_path / "a.jsonl", chat, sampling(), both, prompts=prompts, concurrency=1)
    assert [error.id for error in run.errors] == ["a/10#0/0"]
    assert "failed 5 times" in run.errors[0].reason
    assert "this prompt breaks something" in run.errors[0].reason
    assert len(run.samples) == 15


def test_without_any_server_left_the_job_stops_and_can_be_resumed(
    tmp_path: Path,
    chat: Chat,
    sampling: Callable[..., Sampling],
    servers: Callable[[int], list[FakeVllmServer]],
    expected: dict[str, Sample],
) -> None:
    (server,) = servers(1)
    server.dies_after = 11
    path = tmp_path / "a.jsonl"
    started = time.monotonic()
    with pytest.raises(EndpointError, match=r"No server has answered for .*--resume"):
        Run(path, chat, sampling(), [server], patience_seconds=1.0)
    assert time.monotonic() - started < 300
    server.dies_after = None
    server.is_dead.clear()
    assert Run(path, chat, sampling(), [server]).samples == expected


def test_servers_that_are_not_there_at_the_start_may_come_later(
    tmp_path: Path,
    chat: Chat,
    sampling: Callable[..., Sampling],
    servers: Callable[[int], list[FakeVllmServer]],
    expected: dict[str, Sample],
) -> None:
    late, first = servers(2)
    late.is_dead.set()

    def come_later() -> bool:
        """Asked by the first completion, so after the start."""
        late.is_dead.clear()
        return bool(late.served)

    first.is_open = come_later
    assert Run(tmp_path / "a.jsonl", chat, sampling(), [late, first]).samples == expected
    assert late.served
    late.is_dead.set()
    with pytest.raises(EndpointError, match="none of the servers can be used"):
        Run(tmp_path / "b.jsonl", chat, sampling(), [late])


def test_a_server_that_comes_back_with_another_model_gets_no_more_work(
    tmp_path: Path,
    chat: Chat,
    sampling: Callable[..., Sampling],
    servers: Callable[[int], list[FakeVllmServer]],
    expected: dict[str, Sample],
) -> None:
    changing, other = servers(2)
    refused = threading.Event()
    changing.dies_after, other.is_open = 5, refused.is_set

    def listen(line: str) -> None:
        if "gets a rest" in line:  # it comes back
            changing.model, changing.dies_after = "another", None
            changing.is_dead.clear()
        elif "serves another" in line:
            refused.set()

    run = Run(tmp_path / "a.jsonl", chat, sampling(), [changing, other], listen=listen)
    assert run.samples == expected
    assert len(changing.served) == 5
    assert any("serves another, expected" in line for line in run.notices)


def other_tokenizer(server: FakeVllmServer, folder: Path) -> None:
    tiny_tokenizer().save_pretrained(folder)
    server.chat = Chat(folder)
    plain = server.chat.plain
    server.chat.plain = lambda text: [1, *plain(text)]  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda server, _: setattr(server, "model", "other"), "serves other, expected"),
        (lambda server, _: setattr(server, "max_model_len", 99), "has --max-model-len 99"),
        (other_tokenizer, "has another tokenizer"),
        (lambda server, _: setattr(server, "without_token_ids", True), "returned no token ids"),
    ],
)
def test_a_server_that_would_give_wrong_data_is_refused(
    tmp_path: Path,
    chat: Chat,
    sampling: Callable[..., Sampling],
    servers: Callable[[int], list[FakeVllmServer]],
    change: Callable[[FakeVllmServer, Path], None],
    message: str,
) -> None:
    (server,) = servers(1)
    change(server, tmp_path / "other")
    with pytest.raises(EndpointError, match=message):
        Run(tmp_path / "a.jsonl", chat, sampling(), [server])


def test_another_name_must_be_given_and_another_template_is_reported(
    tmp_path: Path,
    chat: Chat,
    sampling: Callable[..., Sampling],
    servers: Callable[[int], list[FakeVllmServer]],
    expected: dict[str, Sample],
) -> None:
    (server,) = servers(1)
    server.model = "production"
    template = CHAT_TEMPLATE.replace("assistant", "model")
    tiny_tokenizer(template).save_pretrained(tmp_path / "other")
    server.chat = Chat(tmp_path / "other")
    path = tmp_path / "a.jsonl"
    run = Run(path, chat, sampling(), [server], served_model="production")
    assert run.samples == expected
    assert any("renders conversations differently" in line for line in run.notices)


def test_a_server_without_tokenize_is_accepted(
    tmp_path: Path,
    chat: Chat,
    sampling: Callable[..., Sampling],
    servers: Callable[[int], list[FakeVllmServer]],
    expected: dict[str, Sample],
) -> None:
    (server,) = servers(1)
    server.has_tokenize = False
    assert Run(tmp_path / "a.jsonl", chat, sampling(), [server]).samples == expected


def test_an_address_that_answers_with_a_web_page_is_refused(
    tmp_path: Path,
    chat: Chat,
    sampling: Callable[..., Sampling],
    servers: Callable[[int], list[FakeVllmServer]],
) -> None:
    (server,) = servers(1)
    server.pages = {"/v1/models"}
    with pytest.raises(EndpointError, match="/v1/models does not answer as vLLM does"):
        Run(tmp_path / "a.jsonl", chat, sampling(), [server])


def test_a_server_that_answers_with_web_pages_for_a_while_rests(
    tmp_path: Path,
    chat: Chat,
    sampling: Callable[..., Sampling],
    servers: Callable[[int], list[FakeVllmServer]],
    expected: dict[str, Sample],
) -> None:
    (server,) = servers(1)
    server.pages = {"/v1/completions"}

    def listen(line: str) -> None:
        if "gets a rest" in line:
            server.pages.clear()

    run = Run(tmp_path / "a.jsonl", chat, sampling(), [server], listen=listen)
    assert run.samples == expected
    assert any("gets a rest: a reply without an answer" in line for line in run.notices)


def test_every_parameter_is_sent_because_servers_have_defaults_of_their_own() -> None:
    request = TextRequest("a", [1], 8, temperature=0.7, top_p=0.9, seed=5, options={"top_k": 20})
    body = body_of(request)
    assert body["top_k"] == 20
    assert (body["min_p"], body["repetition_penalty"]) == (0.0, 1.0)
    assert (body["temperature"], body["top_p"], body["seed"]) == (0.7, 0.9, 5)
    assert body["return_token_ids"] is True
    assert body_of(TextRequest("a", [1], 8, seed=5))["seed"] is None  # greedy
