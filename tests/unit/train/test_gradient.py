"""Gradients do not depend on how a step is divided: passes, packing, recomputation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from leadout.dflash.target import Observation
from leadout.evaluate import hidden_states
from leadout.evaluate.acceptance import accepted_drafts
from leadout.evaluate.blocks import BlockForward, TrainingSequence, draw_anchors
from leadout.train.config import TrainError
from leadout.train.gradient import (
    Gradient,
    StepResult,
    anchors_of,
    block_size_at,
    blocks_per_sequence,
    passes,
)
from leadout.train.loop import sequences_of_step
from leadout.train.run import Run
from support.models import TINY_VOCAB
from support.small_runs import MakeRun, small_config

CPU = torch.device("cpu")


def gradients(run: Run, step: int = 0) -> tuple[StepResult, dict[str, Tensor]]:
    run.weights.clear_gradients()
    batch = [run.fetch(i) for i in sequences_of_step(run.corpus.split.train, 0, run.config)]
    result = run.gradient.accumulate(batch, step, 20.0)
    found = {name: p.grad for name, p in run.weights.masters.items() if p.grad is not None}
    assert len(found) == len(run.weights.masters)
    return result, found


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        largest = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, atol=1e-5 * largest, rtol=1e-4)


def test_gradients_do_not_depend_on_the_size_of_passes(make_run: MakeRun) -> None:
    single, expected = gradients(make_run(micro_tokens=1))
    whole, found = gradients(make_run(micro_tokens=10**6))
    assert_same_gradients(found, expected)
    assert whole.loss == pytest.approx(single.loss, rel=1e-5)
    assert whole.blocks == single.blocks == 20
    assert torch.equal(whole.hits, single.hits)


def test_every_step_has_its_own_anchors(make_run: MakeRun) -> None:
    run = make_run()
    first, again, other = (gradients(run, step)[0].loss for step in (0, 0, 1))
    assert first == again != other


def test_bfloat16_gradients_are_close_to_float32_gradients(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "_has_bfloat16", lambda: True)  # emulated is the same
    fine, expected = gradients(make_run())
    rough, found = gradients(make_run(precision="bfloat16"))
    assert rough.loss == pytest.approx(fine.loss, rel=0.02)
    for name, gradient in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0) > 0.97


@pytest.mark.parametrize("states", ["compute", "disk"])
def test_processors_without_bfloat16_compute_in_float32(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, states: str
) -> None:
    monkeypatch.setattr(hidden_states, "_has_bfloat16", lambda: False)
    run = make_run(precision="bfloat16", states=states)
    assert {parameter.dtype for parameter in run.drafter.parameters()} == {torch.float32}
    fine, expected = gradients(make_run("fine", states="compute"))
    found, same = gradients(run)
    if states == "compute":
        assert_same_gradients(same, expected)
    else:  # kept in bfloat16, in half the space
        assert run.source.observe([run.fetch(0)]).states.dtype == torch.bfloat16
        assert found.loss == pytest.approx(fine.loss, rel=0.01)
        assert found.loss != fine.loss


def test_candidates_always_contain_the_labels(make_run: MakeRun) -> None:
    run = make_run(candidates=3)
    labels = torch.tensor([[0, 319], [17, 250]])
    head, places = run.gradient._candidates(labels, step=0)
    assert torch.equal(head[places], run.target_weights.head[labels])
    counts = run.corpus.token_counts
    frequent = run.target_weights.head[counts.topk(3).indices]
    assert all((head == row).all(-1).any() for row in frequent)


def test_as_many_candidates_as_tokens_is_the_whole_vocabulary(make_run: MakeRun) -> None:
    expected = gradients(make_run())
    found = gradients(make_run(candidates=TINY_VOCAB))
    assert found[0].loss == expected[0].loss
    few = gradients(make_run(candidates=10))
    assert few[0].loss < expected[0].loss  # fewer wrong answers to choose from
    assert few[0].loss == pytest.approx(expected[0].loss, rel=0.5)


def test_passes_stay_within_the_token_limit_and_cover_all_sequences(make_run: MakeRun) -> None:
    run = make_run()
    items = [run.fetch(index) for index in run.corpus.split.train]
    config = small_config(micro_tokens=400)
    parts = list(passes(items, config, CPU))
    per_block = config.anchors * config.block_size
    for part in parts:
        longest = max(len(sequence) for _, sequence in part)
        assert len(part) * (longest + per_block) <= 400
    assert sorted(index for part in parts for index, _ in part) == sorted(run.corpus.split.train)
    assert list(passes([], config, CPU)) == []


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("distillation", [0.0, 0.5])
def test_packed_sequences_have_the_loss_and_gradients_of_padded_ones(
    make_run: MakeRun, window: int | None, distillation: float
) -> None:
    settings = {"micro_tokens": 400, "window": window, "distillation": distillation}
    padded, expected = gradients(make_run(packing=False, **settings))
    packed, found = gradients(make_run(packing=True, **settings))
    assert packed.loss == pytest.approx(padded.loss, rel=1e-5)
    assert packed.blocks == padded.blocks
    assert torch.equal(packed.hits, padded.hits)
    assert_same_gradients(found, expected)


def test_a_pass_of_the_packing_test_has_several_sequences(make_run: MakeRun) -> None:
    run = make_run(micro_tokens=400)
    items = [run.fetch(i) for i in sequences_of_step(run.corpus.split.train, 0, run.config)]
    lengths = [{len(sequence) for _, sequence in part} for part in passes(items, run.config, CPU)]
    assert any(len(different) > 1 for different in lengths), "nothing is padded"


def test_recomputed_layers_have_the_same_gradients(make_run: MakeRun) -> None:
    expected, kept = gradients(make_run())
    run = make_run(recompute=True)
    calls: list[int] = []
    for layer in run.drafter.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    found, recomputed = gradients(run)
    assert found.loss == expected.loss
    assert_same_gradients(recomputed, kept)
    items = [run.fetch(i) for i in sequences_of_step(run.corpus.split.train, 0, run.config)]
    count = len(list(passes(items, run.config, CPU)))
    assert len(calls) == 2 * 2 * count  # each of 2 layers twice in a pass


def test_anchors_grow_with_the_answer_within_limits() -> None:
    fixed = small_config(anchors=4)
    scaled = small_config(anchors=4, anchors_per_token=0.25)
    assert [anchors_of(answer, fixed) for answer in (2, 100, 10_000)] == [4, 4, 4]
    assert [anchors_of(answer, scaled) for answer in (2, 100, 10_000)] == [8, 25, 512]
    assert blocks_per_sequence([2, 100, 10_000], fixed) == 4
    assert blocks_per_sequence([2, 100, 10_000], scaled) == pytest.approx((8 + 25 + 512) / 3)


def test_longer_answers_have_more_blocks(make_run: MakeRun) -> None:
    run = make_run(anchors_per_token=0.5)
    answers = [run.corpus.answers[index] for index in run.corpus.split.train]
    assert run.blocks_per_step == pytest.approx(
        run.config.batch_sequences * sum(max(8, round(a / 2)) for a in answers) / len(answers)
    )
    result, _ = gradients(run)
    indices = sequences_of_step(run.corpus.split.train, 0, run.config)
    expected = sum(
        min(max(8, round(run.corpus.answers[i] / 2)), run.corpus.answers[i] - 1) for i in indices
    )
    assert result.blocks == expected


def test_passes_hold_fewer_tokens_on_processors_than_on_accelerators(make_run: MakeRun) -> None:
    run = make_run(micro_tokens=None, anchors=64)
    items = [run.fetch(index) for index in run.corpus.split.train]
    on_cpu, on_gpu = (
        list(passes(items, run.config, torch.device(kind))) for kind in ("cpu", "cuda")
    )
    assert len(on_cpu) > len(on_gpu)
    longest = max(len(part) for part in on_cpu)
    assert longest * 64 * run.config.block_size <= 2560


def record_anchors(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[int]]]:
    """The anchors of each sequence, of every call that computes blocks on it."""
    seen: dict[str, list[list[int]]] = {}
    compute = Gradient._loss_at

    def recording(
        self: Gradient,
        anchors: list[Tensor],
        sequences: Sequence[TrainingSequence],
        observed: Observation,
        step: int,
        denominator: float,
    ) -> tuple[float, Tensor]:
        for chosen, sequence in zip(anchors, sequences, strict=True):
            seen.setdefault(sequence.name, []).append(chosen.tolist())
        return compute(self, anchors, sequences, observed, step, denominator)

    monkeypatch.setattr(Gradient, "_loss_at", recording)
    return seen


@pytest.mark.parametrize("packing", [False, True])
def test_half_of_the_blocks_start_where_the_others_end(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, packing: bool
) -> None:
    run = make_run(
        walk_share=0.5, anchors=8, packing=packing, micro_tokens=400, learning_rate=0.01, epochs=9
    )
    run.train(lambda _: None)  # some drafts are accepted
    items = [run.fetch(i) for i in sequences_of_step(run.corpus.split.train, 3, run.config)]
    size = run.config.block_size
    forward = BlockForward(run.drafter, run.target_weights.embedding)
    drafts = accepted_drafts(forward, run.draft_head, run.source, items, size)
    seen = record_anchors(monkeypatch)
    result = run.gradient.accumulate(items, 3, 1.0)
    followed = 0
    for (_, sequence), counted in zip(items, drafts, strict=True):
        first, after = seen[sequence.name]
        start, length = sequence.prompt_length, len(sequence)
        assert first == draw_anchors(start, length, 4, 0, 3, sequence.name).tolist()
        assert len(first) + len(after) == min(8, length - 1 - start)
        counts = counted.counts.tolist()
        for anchor in first:  # near the end of an answer the counts are not known
            if anchor - start < len(counts):
                end = anchor + counts[anchor - start] + 1
                assert end in first + after or end > length - 2
                followed += counts[anchor - start] > 0
    assert followed > 3
    assert result.blocks == sum(len(each) for lists in seen.values() for each in lists)


def test_without_a_walk_all_blocks_are_drawn_at_once(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record_anchors(monkeypatch)
    gradients(make_run())
    assert all(len(lists) == 1 for lists in seen.values())


def test_a_walk_cannot_be_sharded(make_run: MakeRun) -> None:
    with pytest.raises(TrainError, match="--sharded cannot be combined with --walk-share"):
        make_run(sharded=True, walk_share=0.5)


def test_a_run_starts_with_shorter_blocks() -> None:
    config = small_config(block_size=8, first_block_size=5)
    assert [block_size_at(step, 10, config) for step in range(10)] == [5] * 7 + [8] * 3
    half = small_config(block_size=8, first_block_size=3, first_block_share=0.5)
    assert [block_size_at(step, 4, half) for step in range(4)] == [3, 3, 8, 8]
    assert block_size_at(0, 10, small_config(block_size=8)) == 8


def test_steps_with_shorter_blocks_train_the_first_slots_only(make_run: MakeRun) -> None:
    run = make_run(first_block_size=3, epochs=4.0)
    short, _ = gradients(run, 0)
    whole, _ = gradients(run, run.steps - 1)
    assert short.blocks == whole.blocks
    assert whole.hits.shape == short.hits.shape == (4,)
    assert short.hits[2:].tolist() == [0, 0]
    # As a run with that size throughout.
    expected, gradient = gradients(make_run(block_size=3, epochs=4.0), 0)
    assert short.loss == pytest.approx(expected.loss, rel=1e-5)
    assert_same_gradients(gradients(run, 0)[1], gradient)


@pytest.mark.parametrize("packing", [False, True])
def test_runs_with_shorter_blocks_and_walks_continue_exactly(
    make_run: MakeRun, packing: bool
) -> None:
    settings = {"first_block_size": 3, "walk_share": 0.5, "epochs": 2.0, "packing": packing}
    whole = make_run("whole", **settings)
    whole.train(lambda _: None)
    part = make_run("part", **settings)

    class StoppedError(Exception):
        pass

    def stop(record: object) -> None:
        if getattr(record, "step", 0) == 5:
            raise StoppedError

    with pytest.raises(StoppedError):
        part.train(stop)
    again = make_run("part", **settings)
    again.train(lambda _: None)
    for name, weight in whole.weights.named().items():
        torch.testing.assert_close(again.weights.named()[name], weight)
