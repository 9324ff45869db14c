"""The worker's copy of states, with a fake runner and a fake GPU: no engine runs."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leadout.engine.settings import LEARN, LearnSettings, with_section
from leadout.engine.states_tap import BackgroundCopy, Rows, StatesTap, tap
from leadout.ring.folder import STATES, ring_files
from leadout.ring.memory import RingFileReader
from leadout.ring.records import StatesRecord

WIDTH = 6  # 2 layers of 3 values


@pytest.fixture
def section() -> Iterator[LearnSettings]:
    folder = Path(tempfile.mkdtemp(prefix="leadout-test-", dir="/dev/shm"))
    yield LearnSettings(
        folder=folder,
        rate=1.0,
        max_bytes=1 << 20,
        server_id="0123456789abcdef",
        target="tiny",
        target_fingerprint="f" * 64,
        layer_ids=(0, 1),
        hidden_size=3,
        dtype="float32",
    )
    shutil.rmtree(folder)


def vllm_config(section: LearnSettings) -> SimpleNamespace:
    return SimpleNamespace(
        additional_config=with_section({}, LEARN, section),
        instance_id="test-of-states-tap",
        parallel_config=SimpleNamespace(data_parallel_index=0),
    )


def new_request(name: str, **changes: Any) -> SimpleNamespace:
    usual = {
        "req_id": name,
        "sampling_params": SimpleNamespace(extra_args=None),
        "prompt_token_ids": [1, 2, 3],
        "prompt_embeds": None,
        "mm_features": [],
        "lora_request": None,
    }
    return SimpleNamespace(**usual | changes)


def step(new: list[SimpleNamespace], finished: tuple[str, ...] = ()) -> SimpleNamespace:
    return SimpleNamespace(scheduled_new_reqs=new, finished_req_ids=set(finished))


def records(section: LearnSettings) -> list[StatesRecord]:
    from leadout.engine.served_texts import ring_info

    (path,) = [path for path in ring_files(section.folder) if path.name.startswith(STATES)]
    reader = RingFileReader(path)
    return [StatesRecord.parse(each, ring_info(section)) for each in reader.records()]


class FakeProposer:
    """Stands for vLLM's DFlashProposer."""

    def set_inputs_first_pass(self) -> None:
        pass

    def propose(self, **settings: Any) -> str:
        return "drafts"


class FakeSpeculator:
    """Stands for vLLM's DFlashSpeculator."""

    def _precompute_context_kv(self) -> None:
        pass

    def propose(self, *arguments: Any, **settings: Any) -> str:
        return "drafts"


def propose_on_v1(runner: Any, names: list[str], starts: list[int], rows: torch.Tensor) -> None:
    runner.input_batch = SimpleNamespace(req_ids=names)
    drafts = runner.drafter.propose(
        common_attn_metadata=SimpleNamespace(query_start_loc_cpu=torch.tensor(starts)),
        target_token_ids=torch.arange(10, 10 + len(rows)),
        target_positions=torch.arange(5, 5 + len(rows)),
        target_hidden_states=rows,
    )
    assert drafts == "drafts"


def test_rows_of_chosen_requests_are_written(section: LearnSettings) -> None:
    runner = SimpleNamespace(drafter=FakeProposer())
    states_tap = StatesTap(vllm_config(section), torch.device("cpu"))
    assert tap(runner, states_tap)
    off = SimpleNamespace(extra_args={"leadout_capture": "off"})
    states_tap.begin_step(
        step(
            [
                new_request("a"),
                new_request("opted-out", sampling_params=off),
                new_request("image", mm_features=[object()]),
                new_request("lora", lora_request=object()),
                new_request("embeds", prompt_embeds=object()),
                new_request("b"),
            ]
        )
    )
    rows = torch.randn(9, WIDTH)
    names = ["a", "opted-out", "image", "lora", "embeds", "b"]
    propose_on_v1(runner, names, [0, 2, 3, 4, 5, 6, 8], rows)
    first, second = records(section)
    assert (first.first, first.tokens.tolist()) == (5, [10, 11])
    assert (second.first, second.tokens.tolist()) == (11, [16, 17])
    assert torch.equal(first.states, rows[:2])
    assert torch.equal(second.states, rows[6:8])
    states_tap.begin_step(step([], finished=("a",)))
    propose_on_v1(runner, ["a"], [0, 2], rows[:2])
    assert len(records(section)) == 2
    states_tap.close()
    assert list(ring_files(section.folder)) == []


def test_the_v2_runners_states_are_put_side_by_side(section: LearnSettings) -> None:
    runner = SimpleNamespace(speculator=FakeSpeculator())
    states_tap = StatesTap(vllm_config(section), torch.device("cpu"))
    assert tap(runner, states_tap)
    states_tap.begin_step(step([new_request("a")]))
    layers = [torch.randn(4, 3), torch.randn(4, 3)]
    batch = SimpleNamespace(
        req_ids=["other", "a"],
        query_start_loc_np=[0, 1, 3],
        input_ids=torch.arange(4),
        positions=torch.arange(4),
    )
    for dummy in (True, False):
        assert runner.speculator.propose(batch, {}, {}, None, layers, 1, dummy_run=dummy)
    (record,) = records(section)
    assert torch.equal(record.states, torch.cat(layers, -1)[1:3])
    states_tap.close()


def test_a_long_prompt_becomes_several_records(section: LearnSettings) -> None:
    states_tap = StatesTap(vllm_config(section), torch.device("cpu"))
    states_tap.begin_step(step([new_request("a")]))
    count = 10_000  # more than an eighth of the ring
    rows = torch.randn(count, WIDTH)
    states_tap.add(["a"], [0, count], torch.arange(count), torch.arange(count), [rows])
    found = records(section)
    assert len(found) > 1
    assert torch.equal(torch.cat([each.states for each in found]), rows)
    assert [each.first for each in found[1:]] == [
        each.first + len(each.tokens) for each in found[:-1]
    ]
    states_tap.close()


def test_an_error_switches_the_part_off_and_drafting_goes_on(
    section: LearnSettings, leadout_log: list[str]
) -> None:
    runner = SimpleNamespace(drafter=FakeProposer())
    states_tap = StatesTap(vllm_config(section), torch.device("cpu"))
    tap(runner, states_tap)
    states_tap.begin_step(step([new_request("a")]))
    for _ in range(2):
        propose_on_v1(runner, ["a"], [0, 2], torch.randn(2, WIDTH + 1))
    assert len(leadout_log) == 1
    assert "expected 6" in leadout_log[0]
    assert list(ring_files(section.folder)) == []


def test_a_ring_that_cannot_be_used_does_not_end_the_server(
    section: LearnSettings, leadout_log: list[str]
) -> None:
    section.folder.chmod(0o755)
    states_tap = StatesTap(vllm_config(section), torch.device("cpu"))
    states_tap.begin_step(step([new_request("a")]))
    states_tap.add(["a"], [0, 1], torch.ones(1), torch.ones(1), [torch.ones(1, WIDTH)])
    assert "chmod 700" in leadout_log[0]
    section.folder.chmod(0o700)


class FakeGpu:
    """Stands for `torch.cuda`, and notes in which order streams and events are used.

    Events end when `may_finish` is set, and nothing may wait for one in the thread that runs the
    model. Copies happen at once, so what a wrong order would do to the data is not shown here.
    """

    def __init__(self) -> None:
        self.current = "vllm"
        self.order: list[str] = []
        self.may_finish = threading.Event()
        self.model_thread = threading.current_thread()
        gpu = self

        class Stream:
            def wait_event(self, event: Any) -> None:
                gpu.order.append(f"{gpu.current} waits for {event.recorded_on}")

        class Event:
            recorded_on = ""

            def __init__(self, blocking: bool = False) -> None:
                self.blocking = blocking

            def record(self) -> None:
                self.recorded_on = gpu.current

            def synchronize(self) -> None:
                assert threading.current_thread() is not gpu.model_thread
                assert self.blocking  # else the thread would use a core while it waits
                assert self.recorded_on == "copies"
                gpu.may_finish.wait()

        self.Stream, self.Event = Stream, Event

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.current = "copies"
        yield
        self.current = "vllm"


def rows_of(value: float, count: int = 4) -> Rows:
    return Rows(
        [(b"k" * 16, count)],
        torch.arange(count),
        torch.arange(count),
        torch.full((count, WIDTH), value),
    )


@pytest.fixture
def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of this machine's memory have no streams."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)


@pytest.mark.usefixtures("without_streams")
def test_a_gpu_never_waits_and_too_much_is_dropped() -> None:
    gpu, written = FakeGpu(), []
    limit = 2 * rows_of(0.0).bytes
    copy = BackgroundCopy(gpu, written.append, max_bytes=limit, pin_memory=False)
    assert copy.start(rows_of(1.0))
    assert copy.start(rows_of(2.0))
    assert not copy.start(rows_of(3.0))  # the copies have not ended: dropped, not waited for
    assert written == []
    assert gpu.order == ["copies waits for vllm"] * 2
    gpu.may_finish.set()
    copy.close()
    assert [float(rows.states[0, 0]) for rows in written] == [1.0, 2.0]


def test_a_request_of_which_a_step_was_dropped_is_left_alone(section: LearnSettings) -> None:
    runner = SimpleNamespace(drafter=FakeProposer())
    states_tap = StatesTap(vllm_config(section), torch.device("cpu"))
    assert tap(runner, states_tap)
    offered: list[list[int]] = []

    class Full:
        """Stands for copies that take longer than the steps."""

        def start(self, rows: Rows) -> bool:
            offered.append([count for _, count in rows.requests])
            return False

        def close(self) -> None:
            pass

    states_tap._background = Full()  # type: ignore[assignment]
    states_tap.begin_step(step([new_request("a")]))
    propose_on_v1(runner, ["a"], [0, 2], torch.randn(2, WIDTH))
    states_tap.begin_step(step([new_request("b")]))
    propose_on_v1(runner, ["a", "b"], [0, 2, 5], torch.randn(5, WIDTH))
    propose_on_v1(runner, ["a", "b"], [0, 2, 5], torch.randn(5, WIDTH))
    assert offered == [[2], [3]]  # the first of each, and nothing of it afterwards


@pytest.mark.usefixtures("without_streams")
def test_a_step_that_is_larger_than_the_limit_is_copied_alone() -> None:
    """A chunk of a long prompt: it would never be learnt otherwise."""
    gpu, written = FakeGpu(), []
    limit = rows_of(0.0).bytes - 1
    copy = BackgroundCopy(gpu, written.append, max_bytes=limit, pin_memory=False)
    assert copy.start(rows_of(1.0))
    assert not copy.start(rows_of(2.0))
    gpu.may_finish.set()
    copy.close()
    assert [float(rows.states[0, 0]) for rows in written] == [1.0]


@pytest.mark.usefixtures("without_streams")
def test_after_the_copies_there_is_room_again() -> None:
    gpu, written = FakeGpu(), []
    gpu.may_finish.set()
    one = rows_of(0.0).bytes
    copy = BackgroundCopy(gpu, written.append, max_bytes=one, pin_memory=False)
    started = 0
    while started < 5:
        started += copy.start(rows_of(float(started)))
    copy.close()
    assert [float(rows.states[0, 0]) for rows in written] == [0.0, 1.0, 2.0, 3.0, 4.0]
