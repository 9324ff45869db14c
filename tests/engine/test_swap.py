"""Swaps of the drafter in running servers: no answer changes, and bad versions are refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leadout.engine.admin import KEY
from leadout.engine.capture_store import segment_paths
from leadout.engine.serve_plan import make_plan
from leadout.engine.server import Server
from leadout.engine.settings import ServeSettings
from leadout.registry import MANIFEST, LedgerEntry, Registry
from leadout.shards import read_shard
from support.http_load import answer, call, under_load
from support.models import tiny_llama
from support.tiny_chat import tiny_tokenizer
from support.version_registry import CONFIG, publish, with_nan

SECRET = "a-key-for-the-tests"
TOKENS = 48
PROMPTS = [[5 + place, 9, 2, 44, *range(60, 60 + 3 * place), 200] for place in range(8)]
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256")
FLAGS += ("--max-num-seqs", "8", "--served-model-name", "tiny")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bare(target: Path, run_engine: Any) -> list[list[int]]:
    """What vLLM answers without a drafter."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with run_engine(target, max_model_len=256, max_num_seqs=8) as llm:
        asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [list(one.outputs[0].token_ids) for one in llm.generate(asked, params)]


class World:
    """One registry, and what is needed to serve from it."""

    def __init__(self, target: Path, work: Path) -> None:
        self.target, self.work = target, work
        self.registry = Registry(work / "registry")
        self.capture = work / "capture"
        self.publish(seed=0)
        self.registry.point_to(1, "the start")
        self.publish(seed=1, parent=1)

    def publish(self, **settings: Any) -> int:
        return publish(self.registry, self.target, self.work, **settings).version

    def server(self, name: str, *flags: str, **environment: str) -> Server:
        plan = make_plan(
            ServeSettings(
                target=str(self.target),
                vllm_flags=(*FLAGS, *flags),
                registry=self.registry.folder,
                capture=self.capture,
            )
        )
        settings = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            KEY: SECRET,
        }
        settings |= plan.environment | environment
        return Server(plan.command, log=self.work / f"{name}.log", environment=settings)

    def wait_for(self, is_there: Callable[[LedgerEntry], bool]) -> LedgerEntry:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            for entry in self.registry.ledger():
                if is_there(entry):
                    return entry
            time.sleep(0.2)
        raise AssertionError([str(entry) for entry in self.registry.ledger()])


@pytest.fixture(scope="module")
def world(target: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(target, tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def server(world: World, bare: list[list[int]]) -> Iterator[Server]:
    with world.server("first") as running:  # after the bare engine has gone
        yield running


def drafter_of(server: Server) -> dict[str, Any]:
    status, report = call(f"{server.url}/leadout/drafter", key=SECRET)
    assert status == 200
    return dict(report)


def swap(server: Server, version: int) -> tuple[int, Any]:
    return call(f"{server.url}/leadout/swap", {"version": version}, SECRET)


def require_correct(load: Any, bare: list[list[int]]) -> None:
    assert load.failures == []
    assert len(load.answers) >= 16
    wrong = [place for place, ids in load.answers if ids != bare[place]]
    assert wrong == []


def test_swaps_under_load_change_no_answer(
    world: World, server: Server, bare: list[list[int]]
) -> None:
    assert drafter_of(server)["version"] == 1
    with under_load(server.url, PROMPTS, TOKENS) as load:
        for version in (2, 1, 2):
            before = len(load.answers)
            assert swap(server, version)[0] == 200
            while len(load.answers) < before + 8 and not load.failures:
                time.sleep(0.05)
    require_correct(load, bare)
    report = drafter_of(server)
    assert report["version"] == 2
    assert report["requests"] > 0
    assert 0 < report["requests_by_client"] <= report["requests"]  # clients are known
    swapped = [entry for entry in world.registry.ledger() if entry.event == "swapped"]
    assert [entry.version for entry in swapped] == [2, 1, 2]
    assert all(entry.evidence["cache_emptied"] is False for entry in swapped)  # requests ran
    assert "is off after an error" not in server.log.read_text()


def test_the_endpoints_require_the_key(server: Server) -> None:
    for key in (None, "wrong"):
        assert call(f"{server.url}/leadout/drafter", key=key)[0] == 401
        assert call(f"{server.url}/leadout/swap", {"version": 1}, key)[0] == 401
    assert swap(server, 77)[0] == 409
    assert call(f"{server.url}/leadout/swap", {"version": "../1"}, SECRET)[0] == 422


def spoil_nan(world: World) -> int:
    return world.publish(seed=2, parent=1, spoil=with_nan)


def spoil_shape(world: World) -> int:
    return world.publish(seed=2, parent=1, config=replace(CONFIG, block_size=4))


def spoil_target(world: World) -> int:
    return world.publish(seed=2, parent=1, other_target=True)


def spoil_bytes(world: World) -> int:
    version = world.publish(seed=2, parent=1)
    (world.registry.path(version) / "model.safetensors").write_bytes(b"half")
    return version


BAD: dict[Callable[[World], int], str] = {
    spoil_nan: "NaN or infinite",
    spoil_shape: "has block_size 4, but the drafter in service has 5",
    spoil_target: "trained for the target with fingerprint",
    spoil_bytes: "changed since publishing",
}


def test_a_bad_version_is_refused_and_the_current_one_stays(
    world: World, server: Server, bare: list[list[int]]
) -> None:
    serving = drafter_of(server)["version"]
    for spoil, words in BAD.items():
        version = spoil(world)
        world.registry.point_to(version, "a bad one")
        refused = world.wait_for(lambda entry, v=version: entry.version == v)  # type: ignore[misc]
        assert refused.event == "refused"
        assert words in refused.why
    manifest = world.registry.path(version) / MANIFEST
    manifest.rename(world.work / "taken-away")
    assert swap(server, version)[0] == 409
    assert drafter_of(server)["version"] == serving
    assert answer(server.url, PROMPTS[3], TOKENS) == bare[3]


def test_a_version_below_expected_acceptance_is_rolled_back(
    world: World, server: Server, bare: list[list[int]]
) -> None:
    version = world.publish(seed=3, parent=1, expected_length=3.5)
    world.registry.point_to(version, "high expected acceptance")
    world.wait_for(lambda entry: (entry.event, entry.version) == ("swapped", version))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda prompt: answer(server.url, prompt, TOKENS), PROMPTS * 4))
        assert found == bare * 4
        # A prompt counts up to a limit only.
        others = [[100 + number, 9] for number in range(40)]
        list(pool.map(lambda prompt: answer(server.url, prompt, 16), others))
    back = world.wait_for(lambda entry: entry.event == "rolled_back")
    assert back.version == version
    assert back.evidence["to"] == 1
    assert world.registry.bad_mark(version) is not None
    pointer = world.registry.pointer()
    assert pointer is not None
    assert pointer.version == 1
    deadline = time.monotonic() + 600
    while drafter_of(server)["version"] != 1 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert drafter_of(server)["version"] == 1


def test_captured_traffic_is_what_was_served(
    world: World, server: Server, bare: list[list[int]]
) -> None:
    silent, loud = [77, *PROMPTS[0]], [78, *PROMPTS[0]]
    answer(server.url, silent, 8, vllm_xargs={"leadout_capture": "off"})
    ids = answer(server.url, loud, 8)
    deadline = time.monotonic() + 600
    kept: list[Any] = []
    while not any(sample.prompt == loud for sample in kept) and time.monotonic() < deadline:
        kept = [one for path in segment_paths(world.capture) for _, one in read_shard(path)]
        time.sleep(0.2)
    assert [sample.response for sample in kept if sample.prompt == loud] == [ids]
    assert not any(sample.prompt == silent for sample in kept)
    by_prompt = {tuple(prompt): whole for prompt, whole in zip(PROMPTS, bare, strict=True)}
    known = [sample for sample in kept if tuple(sample.prompt) in by_prompt]
    assert len(known) > 32
    assert all(sample.response == by_prompt[tuple(sample.prompt)] for sample in known)


@pytest.mark.nightly  # two more workers; two workers without an engine: unit/engine/test_rollout.py
def test_replicas_end_on_one_version_and_a_late_one_catches_up(
    world: World, server: Server, bare: list[list[int]]
) -> None:
    """The second replica has two tensor-parallel workers."""
    world.registry.point_to(2, "while one replica is down")
    late = world.server("late", "--tensor-parallel-size", "2", VLLM_CPU_OMP_THREADS_BIND="0|1")
    with late as second:
        assert drafter_of(second)["version"] == 2
        with under_load(second.url, PROMPTS, TOKENS) as load:
            for version in (1, 2):
                before = len(load.answers)
                assert swap(second, version)[0] == 200
                while len(load.answers) < before + 8 and not load.failures:
                    time.sleep(0.05)
        require_correct(load, bare)
        third = world.publish(seed=5, parent=2)
        world.registry.point_to(third, "better")
        deadline = time.monotonic() + 600
        versions: set[int] = set()
        while versions != {third} and time.monotonic() < deadline:
            versions = {drafter_of(one)["version"] for one in (server, second)}
            time.sleep(0.2)
        assert versions == {third}
    workers = {
        entry.evidence["workers"] for entry in world.registry.ledger() if entry.event == "swapped"
    }
    assert workers == {1, 2}
