"""The gradient of a step: the same in passes of any size, and close to it with few candidates."""

from __future__ import annotations

import pytest
import torch
from small_runs import MakeRun, small_config
from torch import Tensor

from leadout.train.loop import StepResult, passes, sequences_of_step
from leadout.train.run import Run
from support.models import TINY_VOCAB


def gradients(run: Run, step: int = 0) -> tuple[StepResult, dict[str, Tensor]]:
    run.weights.clear_gradients()
    batch = [run.fetch(i) for i in sequences_of_step(run.corpus.split.train, 0, run.config)]
    result = run.gradient.accumulate(batch, step, 20.0)
    found = {name: p.grad for name, p in run.weights.masters.items() if p.grad is not None}
    assert len(found) == len(run.weights.masters)
    return result, found


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, gradient in wanted.items():
        largest = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, atol=1e-5 * largest, rtol=1e-4)


def test_passes_of_any_size_add_up_to_the_same(make_run: MakeRun) -> None:
    single, wanted = gradients(make_run(micro_tokens=1))
    whole, found = gradients(make_run(micro_tokens=10**6))
    assert_same(found, wanted)
    assert whole.loss == pytest.approx(single.loss, rel=1e-5)
    assert whole.blocks == single.blocks == 20
    assert torch.equal(whole.hits, single.hits)


def test_every_step_has_anchors_of_its_own(make_run: MakeRun) -> None:
    run = make_run()
    first, again, other = (gradients(run, step)[0].loss for step in (0, 0, 1))
    assert first == again != other


def test_rounded_weights_have_the_gradients_of_whole_ones(make_run: MakeRun) -> None:
    fine, wanted = gradients(make_run())
    rough, found = gradients(make_run(precision="bfloat16"))
    assert rough.loss == pytest.approx(fine.loss, rel=0.02)
    for name, gradient in wanted.items():
        assert found[name].dtype == torch.float32
        assert torch.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0) > 0.97


def test_candidates_always_contain_the_labels(make_run: MakeRun) -> None:
    run = make_run(candidates=3)
    labels = torch.tensor([[0, 319], [17, 250]])
    scores, places = run.gradient._scores(labels, step=0)
    assert torch.equal(scores.head[places], run.borrowed.head[labels])
    counts = run.corpus.token_counts
    frequent = run.borrowed.head[counts.topk(3).indices]
    assert all((scores.head == row).all(-1).any() for row in frequent)


def test_all_candidates_are_the_vocabulary(make_run: MakeRun) -> None:
    wanted = gradients(make_run())
    found = gradients(make_run(candidates=TINY_VOCAB))
    assert found[0].loss == wanted[0].loss
    few = gradients(make_run(candidates=10))
    assert few[0].loss < wanted[0].loss  # fewer wrong answers to choose from
    assert few[0].loss == pytest.approx(wanted[0].loss, rel=0.5)


def test_passes_keep_to_the_memory_and_lose_nothing(make_run: MakeRun) -> None:
    run = make_run()
    items = [run.fetch(index) for index in run.corpus.split.train]
    config = small_config(micro_tokens=400)
    parts = list(passes(items, config))
    per_block = config.anchors * config.block_size
    for part in parts:
        longest = max(len(sequence) for _, sequence in part)
        assert len(part) * (longest + per_block) <= 400
    assert sorted(index for part in parts for index, _ in part) == sorted(run.corpus.split.train)
    assert list(passes([], config)) == []
