"""The client of state servers: what is checked, retried, given up and fetched ahead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from leadout.engine.states_folder import (
    API_KEY,
    SERVER_ID,
    StatesError,
    path_of,
    write_states,
)
from leadout.evaluate import served_states
from leadout.evaluate.blocks import TrainingSequence
from leadout.evaluate.hidden_states import Indexed, StatesOnDisk, announce
from leadout.evaluate.served_states import MAX_AHEAD_PER_SERVER, ServedStates, states_from
from leadout.evaluate.states_client import ClientSettings, RefusedError, StatesServers
from support.fake_states_server import LAYERS, WIDTH, FakeStatesServer, fake_states

TOKENS = [5, 6, 7]
QUICK = ClientSettings(give_up_seconds=1.0)


@pytest.fixture
def one(tmp_path: Path) -> Iterator[FakeStatesServer]:
    with FakeStatesServer(tmp_path / "nowhere") as server:
        yield server


@pytest.fixture
def other(tmp_path: Path) -> Iterator[FakeStatesServer]:
    with FakeStatesServer(tmp_path / "nowhere") as server:
        yield server


def test_states_are_fetched_over_http_and_deleted(one: FakeStatesServer) -> None:
    with StatesServers([one.url]) as servers:
        found = servers.compute(TOKENS)
    assert torch.equal(found.states, fake_states(TOKENS))
    assert found.layer_ids == list(LAYERS)
    assert not one.files
    assert len(one.deleted) == 1


def test_states_in_a_folder_of_this_machine_are_read_there_and_deleted(
    one: FakeStatesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / SERVER_ID).write_text("this-one")
    one.info |= {"folder": str(tmp_path), "server_id": "this-one"}
    name = "a" * 32
    monkeypatch.setattr("support.fake_states_server.new_name", lambda: name)
    tensors = {
        "states": fake_states(TOKENS),
        "tokens": torch.tensor(TOKENS),
        "layers": torch.tensor(LAYERS),
    }
    write_states(path_of(tmp_path, name), tensors, 1 << 20)
    with StatesServers([one.url]) as servers:
        assert torch.equal(servers.compute(TOKENS).states, fake_states(TOKENS))
    assert [path.name for path in tmp_path.iterdir()] == [SERVER_ID]
    assert not one.deleted  # over HTTP


@pytest.mark.parametrize("fault", ["500", "nan", "tokens", "drop", "lost"])
def test_a_text_that_fails_on_one_server_goes_to_another(
    fault: str, one: FakeStatesServer, other: FakeStatesServer
) -> None:
    one.every = fault
    with StatesServers([one.url, other.url]) as servers:
        for text in (TOKENS, [8, 9], [10]):
            assert torch.equal(servers.compute(text).states, fake_states(text))
    assert other.computed == [TOKENS, [8, 9], [10]]


def test_a_server_that_is_gone_does_not_stop_the_others(
    one: FakeStatesServer, tmp_path: Path
) -> None:
    with FakeStatesServer(tmp_path) as gone:
        url = gone.url
    with StatesServers([url, one.url], QUICK) as servers:
        servers.require("a-target", [2], 10)
        assert torch.equal(servers.compute(TOKENS).states, fake_states(TOKENS))


def test_a_single_server_is_asked_again_with_pauses_that_grow(one: FakeStatesServer) -> None:
    one.faults = ["500", "drop", "500"]
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(0.001)
        now[0] += seconds

    now = [0.0]
    with StatesServers([one.url], clock=lambda: now[0], sleep=pause) as servers:
        assert torch.equal(servers.compute(TOKENS).states, fake_states(TOKENS))
    assert pauses == pytest.approx([0.5, 1.0, 2.0])


def test_giving_up_names_every_server_and_its_error(
    one: FakeStatesServer, other: FakeStatesServer
) -> None:
    one.every, other.every = "500", "drop"
    with StatesServers([one.url, other.url], QUICK) as servers, pytest.raises(StatesError) as found:
        servers.compute(TOKENS)
    assert f"{one.url}/v1/completions answered 500: on demand" in str(found.value)
    assert f"{other.url}: Server disconnected" in str(found.value)
    assert "3 tokens within 1 s" in str(found.value)


@pytest.mark.parametrize(
    ("fault", "reason"), [("nan", "not finite"), ("tokens", "other tokens than those sent")]
)
def test_wrong_states_are_never_used(fault: str, reason: str, one: FakeStatesServer) -> None:
    one.every = fault
    with StatesServers([one.url]) as servers, pytest.raises(StatesError, match=reason) as found:
        servers.compute(TOKENS)
    assert one.url in str(found.value)
    assert len(one.computed) == 3


def test_a_refused_request_is_not_repeated(one: FakeStatesServer, other: FakeStatesServer) -> None:
    one.every = other.every = "400"
    with (
        StatesServers([one.url, other.url]) as servers,
        pytest.raises(RefusedError, match="answered 400: on demand"),
    ):
        servers.compute(TOKENS)


@pytest.mark.parametrize(
    ("fingerprint", "layers", "length", "reason"),
    [
        ("another", [2], 10, "another target"),
        ("a-target", [1, 2], 10, r"\[1\] are needed too. Start it with --layers 1 --layers 2"),
        ("a-target", [2], 100, "at most 99 tokens.*--max-model-len 101"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_at_the_start(
    one: FakeStatesServer, fingerprint: str, layers: list[int], length: int, reason: str
) -> None:
    with StatesServers([one.url]) as servers, pytest.raises(StatesError, match=reason):
        servers.require(fingerprint, layers, length)


def test_states_in_fp8_are_refused_where_they_must_be_exact(one: FakeStatesServer) -> None:
    one.info |= {"fp8": True}
    with StatesServers([one.url]) as servers:
        servers.require("a-target", [2], 10)
        with pytest.raises(StatesError, match=f"{one.url} .* Start it without --states-fp8"):
            servers.require("a-target", [2], 10, exact=True)


def test_a_server_that_does_not_fit_leaves_no_connection(
    one: FakeStatesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = StatesServers([one.url])
    monkeypatch.setattr(served_states, "StatesServers", lambda *_: servers)
    monkeypatch.setattr(served_states, "fingerprint", lambda _: "another")
    cpu = torch.device("cpu")
    source = states_from([one.url], tmp_path, [2], longest=10, dtype=torch.float32, device=cpu)
    with pytest.raises(StatesError, match="another target"), source:
        pass
    with pytest.raises(StatesError, match="was closed"):
        servers.compute(TOKENS)
    servers.close()  # a second time changes nothing


def test_without_any_server_the_start_is_refused(tmp_path: Path) -> None:
    with FakeStatesServer(tmp_path) as gone:
        url = gone.url
    with StatesServers([url]) as servers, pytest.raises(StatesError, match="leadout serve TARGET"):
        servers.require("a-target", [2], 10)


def test_the_key_is_sent(one: FakeStatesServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "a-key")
    with StatesServers([one.url]) as servers:
        servers.compute(TOKENS)
    assert set(one.keys) == {"Bearer a-key"}


def test_a_refused_key_is_an_error_that_says_where_to_set_it(one: FakeStatesServer) -> None:
    one.every = "401"
    remedy = f"answered 401: on demand. Set {API_KEY} to the key of this server"
    with StatesServers([one.url]) as servers, pytest.raises(RefusedError, match=remedy):
        servers.compute(TOKENS)


def sequence(index: int, *tokens: int) -> Indexed:
    return index, TrainingSequence(f"text {index}", "here", torch.tensor(tokens), 1)


class FakeNorm(torch.nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return 2 * states


def source_of(*urls: str) -> ServedStates:
    cpu = torch.device("cpu")
    return ServedStates(StatesServers(urls), [3, 0], FakeNorm(), torch.float32, cpu)


def test_taps_come_in_the_order_asked_for_and_the_final_state_is_normed(
    one: FakeStatesServer,
) -> None:
    with source_of(one.url) as source:
        states, final = source.observe([sequence(0, 5, 6, 7), sequence(1, 8)])
    expected = fake_states([5, 6, 7])
    assert torch.equal(states[0], torch.cat([expected[:, 2], expected[:, 0]], dim=-1))
    assert torch.equal(final[0], 2 * expected[:, 2])
    assert torch.equal(states[1, 0], fake_states([8])[0, [2, 0]].flatten())
    assert states.shape == (2, 3, 2 * WIDTH)
    assert not states[1, 1:].any()


def test_announced_texts_are_fetched_ahead_once_and_bounded(one: FakeStatesServer) -> None:
    texts = [sequence(index, index, index + 1) for index in range(3 * MAX_AHEAD_PER_SERVER)]
    with source_of(one.url) as source:
        source.announce(texts)
        deadline = time.monotonic() + 600
        while len(one.computed) < MAX_AHEAD_PER_SERVER and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(one.computed) == MAX_AHEAD_PER_SERVER
        for item in texts:
            states, _ = source.observe([item])
            assert torch.equal(
                states[0], fake_states(item[1].tokens.tolist())[:, [2, 0]].flatten(1)
            )
    assert sorted(one.computed) == [item[1].tokens.tolist() for item in texts]


def test_a_text_that_was_not_announced_is_fetched_at_once(one: FakeStatesServer) -> None:
    with source_of(one.url) as source:
        states, _ = source.observe([sequence(7, 1, 2)])
    assert torch.equal(states[0], fake_states([1, 2])[:, [2, 0]].flatten(1))


def test_an_error_in_the_background_reaches_the_reader(one: FakeStatesServer) -> None:
    one.every = "400"
    with source_of(one.url) as source:
        source.announce([sequence(0, 1, 2)])
        with pytest.raises(RefusedError):
            source.observe([sequence(0, 1, 2)])


def test_states_on_disk_announce_only_what_is_missing(
    one: FakeStatesServer, tmp_path: Path
) -> None:
    texts = [sequence(index, index, index + 1) for index in range(4)]
    with source_of(one.url) as source:
        kept = StatesOnDisk(
            tmp_path / "states.bin", source, [2] * 4, taps=2, hidden_size=WIDTH, dtype=torch.float32
        )
        kept.observe(texts[:2])
        announce(kept, texts)
        for item in texts:
            kept.observe([item])
    assert sorted(one.computed) == [item[1].tokens.tolist() for item in texts]
