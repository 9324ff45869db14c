"""Conversations run through a backend turn by turn, and resume where a run was interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from leadout.data.answers import USER_TURN_TEMPERATURE, AnswerQueue, conversations
from leadout.data.chat import Chat
from leadout.data.manifest import DataError, Sampling, SamplingOptions
from leadout.data.prompts import Prompt
from leadout.shards import Sample, ShardWriter, WrittenSamples
from support.fake_engine import FakeEngine, KilledError
from support.models import ROOT

PROMPTS = [
    Prompt("a/0", "a", ("One?",)),
    Prompt("a/1", "a", ("One?", "Two?", "Three?")),
    Prompt("a/2", "a", ("Four?", "Five?")),
    Prompt("self/0", "self", ()),
    Prompt("self/1", "self", ()),
]


class Run:
    """One run of `AnswerQueue` that continues the samples in a file."""

    def __init__(
        self,
        path: Path,
        chat: Chat,
        sampling: Sampling,
        engine: FakeEngine,
        *,
        prompts: list[Prompt] = PROMPTS,
        part: tuple[int, int] = (1, 1),
        max_queued: int = 2,
    ) -> None:
        self.reported: list[Sample] = []
        self.errors: list[DataError] = []
        self.killed = False
        with ShardWriter(path) as writer:
            done = WrittenSamples(path, lambda _: None)
            queue = AnswerQueue(engine, chat, sampling, writer, max_queued, self.errors.append)
            try:
                queue.run(conversations(prompts, sampling, *part), done, self.reported.append)
            except KilledError:
                self.killed = True
        self.skipped, self.shortened, self.failed = queue.skipped, queue.shortened, queue.failed
        self.samples: Mapping[str, Sample] = dict(WrittenSamples(path, lambda _: None))


@pytest.fixture
def whole(tmp_path: Path, chat: Chat, sampling: Callable[..., Sampling]) -> Run:
    return Run(tmp_path / "whole.jsonl", chat, sampling(), FakeEngine())


def test_every_turn_becomes_a_sample(whole: Run) -> None:
    assert sorted(whole.samples) == [
        "a/0#0/0",
        "a/1#0/0",
        "a/1#0/1",
        "a/1#0/2",
        "a/2#0/0",
        "a/2#0/1",
        "self/0#0/0",
        "self/1#0/0",
    ]
    assert {sample.id: sample for sample in whole.reported} == whole.samples
    assert {sample.source for sample in whole.samples.values()} == {"a", "self"}
    assert whole.skipped == 0


def test_later_turns_follow_the_targets_own_answers(whole: Run, chat: Chat) -> None:
    first, second, third = (whole.samples[f"a/1#0/{turn}"] for turn in range(3))
    said = [chat.text(first.response), chat.text(second.response)]
    assert all(len(text) == 3 and text.isalpha() for text in said)
    assert first.prompt == chat.prompt(["One?"])
    assert third.prompt == chat.prompt(["One?", "Two?", "Three?"], said)


def test_for_self_the_target_writes_the_user_turn(
    tmp_path: Path, chat: Chat, sampling: Callable[..., Sampling]
) -> None:
    engine = FakeEngine()
    run = Run(tmp_path / "a.jsonl", chat, sampling(), engine, prompts=PROMPTS[3:])
    by_id = {request.id: request for request in engine.requests}
    assert set(by_id) == {f"self/{n}#0/{which}" for n in range(2) for which in ("user", "0")}
    turn = by_id["self/0#0/user"]
    assert turn.prompt == chat.user_prefix()
    assert turn.temperature == USER_TURN_TEMPERATURE
    assert list(turn.stop_tokens) == [chat.end_of_turn]
    prompts = {tuple(sample.prompt) for sample in run.samples.values()}
    assert len(prompts) == 2  # each its own turn
    for prompt in prompts:
        begin = len(chat.user_prefix())
        assert list(prompt) == chat.prompt([chat.text(prompt[begin : begin + 3])])


def test_the_greedy_share_is_as_requested(
    tmp_path: Path, chat: Chat, sampling: Callable[..., Sampling]
) -> None:
    prompts = [Prompt(f"p/{n}", "p", ("One?",)) for n in range(400)]
    for share in (0.0, 0.25, 1.0):
        path = tmp_path / f"{share}.jsonl"
        run = Run(path, chat, sampling(greedy_share=share), FakeEngine(), prompts=prompts)
        temperatures = [sample.temperature for sample in run.samples.values()]
        assert set(temperatures) <= {0.0, 0.7}
        assert temperatures.count(0.0) / 400 == pytest.approx(share, abs=0.06)


def test_only_one_answer_to_a_prompt_is_greedy(
    tmp_path: Path, chat: Chat, sampling: Callable[..., Sampling]
) -> None:
    settings = sampling(greedy_share=0.25, samples_per_prompt=4)
    engine = FakeEngine()
    run = Run(tmp_path / "a.jsonl", chat, settings, engine, prompts=PROMPTS[:1])
    assert [run.samples[f"a/0#{n}/0"].temperature for n in range(4)] == [0.0, 0.7, 0.7, 0.7]
    assert len({request.seed for request in engine.requests}) == 4
    assert {request.top_p for request in engine.requests if request.temperature == 0.0} == {1.0}


def test_another_seed_gives_other_answers(
    tmp_path: Path, chat: Chat, sampling: Callable[..., Sampling]
) -> None:
    one, same, other = (
        Run(tmp_path / name, chat, sampling(seed=seed, greedy_share=0.0), FakeEngine()).samples
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    assert one == same != other


def test_the_parts_of_a_job_divide_the_samples(
    tmp_path: Path, chat: Chat, sampling: Callable[..., Sampling], whole: Run
) -> None:
    parts = [
        Run(tmp_path / f"{n}.jsonl", chat, sampling(), FakeEngine(), part=(n, 3)).samples
        for n in (1, 2, 3)
    ]
    assert sum(len(part) for part in parts) == len(whole.samples)
    assert parts[0] | parts[1] | parts[2] == whole.samples


def test_a_run_interrupted_anywhere_resumes_to_the_same_samples(
    tmp_path: Path, chat: Chat, sampling: Callable[..., Sampling], whole: Run
) -> None:
    steps = len(whole.samples) + 2  # two user turns
    for dies_after in range(steps):
        path = tmp_path / f"{dies_after}.jsonl"
        assert Run(path, chat, sampling(), FakeEngine(dies_after)).killed
        written = path.read_bytes()
        engine = FakeEngine()
        resumed = Run(path, chat, sampling(), engine)
        assert resumed.samples == whole.samples
        assert path.read_bytes().startswith(written)  # only grows
        # Nothing that was written is requested again; user turns may be.
        assert len(engine.requests) <= steps - len(written.splitlines())


def test_a_run_killed_after_every_step_finishes(
    tmp_path: Path, chat: Chat, sampling: Callable[..., Sampling], whole: Run
) -> None:
    path = tmp_path / "a.jsonl"
    for _ in range(len(whole.samples)):
        run = Run(path, chat, sampling(), FakeEngine(dies_after=2), max_queued=1)
    assert not run.killed
    assert run.samples == whole.samples


def test_the_queue_of_the_engine_is_kept_full_but_bounded(
    tmp_path: Path, chat: Chat, sampling: Callable[..., Sampling]
) -> None:
    engine = FakeEngine()
    Run(tmp_path / "a.jsonl", chat, sampling(), engine, max_queued=3)
    assert engine.max_running == 3


def test_long_conversations_lose_their_oldest_turns_and_are_counted(
    tmp_path: Path, chat: Chat, sampling: Callable[..., Sampling]
) -> None:
    system = {"role": "system", "content": "Short."}
    opening = (system, {"role": "user", "content": "One?"})
    prompts = [Prompt("a/1", "a", (opening, "Two?", "Three?"))]
    plain = Run(tmp_path / "a.jsonl", chat, sampling(), FakeEngine(), prompts=prompts)
    answers = [chat.text(plain.samples[f"a/1#0/{turn}"].response) for turn in range(2)]
    two_turns = chat.prompt([opening, "Two?"], answers)
    settings = sampling(max_length=len(two_turns) + 8 + 2)  # the third turn alone is longer by 2
    path = tmp_path / "b.jsonl"
    run = Run(path, chat, settings, FakeEngine(), prompts=prompts)
    assert run.samples["a/1#0/1"].prompt == two_turns
    second = chat.text(run.samples["a/1#0/1"].response)
    later = (system, {"role": "user", "content": "Two?"})
    assert run.samples["a/1#0/2"].prompt == chat.prompt([later, "Three?"], [second])
    assert (run.shortened, run.skipped, plain.shortened) == (1, 0, 0)
    # A run that has nothing left to do counts the same.
    again = Run(path, chat, settings, FakeEngine(), prompts=prompts)
    assert (again.samples, again.shortened) == (run.samples, 1)


def test_results_of_tools_are_not_cut_from_the_question_before_them(
    tmp_path: Path, chat: Chat, sampling: Callable[..., Sampling]
) -> None:
    call = {"role": "assistant", "content": "call()", "tool_calls": []}
    results = (call, {"role": "tool", "content": "x" * 30})
    prompt = Prompt("a/1", "a", ("Earlier?", "Now?", results))
    path = tmp_path / "a.jsonl"
    whole = Run(path, chat, sampling(), FakeEngine(), prompts=[prompt])
    # The recorded call stands in the prompt, not the answer of the target before it.
    first = chat.text(whole.samples["a/1#0/0"].response)
    expected = chat.prompt(["Earlier?", "Now?", results], [first, "not used"])
    assert whole.samples["a/1#0/2"].prompt == expected
    settings = sampling(max_length=len(expected) + 8 - 1)
    cut = Run(tmp_path / "b.jsonl", chat, settings, FakeEngine(), prompts=[prompt])
    assert cut.samples["a/1#0/2"].prompt == chat.prompt(["Now?", results], ["not used"])


def test_turns_that_are_too_long_alone_are_skipped_counted_and_listed(
    tmp_path: Path, chat: Chat, sampling: Callable[..., Sampling]
) -> None:
    max_length = len(chat.prompt(["One?"])) + 8
    prompts = [*PROMPTS[:2], Prompt("a/9", "a", ("x" * 100,))]
    settings = sampling(max_length=max_length)
    run = Run(tmp_path / "a.jsonl", chat, settings, FakeEngine(), prompts=prompts)
    # "Three?" is longer than "One?" and "Two?".
    assert sorted(run.samples) == ["a/0#0/0", "a/1#0/0", "a/1#0/1"]
    assert (run.skipped, run.shortened) == (2, 1)
    assert sorted(error.id for error in run.errors) == ["a/1#0/2", "a/9#0/0"]
    assert all(f"exceed {max_length}" in error.reason for error in run.errors)
    again = Run(tmp_path / "a.jsonl", chat, settings, FakeEngine(), prompts=prompts)
    assert (again.samples, again.skipped, again.shortened) == (run.samples, 2, 1)
    tighter = sampling(max_length=max_length - 1)
    assert Run(tmp_path / "b.jsonl", chat, tighter, FakeEngine(), prompts=prompts).skipped == 3


def test_a_request_that_the_engine_refuses_does_not_end_the_job(
    tmp_path: Path, chat: Chat, sampling: Callable[..., Sampling], whole: Run
) -> None:
    path = tmp_path / "a.jsonl"
    run = Run(path, chat, sampling(), FakeEngine(refuses="a/1#0/1"))
    assert run.failed == 1
    assert run.errors == [DataError(id="a/1#0/1", reason="refused on demand")]
    assert set(whole.samples) - set(run.samples) == {"a/1#0/1", "a/1#0/2"}
    assert Run(path, chat, sampling(), FakeEngine()).samples == whole.samples


def test_sampling_options_reach_sampled_requests_and_some_reach_all(
    tmp_path: Path, chat: Chat, sampling: Callable[..., Sampling]
) -> None:
    options = SamplingOptions(top_k=20, presence_penalty=0.5, min_tokens=2, stop_token_ids=[7])
    engine = FakeEngine()
    prompts = [Prompt(f"p/{n}", "p", (f"One {n}?",)) for n in range(20)]
    Run(tmp_path / "a.jsonl", chat, sampling(options=options), engine, prompts=prompts)
    for request in engine.requests:
        sampled = {"top_k": 20, "presence_penalty": 0.5} if request.temperature else {}
        assert request.options == {"min_tokens": 2, **sampled}
        assert request.stop_tokens == [7]
    assert {request.temperature for request in engine.requests} == {0.0, 0.7}


def test_an_empty_user_turn_is_skipped_and_counted(
    tmp_path: Path, chat: Chat, sampling: Callable[..., Sampling]
) -> None:
    run = Run(tmp_path / "a.jsonl", chat, sampling(), FakeEngine(silent=True), prompts=PROMPTS[3:])
    assert not run.samples
    assert run.skipped == 2


def test_ten_kills_gave_the_samples_of_an_uninterrupted_run() -> None:
    """The committed result of experiments/data_kill.py, with the real engine."""
    result = json.loads((ROOT / "results" / "data" / "kill.json").read_text())
    assert result["provenance"]["command"].startswith("python scripts/kill_data.py")
    assert result["equal"] is True
    assert result["same_manifest"] is True
    assert result["missing"] == result["different"] == 0
    assert result["samples"] == result["samples_after_kills"] > 500
    kills = result["kills"]
    assert len(kills) == 10
    assert sum(kill["new_samples"] > 0 for kill in kills) >= 5
    assert kills[-1]["samples"] < result["samples"]  # the last kill also came before the end
