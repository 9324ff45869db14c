"""Hidden states out of real vLLM servers over real HTTP equal those of transformers."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from leadout.dflash.target import Observation, Target
from leadout.engine.process_folders import SHARED_MEMORY
from leadout.engine.serve_plan import make_plan
from leadout.engine.server import Server
from leadout.engine.settings import ServeSettings
from leadout.engine.states_folder import ROUTE, StatesInfo
from leadout.evaluate.blocks import TrainingSequence
from leadout.evaluate.hidden_states import ComputedStates, Indexed, LoadedTarget, load_model
from leadout.evaluate.reference import reference_target
from leadout.evaluate.served_states import ServedStates, states_from
from leadout.train.progress import Record, StepRecord
from leadout.train.run import Run, complete_settings, read_corpus
from leadout.train.states_source import served_states
from support.models import TINY_VOCAB
from support.processes import family_of, new_processes
from support.small_runs import ALONE, small_config
from support.tiny_data import write_predictable_target, write_tiny_data

EXTRACTED = (1, 2, 3)
LAYERS = (3, 1)  # some of them, in an order of their own
CHUNK = 64  # tokens of a prompt per step
SMALL = [
    *("--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4"),
    *("--max-num-batched-tokens", str(CHUNK)),
]
# The engine in a process of its own, as users run it: it goes on after the last reply.
pytestmark = pytest.mark.timeout(7200)  # several servers
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@contextmanager
def serving(target: Path, log: Path, flags: Sequence[str] = (), **more: Any) -> Iterator[Server]:
    settings = ServeSettings(
        target=str(target),
        states=True,
        layers=EXTRACTED,
        states_folder=log.parent,
        states_backlog=more.pop("backlog", 0.001),
        vllm_flags=(*SMALL, *flags),
        **more,
    )
    plan = make_plan(settings)
    environment = ENVIRONMENT | plan.environment
    with Server(plan.command, log=log, environment=environment, startup_seconds=1200) as server:
        yield server


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_predictable_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def server(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("states") / "server.log"
    with serving(target, log, ("--dtype", "float32")) as running:
        yield running


def texts() -> list[Indexed]:
    """One shorter and two longer than a chunk; the last two share more than a cache block."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(250, (n,), generator=generator) for n in (40, 97, 200)]
    drawn.append(torch.cat([drawn[2][:140], torch.tensor([77, 78, 79])]))
    return [
        (number, TrainingSequence(str(number), "s", tokens, 3))
        for number, tokens in enumerate(drawn)
    ]


def served(url: str, target: Path, dtype: torch.dtype = torch.float32) -> Any:
    device = torch.device("cpu")
    return states_from([url], target, LAYERS, longest=200, dtype=dtype, device=device)


def computed(target: Path, dtype: torch.dtype = torch.float32) -> ComputedStates:
    return ComputedStates(lambda: Target(load_model(target, dtype), LAYERS))


def errors(found: Observation, expected: Observation) -> list[float]:
    """The largest difference of states and final states, relative to the largest value."""
    return [
        float((mine.float() - theirs.float()).abs().max() / theirs.float().abs().max())
        for mine, theirs in zip(found, expected, strict=True)
    ]


def assert_equal_states(
    source: ServedStates, target: Path, dtype: torch.dtype = torch.float32, allowed: float = 1e-5
) -> None:
    reference = computed(target, dtype)
    for item in texts():
        found, expected = source.observe([item]), reference.observe([item])
        assert found.states.shape == expected.states.shape
        assert max(errors(found, expected)) < allowed


def test_states_equal_those_of_transformers_in_chunks_and_from_the_prefix_cache(
    server: Server, target: Path
) -> None:
    with served(server.url, target) as source:
        assert_equal_states(source, target)
        hits = cached_tokens(server)
        assert_equal_states(source, target)  # now from the cache
        assert cached_tokens(server) > hits + 200


def cached_tokens(server: Server) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("vllm:prefix_cache_hits_total")
    )


def test_batches_are_padded_like_those_of_transformers(server: Server, target: Path) -> None:
    items = texts()[:2]
    with served(server.url, target) as source:
        source.announce(items)
        found = source.observe(items)
    expected = computed(target).observe(items)
    for row, (_, sequence) in enumerate(items):
        parts = [
            Observation(*(each[row, : len(sequence)] for each in o)) for o in (found, expected)
        ]
        assert max(errors(*parts)) < 1e-5


def test_states_reach_a_reader_on_another_machine_and_are_deleted(
    server: Server, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leadout.evaluate.states_client.server_id", lambda _folder: None)
    with served(server.url, target) as source:
        assert_equal_states(source, target)
    assert info_of(server).waiting_files == 0


def info_of(server: Server) -> StatesInfo:
    with urllib.request.urlopen(f"{server.url}{ROUTE}") as reply:
        return StatesInfo.model_validate_json(reply.read())


def test_files_wait_in_the_folder_until_they_are_read(server: Server) -> None:
    info = info_of(server)
    assert info.layer_ids == (1, 2, 3, 5)
    assert info.waiting_files == 0
    assert [path.name for path in info.folder.iterdir()] == ["server-id"]


@pytest.mark.parametrize(
    ("name", "status"), [("..%2Fserver-id", 404), ("server-id", 422), ("a" * 31, 422)]
)
def test_only_states_can_be_read(server: Server, name: str, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{server.url}{ROUTE}/{name}")
    assert refused.value.code == status


def test_the_name_of_a_file_does_not_come_from_the_client(server: Server, target: Path) -> None:
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": "../../escaped"}
    request = urllib.request.Request(f"{server.url}/v1/completions", body, headers)
    with urllib.request.urlopen(request) as reply:
        parameters = json.load(reply)["kv_transfer_params"]
    path = Path(parameters["hidden_states_path"])
    assert path.parent == info_of(server).folder
    assert path.stem == parameters["states"]
    delete = urllib.request.Request(f"{server.url}{ROUTE}/{path.stem}", method="DELETE")
    urllib.request.urlopen(f"{server.url}{ROUTE}/{path.stem}").close()  # waits until it is written
    urllib.request.urlopen(delete).close()
    assert not path.exists()


def test_requests_wait_for_a_reader_when_the_backlog_is_full(server: Server) -> None:
    """Files that nobody reads never exceed the limit; reading them lets the next requests run."""
    per_text = 200 * (4 * 64 * 4 + 8)
    fitting = info_of(server).max_bytes // per_text
    with ThreadPoolExecutor(fitting + 3) as pool:
        asked = [pool.submit(names_of_states, server, seed) for seed in range(fitting + 3)]
        wait_until(lambda: sum(each.done() for each in asked) == fitting)
        time.sleep(1)  # no further one runs
        assert sum(each.done() for each in asked) == fitting
        assert info_of(server).waiting_bytes <= info_of(server).max_bytes
        for each in as_completed(asked):
            request = f"{server.url}{ROUTE}/{each.result()}"
            urllib.request.urlopen(request).close()
            urllib.request.urlopen(urllib.request.Request(request, method="DELETE")).close()
    assert info_of(server).waiting_files == 0


def names_of_states(server: Server, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(250, (200,), generator=generator).tolist()
    body = json.dumps({"prompt": tokens, "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=900) as reply:
        name: str = json.load(reply)["kv_transfer_params"]["states"]
    return name


def wait_until(condition: Callable[[], bool], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_training_from_servers_has_the_loss_curve_of_training_with_transformers(
    server: Server, target: Path, tmp_path: Path
) -> None:
    data = write_tiny_data(tmp_path / "data", target)
    config = small_config(epochs=1.0)
    corpus = read_corpus(data, target, config, TINY_VOCAB)
    config = complete_settings(config, target, corpus, TINY_VOCAB)

    def losses(name: str, states: ServedStates | None) -> list[float]:
        run = Run(target, corpus, config, tmp_path / name, ALONE, states=states)
        records: list[Record] = []
        run.train(records.append)
        return [record.loss for record in records if isinstance(record, StepRecord)]

    served_config = config.model_copy(update={"states_from": (server.url,)})
    with served_states(target, EXTRACTED, served_config, max(corpus.lengths), ALONE) as states:
        assert states is not None
        found = losses("served", states)
    expected = losses("computed", None)
    assert len(found) > 5
    assert found == pytest.approx(expected, rel=1e-4)
    assert info_of(server).waiting_files == 0


def test_a_served_target_scores_tokens_like_a_loaded_one(server: Server, target: Path) -> None:
    loaded = LoadedTarget(load_model(target, torch.float32))
    tokens = texts()[2][1].tokens.tolist()
    with reference_target(
        target, EXTRACTED, torch.float32, longest=200, urls=[server.url]
    ) as reference:
        for portion in (0, 5):
            found, expected = (each.next_logits(tokens, portion) for each in (reference, loaded))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_command_starts_its_own_server_and_stops_it(target: Path) -> None:
    before = family_of(os.getpid())
    config = small_config(states="served")
    with served_states(target, LAYERS, config, 200, ALONE, ("--max-num-seqs", "4")) as source:
        assert source is not None
        assert_equal_states(source, target)
    assert new_processes(before) == []
    assert not list(SHARED_MEMORY.glob(f"leadout-states-{os.getpid()}-*"))


@pytest.mark.nightly  # two ranks in CI: test_runners.py
def test_states_of_two_ranks_equal_those_of_transformers(target: Path, tmp_path: Path) -> None:
    flags = ("--dtype", "float32", "--tensor-parallel-size", "2")
    with (
        serving(target, tmp_path / "server.log", flags) as running,
        served(running.url, target) as source,
    ):
        assert_equal_states(source, target)


@pytest.mark.nightly
def test_states_in_bfloat16_differ_by_rounding_only(target: Path, tmp_path: Path) -> None:
    """Each of six layers rounds its sums to 8 bits."""
    half = torch.bfloat16
    with (
        serving(target, tmp_path / "server.log", ("--dtype", "bfloat16")) as running,
        served(running.url, target, half) as source,
    ):
        assert_equal_states(source, target, half, allowed=6 * 2**-8)
