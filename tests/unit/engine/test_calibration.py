"""Rounds on two servers: what is counted, and how servers take turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from leadout.console import Progress
from leadout.control.tuned_file import ServerConfig
from leadout.engine import calibration
from leadout.engine.calibration import (
    BARE,
    DRAFTING,
    CalibrationRequest,
    CalibrationResult,
    RoundRequest,
    calibrate,
)
from leadout.engine.child_process import EngineError
from leadout.engine.counters import write_small
from leadout.engine.server_turns import Launch, Turns
from leadout.engine.step_records import ROUND_OPTION, ServerFacts, StepRecord, draft_lengths

FACTS = ServerFacts(
    runner="V1",
    dtype="float32",
    config=ServerConfig(
        async_scheduling=True,
        cuda_graphs="NONE",
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        quantization=None,
        kv_cache_dtype="auto",
    ),
)
SECONDS = {BARE: 0.010, DRAFTING: 0.020}
TOKENS = 40


class StandInLoad:
    """Stands for the requests of a batch; `fail` is what the server answers them."""

    def __init__(self, server: StandInServer, bodies: Sequence[dict[str, Any]]) -> None:
        self._server, self._bodies = server, bodies

    async def __aenter__(self) -> Self:
        self._server.bodies.append(list(self._bodies))
        self._server.begin(self._bodies)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.end()

    @property
    def has_ended(self) -> bool:
        if self._server.fail:
            raise EngineError(self._server.fail)
        return False


class StandInServer:
    """Stands for a server that records: a step of its batch at every turn of the event loop."""

    up: list[str] = []  # noqa: RUF012 - names of the servers that run, in the order of changes

    def __init__(self, name: str, folder: Path) -> None:
        self.label = self.name = name
        self.fail = ""
        self.bodies: list[list[dict[str, Any]]] = []
        self.is_running = False
        self._file = folder / "steps.jsonl"
        self._file.write_bytes(b"")
        self._batch: list[list[int]] = []
        self._lengths, self._drafts = draft_lengths(0), 0
        self._task: asyncio.Task[None] | None = None
        write_small(FACTS, folder / "server.json")

    def batch(self, bodies: Sequence[dict[str, Any]]) -> StandInLoad:
        return StandInLoad(self, bodies)

    def begin(self, bodies: Sequence[dict[str, Any]]) -> None:
        self._batch = [body["vllm_xargs"][ROUND_OPTION] for body in bodies]
        self._lengths, self._drafts = draft_lengths(self._batch[0][2]), 0
        prompts = sum(len(body["prompt"]) for body in bodies)
        self._write(prompt_tokens=prompts, decoded=[])

    def end(self) -> None:
        self._batch = []

    def pause(self) -> None:
        if self.is_running:
            self.is_running = False
            assert self._task is not None
            self._task.cancel()

    def resume(self) -> None:
        if not self.is_running:
            self.is_running = True
            self.up.append(self.name)
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        is_first = True
        while True:
            await asyncio.sleep(0.002)
            if self._batch:
                verified, drafted = self._drafts, next(self._lengths)
                # Half of the drafts are accepted. The first step spans the stop.
                decoded = [(place, verified, 1 + verified // 2) for _, place, _ in self._batch]
                self._drafts = drafted
                self._write(decoded=decoded, drafted=drafted, is_timed=not is_first)
                is_first = False

    def _write(
        self,
        *,
        decoded: list[tuple[int, int, int]],
        prompt_tokens: int = 0,
        drafted: int = 0,
        is_timed: bool = True,
    ) -> None:
        record = StepRecord(
            round=self._batch[0][0],
            seconds=SECONDS[self.name] if is_timed else None,
            prompt_tokens=prompt_tokens,
            drafted=drafted,
            decoded=decoded,
        )
        with self._file.open("ab") as file:
            file.write(record.model_dump_json().encode() + b"\n")


class Bench:
    """Starts stand-ins instead of servers."""

    def __init__(self, folder: Path) -> None:
        self.folders = {name: folder / name for name in (BARE, DRAFTING)}
        for each in self.folders.values():
            each.mkdir()
        self.servers: dict[str, StandInServer] = {}
        self.together: list[list[str]] = []
        self.fail = ""

    @asynccontextmanager
    async def started(
        self, launches: Sequence[Launch], *_: object
    ) -> AsyncIterator[dict[str, StandInServer]]:
        names = [launch.name for launch in launches]
        self.together.append(names)
        found = {name: StandInServer(name, self.folders[name]) for name in names}
        for server in found.values():
            server.fail = self.fail
        self.servers |= found
        yield found
        for server in found.values():
            server.pause()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(tmp_path)
    monkeypatch.setattr(calibration, "started", made.started)
    monkeypatch.setattr(StandInServer, "up", [])
    return made


def measured(bench: Bench, turns: Turns, tmp_path: Path) -> CalibrationResult:
    request = CalibrationRequest(
        bare=Launch(BARE, [], {}),
        drafting=Launch(DRAFTING, [], {}),
        records=bench.folders,
        flags=(),
        turns=turns,
        prompts=[[1] * 5, [2] * 7, [3] * 9],
        rounds=[
            RoundRequest(batch=1, k=0, prompts=[2]),
            RoundRequest(batch=2, k=2, prompts=[0, 1]),
        ],
        tokens=TOKENS,
        max_length=100,
    )
    return calibrate(request, tmp_path, Progress.silent())


@pytest.mark.parametrize("turns", ["slices", "waves", "single"])
def test_each_way_of_taking_turns_finds_the_same(
    turns: Turns, bench: Bench, tmp_path: Path
) -> None:
    result = measured(bench, turns, tmp_path)
    assert (result.turns, result.bare, result.drafting) == (turns, FACTS, FACTS)
    none, two = result.rounds
    assert [(each.batch, each.k) for each in result.rounds] == [(1, 0), (2, 2)]
    for each in result.rounds:
        assert each.turns
        assert {s for turn in each.turns for s in turn.bare} == {SECONDS[BARE]}
        steps = [step for turn in each.turns for step in turn.steps]
        assert {step.seconds for step in steps} == {SECONDS[DRAFTING]}
        assert {step.verified for step in steps} <= {0, each.k}
    assert [gained.prompt for gained in two.gained] == [0, 1]
    assert [gained.tokens for gained in two.gained] == [[2] * (TOKENS // 2)] * 2
    assert [gained.tokens for gained in none.gained] == [[1] * (TOKENS // 2)]
    assert [each.tokens for each in two.prefill_bare] == [12]
    assert [each.tokens for each in two.prefill_drafting] == [12]
    assert bench.together == ([[BARE], [DRAFTING]] if turns == "single" else [[BARE, DRAFTING]])


def test_in_slices_one_server_runs_at_a_time(bench: Bench, tmp_path: Path) -> None:
    result = measured(bench, "slices", tmp_path)
    assert sum(len(each.turns) for each in result.rounds) >= 3
    for turn in (turn for each in result.rounds for turn in each.turns[:-1]):
        assert len(turn.bare) >= 3
        assert len(turn.steps) >= 6
    # Bare and drafting alternate; both run while requests are aborted.
    assert StandInServer.up.count(BARE) > len(result.rounds) + 1


def test_requests_read_their_prompts_anew_in_every_round(bench: Bench, tmp_path: Path) -> None:
    measured(bench, "waves", tmp_path)
    bodies = [body for some in bench.servers[DRAFTING].bodies for body in some]
    salts = [body["cache_salt"] for body in bodies]
    assert len(set(salts)) == len(salts)
    assert [body["max_tokens"] for body in bodies[-2:]] == [95, 93]  # up to the maximum length
    assert bench.servers[BARE].bodies[-1][0]["vllm_xargs"] == {ROUND_OPTION: [1, 0, 0]}


def test_an_error_of_the_server_ends_the_measurement(bench: Bench, tmp_path: Path) -> None:
    bench.fail = "The server answered 400"
    with pytest.raises(EngineError, match="answered 400"):
        measured(bench, "waves", tmp_path)


def test_a_server_without_steps_is_an_error(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "STUCK_SECONDS", 0.05)
    monkeypatch.setattr(StandInServer, "resume", lambda _: None)
    with pytest.raises(EngineError, match="no step in 0 s at batch size 2"):
        measured(bench, "waves", tmp_path)
