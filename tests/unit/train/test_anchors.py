"""Anchors are new at every step, the same for the same step, and only where an answer follows."""

from __future__ import annotations

import torch

from leadout.evaluate.blocks import TrainingSequence, batch, candidates, draw_anchors, make_blocks


def sequence(prompt: int, answer: int, name: str = "a") -> TrainingSequence:
    return TrainingSequence(name, "s", torch.arange(prompt + answer) + 100, prompt)


def test_anchors_depend_on_seed_step_and_sample_alone() -> None:
    def draw(seed: int = 0, step: int = 0, name: str = "a") -> list[int]:
        return draw_anchors(10, 200, 8, seed, step, name).tolist()

    torch.manual_seed(1)
    first = draw()
    torch.manual_seed(2)  # the global generator is somewhere else after an interruption
    assert draw() == first
    others = [draw(seed=1), draw(step=1), draw(name="b")]
    assert all(other != first for other in others)
    assert len({tuple(draw(step=step)) for step in range(50)}) == 50


def test_anchors_are_ascending_distinct_and_cover_every_place_in_time() -> None:
    seen = set()
    for step in range(200):
        drawn = draw_anchors(5, 20, 4, 0, step, "a").tolist()
        assert drawn == sorted(set(drawn))
        assert len(drawn) == 4
        seen |= set(drawn)
    # From the first answer token to the last but one: something has to follow.
    assert seen == set(range(5, 19))


def test_a_short_answer_gives_as_many_anchors_as_it_has() -> None:
    assert draw_anchors(5, 8, 16, 0, 0, "a").tolist() == [5, 6]
    assert draw_anchors(5, 6, 16, 0, 0, "a").tolist() == []
    assert candidates(5, 2).tolist() == []


def test_a_slot_counts_up_to_the_end_of_the_answer() -> None:
    tokens, _, supervised = batch([sequence(2, 6), sequence(3, 2)])
    blocks = make_blocks([torch.tensor([2, 5]), torch.tensor([3])], tokens, supervised, 4, 3)
    assert blocks.anchors.tolist() == [[2, 5, 0], [3, 0, 0]]
    assert blocks.labels[0, 0].tolist() == [103, 104, 105]  # the token at each slot's own position
    assert blocks.counted[0].tolist() == [
        [True, True, True],
        [True, True, False],  # positions 6, 7, and 8 beyond the end
        [False, False, False],
    ]
    # The second row ends at position 4; the padding after it is no answer.
    assert blocks.counted[1, 0].tolist() == [True, False, False]
    assert not blocks.counted[1, 1:].any()


def test_nothing_counts_after_the_first_token_that_is_no_answer() -> None:
    tokens = torch.arange(10)[None]
    supervised = torch.ones(1, 10, dtype=torch.bool)
    supervised[0, 4] = False
    blocks = make_blocks([torch.tensor([2])], tokens, supervised, 6, 1)
    assert blocks.counted[0, 0].tolist() == [True, False, False, False, False]
