"""Several drafters share one pass of the target over each text."""

from __future__ import annotations

import pytest
import torch

from leadout.dflash.target import Target
from leadout.evaluate.blocks import TrainingSequence
from leadout.evaluate.compare import SharedStates
from leadout.evaluate.hidden_states import Indexed
from support.models import tiny_llama


def text(number: int) -> Indexed:
    return number, TrainingSequence(str(number), "set", torch.arange(5, 20) + number, 4)


@pytest.mark.parametrize("keep_all", [True, False])
def test_taps_are_those_of_a_pass_for_each_drafter(keep_all: bool) -> None:
    model = tiny_llama()
    shared = SharedStates(model, [0, 1, 2, 3], keep_all=keep_all)
    for number in (0, 1, 0):
        item = text(number)
        tokens = item[1].tokens[None]
        for taps in ((0, 2), (3, 1), (1, 2, 3)):
            own = Target(model, taps).observe(tokens)
            found = shared.tapped_at(taps).observe([item])
            torch.testing.assert_close(found.states, own.states)
            torch.testing.assert_close(found.final, own.final)
    normed = shared.tapped_at((0, 3), normed_last_tap=True).observe([text(0)])
    width = normed.final.shape[-1]
    assert torch.equal(normed.states[..., -width:], normed.final)


@pytest.mark.parametrize(("keep_all", "passes"), [(True, 2), (False, 3)])
def test_the_target_reads_a_text_once_while_its_states_are_kept(
    keep_all: bool, passes: int
) -> None:
    model = tiny_llama()
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    shared = SharedStates(model, [1, 2], keep_all=keep_all)
    for number in (0, 0, 1, 1, 0):
        shared.tapped_at((1,)).observe([text(number)])
    assert len(calls) == passes
